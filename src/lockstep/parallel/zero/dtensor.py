"""Pieces of parameters that are sharded already, as DTensors: those of `fully_shard`, ours or torch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from torch import Tensor

from lockstep.comm.op import DONE, Work
from lockstep.comm.tensor_parts import TensorPieces, part_of
from lockstep.errors import CheckpointError, ConfigError
from lockstep.parallel.bucket import alias, dense_strides
from lockstep.parallel.dtensors import DTensor, local_tensor
from lockstep.parallel.zero.chunk import Chunk, Piece, flat_in_order, in_shape
from lockstep.parallel.zero.plan import Span, cut


@final
class ShardedChunk(Chunk):
    """Parameters that are in pieces already, as DTensors: each rank steps what it has. No communication.

    They may differ in dtype: an optimizer's kernels sort that out.
    """

    def __init__(self, params: Sequence[Tensor], names: Sequence[str], longest: int | None = None) -> None:
        self.params = list(params)
        self.names = list(names)
        self.pieces = []
        for index in range(len(params)):
            flat = self._flat_local(index)
            ranges = cut(0, flat.numel(), longest) or [(0, 0)]  # no rows here; its step count is kept all the same
            self.pieces += [Piece(Span(index, a, b), alias(flat, a, (b - a,), (1,))) for a, b in ranges]

    def _flat_local(self, index: int) -> Tensor:
        local = local_tensor(self.params[index]).detach()
        flat = flat_in_order(local, dense_strides(local))
        if flat.data_ptr() != local.data_ptr():
            raise ConfigError(
                f"the local piece of {self.names[index]} has gaps in memory (strides {local.stride()} for shape "
                f"{list(local.shape)}); flat shards need it contiguous"
            )
        return flat

    def adopt(self) -> None:
        for span, tensor in self.pieces:
            local = local_tensor(self.params[span.param])
            if tensor.data_ptr() == local.data_ptr() + span.start * local.element_size() or not tensor.numel():
                continue
            moved = self._flat_local(span.param)[span.start : span.stop]
            if (moved.dtype, moved.device, moved.shape) != (tensor.dtype, tensor.device, tensor.shape):
                raise ConfigError(
                    f"the local piece of {self.names[span.param]} is now {local.dtype} {list(local.shape)} on "
                    f"{local.device}, which is not what the optimizer was made for. Move or convert the model first, "
                    "then make the optimizer."
                )
            tensor.set_(moved.untyped_storage(), moved.storage_offset(), moved.shape, moved.stride())

    def flat_gradient(self, param: int) -> Tensor | None:
        gradient, local = self.params[param].grad, local_tensor(self.params[param])
        return None if gradient is None else flat_in_order(local_tensor(gradient), dense_strides(local))

    def present(self, param: int, flat: Tensor) -> Tensor:
        whole: Any = self.params[param]
        mesh, placements = whole.device_mesh, whole.placements
        local = in_shape(flat, local_tensor(whole))
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())

    def flatten(self, param: int, state: Tensor | TensorPieces) -> Tensor:
        assert isinstance(state, Tensor), "TensorPieces are of whole parameters"
        own: Any = self.params[param]
        if not isinstance(state, DTensor):
            state = state[part_of(own).slices]
        elif state.placements != own.placements:
            raise CheckpointError(f"optimizer state is placed {state.placements}, its parameter {own.placements}")
        return flat_in_order(local_tensor(state), dense_strides(local_tensor(own)))

    def publish(self) -> Work:
        return DONE
