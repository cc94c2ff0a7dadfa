"""The guard of a program that is not ours: what stock torch.distributed does in this process, entered in its record.

The methods of the class ProcessGroup are replaced by ones that note the call and then call the old one. C++ code calls
past them: see `WatchedGroup`. Groups of the backend "lockstep" override the methods, and our own transport is let
through: these have layers of their own, see `group_layers`. No torch is imported here before the program has done so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, final

from lockstep.observe.call_site import WAYS, call_site, site_from
from lockstep.observe.group_layers import watch_groups
from lockstep.observe.guard import Guard
from lockstep.observe.native import in_c
from lockstep.observe.patches import Patches, Wrap, around, pass_by
from lockstep.observe.settings import CHECKED_STEPS
from lockstep.observe.torch_flight_recorder import TIMING, TorchFlightRecorder
from lockstep.observe.torch_functional import watch_functional
from lockstep.observe.torch_groups import TorchGroups, WatchedGroup, outlive
from lockstep.observe.torch_import import when_imported
from lockstep.observe.torch_operations import CALLS, Operation, by_order, has_one_tensor, read, text_of
from lockstep.observe.torch_optimizers import OPTIMIZERS
from lockstep.observe.torch_start import Meetings
from lockstep.observe.torch_steps import TorchSteps
from lockstep.observe.torch_under_way import QUEUED_MESSAGE, UnderWay
from lockstep.observe.wording import step_after

if TYPE_CHECKING:
    from lockstep.observe.in_flight import InFlight  # imports torch, which comes when the program wants it

# files whose operations are entered above them
_SEAM = tuple([os.path.join("lockstep", "comm", f"torch_{name}.py") for name in ("calls", "transport", "work")])


def attach(guard: Guard) -> Callable[[], None]:
    """Let `guard` see what torch.distributed does in this process, from its import on. The result ends that."""
    watch = TorchWatch(guard)
    watch.patches.add(
        when_imported("torch.distributed.distributed_c10d", watch.watch_calls),
        when_imported("torch.distributed._functional_collectives", watch.watch_functional),
        OPTIMIZERS.attach(),
        watch_groups(guard),
    )
    watch.patches.insert(guard.before_look, watch.under_way.look)
    watch.patches.insert(guard.aborts, watch.under_way.abort)
    watch.patches.insert(guard.motion.queues, watch.under_way.has_queued)
    guard.motion.queued = watch.under_way.first_queued
    OPTIMIZERS.steps = watch.steps
    watch.patches.undo_in_children()
    return watch.patches.undo


@final
class TorchWatch:
    """Replaces what begins and ends operations and steps in this process. One per process and guard."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._recorder = guard.recorder
        self._groups = TorchGroups(guard)
        self.steps = TorchSteps(guard, self._groups)
        self._meetings = Meetings(guard)
        self.under_way = UnderWay(guard, self._groups)
        self.patches = Patches()
        self._is_checking = guard.settings.mode == "check"
        self._in_flight: InFlight | None = None  # from its first operation on

    def watch_calls(self) -> None:
        """torch.distributed is there: replace what starts and ends its operations."""
        from torch._C import _distributed_c10d
        from torch.distributed import distributed_c10d
        from torch.distributed.distributed_c10d import ProcessGroup, Work

        self.under_way.begin(TorchFlightRecorder(vars(_distributed_c10d)), ProcessGroup.recv)
        os.environ.setdefault(TIMING, "1")  # read by each group of NCCL that is made from now on
        wrapper = distributed_c10d.all_reduce.__code__
        known = vars(distributed_c10d).values()  # one of them warns whoever asks it for an attribute
        functions: list[Any] = [each for each in known if type(each) is FunctionType and each.__code__ is wrapper]
        doors = {id(each.__wrapped__.__code__) for each in functions}  # called by the wrapper that users call
        self._groups.begin()
        for name in CALLS:
            if hasattr(ProcessGroup, name):
                holds = partial(self._noting_holds, name, doors) if has_one_tensor(name) else None
                self._replace(ProcessGroup, name, partial(self._noting, name, doors), holds)
        self._replace(Work, "wait", self._leaving, self._leaving_holds)
        self._replace(ProcessGroup, "_end_coalescing", self._ending_batch)
        reducer = _distributed_c10d.Reducer
        self._replace(reducer, "__init__", around(self._remember))
        self._replace(distributed_c10d, "_new_group_with_tag", around(self._meetings.make))
        dist = sys.modules["torch.distributed"]
        self.patches.replace(distributed_c10d, "init_process_group", around(self._meetings.meet), dist)
        self.patches.replace(distributed_c10d, "destroy_process_group", around(self.under_way.end), dist)
        self.patches.replace(distributed_c10d, "_new_process_group_helper", around(self._using_first))
        self.patches.replace(dist, "_verify_params_across_processes", around(self._using_first))

    def _using_first(self, old: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """What makes a group, or what starts an operation in C++ for a model, at times the first of its group."""
        with self._groups.first_uses.held():
            return old(*args, **kwargs)

    def watch_functional(self) -> None:
        """Functional collectives are there, which DTensor and torch.compile make."""
        self.patches.add(watch_functional(self._groups.known, self._groups.first_uses))

    def _replace(self, owner: Any, name: str, wrap: Wrap, c_holds: Callable[[Any], Any] | None = None) -> None:
        # torch's C++ asks a Python subclass for its own `name`, and takes what we put into the class for one; it sees
        # that it was called by just that, and does not call it again, by the name of the code
        def named(old: Callable[..., Any]) -> Callable[..., Any]:
            new = wrap(old)
            new.__code__ = new.__code__.replace(co_name=name)  # type: ignore[attr-defined]
            pass_by(new)
            return new if c_holds is None or self._is_checking else in_c(new, c_holds(old))

        self.patches.replace(owner, name, named)

    def _noting_holds(self, name: str, doors: set[int], old: Callable[..., Any]) -> tuple[Any, ...]:
        """What C needs in the place of the closure that `_noting` makes: see `native/torch_calls.c`."""
        groups, its, call, saw = self._groups, self.under_way, CALLS[name], self._guard.saw
        how = call.tensor[0], call.reduces, call.has_root, partial(read, name)
        return self._recorder, old, its.open, saw, its.follow, groups.plain, groups.followed, doors, WAYS, *how

    def _leaving_holds(self, old: Callable[..., bool]) -> tuple[Any, ...]:
        return self._recorder, old, self.under_way.open, self._guard.saw, self.under_way.has_waited

    def _noting(self, name: str, doors: set[int], old: Callable[..., Any]) -> Callable[..., Any]:
        """`old`, a method of ProcessGroup, that is entered in the record. doors: code of torch's that users call."""
        groups, followed, is_message = self._groups, self._groups.followed, CALLS[name].is_message
        begins, recorder, clock = groups.first_uses.begin, self._recorder, self._recorder.clock

        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            watched = followed.get(id(group)) or groups.known(group)
            if watched is None:
                return old(group, *args, **kwargs)
            frame, depth = sys._getframe(1), 1
            is_ours = False
            if id(frame.f_code) in doors:
                frame, depth = sys._getframe(3), 3
            else:
                is_ours = frame.f_code.co_filename.endswith(_SEAM)
            now_ns = clock.time() if watched.has_streams else 0
            watched.inside += 1
            number, operation, tensor = -1, (), None
            try:
                if watched.inside == 1 and (before := group._get_sequence_number_for_group()) != watched.seen:
                    watched.catch_up(before, call_site() if is_ours else site_from(frame))
                if not is_ours:
                    operation, tensor = read(name, args, kwargs)
                    if is_message and watched.has_streams and not getattr(tensor, "is_cpu", True):
                        operation = by_order(operation)
                    line = id(frame.f_code), frame.f_lasti, operation
                    words = watched.of_lines.get(line)
                    if words is None:
                        begins(watched)  # what is not known yet may be the first
                        words = watched.learn(line, frame, depth + 1)
                    seq = next(watched.messages[(name, *operation[5:7])] if is_message else watched.collectives)
                    number = recorder.enter(seq, words, is_message, now_ns)
                elif watched.seen == watched.unused:
                    begins(watched)
                work = old(group, *args, **kwargs)
            except BaseException as error:
                if number >= 0:
                    recorder.leave(number)
                self._guard.saw(error)
                raise
            finally:
                if watched.inside == 1:
                    watched.seen = group._get_sequence_number_for_group()
                watched.inside -= 1
            if number >= 0:
                self.under_way.follow(watched, number, work, tensor, is_message, now_ns)
                if self._is_checking and not is_message:
                    self._check(watched, work, operation, tensor, site_from(frame))
            return work

        return call

    def _check(self, watched: WatchedGroup, work: Any, operation: Any, tensor: Any, site: str) -> None:
        """In the first steps: keep what the tensor is like, to see whether it is so still when it is waited for."""
        if work is None or tensor is None or not tensor.is_cpu or self._recorder.step >= CHECKED_STEPS:
            return
        text = text_of(Operation(*operation), watched.ranks)
        what = f"{text} at {site}, {step_after(self._recorder.step)}, rank {self._guard.rank}"
        if self._in_flight is None:
            from lockstep.observe.in_flight import InFlight  # not before: it needs all of torch

            self._in_flight = InFlight()
        self._in_flight.started(work, tensor, what)

    def _ending_batch(self, old: Callable[..., Any]) -> Callable[..., Any]:
        """ProcessGroup._end_coalescing, whose Work is that of all messages that were started together."""

        def end(group: Any, *args: Any) -> Any:
            work, watched = old(group, *args), self._groups.known(group)
            if watched is not None and watched.batch:
                numbers, watched.batch = watched.batch, []
                if work is None:  # the current stream waits for them
                    self._guard.stream_ends.waited(numbers)
                else:
                    self.under_way.keep_batch(numbers, watched, work)
            return work

        return end

    def _leaving(self, old: Callable[..., bool]) -> Callable[..., bool]:
        """Work.wait, after which the operation has ended."""
        stood, clock, under_way = self._recorder.stood, self._recorder.clock, self.under_way
        pop, batches, has_waited = under_way.open.pop, under_way.batches, under_way.has_waited

        def wait(work: Any, *args: Any, **kwargs: Any) -> bool:
            if sys._getframe(1).f_code.co_filename.endswith(_SEAM):  # which waits in slices, and tells its own
                return old(work, *args, **kwargs)
            since_ns, is_open = clock.time(), False
            changed = None if self._in_flight is None else self._in_flight.waited(work)
            try:
                is_done = old(work, *args, **kwargs)
            except RuntimeError as error:
                is_open = bool(args or kwargs) and under_way.goes_on(work)  # and may be waited for again
                if not is_open:
                    self._guard.saw(error)
                raise
            finally:
                if not is_open:
                    ended = pop(id(work), None)
                    if ended is None:
                        has_waited(work, since_ns)
                    elif ended[3] == QUEUED_MESSAGE:
                        clock.stream_waited(ended[0], since_ns)
                        self._guard.stream_ends.waited(batches.pop(ended[0], ended[:1]))
                    else:
                        stood(ended[0], since_ns)
            if changed is not None:
                raise changed
            return is_done

        return wait

    def _remember(self, old: Callable[..., None], /, reducer: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        """Reducer.__init__ of DistributedDataParallel, whose parameters all ranks share."""
        self.steps.share(params)
        old(reducer, params, *args, **kwargs)
        groups = [group for group in (*args, *kwargs.values()) if isinstance(group, self._groups.plain)]
        outlive(reducer, groups)
        for group in groups:  # what the wrap has sent is of its line, and not of that where this rank is seen next
            watched = self._groups.known(group)
            if watched is not None:
                watched.catch_up(group._get_sequence_number_for_group(), call_site())
