"""How worker processes ended, which of them failed first, and how that is said. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.errors import CollectiveMismatch
from lockstep.launch.worker import ASKING, INTERRUPTED, REQUEUE, Failure
from lockstep.observe.status import LastWords, in_words

_ABORTED = LastWords("C++ error", "torch's transport gave up on that mismatch", "", is_consequence=True)  # as Gloo does
_LINES, _CHARS = 12, 1600  # of what a rank has raised, that are said once more
STOPPED = frozenset((REQUEUE, INTERRUPTED, *(-number for number in ASKING)))  # exit codes of who was asked to stop


@dataclass(frozen=True)
class Ended:
    """How one worker process ended."""

    rank: int
    pid: int
    exit_code: int  # negative: the number of the signal that killed it
    was_ended: bool  # by its launcher, because of another
    failure: Failure | None  # what it said itself
    last_line: str  # of its standard error
    stuck: str = ""  # why its launcher had to end it: `what` of a `watch.Stuck`, and its `detail` in brackets
    out_of_memory: bool = False  # the kernel killed it for its memory
    at_s: float = 0.0  # when its launcher saw that it had ended, on any clock that all have in common
    told: int = 0  # number of the signal that its launcher has passed on to it
    words: LastWords | None = None  # how it left, as its guard has written down
    where: str = ""  # the user's line, where a signal of C++'s has ended it

    @property
    def is_consequence(self) -> bool:
        """True where it says itself that it only saw another one fail."""
        said = self.failure or self.words
        return said is not None and said.is_consequence

    @property
    def was_stopped(self) -> bool:
        """True where it ended as one does that somebody has asked to stop: somebody wants the run to end."""
        return self._ended_as_asked and not self.stuck and not self.was_ended

    @property
    def failed(self) -> bool:
        """True unless it ended well, was asked to stop, or only had to go because of another."""
        if self.stuck:
            return True
        if self.was_ended and self.failure is None:
            return False
        return self.exit_code != 0 and not self._ended_as_asked

    @property
    def fate(self) -> str:
        """Of one that was not the first to fail."""
        if self.was_ended or self.exit_code == 0:
            return "was ended by the launcher" if self.was_ended else "ended with exit code 0"
        how = "was aborted for it" if self.words is _ABORTED else "left because of it" if self.is_consequence else ""
        return how or (self.death if self.where else "failed too" if self.failed else "stopped")

    @property
    def death(self) -> str:
        """Of one that a signal has ended."""
        return f"was killed by {signal_name(-self.exit_code)}" + f" at {self.where}" * bool(self.where)

    @property
    def _ended_as_asked(self) -> bool:
        answers = self.told > 0 and (self.exit_code == -self.told or (self.exit_code > 0 and self.failure is None))
        return self.exit_code in STOPPED or answers


def with_aborts(ended: Sequence[Ended], found: str = "") -> list[Ended]:
    """`ended`, where those that C++ has aborted say so, if a rank tells of a mismatch, or what was `found` does."""
    is_known = found or CollectiveMismatch.__name__ in {(e.failure or e.words or _ABORTED).kind for e in ended}
    aborted = [one for one in ended if is_known and one.exit_code == -signal.SIGABRT and one.words is None]
    return [replace(one, words=_ABORTED) if one in aborted else one for one in ended]


def first_failure(ended: Sequence[Ended]) -> Ended | None:
    """The process that failed first, as far as one can tell; None if none did.

    One that hung was seen to; one that was killed could not report anything; one that only saw another's failure says
    so. Unexpected errors go by the time of the report; of expected ones, which ranks often raise together, the lowest
    rank speaks for all.
    """
    failed = [e for e in ended if e.failed]
    culprits = [e for e in failed if not e.is_consequence]
    if failed and not culprits:  # the cause may have been slow to leave, and was ended too
        own = [e for e in ended if e.words and e.words.kind not in ("", "KeyboardInterrupt", "SystemExit")]
        culprits = [e for e in own if not e.is_consequence] or failed

    def order(e: Ended) -> tuple[bool, bool, bool, float, int]:
        said = e.failure
        if said is None:
            return (not e.stuck, e.is_consequence, e.is_consequence, e.at_s, e.rank)
        return (not e.stuck, True, said.is_expected, 0.0 if said.is_expected else said.time_s, e.rank)

    return min(culprits, key=order, default=None)


def apart(ended: Ended, first: Ended | None) -> str:
    """Of one that SIGKILL ended after it had the `first`: ", 0.08 s after rank 2"; "" where they ended at once."""
    if first is None or ended.was_ended or not ended.exit_code == first.exit_code == -signal.SIGKILL:
        return ""
    after_s = ended.at_s - first.at_s
    return f", {after_s:.2f} s after rank {first.rank}" if after_s >= 0.01 else ""


def signal_name(number: int) -> str:
    """SIGKILL for 9. Real-time signals have no name but for the first and the last."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe(ended: Ended, above: str = " (all of it is above)") -> str:
    """How a process ended, as the end of a sentence that begins with its name.

    above: said where only the beginning is, of what stands in the output.
    """
    if ended.stuck:
        return f"was ended by its launcher: {ended.stuck}"
    said = ended.failure
    if said is not None:
        at = f" at {said.where}" if said.where else ""
        message, (head, *body) = said.message, said.message.splitlines() or [""]
        is_finding = said.kind in ("ModelMismatch", "ReplicaDrift")  # said by the guard that came upon it
        if body and (said.is_consequence or is_finding):
            is_quote = said.kind == "PeerFailed" and body[0].endswith(":")  # where whom it lost raised, and what
            head += ": " * is_quote + " ".join(line.strip() for line in body[: 2 * is_quote])
            message = head + above
        return f"gave up: {message}" if said.is_expected else f"failed{at}: {in_words(said.kind, _beginning(message))}"
    if ended.out_of_memory:
        return "was killed by the kernel: out of memory"
    code = ended.exit_code
    text = ended.death if code < 0 else f"ended with exit code {code}"
    if ended.words is not None and ended.words.kind:
        return f"{'was ended by its launcher' if ended.was_ended else text}, {_left(ended.words)}"
    return f"{text}; its last words: {_beginning(ended.last_line)}" if ended.last_line else text


def _beginning(text: str) -> str:
    """Of what a rank has printed itself, as much as one reads."""
    shown = "\n".join(text[:_CHARS].split("\n")[:_LINES])
    return text if shown == text else f"{shown} ... (all of it is in that rank's output)"


def _left(words: LastWords) -> str:
    at = f" at {words.where}" if words.where else ""
    is_exit = words.kind == "SystemExit" and words.message.isdecimal()  # the exit code, which has been said
    return f"by sys.exit{at}" if is_exit else f"after it raised{at}: {in_words(words.kind, words.message)}"
