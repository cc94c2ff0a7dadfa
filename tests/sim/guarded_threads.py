"""Ranks as threads under their real guards, on a clock of their own: what is said of a program, and when by that clock.

One thing happens at a time, in an order that a number decides. The guards look as they do in a job, four times a
second; only the transport is one that moves nothing, and pairs collectives as Gloo does: by their order alone.
"""

from __future__ import annotations

import contextlib
import heapq
import io
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from lockstep.comm.communicator import Communicator
from lockstep.comm.op import CommOp, Work, signature
from lockstep.comm.transport import Transport
from lockstep.errors import CommError, LockstepError, PeerLost
from lockstep.observe import board, call_site, cores, flight, guard, lookout, motion, sights
from lockstep.observe.board import Board
from lockstep.observe.flight import FlightRecorder
from lockstep.observe.guard import Guard
from lockstep.observe.profile import step_clock
from lockstep.observe.recording import GuardLayer
from lockstep.observe.settings import GuardSettings
from lockstep.observe.sights import flight_path
from lockstep.observe.wording import Finding

HANG_S = 3.0  # longer than it takes to prove a deadlock
_LOOK_S = 0.25
_BLINK_S = 0.01  # that a rank may need for one thing
_LEFT_S = 9.0  # after which a job in which nothing happens is ended from outside


class Said(NamedTuple):
    """What a guard has said."""

    at_s: float
    rank: int
    finding: Finding


class Ended(NamedTuple):
    """How a job went."""

    said: list[Said]
    errors: dict[int, BaseException]  # by rank, of those that did not come to their end in peace
    text: str  # all that the guards wrote
    fault_s: float  # when what is wrong was done; 0 where nothing was


class _Stopped(BaseException):
    """Ends a rank from outside."""


class Job:
    """Runs `program(rank, world, groups, job)` on each rank. `groups`: the sub-groups, each None where it is not in it.

    notices: a rank that waits for one that has left is told so by the transport, as by a closed connection.
    is_lenient: collectives that differ come through, as most do in Gloo; else whoever waits in them waits for ever.
    """

    def __init__(
        self, size: int, groups: Sequence[Sequence[int]], seed: int, *, notices: bool, is_lenient: bool
    ) -> None:
        self.size, self.groups = size, [tuple(range(size)), *map(tuple, groups)]
        self.random, self.notices, self.is_lenient = Random(seed), notices, is_lenient
        self.now_s = 100.0
        self.left: set[int] = set()
        self.frozen: set[int] = set()  # neither they nor their guards are run any more
        self.kept: list[Work] = []  # that nobody waits for
        self.said: list[Said] = []
        self.errors: dict[int, BaseException] = {}
        self.guards: dict[int, Guard] = {}
        self.came: dict[tuple[int, int], dict[int, CommOp]] = defaultdict(dict)  # (group, number) -> by rank
        self.sent: dict[tuple[int, int, int], list[int]] = defaultdict(lambda: [0, 0])  # sends and receives so far
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._back = threading.Semaphore(0)
        self._may: dict[int, Callable[[], bool]] = {}  # of a rank that waits: whether it can go on
        self._of_thread: dict[int, int] = {}
        self._aborted: dict[int, CommError] = {}
        self._is_over = False
        self.fault_s = 0.0
        self._changed_s = self.now_s

    # ------------------------------------------------------------------ what a rank calls

    def park(self, may_go_on: Callable[[], bool]) -> None:
        """The rank that calls stands still at least until then."""
        rank = self._of_thread[threading.get_ident()]
        self._may[rank] = may_go_on
        self._back.release()
        self._turns[rank].acquire()
        if self._is_over:
            raise _Stopped

    def sleep(self, seconds: float) -> None:
        """The rank that calls is at this place for so long."""
        until_s = self.now_s + seconds
        self.park(lambda: self.now_s >= until_s)

    def fault(self) -> bool:
        """True; from now on something is wrong."""
        self.fault_s = self.now_s
        return True

    def freeze(self) -> None:
        """The rank that calls and its guard are not run any more."""
        self.frozen.add(self._of_thread[threading.get_ident()])
        self.park(lambda: False)

    def monotonic(self) -> float:
        return self.now_s

    def monotonic_ns(self) -> int:
        return round(self.now_s * 1e9)

    # ------------------------------------------------------------------ the job

    def run(self, folder: Path, program: Callable[..., None]) -> Ended:
        own = {__file__, program.__code__.co_filename}  # no lines of the user's
        with self._own_clock(own), contextlib.redirect_stderr(io.StringIO()) as text:
            threads = [threading.Thread(target=self._rank, args=(rank, folder, program)) for rank in range(self.size)]
            for rank, thread in enumerate(threads):
                self._may[rank] = lambda: True
                thread.start()
                self._back.acquire()  # it has its guard
            for one in self.guards.values():
                one.board.open_all()
            try:
                self._go_on()
            finally:
                self._is_over = True
                for turn, thread in zip(self._turns, threads, strict=True):
                    turn.release()
                    thread.join()
        return Ended(self.said, self.errors, text.getvalue(), self.fault_s)

    def _go_on(self) -> None:
        looks = [(self.now_s + self.random.random() * _LOOK_S, rank) for rank in range(self.size)]
        heapq.heapify(looks)
        while len(self.left) < self.size and self.now_s < self._changed_s + _LEFT_S:
            able = [rank for rank, may in self._may.items() if rank not in self.left and may()]
            if able:
                rank = self.random.choice(able)
                self._turns[rank].release()
                self._back.acquire()
                self.now_s += self.random.random() * _BLINK_S
                self._changed_s = self.now_s
            else:
                self.now_s = max(self.now_s, looks[0][0])
            while looks[0][0] <= self.now_s:
                rank = heapq.heappop(looks)[1]
                heapq.heappush(looks, (self.now_s + _LOOK_S, rank))
                if rank not in self.left | self.frozen:
                    self.guards[rank].look()

    def _rank(self, rank: int, folder: Path, program: Callable[..., None]) -> None:
        self._of_thread[threading.get_ident()] = rank
        recorder = FlightRecorder(flight_path(folder, rank), rank, self.size)
        own = Guard(recorder, Board(folder, recorder, range(self.size)), GuardSettings(hang_s=HANG_S, evidence=""))
        own.on_finding.append(lambda finding: self.said.append(Said(self.now_s, rank, finding)))
        self.guards[rank] = own
        layer = GuardLayer(Paired(self, 0, rank), own, owns_guard=True)
        own.aborts.append(lambda error: self._abort(rank, error))
        try:
            with Communicator(layer) as world:
                self.park(lambda: True)
                others = [
                    Communicator(layer.over(Paired(self, number, ranks.index(rank)))) if rank in ranks else None
                    for number, ranks in enumerate(self.groups)
                    if number
                ]
                program(rank, world, others, self)
        except _Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 (handed to the test)
            self.errors[rank] = error
        finally:
            self.left.add(rank)
            self._back.release()

    def _abort(self, rank: int, error: CommError) -> None:
        self._aborted[rank] = error

    def error_of(self, rank: int, peers: Sequence[int]) -> CommError | None:
        """What ends a wait of `rank` for `peers`, which have not come."""
        gone = [peer for peer in peers if peer in self.left]
        lost = PeerLost(f"rank {gone[0]} closed the connection", gone[0]) if gone and self.notices else None
        return self._aborted.get(rank, lost)

    @contextlib.contextmanager
    def _own_clock(self, files: set[str]) -> Iterator[None]:
        time: Any = SimpleNamespace(
            monotonic=self.monotonic, monotonic_ns=self.monotonic_ns, sleep=self.sleep, strftime=lambda _: "now"
        )
        with pytest.MonkeyPatch.context() as patch:
            for module in (guard, lookout, board, sights):
                patch.setattr(module, "time", time)
            for module in (flight, step_clock):
                patch.setattr(module, "monotonic_ns", self.monotonic_ns)
            # all ranks are this one process, which does much else
            patch.setattr(motion, "transferred_bytes", lambda: 0)
            patch.setattr(motion, "state_and_cpu_s", lambda _: ("S", 0.0))
            patch.setattr(cores, "state_and_cpu_s", lambda _: ("S", 0.0))
            kind_of = call_site._kind_of
            patch.setattr(call_site, "_kind_of", lambda file: call_site._OTHER if file in files else kind_of(file))
            yield


