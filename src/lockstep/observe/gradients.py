"""The first gradient that is NaN or infinite: on which rank and of which parameter, before the mean hides it.

A number that is not finite makes a sum that is not finite. So one sum per bucket, just before the bucket leaves this
rank, tells whether one has to look closer; that it is in the processor's cache then makes it cheap. In small models
even that would be felt: the sums are left out of steps until they have cost less than 0.3 % of the time. What a rank
has found travels in a message that is sent anyway.
"""

from __future__ import annotations

import time
from cmath import isfinite
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from lockstep.observe.instances import instances
from lockstep.observe.settings import FIRST_STEPS

SHARE = 0.003  # of the time
_NAMED = 5  # parameters in a message


class NonFiniteWarning(RuntimeWarning):
    """A gradient is NaN or infinite on some rank, and is about to be averaged into those of all ranks."""


class Fault(NamedTuple):
    """A gradient with numbers that are not finite."""

    name: str  # of the parameter
    nan: int  # elements
    infinite: int
    numel: int

    def __str__(self) -> str:
        kinds = [f"{n} {kind}" for n, kind in ((self.nan, "NaN"), (self.infinite, "infinite")) if n]
        return f"{self.name!r} ({' and '.join(kinds)} of {self.numel} elements)"


@torch.no_grad()
def nonfinite_gradients(gradients: Iterable[tuple[str, Tensor | None]]) -> list[Fault]:
    """Those of the named `gradients` that are not finite everywhere. Not collective; waits for the device.

    After a backward of plain DDP these are the means, which name the parameter but not the rank.
    """
    found = []
    for name, grad in gradients:
        values = None if grad is None else values_of(grad)
        if values is None or bool(total(values).isfinite()):
            continue
        nan, finite = int(values.isnan().sum()), int(values.isfinite().sum())
        if finite < values.numel():  # else the sum of finite numbers was too large for its dtype
            found.append(Fault(name, nan, values.numel() - finite - nan, values.numel()))
    return found


def are_finite(gradients: Iterable[Tensor | None]) -> bool:
    """Whether `nonfinite_gradients` would find nothing, as a rule: what is asked often. Waits for the device."""
    return all(grad is None or isfinite(total(values_of(grad)).item()) for grad in gradients)


def values_of(grad: Tensor) -> Tensor:
    """The numbers of this rank."""
    if grad.layout is torch.sparse_coo:
        return grad._values()
    return getattr(grad, "_local_tensor", grad)


def total(values: Tensor) -> Tensor:
    """The sum of `values`: finite if they are, as a rule."""
    is_short = values.dtype in (torch.float16, torch.bfloat16)
    return values.sum(dtype=torch.float32) if is_short else values.sum()


def faults_in_words(by_rank: Mapping[int, Sequence[str]], step: int) -> str:
    """One sentence. `by_rank`: on which ranks which gradients are faulty, as a Fault prints itself."""
    parts = []
    for rank, faults in by_rank.items():
        more = f" and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
        parts.append(f"on rank {rank}, of {', '.join(faults[:_NAMED])}{more}")
    return (
        f"gradients are not finite in backward pass {step}: {'; '.join(parts)}. They are averaged into those of all "
        "ranks: skip this optimizer step. Look at that rank's batch and loss, or lower the learning rate"
    )


def scaler_is_active() -> bool:
    """Whether this process has a torch.amp.GradScaler in use: then infinite gradients are intended, and skipped.

    Looks at all objects there are: for when something was found, not for every step.
    """
    return any(scaler.is_enabled() for scaler in instances(GradScaler))


@final
class GradientWatch:
    """Looks at what one rank is about to contribute to the mean.

    mode: of the guard. "off" looks at nothing; "strict" makes an error of what is a warning otherwise.
    clock: in seconds, of what it costs and of what there is.
    """

    def __init__(self, mode: str = "on", *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.is_on = mode != "off"
        self.is_strict = mode == "strict"
        self.step = 0  # synchronised backward passes begun
        self.faults: list[Fault] = []  # of this one
        self._clock = clock
        self._spent_s = 0.0
        self._begun_s = clock()
        self._looks = False
        self._sums: list[Tensor] = []  # of buckets on a device, and how to look at these
        self._closer: list[Callable[[], list[Fault]]] = []

    def begin(self) -> None:
        """A synchronised backward begins."""
        self.step += 1
        self.faults, self._sums, self._closer = [], [], []
        is_affordable = self._spent_s <= SHARE * (self._clock() - self._begun_s)
        self._looks = self.is_on and (self.step <= FIRST_STEPS or is_affordable)

    def look(self, bucket: Tensor, names: Iterable[str], gradients: Callable[[], Iterable[Tensor]]) -> None:
        """At a bucket, complete and not yet sent, and if need be at the `gradients` in it: on a device by `settle`."""
        if not self._looks:
            return
        began = self._clock()
        whole = total(values_of(bucket))
        if bucket.is_cuda:
            self._sums.append(whole)
            self._closer.append(lambda: nonfinite_gradients(zip(names, gradients(), strict=True)))
        elif not bool(whole.isfinite()):
            self.faults += nonfinite_gradients(zip(names, gradients(), strict=True))
        self._spent_s += self._clock() - began

    def settle(self) -> list[Fault]:
        """What was found in this backward, all buckets of which have left; waits for the device once.

        There a bucket may hold the mean by now: it is looked at if it was not finite before.
        """
        are_finite = torch.stack(self._sums).isfinite().tolist() if self._sums else []
        for closer, is_finite in zip(self._closer, are_finite, strict=True):
            self.faults += [] if is_finite else closer()
        return self.faults
