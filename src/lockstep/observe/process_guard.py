"""The guard of a process whose launcher wants one, before its program begins; and how a process tells of its end."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType

from lockstep.observe.board import Board
from lockstep.observe.flight import FlightRecorder
from lockstep.observe.guard import Guard
from lockstep.observe.last_words import DEBUG, end_in_users_code, last_words, users_line
from lockstep.observe.profile.window import RUN
from lockstep.observe.settings import GuardSettings
from lockstep.observe.sights import flight_path
from lockstep.observe.status import in_words
from lockstep.observe.wording import BEFORE

FLIGHT = "LOCKSTEP_FLIGHT"  # folder of the flight records of one start of a run on one machine; set by the launcher
STORE = "LOCKSTEP_GUARD_STORE"  # "host:port/prefix": where the guards of several machines meet; set by the launcher

_REST_S = 5.0  # as long as a look may wait for what the ranks of other machines share

_guards: list[Guard] = []  # of this process: at most one
_listening: weakref.WeakSet[Guard] = weakref.WeakSet()  # are told how this process ends
_before: dict[object, Callable[..., object]] = {}  # by a hook of ours: the one that was there, which we call
_died: list[tuple[BaseException, int]] = []  # what ended a thread, the last one; the steps until then


def begin(environ: Mapping[str, str]) -> Guard | None:
    """The guard of this process, where its launcher has made room for one; it needs no torch.

    Raises: ConfigError where LOCKSTEP_GUARD is none of the modes.
    """
    folder, size = environ.get(FLIGHT, ""), int(environ.get("WORLD_SIZE", "1"))
    settings = GuardSettings.of(environ)
    if not folder or (size == 1 and not environ.get(RUN)) or settings.mode == "off":
        return None
    rank, local_rank = int(environ["RANK"]), int(environ["LOCAL_RANK"])
    first = rank - local_rank
    recorder = FlightRecorder(flight_path(folder, rank), rank, size)
    board = Board(folder, recorder, range(first, first + int(environ["LOCAL_WORLD_SIZE"])), has_launcher=True)
    guard = Guard(recorder, board, settings)
    _guards[:] = [guard]
    listen(guard)
    guard.start()
    return guard


def _forked() -> None:
    """The record is the parent's, and a lock that its guard's thread had at that moment stays locked here for ever."""
    for guard in (*_guards, *_listening):
        guard.recorder.close()
    _guards.clear()
    _listening.clear()


os.register_at_fork(after_in_child=_forked)


def current_guard() -> Guard | None:
    """The guard that `begin` made."""
    return _guards[0] if _guards else None


def guard_of(rank: int, world_size: int) -> Guard | None:
    """The guard of this process, where the calling thread is the rank that it guards."""
    if threading.current_thread() is not threading.main_thread():  # a rank that is a thread, as tests have them
        return None
    return next((guard for guard in _listening if (guard.rank, guard.world_size) == (rank, world_size)), None)


def listen(guard: Guard) -> None:
    """Tell `guard` how this process ends: by an error that nobody caught, or in peace."""
    _listening.add(guard)
    ours = (sys, "excepthook", _last_error), (threading, "excepthook", _thread_ended), (sys, "unraisablehook", _ignored)
    for module, name, hook in ours:
        if getattr(module, name) is not hook:
            _before[hook] = getattr(module, name)
            setattr(module, name, hook)


@contextlib.contextmanager
def activity(name: str) -> Iterator[None]:
    """What happens within may take long on this rank without anything wrong: "checkpoint", "evaluate"."""
    with contextlib.ExitStack() as stack:
        for guard in tuple(_listening):
            stack.enter_context(guard.activity(name))
        yield


def _last_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    for guard in tuple(_listening):
        error = guard.cause_of(error)  # type: ignore[assignment]
        guard.end(error)
        error = guard.as_shown(error, guard.finding)
        if isinstance(error, KeyboardInterrupt) and DEBUG not in os.environ:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would only disturb the end
            at = f" at {where}" if (where := users_line(error)) else ""
            sys.stderr.write(f"lockstep: rank {guard.rank} was interrupted{at}\n")
            return
    end_in_users_code(error)
    _before[_last_error](type(error), error, error.__traceback__)


def _thread_ended(args: threading.ExceptHookArgs) -> None:
    """By an error, which ends no rank: whatever waits for that thread waits for good."""
    error = args.exc_value
    if error is not None and args.exc_type is not SystemExit:
        for guard in tuple(_listening):
            error = guard.cause_of(error)
            kind, message, where, *_ = last_words(error)
            said = f"one of its threads had ended: {in_words(kind, message)}{where and ', at '}{where}"
            guard.facts.tell(BEFORE, "thread", said)
            _died[:] = [(error, guard.recorder.step or guard.recorder.started)]
            error = guard.as_shown(error, guard.finding)
        end_in_users_code(error)
        args = threading.ExceptHookArgs((type(error), error, error.__traceback__, args.thread))
    _before[_thread_ended](args)
    traceback.clear_frames(args.exc_traceback)  # what they hold ends with the thread, as without us


def thread_error() -> BaseException | None:
    """What ended a thread of this rank, which has not got on since: its training, as far as one knows.

    Python ends by 0 then. So does the rank, whose program may have meant that; the others that miss it do not.
    """
    if not _died:
        return None
    error, done = _died[0]
    now = [one.recorder.step or one.recorder.started for one in _listening]  # of operations C++'s may be entered later
    return error if done and done in now else None


def _ignored(args: sys.UnraisableHookArgs) -> None:
    """By Python: an error that a handler of `atexit` has raised. It ends this rank, unless one has ended it before."""
    error = args.exc_value if "atexit callback" in (args.err_msg or "") and not hasattr(sys, "last_value") else None
    is_stop = isinstance(error, KeyboardInterrupt) and DEBUG not in os.environ
    if not is_stop:
        _before[_ignored](args)
    if error is not None:
        for guard in tuple(_listening):
            error = guard.cause_of(error)
            kind, message, where, *_ = last_words(error)
            said = f"raised at {where or 'its exit'}: {in_words(kind, message)}; no exit code tells of it"
            sys.stderr.write(f"lockstep: rank {guard.rank} {'was interrupted as it ended' if is_stop else said}\n")
        sys.last_value = error


@atexit.register
def _end() -> None:
    for guard in tuple(_listening):
        guard.end(getattr(sys, "last_value", None) or thread_error())  # the program may have an excepthook of its own
        guard.rest(_REST_S)