class Paired(Transport):
    """Pairs the collectives of a group by their order, and messages by sender, receiver and tag. Moves nothing."""

    def __init__(self, job: Job, group: int, rank: int) -> None:
        self.job, self.group = job, group
        self.name, self.rank = "paired", rank
        self.global_ranks = job.groups[group]
        self.world_size = len(self.global_ranks)
        self.timeout_s, self.device = 1e6, torch.device("cpu")
        self._numbers = itertools.count()

    def submit(self, op: CommOp) -> Work:
        me = self.global_ranks[self.rank]
        if op.kind in ("send", "recv"):
            assert op.peer is not None
            peer, is_send = self.global_ranks[op.peer], op.kind == "send"
            halves = self.job.sent[(me, peer, op.tag) if is_send else (peer, me, op.tag)]
            number = halves[not is_send]
            halves[not is_send] += 1
            return Pending(self.job, me, lambda: [] if is_send or halves[0] > number else [peer])
        came = self.job.came[self.group, next(self._numbers)]
        came[me] = op
        return Pending(self.job, me, lambda: self._missing(came))

    def _missing(self, came: dict[int, CommOp]) -> list[int] | None:
        missing = [rank for rank in self.global_ranks if rank not in came]
        differs = len({signature(op) for op in came.values()}) > 1
        return None if not missing and differs and not self.job.is_lenient else missing

    def split(self, groups: Sequence[Sequence[int]]) -> Transport | None:
        raise NotImplementedError

    def abort(self, error: CommError) -> None:
        pass

    def close(self) -> None:
        pass


class Pending(Work):
    """missing: for whom it waits; [] once it has ended, None where it never will."""

    def __init__(self, job: Job, rank: int, missing: Callable[[], list[int] | None]) -> None:
        self.job, self.rank, self.missing = job, rank, missing

    def wait(self, timeout_s: float | None = None) -> None:
        self.job.park(lambda: self.is_done() or self._error() is not None)
        if not self.is_done():
            error = self._error()
            assert error is not None
            raise error

    def _error(self) -> CommError | None:
        return self.job.error_of(self.rank, self.missing() or ())

    def is_done(self) -> bool:
        return self.missing() == []


def certain(ended: Ended) -> list[Finding]:
    """What was said that is no mere remark: nobody is said to be slow."""
    return [said.finding for said in ended.said if said.finding.kind != "waiting"]


def strangers(ended: Ended) -> dict[int, BaseException]:
    """Errors that are not lockstep's own."""
    return {rank: error for rank, error in ended.errors.items() if not isinstance(error, LockstepError)}
