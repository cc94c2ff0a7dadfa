"""Which parameters are stepped and sent together: chunks of an optimizer's parameters."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from lockstep.comm.communicator import Communicator
from lockstep.errors import ConfigError, UnsupportedArgument
from lockstep.parallel.buckets import BUCKET_CAP_BYTES, GradSpec, plan_buckets
from lockstep.parallel.comm_hooks import Mean
from lockstep.parallel.ddp import DistributedDataParallel
from lockstep.parallel.zero.chunk import Chunk, ReplicatedChunk
from lockstep.parallel.zero.overlap import ReduceScatterMean
from lockstep.parallel.zero.plan import FlatLayout
from lockstep.parallel.zero.verify import check_params, verify_same_params, verify_same_values


class Member(NamedTuple):
    """A parameter of the optimizer, what it is called in errors, and its group's index in `param_groups`."""

    param: Tensor
    name: str
    group: int


class Share(NamedTuple):
    """A chunk, and the group of each of its parameters."""

    chunk: Chunk
    groups: list[int]


def share_local(members: Sequence[Member], longest: int | None) -> Share:
    """Parameters of which each rank has its own piece."""
    from lockstep.parallel.zero.dtensor import ShardedChunk  # DTensor is half a second of imports

    chunk = ShardedChunk([m.param for m in members], [m.name for m in members], longest)
    return Share(chunk, [m.group for m in members])


def share_whole(members: Sequence[Member], comm: Communicator, longest: int | None) -> list[Share]:
    """Parameters that every rank has whole, in buffers of about a bucket's size. Collective: every rank of `comm`.

    Raises: ConfigError for parameters that cannot be moved into a buffer; ModelMismatch where ranks differ.
    """
    check_params([m.param for m in members], [m.name for m in members], comm)
    verify_same_params(comm, [m.param for m in members], [m.name for m in members])
    # Frozen parameters apart: nothing of them is sent until they are thawed.
    specs = [GradSpec(m.param.nbytes, (m.param.dtype, m.param.device, m.param.requires_grad)) for m in members]
    plan = plan_buckets(specs, range(len(specs)), (BUCKET_CAP_BYTES,))
    shares = [_share([members[i] for i in indices], comm, longest) for indices in plan]
    verify_same_values(comm, [chunk for chunk, _ in shares if isinstance(chunk, ReplicatedChunk)])
    return shares


def share_buckets(
    members: Sequence[Member], ddp: DistributedDataParallel, longest: int | None
) -> tuple[ReduceScatterMean, list[Share], list[Member]]:
    """Parameters laid out as the buckets of `ddp`, which reduces to their owners from now on; and those it has not.

    The buckets stay what they are now: without this they would be planned anew after the first backward.
    Raises: ConfigError where a parameter of `ddp` is none of the optimizer's, or a hook is registered there.
    """
    reducer = getattr(ddp, "reducer", None)
    if not isinstance(ddp, DistributedDataParallel) or reducer is None:
        raise ConfigError(
            f"ddp={type(ddp).__name__}: its backward can be joined only if it is lockstep.DistributedDataParallel; "
            "leave ddp out, and step() works after any averaging of gradients"
        )
    exchange = reducer.exchange
    if type(exchange.hook) is not Mean:
        raise UnsupportedArgument("ddp", "it has a communication hook, and this would replace it; leave ddp out")
    by_id = {id(member.param): member for member in members}
    left_out = [name for param, name in zip(exchange.params, exchange.names, strict=True) if id(param) not in by_id]
    if left_out:
        raise ConfigError(
            f"ddp reduces {', '.join(map(repr, left_out[:5]))}{' ...' if len(left_out) > 5 else ''}, which this "
            "optimizer does not step: give it all parameters of the module, or leave ddp out"
        )
    check_params([m.param for m in members], [m.name for m in members], reducer.comm)
    hook = ReduceScatterMean(reducer.comm)
    reducer.before_forward()  # what an earlier step has left comes to its end first
    exchange.hand_over(hook, functools.partial(FlatLayout, world_size=reducer.comm.world_size))
    shares = [_share([by_id[id(p)] for p in bucket.params], reducer.comm, longest) for bucket in exchange.buckets]
    hook.join([chunk for chunk, _ in shares if isinstance(chunk, ReplicatedChunk)])
    taken = {id(param) for param in reducer.params}
    return hook, shares, [member for member in members if id(member.param) not in taken]


def _share(members: Sequence[Member], comm: Communicator, longest: int | None) -> Share:
    chunk = ReplicatedChunk([m.param for m in members], [m.name for m in members], comm, longest)
    return Share(chunk, [m.group for m in members])
