"""Steps that all ranks take together: it has succeeded on every rank, or raises on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from lockstep.comm.communicator import Communicator
from lockstep.comm.objects import all_gather_object, all_gather_rows
from lockstep.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointMissing,
    LockstepError,
    StaleGeneration,
)
from lockstep.observe.replica_diff import alike

_T = TypeVar("_T")
_REASON_CHARS = 4000
_ROW_BYTES = 1024
_BYTES_MAX = 64 << 20  # of what a rank says: the pieces of its file, at most the whole manifest
_KINDS = {kind.__name__: kind for kind in (CheckpointDamaged, CheckpointMismatch, CheckpointMissing, StaleGeneration)}


def together(comm: Communicator, what: str, action: Callable[[], tuple[_T, Any]]) -> tuple[_T, list[Any]]:
    """`action` returns a result and a JSON value; this returns the result and the values of all ranks.

    Collective: every rank of `comm`.
    what: "cannot save ...", the same on every rank: ranks that are at different calls find out by it.
    Raises: CheckpointError on every rank where `action` failed on one, with the reasons of all; of its own kind where
    all that failed are of one. CheckpointMismatch where the ranks are at different calls.
    """
    kind, reason, cause, result, said = "", "", None, None, None
    try:
        result, said = action()
    except Exception as error:  # noqa: BLE001 - raised below, on every rank
        cause, kind = error, type(error).__name__
        reason = _words_of(error)
    answers = _said_by_all(comm, [kind, reason[:_REASON_CHARS], said, what])
    calls = alike({rank: call.removeprefix("cannot ") for rank, (*_, call) in enumerate(answers)})
    if len(calls) > 1:
        raise CheckpointMismatch(
            "the ranks are at different calls: "
            + "; ".join(f"ranks {ranks} {call}" for call, ranks in calls.items())
            + ". Every rank makes the same calls of a Checkpointer, in the same order"
        ) from cause
    failed = {rank: text for rank, (failure, text, *_) in enumerate(answers) if failure}
    if not failed:
        return result, [value for _, _, value, _ in answers]  # pyright: ignore[reportReturnType]
    kinds = {failure for failure, *_ in answers if failure}
    error_class = _KINDS.get(kinds.pop(), CheckpointError) if len(kinds) == 1 else CheckpointError
    texts = dict.fromkeys(failed.values())
    if len(texts) == 1 and len(failed) == comm.world_size:
        raise error_class(f"{what}: {next(iter(texts))}") from cause
    raise error_class(f"{what}: " + "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())) from cause


def _words_of(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:  # a full disk is no class of Python's
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) if isinstance(error, LockstepError) else f"{type(error).__name__}: {error}"


def _said_by_all(comm: Communicator, mine: list[Any]) -> list[Any]:
    """What the ranks say, in one exchange where it is short; blank rows say that it is not."""
    try:
        text = json.dumps(mine).encode()
    except (TypeError, ValueError):
        text = b""  # below it is said why
    row = torch.frombuffer(bytearray((text if len(text) <= _ROW_BYTES else b"").ljust(_ROW_BYTES)), dtype=torch.uint8)
    rows = [bytes(one).strip() for one in all_gather_rows(comm, row.to(comm.device), "checkpoint").cpu().numpy()]
    return [json.loads(one) for one in rows] if all(rows) else all_gather_object(comm, mine, "checkpoint", _BYTES_MAX)
