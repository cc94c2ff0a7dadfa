"""What a launcher is asked to do on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed.launcher.api import LaunchConfig

from lockstep.launch.launch_log import LaunchLog
from lockstep.launch.processes import ForkServer
from lockstep.launch.program import Program
from lockstep.launch.recovery import RestartPolicy

LOGGERS_GRACE_S = 15.0  # of a failure where there are any, as at the end of a program


@dataclass(frozen=True)
class Supervision:
    """How a launcher deals with its workers."""

    policy: RestartPolicy
    grace_s: float = 60.0  # for all, after a signal: the step ends and a checkpoint is written
    failure_grace_s: float = 0.2  # for the others, after one failed: they say what they saw
    asks_first: bool = False  # the others get SIGTERM meanwhile
    stopped_limit_s: float = 10.0
    hang_limit_s: float = 600.0
    tells_traces: bool = False  # workers leave it to the launcher to print what they raised
    variables: Mapping[str, str] = field(default_factory=dict)  # more of the workers' environment
    again: str = ""  # command that goes on with the run
    fits: Callable[[int], bool] | None = None  # whether the run can be done by that many processes
    # step of the checkpoint that a start goes on from before it has told of one; NONE: there is none, None: not known
    newest: Callable[[], int | None] = lambda: None
    log: LaunchLog = field(default_factory=LaunchLog)
    origins: Mapping[str, str] = field(default_factory=dict)  # how variables came to their values, where that is known


@dataclass(frozen=True)
class Launch:
    """What to run on this machine, and how."""

    program: Program
    config: LaunchConfig
    supervision: Supervision
    folder: Path  # private to this run, gone after it
    modules: tuple[str, ...] = ()  # that the fork server imports
    is_warm: bool = True
    server: ForkServer | None = None  # one that loads `modules` already
    port: int = 0  # of the loopback rendezvous; 0: a free one for each start
