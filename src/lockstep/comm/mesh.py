"""Ranks as a grid with named axes, and a communicator along each axis."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import final

from lockstep.comm.communicator import Communicator
from lockstep.errors import ConfigError


@final
class Mesh(AbstractContextManager["Mesh"]):
    """The ranks of a communicator laid out on named axes, the last axis varying fastest (as torch's DeviceMesh).

        mesh = Mesh(comm, {"replica": 2, "shard": 4})    ranks 0 1 2 3 are a line along "shard", 0 4 one along "replica"
        mesh["shard"]                                    the Communicator of this rank's line along one axis
        mesh["replica", "shard"]                         the one over several axes, ranks ordered by the axes as written
        mesh.coordinate["shard"]                         this rank's place along the axis

    One size may be -1: what is left. Every axis, and every choice of axes in the mesh's order, has its communicator
    from the start, so asking for one never communicates.

    Collective: construction, every rank of `comm` with the same arguments; it blocks. Nothing else is.
    Raises: ConfigError for sizes that do not fill `comm`, before anything is sent, and for an axis that does not exist.
    """

    def __init__(self, comm: Communicator, sizes: Mapping[str, int]) -> None:
        self.comm = comm
        self.sizes = fill_sizes(sizes, comm.world_size)
        self.axes = tuple(self.sizes)
        self.coordinate = coordinate(comm.rank, self.sizes)
        choices = (itertools.combinations(self.axes, count) for count in range(1, len(self.axes) + 1))
        self._comms: dict[tuple[str, ...], Communicator] = {}
        self._made: list[Communicator] = []
        by_lines: dict[tuple[tuple[int, ...], ...], Communicator] = {(tuple(range(comm.world_size)),): comm}
        for axes in itertools.chain(*choices):
            lines = tuple(tuple(line) for line in lines_along(axes, self.sizes))
            if lines not in by_lines:
                by_lines[lines] = self._make(axes, lines)
            self._comms[axes] = by_lines[lines]

    def __getitem__(self, axes: str | tuple[str, ...]) -> Communicator:
        chosen = (axes,) if isinstance(axes, str) else tuple(axes)
        for axis in chosen:
            if axis not in self.sizes:
                near = difflib.get_close_matches(str(axis), self.axes, n=1, cutoff=0.5)
                meant = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"the mesh has no axis {axis!r}, it has {', '.join(self.axes)}{meant}")
        if not chosen or len(set(chosen)) != len(chosen):
            raise ConfigError(f"mesh{list(chosen)}: name at least one axis, and each once")
        if chosen not in self._comms:
            ordered = [axis for axis in self.axes if axis in chosen]
            raise ConfigError(f"mesh{list(chosen)} is not in the order of the mesh: write mesh{ordered}")
        return self._comms[chosen]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        return f"<Mesh {self.comm.name!r}: {sizes}; rank {self.comm.rank} at {tuple(self.coordinate.values())}>"

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the communicators that the mesh made; `comm` stays open. Not collective; a second call does nothing."""
        for comm in self._made:
            comm.close()

    def _make(self, axes: Sequence[str], lines: Sequence[Sequence[int]]) -> Communicator:
        color = next(number for number, line in enumerate(lines) if self.comm.rank in line)
        key = lines[color].index(self.comm.rank)
        made = self.comm.split(color, key, name=f"{self.comm.name}/{'+'.join(axes)}")
        assert made is not None, "a rank that gives a color has a communicator"
        self._made.append(made)
        return made


def fill_sizes(sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """`sizes` with a -1 replaced by what is left. Raises ConfigError where they do not multiply to `world_size`."""
    if not sizes:
        raise ConfigError('a mesh needs at least one axis, for example {"data": -1}')
    for axis, size in sizes.items():
        if not isinstance(axis, str) or not axis.isidentifier():
            raise ConfigError(f"axis {axis!r}: an axis is named like a variable")
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise ConfigError(f"axis {axis!r} has size {size!r}: it must be a number from 1, or -1 for what is left")
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ConfigError(f"axes {', '.join(open_axes)} are all -1: only one size can be left open")
    product = math.prod(size for size in sizes.values() if size != -1)
    written = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
    if open_axes and world_size % product:
        raise ConfigError(f"mesh {written}: {product} does not divide the world size, {world_size}")
    if not open_axes and product != world_size:
        raise ConfigError(f"mesh {written} is for {product} ranks, but the world size is {world_size}")
    return {axis: world_size // product if size == -1 else size for axis, size in sizes.items()}


def coordinate(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Axis -> place of `rank` along it; the last axis varies fastest."""
    place: dict[str, int] = {}
    for axis in reversed(list(sizes)):
        rank, place[axis] = divmod(rank, sizes[axis])
    return {axis: place[axis] for axis in sizes}


def lines_along(axes: Sequence[str], sizes: Mapping[str, int]) -> list[list[int]]:
    """The ranks that share their place on all other axes, one list per such place, ordered by `axes` as written."""
    lines: dict[tuple[int, ...], list[int]] = {}
    places = [coordinate(rank, sizes) for rank in range(math.prod(sizes.values()))]
    for rank, place in enumerate(places):
        lines.setdefault(tuple(place[axis] for axis in sizes if axis not in axes), []).append(rank)
    return [sorted(line, key=lambda rank: [places[rank][axis] for axis in axes]) for line in lines.values()]
