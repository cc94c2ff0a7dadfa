"""One collective on one size of tensor, and the ways to do it: what bench_comm times against each other."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.communicator import Communicator
from lockstep.comm.shm_transport import ShmTransport
from lockstep.comm.torch_transport import TorchTransport

OpName = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
OPS: tuple[OpName, ...] = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
Call = Callable[[], object]

# The newer of two names, where it is there: under the older one newer versions of torch warn in every call.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Operands(NamedTuple):
    """all_reduce: `whole` in place. reduce_scatter: whole to part. all_gather: part to whole. broadcast: `whole`."""

    whole: Tensor  # [n]
    part: Tensor  # [n / W]


def operands(numel: int, world_size: int, empty: Callable[[int], Tensor]) -> Operands:
    """Operands of zeros, every page of them touched. Sums of zeros stay zero, so that all rounds see equal values."""
    made = Operands(empty(numel), empty(numel // world_size))
    for tensor in made:
        tensor.fill_(1.0).zero_()
    return made


# ------------------------------------------------------------------ groups


def over_gloo() -> Communicator:
    """A communicator over torch.distributed's default group."""
    return Communicator(TorchTransport.over())


def over_shared_memory(comm: Communicator) -> Communicator:
    """The ranks of `comm` through shared memory. Collective: every rank of it."""
    transport = ShmTransport.meet(
        comm.all_gather_object,
        rank=comm.rank,
        world_size=comm.world_size,
        global_ranks=comm.global_ranks,
        timeout_s=comm.timeout_s,
    )
    return Communicator(transport, "shared memory")


# ------------------------------------------------------------------ the collectives


def by_lockstep(comm: Communicator, op: OpName, on: Operands) -> Call:
    """Through a communicator."""
    calls: dict[OpName, Call] = {
        "all_reduce": lambda: comm.all_reduce(on.whole),
        "reduce_scatter": lambda: comm.reduce_scatter_tensor(on.part, on.whole),
        "all_gather": lambda: comm.all_gather_into_tensor(on.whole, on.part),
        "broadcast": lambda: comm.broadcast(on.whole),
    }
    return calls[op]


def by_torch(op: OpName, on: Operands) -> Call:
    """Through torch.distributed's default group."""
    calls: dict[OpName, Call] = {
        "all_reduce": lambda: dist.all_reduce(on.whole),
        "reduce_scatter": lambda: _reduce_scatter(on.part, on.whole),
        "all_gather": lambda: _all_gather(on.whole, on.part),
        "broadcast": lambda: dist.broadcast(on.whole, 0),
    }
    return calls[op]


def by_mpi(mpi: Any, op: OpName, on: Operands) -> Call:
    """Through mpi4py's buffer calls, on the memory of the tensors."""
    world, whole, part = mpi.COMM_WORLD, on.whole.numpy(), on.part.numpy()
    calls: dict[OpName, Call] = {
        "all_reduce": lambda: world.Allreduce(mpi.IN_PLACE, whole),
        "reduce_scatter": lambda: world.Reduce_scatter_block(whole, part),
        "all_gather": lambda: world.Allgather(part, whole),
        "broadcast": lambda: world.Bcast(whole, 0),
    }
    return calls[op]


def check(name: str, op: OpName, call: Call, on: Operands, rank: int, world_size: int) -> None:
    """Run the collective once on numbers that differ by rank and place. Leaves zeros. Raises: RuntimeError."""
    whole = (torch.arange(on.whole.numel()) % 61).float()  # small whole numbers: exact in every order of the sum
    part = whole[: on.part.numel()]
    on.whole.copy_(whole + rank)
    on.part.copy_(part + rank)
    call()
    summed = whole * world_size + sum(range(world_size))
    expected: dict[OpName, Callable[[], tuple[Tensor, Tensor]]] = {
        "all_reduce": lambda: (on.whole, summed),
        "reduce_scatter": lambda: (on.part, summed.view(world_size, -1)[rank]),
        "all_gather": lambda: (on.whole, torch.cat([part + other for other in range(world_size)])),
        "broadcast": lambda: (on.whole, whole),
    }
    found, right = expected[op]()
    if not torch.equal(found, right):
        wrong = int((found != right).sum())
        raise RuntimeError(f"{name}: {op} of {on.whole.numel()} floats on rank {rank} gave {wrong} wrong values")
    on.whole.zero_()
    on.part.zero_()


# ------------------------------------------------------------------ what the machine could do


def copied_bytes(op: OpName, nbytes: int, world_size: int) -> int:
    """How many bytes a rank would copy in the time that its share of the collective takes at the very least.

    A copy of b bytes reads b and writes b. No algorithm can do with less than this on a rank, whoever moves the bytes
    (n = bytes of the whole tensor, W = ranks):

        all_reduce      reads n: of every rank the W-th part it sums; writes n: that sum into every rank's tensor
        reduce_scatter  reads n likewise; writes n / W, its part
        all_gather      reads n: every rank's part; writes n
        broadcast       reads n, the root's; writes n; nothing on the root

    The copy that stands for it moves as many bytes: half of the sum. It is a yardstick that can be passed. Reading is
    cheaper than writing (reduce_scatter). An all_reduce in place works on n bytes where a copy of n works on 2n, which
    may not fit into a cache any more, and writes lines it has just read, which a copy has to fetch first.
    """
    written = nbytes // world_size if op == "reduce_scatter" else nbytes
    return (nbytes + written) // 2


class Copies:
    """Buffers for plain copies of so many bytes, with which all ranks load the memory at the same time."""

    def __init__(self, nbytes: int) -> None:
        self.source, self.target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
        self._libc = ctypes.CDLL(None)
        self._arguments = [ctypes.c_void_p(t.data_ptr()) for t in (self.target, self.source)]
        self._nbytes = ctypes.c_size_t(nbytes)

    def by_torch(self) -> None:
        """Tensor.copy_."""
        self.target.copy_(self.source)

    def by_libc(self) -> None:
        """The C library's memmove."""
        self._libc.memmove(*self._arguments, self._nbytes)


class PeerCopies:
    """Copies out of the next rank's memory of what that rank has just written: the limit with the way between cores.

    A plain copy of what fits into a core's cache never leaves it; what ranks tell each other always does. Each rank
    writes the halves of its buffer in turn, from the other half of the next rank's.
    Collective: every rank makes one.
    """

    def __init__(self, comm: Communicator, nbytes: int) -> None:
        file = os.memfd_create("lockstep-bench")
        paths = comm.all_gather_object(f"/proc/{os.getpid()}/fd/{file}")
        mine = self._halves(paths[comm.rank], nbytes)
        comm.barrier()
        self._pairs = list(zip(mine, self._halves(paths[(comm.rank + 1) % comm.world_size], nbytes)[::-1], strict=True))
        comm.barrier()
        os.close(file)

    @staticmethod
    def _halves(path: str, nbytes: int) -> list[Tensor]:
        both = torch.from_file(path, shared=True, size=2 * nbytes, dtype=torch.uint8)
        return [half.zero_() for half in both.split(nbytes)]

    def by_torch(self) -> None:
        """Tensor.copy_."""
        target, source = self._pairs[0]
        target.copy_(source)
        self._pairs.reverse()
