"""Parameters that are stepped and sent together, and the pieces of them that are this rank's to step."""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from lockstep.comm.communicator import Communicator
from lockstep.comm.op import DONE, Work
from lockstep.comm.tensor_parts import Part, TensorPieces, boxes_of_range
from lockstep.errors import CheckpointError, ConfigError
from lockstep.parallel.bucket import dense_strides
from lockstep.parallel.zero.plan import FlatLayout, Span

UNFUSED_ELEMENTS = 64 * 1024  # on a CPU: the operands of one pass of an unfused kernel stay in a core's cache


class Piece(NamedTuple):
    """Elements [start, stop) of a parameter, as a flat tensor [stop - start] on the parameter's own memory."""

    span: Span
    tensor: Tensor


class Chunk(abc.ABC):
    """Parameters of one dtype and device; `pieces` are the parts of them that this rank steps.

    params[i]   what the user gave, called names[i] in errors; `span.param` of a piece is i
    pieces      in order of their parameters, several for one parameter where it was cut for the cache
    """

    params: Sequence[Tensor]
    names: Sequence[str]
    pieces: Sequence[Piece]

    @abc.abstractmethod
    def adopt(self) -> None:
        """Follow parameters whose `.data` the user has put elsewhere since the last step. Raises: ConfigError."""

    def check_gradients(self) -> None:
        """Raises: ConfigError for a gradient that is sparse, also where none of it is stepped here."""
        for param, name in zip(self.params, self.names, strict=True):
            gradient = param.grad
            if gradient is not None and gradient.layout is not torch.strided:
                raise ConfigError(
                    f"{name} has a gradient of layout {gradient.layout}, flat shards need dense ones: build its "
                    "Embedding with sparse=False"
                )

    @abc.abstractmethod
    def flat_gradient(self, param: int) -> Tensor | None:
        """[numel here]: a parameter's `.grad`, in whose elements spans count. Memory: a view where possible."""

    @abc.abstractmethod
    def present(self, param: int, flat: Tensor) -> Tensor:
        """State of this rank's elements of a parameter, as the user meets it. Memory: no copy."""

    @abc.abstractmethod
    def flatten(self, param: int, state: Tensor | TensorPieces) -> Tensor:
        """State of a parameter, whole or in this rank's pieces, as flat state of this rank's elements."""

    @abc.abstractmethod
    def publish(self) -> Work:
        """Start telling the other ranks what was stepped here. Collective where the chunk is shared by ranks."""

    def range_of(self, param: int) -> tuple[int, int]:
        """[start, stop): the elements of a parameter that are stepped here; empty where none are."""
        spans = [span for span, _ in self.pieces if span.param == param]
        return (spans[0].start, spans[-1].stop) if spans else (0, 0)

    def gradients(self, arrived: Mapping[int, Tensor]) -> list[Tensor | None]:
        """One flat gradient [stop - start] per piece, or None; `arrived`: those that lie elsewhere, by piece.

        Memory: views, except for a gradient laid out in memory unlike its parameter.
        """
        found: list[Tensor | None] = []
        last, flat = -1, None
        for index, (span, _) in enumerate(self.pieces):
            if span.param != last:
                last, flat = span.param, self.flat_gradient(span.param)
            found.append(arrived.get(index) if flat is None else flat[span.start : span.stop])
        return found


