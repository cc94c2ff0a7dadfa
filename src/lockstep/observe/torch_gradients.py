"""The first gradient of a stock torch program that is not finite: on which rank it came into being, and where.

Looks just before an optimizer applies the gradients: then whatever skips bad steps (GradScaler, a test of the program's
own) has had its say. By then DDP has averaged them. One small parameter near the input is looked at in every step: what
goes wrong anywhere behind it, on any rank, reaches its mean. Once that is not finite, its gradient before averaging and
the loss, of which only references were kept, tell whether it was this rank.
"""

from __future__ import annotations

import functools
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

from lockstep.observe.call_site import call_site
from lockstep.observe.guard import Guard
from lockstep.observe.patches import Patches
from lockstep.observe.settings import FIRST_STEPS

_BACKWARDS = 64  # of one step, at most, that are looked at
_SHARE = 0.001  # of the time goes into looking at all gradients, whether or not there is a sign
_SMALL = 1 << 12  # elements
_NAMED = 5

Named = Callable[[Any], list[tuple[str, Any]]]  # the parameters of an optimizer, by name


@final
class GradientFacts:
    """Of one rank."""

    def __init__(self, guard: Guard, named: Named, patches: Patches) -> None:
        self._guard, self._named, self._patches = guard, named, patches
        self._losses: deque[tuple[Any, str]] = deque(maxlen=_BACKWARDS)
        self._own: deque[Any] = deque(maxlen=_BACKWARDS)  # gradients of the probe, before they are averaged
        self._probes: list[weakref.ref[Any]] = []
        self.before_backward: Callable[[], None] | None = None  # called once
        self.site = ""  # of the last backward
        self._is_done = False
        self._looks = 0
        self._spent_s, self._began_s = 0.0, time.perf_counter()

    def watch_backward(self) -> None:
        """torch.autograd is there."""
        from torch import autograd

        self._patches.replace(autograd, "backward", self._noting)

    def watch_steps(self) -> None:
        """torch.optim is there."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._patches.add(register_optimizer_step_pre_hook(lambda optimizer, *_: self._look(optimizer)).remove)

    def follow(self, parameters: Iterable[Any]) -> None:
        """Note the gradients of the first small one of a model's `parameters`, before they are averaged."""
        from torch.utils.hooks import unserializable_hook

        trained = [param for param in parameters if param.requires_grad and param.is_floating_point()]
        first = next((param for param in trained if param.numel() <= _SMALL), None)
        if first is not None and not any(known() is first for known in self._probes):
            self._probes.append(weakref.ref(first))
            hook = unserializable_hook(functools.partial(self._note))  # else torch warns who sends the parameter on
            self._patches.add(first.register_hook(hook).remove)

    def _note(self, gradient: Any) -> None:
        if not self._is_done:
            self._own.append(gradient)

    def _noting(self, old: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(old)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            call, self.before_backward = self.before_backward, None
            if call is not None:
                call()
            self.site = call_site()
            if not self._is_done and getattr(tensors, "numel", int)() == 1:
                self._losses.append((tensors.detach(), self.site))
            old(tensors, *args, **kwargs)

        return backward

    def _look(self, optimizer: Any) -> None:
        """At what `optimizer` is about to apply."""
        if self._is_done:
            return
        began_s = time.perf_counter()
        self._looks += 1
        may_look = self._looks <= FIRST_STEPS or self._spent_s <= _SHARE * (began_s - self._began_s)
        if may_look or self._has_sign():
            from lockstep.observe.gradients import nonfinite_gradients, scaler_is_active

            faults = nonfinite_gradients(pair for named in self._named(optimizer) for pair in _gradients(*named))
            if faults and not scaler_is_active():
                self._is_done = True
                self._tell([str(one) for one in faults])
            self._spent_s += time.perf_counter() - began_s
        self._losses.clear()
        self._own.clear()

    def _has_sign(self) -> bool:
        """Whether a probe's mean, or without one the loss, is not finite; never waits for a device."""
        probes = [param.grad for known in self._probes if (param := known()) is not None and param.grad is not None]
        looked_at = probes or [loss for loss, _ in self._losses]
        return any(tensor.is_cpu and not math.isfinite(tensor.sum().item()) for tensor in looked_at)

    def _tell(self, faults: list[str]) -> None:
        site = next((site for loss, site in self._losses if not bool(loss.isfinite().all())), "")
        is_own = any(not bool(gradient.isfinite().all()) for gradient in self._own)
        origin = "the loss is not finite" if site else "gradients are not finite before averaging" if is_own else ""
        named = faults[:_NAMED] + ([f"and {len(faults) - _NAMED} more"] if len(faults) > _NAMED else [])
        self._guard.facts.tell("gradient", self._guard.recorder.step, [origin, named, site or call_site()])


def _gradients(name: str, param: Any) -> Iterator[tuple[str, Any]]:
    """By name; what is in the flat parameter of torch's FullyShardedDataParallel, as far as it is here, by its own."""
    gradient, parts = param.grad, getattr(param, "_shard_param_infos", ())
    if gradient is None or not parts:
        yield name, gradient
        return
    for fqn, part in zip(getattr(param, "_fqns", ()), parts, strict=False):
        if part.in_shard:
            first = part.offset_in_shard
            yield name.replace("_flat_param", fqn), gradient[first : first + part.numel_in_shard]
