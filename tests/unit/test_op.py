"""The record of an operation: its text, its size, and the works made of other works."""

from __future__ import annotations

import pytest
import torch

from lockstep.comm.op import DONE, AllWork, CommOp, ThenWork, Work, describe, signature
from lockstep.comm.operands import dense, in_place, in_place_list
from lockstep.errors import CollectiveTimeout, ConfigError


class FakeWork(Work):
    def __init__(self, error: Exception | None = None, done: bool = True) -> None:
        self.error, self.done = error, done
        self.limits: list[float | None] = []

    def wait(self, timeout_s: float | None = None) -> None:
        self.limits.append(timeout_s)
        if self.error is not None:
            raise self.error

    def is_done(self) -> bool:
        return self.done

    def source_rank(self) -> int | None:
        return 3


def test_signature_holds_what_must_be_equal_and_nothing_else() -> None:
    one, other = torch.ones(2, 3), torch.zeros(2, 3)
    base = CommOp(4, "all_reduce", (one,), (one,), reduce="sum", label="bucket0")
    assert signature(base) == "all_reduce float32 [2, 3] sum"
    assert signature(base) == signature(base._replace(seq=9, label="x", inputs=(other,), outputs=(other,)))
    differing = [
        base._replace(kind="barrier"),
        base._replace(inputs=(torch.ones(3, 2),)),
        base._replace(inputs=(one.double(),)),
        base._replace(reduce="max"),
        base._replace(peer=0),
    ]
    assert len({signature(op) for op in (base, *differing)}) == len(differing) + 1
    uneven = [CommOp(0, "all_gather", (torch.ones(size),), (torch.ones(1), torch.ones(2))) for size in (1, 2)]
    assert signature(uneven[0]) == signature(uneven[1])


def test_describe_adds_what_only_this_rank_knows() -> None:
    send = CommOp(7, "send", (torch.ones(2),), peer=1, tag=5)
    assert describe(send) == "send float32 (seq 7, to rank 1, tag 5, 8 bytes)"
    recv = CommOp(8, "recv", outputs=(torch.ones(2),), label="shard")
    assert describe(recv) == "recv float32 (seq 8, from rank any, tag 0, 'shard', 8 bytes)"
    assert describe(CommOp(1, "batch_send_recv", parts=(send, recv))) == "batch_send_recv (seq 1, 16 bytes)"
    assert CommOp(2, "gather", (torch.ones(1),), (torch.ones(3),) * 2, peer=0).nbytes == 24


def test_then_work_runs_its_step_once_after_a_good_wait() -> None:
    steps: list[int] = []
    work = ThenWork(FakeWork(), lambda: steps.append(1))
    assert work.is_done()
    assert steps == []
    work.wait()
    work.wait()
    assert steps == [1]
    assert work.source_rank() == 3
    failed = ThenWork(FakeWork(CollectiveTimeout("late", [2])), lambda: steps.append(2))
    for _ in range(2):
        with pytest.raises(CollectiveTimeout):
            failed.wait()
    assert steps == [1]


def test_then_work_does_not_record_gradients() -> None:
    leaf = torch.ones(2, requires_grad=True)
    ThenWork(DONE, lambda: leaf.mul_(3)).wait()
    assert leaf.tolist() == [3.0, 3.0]
    assert leaf.is_leaf


def test_all_work_shares_one_limit() -> None:
    works = [FakeWork(), FakeWork(), FakeWork(done=False)]
    every = AllWork(list(works))
    every.wait(5.0)
    limits = [work.limits[0] for work in works]
    assert all(limit is not None and 0 <= limit <= 5.0 for limit in limits)
    assert limits == sorted(limits, reverse=True)
    assert not every.is_done()
    every.wait()
    assert works[0].limits[1] is None
    assert DONE.is_done()
    DONE.wait()


def test_dense_and_in_place_copy_only_where_they_must() -> None:
    plain = torch.arange(6.0).reshape(2, 3)
    flat, copy_back = in_place(plain)
    assert flat.data_ptr() == plain.data_ptr()
    assert copy_back is None
    for view in (plain.t(), plain[:, ::2], torch.complex(plain, plain).conj(), plain.expand(2, 2, 3)[0].t()):
        flat, copy_back = in_place(view)
        assert flat.is_contiguous()
        assert copy_back is not None
        assert torch.equal(flat, view.resolve_conj())
    column = plain[:, 1]
    flat, copy_back = in_place(column)
    flat.fill_(9)
    assert copy_back is not None
    copy_back()
    assert plain.tolist() == [[0, 9, 2], [3, 9, 5]]
    real, copy_back = in_place(torch.ones(2, dtype=torch.complex64), complex_as_real=True)
    assert (real.dtype, real.shape, copy_back) == (torch.float32, (2, 2), None)
    flats, copy_back = in_place_list([plain, torch.ones(0)])
    assert copy_back is None
    assert len(flats) == 2
    assert not dense(torch.ones(1, requires_grad=True)).requires_grad
    with pytest.raises(ConfigError, match=r"layout torch\.sparse_coo"):
        dense(torch.ones(2).to_sparse())