@final
class ReplicatedChunk(Chunk):
    """Whole parameters on every rank, in one flat buffer; each rank steps its part and sends it to all.

    Collective: `publish`, on every rank. Memory: the parameters themselves move into the buffer.
    """

    def __init__(
        self, params: Sequence[Tensor], names: Sequence[str], comm: Communicator, longest: int | None = None
    ) -> None:
        self.params = list(params)
        self.names = list(names)
        self.comm = comm
        self.layout = FlatLayout([param.numel() for param in params], comm.world_size)
        self._forms = [(param.shape, dense_strides(param)) for param in params]
        first, numel = params[0], self.layout.numel
        self.flat = comm.empty(numel, first.dtype).zero_() if numel else torch.empty_like(first).view(-1)
        part = self.layout.part
        self.part = self.flat[comm.rank * part : (comm.rank + 1) * part]
        self.adopt()
        self.pieces = [Piece(span, self.part[self.in_part(span)]) for span in self.layout.spans(comm.rank, longest)]

    def adopt(self) -> None:
        for index, param in enumerate(self.params):
            start = self.layout.starts[index]
            if param.data_ptr() == self.flat.data_ptr() + start * self.flat.element_size() or param.numel() == 0:
                continue
            if param.dtype != self.flat.dtype or param.device != self.flat.device:
                raise ConfigError(
                    f"rank {self.comm.rank}: {self.names[index]} is now {param.dtype} on {param.device}; it was "
                    f"{self.flat.dtype} on {self.flat.device} when the optimizer was made. Move or convert the model "
                    "first, then make the optimizer."
                )
            shape, strides = self._forms[index]
            if param.shape != shape:
                raise ConfigError(
                    f"rank {self.comm.rank}: {self.names[index]} has shape {list(param.shape)} now, {list(shape)} when "
                    "the optimizer was made. Make the optimizer again after changing a parameter's shape."
                )
            memory = torch.as_strided(self.flat, shape, strides, self.flat.storage_offset() + start)
            memory.copy_(param.detach())
            param.data = memory

    def flat_gradient(self, param: int) -> Tensor | None:
        gradient = self.params[param].grad
        return None if gradient is None else flat_in_order(gradient, self._forms[param][1])

    def present(self, param: int, flat: Tensor) -> Tensor:
        return flat

    def flatten(self, param: int, state: Tensor | TensorPieces) -> Tensor:
        if isinstance(state, TensorPieces):
            return self._joined(param, state)
        _, strides = self._forms[param]
        return flat_in_order(state, strides)[slice(*self.range_of(param))]

    def in_pieces(self, param: int, flat: Tensor) -> TensorPieces:
        """Flat state of this rank's elements of a parameter, as boxes of the whole. Memory: views.

        They lie in memory one after the other, in the order of the parameter's own elements there.
        """
        shape, _ = self._forms[param]
        slowest_first = self._slowest_first(param)
        place = [slowest_first.index(dim) for dim in range(len(shape))]
        found, at = [], 0
        for start, box in boxes_of_range([shape[dim] for dim in slowest_first], *self.range_of(param)):
            size = math.prod(box)
            part = Part(tuple(start[p] for p in place), tuple(box[p] for p in place))
            found.append((part, flat[at : at + size].view(box).permute(place)))
            at += size
        return TensorPieces(flat.dtype, tuple(shape), tuple(found))

    def _joined(self, param: int, state: TensorPieces) -> Tensor:
        """The inverse of `in_pieces`. Memory: a view, where the pieces are those that it made."""
        start, stop = self.range_of(param)
        flat = torch.empty(stop - start, dtype=state.dtype, device="meta")
        if [part for part, _ in state.pieces] != [part for part, _ in self.in_pieces(param, flat).pieces]:
            raise CheckpointError(f"the pieces of {self.names[param]}'s state are not those that this rank steps")
        order = self._slowest_first(param)
        flats = [tensor.detach().permute(order).reshape(-1) for _, tensor in state.pieces]
        if not flats:
            return torch.empty(0, dtype=state.dtype, device=self.flat.device)
        nbytes = itertools.accumulate((each.nbytes for each in flats), initial=flats[0].data_ptr())
        is_one = all(each.data_ptr() == address for each, address in zip(flats, nbytes, strict=False))
        if is_one and len({each.untyped_storage().data_ptr() for each in flats}) == 1:
            return torch.as_strided(flats[0], (stop - start,), (1,))
        return torch.cat(flats)

    def _slowest_first(self, param: int) -> list[int]:
        """The dims of a parameter in the order in which they lie in memory, from the outside in."""
        strides = self._forms[param][1]
        return sorted(range(len(strides)), key=lambda dim: -strides[dim])

    def publish(self) -> Work:
        if self.comm.world_size == 1 or not any(param.requires_grad for param in self.params):
            return DONE
        return self.comm.all_gather_into_tensor(self.flat, self.part, async_op=True, label="optimizer.params")

    def part_of(self, gradients: Tensor) -> Tensor:
        """This rank's part of a buffer laid out as the chunk is."""
        start = self.comm.rank * self.layout.part
        return gradients[start : start + self.layout.part]

    def in_part(self, span: Span) -> slice:
        """Where a piece lies in this rank's part."""
        begin = self.layout.starts[span.param] - self.comm.rank * self.layout.part
        return slice(begin + span.start, begin + span.stop)


def flat_in_order(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """[numel]: the elements in the order in which a tensor with these strides has them in memory.

    Memory: no copy where `tensor` lies so itself.
    """
    tensor = tensor.detach()
    if tensor.stride() != strides and _order(tensor.shape, tensor.stride()) != _order(tensor.shape, strides):
        tensor = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset())


def in_shape(flat: Tensor, like: Tensor) -> Tensor:
    """A flat tensor [numel] in `like`'s shape and order of memory."""
    return torch.as_strided(flat, like.shape, dense_strides(like), flat.storage_offset())


def _order(shape: torch.Size, strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """Strides of the dimensions that have more than one element: the others' mean nothing."""
    return [(dim, stride) for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)) if size > 1]
