"""What a call of torch's ProcessGroup says of itself: the same words for the same operation in all its forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.observe.scene import read_message
from lockstep.observe.torch_operations import CALLS, Operation, read, text_of

RANKS = (4, 5, 9)  # of the job, in the order of the group
ONE, PARTS = torch.ones(2, 3), [torch.ones(2, 3, dtype=torch.int64), torch.ones(5, dtype=torch.int64)]


def text(name: str, *args: Any, **kwargs: Any) -> str:
    fields, _ = read(name, args, kwargs)
    assert hash(fields) == hash(read(name, args, kwargs)[0])
    return text_of(Operation(*fields), RANKS)


def options(kind: str, **values: Any) -> Any:
    made = getattr(dist, kind)()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def test_every_form_of_a_reduction() -> None:
    opts = options("AllreduceOptions", reduceOp=dist.ReduceOp.MAX)
    wanted = "all_reduce float32 [2, 3] max"
    assert text("allreduce", [ONE], opts) == wanted
    assert text("allreduce", [ONE], opts=opts) == wanted
    assert text("allreduce", tensors=[ONE], opts=opts) == wanted
    assert text("allreduce", [ONE], dist.ReduceOp.MAX) == wanted
    assert text("allreduce", ONE, op=dist.ReduceOp(dist.ReduceOp.MAX)) == wanted
    assert text("allreduce", ONE) == text("allreduce", [ONE]) == "all_reduce float32 [2, 3] sum"
    assert text("allreduce", [ONE], options("AllreduceOptions", reduceOp=dist.ReduceOp.AVG)).endswith(" mean")
    scaled = dist._make_nccl_premul_sum(2.0)
    assert text("allreduce", [ONE], options("AllreduceOptions", reduceOp=scaled)).endswith(" sum of scaled")
    assert text("allreduce_coalesced", [ONE, ONE[0]], opts) == "all_reduce_coalesced float32 [2, 3] of 2 tensors max"


def test_a_root_is_a_rank_of_the_job() -> None:
    assert text("broadcast", [ONE], options("BroadcastOptions", rootRank=2)) == "broadcast float32 [2, 3] root=9"
    assert text("broadcast", ONE, 0) == text("broadcast", ONE, root=0) == "broadcast float32 [2, 3] root=4"
    opts = options("ReduceOptions", rootRank=1, reduceOp=dist.ReduceOp.MIN)
    assert text("reduce", [ONE], opts) == "reduce float32 [2, 3] min root=5"
    gather = options("GatherOptions", rootRank=1)
    assert text("gather", [[ONE] * 3], [ONE], gather) == text("gather", [], [ONE], gather)
    scatter = options("ScatterOptions", rootRank=1)
    assert text("scatter", [ONE], [[ONE] * 3], scatter) == text("scatter", [ONE], [], scatter)


def test_sizes_that_may_differ_between_ranks_are_left_out() -> None:
    assert text("allgather", [PARTS], [PARTS[0]]) == text("allgather", [PARTS], [PARTS[1]]) == "all_gather int64 [2, 3]"
    assert text("_allgather_base", torch.ones(6, 3), ONE) == "all_gather float32 [2, 3]"
    assert text("reduce_scatter", [PARTS[1]], [PARTS]) == "reduce_scatter int64 [2, 3] sum"
    assert text("reduce_scatter_single", ONE, torch.ones(6, 3)) == "reduce_scatter float32 [2, 3] sum"
    assert text("alltoall", PARTS, PARTS) == text("alltoall_base", PARTS[0], PARTS[1], [], []) == "all_to_all int64"
    assert text("barrier", options("BarrierOptions")) == text("barrier") == "barrier"


def test_messages_can_be_read_again() -> None:
    assert text("send", [ONE], 2, 7) == text("send", [ONE], dstRank=2, tag=7) == "send float32 [2, 3] to rank 9 tag 7"
    assert text("recv", [ONE], 0, 0) == "recv float32 [2, 3] from rank 4 tag 0"
    assert text("recv_anysource", [ONE], 3) == "recv float32 [2, 3] from rank any tag 3"
    for said in (text("send", [ONE], 2, 7), text("recv_anysource", [ONE], 3)):
        message = read_message(said)
        assert message is not None
        assert (message.is_send, message.peer, message.tag) in ((True, 9, 7), (False, None, 3))


def test_no_call_of_torch_is_forgotten() -> None:
    """Whatever this torch lets a group do between ranks is in the table; a new one fails here."""
    no_operation = {"_start_coalescing", "_end_coalescing", "abort", "allgather_into_tensor", "boxed", "unbox", "name"}
    words = ("reduce", "gather", "scatter", "alltoall", "all_to_all", "broadcast", "barrier", "send", "recv")
    there = {name for name in vars(dist.ProcessGroup) if any(word in name for word in words)}
    assert there - no_operation <= CALLS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_odd_arguments_break_nothing(name: str) -> None:
    """What torch will refuse must reach torch."""
    for args in ((), ([],), ([[]], []), (ONE,), ([ONE], [ONE]), ("x", 2, 3), ([ONE], 17, 3), ([ONE], [ONE], {})):
        fields, _ = read(name, args, {})
        assert hash(fields)
        assert CALLS[name].kind in text_of(Operation(*fields), RANKS)
