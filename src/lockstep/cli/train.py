"""`lockstep train`: train a language model on real processes. Parsing, explaining and refusing need no torch.

    lockstep train [RECIPE] [-n N|A:B] [--resume auto|PATH|DIR[:step]] [--section.field value ...]

The same command is the launcher and the rank: without torchrun's (or Slurm's) variables it starts N processes that
run it again; with them it is one of the ranks.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from lockstep.comm.place import Place, find_place
from lockstep.comm.pulse import NONE
from lockstep.errors import CheckpointError, CommError, ConfigError, DataError, LockstepError, PeerFailed
from lockstep.launch.doctor.asked import refuse_crowd
from lockstep.launch.launch_log import LaunchLog
from lockstep.launch.private_folder import private_folder
from lockstep.launch.program import Program
from lockstep.launch.recovery import USER_ERROR, RestartPolicy
from lockstep.launch.starter import default_processes, loading_ahead, may_have_accelerator
from lockstep.launch.stop_signals import leaving_at_once
from lockstep.launch.words import meant, printing, read_range, refuse, say
from lockstep.launch.worker import (
    AGENT_PID,
    INTERRUPTED,
    REQUEUE,
    StopRequest,
    describe_failure,
    die_with_launcher,
    report_failure,
)
from lockstep.observe.profile.window import PROFILE, RUN, read_window
from lockstep.observe.settings import GuardSettings
from lockstep.recipes import gpt2, llama32
from lockstep.train.config import RunConfig, check, flatten, read_resume

RECIPES: dict[str, Callable[[], RunConfig]] = {
    "gpt2-tiny": gpt2.tiny,
    "gpt2-124m": gpt2.gpt2_124m,
    "llama32-tiny": llama32.tiny,
    "llama32-1b": llama32.llama32_1b,
}

# what a rank loads, so that the ranks of a restart find it there
_MODULES = (
    *("torch", "torch._dynamo", "transformers.models.gpt2.modeling_gpt2", "tokenizers", "safetensors.torch"),
    *("lockstep.cli.train", "lockstep.observe.init", "lockstep.train.loop"),
)


@dataclass(frozen=True)
class TrainCommand:
    """What `lockstep train` was asked to do."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    processes: Annotated[str | None, tyro.conf.arg(aliases=["-n", "--nproc"], metavar="N|A:B")] = None
    """Processes to start on this machine; by default one per GPU, two where there is none. A:B starts as many as the
    machine and the batch allow, and may go on with fewer when one fails again and again."""
    resume: Annotated[str, tyro.conf.arg(metavar="auto|PATH|DIR[:step]")] = ""
    """Continue from a checkpoint: a path of one, or a directory that holds some, of which the newest is taken, or that
    of a step. `auto` takes the newest one in --out, and starts anew where there is none."""
    restarts: int = 3
    """How often the ranks are started again, from the newest checkpoint, after one of them has failed; it counts per
    cause, and anew with every later checkpoint."""
    profile: Annotated[str, tyro.conf.arg(metavar="steps=A:B")] = ""
    """Run torch.profiler over these steps on every rank, and merge what they saw into one trace."""
    grace_s: float = 60.0
    """After a signal: how long the ranks have to end their step and save it."""


