"""What DistributedDataParallel says to the other ranks, in which order, and when: the text beside this file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.comm.communicator import Communicator
from lockstep.comm.op import CommOp, Work, describe
from lockstep.comm.transport import Transport, TransportLayer
from lockstep.testing.worlds import run_threads

GOLDEN = Path(__file__).with_name("ddp.txt")


class Recorder(TransportLayer):
    """Writes down every operation."""

    def __init__(self, inner: Transport, lines: list[str]) -> None:
        super().__init__(inner)
        self.lines = lines

    def submit(self, op: CommOp) -> Work:
        self.lines.append(describe(op))
        return self.inner.submit(op)

    def over(self, inner: Transport) -> Recorder:
        return Recorder(inner, self.lines)


class Model(nn.Module):
    """Three layers, a buffer, a parameter that rank 1 does not use, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2)
        self.sometimes = nn.Parameter(torch.ones(2))
        self.never = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, use: bool) -> Tensor:
        y = self.last(self.norm(self.first(x)).relu())
        return y * self.sometimes if use else y


def trace(comm: Communicator, users: tuple[int, ...]) -> list[str]:
    """Rank r uses the parameter `sometimes` where r is one of `users`."""
    lines: list[str] = []
    use = comm.rank in users
    with torch.random.fork_rng():
        model = Model()
    ddp = lockstep.DistributedDataParallel(
        model, process_group=Communicator(Recorder(comm.transport, lines)), bucket_cap_mb_list=[32 / 2**20, 64 / 2**20]
    )
    for name, param in model.named_parameters():
        param.register_hook(lambda grad, name=name: lines.append(f"gradient of {name}"))
    for step in range(3):
        lines.append(f"--- step {step}")
        out = ddp(torch.randn(3, 4), use)
        lines.append("backward")
        out.sum().backward()
    lines.append("--- step 3, first without synchronisation, then with")
    with ddp.no_sync():
        ddp(torch.randn(3, 4), use).sum().backward()
    ddp(torch.randn(3, 4), use).sum().backward()
    lines.append("--- evaluation")
    ddp.eval()
    with torch.no_grad():
        ddp(torch.randn(3, 4), True)
    return lines


@pytest.fixture(scope="module")
def traces() -> list[list[str]]:
    return run_threads(2, trace, (0,))


def test_the_trace_is_the_golden_one(traces: list[list[str]], request: pytest.FixtureRequest) -> None:
    """`pytest tests/golden/test_ddp_trace.py --rewrite-golden` writes it anew; then look at the diff."""
    text = "".join(f"rank {rank}\n" + "".join(f"  {line}\n" for line in lines) for rank, lines in enumerate(traces))
    if request.config.getoption("--rewrite-golden"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_all_ranks_say_the_same_in_the_same_order(traces: list[list[str]]) -> None:
    said = [[line for line in lines if "(seq" in line] for lines in traces]
    assert said[0] == said[1]


def test_communication_begins_while_backward_computes() -> None:
    """From the second step on the first bucket leaves before the last gradient is there."""
    for lines in run_threads(2, trace, (0, 1)):
        for step in (1, 2):
            start = lines.index(f"--- step {step}")
            part = lines[start : next(i for i in range(start + 1, len(lines)) if lines[i].startswith("---"))]
            first_bucket = next(i for i, line in enumerate(part) if "'bucket0'" in line)
            last_gradient = max(i for i, line in enumerate(part) if line.startswith("gradient"))
            assert first_bucket < last_gradient
