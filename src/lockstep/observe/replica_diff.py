"""What the ranks hold of one model, compared: what differs, on which ranks, and what that means, in words.

Pure, and without torch: guards compare what other processes say.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

MISSING = "nothing"
OF_GROUP = " of parameter group "
SIGNS = "signs"  # of parameters: what explains why they differ, and is not compared
_SLOTS = 6  # kinds that travel by themselves: whole tensors, moving buffers, options, pieces of so many meshes


class Entry(NamedTuple):
    """One thing that every rank should have alike."""

    what: str  # "parameter '0.weight'", "exp_avg of '0.weight'", "lr of parameter group 0"
    value: str  # 16 digits of a digest, or the option itself
    holders: tuple[int, ...] = ()  # ranks of the job that have a copy of this piece; () for all
    is_moving: bool = False  # a buffer that has changed since the last look


class Difference(NamedTuple):
    """An entry that is not the same everywhere."""

    what: str
    values: dict[int, str]  # by rank
    odd: tuple[int, ...]  # ranks that are not with the majority; () where there is none


def fold(entries: Iterable[Entry]) -> list[int]:
    """A few words for all `entries`, to be compared by `agree`: pairs of who has them too, and their digest.

    Shapes: 12 signed 64-bit numbers, for any number of entries.
    """
    kinds: dict[str, Any] = {}
    for entry in entries:
        kind = "moving" if entry.is_moving else "options" if OF_GROUP in entry.what else repr(entry.holders)
        if len(kinds) >= _SLOTS - 3 and kind not in (*kinds, "moving", "options"):
            kind = "others"  # is not compared
        hashed = kinds.setdefault(kind, hashlib.blake2b(digest_size=8))
        hashed.update(f"{entry.what}={entry.value}{entry.holders}\n".encode())
    words = [(_word(kind.encode()), hashed.digest()) for kind, hashed in kinds.items()]
    found = [number for kind, digest in words for number in (kind, int.from_bytes(digest, "little", signed=True))]
    return found + [0] * (2 * _SLOTS - len(found))


def _word(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


_MOVING = _word(b"moving")
_OTHERS = _word(b"others")
_OPTIONS = _word(b"options")


def agree(folds: Iterable[Sequence[int]], *, moving: bool = False, options: bool = True) -> bool:
    """Whether ranks that have the same things have the same values. `moving`: of the moving buffers, or of the rest,

    with the `options` of optimizers or without.
    """
    seen: dict[int, int] = {}
    pairs = ((row[i], row[i + 1]) for row in folds for i in range(0, len(row), 2))
    return all(
        seen.setdefault(kind, digest) == digest
        for kind, digest in pairs
        if kind and kind != _OTHERS and (kind == _MOVING) == moving and (options or kind != _OPTIONS)
    )


def differences(by_rank: Mapping[int, Sequence[Entry]]) -> list[Difference]:
    """What differs between the ranks, in the order of the entries.

    A buffer that is moving on every rank is left out.
    """
    values: dict[tuple[str, tuple[int, ...]], dict[int, Entry]] = {}
    for rank, entries in by_rank.items():
        for entry in entries:
            values.setdefault((entry.what, entry.holders), {})[rank] = entry
    found = []
    for (what, holders), held in values.items():
        ranks = held if holders else by_rank
        texts = {rank: held[rank].value if rank in held else MISSING for rank in ranks}
        if len(set(texts.values())) > 1 and not all(entry.is_moving for entry in held.values()):
            found.append(Difference(what, texts, odd_ranks(texts)))
    return found


def odd_ranks(values: Mapping[int, Any]) -> tuple[int, ...]:
    """Those that are not with the majority; () where there is none."""
    texts = {rank: repr(value) for rank, value in values.items()}
    (text, count), *_ = Counter(texts.values()).most_common(1)
    return tuple([rank for rank, other in texts.items() if other != text]) if 2 * count > len(texts) else ()


def drift_in_words(found: Sequence[Difference], step: int, last_good: int | None) -> str:
    """One paragraph: which ranks, what, since when, likely why, what to do. Units: steps are optimizer steps."""
    odd = sorted({rank for difference in found for rank in difference.odd})
    ranks = sorted({rank for difference in found for rank in difference.values})
    others = [rank for rank in ranks if rank not in odd]
    who = f"{ranks_in_words(ranks)} no longer hold the same model, and which of them is right cannot be told"
    if odd and others:
        verb = "holds" if len(odd) == 1 else "hold"
        who = f"{ranks_in_words(odd)} no longer {verb} the same model as {ranks_in_words(others)}"
    since = "They may have differed from the start" if last_good is None else f"They were equal after step {last_good}"
    causes_first = sorted(found, key=lambda difference: OF_GROUP not in difference.what)
    first = [difference_in_words(difference) for difference in causes_first[:3]]
    more = f" and {len(found) - len(first)} more differ" if len(found) > len(first) else ""
    good = "" if last_good is None else f" of step {last_good} or before"
    return (
        f"{who}: at step {step}, {'; '.join(first)}{more}. {since}. {likely_cause(found)} Averaging does not bring "
        f"replicas together again: go on from the newest checkpoint{good} (`lockstep train ... --resume auto`, or "
        "checkpointer.load(state)), on every rank."
    )


def difference_in_words(difference: Difference) -> str:
    """Who has what of one thing."""
    groups = sorted(alike(difference.values).items(), key=lambda item: -len(item[1]))
    return f"{difference.what} is " + ", ".join(f"{value} on {ranks_in_words(ranks)}" for value, ranks in groups)


def alike(values: Mapping[int, Any]) -> dict[Any, list[int]]:
    """By value: the ranks that have it."""
    found: dict[Any, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).append(rank)
    return found


def ranks_in_words(ranks: Sequence[int]) -> str:
    """rank 1; ranks 0, 2"""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return ("rank " if len(ranks) == 1 else "ranks ") + shown


def likely_cause(found: Sequence[Difference]) -> str:
    """Why these things may differ, and what to do about it."""
    if any(OF_GROUP in difference.what for difference in found):
        return "Give the optimizer and its schedule the same options on every rank."
    if all(difference.what.startswith("buffer ") for difference in found):
        return "Buffers alone: train() and eval() on all ranks alike, and forward_sync_buffers on, keep them equal."
    if len(found) == 1:
        return "One tensor alone: it was changed on one rank only, or a bit flipped in its memory."
    if all(" of '" in difference.what for difference in found):
        return "The optimizer's state alone: it was loaded or changed on some ranks only, or from another checkpoint."
    return (
        "Likely gradients were not averaged, not applied everywhere, or clipped or scaled on some ranks: call the "
        "wrapped model and not its .module, and optimizer.step() on every rank."
    )
