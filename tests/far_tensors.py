"""Tensors of the CPU that pass for those of a device, and what that has written to the host by now."""

from __future__ import annotations

from typing import Any

import torch

_ASKING = {torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__, torch.Tensor.__float__}


class Far(torch.Tensor):
    """As a tensor of a device: whoever asks it for its value waits, which is right where one is known to be bad.

    Deriving one may fail, as after an assertion on the device.
    """

    may_wait = True
    has_failed = False
    is_cpu = False
    is_cuda = True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert cls.may_wait or func not in _ASKING, f"{func} waits for the device"
        if cls.has_failed and func is torch.cat:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return super().__torch_function__(func, types, args, kwargs or {})


class HostNumber:
    """What the device writes to when it has come so far."""

    def __init__(self, *, is_near: bool = False) -> None:
        """is_near: it comes so far at once."""
        self._value = self._coming = 2
        self._is_near = is_near

    def fill_(self, value: int) -> None:
        self._value = value

    def copy_(self, value: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self._coming = int(value.as_subclass(torch.Tensor))
        if self._is_near:
            self.arrives()

    def item(self) -> int:
        return self._value

    def arrives(self) -> None:
        self._value = self._coming


class Spoilt(torch.autograd.Function):
    """A loss whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.factor, None
