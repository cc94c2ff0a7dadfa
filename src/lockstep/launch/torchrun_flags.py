"""`lockstep run` understands what torchrun does: its words are read by torchrun's own parser, with a few more."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, get_args_parser

from lockstep.comm.choose import wants_shared_memory
from lockstep.comm.place import SWITCH, find_place
from lockstep.errors import ConfigError
from lockstep.launch.guess import new_record
from lockstep.launch.job import LOGGERS_GRACE_S, Launch, Supervision
from lockstep.launch.launch_log import LaunchLog
from lockstep.launch.launcher import LOOPBACK, SIGNALS, silence_torch
from lockstep.launch.preload import modules_to_preload
from lockstep.launch.processes import ForkServer
from lockstep.launch.program import Program
from lockstep.launch.recovery import RestartPolicy
from lockstep.launch.torchrun_checks import count_processes, refuse
from lockstep.launch.words import Words, read_range, say
from lockstep.observe.loggers import LOG, logger_names
from lockstep.observe.profile.window import PROFILE, RUN, read_window
from lockstep.observe.settings import GUARD, MODES, GuardSettings
from lockstep.observe.torch_flight_recorder import TIMING

_LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1", "[::1]")
_DESCRIPTION = """Start and supervise TRAINING_SCRIPT on every rank, with torchrun's flags and torchrun's environment.

Beyond torchrun: workers are forked from a process that has paid for the imports (Linux, no GPU), so a restart takes a
fraction of a second; stopped and hung processes are found; --max-restarts counts per cause and is full again with every
later checkpoint; --nproc-per-node may be a range A:B; on one machine nothing listens beyond the loopback interface;
workers that end with code 75 asked to be started again later, and so does this command. A signal that asks this command
or a worker to stop is passed on to all workers once; they have --grace-s to save, and there is no restart."""
_HELP = {  # where torchrun's words do not hold here
    "start_method": argparse.SUPPRESS,
    "nproc_per_node": "workers of this machine: a number, a range like 2:4, auto, cpu or gpu (default: 1)",
    "shutdown_timeout": "after a worker failed: ask the others to end (SIGTERM), and kill them so many seconds later "
    "(default: they are not asked, see --failure-grace-s)",
    "signals_to_handle": f"signals that ask to stop, with commas between them (default: {','.join(SIGNALS)})",
}
_POSITIONAL = {"training_script": ("SCRIPT", True), "training_script_args": ("ARGUMENTS", False)}
_VARIABLES = (
    ("--record", RUN, "DIR", "folder for the record and the report (default: runs/<script>-<time>; off: none)"),
    ("--profile", PROFILE, "steps=A:B", "run torch.profiler over these steps on every rank, and merge what they saw"),
    ("--log", LOG, "NAMES", "loggers for what `lockstep.log` is given: tensorboard, wandb, trackio, by commas"),
)
_SECONDS = (
    ("--grace-s", 60.0, "after a signal: how long workers may save before they are killed"),
    ("--failure-grace-s", 0.2, "after a worker failed: how long others may say what they saw; with --log at least 15"),
    ("--stopped-limit-s", 10.0, "how long a worker may be stopped (SIGSTOP) before it counts as failed; 0: for ever"),
    ("--hang-limit-s", 600.0, "how long no worker may give a sign of life, or one stand still in a HANG; 0: for ever"),
)
_FROM_ZERO = ("--max-restarts", "--shutdown-timeout", *(name for name, _, _ in _SECONDS))


def parser() -> Words:
    """torchrun's parser with the flags of our own."""
    usage, form = "lockstep run [flags] script.py [its arguments]", argparse.RawDescriptionHelpFormatter
    made = Words("lockstep run", usage, _DESCRIPTION, add_help=False, parents=[get_args_parser()], formatter_class=form)
    for action in made._actions:
        action.help = _HELP.get(action.dest, action.help)
        if action.dest in _POSITIONAL:
            action.metavar, action.required = _POSITIONAL[action.dest]
        if action.dest == "master_port" and action.default == 29500:  # torch before 2.13: as if a user had named it
            action.default = None
    own = made.add_argument_group("beyond torchrun")
    hidden = argparse.SUPPRESS
    if "--shutdown-timeout" not in made._option_string_actions:  # torch before 2.13
        asked, what = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT"), _HELP["shutdown_timeout"]
        own.add_argument("--shutdown-timeout", type=int, default=asked, metavar="SECONDS", help=what)
    for short in ("-n", "--nproc"):  # as for `lockstep train`
        own.add_argument(short, dest="nproc_per_node", metavar="N|A:B", default=hidden, help="--nproc-per-node")
    start = "warm: fork workers from a process that has imported torch and the script's installed packages, where that "
    start += "is possible; fresh: start an interpreter for each (default: warm)"
    own.add_argument("--start", choices=("warm", "fresh"), default="warm", help=start)
    guard = "on: name ranks that call different collectives, hang or fail, and raise at the end of the step; strict: "
    guard += f"raise at once; check: also compare every call of the first three steps; off (default: {GUARD}, or on)"
    own.add_argument("--guard", choices=MODES, default=None, help=guard)
    first = "as the first word: show the run here, a row per rank, and as a live page; what they print goes to a file"
    own.add_argument("--watch", action="store_true", help=first)
    for name, variable, metavar, what in _VARIABLES:
        own.add_argument(name, default=os.environ.get(variable, ""), metavar=metavar, help=what)
    for name, default, what in _SECONDS:
        own.add_argument(name, type=float, default=default, metavar="SECONDS", help=f"{what} (default: {default:g})")
    return made


