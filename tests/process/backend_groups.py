"""Default groups of torch.distributed on the ranks of a pool, for the tests of the backend "lockstep"."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.process_group import register_backend


@contextlib.contextmanager
def default_group(
    backend: str, folder: str, rank: int, world_size: int, name: str = "", timeout_s: float = 30.0
) -> Iterator[None]:
    """The default group of this rank; the ranks meet in a file of `folder`, one for each backend and name."""
    register_backend()
    file = f"{folder}/{backend.replace(':', '-').replace(',', '-')}{name}"
    dist.init_process_group(
        backend,
        init_method=f"file://{file}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def equal_on_both(rank: int, world_size: int, folder: str, case: Callable[..., Any], *args: Any) -> Any:
    """`case(*args)` on Gloo and on lockstep; raises where they differ in one bit."""
    results = []
    for backend in ("gloo", "lockstep"):
        torch.manual_seed(7 + rank)
        with default_group(backend, folder, rank, world_size, case.__name__):
            results.append(case(*args))
    same(*results)
    return results[1]


def same(theirs: Any, ours: Any, place: str = "result") -> None:
    """Equal types, and tensors equal in every bit."""
    assert type(theirs) is type(ours), f"{place}: {type(theirs)} and {type(ours)}"
    if isinstance(theirs, Tensor):
        assert (theirs.dtype, theirs.shape) == (ours.dtype, ours.shape), f"{place}: {theirs} and {ours}"
        assert torch.equal(_bits(theirs), _bits(ours)), f"{place}: gloo gives {theirs}, lockstep {ours}"
    elif isinstance(theirs, dict):
        assert theirs.keys() == ours.keys(), place
        for key, value in theirs.items():
            same(value, ours[key], f"{place}[{key!r}]")
    elif isinstance(theirs, list | tuple):
        assert len(theirs) == len(ours), place
        for index, pair in enumerate(zip(theirs, ours, strict=True)):
            same(*pair, f"{place}[{index}]")
    else:
        assert theirs == ours, f"{place}: {theirs} and {ours}"


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().resolve_conj().clone(memory_format=torch.contiguous_format).view(-1)
    return flat.view(torch.uint8)


def strided(tensor: Tensor) -> Tensor:
    """The same numbers in memory that is not contiguous."""
    holder = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
    holder[..., 0].copy_(tensor)
    return holder[..., 0]
