"""One replica's tensors on all ranks: as few broadcasts as there are dtypes and chunks, wherever each tensor stands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lockstep import DistributedDataParallel
from lockstep.comm.communicator import Communicator
from lockstep.comm.op import CommOp, Work
from lockstep.comm.transport import Transport, TransportLayer
from lockstep.parallel import replica
from lockstep.parallel.replica import broadcast_coalesced
from lockstep.testing.worlds import run_threads


class Noting(TransportLayer):
    """Keeps label and bytes of every broadcast."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.broadcasts: list[tuple[str, int]] = []

    def submit(self, op: CommOp) -> Work:
        if op.kind == "broadcast":
            self.broadcasts.append((op.label, op.nbytes))
        return self.inner.submit(op)

    def over(self, inner: Transport) -> Noting:
        return Noting(inner)


def test_batch_norms_cost_two_broadcasts_in_a_forward_however_many_there_are() -> None:
    """Their buffers are float32, float32, int64, float32, ... in the order of the modules."""

    def body(comm: Communicator) -> tuple[list[tuple[str, int]], list[Tensor]]:
        layer = Noting(comm.transport)
        model = nn.Sequential(*[nn.BatchNorm1d(3) for _ in range(7)])
        ddp = DistributedDataParallel(model, process_group=Communicator(layer))
        ddp(torch.full((5, 3), float(comm.rank + 1))).sum().backward()  # the statistics differ now
        layer.broadcasts.clear()
        ddp.eval()(torch.ones(5, 3))
        return layer.broadcasts, list(model.buffers())

    (said, first), *others = run_threads(3, body)
    assert said == [("ddp.buffers", 7 * 2 * 3 * 4), ("ddp.buffers", 7 * 8)]
    assert first[0][0] != 0.0
    for also, buffers in others:
        assert also == said
        assert all(map(torch.equal, buffers, first))


def _mixed(rank: int) -> list[Tensor]:
    """Of two dtypes in turn; one empty, one that is not contiguous, one without dims."""
    made = [
        torch.arange(7, dtype=torch.float32) + 100 * rank,
        torch.arange(3) + 100 * rank,
        torch.empty(0),
        torch.tensor(5 + rank),
        (torch.arange(6, dtype=torch.float32) + 100 * rank).view(2, 3).t(),
    ]
    assert not made[-1].is_contiguous()
    return made


@pytest.mark.parametrize(
    ("limit", "nbytes"),
    [
        (1 << 20, [52, 32]),
        (28, [28, 24, 24, 8]),
        (1, [28, 0, 24, 24, 8]),  # a tensor that is larger than a chunk goes for itself
    ],
)
def test_everyone_has_the_source_s_values(limit: int, nbytes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "BROADCAST_CHUNK_BYTES", limit)

    def body(comm: Communicator) -> tuple[list[tuple[str, int]], list[Tensor]]:
        layer, mine = Noting(comm.transport), _mixed(comm.rank)
        broadcast_coalesced(Communicator(layer), mine, src=2, label="told")
        return layer.broadcasts, mine

    for said, found in run_threads(3, body):
        assert said == [("told", count) for count in nbytes]
        for tensor, expected in zip(found, _mixed(2), strict=True):
            assert torch.equal(tensor, expected)


def test_nothing_to_tell_is_not_said() -> None:
    def body(comm: Communicator) -> list[tuple[str, int]]:
        layer = Noting(comm.transport)
        broadcast_coalesced(Communicator(layer), [])
        return layer.broadcasts

    assert run_threads(2, body) == [[], []]
