"""The same case on torch's fully_shard, on ours, and on neither: many cases in one job of real processes."""

from __future__ import annotations

import importlib
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from lockstep.comm.communicator import Communicator
from lockstep.testing.failures import RankFailed, RankTimeout
from lockstep.testing.worlds import run_processes
from shard_sides import Side, difference

Body = Callable[[Side], Any]
# Three ranks go over Gloo, which adds in its own order; the others through shared memory, in ours.
SHARED_MEMORY = {1: "off", 2: "on", 3: "off", 4: "on"}
SAME_ORDER = {"torch": (1, 2), "plain": (1, 2, 4), "one": (1,)}  # where every sum is rounded as ours
TOLERANCE = {"torch": 1e-5, "plain": 1e-5, "one": 1e-6}  # elsewhere, relative to the norm of a tensor


class Case(NamedTuple):
    """`against`: the sides that ours must equal. `tolerance`: in place of TOLERANCE, for the same order too."""

    body: Body
    worlds: tuple[int, ...]
    against: tuple[str, ...]
    tolerance: dict[str, float]


class Cases:
    """The cases of one test module."""

    def __init__(self, module: str, timeout_s: float = 60.0) -> None:
        self.module = module
        self.timeout_s = timeout_s
        self.by_name: dict[str, Case] = {}
        self._outcomes: dict[int, dict[str, str | None]] = {}

    def add(
        self,
        *worlds: int,
        against: str | tuple[str, ...] = ("torch", "plain"),
        tolerance: dict[str, float] | None = None,
    ) -> Callable[[Body], Body]:
        """Register a case: bitwise where both sides add in one order and `tolerance` does not name the other side."""

        def register(body: Body) -> Body:
            sides = (against,) if isinstance(against, str) else against
            self.by_name[body.__name__] = Case(body, worlds or (2,), sides, tolerance or {})
            return body

        return register

    def parameters(self) -> list[tuple[str, int]]:
        """(name, world size) of every test."""
        return [(name, world) for name, case in self.by_name.items() for world in case.worlds]

    def check(self, name: str, world_size: int) -> None:
        """Fail the test with what went wrong in one case; the first question runs all cases of that world size."""
        outcome = self._outcome(name, world_size)
        if outcome is not None:
            pytest.fail(outcome, pytrace=False)

    def _outcome(self, name: str, world_size: int) -> str | None:
        if world_size not in self._outcomes:
            names = [name for name, case in self.by_name.items() if world_size in case.worlds]
            try:
                env = {"LOCKSTEP_SHM": SHARED_MEMORY[world_size]}
                answers = run_processes(world_size, run_cases, self.module, names, timeout_s=self.timeout_s, env=env)
            except (RankFailed, RankTimeout) as error:
                self._outcomes[world_size] = dict.fromkeys(names, str(error))
            else:
                self._outcomes[world_size] = {name: _together(answers, name) for name in names}
        return self._outcomes[world_size][name]


def _together(answers: list[dict[str, str | None]], name: str) -> str | None:
    return "\n".join(f"rank {rank}: {answer[name]}" for rank, answer in enumerate(answers) if answer[name]) or None


def run_cases(comm: Communicator, module: str, names: list[str], subject: str = "ours") -> dict[str, str | None]:
    """On one rank: each case on its sides, and what differs."""
    cases: Cases = importlib.import_module(module).CASES
    answers: dict[str, str | None] = dict.fromkeys(names, "was not run, because a case before it failed")
    for name in names:
        answers[name] = run_case(comm, cases.by_name[name], subject)
        everyone: list[Any] = [None] * comm.world_size
        dist.all_gather_object(everyone, not (answers[name] or "").startswith("Traceback"))
        if not all(everyone):
            break  # ranks may stand at different collectives
    return answers


def run_case(comm: Communicator, case: Case, subject: str = "ours") -> str | None:
    """One case on all its sides. A warning that torch's side does not give is a difference too."""
    against = [kind for kind in case.against if kind != subject]
    results: dict[str, Any] = {}
    warned: dict[str, set[str]] = {}
    for kind in (subject, *against):
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                results[kind] = case.body(Side(kind, comm))
        except Exception:  # noqa: BLE001 - told to the test
            return f"{traceback.format_exc()}on the side {kind!r}"
        warned[kind] = {f"{one.category.__name__}: {one.message}" for one in caught}
    extra = warned[subject] - warned.get("torch", set())
    if extra and "torch" in warned:
        return f"warned: {sorted(extra)[0]}"
    for kind in against:
        usual = None if comm.world_size in SAME_ORDER[kind] else TOLERANCE[kind]
        ours, theirs = results[subject], results[kind]
        if kind == "one":
            ours, theirs = weights(ours), weights(theirs)
        found = difference(ours, theirs, case.tolerance.get(kind, usual))
        if found:
            return f"{subject} against {kind}{found}"
    return None


def weights(result: Any) -> Any:
    """A result without its gradients: roundings that weights of size one do not see are large in a small gradient."""
    if isinstance(result, dict):
        return {key: weights(value) for key, value in result.items() if not str(key).startswith("grad ")}
    return [weights(value) for value in result] if isinstance(result, (list, tuple)) else result
