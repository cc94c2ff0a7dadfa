"""The first gradient of a stock torch program that is not finite: on which rank it came into being, and where.

Looks just before an optimizer applies the gradients: then whatever skips bad steps (GradScaler, a test of the program's
own) has had its say. By then DDP has averaged them. They are all looked at now and then, and when a loss is not finite,
which is known in every step. What went wrong behind a finite loss was applied on every rank, and shows in the loss of
the next step: then the parameters tell whose gradients they were, unless no step has gone well before: so they began.
One small parameter near the input is followed: its gradients before averaging, of this step and the one before, and the
losses tell whether it was this rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, final

from lockstep.observe.call_site import call_site
from lockstep.observe.facts import NEVER_FINITE
from lockstep.observe.guard import Guard
from lockstep.observe.settings import FIRST_STEPS
from lockstep.observe.torch_backward import BACKWARDS, Loss
from lockstep.observe.torch_optimizers import Seen

if TYPE_CHECKING:
    from lockstep.observe.gradients import Fault  # imports torch

_SHARE = 0.001  # of the time goes into looking at all gradients, whether or not there is a sign
_NAMED = 5

Named = Callable[[Any], list[tuple[str, Any]]]  # the parameters of an optimizer, by name


@final
class GradientFacts:
    """Of one rank."""

    def __init__(self, guard: Guard, named: Named) -> None:
        self.recorder = guard.recorder
        self.seen: deque[Seen] = deque(maxlen=64)  # of the optimizers' last steps
        self.due_ns = 0.0  # from then on `look` is called before each, by time.monotonic_ns
        self._guard, self._named = guard, named
        self._is_done = False
        self._went_well = False  # a step with finite gradients: so the parameters were
        self._steps = 0  # of optimizers, whose gradients are all looked at, if they are few
        self._spent_ns, self._began_ns, self._due_ns = 0, monotonic_ns(), 0.0

    def look(self, optimizer: Any) -> None:
        """At what `optimizer` is about to apply, where that is due or a loss not finite, or not known."""
        now_ns, losses, is_strict = monotonic_ns(), self.seen[-1][1], self._guard.settings.mode == "strict"
        known = [value for value, _ in losses if type(value) is float]
        has_sign = not all(map(isfinite, known)) or ((is_strict or not known) and _is_probe_faulty())
        if (now_ns < self._due_ns and not has_sign) or self._is_done:
            return
        from lockstep.observe.gradients import nonfinite_gradients, scaler_is_active

        named = self._named(optimizer)
        faults = nonfinite_gradients(pair for one in named for pair in _parts(*one, of_gradient=True))
        if faults and not scaler_is_active():
            applied, steps = _applied(named), self._by_step()
            if applied and not self._went_well:
                self._tell(applied, steps[-1], NEVER_FINITE)
            elif applied:
                self._tell(applied, steps[-2:][0])
            else:
                self._tell(faults, steps[-1])
        # a first step without a backward may be one that only makes the optimizer's state
        self._went_well |= not faults and (bool(losses) or self._steps > 0)
        self._steps += 1
        self._spent_ns += monotonic_ns() - now_ns
        if self._steps >= FIRST_STEPS:
            self._due_ns = self._began_ns + self._spent_ns / _SHARE
        self.due_ns = 0.0 if is_strict else self._due_ns

    def forget(self) -> None:
        """Let go of all but the last two steps: the guard's thread does, as that takes longer than to keep them."""
        while len(self.seen) > 2:
            self.seen.popleft()

    def finish(self, optimizer: Any) -> None:
        """No step comes any more whose loss would show what the last one, of `optimizer`, has applied."""
        if self.seen and self.seen[-1][0] + 1 < self.recorder.step:  # the last ones were only counted
            self.seen.append((self.recorder.step - 1, [], [*BACKWARDS.own]))
        _, losses, own = seen = self._by_step()[-1] if self.seen else (0, [], [])
        if self._is_done or optimizer is None or not (_first_line(losses) or _is_faulty(own)):
            return
        from lockstep.observe.gradients import scaler_is_active

        applied = _applied(self._named(optimizer))
        if applied and not scaler_is_active():
            self._tell(applied, seen)

    def _by_step(self) -> list[Seen]:
        """`seen`, and the steps between these that were only counted: the next one has their gradients too."""
        found: list[Seen] = []
        for step, losses, own in self.seen:
            missed = max(0, step - found[-1][0] - 1) if found else 0
            each = len(own) // (missed + 1)  # backwards, which are as many in each: none is forgotten
            parts = [own[at * each : (at + 1) * each] for at in range(missed)]
            found += [(step - missed + at, [], part) for at, part in enumerate(parts)]
            found.append((step, losses, own[missed * each :]))
        return found

    def _tell(self, faults: Sequence[Fault], seen: Seen, origin: str = "") -> None:
        self._is_done = True
        step, losses, own = seen
        site, is_own = _first_line(losses), _is_faulty(own)
        if not origin and (site or is_own):
            origin = "the loss is not finite" if site else "gradients are not finite before averaging"
        named = [str(one) for one in faults[:_NAMED]]
        named += [f"and {len(faults) - _NAMED} more"] if len(faults) > _NAMED else []
        self._guard.facts.tell("gradient", step, [origin, named, site or BACKWARDS.site or call_site()])


def _is_probe_faulty() -> bool:
    """Whether the mean of a probe's gradients is not finite; never waits for a device."""
    means = [param.grad for known in BACKWARDS.probes if (param := known()) is not None and param.grad is not None]
    return any(mean.is_cpu and not isfinite(mean.sum().item()) for mean in means)


def _first_line(losses: Sequence[Loss]) -> str:
    """Of the backward of the first loss that is not finite."""
    return next((site for loss, site in losses if not isfinite(loss)), "")


def _is_faulty(gradients: Sequence[Any]) -> bool:
    return any(not bool(gradient.isfinite().all()) for gradient in gradients)


def _applied(named: Sequence[tuple[str, Any]]) -> list[Fault]:
    """What gradients that were not finite have made of the parameters."""
    from lockstep.observe.gradients import nonfinite_gradients

    return nonfinite_gradients(pair for one in named for pair in _parts(*one, of_gradient=False))


def _parts(name: str, param: Any, *, of_gradient: bool) -> Iterator[tuple[str, Any]]:
    """The gradient of `param`, or itself, by name; what is here of a flat parameter of torch's FSDP, by its own."""
    tensor, parts = param.grad if of_gradient else param.detach(), getattr(param, "_shard_param_infos", ())
    if tensor is None or not parts:
        yield name, tensor
        return
    for fqn, part in zip(getattr(param, "_fqns", ()), parts, strict=False):
        if part.in_shard:
            first = part.offset_in_shard
            yield name.replace("_flat_param", fqn), tensor[first : first + part.numel_in_shard]
