"""What an error of the ranks comes from, as far as the guard of one knows: its program is given that in its place."""

from __future__ import annotations

import re
import threading
from typing import TypeVar, final

from lockstep.errors import CommError, PeerFailed, PeerLost, TransportClosed
from lockstep.observe.account import LEAVING, Account
from lockstep.observe.call_site import call_site
from lockstep.observe.endings import CAUGHT
from lockstep.observe.flight import FlightRecorder
from lockstep.observe.hang import FAILING
from lockstep.observe.last_words import last_words, peer_failed, sees_another, users_line
from lockstep.observe.lookout import Lookout
from lockstep.observe.status import RUNNING, in_words
from lockstep.observe.voice import Voice
from lockstep.observe.wording import Finding

_TORCHS_SOURCE = re.compile(r"^\[\S+\] ")  # at the beginning of what Gloo says
_E = TypeVar("_E", bound=BaseException)


@final
class Causes:
    """Of one rank. For its own thread."""

    def __init__(
        self, recorder: FlightRecorder, account: Account, lookout: Lookout, voice: Voice, stop: threading.Event
    ) -> None:
        """stop: set once nobody looks any more."""
        self.failed_at = ""  # line of the user's, once an error has come from there
        self.has_failed = False  # an operation or a step of this rank has, and its program knows why
        self.raised = ""  # key of the finding that the program has been given
        self._recorder, self._account, self._lookout, self._voice = recorder, account, lookout, voice
        self._stop = stop

    def raise_if_found(self) -> None:
        """Raise what was found: what is certain, once, before its end.  Raises: CommError or ReplicaError."""
        if (found := self._lookout.finding) is not None and found.is_certain and self._account.state == RUNNING:
            raise self.given(found.error(), found)

    def lost(self, error: CommError) -> CommError:
        """The error to raise in place of `error`, which ended an operation: with what is known of its cause."""
        cause = error
        if not isinstance(error, TransportClosed):
            with self._voice.spared("looking for the cause of an error"):
                cause = self._why(error)
        self.saw(cause)
        self.has_failed = True
        return cause

    def saw(self, error: BaseException) -> None:
        """This rank raises `error`. Where that is another one's doing, its own end will be too, if it is caught."""
        if sees_another(error) and not isinstance(error, TransportClosed):
            self._account.saw = last_words(error)
            self.given(error)

    def cause_of(self, error: BaseException) -> BaseException:
        """What stock torch's `error` comes from, to be raised from it; one of its own, after what went wrong before."""
        if not (sees_another(error) or self._stop.is_set()):
            with self._account.activity(LEAVING):
                self._lookout.look_back()
        if isinstance(error, CommError) or not sees_another(error):
            return error
        cause: CommError = (seen := PeerLost(f"{type(error).__name__}: {error}"))
        found, self.failed_at = None, users_line(error)
        with self._account.activity(FAILING), self._voice.spared("looking for the cause of an error"):
            found = self._lookout.of_failure(error)
            if found is None and (cause := self.lost(seen)) is not seen:
                found = self._lookout.of_failure(error)  # the word of that end came late: its launcher was held up
        if found is not None:
            cause = self.given(found.comm_error(), found)
        if cause is seen:
            return error
        cause.__cause__ = error
        return cause.with_traceback(error.__traceback__)

    def given(self, error: _E, found: Finding | None = None) -> _E:
        """`error`, which the program gets to see: if it does not end by it, that is said."""
        if found is not None:
            self.has_failed, self.raised = True, found.key
        words = in_words(type(error).__name__, _TORCHS_SOURCE.sub("", last_words(error).message))
        self._account.facts.tell(CAUGHT, CAUGHT, [self._recorder.step, call_site(), words])
        return error

    def _why(self, error: CommError) -> CommError:
        found = self._lookout.certain() or self._lookout.now()
        if found is not None:
            return self.given(found.comm_error(), found)
        if not isinstance(error, PeerLost) or isinstance(error, PeerFailed):
            return error
        said = self._lookout.who_left(error.rank)
        return error if said is None else peer_failed(*said, self._recorder.rank, error)
