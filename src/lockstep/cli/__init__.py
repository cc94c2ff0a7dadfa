"""The command line, `lockstep COMMAND`. A command is imported when it is asked for."""

from __future__ import annotations

import io
import os
import select
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

import lockstep
from lockstep.errors import ConfigError, LaunchError
from lockstep.launch.early_stop import leave_at_once
from lockstep.launch.words import current_folder, lead_nowhere, refuse_name, say

_PARENT_PID = "LOCKSTEP_PARENT_PID"  # of who has started this command for itself, and takes it along when it ends
_COMMANDS = ("train", "run", "checkpoint", "samples", "profile", "report", "watch", "doctor", "demo", "learn", "puzzle")
_USER_ERROR = 2
_INTERRUPTED = 130

HELP = """usage: lockstep [-h] [--version] COMMAND ...

Many PyTorch processes that behave like one training system.

commands:
  train       train a language model on real processes: `lockstep train`, `lockstep train -n 4 --data.path my_text/`
  run         start and supervise your own script, with torchrun's flags: `lockstep run --nproc-per-node 2 train.py`
  checkpoint  look at checkpoints: `lockstep checkpoint ls|verify|show|export|import`
  samples     which samples a step was trained on: `lockstep samples runs/gpt2-tiny 10`
  profile     where the time of a run went, and what would make it faster: `lockstep profile`
  report      a run as one HTML file: `lockstep report`, `lockstep report runs/gpt2-tiny`
  watch       the same page while the run goes on, and a line per rank here: `lockstep watch`
  doctor      is this machine, are these machines fit for a run: `lockstep doctor`, `lockstep doctor --nproc-per-node 4`
  demo        watch stock torch go wrong, and lockstep say why: `lockstep demo`, `lockstep demo skipped_collective`
  learn       from send and receive to a whole training system, on real processes: `lockstep learn send_receive`
  puzzle      fill in the hole, and see whether it is right: `lockstep puzzle 1`

`lockstep COMMAND --help` explains one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code.

    0 done, 1 failed, 2 asked for the impossible, 75 stopped after committing a checkpoint, so start it again to go on,
    130 stopped before anything could be committed, or at once, by a second signal.
    """
    _open_standard_streams()
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: no run ends for a letter that Latin 1 lacks
    if os.environ.get("COLUMNS", "") in ("1", "2", "3", "4", "5", "6", "7"):
        os.environ["COLUMNS"] = "8"  # in fewer, tyro's help has no end
    if os.environ.get("NO_COLOR"):
        os.environ["PYTHON_TYRO_ANSI_CODES"] = "False"  # of the other one tyro knows nothing
    if _PARENT_PID in os.environ:
        from lockstep.launch.worker import hear_of_end

        hear_of_end(int(os.environ.pop(_PARENT_PID)), signal.SIGTERM)
    try:
        code = _command(words[0], words[1:])
        sys.stdout.flush()
        return code
    except (ConfigError, LaunchError) as error:
        if words[0] != "train" or os.environ.get("RANK", "0") == "0":  # its ranks all read them: one answer is enough
            say(str(error))
        return _USER_ERROR
    except BrokenPipeError:
        if not _has_lost_its_reader(sys.stdout.fileno()):
            raise
        lead_nowhere(sys.stdout)  # `lockstep learn | head`
        return 1
    except (ConnectionError, TimeoutError):  # of a network: where it came from is of use
        raise
    except OSError as error:  # no rights, no room, no file
        say(f"{error.filename or words[0]}: {error.strerror or error}")
        return 1
    except KeyboardInterrupt:  # before anything was started that could be asked
        say("stopped")
        return _INTERRUPTED


def ends_with_me() -> dict[str, str]:
    """Variables for a `lockstep` command that this process starts: however this one ends, that one is asked to stop."""
    return {_PARENT_PID: str(os.getpid())}


def _open_standard_streams() -> None:
    """Those that are closed lead nowhere: else a file or a socket of ours takes their number, and is written to."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # each time the lowest number that is free is taken: this one
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _has_lost_its_reader(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _command(name: str, words: Sequence[str]) -> int:
    if name in ("-h", "--help", "--version"):
        print(f"lockstep {lockstep.__version__}" if name == "--version" else HELP)
        return 0
    if name not in _COMMANDS:
        known = ("--help", "--version", *(() if name.startswith("-") else _COMMANDS))
        refuse_name("unknown command", name, known, "lockstep", "lockstep --help")
    current_folder()
    command = getattr(import_module(f"lockstep.cli.{name}"), name)
    if signal.getsignal(signal.SIGINT) is leave_at_once:  # as __main__ has set it until here
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return command(words)
