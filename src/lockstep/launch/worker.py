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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, final

from lockstep.comm.pulse import open_pulse
from lockstep.errors import ConfigError
from lockstep.observe.last_words import innermost, places_in, quoted
from lockstep.observe.status import in_words

if TYPE_CHECKING:
    from lockstep.comm.communicator import Communicator

AGENT_PID = "LOCKSTEP_AGENT_PID"  # set by our agent only: it also prints what its workers report
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set by our agent and by torchrun; torchrun prints the message in it
REQUEUE = 75  # exit code of a run that a signal stopped after its checkpoint: start it again, and it goes on
INTERRUPTED = 130  # of one that a signal stopped before there was anything to keep, as a shell reports SIGINT
# What asks a run to stop. SIGUSR1 is what batch systems send some time before the end, `#SBATCH --signal=USR1@60`.
ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_SIGACTION_BYTES = 256  # more than any system's


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
    where: str = ""  # "train.py:31", the innermost line of the user's own code; "" where none was running


def die_with_launcher(environ: Mapping[str, str]) -> None:
    """From now on, if the process that started this one ends in any way, even by SIGKILL, so does this one."""
    if has_launcher_of_ranks(environ):  # else started by a shell or by Slurm: they have rules of their own
        hear_of_end(int(environ.get(AGENT_PID, os.getppid())), signal.SIGKILL)


