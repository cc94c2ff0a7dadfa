"""What stock torch.distributed has under way in this process: which of it has ended, and how it is ended by force.

Calls from Python add to it (`torch_watch`). What C++ has started, and what nobody waits for, is found by the guard's
thread, from torch's own counts.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, final

from lockstep.errors import CommError
from lockstep.observe.call_site import backward_site, call_site
from lockstep.observe.guard import Guard
from lockstep.observe.profile.phases import UNKNOWN
from lockstep.observe.stacks import backward_frame, frame_of, stack_of
from lockstep.observe.torch_flight_recorder import TorchFlightRecorder
from lockstep.observe.torch_groups import TorchGroups, WatchedGroup

# A call from Python that has returned its Work: number of the record, group, the Work, torch's number or one of these
_Open = tuple[int, WatchedGroup, "weakref.ref[Any]", int]
_ABORT_S = 2.0
MESSAGE, QUEUED_MESSAGE = 0, -1  # on the CPU; on a stream


@final
class UnderWay:
    """Of one process. The threads of its program add to it; one looks."""

    def __init__(self, guard: Guard, groups: TorchGroups) -> None:
        self._guard, self._recorder, self._groups = guard, guard.recorder, groups
        self.open: dict[int, _Open] = {}  # by id of the Work
        self.batches: dict[int, list[int]] = {}  # by the first of them: messages that one Work stands for
        # by id of its Work: a collective that is not open, and when it was seen ending; 0: it is on a stream
        self._awaited: dict[int, tuple[weakref.ref[Any], int, int]] = {}
        self._moving: dict[WatchedGroup, int] = {}  # torch's number at the last look, where it was ahead of ours
        self._aborted: set[str] = set()
        self._flights: TorchFlightRecorder | None = None
        self._receive: Any = None
        self._main = threading.main_thread().ident

    def goes_on(self, work: Any) -> bool:
        """Whether a collective on the CPU, whose wait has ended by its own limit, has not ended itself."""
        opened = self.open.get(id(work))
        return opened is not None and opened[3] > MESSAGE and not work.is_completed()

    def begin(self, flights: TorchFlightRecorder, receive: Callable[..., Any]) -> None:
        """torch.distributed is there. receive: ProcessGroup.recv as it was."""
        self._flights, self._receive = flights, receive

    def follow(
        self, watched: WatchedGroup, number: int, work: Any, tensor: Any, is_message: bool, began_ns: int = 0
    ) -> None:
        """See to it that record `number` is left when its operation has ended. began_ns: of one on a stream."""
        is_queued = watched.has_streams and (tensor is None or not tensor.is_cpu)
        if is_queued and not is_message:
            watched.pending.append((watched.seen, number))
            if work is not None:
                self._awaited[id(work)] = weakref.ref(work), number, 0
            else:  # its stream stands in it, the thread goes on
                self._recorder.clock.stream_waited(number, began_ns)
        elif is_queued and work is None:
            watched.batch.append(number)
        elif work is None:
            self._recorder.leave(number)
        else:
            kind = QUEUED_MESSAGE if is_queued else MESSAGE
            self._keep(number, watched, work, kind if is_message else watched.seen)

    def _keep(self, number: int, watched: WatchedGroup, work: Any, torch_number: int) -> None:
        """Until `work` is waited for. It may be at the place of one that nobody has waited for, and that is gone."""
        older = self.open.pop(id(work), None)
        if older is not None:
            self._let_go(older)
        self.open[id(work)] = number, watched, weakref.ref(work), torch_number

    def has_waited(self, work: Any, since_ns: int) -> None:
        """A wait for `work`, which is not open (any more), has returned. since_ns: by the recorder's clock."""
        known, number, ended_ns = self._awaited.pop(id(work), (None, UNKNOWN, 0))
        is_known = known is not None and known() is work
        if is_known and ended_ns:
            self._recorder.stood(number, since_ns, ended_ns)
        else:
            self._recorder.clock.stream_waited(number if is_known else UNKNOWN, since_ns)

    def keep_batch(self, numbers: list[int], watched: WatchedGroup, work: Any) -> None:
        """As `_keep`: `work` stands for all of these messages."""
        self.batches[numbers[0]] = numbers
        self._keep(numbers[0], watched, work, QUEUED_MESSAGE)

    def _let_go(self, call: _Open) -> None:
        """It has ended, or nobody can wait for it any more."""
        number, watched, *_ = call
        if watched.has_streams:
            self._recorder.leave_all(self.batches.pop(number, (number,)))
        else:
            self._recorder.let_go(number)

    # ------------------------------------------------------------------ from the guard's thread

    def look(self) -> None:
        """Enter what C++ has started and does not move on from, and leave what has ended."""
        flights = self._flights
        if flights is None:
            return
        pairs = self._groups.all()
        moving = {watched: group._get_sequence_number_for_group() for group, watched in pairs if not watched.inside}
        if not self.open and all(moving.get(one) == one.seen and not one.pending for _, one in pairs):
            self._moving = moving  # nothing is under way
            return
        if not self._groups.first_uses.ask(flights.look):
            return  # soon
        for watched, number in moving.items():
            if number > watched.seen and self._moving.get(watched) == number:
                self._catch_up_late(flights, watched, number)
        self._moving = moving
        for _, watched in pairs:
            ended = flights.ended(watched.torch_name)
            watched.settle(math.inf if ended is None else ended)
        for key, call in list(self.open.items()):
            self._leave_unawaited(flights, key, call)

    def _catch_up_late(self, flights: TorchFlightRecorder, watched: WatchedGroup, number: int) -> None:
        """This rank stands in C++, or does something else since: which operation is open, and from which line."""
        ended, known = flights.ended(watched.torch_name), None
        if ended is not None and ended < number:
            known = self._groups.first_uses.ask(partial(flights.since, watched.torch_name, watched.seen + 1))
        is_own = self._main == threading.get_ident()  # who looks once more at its end
        in_backward = backward_frame()  # of whichever thread, where the main one may only wait for it
        stack = [backward_site[0] or call_site()] if is_own else stack_of(in_backward or frame_of(self._main or 0))
        site = self._guard.causes.failed_at or (stack[-1] if stack else "")
        watched.catch_up(number, site, known or {}, if_idle=True)

    def _leave_unawaited(self, flights: TorchFlightRecorder, key: int, call: _Open) -> None:
        """A Work that no wait has returned from: ended where torch says so, or nobody can wait for it any more."""
        number, watched, work, torch_number = call
        ended = flights.ended(watched.torch_name) if torch_number > MESSAGE else None
        alive = work()
        if not (alive is None if ended is None else torch_number <= ended):
            return
        if alive is not None:  # before it is not open any more: else a wait that returns now would find it nowhere
            kept = weakref.ref(alive, partial(self._awaited.pop, key))  # before another one is at its place
            self._awaited[key] = kept, number, time.monotonic_ns()
        found = self.open.pop(key, None)
        if found is call:
            self._let_go(call)
            return
        if alive is not None:  # its wait has returned meanwhile
            self._awaited.pop(key, None)
        if found is not None:  # of a new Work at the same place
            self.open.setdefault(key, found)

    def has_queued(self) -> bool:
        """Whether a GPU has collectives still to do, or this process is about to give it some."""
        return any(one.has_streams and (one.pending or one.inside) for one in tuple(self._groups.followed.values()))

    def first_queued(self) -> dict[str, int]:
        """By group that a GPU has collectives of under way: the first that it has not come to, if torch tells that."""
        found: dict[str, int] = {}
        for watched in tuple(self._groups.followed.values()):
            if watched.has_streams and (pending := tuple(watched.pending)):
                begun = self._flights.begun(watched.torch_name) if self._flights else -1
                ahead = [number for of_torch, number in pending if of_torch > begun >= 0]
                number = ahead[0] if ahead else pending[-1][1]
                for record in self._guard.records(number, number + 1):
                    found[watched.name] = record.seq + (not ahead)
        return found

    def abort(self, error: CommError | None = None, only: Any = None) -> None:
        """End what is under way in this process, or in one group: it cannot end by itself any more."""
        if self._flights is None:  # the program never came to torch.distributed
            return
        for group, watched in self._groups.all():
            if only is not None and group is not only:
                continue
            is_open = watched.pending or watched.inside or any(call[1] is watched for call in list(self.open.values()))
            is_open = is_open or group._get_sequence_number_for_group() != watched.seen  # C++ may be at it
            if (is_open or self._guard.settings.mode == "strict") and watched.name not in self._aborted:
                self._aborted.add(watched.name)
                self._break(group, watched)

    def end(self, old: Callable[..., None], /, group: Any = None) -> None:
        """destroy_process_group of torch. The end of a group waits for what is under way there; nobody else may come.

        What raises may be handled: then the groups that stay are used on.
        """
        guard = self._guard
        if group is sys.modules["torch.distributed.distributed_c10d"]._world.default_pg:
            group = None  # it takes all others with it
        for call in tuple(guard.before_destroy):
            call(group)
        if group is None:
            give_up_if_failed(guard)
        elif failure() is not None:
            self.abort(only=group)
        guard.drain()
        if not guard.stream_ends.were_aborted:  # else it waits for NCCL's watchdog, which first waits itself
            old(group)
        if (seam := sys.modules.get("lockstep.comm.torch_transport")) is not None:
            seam.end_broken(is_awaited=group is None)  # one that is named the caller still has
        guard.raise_if_found()

    def _break(self, group: Any, watched: WatchedGroup) -> None:
        if watched.has_streams:
            self._guard.stream_ends.were_aborted = True
            aborting = threading.Thread(target=group.abort, name="lockstep-abort", daemon=True)
            aborting.start()  # NCCL's may wait for a thread that is about to start a kernel where none can start
            aborting.join(_ABORT_S)
            return
        from lockstep.comm.torch_transport import close_connections

        close_connections(group, partial(self._receive, group))


def give_up_if_failed(guard: Guard) -> None:
    """The end of a group waits for what is under way in it, to which the other ranks may never come."""
    found = guard.finding
    error = failure() or (found.error() if found is not None and found.is_certain else None)
    if error is not None:
        guard.give_up(error)


def failure() -> BaseException | None:
    """What is being raised, or has ended the program."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return None if isinstance(error, SystemExit) else error
