"""Which parameters are stepped and sent together: chunks of an optimizer's parameters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from lockstep.comm.communicator import Communicator
from lockstep.errors import ConfigError, ModelMismatch, UnsupportedArgument
from lockstep.observe.tensor_digest import digests
from lockstep.parallel.buckets import BUCKET_CAP_BYTES, GradSpec, plan_buckets
from lockstep.parallel.comm_hooks import Mean
from lockstep.parallel.ddp import DistributedDataParallel
from lockstep.parallel.replica import verify_same_model
from lockstep.parallel.zero.chunk import Chunk, ReplicatedChunk
from lockstep.parallel.zero.overlap import ReduceScatterMean
from lockstep.parallel.zero.plan import FlatLayout


class Member(NamedTuple):
    """A parameter of the optimizer, what it is called in errors, and its group's index in `param_groups`."""

    param: Tensor
    name: str
    group: int


Share = tuple[Chunk, list[int]]  # the group of each of the chunk's parameters


def share_local(members: Sequence[Member], longest: int | None) -> Share:
    """Parameters of which each rank has its own piece."""
    from lockstep.parallel.zero.dtensor import ShardedChunk  # DTensor is half a second of imports

    chunk = ShardedChunk([m.param for m in members], [m.name for m in members], longest)
    return chunk, [m.group for m in members]


def share_whole(members: Sequence[Member], comm: Communicator, longest: int | None) -> list[Share]:
    """Parameters that every rank has whole, in buffers of about a bucket's size. Collective: every rank of `comm`.

    Raises: ConfigError for parameters that cannot be moved into a buffer; ModelMismatch where ranks differ.
    """
    _check_params(members, comm)
    rows: list[list[object]] = [
        ["parameter", name, list(param.shape), str(param.dtype).removeprefix("torch."), param.requires_grad]
        for param, name, _ in members
    ]
    verify_same_model(comm, rows)
    # Frozen parameters apart: nothing of them is sent until they are thawed.
    specs = [GradSpec(m.param.nbytes, (m.param.dtype, m.param.device, m.param.requires_grad)) for m in members]
    plan = plan_buckets(specs, range(len(specs)), (BUCKET_CAP_BYTES,))
    shares = [_share([members[i] for i in indices], comm, longest) for indices in plan]
    _verify_same_values(comm, [chunk for chunk, _ in shares if isinstance(chunk, ReplicatedChunk)])
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
    _check_params(members, reducer.comm)
    hook = ReduceScatterMean(reducer.comm)
    reducer.before_forward()  # what an earlier step has left comes to its end first

    def lay_out(numels: Sequence[int]) -> tuple[tuple[int, ...], int]:
        layout = FlatLayout(numels, reducer.comm.world_size)
        return layout.starts, layout.numel

    exchange.hand_over(hook, lay_out)
    shares = [_share([by_id[id(p)] for p in bucket.params], reducer.comm, longest) for bucket in exchange.buckets]
    hook.join([chunk for chunk, _ in shares if isinstance(chunk, ReplicatedChunk)])
    taken = {id(param) for param in reducer.params}
    return hook, shares, [member for member in members if id(member.param) not in taken]


def _share(members: Sequence[Member], comm: Communicator, longest: int | None) -> Share:
    chunk = ReplicatedChunk([m.param for m in members], [m.name for m in members], comm, longest)
    return chunk, [m.group for m in members]


# ------------------------------------------------------------------ that they can be, and are the same on all ranks


def _check_params(members: Sequence[Member], comm: Communicator) -> None:
    """Raises: ConfigError for parameters on another device than the group's, without values, or in shared memory."""
    taken: list[tuple[int, int, str]] = []
    for param, name, _ in members:
        if param.device != comm.device:
            hint = "give it values first" if param.is_meta else "move the model there first"
            raise ConfigError(f"{name} is on {param.device}, its group communicates on {comm.device}: {hint}")
        if param.numel():
            extent = 1 + sum((n - 1) * abs(s) for n, s in zip(param.shape, param.stride(), strict=True))
            taken.append((param.data_ptr(), param.data_ptr() + extent * param.element_size(), name))
    taken.sort()
    for (_, end, name), (start, _, other) in itertools.pairwise(taken):
        if start < end:
            raise ConfigError(
                f"{name} and {other} share memory, and would not after each has its place in a flat buffer: tie "
                "them by using one Parameter in both places"
            )


def _verify_same_values(comm: Communicator, chunks: Sequence[ReplicatedChunk]) -> None:
    """Collective: every rank. Raises: ModelMismatch, on every rank, with the first parameter whose bits differ."""
    if comm.world_size == 1 or not chunks or _all_equal(comm, [chunk.flat for chunk in chunks]):
        return
    params = [(param, name) for chunk in chunks for param, name in zip(chunk.params, chunk.names, strict=True)]
    for param, name in params:
        if not _all_equal(comm, [param.detach()]):
            raise ModelMismatch(
                f"rank {comm.rank}: {name} has other values than on another rank, so training would mix two models. "
                "Wrap the model in DistributedDataParallel before, or load or broadcast the same weights on every rank."
            )


def _all_equal(comm: Communicator, tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors' bits are the same on all ranks. Collective."""
    said = comm.all_gather_object(digests(tensors), label="optimizer.verify")
    return all(one == said[0] for one in said)