def read_flags(words: Sequence[str], folder: Path, server: ForkServer | None = None) -> Launch:
    """The words after `lockstep run`. folder: for log files, unless --log-dir names one, and for what is private.
    server: one that loads already, as it was guessed.

    --help ends the process. Raises: ConfigError.
    """
    made = parser()
    args = made.read(words)
    given = {name: value for name, value in vars(args).items() if value != made.get_default(name)}
    origins = {GUARD: _origin("guard", GUARD, given), RUN: _origin("record", RUN, given)}
    origins |= {name: "launcher" for name in ("OMP_NUM_THREADS", TIMING) if name not in os.environ}
    refuse(args, _FROM_ZERO)
    said_by = {name: name if name[2:] in given else variable for name, variable, _, _ in _VARIABLES}
    read_window(args.profile, said_by["--profile"])
    logger_names(args.log, said_by["--log"])
    args.guard = GuardSettings.of(os.environ, args.guard).mode
    wants_shared_memory(os.environ)
    find_place({SWITCH: os.environ.get(SWITCH, "")})
    smallest = _smallest(args)
    port = _meet_on_loopback(args)
    args.log_dir = str(folder) if args.log_dir is None else args.log_dir
    if "signals_to_handle" not in given:
        args.signals_to_handle = ",".join(SIGNALS)
    silence_torch()
    processes = count_processes(args.nproc_per_node)
    try:
        config, _, _ = config_from_args(args)
    except OSError as error:
        raise ConfigError(f"--log-dir {args.log_dir} cannot be made: {error.strerror}") from error
    except (AssertionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{str(error).rstrip('.')}. `lockstep run --help` explains") from error
    if processes > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's: or each takes all cores
    program = _program(args)
    record = _record(args, said_by["--record"])
    del given["training_script"], given["training_script_args"]
    supervision = replace(
        _supervision(args, smallest or processes, config),
        variables={RUN: record, PROFILE: args.profile, LOG: args.log, GUARD: args.guard},
        log=LaunchLog(Path(record) if record else None, command=["lockstep", "run", *words], flags=given),
        origins=origins,
    )
    modules, is_warm = tuple(modules_to_preload(program, Path.cwd())), args.start == "warm"
    return Launch(program, config, supervision, folder, modules=modules, is_warm=is_warm, server=server, port=port)


def _origin(flag: str, variable: str, given: Mapping[str, object]) -> str:
    return f"--{flag}" if flag in given else "environment" if variable in os.environ else "default"


def _record(args: Namespace, named: str) -> str:
    """The folder for the record, which can be written; "" for none. Raises: ConfigError where it was asked for."""
    folder = "" if args.record == "off" else os.path.abspath(args.record or new_record(args.training_script))
    try:
        if folder:
            os.makedirs(folder, exist_ok=True)
            os.rmdir(tempfile.mkdtemp(dir=folder))
    except OSError as error:
        why = "it is a file" if os.path.isfile(folder) else error.strerror
        if args.record:
            raise ConfigError(f"{named} {args.record} cannot hold a record: {why}. Name a folder, or off") from error
        say(f"this run leaves no record, {folder} cannot be made: {why}; --record DIR names another place")
        return ""
    return folder


def _smallest(args: Namespace) -> int:
    """The smaller number where --nproc-per-node is a range, else 0; the larger one stays there, for torch's parser."""
    if ":" not in args.nproc_per_node:
        return 0
    smallest, largest = read_range("--nproc-per-node", args.nproc_per_node, "processes")
    args.nproc_per_node = str(largest)
    return smallest


def _meet_on_loopback(args: Namespace) -> int:
    """Choose our own rendezvous where one machine meets itself; the port it has to take, 0 for any."""
    alone = read_range("--nnodes", args.nnodes, "machines")[1] == 1
    is_static = args.rdzv_backend == "static" and not args.rdzv_endpoint
    port = args.master_port
    if args.master_port is None:
        vars(args).update(master_port=29500)  # torchrun's
    if args.standalone or (alone and is_static and (port is None or args.master_addr in _LOOPBACK_NAMES)):
        args.rdzv_backend, args.rdzv_endpoint = LOOPBACK, ""
        if args.standalone or args.rdzv_id == "none":
            args.rdzv_id = ""
        return 0 if args.standalone else port or 0
    return 0


def _program(args: Namespace) -> Program:
    words = tuple(args.training_script_args)
    if args.no_python and not args.run_path:
        if shutil.which(args.training_script) is None:
            near = f"./{args.training_script.removeprefix('./')}"
            hint = f"{near} is here" if shutil.which(near) else f"if {near} is meant: chmod +x {near}"
            raise ConfigError(f"--no-python {args.training_script}: there is no such command on PATH; {hint}")
        return Program("command", args.training_script, words)
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    if python != sys.executable:
        module = ("-m",) if args.module else ()
        return Program("command", python, ("-u", *module, args.training_script, *words))
    if args.module:
        top = args.training_script.partition(".")[0]
        if top and not PathFinder.find_spec(top, [os.getcwd()]) and not find_spec(top):
            say(f"No module named {top}: it is looked for in {os.getcwd()}, on PYTHONPATH, and in what {python} has")
            raise SystemExit(1)  # as Python
        return Program("module", args.training_script, words)
    if not os.path.exists(args.training_script):
        raise ConfigError(f"there is no script {args.training_script!r} in {os.getcwd()}")
    if os.path.isdir(args.training_script):
        raise ConfigError(f"{args.training_script} is a folder: name the script in it, or a module by -m")
    if not os.access(args.training_script, os.R_OK):
        raise ConfigError(f"{args.training_script} cannot be read by this user (chmod +r)")
    return Program("script", args.training_script, words)


def _supervision(args: Namespace, smallest: int, config: LaunchConfig) -> Supervision:
    asks_first = args.shutdown_timeout is not None or "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in os.environ
    asked_s = getattr(config, "shutdown_timeout", args.shutdown_timeout)
    least_s = LOGGERS_GRACE_S if args.log else 0.0
    return Supervision(
        RestartPolicy(config.max_restarts, smallest),
        grace_s=args.grace_s,
        failure_grace_s=float(asked_s or 0) if asks_first else max(args.failure_grace_s, least_s),
        asks_first=asks_first,
        stopped_limit_s=args.stopped_limit_s,
        hang_limit_s=args.hang_limit_s,
    )