def train(words: Sequence[str]) -> int:
    """`lockstep train ...`: launch the ranks, or be one of them. Raises: ConfigError before anything was started."""
    die_with_launcher(os.environ)
    if "--watch" in words:
        from lockstep.cli.watched import watched

        rest = [word for word in words if word != "--watch"]
        return watched(["train", *rest], parse_train(rest).run.out)
    command = parse_train(words)
    for name, value in flatten(command.run):
        if re.search("[\ud800-\udfff]", str(value)):
            raise ConfigError(f"--{name} {value}: it is no UTF-8, as a checkpoint keeps it: rename it")
    read_window(window := command.profile or os.environ.get(PROFILE, ""), "--profile" if command.profile else PROFILE)
    GuardSettings.of(os.environ)
    place = find_place(os.environ)
    smallest, largest = read_processes(command.processes)
    if place.launcher != "one process":
        if command.processes is not None and not smallest <= place.world_size <= largest:
            given = f"-n {command.processes} under a launcher that has started {place.world_size} processes"
            raise ConfigError(f"{given} ({place.describe()}): leave -n out")
        check(command.run, place.world_size)
        return run_rank(command, place)
    if not (command.restarts >= 0 and 0 <= command.grace_s < 1e9):
        raise ConfigError(f"--restarts {command.restarts} --grace_s {command.grace_s}: neither can be below 0")
    if command.resume not in ("", "auto"):
        read_resume(command.resume)
    os.environ.pop(RUN, None)  # of another run: this one is recorded in --out
    processes = choose_processes(command.run, smallest, largest)
    is_alone = processes == 1 and not command.restarts
    code = _alone(command, words, place) if is_alone else _launch(command, words, processes, smallest or processes)
    from lockstep.cli.report import tell_record

    tell_record({RUN: str(command.run.out / "profile"), PROFILE: window}, is_quiet=code != 0)
    return code


def read_processes(text: str | None) -> tuple[int, int]:
    """(smallest, largest) number of processes of "4" or "1:4"; (0, 0) for None. Raises: ConfigError."""
    if text is None:
        return 0, 0
    smallest, largest = read_range("-n", text, "processes")
    refuse_crowd(f"-n {text}", largest)
    return smallest, largest


def choose_processes(run: RunConfig, smallest: int, largest: int) -> int:
    """How many processes train `run`: the most of the range that its batch can be divided among.

    Raises: ConfigError where none can, and where `run` itself cannot be trained.
    """
    check(run, 1)  # what is wrong with any number of processes, before torch is asked for GPUs
    if not largest:
        smallest = largest = default_processes()
    elif smallest < largest and may_have_accelerator():
        largest = max(smallest, min(largest, default_processes()))
    numbers = [number for number in range(largest, smallest - 1, -1) if _fits(run, number)]
    if not numbers:
        check(run, largest)  # says why
    return numbers[0]


@contextmanager
def _held(out: Path) -> Iterator[None]:
    """Within, no other run of this machine trains in `out`, however this process ends. Raises: ConfigError."""
    with ExitStack() as stack:
        with suppress(OSError):  # no folder, or one that cannot be locked: where it matters, the ranks say so
            if not out.exists():
                stack.callback(_remove_empty, out)
            out.mkdir(parents=True, exist_ok=True)
            stack.callback(os.close, handle := os.open(out, os.O_RDONLY))
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(f"another run trains in {out}: let it end, or choose another --out") from error
        with printing():
            print(f"lockstep: training in {out}")  # before torch is loaded, which takes seconds
        yield


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # what has come to be in it stays
        folder.rmdir()


def _fits(run: RunConfig, processes: int) -> bool:
    try:
        check(run, processes)
    except ConfigError:
        return False
    return True


def _alone(command: TrainCommand, words: Sequence[str], place: Place) -> int:
    """Train in this process, which says in the record how that ended, as a launcher would."""
    log = _log(command, words)
    with _held(command.run.out):
        log.begin()
        code = run_rank(command, place)
        log.over(code)
    return code


def _log(command: TrainCommand, words: Sequence[str]) -> LaunchLog:
    return LaunchLog(command.run.out / "profile", command=["lockstep", "train", *words], is_ours=False)


def _launch(command: TrainCommand, words: Sequence[str], processes: int, smallest: int) -> int:
    with leaving_at_once() as (settle, stack):
        stack.enter_context(_held(command.run.out))
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything is loaded: nothing here is downloaded
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        server = stack.enter_context(loading_ahead(_MODULES))
        from lockstep.launch.job import LOGGERS_GRACE_S, Launch, Supervision
        from lockstep.launch.launcher import launch, local_config

        supervision = Supervision(
            RestartPolicy(command.restarts, smallest, flag="--restarts"),
            grace_s=command.grace_s,
            failure_grace_s=LOGGERS_GRACE_S if command.run.log else 0.2,
            tells_traces=True,
            again="the same command with --resume auto",
            fits=partial(_fits, command.run),
            newest=partial(newest_step, command),
            log=_log(command, words),
        )
        program, folder = Program("module", "lockstep", ("train", *words)), stack.enter_context(private_folder())
        job = Launch(program, local_config(processes, folder), supervision, folder, modules=_MODULES, server=server)
        return launch(job, settle)


