"""Small JSON values between ranks, as tensors of bytes; never pickle.

The size travels first. A value that cannot travel has the size -1, so that every rank raises and none waits for more.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.errors import CommError, ConfigError

if TYPE_CHECKING:
    from lockstep.comm.communicator import Communicator

MAX_OBJECT_BYTES = 1 << 20  # objects are for settings and reports; data travels as tensors


def broadcast_object(comm: Communicator, value: Any, src: int, label: str, limit: int = MAX_OBJECT_BYTES) -> Any:
    """Rank `src`'s value, of at most `limit` bytes, on every rank."""
    payload, error = _encode(value, limit) if comm.rank == src else (b"", None)
    size = torch.tensor([-1 if error else len(payload)], device=comm.device)
    comm.broadcast(size, src, label=label or "object.size")
    _check_sizes([int(size.item())], [src], error, limit)
    data = _tensor(payload, int(size.item()), comm.device)
    comm.broadcast(data, src, label=label or "object")
    return _decode(data)


def broadcast_values(comm: Communicator, values: Sequence[Any], src: int, label: str) -> list[Any]:
    """Rank `src`'s tensors and JSON values on every rank; tensors are where `comm` communicates."""
    described = [[list(v.shape), str(v.dtype).removeprefix("torch.")] if isinstance(v, Tensor) else [v] for v in values]
    found: list[Any] = []
    for place, (value, *dtype) in enumerate(broadcast_object(comm, described, src, label)):
        if dtype:
            empty = torch.empty(value, dtype=getattr(torch, dtype[0]), device=comm.device)
            value = values[place].detach().to(comm.device).contiguous() if comm.rank == src else empty
            comm.broadcast(value, src, label=label)
        found.append(value)
    return found


def all_gather_object(comm: Communicator, value: Any, label: str, limit: int = MAX_OBJECT_BYTES) -> list[Any]:
    """The ranks' values, each of at most `limit` bytes, in rank order, on every rank."""
    sizes, mine = _exchange_sizes(comm, value, label, limit)
    rows = all_gather_rows(comm, mine, label or "object")
    return [_decode(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def gather_object(comm: Communicator, value: Any, dst: int, label: str) -> list[Any] | None:
    """The ranks' values, in rank order, on rank `dst`; None on the others."""
    sizes, mine = _exchange_sizes(comm, value, label, MAX_OBJECT_BYTES)
    rows = [torch.empty_like(mine) for _ in sizes] if comm.rank == dst else None
    comm.gather(mine, rows, dst, label=label or "object")
    return None if rows is None else [_decode(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def all_gather_rows(comm: Communicator, mine: Tensor, label: str) -> Tensor:
    """Every rank's `mine` [n] as [W, n]. Collective: every rank; blocks."""
    rows = torch.empty(comm.world_size * mine.numel(), dtype=mine.dtype, device=mine.device)
    comm.all_gather_into_tensor(rows, mine, label=label)
    return rows.view(comm.world_size, -1)


def _exchange_sizes(comm: Communicator, value: Any, label: str, limit: int) -> tuple[list[int], Tensor]:
    """Every rank's size, and this rank's bytes, as long as the longest."""
    payload, error = _encode(value, limit)
    mine = torch.tensor([-1 if error else len(payload)], device=comm.device)
    counts: list[int] = all_gather_rows(comm, mine, label or "object.size").view(-1).tolist()
    _check_sizes(counts, range(comm.world_size), error, limit)
    return counts, _tensor(payload, max(counts), comm.device)


def _check_sizes(sizes: Sequence[int], ranks: Sequence[int], error: ConfigError | None, limit: int) -> None:
    if error is not None:
        raise error
    refused = [rank for rank, size in zip(ranks, sizes, strict=True) if size < 0]
    if refused:
        raise CommError(
            f"rank {', '.join(map(str, refused))} had a value that is not JSON, or longer than {limit} "
            f"bytes; its own error says which. Nothing was sent"
        )


def _encode(value: Any, limit: int) -> tuple[bytes, ConfigError | None]:
    try:
        data = json.dumps(value, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return b"", ConfigError(f"only JSON values travel between ranks ({error}); send tensors as tensors")
    if len(data) > limit:
        return b"", ConfigError(f"object of {len(data)} bytes: the limit is {limit}; send data as tensors")
    return data, None


def _tensor(payload: bytes, length: int, device: torch.device) -> Tensor:
    """`payload` and zeros up to `length` bytes."""
    return torch.frombuffer(bytearray(payload.ljust(length, b"\0")), dtype=torch.uint8).to(device)


def _decode(payload: Tensor) -> Any:
    return json.loads(bytes(payload.cpu().numpy()))
