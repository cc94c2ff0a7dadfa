"""What all ranks agree on before a save: that they save one state, and who writes which piece of it.

Who writes what follows from the structure: names, dtypes, shapes, ties, how tensors are cut; not from any number. So a
plan is good until the structure changes on some rank. Until then ranks exchange its name, and a digest of the values.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from lockstep.checkpoint.flatten import flatten
from lockstep.checkpoint.generation import STEP_END
from lockstep.checkpoint.shares import Layout, layout_of, plan_pieces, without
from lockstep.checkpoint.state import SHARDS, FlatState, State
from lockstep.checkpoint.tensor_file import Piece, dtype_name
from lockstep.checkpoint.together import together
from lockstep.comm.communicator import Communicator
from lockstep.comm.tensor_parts import AnyTensor, Part, TensorPieces, held, is_dtensor, local_of
from lockstep.errors import CheckpointError, CheckpointMismatch

_DIFFERENCES_SHOWN = 5

Table = dict[str, tuple[str, tuple[int, ...]]]  # path -> dtype in the format's words, whole shape


class StateStructure(NamedTuple):
    """What one rank saves, without the numbers. Where it is equal, this rank has the same part in a save."""

    common: dict[str, tuple[Any, ...]]  # of what all ranks have: path -> see `_form`
    aliases: dict[str, str]
    own: dict[str, tuple[Any, ...]]  # of this rank's shards
    own_aliases: dict[str, str]
    shards: list[int]


class Source(NamedTuple):
    """Where the elements of a piece are."""

    path: str
    which: int  # of what this rank holds of the tensor
    slices: tuple[slice, ...] | None  # of that; None: all


@dataclass(frozen=True)
class Plan:
    """What this rank does in every save of one structure."""

    name: str  # digest of all that ranks have said of their structures
    structure: StateStructure  # this rank's
    tensors: Table  # all ranks'
    aliases: dict[str, str]  # all ranks'
    pieces: Sequence[Piece]  # that this rank writes
    sources: Sequence[Source]  # of each piece


@dataclass(frozen=True)
class Job:
    """What this rank knows once all ranks have agreed on what is saved."""

    step: int
    plan: Plan
    common: FlatState  # what all ranks have
    own: FlatState  # this rank's shards

    def source(self, index: int) -> Tensor:
        """The elements of a piece of the plan, as a view of what this rank holds of the tensor."""
        path, which, slices = self.plan.sources[index]
        tensor = self.common.tensors[path] if path in self.common.tensors else self.own.tensors[path]
        local = tensor.pieces[which][1] if isinstance(tensor, TensorPieces) else local_of(tensor)
        return local if slices is None else local[slices]


def agree(
    comm: Communicator,
    what: str,
    step: int,
    state: State,
    shards: Mapping[int, State],
    last: Plan | None,
    wait_for_earlier: Callable[[], None],
) -> Job:
    """Find out whether all ranks are saving the same, when the save before is done. Collective.

    last: the plan of the save before, which is used again where it fits on every rank.
    Raises: CheckpointError on every rank.
    """

    def look() -> tuple[tuple[FlatState, FlatState, StateStructure], Any]:
        wait_for_earlier()
        if type(step) is not int or not 0 <= step < STEP_END:
            raise CheckpointError(f"step={step!r}: a step is a number from 0 up, of at most 18 digits")
        common, own = flatten(state), _flat_shards(shards)
        if any(path.partition("/")[0] == SHARDS for path in (*common.tensors, *common.aliases, *common.values)):
            raise CheckpointError(f"{SHARDS!r} cannot be a key of the state: give it as save(..., shards={{id: ...}})")
        structure = StateStructure(_forms(common), common.aliases, _forms(own), own.aliases, sorted(shards))
        name = last.name if last is not None and last.structure == structure else ""
        return (common, own, structure), [name, _digest(common.values, common.kinds)]

    (common, own, structure), said = together(comm, what, look)
    if last is None or any(name != last.name for name, _ in said):
        last = _planned(comm, what, structure, common, own)
    _check_equal(comm, what, "values", [values for _, values in said], {**common.values, **common.kinds})
    return Job(step, last, common, own)


def _flat_shards(shards: Mapping[int, State]) -> FlatState:
    for number in shards:
        if type(number) is not int or number < 0:
            raise CheckpointError(f"{number!r} is no number of a shard: use 0, 1, ...")
    flat = flatten({SHARDS: {str(number): shard for number, shard in shards.items()}} if shards else {})
    for path, tensor in flat.tensors.items():
        if is_dtensor(tensor) or isinstance(tensor, TensorPieces):
            raise CheckpointError(f"{path} is cut over ranks, but a shard is one rank's: put it into the state")
    return flat


def _forms(flat: FlatState) -> dict[str, tuple[Any, ...]]:
    return {path: _form(tensor) for path, tensor in flat.tensors.items()}


def _form(tensor: Any) -> tuple[Any, ...]:
    """All of a tensor that says which part of it this rank has."""
    if isinstance(tensor, TensorPieces):
        return tensor.dtype, tensor.shape, [part for part, _ in tensor.pieces]
    if is_dtensor(tensor):
        return tensor.dtype, tensor.shape, tensor.device_mesh, tensor.placements, local_of(tensor).shape
    return tensor.dtype, tensor.shape


# ------------------------------------------------------------------ a new plan


def _planned(comm: Communicator, what: str, structure: StateStructure, common: FlatState, own: FlatState) -> Plan:
    """The plan for the structures of all ranks. Collective: one exchange, and one more for ties that are not seen."""
    tensors = _table(common)
    tensors |= {path: tensors[target] for path, target in common.aliases.items()}  # an empty piece cannot see its ties

    def look() -> tuple[dict[str, Layout], Any]:
        said = [_digest(tensors), structure.shards, common.aliases, _boxes(common), own.aliases, _table(own)]
        return {p: layout_of(t, p) for p, t in common.tensors.items() if not isinstance(t, TensorPieces)}, said

    layouts, everyone = together(comm, what, look)
    digests, shards, ties, boxes, own_ties, own_tables = zip(*everyone, strict=True)
    _check_owners(what, shards)
    _check_equal(comm, what, "tensors", digests, tensors)
    aliases = {path: target for seen in ties for path, target in seen.items()}
    if any(seen != aliases for seen in ties):
        common, _ = together(comm, what, lambda: (tied_as(common, aliases), None))
    alone = own.tensors | {path: tensor for path, tensor in common.tensors.items() if path not in layouts}
    pieces = plan_pieces({p: t for p, t in layouts.items() if p in common.tensors}, comm.rank, comm.world_size)
    for path, tensor in alone.items():
        earlier = [box for seen in boxes[: comm.rank] for box in seen.get(path, ())]  # that those ranks write
        mine = without([part for part, _ in held(tensor)], [Part(*map(tuple, box)) for box in earlier])
        pieces += [Piece(path, dtype_name(tensor.dtype, path), part) for part in mine]
    everything = common.tensors | own.tensors
    sources = [_source(piece, everything[piece.path]) for piece in pieces]
    table = _table(common)
    for own_table, seen in zip(own_tables, own_ties, strict=True):
        table |= {path: (dtype, tuple(shape)) for path, (dtype, shape) in own_table.items()}
        aliases |= seen
    return Plan(_digest(everyone), structure, table, aliases, pieces, sources)


def _source(piece: Piece, tensor: AnyTensor) -> Source:
    parts = [part for part, _ in held(tensor)]
    which = next(which for which, part in enumerate(parts) if piece.part.overlap(part) == piece.part)
    part = parts[which]
    return Source(piece.path, which, None if part == piece.part else piece.part.within(part).slices)


def tied_as(flat: FlatState, aliases: Mapping[str, str]) -> FlatState:
    """`flat` with the aliases that all ranks together have found: one with an empty piece of a tensor cannot see them.

    Raises: CheckpointError where this rank can see that tensors are tied otherwise.
    """
    tensors = {path: tensor for path, tensor in flat.tensors.items() if path not in aliases}
    wrong = {path for path, target in flat.aliases.items() if aliases.get(path) != target}
    wrong |= {path for path in aliases if path in flat.tensors and _has_elements(flat.tensors[path])}
    wrong |= {path for path, target in aliases.items() if target not in tensors}
    if wrong:
        raise CheckpointError(f"{', '.join(sorted(wrong))}: tied to another tensor on one rank and not on all")
    return FlatState(tensors, flat.values, flat.kinds, dict(aliases))


def _has_elements(tensor: AnyTensor) -> bool:
    """Whether this rank holds any."""
    return bool(tensor.pieces if isinstance(tensor, TensorPieces) else local_of(tensor).numel())


def _table(flat: FlatState) -> Table:
    return {path: (dtype_name(tensor.dtype, path), tuple(tensor.shape)) for path, tensor in flat.tensors.items()}


def _boxes(flat: FlatState) -> dict[str, list[Part]]:
    """What this rank has of each tensor in pieces; groups of ranks may have copies, cut in other ways."""
    cut = {path: tensor for path, tensor in flat.tensors.items() if isinstance(tensor, TensorPieces)}
    return {path: [part for part, _ in tensor.pieces] for path, tensor in cut.items() if tensor.pieces}


# ------------------------------------------------------------------ what differs


def _check_owners(what: str, shards: Sequence[Sequence[int]]) -> None:
    """Raises: CheckpointMismatch where two ranks have a shard of the same number."""
    owners: dict[int, int] = {}
    for rank, numbers in enumerate(shards):
        for number in numbers:
            if owners.setdefault(number, rank) != rank:
                raise CheckpointMismatch(
                    f"{what}: ranks {owners[number]} and {rank} both have shard {number}: a shard is one rank's"
                )


def _check_equal(comm: Communicator, what: str, noun: str, digests: Sequence[str], mine: Mapping[str, Any]) -> None:
    """Raises: CheckpointMismatch on every rank where `digests`, of what each rank has, differ; `mine` says in what."""
    others = [rank for rank, found in enumerate(digests) if found != digests[0]]
    if others:
        _, said = together(comm, what, lambda: (None, {path: _digest(entry)[:16] for path, entry in mine.items()}))
        paths = sorted({path for rank in others for path, _ in said[0].items() ^ said[rank].items()})
        raise CheckpointMismatch(
            f"{what}: ranks {others} have other {noun} than rank 0: {', '.join(paths[:_DIFFERENCES_SHOWN])}. Every "
            "rank saves the same state; what is a rank's own belongs into shards={comm.rank: ...}"
        )


def _digest(*entries: Any) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