def hear_of_end(parent: int, number: int) -> None:
    """From now on, if `parent`, which started this process, ends in any way, this one gets the signal `number`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    else:
        threading.Thread(target=_watch_parent, args=(parent, number), daemon=True, name="watch-parent").start()
    if os.getppid() != parent:  # it ended before the line above
        os.kill(os.getpid(), number)


def _watch_parent(parent: int, number: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), number)


def stop_signals(asking: Iterable[signal.Signals] = ASKING) -> list[signal.Signals]:
    """The signals that ask a run to stop, without those that `nohup` or a shell has set to be ignored."""
    return [number for number in asking if signal.getsignal(number) is not signal.SIG_IGN]


@final
class StopRequest:
    """Becomes true when SIGTERM, SIGINT, SIGHUP or SIGUSR1 arrives, so that a loop can stop between two steps.

        stop = lockstep.StopRequest(comm)
        for step in range(...):
            if stop.agreed():
                checkpointer.save(step, state)
                sys.exit(lockstep.REQUEUE)

    A second signal ends the process at once, and the checkpoints that are there stay whole; where it has a launcher,
    that one does so for all ranks together. Exit code 75 (REQUEUE) says that the run wants to be started again; in a
    batch script of Slurm's: `#SBATCH --signal=USR1@60`, and `[ $? -eq 75 ] && scontrol requeue $SLURM_JOB_ID` at the
    end. Processes that this one forks hear only SIGTERM, which ends them: the others are meant for the run.

    Without `comm` there is no loop before `arm`. Until then a signal ends the process where it has a launcher, whatever
    it is blocked in, and that one stops the others; elsewhere it raises KeyboardInterrupt.
    Raises: ConfigError outside the main thread, where Python allows no handlers.
    """

    def __init__(self, comm: Communicator | None = None, *, has_launcher: bool | None = None) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("StopRequest belongs into the main thread: signals arrive nowhere else")
        self._comm = comm
        self._has_launcher = has_launcher_of_ranks(os.environ) if has_launcher is None else has_launcher
        self._pulse = open_pulse(os.environ)
        self._pid = os.getpid()
        self._arrived = 0  # number of the first signal
        self._agreed = 0  # number of a signal that all ranks have heard of
        self._before = {number: _Disposition(number) for number in stop_signals()}
        if comm is None:
            self._handle(signal.SIG_DFL if self._has_launcher else self._interrupt)
        else:
            self.arm()

    def arm(self) -> None:
        """The loop has begun and looks at `is_set` at every step."""
        self._handle(self._on_signal)

    def is_set(self) -> bool:
        """True once a signal has asked this rank to stop; the others may not know."""
        return self._arrived > 0

    def agreed(self) -> bool:
        """True once a signal has asked any rank to stop, on all ranks at the same call.

        Collective: every rank, between the same two steps; blocks. It costs one all-reduce of a number.
        Raises: ConfigError where this was made without a communicator.
        """
        if self._comm is None:
            raise ConfigError("agreed() asks the other ranks: make it with StopRequest(comm)")
        if not self._agreed:
            import torch

            number = torch.tensor([self._arrived], dtype=torch.int64, device=self._comm.device)
            self._comm.all_reduce(number, "max", label="stop")
            self._agreed = int(number)
        return self._agreed > 0

    @property
    def reason(self) -> str:
        """Name of the signal that asked, "SIGUSR1"; "" while none has. After `agreed()`, the same on all ranks."""
        number = self._agreed or self._arrived
        return signal.Signals(number).name if number else ""

    def close(self) -> None:
        """Signals do again what they did before."""
        for before in self._before.values():
            before.restore()
        self._before = {}

    def settle(self) -> None:
        """How this process ends is decided: where a launcher waits for it, no signal changes that any more."""
        if self._has_launcher:
            self._handle(signal.SIG_IGN)

    def _handle(self, action: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
        for number in self._before:
            signal.signal(number, action)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._on_signal(number, frame)
        if self._arrived:
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked child, of a data loader for example
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if self._arrived:
            if not self._has_launcher:
                os._exit(INTERRUPTED)
            return
        self._arrived = number
        self._pulse.asked(number)


@final
class _Disposition:
    """What a signal does: also what C has told it, as faulthandler does, of which Python does not know."""

    def __init__(self, number: int) -> None:
        self._number, self._handler = number, signal.getsignal(number)
        self._action = ctypes.create_string_buffer(_SIGACTION_BYTES)
        ctypes.CDLL(None).sigaction(number, None, self._action)

    def restore(self) -> None:
        signal.signal(self._number, signal.SIG_DFL if self._handler is None else self._handler)
        ctypes.CDLL(None).sigaction(self._number, self._action, None)


def has_launcher_of_ranks(environ: Mapping[str, str]) -> bool:
    """True where our agent or torchrun started this process, and ends it with the others."""
    return AGENT_PID in environ or "TORCHELASTIC_RUN_ID" in environ


def describe_failure(
    error: BaseException, rank: int, exit_code: int, is_expected: bool, is_consequence: bool
) -> Failure:
    """`error` as a record that can leave the process."""
    trace = "".join(traceback.format_exception(error))
    kind, message, where = quoted(error)
    return Failure(rank, kind, message, exit_code, is_expected, is_consequence, trace, time.time(), where)


def report_failure(failure: Failure, environ: Mapping[str, str]) -> None:
    """Leave `failure` where the launcher looks, and on standard error unless our agent will print it."""
    path = environ.get(ERROR_FILE)
    if path:
        summary = in_words(failure.kind, failure.message)
        shown = summary if failure.is_expected else failure.trace  # by torchrun, under the word "traceback"
        extra = {"py_callstack": shown, "timestamp": str(int(failure.time_s)), **asdict(failure)}
        text = json.dumps({"message": {"message": summary, "extraInfo": extra}})
        temporary = Path(path + ".tmp")
        try:
            temporary.write_text(text)
            temporary.replace(path)
        except OSError as error:  # no room, or no file can be opened any more: which is no reason to hide `failure`
            sys.stderr.write(f"lockstep: rank {failure.rank}: its launcher cannot be told of that: {error.strerror}\n")
    if AGENT_PID not in environ:
        if not failure.is_expected and not failure.is_consequence:
            sys.stderr.write(failure.trace)
        who = "" if environ.get("WORLD_SIZE", "1") == "1" else f"rank {failure.rank}: "
        sys.stderr.write(f"lockstep: {who}{failure.message}\n")


def read_failure(path: Path, rank: int = 0) -> Failure | None:
    """What a worker left with `report_failure`, or a script with torch's `@record`; None where it had no time to.

    rank: of the worker, which torch's format does not say.
    """
    if not path.exists():
        return None
    try:
        message = json.loads(path.read_text(errors="replace"))["message"]
    except ValueError:  # torch writes in place: it was killed meanwhile
        return None
    extra: dict[str, Any] = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    if "kind" in extra:
        return Failure(**{name: extra[name] for name in Failure.__dataclass_fields__ if name in extra})
    summary = message.get("message", "") if isinstance(message, dict) else str(message)
    kind, _, text = summary.partition(": ")
    trace = str(extra.get("py_callstack", ""))
    time_s = float(extra.get("timestamp", 0))
    return Failure(rank, kind, text or summary, 1, False, False, trace, time_s, innermost(places_in(trace)))
