"""Before parameters are shared out among ranks: they can be, and all ranks have the same ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from lockstep.comm.communicator import Communicator
from lockstep.errors import ConfigError, ModelMismatch
from lockstep.observe.tensor_digest import digests
from lockstep.parallel.replica import verify_same_model
from lockstep.parallel.zero.chunk import ReplicatedChunk

_LABEL = "optimizer.verify"


def check_params(params: Sequence[Tensor], names: Sequence[str], comm: Communicator) -> None:
    """Raises: ConfigError for parameters on another device than the group's, without values, or in shared memory."""
    taken: list[tuple[int, int, str]] = []
    for param, name in zip(params, names, strict=True):
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


def verify_same_params(comm: Communicator, params: Sequence[Tensor], names: Sequence[str]) -> None:
    """Collective: every rank of `comm`. Raises: ModelMismatch, on every rank, where ranks pass other parameters."""
    rows: list[list[object]] = [
        ["parameter", name, list(param.shape), str(param.dtype).removeprefix("torch."), param.requires_grad]
        for param, name in zip(params, names, strict=True)
    ]
    verify_same_model(comm, rows)


def verify_same_values(comm: Communicator, chunks: Sequence[ReplicatedChunk]) -> None:
    """Collective: every rank. Raises: ModelMismatch, on every rank, with the first parameter whose bits differ."""
    if comm.world_size == 1 or not chunks:
        return
    if _all_equal(comm, [chunk.flat for chunk in chunks]):
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
    said = comm.all_gather_object(digests(tensors), label=_LABEL)
    return all(one == said[0] for one in said)
