"""One flat buffer of gradients that are communicated together, and the views that are the parameters' `.grad`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep.comm.op import Work
from lockstep.parallel.buckets import LayOut, starts_of

# Life of the tensors here, for a bucket of n elements on W ranks:
#   flat      [n]  lives as long as the bucket. During backward it fills with this rank's gradients, already divided
#                  by W under the default hook; between launch and finish it belongs to the transport; afterwards it
#                  holds the mean.
#   views[j]       alias of the part of `flat` that belongs to member j, in that parameter's own shape and strides. It
#                  becomes `params[j].grad` when the gradient is placed, which frees the tensor that autograd made.
# The views are aliases, not slices: autograd does not see them as views, so `grad.detach_()` works.


class Bucket:
    """Gradients of equal dtype and device, as one buffer. A sparse gradient is alone in its bucket and has no buffer.

    To communication hooks it looks like torch's GradBucket: `index`, `buffer`, `gradients`, `parameters`, `is_last`,
    `set_buffer`.
    """

    def __init__(
        self,
        index: int,
        members: Sequence[int],
        params: Sequence[Parameter],
        sparse: bool,
        last: bool,
        empty: Callable[[int, torch.dtype], Tensor] | None = None,
        lay_out: LayOut = starts_of,
    ) -> None:
        self.members = tuple(members)  # indices of the reducer's parameters
        self.params = [params[member] for member in members]
        self.sparse = sparse
        self.missing = len(self.members)  # gradients of this backward that are not here yet
        self.work: Work | None = None  # set between launch and finish
        self.result: Tensor | None = None  # what the reduction made, where it did not work in place
        self._sparse_grad: Tensor | None = None
        self._stand_in: Tensor | None = None
        self._index = index
        self._last = last
        self._empty = empty  # memory that the communicator moves best; None where parameters are elsewhere
        self._starts, self._numel = lay_out([param.numel() for param in self.params])
        self._checked = False
        if not sparse:
            self.renew()

    def renew(self) -> None:
        """Take new memory; whoever holds the old views keeps them as they are."""
        first, numel = self.params[0], self._numel
        if self._empty is None or numel == 0:
            self.flat = torch.zeros(numel, dtype=first.dtype, device=first.device)
        else:
            self.flat = self._empty(numel, first.dtype).zero_()
        self.views = [self._alias(slot) for slot in range(len(self.params))]
        self._addresses = [view.data_ptr() for view in self.views]

    def _alias(self, slot: int) -> Tensor:
        param = self.params[slot]
        return alias(self.flat, self._starts[slot], param.shape, dense_strides(param))

    def _is_in_place(self, slot: int, grad: Tensor | None) -> bool:
        """Whether `grad` is our view; makes the view anew if `tensor.data = ...` has moved it to other memory."""
        if self.views[slot].data_ptr() != self._addresses[slot]:
            self.views[slot] = self._alias(slot)
        return grad is self.views[slot]

    def reset(self) -> None:
        """Ready for the next backward."""
        self.missing = len(self.members)
        self.work = None
        self.result = None
        self._sparse_grad = None
        self._stand_in = None
        self._checked = False

    def finish(self) -> None:
        """Wait for the reduction and take its result into the buffer."""
        assert self.work is not None, "only a launched bucket can be finished"
        self.work.wait()
        self._stand_in = None
        if self.result is None:
            return
        if self.sparse:
            self._sparse_grad = self.result
        elif self.result.data_ptr() != self.flat.data_ptr():
            self.flat.copy_(self.result.view(-1))

    def hand_out(self, slot: int) -> None:
        """Let the reduced gradient be its parameter's `.grad`."""
        self.params[slot].grad = self._sparse_grad if self.sparse else self.views[slot]

    def place(self, slot: int, grad: Tensor, scale: float) -> None:
        """Put member `slot`'s gradient times `scale` into the buffer, and make the view its parameter's `.grad`.

        Memory: no copy where `grad` is the view already; otherwise one pass that copies and scales.
        """
        if self.sparse:
            self._sparse_grad = grad if scale == 1.0 else grad * scale
            return
        self._leave_kept_gradients_alone()
        if self._is_in_place(slot, grad):
            if scale != 1.0:
                grad.mul_(scale)
            return
        view = self.views[slot]
        if scale == 1.0:
            view.copy_(grad)
        else:
            torch.mul(grad, scale, out=view)
        self.params[slot].grad = view

    def fill(self, slot: int, grad: Tensor | None, scale: float) -> Tensor | None:
        """Put an absent member's old gradient times `scale`, or zeros, into the buffer; its `.grad` stays what it is.

        Returns a copy of the old values where the buffer itself is the parameter's `.grad`, None otherwise.
        """
        self._leave_kept_gradients_alone()
        in_place = self._is_in_place(slot, grad)
        if grad is None:
            self.views[slot].zero_()
            return None
        kept = grad.clone() if in_place else None
        torch.mul(grad, scale, out=self.views[slot])
        return kept

    def _leave_kept_gradients_alone(self) -> None:
        """Take a new buffer if the caller still holds a gradient of an earlier step: that must not change under him.

        A gradient kept by the caller is one more reference to a view than ours, or one more tensor on our storage. The
        check is made before the first write of a backward, so nothing of this backward is in the old buffer but what
        autograd itself added to a `.grad` that lies there; `place` finds it outside the new buffer and copies it.
        """
        if self._checked:
            return
        self._checked = True
        storage_users = torch._C._storage_Use_Count(self.flat.untyped_storage()._cdata)
        kept = storage_users > 2 + len(self.views)  # flat, the temporary storage handle, the views
        for slot, param in enumerate(self.params):
            if kept:
                break
            # 2 = our list and getrefcount's argument; a view that is still its parameter's .grad is not kept by the
            # caller
            kept = sys.getrefcount(self.views[slot]) > 2 and param.grad is not self.views[slot]
        if kept:
            self.renew()

    # ------------------------------------------------------------------ as torch's hooks see it

    def index(self) -> int:
        """Position in the order of launch."""
        return self._index

    def is_last(self) -> bool:
        """True for the bucket that is launched last."""
        return self._last

    def buffer(self) -> Tensor:
        """The gradients as one tensor: dense [numel], the sparse gradient itself, or what `set_buffer` put there."""
        if self._stand_in is not None:
            return self._stand_in
        return self._sparse_grad if self._sparse_grad is not None else self.flat

    def set_buffer(self, tensor: Tensor) -> None:
        """Let `tensor`, of any dtype, stand for the buffer until the reduction has ended."""
        self._stand_in = tensor

    def gradients(self) -> list[Tensor]:
        """One gradient per parameter; for a dense bucket views of `buffer()`."""
        if self.sparse:
            return [self.buffer()]
        if self._stand_in is None:
            return list(self.views)
        parts = self._stand_in.split([param.numel() for param in self.params])
        return [part.view(param.shape) for part, param in zip(parts, self.params, strict=True)]

    def parameters(self) -> list[Parameter]:
        """The parameters whose gradients are here, in the order of `gradients()`."""
        return list(self.params)


def no_entries(like: Tensor, sparse_dim: int = 1) -> Tensor:
    """A sparse tensor of zeros in the shape of `like`, laid out as an embedding's gradient."""
    indices = torch.empty(sparse_dim, 0, dtype=torch.int64, device=like.device)
    values = torch.empty(0, *like.shape[sparse_dim:], dtype=like.dtype, device=like.device)
    return torch.sparse_coo_tensor(indices, values, like.shape, check_invariants=False).coalesce()


def alias(flat: Tensor, start: int, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Elements of `flat` from `start` on as a tensor that autograd does not know as a view of it. Memory: the same."""
    made = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return made.set_(flat.untyped_storage(), flat.storage_offset() + start, shape, strides)  # type: ignore[arg-type]


def dense_strides(param: Tensor) -> tuple[int, ...]:
    """The parameter's own strides where its elements fill memory without gaps, else those of a contiguous tensor."""
    expected = 1
    for stride, size in sorted(zip(param.stride(), param.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return torch.empty(param.shape, device="meta").stride()
        expected *= size
    return param.stride()
