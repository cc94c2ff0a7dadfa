"""Gloo (CPU) and NCCL (GPU) behind the seam.

Calls go to the `ProcessGroup` itself: `torch.distributed.all_reduce` would check and log again what the communicator
has checked. Where a backend lacks a form (uneven lists, a mean, a dtype) it is built here from those it has.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, final
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist

# Loaded before any group exists: its functions keep the default group of that moment as a default argument. Loaded
# later, by torch._dynamo say, they keep the group alive after its destruction, and Gloo's threads abort some exits.
import torch.distributed.nn.functional
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, distributed_c10d

from lockstep.comm.exchanged_sums import ExchangedSums
from lockstep.comm.op import AllWork, CommOp, Reduction, Work, describe
from lockstep.comm.operands import pieces
from lockstep.comm.reduction import tree_reduce_by_blocks
from lockstep.comm.torch_work import GlooMessage, GlooWork, NcclWork, Refused, failure
from lockstep.comm.transport import Transport, blamed_on, without_traceback
from lockstep.errors import CommError, ConfigError, TransportClosed

# What both backends move and reduce. Everything else is moved as bytes, and refused where it would have to be reduced.
_NATIVE = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16}
    | {torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool}
)
_REDUCE_OPS: dict[Reduction, ReduceOp.RedOpType] = {
    "sum": ReduceOp.SUM,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "product": ReduceOp.PRODUCT,
}
_BOOL_OPS: dict[Reduction, Reduction] = {"sum": "max", "product": "min", "min": "min", "max": "max"}  # or, and

_BROADCASTS_BYTES = 1 << 20  # of all ranks: from here on an all-gather of Gloo is as many broadcasts
_UNUSED_TAG = 2**31 - 1

_splits: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()  # how often each group was split: names its parts


def close_connections(receive: Callable[[list[Tensor], int, int], dist.Work], rank: int, world_size: int) -> None:
    """End what is under way in a Gloo group of which this is `rank`. receive: `ProcessGroup.recv` of the group.

    Gloo has no abort, but closes all connections of a group when a receive is late; some may be closed already.
    """
    for peer in range(world_size):
        if peer != rank:
            with contextlib.suppress(RuntimeError):
                receive([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


@final
class TorchTransport(Transport):
    """The collectives of one torch process group.

    `owned`: this transport made the group and destroys it in `close`; a group of the user's is left alone.
    On NCCL messages are matched in order only (it has no tags) and cannot be received from any rank.
    """

    def __init__(
        self,
        process_group: ProcessGroup,
        device: torch.device | str,
        timeout_s: float,
        *,
        owned: bool = False,
        global_ranks: Sequence[int] | None = None,
        make_part: Callable[[str, Sequence[int]], TorchTransport] | None = None,
    ) -> None:
        """global_ranks, make_part: of a group that torch.distributed does not list, where it is asked for both else.

        make_part(name, ranks): this rank's transport of a part of the group.
        """
        self._strong = process_group if owned else None
        self._weak = ref(process_group)
        self.device = torch.device(device)
        self.timeout_s = timeout_s
        self.rank = process_group.rank()
        self.world_size = process_group.size()
        self.global_ranks = tuple(dist.get_process_group_ranks(process_group) if global_ranks is None else global_ranks)
        self.name = process_group._get_backend(self.device).name()
        self._nccl = self.name == "nccl"
        self._owned = owned
        self._make_part = make_part
        self._closed = False
        self.aborted: CommError | None = None
        self.pending = 0  # operations started here and not yet waited for
        self._children: WeakSet[TorchTransport] = WeakSet()
        self._options = functools.cache(partial(_make_options, timedelta(seconds=timeout_s), self._nccl))
        self._sums = ExchangedSums(self.rank, self.world_size)

    @property
    def process_group(self) -> ProcessGroup:
        """The torch group. One of the user's is not kept alive: after its destruction it is gone here too.

        Gloo closes its sockets, and so tells the other ranks, with the last reference only; and a group that outlives
        `destroy_process_group` can abort the process at exit.
        """
        group = self._weak()
        if group is None:
            raise TransportClosed(f"rank {self.rank}: the process group under this communicator was destroyed")
        return group

    @classmethod
    def over(cls, process_group: ProcessGroup | None = None) -> TorchTransport:
        """A transport over a group of `torch.distributed` (None: the default one), with its device and timeout."""
        if process_group is None:
            if not dist.is_initialized():
                raise ConfigError(
                    "torch.distributed has no default group yet: call lockstep.init(), or "
                    "torch.distributed.init_process_group() before"
                )
            process_group = distributed_c10d._get_default_group()
        device = torch.device("cpu")
        if has_gpus(process_group):
            current = torch.device("cuda", torch.cuda.current_device())
            if process_group._get_backend(current).name() == "nccl":
                device = process_group.bound_device_id or current
        options = getattr(process_group._get_backend(device), "options", None)  # a backend of another library has none
        timeout = dist.default_pg_timeout if options is None else options._timeout
        return cls(process_group, device, timeout.total_seconds())

    @classmethod
    def fresh(cls, rendezvous: str, rank: int, world_size: int, timeout_s: float) -> TorchTransport:
        """Make and own the default group of `torch.distributed`, of Gloo. `rendezvous`: its init_method, "file:///...".

        Collective: every rank; blocks until all have come.
        """
        limit = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size, timeout=limit)
        return cls(distributed_c10d._get_default_group(), "cpu", timeout_s, owned=True)

    def submit(self, op: CommOp) -> Work:
        if self._closed:
            raise TransportClosed(f"{describe(op)}: this communicator was closed on rank {self.rank}")
        if self.aborted is not None:
            return Refused(blamed_on(self.aborted, CommError(f"{describe(op)}: aborted on rank {self.rank}")))
        if op.algorithm is not None:
            return op.algorithm.start(op)
        try:
            return _START[op.kind](self, op)
        except RuntimeError as error:  # Gloo refuses at once what needs a lost connection: that is for `wait` to say
            refusal = failure(self, op, error, self.timeout_s)
            refusal.__cause__ = error
            return Refused(blamed_on(self.aborted, refusal))

    def split(self, groups: Sequence[Sequence[int]]) -> Transport | None:
        if self._closed:
            raise TransportClosed(f"split: this communicator was closed on rank {self.rank}")
        if self.aborted is not None:
            raise blamed_on(self.aborted, CommError(f"split: aborted on rank {self.rank}"))
        number = _splits.get(self.process_group, 0)
        _splits[self.process_group] = number + 1
        for index, group in enumerate(groups):
            if self.rank in group:
                child = (self._make_part or self._listed_part)(f"{number}.{index}", group)
                self._children.add(child)
                return child
        return None

    def abort(self, error: CommError) -> None:
        if self._closed or self.aborted is not None:
            return
        self.aborted = without_traceback(error)
        with contextlib.suppress(TransportClosed):  # the group was destroyed
            self._disconnect()
        for child in tuple(self._children):
            child.abort(error)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._owned:
            for child in tuple(self._children):
                child.close()
            if self.pending and self.world_size > 1:
                self._disconnect()
            if self.process_group in distributed_c10d._world.pg_map:
                dist.destroy_process_group(self.process_group)
        self._strong = None

    def _disconnect(self) -> None:
        """End what is still under way; else the group's end would wait for it, until the timeout."""
        if self._nccl:
            self.process_group.abort()
            return
        close_connections(self.process_group.recv, self.rank, self.world_size)

    def _listed_part(self, name: str, ranks: Sequence[int]) -> TorchTransport:
        """A torch group of exactly these ranks, in this order, with this group's timeout.

        Not `dist.new_group`: it wants every rank of the job, or names the group by what each rank has destroyed so far,
        and its timeout is 30 minutes unless told. The default group is unbound from its device meanwhile, because a
        bound one would be split by a call that every rank of the job must join.
        """
        global_ranks = [self.global_ranks[rank] for rank in ranks]
        default = distributed_c10d._get_default_group()
        bound = default.bound_device_id
        try:
            default.bound_device_id = None
            group, _ = distributed_c10d._new_process_group_helper(
                len(global_ranks),
                list(ranks).index(self.rank),
                global_ranks,
                self.name,
                distributed_c10d._get_default_store(),
                distributed_c10d.GroupName(f"{self.process_group.group_name}/{name}"),
                timeout=timedelta(seconds=self.timeout_s),
                device_id=self.device if self._nccl else None,
                group_desc="lockstep",
            )
        except RuntimeError as error:
            op = CommOp(-1, "barrier", label=f"split into {global_ranks}")
            raise failure(self, op, error, self.timeout_s) from error
        finally:
            default.bound_device_id = bound
        assert isinstance(group, ProcessGroup)
        distributed_c10d._world.pg_group_ranks[group] = {member: place for place, member in enumerate(global_ranks)}
        return TorchTransport(group, self.device, self.timeout_s, owned=True)

    # ------------------------------------------------------------------ messages

    def _message(self, op: CommOp) -> Work:
        return (NcclWork if self._nccl else GlooMessage)(self, op, self._post(op))

    def _post(self, op: CommOp) -> dist.Work:
        if op.kind == "send":
            assert op.peer is not None
            return self.process_group.send([op.inputs[0]], op.peer, op.tag)
        if op.peer is not None:
            return self.process_group.recv([op.outputs[0]], op.peer, op.tag)
        if self._nccl:
            raise ConfigError("NCCL cannot receive from any rank: name the source, recv(tensor, src)")
        return self.process_group.recv_anysource([op.outputs[0]], op.tag)

    def _batch(self, op: CommOp) -> Work:
        if not self._nccl:
            return AllWork([self.submit(part) for part in op.parts])
        self.process_group._start_coalescing(self.device)
        for part in op.parts:
            self._post(part)
        return NcclWork(self, op, self.process_group._end_coalescing(self.device))

    # ------------------------------------------------------------------ reductions

    def _reduction(self, op: CommOp) -> Reduction:
        """The reduction to ask the backend for; bools are combined by or and and, where bytes would be added."""
        assert op.reduce is not None
        dtype = op.inputs[0].dtype
        if dtype not in _NATIVE:
            raise ConfigError(
                f"{op.kind} of {dtype}: {self.name} cannot compute the {op.reduce} of this dtype; convert it first, "
                f"to one of {', '.join(sorted(str(t) for t in _NATIVE))}"
            )
        return _BOOL_OPS[op.reduce] if dtype == torch.bool else op.reduce

    def _divide(self, op: CommOp, result: Tensor) -> Callable[[], object] | None:
        """What turns the sum into the mean; NCCL does it itself, Gloo's own is wrong for some kinds."""
        if op.reduce != "mean" or self._nccl:
            return None
        return lambda: result.div_(self.world_size)

    def _all_reduce(self, op: CommOp) -> Work:
        tensor = op.outputs[0]
        options = self._options(dist.AllreduceOptions, self._reduction(op))
        return self._work(op, self.process_group.allreduce([tensor], options), self._divide(op, tensor))

    def _reduce(self, op: CommOp) -> Work:
        is_root = self.rank == op.peer
        result = op.outputs[0] if is_root else op.inputs[0].clone()  # gloo writes partial sums into it
        if is_root and result is not op.inputs[0]:
            result.copy_(op.inputs[0])
        options = self._options(dist.ReduceOptions, self._reduction(op), op.peer)
        work = self.process_group.reduce([result], options)
        return self._work(op, work, self._divide(op, result) if is_root else None)

    def _reduce_scatter(self, op: CommOp) -> Work:
        """Gloo: see ExchangedSums. NCCL's own where it has one; else the same in one exchange, added on the stream."""
        reduce = self._reduction(op)
        if not self._nccl:
            return self._sums.start(op, partial(self._exchange_parts, op))
        result = op.outputs[0].view(-1)
        parts = pieces(op.inputs, self.world_size)
        if result.dtype == parts[0].dtype and len({part.numel() for part in parts}) == 1:
            options = self._options(dist.ReduceScatterOptions, reduce)
            if len(op.inputs) == 1:
                work = self.process_group._reduce_scatter_base(result, op.inputs[0].view(-1), options)
            else:
                work = self.process_group.reduce_scatter([result], [list(parts)], options)
            return self._work(op, work)
        came = parts[0].new_empty(self.world_size, result.numel())
        work = self.process_group.alltoall(list(came.unbind()), list(parts), self._options(dist.AllToAllOptions))
        assert op.reduce is not None
        return self._work(op, work, partial(tree_reduce_by_blocks, result, came.unbind(), op.reduce))

    def _exchange_parts(self, op: CommOp, target: Tensor, source: Tensor, coming: list[int], going: list[int]) -> Work:
        options = self._options(dist.AllToAllOptions)
        return self._work(op, self.process_group.alltoall_base(target, source, coming, going, options))

    # ------------------------------------------------------------------ moving data

    def _broadcast_from(self, tensor: Tensor, root: int) -> dist.Work:
        return self.process_group.broadcast([_movable(tensor)], self._options(dist.BroadcastOptions, root=root))

    def _broadcast(self, op: CommOp) -> Work:
        assert op.peer is not None
        return self._work(op, self._broadcast_from(op.outputs[0], op.peer))

    def _all_gather(self, op: CommOp) -> Work:
        """Uneven sizes, and what is large on Gloo, whose own copies it twice: one broadcast per rank, all together."""
        mine = op.inputs[0].view(-1)
        rows = pieces(op.outputs, self.world_size)
        is_even = all(row.numel() == mine.numel() for row in rows)
        if is_even and (self._nccl or op.nbytes < _BROADCASTS_BYTES):
            options = self._options(distributed_c10d.AllgatherOptions)
            source = _movable(mine)
            if len(op.outputs) == 1:
                return self._work(op, self.process_group._allgather_base(_movable(op.outputs[0]), source, options))
            return self._work(op, self.process_group.allgather([[_movable(row) for row in rows]], [source], options))
        if rows[self.rank].data_ptr() != mine.data_ptr():
            rows[self.rank].copy_(mine)
        return AllWork([self._work(op, self._broadcast_from(row, root)) for root, row in enumerate(rows)])

    def _gather(self, op: CommOp) -> Work:
        """Every rank sends to the root. A rank does not know the others' sizes, so even and uneven are one case."""
        nothing = [op.inputs[0].new_empty(0)] * self.world_size
        given = [op.inputs[0] if rank == op.peer else empty for rank, empty in enumerate(nothing)]
        return self._exchange(op, given, op.outputs or nothing)

    def _scatter(self, op: CommOp) -> Work:
        nothing = [op.outputs[0].new_empty(0)] * self.world_size
        taken = [op.outputs[0] if rank == op.peer else empty for rank, empty in enumerate(nothing)]
        return self._exchange(op, op.inputs or nothing, taken)

    def _all_to_all(self, op: CommOp) -> Work:
        return self._exchange(op, op.inputs, op.outputs)

    def _exchange(self, op: CommOp, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Work:
        """All to all with any sizes. Gloo works on one tensor per side, so several are copied into one."""
        sources, targets = [_movable(t) for t in inputs], [_movable(t) for t in outputs]
        options = self._options(dist.AllToAllOptions)
        if self._nccl:
            return self._work(op, self.process_group.alltoall(targets, sources, options))
        in_sizes, out_sizes = [t.numel() for t in sources], [t.numel() for t in targets]
        filled = [t for t in targets if t.numel()]
        whole = filled[0] if len(filled) == 1 else targets[0].new_empty(sum(out_sizes))
        work = self.process_group.alltoall_base(whole, torch.cat(sources), out_sizes, in_sizes, options)

        def copy_out() -> None:
            for target, part in zip(targets, whole.split(out_sizes), strict=True):
                target.copy_(part)

        return self._work(op, work, copy_out if len(filled) > 1 else None)

    def _barrier(self, op: CommOp) -> Work:
        options = self._options(dist.BarrierOptions)
        if self._nccl:
            options.device_ids = [self.device.index]
        return self._work(op, self.process_group.barrier(options))

    # ------------------------------------------------------------------ waiting

    def _work(self, op: CommOp, work: dist.Work, finish: Callable[[], object] | None = None) -> Work:
        return (NcclWork if self._nccl else GlooWork)(self, op, work, finish)


def has_gpus(process_group: ProcessGroup) -> bool:
    """Whether the group has a backend for GPUs, and this machine has some."""
    return torch.cuda.is_available() and any(kind.type == "cuda" for kind in process_group._device_types)


def has_default_group() -> bool:
    """Whether torch.distributed has a default group in this process."""
    return dist.is_initialized()


def destroy_default_group() -> None:
    """End the default group of torch.distributed, whoever made it, and with it all others."""
    dist.destroy_process_group()


def import_optimizers() -> None:
    """Before there is a group: in a default of an argument torch's optimizers keep that of the moment, for ever."""
    importlib.import_module("torch.distributed.optim")


def forget_meshes() -> None:
    """Make torch find out about DTensors anew: what it keeps holds meshes, also those whose groups have ended."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _collective_utils, _redistribute, _sharding_prop, debug

        debug._clear_sharding_prop_cache()
        _sharding_prop.ShardingPropagator._propagate_tensor_meta_cached.cache_clear()
        _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
        _redistribute._gen_transform_infos.cache_clear()
        _redistribute.clear_redistribute_planner_cache()


_START: dict[str, Callable[[TorchTransport, CommOp], Work]] = {
    "send": TorchTransport._message,
    "recv": TorchTransport._message,
    "batch_send_recv": TorchTransport._batch,
    "broadcast": TorchTransport._broadcast,
    "reduce": TorchTransport._reduce,
    "all_reduce": TorchTransport._all_reduce,
    "gather": TorchTransport._gather,
    "all_gather": TorchTransport._all_gather,
    "scatter": TorchTransport._scatter,
    "reduce_scatter": TorchTransport._reduce_scatter,
    "all_to_all": TorchTransport._all_to_all,
    "barrier": TorchTransport._barrier,
}


def _make_options(
    limit: timedelta, is_nccl: bool, kind: Callable[[], Any], reduce: Reduction | None = None, root: int | None = None
) -> Any:
    """Torch's options of one kind of operation; they may be used again."""
    options = kind()
    options.timeout = limit
    if reduce is not None:
        mean = ReduceOp.AVG if is_nccl else ReduceOp.SUM
        options.reduceOp = ReduceOp(mean if reduce == "mean" else _REDUCE_OPS[reduce])
    if root is not None:
        options.rootRank = root
    return options


def _movable(tensor: Tensor) -> Tensor:
    """`tensor` as one dimension, as bytes where its dtype is unknown to the backends."""
    flat = tensor.detach().view(-1)
    if flat.dtype in _NATIVE:
        return flat
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # the stride of a single element may be anything
