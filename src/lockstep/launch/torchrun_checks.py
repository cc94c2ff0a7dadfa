"""What torchrun's parser takes and torchrun cannot do well: refused before anything starts, by the flag's name."""

from __future__ import annotations

import os
import re
import signal
from argparse import Namespace
from collections.abc import Sequence

import torch
from torch.distributed.elastic.events import get_logging_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import determine_local_world_size

from lockstep.errors import ConfigError
from lockstep.launch.doctor.asked import refuse_crowd, refuse_meeting
from lockstep.launch.processes import refuse_few_files
from lockstep.launch.words import read_range

_OUTPUTS = r"[0-3]|\d:[0-3](,\d:[0-3])*"


def refuse(args: Namespace, from_zero: Sequence[str]) -> None:
    """Raises: ConfigError for flags that cannot work, alone or together. from_zero: the flags that take 0 and more."""
    if args.watch:
        raise ConfigError("--watch comes first: lockstep run --watch [other flags] script.py")
    if args.start_method != "spawn":
        raise ConfigError(f"--start-method {args.start_method}: --start warm|fresh says how workers are started")
    if args.numa_binding and not torch.cuda.is_available():
        raise ConfigError(f"--numa-binding {args.numa_binding}: ranks are bound near their GPU, and there is none here")
    if args.module and args.no_python:
        raise ConfigError("--module names a Python module, --no-python says it is none: leave one out")
    if os.environ.get("TORCHELASTIC_ENABLE_FILE_TIMER") == "1":
        raise ConfigError("TORCHELASTIC_ENABLE_FILE_TIMER=1: there is no such timer here, --hang-limit-s finds hangs")
    _refuse_meeting(args)
    for name in map(str.strip, args.signals_to_handle.split(",")):
        if name in ("SIGKILL", "SIGSTOP") or (name and not isinstance(getattr(signal, name, None), signal.Signals)):
            raise ConfigError(f"--signals-to-handle {args.signals_to_handle}: {name!r} is no signal that can be heard")
    for flag in ("redirects", "tee"):
        if not re.fullmatch(_OUTPUTS, getattr(args, flag)):
            raise ConfigError(f"--{flag} {getattr(args, flag)}: it takes 0, 1, 2 or 3, or ranks with theirs: 0:3,1:1")
    try:
        get_logging_handler(args.event_log_handler)
    except KeyError as error:
        raise ConfigError(f"--event-log-handler {args.event_log_handler}: torch has console and null") from error
    if not 0 < args.monitor_interval < 1e9:  # nan is neither
        raise ConfigError(f"--monitor-interval {args.monitor_interval}: it is a number of seconds above 0")
    for flag in from_zero:
        number = getattr(args, flag[2:].replace("-", "_"))
        if number is not None and not 0 <= number < 1e9:
            raise ConfigError(f"{flag} {number}: it is a number from 0")


def _refuse_meeting(args: Namespace) -> None:
    """Raises: ConfigError for machines that could never meet."""
    machines, is_static = read_range("--nnodes", args.nnodes, "machines")[1], args.rdzv_backend == "static"
    is_alone = machines == 1 or args.standalone
    if is_static and args.max_restarts and not is_alone:
        why = "they could not agree on a restart, and would read what dead workers wrote"
        fix = "use --rdzv-backend c10d --rdzv-endpoint HOST:PORT"
        raise ConfigError(f"--max-restarts on several machines with --rdzv-backend static: {why}: {fix}")
    refuse_meeting(machines, args.node_rank if is_static and not is_alone else None, args.master_port)
    in_a_file = not is_static and "store_type=file" in args.rdzv_conf.replace(" ", "")
    if args.standalone or args.rdzv_backend not in ("static", "c10d") or in_a_file:
        return
    if not is_alone and not is_static and not args.rdzv_endpoint:
        raise ConfigError("--rdzv-backend c10d needs --rdzv-endpoint HOST:PORT, the same on every machine")
    try:
        port = parse_rendezvous_endpoint(args.rdzv_endpoint, 1)[1]
    except ValueError as error:
        raise ConfigError(f"--rdzv-endpoint {args.rdzv_endpoint}: {error}") from error
    refuse_meeting(machines, None, None if is_alone else port)


def count_processes(text: str) -> int:
    """The ranks of this machine, of --nproc-per-node. Raises: ConfigError for a number that cannot be, or none."""
    flag = f"--nproc-per-node {text}"
    try:
        processes = determine_local_world_size(text)
    except ValueError as error:
        if text in ("gpu", "xpu"):
            raise ConfigError(f"{flag}: torch sees none here. Name a number; `lockstep doctor` looks why") from error
        raise ConfigError(f"{flag}: it takes a number of processes, a range like 2:4, auto, cpu or gpu") from error
    if processes < 1:
        raise ConfigError(f"{flag}: at least one process has to run")
    refuse_crowd(flag, processes)
    refuse_few_files(processes)
    return processes
