"""The worker processes of one start of a run: their output, their ends, and what they said."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, final

from torch.distributed.elastic.multiprocessing import LogsSpecs, PContext
from torch.distributed.elastic.multiprocessing.api import RunProcsResult
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.utils import macros

from lockstep.errors import LaunchError
from lockstep.launch.ended import STOPPED, Ended
from lockstep.launch.fork_server import Start
from lockstep.launch.processes import WorkerProcess, wait_for
from lockstep.launch.program import Program
from lockstep.launch.words import current_folder
from lockstep.launch.worker import read_failure

_KILL_S = 10.0  # a process that SIGKILL does not end by then hangs in the kernel
_LAST_BYTES = 65536  # of standard error, in which the last line is looked for


@final
class Workers(PContext):
    """torch's context does the files, the prefixes and the filters; the processes are ours."""

    def __init__(
        self,
        name: str,
        program: Program,
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None,
        **filters: list[str] | None,
    ) -> None:
        arguments = {rank: tuple(macros.substitute(list(program.arguments), str(rank))) for rank in envs}
        super().__init__(name, program.name, arguments, envs, logs_specs, log_line_prefixes, **filters)
        self._program = program
        self.processes: dict[int, WorkerProcess] = {}
        self.stuck: dict[int, str] = {}  # local rank -> what the watch saw
        self._ended_s: dict[int, float] = {}
        self._was_ended: set[int] = set()  # by us, because of another
        self._told: dict[int, int] = {}  # signals passed on

    def start_with(self, start: Callable[[int, Start], WorkerProcess]) -> None:
        """Start all of them, each by `start(local rank, what)`, and follow what they write. Raises: LaunchError."""
        for rank, env in self.envs.items():
            program = Program(self._program.kind, self._program.name, self.args[rank])
            what = Start(program, {**os.environ, **env}, current_folder(), self.stdouts[rank], self.stderrs[rank])
            self.processes[rank] = start(rank, what)
        for tail in self._tail_logs:
            tail.start()

    def running(self) -> dict[int, WorkerProcess]:
        """Those that have not ended, as far as one has looked."""
        return {rank: process for rank, process in self.processes.items() if process.exit_code is None}

    def look(self) -> None:
        """Find those that have ended since."""
        for rank, process in self.running().items():
            if process.reap():
                self._ended_s[rank] = time.monotonic()

    def failed(self) -> bool:
        """True once one has ended that did not end well."""
        return any(p.exit_code not in (None, 0, *STOPPED) for p in self.processes.values())

    def stopped(self) -> dict[int, int]:
        """Exit codes of those that have ended because somebody asked them to stop, by local rank."""
        ended = {rank: process.exit_code for rank, process in self.processes.items() if rank not in self._was_ended}
        return {rank: code for rank, code in ended.items() if code in STOPPED}

    def cause_is_known(self) -> bool:
        """True once one has ended that cannot have failed only because another did."""
        for rank, process in self.processes.items():
            code = process.exit_code
            if code in (None, 0, *STOPPED):
                continue
            if (code < 0 and code != -signal.SIGABRT) or rank in self.stuck:  # Gloo aborts who is sent too much
                return True
            said = read_failure(Path(self.error_files[rank]))
            if said is not None and not said.is_consequence:
                return True
        return False

    def pass_on(self, number: int, but: Container[int] = ()) -> None:
        """Tell each that runs of a signal to stop, save for the pids that know."""
        for rank, process in self.running().items():
            if process.pid not in but:
                self._told[rank] = number
                process.send_signal(number)

    def ask_to_end(self) -> None:
        """SIGTERM to each that runs, because another has failed."""
        for rank, process in self.running().items():
            self._was_ended.add(rank)
            process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill those that run, because of another or of a user who will not wait, and wait until they are gone.

        Raises: LaunchError where one does not end.
        """
        self.look()
        running = self.running()
        self._was_ended.update(running)
        self._kill(running)

    def kill_stuck(self, why: Mapping[int, str]) -> None:
        """Kill those of `why` that run, for what the watch saw of them. Raises: LaunchError where one does not end."""
        self.look()
        running = {rank: process for rank, process in self.running().items() if rank in why}
        self.stuck.update((rank, why[rank]) for rank in running)
        self._kill(running)

    def _kill(self, condemned: Mapping[int, WorkerProcess]) -> None:
        for process in condemned.values():
            process.kill()
        deadline = time.monotonic() + _KILL_S
        for rank, process in condemned.items():
            while not process.reap():
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise LaunchError(f"rank {rank} (pid {process.pid}) cannot be killed: it hangs in the kernel")
                wait_for([process.handle] if process.handle >= 0 else [], min(left_s, 0.05))
            self._ended_s[rank] = time.monotonic()

    def ended(self, rank_of: Mapping[int, int], out_of_memory: bool) -> list[Ended]:
        """How those have ended that have. rank_of: local rank -> rank. out_of_memory: the kernel has killed some."""
        return [self._ended(local, rank_of[local], out_of_memory) for local in sorted(self._ended_s)]

    def failures(self, rank_of: Mapping[int, int]) -> dict[int, ProcessFailure]:
        """Those that failed, in torch's own record."""
        return {
            rank_of[local]: ProcessFailure(local, process.pid, process.exit_code or 0, self.error_files[local])
            for local, process in self.processes.items()
            if process.exit_code
        }

    def _ended(self, local: int, rank: int, out_of_memory: bool) -> Ended:
        process = self.processes[local]
        code = process.exit_code
        assert code is not None
        was_ended = local in self._was_ended
        return Ended(
            rank=rank,
            pid=process.pid,
            exit_code=code,
            was_ended=was_ended,
            failure=read_failure(Path(self.error_files[local]), rank) if code else None,
            last_line=_last_line(self.stderrs[local]),
            stuck=self.stuck.get(local, ""),
            out_of_memory=out_of_memory and code == -signal.SIGKILL and not was_ended,
            at_s=self._ended_s[local],
            told=self._told.get(local, 0),
        )

    # ------------------------------------------------------------------ what torch's class asks for

    def _start(self) -> None:
        raise AssertionError("start_with() starts the processes")

    def _poll(self) -> RunProcsResult | None:
        raise AssertionError("the agent looks at the processes itself")

    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self.processes.items()}

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        self.kill()


def _last_line(path: str) -> str:
    if not path or not os.path.isfile(path):
        return ""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _LAST_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def environment_of(worker: Any, group: Any, generation: int) -> dict[str, str]:
    """torchrun's contract with the programs it starts, for one worker."""
    spec = group.spec
    env = {
        "RANK": str(worker.global_rank),
        "LOCAL_RANK": str(worker.local_rank),
        "GROUP_RANK": str(group.group_rank),
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_NAME": spec.role,
        "LOCAL_WORLD_SIZE": str(spec.local_world_size),
        "WORLD_SIZE": str(worker.world_size),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": str(group.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(generation),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if spec.virtual_local_rank:
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        visible = [name.strip() for name in devices.split(",")] if devices else None
        if visible is not None and worker.local_rank >= len(visible):
            why = f"CUDA_VISIBLE_DEVICES={devices} names {len(visible)}"
            raise LaunchError(f"local rank {worker.local_rank} has no GPU: {why}")
        env["CUDA_VISIBLE_DEVICES"] = str(worker.local_rank) if visible is None else visible[worker.local_rank]
        env["LOCAL_RANK"] = "0"
    return env
