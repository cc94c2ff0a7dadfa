"""What fully_shard says to the other ranks, in which order, and when: the text beside this file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.comm.communicator import Communicator
from lockstep.comm.op import CommOp, Work, describe
from lockstep.comm.transport import Transport, TransportLayer
from lockstep.parallel.shard_context import context_of, unit_of
from lockstep.testing.worlds import run_threads

GOLDEN = Path(__file__).with_name("shard.txt")
UNITS = ("first", "sometimes", "last")


class Recorder(TransportLayer):
    """Writes down every operation."""

    def __init__(self, inner: Transport, lines: list[str], name: str = "") -> None:
        super().__init__(inner)
        self.lines = lines
        self.group = name

    def submit(self, op: CommOp) -> Work:
        self.lines.append(self.group + describe(op).replace(f"seq {op.seq}, ", ""))
        return self.inner.submit(op)

    def over(self, inner: Transport) -> Recorder:
        return Recorder(inner, self.lines, f"in {list(inner.global_ranks)}: ")


class Model(nn.Module):
    """Three units and a parameter of the root; one unit is used by those who are told so."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.sometimes = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, use: bool) -> Tensor:
        y = self.first(x)
        return self.last(self.sometimes(y) if use else y) * self.scale


def trace(
    comm: Communicator,
    whole: Model,
    sharing: bool,
    is_hybrid: bool,
    users: tuple[int, ...],
    reshard_after_forward: int | None = None,
) -> list[str]:
    """Three steps of which the ranks `users` run the unit `sometimes`, accumulation, evaluation."""
    lines: list[str] = []
    recorded = Communicator(Recorder(comm.transport, lines))
    mesh: Any = recorded.mesh(replica=2, shard=-1) if is_hybrid else recorded
    lines.clear()
    model: Any = Model()
    model.load_state_dict(whole.state_dict())
    for name in (*UNITS, ""):
        module = model.get_submodule(name)
        module.register_forward_pre_hook(lambda *_, name=name: lines.append(f"forward of {name or 'the root'}"))
        lockstep.fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward if name else None)
    unit = unit_of(model)
    assert unit is not None
    context_of(unit).wholes.sharing = sharing
    use = comm.rank in users

    def step() -> None:
        out = model(torch.ones(3, 4), use)
        lines.append("backward")
        out.sum().backward()

    for number in range(3):
        lines.append(f"--- step {number}")
        step()
        model.zero_grad()
    lines.append("--- step 3, first without synchronisation, then with")
    with model.no_sync():
        step()
    step()
    lines.append("--- evaluation")
    with torch.no_grad():
        model(torch.ones(3, 4), use)
    return lines


CASES = {
    "gathered, all ranks use all units": (2, False, False, (0, 1)),
    "gathered, one unit is used by rank 0 only": (2, False, False, (0,)),
    "in shared memory, one unit is used by rank 0 only": (2, True, False, (0,)),
    "gathered, 2 x 2 ranks that replicate and shard": (4, False, True, (0, 1, 2, 3)),
    "gathered, 2 of 4 ranks keep parts, one unit is used by rank 0 only": (4, False, False, (0,), 2),
}


@pytest.fixture(scope="module")
def traces() -> dict[str, list[list[str]]]:
    whole = Model()
    return {name: run_threads(world_size, trace, whole, *rest) for name, (world_size, *rest) in CASES.items()}


def test_the_trace_is_the_golden_one(traces: dict[str, list[list[str]]], request: pytest.FixtureRequest) -> None:
    """`pytest tests/golden/test_shard_trace.py --rewrite-golden` writes it anew; then look at the diff.

    Rank 0 speaks for all: what they say to each other is equal.
    """
    text = "".join(f"{name}\n" + "".join(f"  {line}\n" for line in by_rank[0]) for name, by_rank in traces.items())
    if request.config.getoption("--rewrite-golden"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_all_ranks_say_the_same_in_the_same_order(traces: dict[str, list[list[str]]]) -> None:
    for name, by_rank in traces.items():
        said = [[line.split(": ")[-1] for line in lines if "bytes)" in line] for lines in by_rank]
        assert all(lines == said[0] for lines in said), name


def test_a_unit_is_gathered_while_the_one_before_computes(traces: dict[str, list[list[str]]]) -> None:
    """From the second step on, forward and backward."""
    lines = traces["gathered, all ranks use all units"][0]
    step = lines[lines.index("--- step 1") : lines.index("--- step 2")]
    forward, backward = step[: step.index("backward")], step[step.index("backward") :]

    def place(part: list[str], text: str) -> int:
        return next(i for i, line in enumerate(part) if text in line)

    assert place(forward, "gather last.weight") < place(forward, "forward of sometimes")
    assert place(backward, "gather first.weight") < place(backward, "reduce sometimes.weight")
