"""Looks at all ranks for one of them: says how that one is, sees how the others are, and puts up what is wrong.

What it sees is compared by `diagnosis`, which is pure. What is certain goes on the board, for all ranks; what may pass
is said by the first rank that looks.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import final

from lockstep.observe.account import Account
from lockstep.observe.board import Board
from lockstep.observe.diagnosis import diagnose
from lockstep.observe.divergence import find_left_out
from lockstep.observe.endings import find_caught, goes_on, left_first, stalled_by
from lockstep.observe.hang import find_timed_out, stands_for_s
from lockstep.observe.last_words import users_line
from lockstep.observe.message_findings import find_left_over, find_too_large
from lockstep.observe.native import read_in_c
from lockstep.observe.scene import Limits, Scene
from lockstep.observe.standstill import fell_silent
from lockstep.observe.status import FINISHED, RUNNING, Sight, Stalled, Waiting
from lockstep.observe.training_findings import Training
from lockstep.observe.voice import Voice
from lockstep.observe.wording import STANDSTILLS, Finding

WORDS_S = 2.0  # how long a rank that lost another one waits for what is known of that
_NEWS_S = 0.5  # how long what has happened may take to be seen from here: a look, and what it takes
_STALE_S = 1.5  # a guard that has said nothing for so long does not look any more
_COMPARED_S = 10.0  # after which the messages of the ranks are compared again
_YOUNG = 40  # looks: the first ten seconds of a run, in which most that is wrong shows
CALM_S = 3.6  # from one look to the next at most, where nothing hurries
_SETTLED_S = 1.0  # after a rank stood still itself, as all may have: until then the others have said how they are


@final
@read_in_c
class Lookout:
    """Of one rank's guard. Any thread may call: one looks at a time."""

    __slots__ = ("__dict__", "__weakref__", "finding")

    def __init__(
        self, rank: int, account: Account, board: Board, voice: Voice, limits: Limits, period_s: float
    ) -> None:
        """period_s: between two looks."""
        self.finding: Finding | None = None
        self.before_look: list[Callable[[], None]] = []
        self._rank, self._account, self._board, self._voice, self._limits = rank, account, board, voice, limits
        self._period_s = period_s
        self._training = Training()
        self._looks, self._looked_s, self._blind_until_s = 0, 0.0, 0.0
        self.shown_ns = 0  # when records showed what ranks have yet to explain; 0: they do not
        self._messages, self._compared_s = 0, 0.0  # of all ranks, when they were compared last, and when that was
        self.is_calm = False  # nothing hurries
        self.stuck_s = 0.0  # for how long this rank has stood still, where its launcher may end it for that
        self._stood: Stalled | None = None  # whom `finding` is about, while it is only said: all, if nobody is named
        self._lock = threading.RLock()  # what a look calls may find a new group

    def group(self, name: str, ranks: Sequence[int]) -> None:
        """There is a group of this name, of these ranks of the job, in its order."""
        with self._lock:
            if self._account.group(name, ranks):
                self._tell()  # a rank that is killed now has said who is in the group

    def leave(self, error: BaseException | None) -> None:
        """This rank is at its end: see `Account.end`. The others are told at once."""
        self._account.end(error)
        if self._lock.acquire(timeout=WORDS_S):
            try:
                self._catch_up()
                self._tell()
                if self._account.state == FINISHED:
                    self.say_at_end()
            finally:
                self._lock.release()

    def look_back(self) -> None:
        """This rank may be about to leave by an error of its own: say what had gone wrong before."""
        with self._lock, self._voice.spared("looking back before an error"):
            if self.certain() is None and (found := self.now()) is not None:
                self.put_up(found, self._board.sights())

    # ------------------------------------------------------------------ looking

    def look(self, *, is_last: bool = False, is_urgent: bool = False) -> None:
        """Say how this rank is, see how the others are, act on what is found.

        is_last: there may be no other look, so this rank does not leave it to the one that looks for all.
        is_urgent: see `Board.sights`.
        """
        with self._lock:
            now_s = time.monotonic()
            apart_s = CALM_S if self.is_calm else self._period_s
            if 0.0 < self._looked_s < now_s - apart_s - _STALE_S:  # a suspended job, a paused machine
                self._blind_until_s = now_s + _SETTLED_S
                self._account.motion.begin_anew()
            self._looked_s = now_s
            self._catch_up()
            self._tell()
            failures = self._voice.failures
            with self._voice.spared("looking at the other ranks"):
                if self.certain() is None:
                    self._find(is_last, not is_last and (is_urgent or self.shown_ns > 0))
            self._account.is_blind = self._voice.failures > failures
            self._looks += 1
            self.is_calm = self._looks > _YOUNG and self._is_well()

    def keep_up(self) -> None:
        """Of a look only what cannot wait for the next: what this rank has done is read, and written down."""
        with self._lock:
            self._looked_s = time.monotonic()
            self._catch_up()
            self.is_calm = self._is_well()

    def _is_well(self) -> bool:
        """Nothing is wrong, in doubt, or under way for longer than from one look to the next, and the rank moves."""
        account = self._account
        has_waited = 0 < account.oldest_ns < time.monotonic_ns() - self._period_s * 1e9
        moves = not has_waited and account.motion.stand.unmoved_s == 0
        is_clear = self.finding is None and not self.shown_ns and not account.facts.is_disputed
        return is_clear and moves and account.state == RUNNING

    def _catch_up(self) -> None:
        """Know of all that this rank has done, also of what is only seen by looking."""
        self._voice.call(self.before_look)
        with self._voice.spared("reading its own record"):
            self._account.catch_up()

    def _tell(self) -> None:
        with self._voice.spared("saying how this rank is"):
            self._board.tell(self._account.status(time.monotonic(), **self._voice.shown()))
            return
        with self._voice.spared("saying that this rank is there"):  # whoever is silent is said to stand still
            self._board.tell(self._account.brief())

    def _find(self, is_last: bool, is_urgent: bool) -> None:
        sights = self._board.sights(is_urgent=is_urgent)
        with self._voice.part("comparing what the ranks tell"):
            self._account.facts.compare(sights, self._rank)
        self._let_go(sights)
        told = [sight.status.stalled for sight in sights.values() if sight.status.stalled is not None]
        self.stuck_s = max([stands_for_s(self._scene(sights), one) for one in told], default=0.0)
        is_first = self._is_first(sights)
        with self._voice.part("looking at what they train"):
            for note in self._training.notes(self._scene(sights)) if is_first else ():
                self._voice.say_if_news(note, sights)
            self._look_at_messages(sights if is_first or is_last else {}, is_last=is_last)
        near = {rank: sight for rank, sight in sights.items() if rank in self._board.here}
        speaks_here = self._is_first(near)  # what may pass is said on each machine, for it may be looked at alone
        if not is_last and (not speaks_here or self._looked_s < self._blind_until_s):
            return
        found = self._diagnosed(sights, self._limits)
        is_explained = self._is_explained(found if is_urgent else None)
        if not is_explained or found is None or not self._voice.is_news(found, sights if found.is_certain else near):
            return
        if found.is_certain:
            sights = self._board.sights(is_urgent=True)  # it may come of what another rank did a moment before
            first = self._diagnosed(sights, self._limits)
            self.put_up(first if first is not None and first.is_certain else found, sights)
        elif speaks_here:  # only said: it may pass
            of_whom = found if found.culprits else replace(found, culprits=tuple(sights))
            self.finding, self._stood = found, stalled_by(of_whom, sights, "")
            self._voice.say_with_evidence(found, sights)

    def _is_explained(self, shown: Finding | None) -> bool:
        """Whether those at fault have said why by now, or have had the time to."""
        since_ns = self.shown_ns or time.monotonic_ns()
        is_over = shown is None or self._is_told(shown) or time.monotonic_ns() - since_ns > _NEWS_S * 1e9
        self.shown_ns = 0 if is_over else since_ns
        return is_over

    def _is_told(self, shown: Finding) -> bool:
        """Whether those at fault have told what shows that ranks differ: their records do so before they say why."""
        if shown.kind != "mismatch":
            return True
        with self._lock:
            told = {rank: one for rank, one in self._board.sights().items() if rank in shown.culprits}
            mixed = self._diagnosed({**self._board.sights(is_urgent=True), **told}, self._limits)
        return mixed is not None and mixed.kind == shown.kind

    def _let_go(self, sights: Mapping[int, Sight]) -> None:
        """What was only said has passed where those it is about go on: that is said, and the run is as any other."""
        self._voice.say_if_over(sights)
        found, stood = self.finding, self._stood
        if found is not None and not found.is_certain and stood is not None and goes_on(stood, sights):
            self.finding = self._stood = None

    def _look_at_messages(self, sights: Mapping[int, Sight], *, is_last: bool) -> None:
        """Of both ends: when they are twice as many, after a while, and at the end; for all records have to be read."""
        begun = sum(sum(sight.status.messages.values()) for sight in sights.values())
        is_due = is_last or begun >= 2 * self._messages or self._looked_s - self._compared_s >= _COMPARED_S
        if begun == self._messages or not is_due:
            return
        self._messages, self._compared_s = begun, self._looked_s
        if is_last:  # those who have ended elsewhere do not show theirs
            sights = {rank: sight for rank, sight in sights.items() if rank in self._board.here}
        for rank in [rank for rank, sight in sights.items() if sight.status.messages]:
            found = find_too_large(self._scene(sights), rank, is_note=True)
            if found is not None and found.is_certain:
                self.put_up(found, sights)
            elif not is_last or self._is_first(sights):
                self._voice.say_if_news(found, sights)

    def _is_first(self, sights: Mapping[int, Sight]) -> bool:
        """Whether this is the first rank whose guard looks: one is enough."""
        able = [one for one in sights.values() if one.age_s < _STALE_S and not one.status.is_blind]
        looking = [one.status.rank for one in able if one.status.state == RUNNING]
        return self._rank == min(looking, default=self._rank)

    def _scene(self, sights: Mapping[int, Sight]) -> Scene:
        return Scene(self._rank, sights, self._board.records_of, self._limits)

    def _diagnosed(self, sights: Mapping[int, Sight], limits: Limits) -> Finding | None:
        return diagnose(self._rank, sights, self._board.records_of, limits, self._voice.part, self._training)

    def put_up(self, found: Finding, sights: Mapping[int, Sight]) -> None:
        """For all ranks to see; said, unless another one was up before."""
        found, before = self._voice.marked(found), self.finding
        self.finding = found
        with self._voice.spared("telling all ranks what was found"):
            self.finding = Finding.from_json(self._board.announce(found.to_json()))
        if self.finding == found != before:  # else another rank said it, or another thread of this one
            self._voice.say_with_evidence(found, sights)

    def say_at_end(self) -> None:
        """What only the ends of the ranks show: said by one of them."""
        with self._lock, self._voice.spared("looking back at its end"):
            mine = self._account.status(time.monotonic(), **self._voice.shown())
            sights = {**self._board.sights(), self._rank: Sight(mine, 0.0, is_gone=False)}
            note = find_caught(self._scene(sights))
            if note is not None and note.culprits[0] == self._rank:
                self._voice.say_if_news(note, sights)
            self._voice.say_if_news(find_left_over(self._scene(sights)), sights)
            left_out = find_left_out(self._scene(sights))
            if left_out is not None and self._voice.is_news(left_out, sights):
                self.put_up(left_out, sights)

    # ------------------------------------------------------------------ why an operation has failed

    def certain(self) -> Finding | None:
        """What has been found for certain, also if another rank has only just put it up."""
        if self.finding is None or not self.finding.is_certain:
            with self._lock:
                up = self._board.announced()
            self.finding = Finding.from_json(up) if up else self.finding
        return self.finding if self.finding is not None and self.finding.is_certain else None

    def now(self, *, has_failed: bool = False) -> Finding | None:
        """What is certain at this very moment.

        has_failed: the newest operation of each group, taken as if it were still under way: one sees who it waits for.
        """
        with self._lock:
            self._catch_up()
            self._tell()
            sights, limits = dict(self._board.sights(is_urgent=True)), self._limits
            if has_failed:
                if not self._account.newest:
                    return None
                sights, limits = self._failed(sights), replace(limits, grace_s=0.0)
            found = self._diagnosed(sights, limits)
        return found if found is not None and found.is_certain else None

    def _failed(self, sights: Mapping[int, Sight]) -> dict[int, Sight]:
        """`sights`, in which this rank still has its newest operation of each group under way."""
        status = self._account.status(time.monotonic(), **self._voice.shown())
        waiting = tuple([Waiting(record, 0.0) for record in self._account.newest])
        failed = replace(status, waiting=waiting, messages={}, stack=())  # it has been unwound
        return {**sights, self._rank: Sight(failed, 0.0, is_gone=False)}

    def of_failure(self, error: BaseException) -> Finding | None:
        """Why the newest operation of this rank failed, by torch's `error`; put up. None where that cannot be seen."""
        if self.certain() is not None:
            return self.finding
        begun_ns = time.monotonic_ns()
        while self._may_be_another(found := self.now(has_failed=True), begun_ns):
            time.sleep(0.02)  # the others may be about to say it
        with self._lock:
            sights = self._board.sights(is_urgent=True)
            if found is None:
                self._let_go(sights)
                last = self.finding
                if last is not None and last.kind in (*STANDSTILLS, "waiting"):  # it may pass, and has not
                    return last
                found = find_timed_out(self._scene(self._failed(sights)), str(error), users_line(error))
            if found is not None:
                self.put_up(found, sights)
            return found and self.finding

    def _may_be_another(self, found: Finding | None, since_ns: int) -> bool:
        """Whether a rank is at fault that has yet to say what it does, as Gloo aborts who is sent too much; or why."""
        is_late = time.monotonic_ns() - since_ns > _NEWS_S * 1e9
        if is_late or found is None or found.kind == "finished":
            return not is_late
        return not self._is_told(found) or (found.kind == "gone" and signal.SIGABRT.name in found.text)

    def who_left(self, lost: int | None) -> tuple[int, str] | None:
        """The first cause that this rank has lost another one: see `left_first`. Waits for it."""
        begun_s, passed_s = time.monotonic(), 0.0
        while True:
            with self._lock:
                sights = self._board.sights(is_urgent=True)
            said = left_first(self._rank, sights, is_final=passed_s >= _NEWS_S, lost=lost)
            if said is not None or passed_s >= WORDS_S:
                return said or fell_silent(sights[self._rank], sights, _STALE_S)
            time.sleep(0.02)
            passed_s = time.monotonic() - begun_s
