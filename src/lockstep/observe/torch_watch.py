"""The guard of a program that is not ours: what stock torch.distributed does in this process, entered in its record.

The methods of the class ProcessGroup are replaced by ones that note the call and then call the old one. C++ code calls
past them: see `WatchedGroup`. Groups of the backend "lockstep" override the methods, and our own transport is let
through: these have layers of their own, see `group_layers`. No torch is imported here before the program has done so.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, final

from lockstep.errors import CommError
from lockstep.observe.call_site import call_site, site_from
from lockstep.observe.group_layers import watch_groups
from lockstep.observe.guard import Guard
from lockstep.observe.patches import Patches, around
from lockstep.observe.profile.step_clock import UNKNOWN
from lockstep.observe.settings import CHECKED_STEPS
from lockstep.observe.stacks import backward_frame, frame_of, stack_of
from lockstep.observe.torch_backward import BACKWARDS
from lockstep.observe.torch_flight_recorder import TIMING, TorchFlightRecorder
from lockstep.observe.torch_functional import watch_functional
from lockstep.observe.torch_groups import TorchGroups, WatchedGroup, outlive
from lockstep.observe.torch_import import when_imported
from lockstep.observe.torch_operations import CALLS, Operation, reader_of, text_of
from lockstep.observe.torch_optimizers import OPTIMIZERS
from lockstep.observe.torch_start import Meetings
from lockstep.observe.torch_steps import TorchSteps
from lockstep.observe.wording import step_after

if TYPE_CHECKING:
    from lockstep.observe.in_flight import InFlight  # imports torch, which comes when the program wants it

# files whose operations are entered above them
_SEAM = tuple(os.path.join("lockstep", "comm", name) for name in ("torch_calls.py", "torch_transport.py"))


def attach(guard: Guard) -> Callable[[], None]:
    """Let `guard` see what torch.distributed does in this process, from its import on. The result ends that."""
    watch = TorchWatch(guard)
    watch.patches.add(
        when_imported("torch.distributed.distributed_c10d", watch.watch_calls),
        when_imported("torch.distributed._functional_collectives", watch.watch_functional),
        OPTIMIZERS.attach(),
        watch_groups(guard),
    )
    watch.patches.insert(guard.before_look, watch.look)
    watch.patches.insert(guard.aborts, watch.abort)
    watch.patches.insert(guard.motion.queues, watch.has_queued)
    guard.queued(watch.first_queued)
    OPTIMIZERS.steps = watch.steps
    watch.patches.undo_in_children()
    return watch.patches.undo


# A call from Python that has returned its Work: number of the record, group, the Work, torch's number or one of these
_Open = tuple[int, WatchedGroup, "weakref.ref[Any]", int]
_ABORT_S = 2.0
_MESSAGE, _QUEUED_MESSAGE = 0, -1  # on the CPU; on a stream


@final
class TorchWatch:
    """Follows the groups, calls and steps of this process. One per process and guard."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._recorder = guard.recorder
        self._groups = TorchGroups(guard)
        self.steps = TorchSteps(guard, self._groups)
        self._meetings = Meetings(guard)
        self._open: dict[int, _Open] = {}  # by id of the Work
        self._batches: dict[int, list[int]] = {}  # by the first of them: messages that one Work stands for
        self._queued: dict[
            int, tuple[weakref.ref[Any], int]
        ] = {}  # a collective on a stream: its Work, as _open has it
        self._moving: dict[WatchedGroup, int] = {}  # torch's number at the last look, where it was ahead of ours
        self._aborted: set[str] = set()
        self.patches = Patches()
        self._flights: TorchFlightRecorder | None = None
        self._is_checking = guard.settings.mode == "check"
        self._in_flight: InFlight | None = None  # from its first operation on
        self._receive: Any = None  # ProcessGroup.recv as it was
        self._main = threading.main_thread().ident

    # ------------------------------------------------------------------ what is replaced

    def watch_calls(self) -> None:
        """torch.distributed is there: replace what starts and ends its operations."""
        from torch._C import _distributed_c10d
        from torch.distributed import distributed_c10d
        from torch.distributed.distributed_c10d import ProcessGroup, Work

        self._flights = TorchFlightRecorder(vars(_distributed_c10d))
        os.environ.setdefault(TIMING, "1")  # read by each group of NCCL that is made from now on
        self._receive = ProcessGroup.recv
        wrapper = distributed_c10d.all_reduce.__code__
        known = vars(distributed_c10d).values()  # one of them warns whoever asks it for an attribute
        functions: list[Any] = [each for each in known if type(each) is FunctionType and each.__code__ is wrapper]
        doors = {id(each.__wrapped__.__code__) for each in functions}  # called by the wrapper that users call
        self._groups.begin()
        for name in CALLS:
            if hasattr(ProcessGroup, name):
                self._replace(ProcessGroup, name, partial(self._noting, name, doors))
        self._replace(Work, "wait", self._leaving)
        self._replace(ProcessGroup, "_end_coalescing", self._ending_batch)
        reducer = _distributed_c10d.Reducer
        self._replace(reducer, "__init__", around(self._remember))
        self._replace(distributed_c10d, "_new_group_with_tag", around(self._meetings.make))
        dist = sys.modules["torch.distributed"]
        self.patches.replace(distributed_c10d, "init_process_group", around(self._meetings.meet), dist)

    def watch_functional(self) -> None:
        """Functional collectives are there, which DTensor and torch.compile make."""
        self.patches.add(watch_functional(self._groups.known))

    def _replace(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        # torch's C++ asks a Python subclass for its own `name`, and takes what we put into the class for one; it sees
        # that it was called by just that, and does not call it again, by the name of the code
        def named(old: Callable[..., Any]) -> Callable[..., Any]:
            new = wrap(old)
            new.__code__ = new.__code__.replace(co_name=name)  # type: ignore[attr-defined]
            return new

        self.patches.replace(owner, name, named)

    def _noting(self, name: str, doors: set[int], old: Callable[..., Any]) -> Callable[..., Any]:
        """`old`, a method of ProcessGroup, that is entered in the record. doors: code of torch's that users call."""
        groups, followed, is_message = self._groups, self._groups.followed, CALLS[name].is_message
        recorder, opened, read = self._recorder, self._open, reader_of(name, sys.modules["torch"].Tensor)
        clock = recorder.clock

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
                    operation, tensor = read(args, kwargs)
                    line = id(frame.f_code), frame.f_lasti, operation
                    words = watched.of_lines.get(line) or watched.learn(line, frame, depth + 1)
                    seq = next(watched.messages[(name, *operation[5:])] if is_message else watched.collectives)
                    number = recorder.enter(seq, words, is_message, now_ns)
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
                if work is None or watched.has_streams or id(work) in opened:
                    self._follow(watched, number, work, tensor, is_message, now_ns)
                else:
                    opened[id(work)] = number, watched, weakref.ref(work), _MESSAGE if is_message else watched.seen
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

    def _follow(
        self, watched: WatchedGroup, number: int, work: Any, tensor: Any, is_message: bool, began_ns: int = 0
    ) -> None:
        """See to it that record `number` is left when its operation has ended. began_ns: of one on a stream."""
        is_queued = watched.has_streams and (tensor is None or not tensor.is_cpu)
        if is_queued and not is_message:
            watched.pending.append((watched.seen, number))
            if work is not None:
                self._queued[id(work)] = weakref.ref(work), number
            else:  # its stream stands in it, the thread goes on
                self._recorder.clock.stream_waited(number, began_ns)
        elif is_queued and work is None:
            watched.batch.append(number)
        elif work is None:
            self._recorder.leave(number)
        else:
            kind = _QUEUED_MESSAGE if is_queued else _MESSAGE
            self._keep(number, watched, work, kind if is_message else watched.seen)

    def _keep(self, number: int, watched: WatchedGroup, work: Any, torch_number: int) -> None:
        """Until `work` is waited for. It may be at the place of one that nobody has waited for, and that is gone."""
        older = self._open.pop(id(work), None)
        if older is not None:
            self._let_go(older)
        self._open[id(work)] = number, watched, weakref.ref(work), torch_number

    def _let_go(self, call: _Open) -> None:
        """It has ended, or nobody can wait for it any more."""
        number, watched, *_ = call
        if watched.has_streams:
            self._recorder.leave_all(self._batches.pop(number, (number,)))
        else:
            self._recorder.let_go(number)

    def _ending_batch(self, old: Callable[..., Any]) -> Callable[..., Any]:
        """ProcessGroup._end_coalescing, whose Work is that of all messages that were started together."""

        def end(group: Any, *args: Any) -> Any:
            work, watched = old(group, *args), self._groups.known(group)
            if watched is not None and watched.batch:
                numbers, watched.batch = watched.batch, []
                if work is None:  # the current stream waits for them
                    self._guard.stream_ends.waited(numbers)
                else:
                    self._batches[numbers[0]] = numbers
                    self._keep(numbers[0], watched, work, _QUEUED_MESSAGE)
            return work

        return end

    def _leaving(self, old: Callable[..., bool]) -> Callable[..., bool]:
        """Work.wait, after which the operation has ended."""
        pop, stood, clock, queued = self._open.pop, self._recorder.stood, self._recorder.clock, self._queued

        def wait(work: Any, *args: Any, **kwargs: Any) -> bool:
            since_ns = clock.time()
            changed = None if self._in_flight is None else self._in_flight.waited(work)
            try:
                is_done = old(work, *args, **kwargs)
            except RuntimeError as error:
                self._guard.saw(error)
                raise
            finally:
                ended = pop(id(work), None)
                if ended is not None and ended[3] == _QUEUED_MESSAGE:
                    clock.stream_waited(ended[0], since_ns)
                    self._guard.stream_ends.waited(self._batches.pop(ended[0], ended[:1]))
                elif ended is not None:
                    stood(ended[0], since_ns)
                else:
                    known, number = queued.pop(id(work), (None, UNKNOWN))
                    clock.stream_waited(number if known is not None and known() is work else UNKNOWN, since_ns)
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

    # ------------------------------------------------------------------ from the guard's thread

    def look(self) -> None:
        """Enter what C++ has started and does not move on from, and leave what has ended."""
        flights = self._flights
        if flights is None:
            return
        pairs = self._groups.all()
        moving = {watched: group._get_sequence_number_for_group() for group, watched in pairs if not watched.inside}
        if not self._open and all(moving.get(one) == one.seen and not one.pending for _, one in pairs):
            self._moving = moving  # nothing is under way
            return
        flights.look()
        for watched, number in moving.items():
            if number > watched.seen and self._moving.get(watched) == number:
                self._catch_up_late(flights, watched, number)
        self._moving = moving
        for _, watched in pairs:
            ended = flights.ended(watched.torch_name)
            watched.settle(math.inf if ended is None else ended)
        for key, call in list(self._open.items()):
            self._leave_unawaited(flights, key, call)

    def _catch_up_late(self, flights: TorchFlightRecorder, watched: WatchedGroup, number: int) -> None:
        """This rank stands in C++, or does something else since: which operation is open, and from which line."""
        ended = flights.ended(watched.torch_name)
        known = {} if ended is None or ended >= number else flights.since(watched.torch_name, watched.seen + 1)
        is_own = self._main == threading.get_ident()  # who looks once more at its end
        in_backward = backward_frame()  # of whichever thread, where the main one may only wait for it
        stack = [BACKWARDS.site or call_site()] if is_own else stack_of(in_backward or frame_of(self._main or 0))
        site = self._guard.failed_at or (stack[-1] if stack else "")
        watched.catch_up(number, site, known, if_idle=True)

    def _leave_unawaited(self, flights: TorchFlightRecorder, key: int, call: _Open) -> None:
        """A Work that nobody waits for: ended where torch says so, or nobody can wait for it any more."""
        _, watched, work, torch_number = call
        ended = flights.ended(watched.torch_name) if torch_number > 0 else None
        is_over = work() is None if ended is None else torch_number <= ended
        found = self._open.pop(key, None) if is_over else None
        if found is call:
            self._let_go(call)
        elif found is not None:  # of a new Work at the same place
            self._open.setdefault(key, found)

    def has_queued(self) -> bool:
        """Whether a GPU has collectives still to do, or this process is about to give it some."""
        return any(
            watched.has_streams and (watched.pending or watched.inside)
            for watched in tuple(self._groups.followed.values())
        )

    def first_queued(self) -> dict[str, int]:
        """By group that a GPU has collectives of under way: the first that it has not come to, if torch tells that."""
        found: dict[str, int] = {}
        for watched in tuple(self._groups.followed.values()):
            pending = tuple(watched.pending) if watched.has_streams else ()
            if pending:
                begun = self._flights.begun(watched.torch_name) if self._flights else -1
                ahead = [number for of_torch, number in pending if of_torch > begun >= 0]
                number = ahead[0] if ahead else pending[-1][1]
                for record in self._guard.records(number, number + 1):
                    found[watched.name] = record.seq + (not ahead)
        return found

    def abort(self, error: CommError) -> None:
        """End what is under way in this process: it cannot end by itself any more."""
        if self._flights is None:  # the program never came to torch.distributed
            return
        for group, watched in self._groups.all():
            is_open = watched.pending or watched.inside or any(call[1] is watched for call in list(self._open.values()))
            is_open = is_open or group._get_sequence_number_for_group() != watched.seen  # C++ may be at it
            if (is_open or self._guard.settings.mode == "strict") and watched.name not in self._aborted:
                self._aborted.add(watched.name)
                self._break(group, watched)

    def _break(self, group: Any, watched: WatchedGroup) -> None:
        if watched.has_streams:
            self._guard.stream_ends.were_aborted = True
            aborting = threading.Thread(target=group.abort, name="lockstep-abort", daemon=True)
            aborting.start()  # NCCL's may wait for a thread that is about to start a kernel where none can start
            aborting.join(_ABORT_S)
            return
        from lockstep.comm.torch_transport import close_connections

        close_connections(partial(self._receive, group), group.rank(), len(watched.ranks))
