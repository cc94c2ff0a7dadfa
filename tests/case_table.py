"""Tables of cases that contract tests run in one job of real processes, and results compared tensor by tensor."""

from __future__ import annotations

import abc
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.communicator import Communicator
from lockstep.testing.failures import RankFailed, RankTimeout
from lockstep.testing.worlds import run_processes

LIMIT_S = 150.0  # for all cases of a table at one world size, on a machine that does other things too


class CaseTable(abc.ABC):
    """The cases of one test module, which calls them CASES. A case has `worlds`; all else is the subclass's."""

    def __init__(self, module: str, timeout_s: float = LIMIT_S) -> None:
        self.module = module
        self.timeout_s = timeout_s
        self.by_name: dict[str, Any] = {}
        self._asked: dict[int, list[str]] = {}
        self._outcomes: dict[int, dict[str, str | None]] = {}

    @abc.abstractmethod
    def shared_memory(self, world_size: int) -> str:
        """ "on" or "off": what the ranks of a world talk through."""

    @abc.abstractmethod
    def run(self, comm: Communicator, name: str) -> str | None:
        """One case on all its sides, on one rank; what differs. A text that begins with "Traceback" ends the job."""

    def parameters(self) -> list[tuple[str, int]]:
        """(name, world size) of every test."""
        return [(name, world) for name, case in self.by_name.items() for world in case.worlds]

    def ask_for(self, name: str, world_size: int) -> None:
        """This session has a test of the case."""
        self._asked.setdefault(world_size, []).append(name)

    def check(self, name: str, world_size: int) -> None:
        """Fail the test with what went wrong in one case; the first one runs all that were asked for in its world."""
        outcome = self._outcome(name, world_size)
        if outcome is not None:
            pytest.fail(outcome, pytrace=False)

    def _outcome(self, name: str, world_size: int) -> str | None:
        if world_size not in self._outcomes:
            names = self._asked[world_size]
            try:
                env = {"LOCKSTEP_SHM": self.shared_memory(world_size)}
                answers = run_processes(world_size, run_cases, self.module, names, timeout_s=self.timeout_s, env=env)
            except (RankFailed, RankTimeout) as error:
                self._outcomes[world_size] = dict.fromkeys(names, str(error))
            else:
                self._outcomes[world_size] = {name: _together(answers, name) for name in names}
        return self._outcomes[world_size][name]


def _together(answers: list[dict[str, str | None]], name: str) -> str | None:
    return "\n".join(f"rank {rank}: {answer[name]}" for rank, answer in enumerate(answers) if answer[name]) or None


def run_cases(comm: Communicator, module: str, names: list[str]) -> dict[str, str | None]:
    """On one rank: each case on its sides, and what differs."""
    cases: CaseTable = importlib.import_module(module).CASES
    answers: dict[str, str | None] = dict.fromkeys(names, "was not run, because a case before it failed")
    for name in names:
        answers[name] = cases.run(comm, name)
        everyone: list[Any] = [None] * comm.world_size
        dist.all_gather_object(everyone, not (answers[name] or "").startswith("Traceback"))
        if not all(everyone):
            break  # ranks may stand at different collectives
    return answers


def first_difference(left: Any, right: Any, compare: Callable[[Tensor, Tensor], str | None], path: str) -> str | None:
    """Where two nested results differ first, in words; tensors of equal dtype and shape, and finite, by `compare`."""
    if isinstance(left, dict) and isinstance(right, dict):
        if list(left) != list(right):
            return f"{path}: keys {list(left)} against {list(right)}"
        pairs = [(f"{path}.{key}", left[key], right[key]) for key in left]
    elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        if len(left) != len(right):
            return f"{path}: {len(left)} items against {len(right)}: {left!r} against {right!r}"[:1000]
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(left, right, strict=True))]
    elif isinstance(left, Tensor) and isinstance(right, Tensor):
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            return f"{path}: {left.dtype} {list(left.shape)} against {right.dtype} {list(right.shape)}"
        if not left.isfinite().all():
            return f"{path}: is not finite"
        found = None if left.equal(right) else compare(left, right)
        return found and f"{path}: {found}"
    else:
        return None if left == right else f"{path}: {left!r:.300} against {right!r:.300}"
    return next((found for name, a, b in pairs if (found := first_difference(a, b, compare, name))), None)