def newest_step(command: TrainCommand) -> int | None:
    """Step of the checkpoint that the first start goes on from; NONE: it begins anew, None: not known."""
    if command.resume != "auto":
        return None if command.resume else NONE
    from lockstep.checkpoint.generation import names_in

    try:
        return next((name.step for name in names_in(command.run.out / "checkpoints")), NONE)
    except CheckpointError:  # the ranks say so
        return None


def run_rank(command: TrainCommand, place: Place) -> int:
    """Train as one rank; every error is reported to the launcher and becomes the exit code."""
    stop = StopRequest(has_launcher=place.launcher == "torchrun")
    os.environ[PROFILE] = command.profile or os.environ.get(PROFILE, "")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is downloaded: never ask the network
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import torch

        from lockstep.observe.init import init

        with init(verbose=AGENT_PID not in os.environ and place.world_size > 1) as comm:
            threads = f"{torch.get_num_threads()} thread{'s' * (torch.get_num_threads() != 1)}"
            where = f"pid {os.getpid()}, host {socket.gethostname()}, device {comm.device}, {threads}"
            with printing():
                sys.stdout.write(f"rank {place.rank} of {place.world_size} is up: {where}\n")  # whole: it is one write
            from lockstep.train.loop import train as train_loop  # slow, so the line above comes first

            result = train_loop(command.run, comm, stop, command.resume)
    except KeyboardInterrupt:
        if place.rank == 0:
            say("stopped before the first step")
        return INTERRUPTED if newest_step(command) in (None, NONE) else REQUEUE
    except Exception as error:  # noqa: BLE001 (it is reported, and the exit code says so)
        code = USER_ERROR if isinstance(error, ConfigError | DataError) else 1
        is_expected, is_consequence = isinstance(error, LockstepError), isinstance(error, CommError | PeerFailed)
        failure = describe_failure(error, place.rank, code, is_expected, is_consequence)
        report_failure(failure, os.environ)
        if place.world_size > 1:
            raise SystemExit(code) from None  # the other ranks are told what it comes from
        return code
    finally:
        stop.settle()
    return REQUEUE if result.was_stopped else 0


def parse_train(words: Sequence[str]) -> TrainCommand:
    """The words after `lockstep train` as a command. Raises: ConfigError for a recipe or option that does not exist.

    A value of the wrong type, and --help, end the process as command lines do.
    """
    is_named = bool(words) and not words[0].startswith("-")
    name, options = (words[0], list(words[1:])) if is_named else ("gpt2-tiny", list(words))
    recipe = RECIPES.get(name.replace("_", "-"))
    if recipe is None:
        near = meant(name, RECIPES) or "."
        raise ConfigError(f"unknown recipe {name!r}{near} There are {', '.join(RECIPES)}")
    command, unknown = tyro.cli(
        TrainCommand,
        default=TrainCommand(recipe()),
        args=options,
        prog="lockstep train [RECIPE]",
        description=f"Train a language model on real processes. RECIPE is one of {', '.join(RECIPES)} (else the "
        f"first). The defaults below are those of {name}. With --watch the run is shown here, a row per rank, and as a "
        "live page; what the ranks print goes into a file in --out.",
        return_unknown_args=True,
        use_underscores=True,
        console_outputs=os.environ.get("RANK", "0") == "0",
        config=(tyro.conf.FlagConversionOff,),
    )
    if unknown and unknown[0].startswith("-"):
        names = [field.name for field in fields(command) if field.name != "run"]
        options = ["-n", "--nproc", "--watch", *(f"--{name}" for name in (*names, *dict(flatten(command.run))))]
        refuse(unknown[0], options, "lockstep train")
    if unknown:
        raise ConfigError(f"unexpected {unknown[0]!r}: the recipe comes first, every value after its --option")
    return command
