"""The torch process group of the backend "lockstep": each of torch's calls as one of the communicator's."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from functools import partial
from typing import Any, final
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

from lockstep.comm.communicator import Communicator
from lockstep.comm.op import AllWork, Reduction, ThenWork, Work
from lockstep.comm.process_group import layered
from lockstep.comm.process_group_meeting import Member, connect, nccl_group, numbered
from lockstep.comm.process_group_routing import served
from lockstep.comm.process_group_work import GroupWork, future_teller
from lockstep.comm.transport import LentTransport
from lockstep.errors import CommError, ConfigError

_CPU = torch.device("cpu")
_PATIENCE_S = 5.0  # for the futures of operations that a shutdown has cut short

_open_groups: WeakSet[LockstepGroup] = WeakSet()


@final
class LockstepGroup(ProcessGroup):
    """A torch process group whose CPU tensors go through a lockstep transport.

    It is a ProcessGroup and not a Backend, because torch lets Python inherit from the first only. C++ code (the reducer
    of DistributedDataParallel, the functional collectives under DTensor) reaches the methods here through torch's
    trampolines. A plain Gloo group stands beside: its backend gives this group what torch asks of one (name, device),
    serves the few calls from C++ that have no trampoline, and does what lockstep does not: sparse tensors and bitwise
    reductions. Tensors of other devices go to the backend that the user has named for them ("cpu:lockstep,cuda:nccl").

    Collective: making one, by every rank of it. It ends with `shutdown`, which destroy_process_group calls.
    """

    def __init__(self, member: Member, backend_options: Any = None) -> None:
        super().__init__(member.rank, member.world_size)  # pyright: ignore  - the form for subclasses, not in the stubs
        self._store = member.store
        self._member = numbered(member)
        self._backend_options = backend_options
        self._transport, self._gloo = connect(self._member)
        self._others: dict[str, ProcessGroup] = {}  # kind of device -> the group for its tensors
        self._teller = future_teller(f"lockstep-futures-{member.name}")
        self._batch: list[Work] | None = None  # what was started since _start_coalescing
        self.transport = LentTransport(layered(self._transport, member.name), self)
        self.comm = Communicator(self.transport, member.name)
        backend: Any = self._gloo._get_backend(_CPU)
        self._options = backend.options  # of both groups: where torch's ways to change a timeout leave it
        self._set_default_backend(ProcessGroup.BackendType.GLOO)
        self._register_backend(_CPU, ProcessGroup.BackendType.GLOO, backend)
        _open_groups.add(self)

    # ------------------------------------------------------------------ what torch asks of a group

    def getBackendName(self) -> str:  # noqa: N802 - the name that torch's trampoline looks for
        return "lockstep"

    def get_group_store(self) -> dist.Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return [_CPU, *(torch.device(kind) for kind in self._named())]

    def _get_backend(self, device: torch.device) -> Any:
        return self.other(device.type)._get_backend(device)

    def shutdown(self) -> None:
        """Give back threads, memory and sockets; what is under way fails. Not collective; again does nothing."""
        _open_groups.discard(self)
        self.comm.close()
        self._transport.close()
        # What torch's caches of meshes keep of this group keeps no shared memory: what is beneath is closed too.
        self._transport = self.transport.inner = getattr(self._transport, "beneath", None) or self._transport
        self._teller.close(_PATIENCE_S)
        for group in self._others.values():
            group.shutdown()

    def abort(self) -> None:
        """`shutdown` that leaves what is under way on other devices too."""
        for group in self._others.values():
            group.abort()
        self._others.clear()
        self.shutdown()

    # ------------------------------------------------------------------ what the communicator does not serve

    def other(self, kind: str) -> ProcessGroup:
        """The group of torch's own for tensors of a kind of device.

        Torch stops at the first ProcessGroup it gets, so it made none for another device than the CPU.
        """
        if kind == "cpu":
            return self._gloo
        if kind not in self._others:
            connects_early = self not in distributed_c10d._world.pg_map  # the device_id given to init_process_group
            name = "nccl" if connects_early else self._named().get(kind, "")
            if (kind, name) != ("cuda", "nccl"):
                raise CommError(
                    f"group {self._member.name!r} on rank {self.rank()} cannot carry {kind} tensors: it was made for "
                    f"{distributed_c10d._world.pg_backend_config.get(self)!r}. Next: name the backend, "
                    f'init_process_group("cpu:lockstep,cuda:nccl"), or make a group for them with new_group'
                )
            group = self._others[kind] = nccl_group(self._member, self._backend_options)
            device = torch.device(kind)
            self._register_backend(device, ProcessGroup.BackendType.NCCL, group._get_backend(device))
        return self._others[kind]

    def _named(self) -> dict[str, str]:
        """Kind of device -> backend, as the user has named them, without the CPU."""
        pairs = (pair.partition(":") for pair in distributed_c10d._world.pg_backend_config.get(self, "").split(","))
        return {kind: name for kind, _, name in pairs if kind not in ("", "cpu")}

    # ------------------------------------------------------------------ from a call to an operation

    def _run(self, opts: Any, outputs: list[Tensor], *starts: Callable[..., Work]) -> dist.Work:
        """Begin one operation of the communicator, or several as one. One that is waited for at once ends in here."""
        limit_s = opts.timeout.total_seconds()  # negative: not given
        if limit_s <= 0:
            limit_s = self._limit_s()
        if len(starts) == 1 and not opts.asyncOp and limit_s == self.comm.timeout_s and self._batch is None:
            work = starts[0](async_op=False)
        else:
            works = [start(async_op=True) for start in starts]
            work = works[0] if len(works) == 1 else AllWork(works)
        return GroupWork(self._counted(work), outputs, limit_s, self._teller)

    def _limit_s(self) -> float:
        return self._options._timeout.total_seconds()

    def _message(self, work: Work, source: int = -1) -> dist.Work:
        return GroupWork(self._counted(work), [], self._limit_s(), None, source)

    def _counted(self, work: Work) -> Work:
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _start_coalescing(self, device: torch.device = _CPU) -> None:
        if device.type != "cpu":
            self.other(device.type)._start_coalescing(device)
        else:
            self._batch = []

    def _end_coalescing(self, device: torch.device = _CPU) -> dist.Work:
        if device.type != "cpu":
            return self.other(device.type)._end_coalescing(device)
        works, self._batch = self._batch or [], None
        return GroupWork(AllWork(works), [], self._limit_s(), self._teller)

    # ------------------------------------------------------------------ reductions

    @served(dist.AllreduceOptions)
    def allreduce(self, tensors: list[Tensor] | Tensor, opts: Any, reduce: Reduction) -> dist.Work:
        tensor = tensors if isinstance(tensors, Tensor) else tensors[0]
        return self._run(opts, [tensor], self._reducing(self.comm.all_reduce, (tensor,), reduce, tensor))

    @served(dist.AllreduceCoalescedOptions)
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any, reduce: Reduction) -> dist.Work:
        return self._run(opts, tensors, *(self._reducing(self.comm.all_reduce, (t,), reduce, t) for t in tensors))

    @served(dist.ReduceOptions)
    def reduce(self, tensors: list[Tensor], opts: Any, reduce: Reduction) -> dist.Work:
        tensor, root = tensors[0], opts.rootRank
        output = tensor if root == self.comm.rank else None
        return self._run(opts, tensors, self._reducing(self.comm.reduce, (tensor, root), reduce, output))

    @served(dist.ReduceScatterOptions)
    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any, reduce: Reduction
    ) -> dist.Work:
        output, parts = outputs[0], inputs[0]
        return self._run(opts, outputs, self._reducing(self.comm.reduce_scatter, (output, parts), reduce, output))

    @served(dist.ReduceScatterOptions)
    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any, reduce: Reduction) -> dist.Work:
        scatter = self.comm.reduce_scatter_tensor
        return self._run(opts, [output], self._reducing(scatter, (output, whole), reduce, output))

    @served(dist.ReduceScatterOptions)
    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], wholes: list[Tensor], opts: Any, reduce: Reduction
    ) -> dist.Work:
        scatter, pairs = self.comm.reduce_scatter_tensor, zip(outputs, wholes, strict=True)
        return self._run(opts, outputs, *(self._reducing(scatter, pair, reduce, pair[0]) for pair in pairs))

    def _reducing(
        self, call: Callable[..., Work], operands: tuple[Any, ...], reduce: Reduction, output: Tensor | None
    ) -> Callable[..., Work]:
        """The communicator's reduction, to be begun. A mean of whole numbers is cut to one, as by NCCL."""
        if reduce != "mean" or operands[0].is_floating_point() or operands[0].is_complex():
            return partial(call, *operands, reduce)

        def divide() -> None:
            if output is not None:
                output.div_(self.comm.world_size, rounding_mode="trunc")

        return lambda async_op: ThenWork(call(*operands, "sum", async_op=async_op), divide)

    # ------------------------------------------------------------------ moving data

    @served(dist.BroadcastOptions)
    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        return self._run(opts, tensors, partial(self.comm.broadcast, tensors[0], opts.rootRank))

    @served(distributed_c10d.AllgatherOptions)
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        return self._run(opts, outputs[0], partial(self.comm.all_gather, outputs[0], inputs[0]))

    @served(distributed_c10d.AllgatherOptions)
    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        lists = [list(of_input) for of_input in zip(*outputs, strict=True)]  # outputs[rank][input]
        gathers = (partial(self.comm.all_gather, filled, t) for filled, t in zip(lists, inputs, strict=True))
        return self._run(opts, [tensor for filled in lists for tensor in filled], *gathers)

    @served(distributed_c10d.AllgatherOptions)
    def _allgather_base(self, whole: Tensor, tensor: Tensor, opts: Any) -> dist.Work:
        return self._run(opts, [whole], partial(self.comm.all_gather_into_tensor, whole, tensor))

    @served(distributed_c10d.AllgatherOptions)
    def allgather_into_tensor_coalesced(self, wholes: list[Tensor], tensors: list[Tensor], opts: Any) -> dist.Work:
        pairs = zip(wholes, tensors, strict=True)
        return self._run(opts, wholes, *(partial(self.comm.all_gather_into_tensor, whole, t) for whole, t in pairs))

    @served(dist.GatherOptions)
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        filled = outputs[0] if outputs else None
        return self._run(opts, filled or [], partial(self.comm.gather, inputs[0], filled, opts.rootRank))

    @served(dist.ScatterOptions)
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        given = inputs[0] if inputs else None
        return self._run(opts, outputs, partial(self.comm.scatter, outputs[0], given, opts.rootRank))

    @served(dist.AllToAllOptions)
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> dist.Work:
        return self._run(opts, outputs, partial(self.comm.all_to_all, outputs, inputs))

    @served(dist.AllToAllOptions)
    def alltoall_base(
        self, output: Tensor, tensor: Tensor, output_rows: list[int], input_rows: list[int], opts: Any
    ) -> dist.Work:
        outputs, inputs = self._rows("output", output, output_rows), self._rows("input", tensor, input_rows)
        return self._run(opts, [output], partial(self.comm.all_to_all, outputs, inputs))

    def _rows(self, argument: str, tensor: Tensor, sizes: list[int]) -> list[Tensor]:
        """One part per rank along the first dimension; no sizes mean equal parts."""
        rows, size = tensor.shape[0], self.comm.world_size
        sizes = sizes or [rows // size] * size
        if sum(sizes) != rows or len(sizes) != size:
            raise ConfigError(
                f"all_to_all_single: {argument} has {rows} rows, which {size} ranks cannot share as {sizes}"
            )
        return list(tensor.detach().split(sizes))

    @served(dist.BarrierOptions)
    def barrier(self, opts: Any) -> dist.Work:
        return self._run(opts, [], self.comm.barrier)

    # the same calls by the names that torch 2.13 gave them
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    # ------------------------------------------------------------------ messages between two ranks

    @served()
    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> dist.Work:
        return self._message(self.comm.isend(tensors[0], dstRank, tag))

    @served()
    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> dist.Work:
        return self._message(self.comm.irecv(tensors[0], srcRank, tag), srcRank)

    @served()
    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        return self._message(self.comm.irecv(tensors[0], None, tag))


@atexit.register
def _leave() -> None:
    """End the groups that nobody destroyed, while their threads can still be ended in order."""
    for group in list(_open_groups):
        group.shutdown()
