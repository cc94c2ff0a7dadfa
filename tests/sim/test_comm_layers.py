"""Every operation of a communicator falls through the layers exactly once, also what `split` and objects say."""

from __future__ import annotations

import pathlib

import pytest
import torch

from lockstep.comm.communicator import Communicator
from lockstep.comm.op import CommOp, Work, describe
from lockstep.comm.transport import Transport, TransportLayer
from lockstep.testing.worlds import run_threads

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "communicator.txt"


class Recorder(TransportLayer):
    """Writes down what passes; the layers of sub-groups write into the same list, with the group's ranks before it."""

    def __init__(self, inner: Transport, lines: list[str]) -> None:
        super().__init__(inner)
        self.lines = lines

    def submit(self, op: CommOp) -> Work:
        group = "" if self.global_ranks == (0, 1, 2) else f"group {list(self.global_ranks)}: "
        self.lines.append(group + describe(op))
        self.lines.extend(f"    {describe(part)}" for part in op.parts)
        return self.inner.submit(op)

    def over(self, inner: Transport) -> Recorder:
        return Recorder(inner, self.lines)


def script(comm: Communicator) -> None:
    """One of everything, on three ranks."""
    W, rank = comm.world_size, comm.rank
    right, left = (rank + 1) % W, (rank - 1) % W
    comm.broadcast(torch.ones(3), src=1, label="init.weights")
    comm.reduce(torch.ones(2, 2), dst=2, reduce="max")
    comm.all_reduce(torch.ones(5), "mean", async_op=True, label="bucket0").wait()
    comm.all_reduce(torch.ones(2, dtype=torch.complex64))
    comm.gather(torch.ones(1 + rank), [torch.ones(1 + r) for r in range(W)] if rank == 0 else None)
    comm.all_gather([torch.ones(r) for r in range(W)], torch.ones(rank))
    comm.all_gather_into_tensor(torch.ones(W), torch.ones(1))
    comm.scatter(torch.ones(1), [torch.ones(1)] * W if rank == 1 else None, src=1)
    comm.reduce_scatter(torch.ones(rank), [torch.ones(r) for r in range(W)])
    comm.reduce_scatter_tensor(torch.ones(2), torch.ones(2 * W), "min")
    comm.all_to_all([torch.ones(2)] * W, [torch.ones(2)] * W)
    sending = comm.isend(torch.ones(4).half(), right, tag=3)
    comm.recv(torch.ones(4).half(), left, tag=3)
    sending.wait()
    comm.batch_send_recv([comm.send_op(torch.ones(1), left), comm.recv_op(torch.ones(1), right)])
    comm.barrier()
    comm.broadcast_object({"lr": 0.1} if rank == 0 else None)
    comm.all_gather_object(rank)
    comm.gather_object("x" * rank, dst=1)
    part = comm.split(0 if rank < 2 else None, name="pair")
    if part is not None:
        part.all_reduce(torch.ones(7), label="in the pair")
        nested = part.split(rank)
        assert nested is not None
        nested.barrier()


def trace() -> list[list[str]]:
    def body(comm: Communicator) -> list[str]:
        recorder = Recorder(comm.transport, [])
        script(Communicator(recorder))
        return recorder.lines

    return run_threads(3, body)


def test_the_trace_of_a_script_is_the_golden_one(request: pytest.FixtureRequest) -> None:
    """`pytest tests/sim/test_comm_layers.py --rewrite-golden` writes it anew; then look at the diff."""
    text = "".join(f"rank {rank}\n" + "".join(f"  {line}\n" for line in lines) for rank, lines in enumerate(trace()))
    if request.config.getoption("--rewrite-golden"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_layers_over_layers_see_the_same_once() -> None:
    def body(comm: Communicator) -> tuple[list[str], list[str]]:
        inner = Recorder(comm.transport, [])
        outer = Recorder(inner, [])
        script(Communicator(outer))
        return inner.lines, outer.lines

    for (inner, outer), alone in zip(run_threads(3, body), trace(), strict=True):
        assert inner == outer == alone


def test_a_layer_looks_like_what_it_holds() -> None:
    def body(comm: Communicator) -> None:
        layer = Communicator(Recorder(comm.transport, []))
        assert (layer.rank, layer.world_size, layer.device) == (comm.rank, comm.world_size, comm.device)
        assert (layer.timeout_s, layer.global_ranks) == (comm.timeout_s, comm.global_ranks)
        assert repr(layer) == repr(comm)

    run_threads(2, body)
