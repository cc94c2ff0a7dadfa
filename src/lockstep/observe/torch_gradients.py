"""The first gradient of a stock torch program that is not finite: on which rank it came into being, and where.

Looks just before an optimizer applies the gradients: then whatever skips bad steps (GradScaler, a test of the program's
own) has had its say. By then DDP has averaged them. They are all looked at now and then, and when a loss is not finite,
which is known in every step. What went wrong behind a finite loss was applied on every rank, and shows in the loss of
the next step: then the parameters tell whose gradients they were, unless no step has gone well before: so they began.
One small parameter near the input is followed: its gradients before averaging, of this step and the one before, and the
losses tell whether it was this rank.

On a device no step waits for these numbers: a few of each step are kept until the device has said that they are finite.
Once they are not, the next step is looked at, and the first one of which they are not is the one that is told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from math import inf, isfinite
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, final

from lockstep.observe.call_site import backward_site, call_site
from lockstep.observe.facts import FINITE, NEVER_FINITE, UNTIL
from lockstep.observe.guard import Guard
from lockstep.observe.native import read_in_c
from lockstep.observe.pace import PACE
from lockstep.observe.settings import FIRST_STEPS
from lockstep.observe.torch_backward import BACKWARDS, SMALL, Loss
from lockstep.observe.torch_optimizers import Seen, params_of

if TYPE_CHECKING:
    from lockstep.observe.finite_later import FiniteLater  # imports torch, as the next one does
    from lockstep.observe.gradients import Fault

_SHARE = 0.0003  # of the time goes into looking at all gradients, whether or not there is a sign
_SIGN_SHARE = 0.01  # and into looking at signs of a device that come to nothing
_ASKED_NS = 50_000_000  # from one question to a device to the next
_KEPT = 1024  # steps
_NAMED = 5

Named = Callable[[Any], list[tuple[str, Any]]]  # the parameters of an optimizer, by name


@final
@read_in_c
class GradientFacts:
    """Of one rank."""

    __slots__ = ("__dict__", "__weakref__", "due_ns", "recorder", "seen")

    def __init__(self, guard: Guard, named: Named) -> None:
        self.recorder = guard.recorder
        self.seen: deque[Seen] = deque(maxlen=_KEPT)  # of the optimizers' last steps
        self.due_ns = 0.0  # from then on `look` is called before each, by time.monotonic_ns
        self._guard, self._named = guard, named
        self._is_done = False
        self._went_well = False  # a step with finite gradients: so the parameters were
        self._steps = 0  # of optimizers, whose gradients are all looked at, if they are few
        self._spent_ns, self._began_ns, self._due_ns = 0, monotonic_ns(), 0.0
        self._later: FiniteLater | None = None  # where losses are on a device
        self._asked: int | None = None  # the step in which it was asked
        self._asks_ns = self._heeds_ns = 0.0  # from then on it is asked again, and a sign of it looked at
        self._has_sign = False  # something it has computed since is not finite
        self._until = self._told = inf  # up to this step all is finite or has come to nothing, and that was told

    def look(self, optimizer: Any) -> None:
        """At what `optimizer` is about to apply, where that is due or a loss not finite, or not known."""
        from lockstep.observe.finite_later import is_capturing

        now_ns, is_strict = monotonic_ns(), self._guard.settings.mode == "strict"
        if self._is_done or is_capturing():
            self.seen.pop()
            return
        losses = self.seen[-1][1]
        known = [value for value, _ in losses if type(value) is float]
        has_sign = not all(map(isfinite, known)) or ((is_strict or not known) and _is_probe_faulty())
        if not known:
            has_sign |= self._follow_device(optimizer, now_ns)
        if now_ns < self._due_ns and not has_sign:
            return
        from lockstep.observe.gradients import are_finite, nonfinite_gradients, scaler_is_active

        is_odd = self._has_sign or not are_finite([param.grad for param in params_of(optimizer)])
        named = self._named(optimizer) if is_odd else []  # to find the names takes longer than all else
        faults = nonfinite_gradients(pair for one in named for pair in _parts(*one, of_gradient=True))
        applied = _applied(named) if faults or self._has_sign else []
        if (faults or applied) and not scaler_is_active():
            steps = self._by_step()
            if applied and not self._went_well:
                self._tell(applied, steps[-1], NEVER_FINITE)
            else:
                began = steps[-2:][0] if applied else steps[-1]
                self._tell(applied or faults, self._first_faulty(steps) or began)
        # a first step without a backward may be one that only makes the optimizer's state
        self._went_well |= not faults and (bool(losses) or self._steps > 0)
        self._steps += 1
        spent_ns = monotonic_ns() - now_ns
        self._spent_ns += spent_ns
        if self._has_sign:
            self._has_sign, self._until = False, max(self._until, self.recorder.step - 1)
            self._heeds_ns = now_ns + spent_ns / _SIGN_SHARE
        if self._steps >= FIRST_STEPS:
            self._due_ns = self._began_ns + self._spent_ns / _SHARE
        self.due_ns = 0.0 if is_strict else self._due_ns

    def _follow_device(self, optimizer: Any, now_ns: int) -> bool:
        """Keep of this step single numbers of the device; whether it has said by now that some are not finite."""
        from lockstep.observe.finite_later import FiniteLater, numbers_of

        step = self.seen[-1][0]
        if not _on_device(self.seen[-1]):
            return False
        try:
            if self._later is None:
                self._later, self._until = FiniteLater(), -1
                self._guard.facts.tell(FINITE, UNTIL, -1)
            self.seen[-1] = numbers_of(self.seen[-1], _means(optimizer))
            if self._asked is not None and (is_finite := self._later.answer()) is not None:
                self._has_sign |= not is_finite
                self._until = max(self._until, self._asked - 1) if is_finite else self._until
                self._asked = None
            if self._asked is None and now_ns >= self._asks_ns and not self._has_sign:
                unknown = [one for one in self.seen.copy() if one[0] > self._until]
                self._later.ask([number for one in unknown for number in _on_device(one)])
                self._asked, self._asks_ns = step, now_ns + _ASKED_NS
        except RuntimeError:  # the device has failed, which the next call of the program's own says; or memory is short
            self.seen[-1], self._until, self._asked = (step, [], [], []), step - 1, None
        return self._has_sign and now_ns >= self._heeds_ns

    def forget(self) -> None:
        """Let go of all but the last two steps, and those of which it is not known yet whether they were well.

        The guard's thread does, as that takes longer than to keep them; of a device it tells who waits for it.
        """
        later = self._later
        if PACE.is_brief and later is not None and self._asked is not None and later.answer() is False:
            BACKWARDS.once.append(partial(PACE.turn, is_brief=False))  # the next step is looked at
        until = self._until
        while len(self.seen) > 2 and self.seen[1][0] <= until:
            self.seen.popleft()
        facts = self._guard.facts
        if until != self._told and any("gradient" in one.status.facts for one in facts.sights.values()):
            facts.tell(FINITE, UNTIL, until)
            self._told = until

    def finish(self, optimizer: Any) -> None:
        """No step comes any more whose loss would show what the last one, of `optimizer`, has applied."""
        if self.seen and self.seen[-1][0] + 1 < self.recorder.step:  # the last ones were only counted
            losses = [loss for loss in BACKWARDS.recent if type(loss[0]) is not float]
            self.seen.append((self.recorder.step - 1, losses, [*BACKWARDS.own], []))
        if self._is_done or optimizer is None or not self.seen:
            return
        with suppress(RuntimeError):  # the device has failed, or a loss has been overwritten since
            steps = self._by_step()
            seen = self._first_faulty(steps) or steps[-1]
            applied = _applied(self._named(optimizer)) if _is_bad(seen) else []
            if applied:
                from lockstep.observe.gradients import scaler_is_active

                if not scaler_is_active():
                    self._tell(applied, seen)

    def _by_step(self) -> list[Seen]:
        """`seen`, and the steps between these that were only counted: the next one has their gradients too.

        And their losses, if these are on a device. Backwards are as many in each: none is forgotten.
        """
        found: list[Seen] = []
        for step, losses, own, means in self.seen.copy():
            missed = max(0, step - found[-1][0] - 1) if found else 0
            known = [[]] * missed + [losses] if losses and type(losses[0][0]) is float else _dealt(losses, missed)
            parts = zip(range(step - missed, step), known, _dealt(own, missed), strict=False)
            found += [(before, some, part, []) for before, some, part in parts]
            found.append((step, known[-1], _dealt(own, missed)[-1], means))
        return found

    def _first_faulty(self, steps: Sequence[Seen]) -> Seen | None:
        """Of those of which a device has not said that all is well."""
        return next((one for one in steps if one[0] > self._until and _is_bad(one)), None)

    def _tell(self, faults: Sequence[Fault], seen: Seen, origin: str = "") -> None:
        step, losses, own, _ = seen
        self._is_done, self._until = True, max(step, self._until)
        site, is_own = _first_line(losses), _is_faulty(own)
        if not origin and (site or is_own):
            origin = "the loss is not finite" if site else "gradients are not finite before averaging"
        named = [str(one) for one in faults[:_NAMED]]
        named += [f"and {len(faults) - _NAMED} more"] if len(faults) > _NAMED else []
        self._guard.facts.tell("gradient", step, [origin, named, site or backward_site[0] or call_site()])


def _means(optimizer: Any = None) -> list[Any]:
    """Of the probes' gradients; where there is none, of those of a small parameter of `optimizer`."""
    probes = [param for known in BACKWARDS.probes if (param := known()) is not None]
    if not probes and optimizer is not None:
        probes = [*islice((param for param in params_of(optimizer) if param.numel() <= SMALL), 1)]
    return [probe.grad for probe in probes if probe.grad is not None]


def _is_probe_faulty() -> bool:
    """Whether the mean of a probe's gradients is not finite; never waits for a device."""
    return any(mean.is_cpu and not isfinite(mean.sum().item()) for mean in _means())


def _on_device(seen: Seen) -> list[Any]:
    _, losses, own, means = seen
    return [one for one in (*[value for value, _ in losses], *own, *means) if getattr(one, "is_cuda", False)]


def _is_bad(seen: Seen) -> bool:
    _, losses, own, means = seen
    return bool(_first_line(losses)) or _is_faulty([*own, *means])


def _dealt(made: list[Any], missed: int) -> list[list[Any]]:
    """What as many backwards have made in each of the steps that were `missed` and in the last."""
    each = len(made) // (missed + 1)
    return [made[at * each : (at + 1) * each] for at in range(missed)] + [made[missed * each :]]


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
