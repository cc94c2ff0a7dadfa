"""Tensor subclasses that say themselves what is gathered of them, and how it becomes whole again (float8 weights, say).

The protocol is torch's: `fsdp_pre_all_gather` turns this rank's piece into tensors to gather, `fsdp_post_all_gather`
makes the whole parameter of what was gathered.
"""

from __future__ import annotations

import inspect
from typing import Any, final

import torch
from torch import Tensor

from lockstep.comm.communicator import Communicator
from lockstep.comm.op import DONE, AllWork, Work
from lockstep.errors import ShardingError
from lockstep.parallel.dtensors import local_tensor
from lockstep.parallel.unsharded import Unsharded

_BEFORE, _AFTER = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def is_extended(param: Tensor, fqn: str) -> bool:
    """Whether `param`'s class takes part in its gathering.  Raises: ShardingError where it has one of two methods."""
    inner = local_tensor(param).detach()
    has = [name for name in (_BEFORE, _AFTER) if hasattr(inner, name)]
    if len(has) == 1:
        raise ShardingError(
            f"parameter {fqn!r}: {type(inner).__name__} has {has[0]} only; define {_BEFORE} and {_AFTER} together"
        )
    return bool(has)


def cut_extended(param: Tensor, fqn: str, dim: int, comm: Communicator) -> Tensor:
    """This rank's piece of a subclass's tensor.  Raises: ShardingError where it cannot be cut into equal rows."""
    inner = local_tensor(param).detach()
    if dim != 0 or inner.shape[0] % comm.world_size:
        raise ShardingError(
            f"parameter {fqn!r} of shape {tuple(inner.shape)}: a {type(inner).__name__} is cut along dim 0 "
            f"only, into {comm.world_size} equal parts"
        )
    return inner.chunk(comm.world_size)[comm.rank].clone()


@final
class Extended(Unsharded):
    """One parameter of such a class. Memory: what it gathers, given back after use.

    around: what the class may ask for: the mesh, the whole parameter's shape and strides, its module and the policy.
    """

    needs_gather = True

    def __init__(
        self, piece: Tensor, comm: Communicator, around: tuple[Any, ...], dtype: torch.dtype, label: str
    ) -> None:
        self._piece: Any = piece
        self._comm = comm
        takes_all = len(inspect.signature(self._piece.fsdp_pre_all_gather).parameters) > 1
        self._around = around if takes_all else around[:1]
        self._dtype = dtype
        self._label = f"gather {label}"
        self._gathered: list[Tensor] = []  # made once: the whole parameter may share their memory
        self._sizes: list[int] = []
        self._metadata: Any = None
        self._work: Work = DONE
        self.launch(None)
        self._work.wait()
        whole, _ = self._piece.fsdp_post_all_gather(tuple(self._gathered), self._metadata, dtype)
        self.views = [whole]
        self.release()

    def launch(self, flat: Tensor | None) -> None:
        inputs = self._inputs()
        if not self._gathered:
            world_size = self._comm.world_size
            self._gathered = [given.new_empty(world_size * given.shape[0], *given.shape[1:]) for given in inputs]
            self._sizes = [tensor.untyped_storage().nbytes() for tensor in self._gathered]
        for tensor, nbytes in zip(self._gathered, self._sizes, strict=True):
            tensor.untyped_storage().resize_(nbytes)
        self._work = self._gather(self._gathered, inputs)

    def contribute(self, flat: Tensor | None) -> Work:
        inputs = self._inputs()
        return self._gather([torch.empty_like(tensor) for tensor in self._gathered], inputs)

    def _inputs(self) -> list[Tensor]:
        inputs, self._metadata = self._piece.fsdp_pre_all_gather(*self._around)
        return [tensor.contiguous() for tensor in inputs]

    def _gather(self, outputs: list[Tensor], inputs: list[Tensor]) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return AllWork(
            [self._comm.all_gather_into_tensor(out, given, async_op=True, label=self._label) for out, given in pairs]
        )

    def finish(self) -> None:
        self._work.wait()
        self._piece.fsdp_post_all_gather(tuple(self._gathered), self._metadata, self._dtype, out=self.views[0])

    def release(self) -> None:
        work, self._work = self._work, DONE
        for tensor in self._gathered:
            tensor.untyped_storage().resize_(0)
        work.wait()
