"""The command line: `lockstep train`. Parsing, explaining and refusing need no torch, so they are quick.

    lockstep train [RECIPE] [-n PROCESSES] [--resume auto|PATH] [--section.field value ...]

The same command is the launcher and the rank: without torchrun's (or Slurm's) variables it starts PROCESSES processes
that run it again; with them it is one of the ranks.
"""

from __future__ import annotations

import difflib
import os
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, NoReturn

import tyro

import lockstep
from lockstep.comm.place import Place, find_place
from lockstep.errors import CommError, ConfigError, DataError, LockstepError, PeerFailed
from lockstep.launch.worker import (
    AGENT_PID,
    INTERRUPTED,
    StopRequest,
    describe_failure,
    die_with_launcher,
    report_failure,
)
from lockstep.recipes import gpt2
from lockstep.train.config import RunConfig, check, flatten

RECIPES: dict[str, Callable[[], RunConfig]] = {"gpt2-tiny": gpt2.tiny, "gpt2-124m": gpt2.gpt2_124m}
_USER_ERROR = 2
_PROCESSES_PER_CORE = 32  # a slip of the finger beyond: each takes some 400 MB

HELP = """usage: lockstep [-h] [--version] COMMAND ...

Many PyTorch processes that behave like one training system.

commands:
  train    train a language model on real processes: `lockstep train`, `lockstep train -n 4 --data.path my_text/`

`lockstep COMMAND --help` explains one."""


@dataclass(frozen=True)
class TrainCommand:
    """What `lockstep train` was asked to do."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    processes: Annotated[int | None, tyro.conf.arg(aliases=["-n"], metavar="N")] = None
    """Processes to start on this machine; by default one per GPU, two where there is none."""
    resume: Annotated[str, tyro.conf.arg(metavar="auto|PATH")] = ""
    """Continue from a checkpoint; `auto` takes the newest one in --out, and starts anew where there is none."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code: 0 done, 1 failed, 2 asked for the impossible, 130 stopped by a signal."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] == "--version":
        print(f"lockstep {lockstep.__version__}")
        return 0
    if not words or words[0] in ("-h", "--help"):
        print(HELP)
        return 0
    try:
        if words[0] != "train":
            raise ConfigError(
                f"unknown command {words[0]!r}: did you mean `lockstep train`? `lockstep --help` lists all"
            )
        return train(words[1:])
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":  # every rank reads the same words: one answer is enough
            print(f"lockstep: {error}", file=sys.stderr)
        return _USER_ERROR


def train(words: Sequence[str]) -> int:
    """`lockstep train ...`: launch the ranks, or be one of them. Raises: ConfigError before anything was started."""
    die_with_launcher(os.environ)
    command = parse_train(words)
    place = find_place(os.environ)
    if place.launcher != "one process":
        if command.processes not in (None, place.world_size):
            raise ConfigError(
                f"-n {command.processes} under a launcher that has started {place.world_size} processes "
                f"({place.describe()}): leave -n out"
            )
        check(command.run, place.world_size)
        return run_rank(command, place)
    if command.processes is not None and command.processes < 1:
        raise ConfigError(f"-n {command.processes}: at least one process has to train")
    if command.processes is not None and command.processes > _PROCESSES_PER_CORE * (os.cpu_count() or 1):
        raise ConfigError(
            f"-n {command.processes}: this machine has {os.cpu_count()} cores, so many would only kill it"
        )
    check(command.run, command.processes or 1)
    print(f"lockstep: training in {command.run.out}", flush=True)  # before torch is loaded, which takes seconds
    processes = command.processes
    if processes is None:
        from lockstep.launch.agent import default_processes

        processes = default_processes()
    check(command.run, processes)
    if processes == 1:
        return run_rank(command, place)
    from lockstep.launch.agent import launch

    return launch(["train", *words], processes)


def run_rank(command: TrainCommand, place: Place) -> int:
    """Train as one rank; every error is reported to the launcher and becomes the exit code."""
    stop = StopRequest(has_launcher=place.launcher == "torchrun")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is downloaded: never ask the network
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import torch

        from lockstep.comm.init import init

        with init(verbose=AGENT_PID not in os.environ and place.world_size > 1) as comm:
            sys.stdout.write(_came_up(place, str(comm.device), torch.get_num_threads()))  # one write: lines stay whole
            sys.stdout.flush()
            from lockstep.train.loop import train as train_loop  # slow, so the line above comes first

            result = train_loop(command.run, comm, stop, command.resume)
    except KeyboardInterrupt:
        if place.rank == 0:
            print("lockstep: stopped before the first step", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 (it is reported, and the exit code says so)
        code = _USER_ERROR if isinstance(error, ConfigError | DataError) else 1
        is_expected = isinstance(error, LockstepError | BrokenPipeError)  # the latter: `lockstep train | head`
        is_consequence = isinstance(error, CommError | PeerFailed)
        failure = describe_failure(error, place.rank, code, is_expected, is_consequence)
        report_failure(failure, os.environ)
        return code
    return INTERRUPTED if result.was_stopped else 0


def parse_train(words: Sequence[str]) -> TrainCommand:
    """The words after `lockstep train` as a command. Raises: ConfigError for a recipe or option that does not exist.

    A value of the wrong type, and --help, end the process as command lines do.
    """
    is_named = bool(words) and not words[0].startswith("-")
    name, options = (words[0], list(words[1:])) if is_named else ("gpt2-tiny", list(words))
    recipe = RECIPES.get(name.replace("_", "-"))
    if recipe is None:
        near, listed = nearest(name, RECIPES), ", ".join(RECIPES)
        raise ConfigError(f"unknown recipe {name!r}: did you mean {near}? There are {listed}")
    command, unknown = tyro.cli(
        TrainCommand,
        default=TrainCommand(recipe()),
        args=options,
        prog="lockstep train [RECIPE]",
        description=f"Train a language model on real processes. RECIPE is one of {', '.join(RECIPES)} (else the "
        f"first). The defaults below are those of {name}.",
        return_unknown_args=True,
        use_underscores=True,
        console_outputs=os.environ.get("RANK", "0") == "0",
        config=(tyro.conf.FlagConversionOff,),
    )
    if unknown:
        refuse(unknown[0], command)
    return command


def refuse(word: str, command: TrainCommand) -> NoReturn:
    """Raises: ConfigError with the option whose name is nearest to `word`."""
    if not word.startswith("-"):
        raise ConfigError(f"unexpected {word!r}: the recipe comes first, every value after its --option")
    options = ["-n", "--processes", "--resume", *(f"--{name}" for name, _ in flatten(command.run))]
    raise ConfigError(
        f"unknown option {word}: did you mean {nearest(word, options)}? `lockstep train --help` lists all"
    )


def nearest(word: str, names: Iterable[str]) -> str:
    """The one of `names` that looks most like `word`; for a dotted option its last part counts as much as the whole."""

    def likeness(name: str) -> float:
        whole = difflib.SequenceMatcher(None, word, name).ratio()
        last = difflib.SequenceMatcher(None, word.rpartition(".")[2], name.rpartition(".")[2]).ratio()
        return whole + last

    return max(names, key=likeness)


def _came_up(place: Place, device: str, threads: int) -> str:
    plural = "" if threads == 1 else "s"
    return (
        f"rank {place.rank} of {place.world_size} is up: pid {os.getpid()}, host {socket.gethostname()}, "
        f"device {device}, {threads} thread{plural}\n"
    )
