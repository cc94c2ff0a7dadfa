"""How a failure on some ranks is told to the test that started them."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from threading import Thread
from typing import Any, NamedTuple

from lockstep.errors import LockstepError


class RankError(NamedTuple):
    """How one rank failed."""

    kind: str  # name of the exception's class, or how the process ended
    message: str
    trace: str  # the traceback as text, or the end of the process's output
    exception: BaseException | None  # None where the process died or the exception cannot be pickled
    at: float  # time.monotonic() of this host

    @staticmethod
    def of(error: BaseException) -> RankError:
        """The failure that this exception is, now."""
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return RankError(type(error).__name__, str(error), trace, error, time.monotonic())


class RankFailed(LockstepError, AssertionError):
    """At least one rank did not return: `rank` failed first, `errors` holds all, `results` what the others returned."""

    def __init__(
        self, errors: Mapping[int, RankError], results: Mapping[int, Any], world_size: int, where: str
    ) -> None:
        self.errors = dict(errors)
        self.results = dict(results)
        self.rank = min(errors, key=lambda rank: errors[rank].at)
        first = errors[self.rank]
        lines = [f"rank {self.rank} of {world_size} in {where}: {first.kind}: {first.message}", first.trace.rstrip()]
        for rank in sorted(set(errors) - {self.rank}):
            lines.append(f"then rank {rank}: {errors[rank].kind}: {errors[rank].message}")
        super().__init__("\n".join(lines))
        self.__cause__ = first.exception


class RankTimeout(LockstepError, AssertionError):
    """Ranks that did not finish in time: `missing`. The message holds the stacks of all ranks."""

    def __init__(self, missing: Sequence[int], timeout_s: float, where: str, stacks: str) -> None:
        ranks = ", ".join(str(rank) for rank in missing)
        super().__init__(f"{where}: rank(s) {ranks} did not finish within {timeout_s:g} s\n{stacks}")
        self.missing = tuple(missing)


def thread_stacks(threads: Sequence[Thread]) -> str:
    """Where each of these threads is now."""
    frames = sys._current_frames()
    lines: list[str] = []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        lines.append(f"--- {thread.name} ---\n" + ("".join(traceback.format_stack(frame)) if frame else "ended\n"))
    return "".join(lines)
