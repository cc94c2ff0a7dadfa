"""Notes of a program that is not ours: its loss, its learning rate, what it holds, whether its replicas are equal.

The loss is the root of backward, summed over the backwards of a step: the one whose gradient the optimizer applies. One
on the CPU is read at once, a microsecond; one on a device by the guard's thread, once the device has come that far.
No torch is imported here.
"""

from __future__ import annotations

import sys
import weakref
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

from lockstep.observe.facts import told_by_kind, topics_of
from lockstep.observe.guard import Guard
from lockstep.observe.patches import Patches, around
from lockstep.observe.profile.device_values import read_later
from lockstep.observe.profile.notes import Later
from lockstep.observe.profile.run_record import steps_per_line
from lockstep.observe.profile.writer import RunWriter
from lockstep.observe.replica_diff import agree
from lockstep.observe.replica_findings import are_meant_equal
from lockstep.observe.torch_backward import BACKWARDS, Loss
from lockstep.observe.torch_import import when_imported

# after these steps the log of DistributedDataParallel has the times of the backward before: of warm ones
_LOGGED_FROM, _LOGGED_TO, _LOGGED_EVERY = 4, 11, 100
_WHAT = "parameters, buffers, optimizer state"


@final
class TorchNotes:
    """Of one rank. `look` is for the guard's thread, all else for the rank's own."""

    def __init__(self, writer: RunWriter, guard: Guard) -> None:
        self.knows_loss = False  # from the program itself, whose own is not to be mixed with ours
        self._writer = writer
        self._guard = guard
        self._optimizer: Any = None  # the outermost that steps, weakly
        self._is_stepping = False
        self._is_known = False  # which one that is
        self._noted = self._next = 0  # the steps whose losses were read from a device last, and will be next
        self._has_layout = False
        self._compared: set[tuple[str, str]] = set()
        self._logs: weakref.WeakSet[Any] = weakref.WeakSet()  # of DistributedDataParallel, one for each
        self._patches, self._seeing = Patches(), Patches()

    def attach(self) -> Callable[[], None]:
        """Begin. The result ends it."""
        self._patches.add(BACKWARDS.attach(), when_imported("torch.optim.optimizer", self._look_at_optimizers))
        self._patches.replace_in("torch.amp.grad_scaler", "GradScaler", "scale", _scaling)
        self._patches.replace_in("torch.distributed", "Logger", "__init__", around(self._keep))
        self._guard.before_look.insert(0, self.look)  # before what it notes is written

        def detach() -> None:
            self.look()
            self._guard.before_look.remove(self.look)
            self._seeing.undo()
            self._patches.undo()

        return detach

    # ------------------------------------------------------------------ steps

    def _look_at_optimizers(self) -> None:
        """See which one steps, of those that run others the outermost, until that is known."""
        optimizers = sys.modules["torch.optim.optimizer"]
        self._seeing.add(optimizers.register_optimizer_step_pre_hook(lambda one, *_: self._begins(one)).remove)
        self._seeing.add(optimizers.register_optimizer_step_post_hook(lambda one, *_: self._ends(one)).remove)

    def _begins(self, optimizer: Any) -> None:
        if not self._is_stepping:
            self._is_stepping = True
            if self._optimizer is None or self._optimizer() is not optimizer:
                self._optimizer = weakref.ref(optimizer)

    def _ends(self, optimizer: Any) -> None:
        if self._optimizer is not None and self._optimizer() is optimizer:
            self._is_stepping = False
            if self._writer.clock.step and not self._is_known:
                self._is_known = True
                BACKWARDS.once.append(self._seeing.undo)  # not now, while hooks are called
                if not self._has_layout:
                    self._has_layout = True
                    self._note_layout(optimizer)

    def _note_layout(self, optimizer: Any) -> None:
        from lockstep.observe.layout import layout_of, modules_training

        holding = modules_training(optimizer)
        layout = layout_of(holding[0] if holding else None, optimizer, holding)
        self._writer.note("layout", step=self._writer.clock.step, **layout)

    def _keep(self, old: Callable[..., None], log: Any, *args: Any) -> None:
        """Logger.__init__ of torch."""
        old(log, *args)
        self._logs.add(log)

    def _note_buckets(self, step: int) -> None:
        """What C++ has sent during backward, of which the guard sees no more than how often.

        By this thread: the log is locked while DistributedDataParallel waits.
        """
        logs = [{**data.strs_map, **data.ints_map} for data in (log._get_ddp_logging_data() for log in self._logs)]
        listed = [log.get("rebuilt_bucket_sizes") or log.get("bucket_sizes", "") for log in logs]
        sizes = [int(size) for sizes in listed for size in sizes.split(", ") if size]
        hidden_ns = sum(max(0, log.get("backward_compute_comm_overlap_time", 0)) for log in logs)
        if sizes and any(log.get("backward_comm_time", 0) > 0 for log in logs):
            sent = {"count": len(sizes), "bytes": sum(sizes), "last_bytes": sizes[-1]}
            self._writer.note("buckets", step=step, **sent, hidden_us=hidden_ns // 1000)

    def stepped(self, step: int) -> int:
        """The step has ended. After which one this is to be called again."""
        if self._logs and (_LOGGED_FROM <= step <= _LOGGED_TO or step % _LOGGED_EVERY == 1):
            self._note_buckets(step)
        return step + 1 if step < _LOGGED_TO else step // _LOGGED_EVERY * _LOGGED_EVERY + _LOGGED_EVERY + 1

    def values(self, step: int) -> Callable[[], tuple[dict[str, Any], Later | None]]:
        """What to note of the step that ends, worked out by who calls the result."""
        losses, BACKWARDS.losses = BACKWARDS.losses, []
        rate, optimizer = None, None if self._optimizer is None else self._optimizer()
        if optimizer is not None:
            groups = optimizer.param_groups
            rate = groups[0].get("lr") if groups else None
            if type(rate) is not float:
                rate = learning_rate(optimizer)
        elif self._optimizer is not None:  # another one takes its place
            self._optimizer, self._is_known = None, False
            BACKWARDS.once.append(self._look_at_optimizers)
        if self.knows_loss:
            losses = []
        for value, _ in losses:
            if type(value) is not float:
                return partial(_values_of, rate, *self._from_device(step, losses))
        return partial(_values_of, rate, losses, None)

    def _from_device(self, step: int, losses: Sequence[Loss]) -> tuple[list[Loss], Later | None]:
        """Losses that are there; how to read those on a device, as seldom as there are lines of steps."""
        values = [value for value, _ in losses if type(value) is float or value.is_cuda]
        if all(type(value) is float for value in values):
            return [(value, "") for value in values], None
        if self._noted < step < self._next:
            return [], None
        self._noted, self._next = step, step + steps_per_line(step)
        return [], read_later({"loss": values})

    # ------------------------------------------------------------------ replicas

    def look(self) -> None:
        """Note what the ranks have told of their replicas by now."""
        sights = self._guard.facts.sights
        if self._guard.rank != min(sights, default=None):
            return  # one rank notes it
        for topic in topics_of(told_by_kind(sights).get("replica", ())):
            for key, told in topic.told.items():
                if len(told) < max(2, topic.size) or (topic.name, key) in self._compared:
                    continue
                folds = [value[0] for value in told.values()]
                is_equal = agree(folds)
                if is_equal or are_meant_equal(told):
                    self._compared.add((topic.name, key))
                    digest = f"{zlib.crc32(repr(folds[0]).encode()):08x}"
                    self._writer.note("replicas", step=int(key), equal=is_equal, digest=digest, what=_WHAT)


def _scaling(old: Callable[..., Any]) -> Callable[..., Any]:
    """What GradScaler multiplies before backward is noted as it was."""

    def scale(scaler: Any, outputs: Any) -> Any:
        made = old(scaler, outputs)
        BACKWARDS.scaled = made, outputs
        return made

    return scale


def _values_of(
    rate: float | None, losses: Sequence[Loss], later: Later | None
) -> tuple[dict[str, float | None], Later | None]:
    fields: dict[str, float | None] = {} if rate is None else {"lr": rate}
    if losses or later is not None:
        fields["loss"] = None if later is not None else sum(value for value, _ in losses)
    return fields, later


def learning_rate(optimizer: Any) -> float | None:
    """Of the first group; None where it has none, or is not on the CPU."""
    groups = () if optimizer is None else optimizer.param_groups
    rate = groups[0].get("lr") if groups else None
    if type(rate) is not float and getattr(rate, "is_cpu", False):
        return float(rate)  # pyright: ignore[reportArgumentType]
    return rate if isinstance(rate, float | int) else None
