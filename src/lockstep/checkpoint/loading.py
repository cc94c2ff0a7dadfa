"""One load: the newest checkpoint of which every byte is right, into tensors that may be cut in any way."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lockstep.checkpoint.flatten import flatten
from lockstep.checkpoint.generation import Name, names_in, of_step
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.reader import CheckpointReader, open_checkpoint, overlaps_itself, some
from lockstep.checkpoint.state import SHARDS, FlatState, State, is_at, is_under, join, keys_of, unflatten
from lockstep.checkpoint.tensor_file import DTYPES
from lockstep.checkpoint.together import together
from lockstep.comm.communicator import Communicator
from lockstep.comm.tensor_parts import AnyTensor, held, is_dtensor
from lockstep.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, CheckpointMissing, ConfigError

Allowed = Callable[[str, str], bool]  # (kind of difference, path) -> whether it is no error
_KINDS = ("dtype", "shape", "missing", "extra")


@dataclass(frozen=True)
class Loaded:
    """What `Checkpointer.load` found."""

    step: int
    state: State  # as it was saved; tensors and objects are those of `into`
    shards: dict[int, State]  # those that were asked for
    path: Path
    skipped: tuple[str, ...]  # why newer checkpoints were passed over
    digest: str  # of its manifest


def load_newest(
    comm: Communicator,
    directory: Path,
    into: State | None,
    step: int | None,
    shards: Sequence[int],
    allow: Collection[str],
) -> Loaded | None:
    """See `Checkpointer.load`."""
    allowed = _allowed(allow)
    what = f"cannot load {'the newest checkpoint' if step is None else f'step {step}'}"
    if type(step) not in (int, NoneType):
        raise ConfigError(f"step={step!r}: a number, or None for the newest checkpoint")
    skipped: dict[str, str] = {}
    news = ""
    while True:
        there = _names(comm, what, directory, news)
        names = [str(name) for name in (there if step is None else of_step(there, step, directory))]
        skipped = {name: reason for name, reason in skipped.items() if name in names}  # another process may prune
        if not names:
            return None
        name = next((name for name in names if name not in skipped), None)
        if name is None:
            raise CheckpointDamaged(f"no checkpoint in {directory} is good: " + "; ".join(skipped.values()))
        try:
            return _load(comm, directory / name, into, shards, allowed, tuple(skipped.values()))
        except (CheckpointDamaged, CheckpointMissing) as error:
            skipped[name] = str(error)
            news = f"{error}. The next older checkpoint is tried" if name != names[-1] else ""


def _names(comm: Communicator, what: str, directory: Path, news: str) -> list[Name]:
    """The checkpoints that rank 0 sees, the newest first. Rank 0 warns of `news`. Collective.

    Raises: CheckpointError, also where warnings are errors.
    """

    def look() -> tuple[None, Any]:
        if news and comm.rank == 0:
            warnings.warn(news, stacklevel=6)  # in the line that called `Checkpointer.load`
        return None, names_in(directory) if comm.rank == 0 else []

    _, answers = together(comm, what, look)
    return [Name(*name) for name in answers[0]]


def _load(
    comm: Communicator,
    path: Path,
    into: State | None,
    shards: Sequence[int],
    allowed: Allowed,
    skipped: tuple[str, ...],
) -> Loaded:
    what = f"cannot load {path.name}"
    with contextlib.ExitStack() as stack:

        def check() -> tuple[CheckpointReader, str]:
            reader = stack.enter_context(open_checkpoint(path))
            reader.verify(sorted(reader.manifest.files)[comm.rank :: comm.world_size])
            return reader, reader.manifest_digest

        reader, digests = together(comm, what, check)
        if len(set(digests)) > 1:
            raise CheckpointError(f"{what}: the ranks see different files there; all need the same directory")
        plan, _ = together(comm, what, lambda: (_Plan(reader.manifest, into, shards, allowed), None))
        together(comm, what, lambda: (plan.fill(reader), None))
        (state, own), _ = together(comm, what, lambda: (plan.finish(), None))
    return Loaded(reader.manifest.step, state, own, path, skipped, reader.manifest_digest)


# ------------------------------------------------------------------ what goes where


def _allowed(words: Collection[str]) -> Allowed:
    """Tells which differences are no errors. Raises: ConfigError for a word that says nothing."""
    patterns: list[tuple[str, str]] = []
    for word in (words,) if isinstance(words, str) else words:
        kind, _, pattern = word.partition(":")
        if kind not in _KINDS:
            raise ConfigError(f"allow={word!r}: use {', '.join(_KINDS)}, each alone or as 'missing:model/head.*'")
        patterns.append((kind, pattern or "*"))
    return lambda kind, path: any(kind == known and fnmatch.fnmatchcase(path, each) for known, each in patterns)


class _Plan:
    """Which tensors are filled from which of the checkpoint, once all that does not fit is known and allowed."""

    def __init__(self, manifest: Manifest, into: State | None, shards: Sequence[int], allowed: Allowed) -> None:
        self.manifest = manifest
        self.fills: dict[str, AnyTensor] = {}  # tensors that get the checkpoint's elements, by path
        self.kept: dict[str, Any] = {}  # tensors and values that stay as they are, as was allowed
        self.tied: dict[str, str] = {}  # tensors of `into` that are others
        self.objects: dict[str, tuple[tuple[Any, ...], Any]] = {}  # that load what was theirs: keys to it, and it
        self.shards = {number: join(SHARDS, str(number)) for number in dict.fromkeys(shards)}
        problems = []
        if into is None:
            self._take_whole(lambda path: not is_under(path, SHARDS))
        else:
            if not isinstance(into, dict):
                raise ConfigError(f"into={type(into).__name__}: load into a dict, as {{'model': model}}")
            there = [path for path in (*manifest.tensors, *manifest.aliases) if not is_under(path, SHARDS)]
            problems += self._fit(into, there, allowed)
        for prefix in self.shards.values():
            self._take_whole(lambda path, top=prefix: is_at(path, top))
            if not manifest.has(prefix) and not allowed("missing", prefix):
                problems.append(f"{prefix} is not in the checkpoint")
        if problems:
            raise CheckpointMismatch(some(problems, "; "))

    def fill(self, reader: CheckpointReader) -> None:
        """Let the tensors have the checkpoint's elements. Memory: blocks of 16 MiB where they have to be converted."""
        with torch.no_grad():
            for path, tensor in self.fills.items():
                for part, local in held(tensor):
                    reader.read_into(local, path, part)

    def finish(self) -> tuple[State, dict[int, State]]:
        """Give the objects what was theirs; return the state, and those of the shards that were asked for."""
        leaves = {**self.manifest.values, **self.fills, **self.kept}
        leaves |= {path: leaves[target] for path, target in self.tied.items() if target in leaves}
        parents = {path.rsplit("/", depth)[0] for path in leaves for depth in range(path.count("/") + 1)}
        kinds = {path: kind for path, kind in self.manifest.kinds.items() if path in leaves or path in parents}
        tensors = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, AnyTensor)}
        values = {path: leaf for path, leaf in leaves.items() if not isinstance(leaf, AnyTensor)}
        state = unflatten(FlatState(tensors, values, kinds, {}))
        shards = state.pop(SHARDS, {})
        for (*above, name), owner in self.objects.values():
            place: Any = state
            for key in above:
                place = place[key]
            owner.load_state_dict(place[name])
            place[name] = owner
        return state, {number: shards[str(number)] for number in self.shards if str(number) in shards}

    def _take_whole(self, is_wanted: Callable[[str], bool]) -> None:
        self.fills |= {path: self._room(path) for path in self.manifest.tensors if is_wanted(path)}
        self.tied |= {path: target for path, target in self.manifest.aliases.items() if is_wanted(path)}

    # ------------------------------------------------------------------ what fits

    def _fit(self, into: State, there: Sequence[str], allowed: Allowed) -> list[str]:
        """Find out what is filled, of the tensors `there`. Returns: what does not fit and is not allowed."""
        absent: list[str] = []
        flat = flatten(self._rooms(into, (), absent))
        differences = [("missing", path, "is not in the checkpoint") for path in absent]
        self.tied |= flat.aliases
        known = set(there)
        for path, tensor in flat.tensors.items():
            found = self._difference(path, tensor) if path in known else ("missing", path, "is not in the checkpoint")
            if found is not None:
                differences.append(found)
            if found is None or found[0] == "dtype":
                self.fills[path] = tensor
            else:
                self.kept[path] = tensor
        for path, value in flat.values.items():
            if path not in self.manifest.values and not self.manifest.has(path):
                differences.append(("missing", path, "is not in the checkpoint"))
                self.kept[path] = value
        for path in there:
            if path in self.tied and path in self.manifest.tensors:
                differences.append(("extra", path, f"is tied to {self.tied[path]} here, not in the checkpoint"))
            elif path not in flat.tensors and path not in self.tied:
                differences.append(("extra", path, "is in the checkpoint only"))
        problems = [f"{path} {text} (allow={kind!r})" for kind, path, text in differences if not allowed(kind, path)]
        for path, tensor in self.fills.items():
            if any(overlaps_itself(local) for _, local in held(tensor)):
                problems.append(f"{path} has elements that share memory, as those of expand() do: load into a clone()")
        return problems

    def _difference(self, path: str, tensor: AnyTensor) -> tuple[str, str, str] | None:
        dtype, shape = self.manifest.tensors[self.manifest.target(path)]
        if tuple(tensor.shape) != tuple(shape):
            return "shape", path, f"is {list(tensor.shape)}, the checkpoint has {list(shape)}"
        if tensor.dtype != DTYPES[dtype]:
            return "dtype", path, f"is {tensor.dtype}, the checkpoint has {DTYPES[dtype]}"
        return None

    def _rooms(self, into: dict[Any, Any], keys: tuple[Any, ...], absent: list[str]) -> dict[Any, Any]:
        """`into`, which lies under `keys`, with tensors to be filled in place of objects, which are noted."""
        rooms: dict[Any, Any] = {}
        for key, value in into.items():
            here = (*keys, key)
            path = functools.reduce(join, here, "")
            if callable(getattr(value, "load_state_dict", None)):
                if self.manifest.has(path):
                    self.objects[path] = (here, value)
                    rooms[key] = self._room_of(path, value)
                else:
                    absent.append(path)
            elif isinstance(value, dict) and value:
                rooms[key] = self._rooms(value, here, absent)
            else:
                rooms[key] = value
        return rooms

    def _room_of(self, path: str, owner: Any) -> Any:
        """Tensors for what the checkpoint has of `owner`: its own, those it makes, or whole ones on the CPU."""
        if hasattr(owner, "room_for"):
            return owner.room_for(self.manifest.subtree(path, lambda tensor: self._room(tensor, "meta")))
        if isinstance(owner, Module):
            return owner.state_dict()
        if isinstance(owner, Optimizer):
            params = [param for group in owner.param_groups for param in group["params"]]
            above = keys_of(join(path, "state"))
            return self.manifest.subtree(path, lambda tensor: self._state_room(tensor, above, params, owner))
        return self.manifest.subtree(path, self._room)

    def _state_room(self, path: str, above: Sequence[str], params: Sequence[Any], owner: Any) -> AnyTensor:
        """Of a DTensor the state is DTensors: cut as it is, and where it has another shape whole on every rank.

        Of a whole parameter, an optimizer that is itself cut has room for its elements.
        """
        *before, number, key = keys_of(path)
        room = self._room(path, "meta")
        if before != list(above) or not number.isdecimal() or int(number) >= len(params):
            return self._room(path)
        param = params[int(number)]
        if not is_dtensor(param) and hasattr(owner, "room_of") and room.ndim > 0 and room.shape == param.shape:
            return owner.room_of(param, room.dtype)
        if not is_dtensor(param) or (room.ndim == 0 and (param.ndim > 0 or key == "step")):
            return self._room(path)
        with torch.no_grad():
            return param.new_empty(room.shape, dtype=room.dtype)

    def _room(self, path: str, device: str = "cpu") -> Tensor:
        dtype, shape = self.manifest.tensors[self.manifest.target(path)]
        return torch.empty(tuple(shape), dtype=DTYPES[dtype], device=device)
