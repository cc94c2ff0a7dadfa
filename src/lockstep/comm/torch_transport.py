"""Gloo (CPU) and NCCL (GPU) behind the seam.

Calls go to the `ProcessGroup` itself (`torch_calls.py`): `torch.distributed.all_reduce` would check and log again what
the communicator has checked. Here is how a group comes to be, is split, and ends.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import final
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist

# Loaded before any group exists: its functions keep the default group of that moment as a default argument. Loaded
# later, by torch._dynamo say, they keep the group alive after its destruction, and Gloo's threads abort some exits.
import torch.distributed.nn.functional
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

from lockstep.comm.exchanged_sums import ExchangedSums
from lockstep.comm.op import CommOp, DoneWork, Work, describe
from lockstep.comm.torch_calls import START, make_options
from lockstep.comm.torch_work import failure
from lockstep.comm.transport import Transport, blamed_on, without_traceback
from lockstep.errors import CommError, ConfigError, TransportClosed

_UNUSED_TAG = 2**31 - 1
_END_S, _LOOK_S = 1.0, 0.02  # the first is enough for the end of a group in which nothing is half received

_splits: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()  # how often each group was split: names its parts
_broken: set[ProcessGroup] = set()  # Gloo's, whose connections were closed
_ending: set[threading.Thread] = set()  # in which some of them end, not waited for yet


def close_connections(group: ProcessGroup, receive: Callable[[list[Tensor], int, int], dist.Work]) -> None:
    """End what is under way in a Gloo group. receive: `ProcessGroup.recv` of it. Call `end_broken` once torch is done.

    Gloo has no abort, but closes all connections of a group when a receive is late; some may be closed already.
    """
    _broken.add(group)
    for peer in range(group.size()):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                receive([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


def end_broken(*, is_awaited: bool = True) -> None:
    """Drop the groups whose connections were closed and that torch has forgotten.

    Gloo does not end a transfer that is half received when its connection closes, and the end of the group waits for
    the limit of that one. So that has a thread of its own, for which this waits a second, and no exit at all.
    """
    held = [group for group in tuple(_broken) if group not in distributed_c10d._world.pg_map]
    _broken.difference_update(held)
    if held:
        thread = threading.Thread(target=_drop, args=(held,), name="lockstep-group-end", daemon=True)
        thread.start()
        _ending.add(thread)
    for thread in tuple(_ending) if is_awaited else ():
        thread.join(_END_S)
        _ending.discard(thread)


def _drop(held: list[ProcessGroup]) -> None:
    """Once nobody else has them: who destroys a group may be about to let go of it."""
    while any(sys.getrefcount(group) > 3 for group in held):  # by `held`, by `group` and by the call itself
        time.sleep(_LOOK_S)
    held.clear()


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
        self.is_nccl = self.name == "nccl"
        self._owned = owned
        self._make_part = make_part
        self._closed = False
        self.aborted: CommError | None = None
        self.pending = 0  # operations started here and not yet waited for
        self._children: WeakSet[TorchTransport] = WeakSet()
        self.options = functools.cache(partial(make_options, timedelta(seconds=timeout_s), self.is_nccl))
        self.sums = ExchangedSums(self.rank, self.world_size)

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
        wait_for_connections("", rank, range(world_size), limit)
        return cls(distributed_c10d._get_default_group(), "cpu", timeout_s, owned=True)

    def submit(self, op: CommOp) -> Work:
        if self._closed:
            raise TransportClosed(f"{describe(op)}: this communicator was closed on rank {self.rank}")
        if self.aborted is not None:
            return DoneWork(blamed_on(self.aborted, CommError(f"{describe(op)}: aborted on rank {self.rank}")))
        if op.algorithm is not None:
            return op.algorithm.start(op)
        try:
            return START[op.kind](self, op)
        except RuntimeError as error:  # Gloo refuses at once what needs a lost connection: that is for `wait` to say
            refusal = failure(self, op, error, self.timeout_s)
            refusal.__cause__ = error
            return DoneWork(blamed_on(self.aborted, refusal))

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

    def on_host(self) -> TorchTransport:
        """The same ranks', for tensors in host memory, by another backend of the group. Shares its fate."""
        host = TorchTransport(self.process_group, "cpu", self.timeout_s, global_ranks=self.global_ranks)
        self._children.add(host)
        return host

    def abort(self, error: CommError) -> None:
        if self._closed or self.aborted is not None:
            return
        self.aborted = without_traceback(error)
        for child in tuple(self._children):  # first: what they have under way may end with the connections here
            child.abort(error)
        with contextlib.suppress(TransportClosed):  # the group was destroyed
            self._disconnect()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._owned:
            for child in tuple(self._children):
                child.close()
            for one in (self, *(child for child in self._children if not child._owned)):
                if one.pending and self.world_size > 1:
                    one._disconnect()
            if self.process_group in distributed_c10d._world.pg_map:
                dist.destroy_process_group(self.process_group)
        self._strong = None
        end_broken()

    def _disconnect(self) -> None:
        """End what is still under way; else the group's end would wait for it, until the timeout."""
        if self.is_nccl:
            self.process_group.abort()
            return
        close_connections(self.process_group, self.process_group.recv)

    def _listed_part(self, name: str, ranks: Sequence[int]) -> TorchTransport:
        """A torch group of exactly these ranks, in this order, with this group's timeout.

        Not `dist.new_group`: it wants every rank of the job, or names the group by what each rank has destroyed so far,
        and its timeout is 30 minutes unless told. The default group is unbound from its device meanwhile, because a
        bound one would be split by a call that every rank of the job must join.
        """
        global_ranks = [self.global_ranks[rank] for rank in ranks]
        default = distributed_c10d._get_default_group()
        bound = default.bound_device_id
        full_name, limit = f"{self.process_group.group_name}/{name}", timedelta(seconds=self.timeout_s)
        try:
            default.bound_device_id = None
            group, _ = distributed_c10d._new_process_group_helper(
                len(global_ranks),
                list(ranks).index(self.rank),
                global_ranks,
                self.name,
                distributed_c10d._get_default_store(),
                distributed_c10d.GroupName(full_name),
                timeout=limit,
                device_id=self.device if self.is_nccl else None,
                group_desc="lockstep",
            )
            wait_for_connections(full_name, self.rank, ranks, limit)
        except RuntimeError as error:
            op = CommOp(-1, "barrier", label=f"split into {global_ranks}")
            raise failure(self, op, error, self.timeout_s) from error
        finally:
            default.bound_device_id = bound
        assert isinstance(group, ProcessGroup)
        distributed_c10d._world.pg_group_ranks[group] = {member: place for place, member in enumerate(global_ranks)}
        return TorchTransport(group, self.device, self.timeout_s, owned=True)


def wait_for_connections(group: str, rank: int, ranks: Iterable[int], limit: timedelta) -> None:
    """Until all ranks of a new group have made it: one that fails, or closes it, at once closes what others connect to.

    Raises:
        torch.distributed.DistStoreError: not within `limit`.
    """
    store = distributed_c10d._get_default_store()
    store.set(f"connected {group} {rank}", "")
    store.wait([f"connected {group} {each}" for each in ranks], limit)


def has_gpus(process_group: ProcessGroup) -> bool:
    """Whether the group has a backend for GPUs, and this machine has some."""
    return torch.cuda.is_available() and any(kind.type == "cuda" for kind in process_group._device_types)


def destroy_default_group() -> None:
    """End the default group of torch.distributed, whoever made it, and with it all others; nothing where none is."""
    if dist.is_initialized():
        dist.destroy_process_group()
        end_broken()


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
