"""A pool of rank processes that are kept between jobs, so that a job on real processes costs milliseconds."""

from __future__ import annotations

import multiprocessing
import os
import pickle  # noqa: TID251 - a test's own functions, between its own processes
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from lockstep.comm.waiting import wait_until
from lockstep.testing.failures import RankError, RankFailed, RankTimeout
from lockstep.testing.worker import STACKS, Job, serve

_START_S = 120.0  # for the processes to come up: the first ones wait for the fork server's imports
_GRACE_S = 5.0  # after the first failure, for the other ranks to tell theirs
_LOG_BYTES = 4000  # of a dead process's output, shown in the error
Environment = Mapping[str, str | None]


class ProcessPool:
    """`world_size` warm processes. After any failure they are killed, and the next job starts new ones."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._context = multiprocessing.get_context("forkserver")
        frameworks = ["pytest"] if "pytest" in sys.modules else []  # else every process imports it, as the main module
        self._context.set_forkserver_preload(["lockstep.testing.preload", *frameworks])
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._jobs = 0

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        timeout_s: float,
        env: Environment | Sequence[Environment] | None,
        connect: bool,
    ) -> list[Any]:
        """`fn` on every rank; what each returned. See `run_processes`."""
        __tracebackhide__ = True
        where = getattr(fn, "__qualname__", repr(fn))
        try:
            if not self._processes:
                self._start(f"start before {where}")
            call = pickle.dumps((fn, tuple(args), dict(kwargs)))
            self._send(call, timeout_s, env, connect, f"waiting for {where}")
            results, errors, missing = self._collect(time.monotonic() + timeout_s + _GRACE_S)
            if missing and not errors:
                raise RankTimeout(missing, timeout_s, where, self.stacks())
            if errors:
                hang = RankError("Hang", "did not finish after the others had failed", "", None, time.monotonic())
                errors |= dict.fromkeys(missing, hang)
                raise RankFailed(errors, results, self.world_size, where)
            self._release(where)
        except BaseException:
            self.kill()
            raise
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """End the processes the quiet way, and those that do not by force."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(2.0)
        self.kill()

    def kill(self) -> None:
        """End the processes by force."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def stacks(self) -> str:
        """The stacks of every rank that lives, as each writes them itself."""
        before = {rank: len(self._log(rank)) for rank in range(len(self._processes))}
        for process in self._processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, STACKS)
        alive = [rank for rank, process in enumerate(self._processes) if process.is_alive()]
        # Written piece by piece, the main thread last, from within to its outermost frame.
        wait_until(lambda: all(self._log(rank)[before[rank] :].endswith("in <module>\n") for rank in alive), 2.0)
        return "\n".join(f"--- rank {rank} ---\n{self._log(rank)[-_LOG_BYTES:]}" for rank in before)

    # ------------------------------------------------------------------ one job

    def _start(self, where: str) -> None:
        """New processes, all of which are there: what that takes is not part of a job's limit."""
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-pool-")
        for rank in range(self.world_size):
            here, there = self._context.Pipe()
            log = str(Path(self._folder.name) / f"rank{rank}.log")
            process = self._context.Process(target=serve, args=(rank, self.world_size, there, log), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        self._hear_all(_START_S, where)

    def _send(
        self, call: bytes, timeout_s: float, env: Environment | Sequence[Environment] | None, connect: bool, where: str
    ) -> None:
        assert self._folder is not None
        rendezvous = Path(self._folder.name) / f"job{self._jobs}"
        self._jobs += 1
        for rank in range(self.world_size):
            job = Job(
                call=call,
                sys_path=list(sys.path),
                directory=os.getcwd(),
                environment=_environment(env[rank] if isinstance(env, Sequence) else env),
                rendezvous=rendezvous.as_uri() if connect else None,
                timeout_s=timeout_s,
            )
            self._tell(rank, pickle.dumps(tuple(job)), where)

    def _tell(self, rank: int, message: bytes, where: str) -> None:
        try:
            self._pipes[rank].send_bytes(message)
        except (BrokenPipeError, ConnectionResetError):
            raise RankFailed({rank: self._death(rank)}, {}, self.world_size, where) from None

    def _collect(self, deadline: float) -> tuple[dict[int, Any], dict[int, RankError], list[int]]:
        """Results, errors, and the ranks that answered neither before the deadline."""
        results: dict[int, Any] = {}
        errors: dict[int, RankError] = {}
        pending = dict(enumerate(self._pipes))
        while pending and (left := deadline - time.monotonic()) > 0:
            ready = wait(list(pending.values()), left)
            for rank in [rank for rank, pipe in pending.items() if pipe in ready]:
                try:
                    good, answer = pickle.loads(pending.pop(rank).recv_bytes())  # noqa: S301 - from our own process
                except (EOFError, ConnectionResetError):
                    errors[rank] = self._death(rank)
                else:
                    if good:
                        results[rank] = answer
                    else:
                        errors[rank] = RankError(*answer)
            if errors:
                deadline = min(deadline, min(error.at for error in errors.values()) + _GRACE_S)
        return results, errors, sorted(pending)

    def _release(self, where: str) -> None:
        """All ranks have answered: only now may any of them close its connections."""
        where = f"teardown after {where}"
        for rank in range(self.world_size):
            self._tell(rank, b"", where)
        self._hear_all(_GRACE_S, where)

    def _hear_all(self, limit_s: float, where: str) -> None:
        """Every rank says that it has come so far."""
        deadline = time.monotonic() + limit_s
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise RankTimeout([rank], limit_s, where, self.stacks())
            try:
                pipe.recv_bytes()
            except (EOFError, ConnectionResetError):
                raise RankFailed({rank: self._death(rank)}, {}, self.world_size, where) from None

    def _death(self, rank: int) -> RankError:
        process = self._processes[rank]
        process.join(2.0)
        code = process.exitcode
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with code {code}"
        return RankError("ProcessDied", how, self._log(rank)[-_LOG_BYTES:], None, time.monotonic())

    def _log(self, rank: int) -> str:
        assert self._folder is not None
        path = Path(self._folder.name) / f"rank{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""


def _environment(changes: Environment | None) -> dict[str, str]:
    """The caller's environment now, with `changes` (None removes a variable), and Gloo kept on this host."""
    gloo = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    merged = {**gloo, **os.environ, **(changes or {})}
    return {name: value for name, value in merged.items() if value is not None}
