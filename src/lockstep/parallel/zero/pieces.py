"""One instance of the user's optimizer class over the pieces of one chunk, and what it keeps for each parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from lockstep.comm.op import Work
from lockstep.errors import ConfigError
from lockstep.parallel.zero.chunk import Chunk
from lockstep.parallel.zero.probe import OptimizerClass
from lockstep.parallel.zero.state import Group, States, load_exactly

NOT_SHARED = ("params", "param_names", "fused")  # what the user's group and the pieces' group say differently


@final
class PieceOptimizer:
    """Steps the pieces of a chunk as if each were a parameter.

    A piece has the gradient of its parameter or none, as the parameter has, so the class does what it does with whole
    parameters: one without gradient is left alone, with its state.
    Memory: the class's state for this rank's pieces, 1/W of what it keeps for whole parameters.
    """

    def __init__(
        self, chunk: Chunk, group_of: Sequence[int], groups: Sequence[Group], build: OptimizerClass, fuse: bool
    ) -> None:
        """fuse: the fused implementation serves where the user's `groups` name none."""
        self.chunk = chunk
        self._fuse = fuse
        self._group_indices = sorted(set(group_of))  # also of groups that have no piece here: they count steps too
        own = []
        for index in self._group_indices:
            members = [piece.tensor for piece in chunk.pieces if group_of[piece.span.param] == index]
            own.append({**self._options(groups[index]), "params": members})
        self._optimizer = build(own)
        self._pieces_of: dict[int, list[Tensor]] = {}
        for span, tensor in chunk.pieces:
            self._pieces_of.setdefault(span.param, []).append(tensor)

    def step(self, gradients: Sequence[Tensor | None], groups: Sequence[Group]) -> Work:
        """Step the pieces that have a gradient, with the options of the user's `groups`, and publish them."""
        for index, own in zip(self._group_indices, self._optimizer.param_groups, strict=True):
            own.update(self._options(groups[index]))
        try:
            for piece, gradient in zip(self.chunk.pieces, gradients, strict=True):
                piece.tensor.grad = gradient
            self._optimizer.step()
        finally:
            for piece in self.chunk.pieces:
                piece.tensor.grad = None
        for index, own in zip(self._group_indices, self._optimizer.param_groups, strict=True):
            groups[index].update({key: value for key, value in own.items() if key not in NOT_SHARED})
        return self.chunk.publish()

    def _options(self, group: Group) -> Group:
        options = {key: value for key, value in group.items() if key not in NOT_SHARED}
        if "fused" in group:
            unspecified = group["fused"] is None and not group.get("foreach")
            options["fused"] = True if self._fuse and unspecified else group["fused"]
        return options

    # ------------------------------------------------------------------ what is kept for a parameter

    def states(self) -> States:
        """What is kept for each parameter that has something here: `Chunk.present` of tensors, and single values.

        Memory: no copy where the parameter is one piece here.
        """
        found = {index: self.state_of(index) for index in range(len(self.chunk.params))}
        return {index: state for index, state in found.items() if state}

    def state_of(self, param: int) -> dict[str, Any]:
        """What is kept for parameter `param`; empty where nothing is."""
        pieces = self._pieces_of.get(param, [])
        states = [self._optimizer.state[piece] for piece in pieces if self._optimizer.state.get(piece)]
        if len(states) < len(pieces) or not states:
            return {}
        merged: dict[str, Any] = {}
        for key, value in states[0].items():
            if isinstance(value, Tensor) and value.shape == pieces[0].shape:  # a number for each element
                flat = value if len(states) == 1 else torch.cat([state[key] for state in states])
                merged[key] = self.chunk.present(param, flat)
            elif isinstance(value, Tensor) and value.dim() > 0:
                raise ConfigError(
                    f"{type(self._optimizer).__name__} keeps {key!r} of shape {list(value.shape)} for a piece of "
                    f"{pieces[0].numel()} elements; state of flat shards is one value for each element, or one for all"
                )
            else:
                merged[key] = value
        return merged

    def load(self, states: Mapping[int, Mapping[str, Any]], groups: Sequence[Group], copy: bool) -> None:
        """Keep these states, flat on this rank's elements, and nothing for the other parameters.

        copy: else the tensors themselves are kept.
        """
        packed: dict[int, dict[str, Any]] = {}
        tensors = [tensor for own in self._optimizer.param_groups for tensor in own["params"]]
        numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        seen: dict[int, int] = {}
        for span, tensor in self.chunk.pieces:
            begin = seen.setdefault(span.param, span.start)
            state = states.get(span.param)
            if state:
                part = slice(span.start - begin, span.stop - begin)
                packed[numbers[id(tensor)]] = {key: _take(value, part, copy) for key, value in state.items()}
        saved = []
        for index, own in zip(self._group_indices, self._optimizer.param_groups, strict=True):
            saved.append({**self._options(groups[index]), "params": [numbers[id(t)] for t in own["params"]]})
        load_exactly(self._optimizer, {"state": packed, "param_groups": saved})


@final
class PerParameter(Mapping[Tensor, dict[str, Any]]):
    """The state of a ShardedOptimizer by parameter, put together when it is asked for."""

    def __init__(self, parts: Sequence[PieceOptimizer]) -> None:
        self._parts = parts

    def __getitem__(self, param: Tensor) -> dict[str, Any]:
        for part in self._parts:
            for index, known in enumerate(part.chunk.params):
                if known is param:
                    return part.state_of(index)
        raise KeyError(param)

    def __iter__(self) -> Iterator[Tensor]:
        return (part.chunk.params[index] for part in self._parts for index in part.states())

    def __len__(self) -> int:
        return sum(len(part.states()) for part in self._parts)


def _take(value: Any, part: slice, copy: bool) -> Any:
    """A part of a flat state, or a copy, so that nothing keeps the whole alive; numbers as they are."""
    if not isinstance(value, Tensor):
        return value
    found = value[part] if value.dim() else value
    return found.clone() if copy or not value.dim() else found  # pieces count their steps each on its own
