"""Starts the ranks of one machine as real processes, watches them, and ends them all when one fails or the user says.

The processes are started and their output is followed by torch.distributed.elastic's engine, which is also torchrun's.
The ranks meet in a store that this process hosts on a loopback socket: nothing can be reached from outside.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, SubprocessContext, start_processes

from lockstep.errors import LaunchError
from lockstep.launch.worker import AGENT_PID, INTERRUPTED, Failure, read_failure, stop_signals

_POLL_S = 0.05
_GRACE_AFTER_FAILURE_S = 5.0  # the other ranks notice by themselves and say what they saw
_GRACE_AFTER_SIGNAL_S = 60.0  # the step ends and a checkpoint is written


@dataclass(frozen=True)
class Ended:
    """How one worker process ended."""

    rank: int
    pid: int
    exit_code: int  # negative: the number of the signal that killed it
    was_ended: bool  # by this agent, because of another
    failure: Failure | None  # what it said itself
    last_line: str  # of its standard error


def default_processes() -> int:
    """One per GPU, two where there is none."""
    return torch.cuda.device_count() or 2


def launch(arguments: Sequence[str], processes: int) -> int:
    """Run `python -m lockstep <arguments>` as ranks 0 to `processes` - 1 of this machine; return the run's exit code.

    Blocks until every process has ended, whatever happens; none is left behind. SIGINT, SIGTERM and SIGHUP are passed
    on once and give the ranks time to save; a second one kills them.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # this file says it in its own words
    gc.freeze()  # or the interpreter walks all that torch has made once more when it ends, for a second
    signals = _Signals()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    with tempfile.TemporaryDirectory(prefix="lockstep-") as logs:
        context = _start(arguments, processes, port, logs)
        running = set(range(processes))
        try:
            running = _watch(context, signals)
        finally:
            context.close(signal.SIGKILL, timeout=5)
        ended = [_ended(context, rank, rank in running) for rank in range(processes)]
    del store
    return _verdict(ended, signals)


class _Signals:
    """Signals that arrived at this process; two mean that the user will not wait."""

    def __init__(self) -> None:
        self.count = 0
        for number in stop_signals():
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


def _start(arguments: Sequence[str], processes: int, port: int, logs: str) -> SubprocessContext:
    common = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"lockstep-{uuid.uuid4().hex[:12]}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # a restarted worker must not read a dead one's address
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        AGENT_PID: str(os.getpid()),
    }
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # the engine's own handler; the others are ours
    context = start_processes(
        name="rank",
        entrypoint=sys.executable,
        args=dict.fromkeys(range(processes), ("-m", "lockstep", *arguments)),
        envs={rank: {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)},
        logs_specs=DefaultLogsSpecs(log_dir=logs, tee=Std.ERR),
        log_line_prefixes={rank: f"[rank {rank}] " for rank in range(processes)},
    )
    assert isinstance(context, SubprocessContext)
    return context


def _watch(context: SubprocessContext, signals: _Signals) -> set[int]:
    """Return when all workers have ended or had their time to; the ranks that are still running."""
    deadline_s = float("inf")
    passed_on = 0
    while True:
        codes = {rank: handler.proc.poll() for rank, handler in context.subprocess_handlers.items()}
        running = {rank for rank, code in codes.items() if code is None}
        if not running or time.monotonic() > deadline_s or signals.count > 1:
            return running
        if any(codes.values()):
            deadline_s = min(deadline_s, time.monotonic() + _GRACE_AFTER_FAILURE_S)
        if signals.count > passed_on:
            passed_on = signals.count
            deadline_s = time.monotonic() + _GRACE_AFTER_SIGNAL_S
            bar = "\n" if sys.stderr.isatty() else ""  # rank 0's progress bar stands on the line of the cursor
            _say("stopping; once more ends all processes at once", bar)
            for rank in running:
                context.subprocess_handlers[rank].proc.send_signal(signal.SIGTERM)
        time.sleep(_POLL_S)


def _ended(context: SubprocessContext, rank: int, was_ended: bool) -> Ended:
    process = context.subprocess_handlers[rank].proc
    if process.returncode is None:
        raise LaunchError(f"rank {rank} (pid {process.pid}) cannot be killed: it hangs in the kernel")
    lines = Path(context.stderrs[rank]).read_text(errors="replace").split("\n")
    last_line = next((line.strip() for line in reversed(lines) if line.strip()), "")
    failure = read_failure(Path(context.error_files[rank]))
    return Ended(rank, process.pid, process.returncode, was_ended, failure, last_line)


def first_failure(ended: Sequence[Ended]) -> Ended | None:
    """The process that failed first, as far as one can tell; None if none did.

    A process that was killed could not report anything; one that only saw another's failure says so. Unexpected errors
    go by the time of the report; of expected ones, which ranks often raise together, the lowest rank speaks for all.
    """
    failed = [e for e in ended if e.exit_code not in (0, INTERRUPTED) and not (e.was_ended and e.failure is None)]
    culprits = [e for e in failed if e.failure is None or not e.failure.is_consequence] or failed

    def order(e: Ended) -> tuple[bool, bool, float]:
        said = e.failure
        if said is None:
            return (False, False, e.rank)
        return (True, said.is_expected, e.rank if said.is_expected else said.time_s)

    return min(culprits, key=order, default=None)


def describe(ended: Ended) -> str:
    """How a process ended, as the end of a sentence that begins with its name."""
    if ended.failure is not None:
        return (
            ended.failure.message
            if ended.failure.is_expected
            else f"failed: {ended.failure.kind}: {ended.failure.message}"
        )
    if ended.exit_code < 0:
        text = f"was killed by {signal.Signals(-ended.exit_code).name}"
    else:
        text = f"ended with exit code {ended.exit_code}"
    return f"{text}; its last words: {ended.last_line}" if ended.last_line else text


def _verdict(ended: Sequence[Ended], signals: _Signals) -> int:
    """Say how the run ended if it did not end well; return its exit code."""
    first = first_failure(ended)
    if signals.count:
        if first is not None:
            _say("the processes were ended before they could save; earlier checkpoints are on disk")
        return INTERRUPTED
    if first is None:
        return max(e.exit_code for e in ended)
    failure = first.failure
    if failure is not None and not failure.is_expected:
        sys.stderr.write(failure.trace)
    if failure is not None and failure.is_expected and all(e.failure for e in ended):  # no rank's own trouble
        _say(describe(first))
    else:
        _say(f"rank {first.rank} (pid {first.pid}) {describe(first)}; the other ranks were ended")
    return failure.exit_code if failure is not None else 1


def _say(text: str, before: str = "") -> None:
    sys.stderr.write(f"{before}lockstep: {text}\n")
    sys.stderr.flush()
