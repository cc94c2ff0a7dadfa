"""What a process that holds one rank does for its launcher: dies with it, stops when told, and reports why it failed.

No torch here: all of this is in place before the slow imports begin.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

AGENT_PID = "LOCKSTEP_AGENT_PID"  # set by our agent only: it also prints what its workers report
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set by our agent and by torchrun; torchrun prints the message in it
INTERRUPTED = 130  # exit code of a run that was told to stop and did, as a shell reports SIGINT
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


@dataclass(frozen=True)
class Failure:
    """Why a rank failed, in its own words."""

    rank: int
    kind: str  # class of the exception
    message: str
    exit_code: int
    is_expected: bool  # an error lockstep raises on purpose: its message says all, a traceback adds nothing
    is_consequence: bool  # another rank's failure seen from here
    trace: str
    time_s: float  # since the epoch


def die_with_launcher(environ: Mapping[str, str]) -> None:
    """From now on, if the process that started this one ends in any way, even by SIGKILL, so does this one."""
    if AGENT_PID not in environ and "TORCHELASTIC_RUN_ID" not in environ:
        return  # started by a shell or by Slurm: they have rules of their own
    parent = int(environ.get(AGENT_PID, os.getppid()))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True, name="watch-launcher").start()
    if os.getppid() != parent:  # it ended before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def stop_signals() -> list[signal.Signals]:
    """The signals that ask a run to stop, without those that `nohup` or a shell has set to be ignored."""
    asking = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [number for number in asking if signal.getsignal(number) is not signal.SIG_IGN]


class StopRequest:
    """Becomes true when SIGINT, SIGTERM or SIGHUP arrives, so that the loop can stop between two steps.

    Until `arm` there is no loop that would look: the signal then ends the process by KeyboardInterrupt. A second signal
    means "at once"; a worker leaves that to its launcher, which ends all ranks together.
    """

    def __init__(self, has_launcher: bool) -> None:
        self._has_launcher = has_launcher
        self._is_armed = False
        self._is_set = False
        for number in stop_signals():
            signal.signal(number, self._on_signal)

    def arm(self) -> None:
        """The loop has begun and looks at `is_set` at every step."""
        self._is_armed = True

    def is_set(self) -> bool:
        """True once a signal has asked to stop."""
        return self._is_set

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._is_armed and not self._is_set:
            self._is_set = True
            raise KeyboardInterrupt
        if self._is_set and not self._has_launcher:
            os._exit(INTERRUPTED)
        self._is_set = True


def describe_failure(
    error: BaseException, rank: int, exit_code: int, is_expected: bool, is_consequence: bool
) -> Failure:
    """`error` as a record that can leave the process."""
    trace = "".join(traceback.format_exception(error))
    message = str(error) or type(error).__name__
    return Failure(rank, type(error).__name__, message, exit_code, is_expected, is_consequence, trace, time.time())


def report_failure(failure: Failure, environ: Mapping[str, str]) -> None:
    """Leave `failure` where the launcher looks, and on standard error unless our agent will print it."""
    path = environ.get(ERROR_FILE)
    if path:
        summary = f"{failure.kind}: {failure.message}"
        shown = summary if failure.is_expected else failure.trace  # by torchrun, under the word "traceback"
        extra = {"py_callstack": shown, "timestamp": str(int(failure.time_s)), **asdict(failure)}
        text = json.dumps({"message": {"message": summary, "extraInfo": extra}})
        temporary = Path(path + ".tmp")
        temporary.write_text(text)
        temporary.replace(path)
    if AGENT_PID not in environ:
        if not failure.is_expected and not failure.is_consequence:
            sys.stderr.write(failure.trace)
        who = "" if environ.get("WORLD_SIZE", "1") == "1" else f"rank {failure.rank}: "
        sys.stderr.write(f"lockstep: {who}{failure.message}\n")


def read_failure(path: Path) -> Failure | None:
    """What a worker left with `report_failure`; None where it had no time to."""
    if not path.exists():
        return None
    extra = json.loads(path.read_text())["message"]["extraInfo"]
    return Failure(**{name: extra[name] for name in Failure.__dataclass_fields__})
