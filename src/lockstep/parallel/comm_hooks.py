"""What happens to a full bucket: the default mean, and the door for hooks written for torch."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.communicator import Communicator
from lockstep.comm.op import DONE, Work
from lockstep.comm.torch_names import GradBucket, bf16_all_reduce_is_refused
from lockstep.parallel.bucket import Bucket, no_entries


class CommHook(abc.ABC):
    """Turns the ranks' buckets into one: `launch` starts it, the returned Work's `wait` ends it.

    `divides`: True where the hook itself divides by the world size; otherwise gradients enter the bucket divided.
    `chains`: True where it may start further collectives after `launch` has returned and before `wait` has.
    """

    divides: bool
    chains = False

    @abc.abstractmethod
    def launch(self, comm: Communicator, bucket: Bucket) -> Work:
        """Start the reduction of `bucket`; every rank calls it for the same buckets in the same order."""

    def finished(self, buckets: Sequence[Bucket], lacking: set[int]) -> None:  # noqa: B027 (most hooks need neither)
        """All buckets of a backward are reduced; no rank has a gradient for the parameters in `lacking`."""

    def abandoned(self) -> None:  # noqa: B027
        """A rank has failed in this step, which has gradients on no rank."""


class Mean(CommHook):
    """The mean of the gradients over the ranks; the division happened while they were copied into the bucket."""

    divides = False

    def launch(self, comm: Communicator, bucket: Bucket) -> Work:
        if comm.world_size == 1:
            return DONE
        if bucket.sparse:
            return SparseSum(comm, bucket)
        return comm.all_reduce(bucket.flat, async_op=True, label=f"bucket{bucket.index()}")


class Fp16Mean(CommHook):
    """The mean, with half the bytes on the wire. Source: torch's builtin FP16_COMPRESS hook."""

    divides = True

    def launch(self, comm: Communicator, bucket: Bucket) -> Work:
        small = bucket.buffer().to(torch.float16).div_(comm.world_size)
        bucket.result = small
        return comm.all_reduce(small, async_op=True, label=f"bucket{bucket.index()}")


class TorchHook(CommHook):
    """A hook with torch's signature: `hook(state, bucket) -> torch.futures.Future[Tensor]`."""

    divides = True
    chains = True

    def __init__(self, state: Any, hook: Callable[[Any, Any], torch.futures.Future[Tensor]]) -> None:
        check_torch_hook(hook)
        self.state = state
        self.hook = hook

    def launch(self, comm: Communicator, bucket: Bucket) -> Work:
        return FutureWork(self.hook(self.state, bucket), bucket)


class FutureWork(Work):
    """Waits for a hook's future and keeps its value as the bucket's result."""

    def __init__(self, future: torch.futures.Future[Tensor], bucket: Bucket) -> None:
        self._future = future
        self._bucket = bucket

    def wait(self, timeout_s: float | None = None) -> None:
        value = self._future.wait()
        self._bucket.result = value[0] if isinstance(value, (list, tuple)) else value

    def is_done(self) -> bool:
        return self._future.done()


class SparseSum(Work):
    """The sum of sparse gradients [rows, ...]: every rank's indices and values side by side, then coalesced.

    Submitting gathers the number of entries per rank; waiting gathers the entries, padded to the longest. A rank
    without entries takes the layout (how many dimensions are sparse) from those that have some.
    """

    def __init__(self, comm: Communicator, bucket: Bucket) -> None:
        self._comm = comm
        self._bucket = bucket
        self._grad = bucket.buffer().coalesce()
        self._counts = torch.empty(2 * comm.world_size, dtype=torch.int64, device=comm.device)
        mine = [self._grad._nnz(), self._grad.sparse_dim() if self._grad._nnz() else 0]
        self._label = f"bucket{bucket.index()}.sparse"
        counts = torch.tensor(mine, dtype=torch.int64, device=comm.device)
        self._work = comm.all_gather_into_tensor(self._counts, counts, async_op=True, label=self._label)

    def wait(self, timeout_s: float | None = None) -> None:
        self._work.wait(timeout_s)
        counts, sparse_dims = self._counts.view(-1, 2).t().tolist()
        grad = self._grad
        if max(counts) == 0:
            self._bucket.result = grad
            return
        if grad.sparse_dim() != max(sparse_dims):
            grad = no_entries(grad, max(sparse_dims))
        indices = self._gather(grad.indices().t().contiguous(), counts)  # [sum nnz, sparse_dim]
        values = self._gather(grad.values(), counts)  # [sum nnz, ...]
        whole = torch.sparse_coo_tensor(indices.t(), values, grad.shape, check_invariants=False)
        self._bucket.result = whole.coalesce()

    def _gather(self, rows: Tensor, counts: list[int]) -> Tensor:
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        whole = rows.new_empty((len(counts), *padded.shape))
        self._comm.all_gather_into_tensor(whole, padded, label=self._label)
        return torch.cat([whole[rank, :count] for rank, count in enumerate(counts)])

    def is_done(self) -> bool:
        return False  # the second half starts in wait


def check_torch_hook(hook: Callable[..., Any]) -> None:
    """Refuse what torch refuses: not callable, wrong annotations, bf16 compression where torch does not run it."""
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    described = inspect.signature(hook)
    if "bucket" not in described.parameters:
        raise ValueError("Communication hook: it needs the parameters `state` and `bucket`, by these names.")
    annotation = described.parameters["bucket"].annotation
    if annotation not in (inspect.Parameter.empty, GradBucket, Bucket):
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    if described.return_annotation not in (inspect.Signature.empty, torch.futures.Future[Tensor]):
        raise ValueError("Communication hook: return annotation should be torch.futures.Future[torch.Tensor].")
    name = getattr(hook, "__name__", "")
    if name in ("bf16_compress_hook", "bf16_compress_wrapper_hook") and bf16_all_reduce_is_refused():
        raise TypeError("BF16 all reduce communication hook required CUDA 11+ and NCCL 2.10+ or XPU and XCCL")
