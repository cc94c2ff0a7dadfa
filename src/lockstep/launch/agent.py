"""Supervises the workers of this machine: starts them, sees how they end, and starts them again where that helps.

It stands on torch.distributed.elastic, torchrun's engine: its rendezvous brings several machines together, its contract
says what workers find in their environment, its log files are where torchrun writes them. Starting, waiting, killing
and the decision to restart are lockstep's.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Template
from typing import Any, NamedTuple, final

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.numa.binding import _maybe_wrap_command_args_with_numa_binding as maybe_bind

from lockstep.comm.pulse import NONE, PULSE, Beat, create_pulses, read_pulses
from lockstep.launch.ended import Ended, describe, first_failure, signal_name
from lockstep.launch.fork_server import Start
from lockstep.launch.launch_log import LaunchLog
from lockstep.launch.machines import Machines
from lockstep.launch.out_of_memory import out_of_memory_kills
from lockstep.launch.processes import WorkerProcess, reap_strangers
from lockstep.launch.program import Program
from lockstep.launch.recovery import Cause, Decision, Fault, RestartPolicy, decide, exit_code_of, fault_of, report_of
from lockstep.launch.starter import Starter
from lockstep.launch.stop_signals import StopSignals
from lockstep.launch.watch import Watch, process_states
from lockstep.launch.worker import ERROR_FILE, REQUEUE
from lockstep.launch.workers import Workers, environment_of
from lockstep.observe.post_mortem import post_mortem
from lockstep.observe.process_guard import FLIGHT, STORE
from lockstep.observe.profile.run_facts import ORIGINS
from lockstep.observe.profile.writer import attempt_of
from lockstep.observe.settings import GUARD

_LOOK_S = 0.25  # between two looks at what processes do; their ends are seen at once
_OTHERS_END_S = 300.0  # torchrun's: programs of other machines may end later
_STOPPING_S = 10.0  # beyond the grace: for another machine to hear of it, and to end its processes
_CONSEQUENCE_S = 2.0  # a rank that saw another one fail may be quicker than that one's own end


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
    guard: str = ""  # its mode, for the workers; "": as the environment says
    variables: Mapping[str, str] = field(default_factory=dict)  # more of the workers' environment
    again: str = ""  # command that goes on with the run
    fits: Callable[[int], bool] | None = None  # whether the run can be done by that many processes
    # step of the checkpoint that a start goes on from before it has told of one; NONE: there is none, None: not known
    newest: Callable[[], int | None] = lambda: None
    log: LaunchLog = field(default_factory=LaunchLog)
    origins: Mapping[str, str] = field(default_factory=dict)  # how variables came to their values, where that is known


class _Request(NamedTuple):
    """Somebody wants the run to stop."""

    number: int  # of the signal
    words: str  # that say so


@dataclass
class _Life:
    """One start of the workers, until all have ended."""

    attempt: str  # its name in the record of the run
    workers: Workers
    pulses: Path
    flights: Path
    watch: Watch
    started_s: float
    oom_kills: int
    request: _Request | None = None  # to stop
    shall_stop: bool = False  # the run, now that all have ended
    are_asked_to_end: bool = False  # those that are left, after one failed
    look_s: float = 0.0  # when the watch looks next
    ask_s: float = 0.0  # when the other machines are asked next


@final
class Agent(SimpleElasticAgent):
    """One machine's part of a run."""

    def __init__(
        self,
        spec: WorkerSpec,
        program: Program,
        supervision: Supervision,
        *,
        starter: Starter,
        signals: StopSignals,
        logs_specs: LogsSpecs,
        prefix: str | None,
        folder: Path,
        machines: tuple[int, int],
    ) -> None:
        """machines: the least that the run needs, and the most that may come."""
        super().__init__(spec, shutdown_timeout=0)
        self._program, self._supervision = program, supervision
        self._starter, self._signals = starter, signals
        self._logs_specs, self._prefix, self._folder = logs_specs, prefix, folder
        self._least, self._is_alone = machines[0], machines[1] == 1
        self._machines: Machines | None = None  # of the last start, where there may be several
        self._generation = -1
        self._life: _Life | None = None
        self._history: list[Fault] = []
        self._committed = NONE  # last step of which any start has told that there is a checkpoint
        self.exit_code = 1

    @property
    def newest(self) -> int | None:
        """Step of the checkpoint that another start goes on from; NONE: there is none, None: not known."""
        return self._supervision.newest() if self._committed == NONE else self._committed

    # ------------------------------------------------------------------ the run

    def _invoke_run(self, role: str = "") -> RunResult:
        self._initialize_workers(self._worker_group)  # pyright: ignore[reportCallIssue]
        while True:
            life = self._alive()
            if not self._attend(life):
                self._start_anew()  # machines have come or gone
                continue
            life.workers.close(signal.SIGKILL)  # the last lines are printed before anything is said about them
            ended, beats = self._look_back(life)
            decision = self._decide(ended, beats, life)
            if decision is None or not decision.restart or life.shall_stop:
                return self._end(ended, life, decision)
            self._worker_group.spec.local_world_size = decision.processes
            self._start_anew()

    def leave_early(self) -> None:
        """A signal came before there were workers to pass it on to: let the other machines stop too."""
        if self._machines is not None:
            self._machines.tell_stop(self._signals.arrived[0])
            self._meet(self._machines, self._supervision.grace_s)

    def _start_anew(self) -> None:
        self._restart_workers(self._worker_group)  # pyright: ignore[reportCallIssue] (torch's decorator has no types)

    def _attend(self, life: _Life) -> bool:
        """Wait until all workers have ended, whoever has to be ended for it; False where other machines are waiting."""
        workers, signals = life.workers, self._signals
        deadline_s = float("inf")
        while workers.running():
            handles = [process.handle for process in workers.running().values() if process.handle >= 0]
            signals.wait(handles, max(0.0, min(_LOOK_S, deadline_s - time.monotonic())))
            workers.look()
            self._starter.look()
            reap_strangers([*workers.pids().values(), self._starter.server_pid])
            now_s, beats, was_asked = time.monotonic(), read_pulses(life.pulses), life.request is not None
            self._hear(life, beats)
            if now_s >= deadline_s or signals.count > 1:
                workers.kill()
            elif life.request is None:
                deadline_s = min(deadline_s, self._deadline_s(life, now_s))
            elif not was_asked:  # from now on each has its time to save, whatever becomes of the others
                deadline_s = min(deadline_s, now_s + self._supervision.grace_s)
                self._pass_on(life.request, workers, beats)
            self._look_at_states(life, now_s, beats)
            if life.request is None and self._others_wait(life, now_s):
                return False
        return True

    def _hear(self, life: _Life, beats: list[Beat]) -> None:
        """Find out whether somebody wants the run to stop, and let the other machines know."""
        if life.request is None:
            life.request = self._request(life, beats)
            if life.request is not None and self._machines is not None:
                self._machines.tell_stop(life.request.number)

    def _request(self, life: _Life, beats: list[Beat]) -> _Request | None:
        """Whether somebody has asked the run to stop: us, another machine, or a rank, that has heard or died of it."""
        if self._signals.count:
            return _Request(self._signals.arrived[0], "stopping; once more ends all processes at once")
        told = None if self._machines is None else self._machines.told_stop()
        if told is not None:
            return _Request(told.number, f"{told.host} was asked to stop by {signal_name(told.number)}: stopping")
        if life.are_asked_to_end:
            return None
        for beat in beats:
            if beat.asked:
                return _Request(beat.asked, f"rank {beat.rank} got {signal_name(beat.asked)}: stopping")
        for local, code in life.workers.stopped().items():
            if code != REQUEUE:  # or all ranks have agreed
                number = -code if code < 0 else signal.SIGTERM
                how = f"was ended by {signal_name(number)}" if code < 0 else f"ended with exit code {code}"
                return _Request(number, f"rank {self._ranks()[local]} {how}: stopping")
        return None

    def _pass_on(self, request: _Request, workers: Workers, beats: list[Beat]) -> None:
        bar = "\n" if sys.stderr.isatty() else ""  # rank 0's progress bar stands on the line of the cursor
        say(request.words, bar)
        workers.pass_on(request.number, but=[beat.pid for beat in beats if beat.asked])

    def _others_wait(self, life: _Life, now_s: float) -> bool:
        """True where machines have come that this start has no place for, or one of it has begun anew."""
        spec = self._worker_group.spec
        if self._is_alone or now_s < life.ask_s:
            return False
        life.ask_s = now_s + spec.monitor_interval
        return spec.rdzv_handler.num_nodes_waiting() > 0

    def _deadline_s(self, life: _Life, now_s: float) -> float:
        """Until when the others may go on, now that some have ended."""
        workers, limits = life.workers, self._supervision
        if workers.failed():
            if limits.asks_first and not life.are_asked_to_end:
                life.are_asked_to_end = True
                workers.ask_to_end()
            is_plain = limits.asks_first or workers.cause_is_known()
            return now_s + (limits.failure_grace_s if is_plain else max(_CONSEQUENCE_S, limits.failure_grace_s))
        return now_s + limits.grace_s if workers.stopped() else float("inf")

    def _look_at_states(self, life: _Life, now_s: float, beats: list[Beat]) -> None:
        ranks = self._ranks()
        pids = {ranks[local]: process.pid for local, process in life.workers.running().items()}
        if now_s < life.look_s or not pids:
            return
        life.look_s = now_s + _LOOK_S
        self._supervision.log.flush()
        stuck = life.watch.look(now_s, process_states(pids), beats)
        if stuck is not None:
            what = f"{stuck.what} ({stuck.detail})" if stuck.detail else stuck.what
            life.workers.kill_stuck({local: what for local, rank in ranks.items() if rank in stuck.ranks})

    def _look_back(self, life: _Life) -> tuple[list[Ended], list[Beat]]:
        beats = read_pulses(life.pulses)
        life.pulses.unlink()
        found = post_mortem(life.flights)
        if found:
            sys.stderr.write(found + "\n")
        shutil.rmtree(life.flights)
        self._committed = max([self._committed, *(beat.committed for beat in beats)])
        ended = life.workers.ended(self._ranks(), out_of_memory_kills() > life.oom_kills)
        self._supervision.log.ended(life.attempt, ended, found)
        self._hear(life, beats)
        life.shall_stop = life.request is not None or any(e.was_stopped for e in ended)
        return ended, beats

    def _decide(self, ended: list[Ended], beats: list[Beat], life: _Life) -> Decision | None:
        """What follows from how they ended, said to the user; None where none failed."""
        limits = self._supervision
        lived_s = max(e.at_s for e in ended) - life.started_s
        fault, first = fault_of(ended, beats, self._worker_group.spec.local_world_size, lived_s), first_failure(ended)
        if fault is None or first is None:
            return None
        if first.failure is not None and first.failure.is_consequence:
            if life.shall_stop:
                return None
            if not self._is_alone:
                fault = replace(fault, cause=Cause("the failure of another machine"))  # which decides for itself
        self._history.append(fault)
        decision = decide(limits.policy, self._history, limits.fits)
        told = decision
        if decision.restart and life.shall_stop:
            told = replace(decision, restart=False, why="no restart: the run was asked to stop")
        self._report(ended, beats, first, told)
        return decision

    def _report(self, ended: list[Ended], beats: list[Beat], first: Ended, decision: Decision) -> None:
        limits = self._supervision
        if limits.tells_traces and first.failure is not None and not first.failure.is_expected:
            sys.stderr.write(first.failure.trace)
        if not decision.restart and all(e.failure is not None and e.failure.is_expected for e in ended):
            say(describe(first))  # no rank's own trouble, and no more than its words
            return
        host = "" if self._is_alone else socket.gethostname()
        report = report_of(ended, beats, decision, newest=self.newest, host=host, again=limits.again)
        for line in report.split("\n"):
            say(line)

    def _end(self, ended: list[Ended], life: _Life, decision: Decision | None) -> RunResult:
        """The run is over."""
        failures = life.workers.failures(self._ranks())
        if {e.exit_code for e in ended} <= {0, REQUEUE}:
            failures = {}
        machines = self._machines
        if machines is not None and life.shall_stop and not machines.can_spare_one:
            self._meet(machines, self._supervision.grace_s + _STOPPING_S)
        elif machines is not None and not failures:
            self._meet(machines, _OTHERS_END_S)
        newest = self.newest
        self.exit_code = exit_code_of(ended, decision, newest=newest, will_not_wait=self._signals.count > 1)
        if failures and decision is not None and not decision.restart:
            first = first_failure(ended)
            assert first is not None
            _tell_launcher_above(life.workers.error_files, first, self._ranks())
        elif failures and not any(e.exit_code == REQUEUE for e in ended):
            how = "the processes were ended before they could save" if any(e.was_ended for e in ended) else "stopped"
            say(how if newest in (None, NONE) else f"{how}; the newest checkpoint is that of step {newest}")
        state = WorkerState.FAILED if failures else WorkerState.SUCCEEDED
        self._worker_group.state = state
        well = [rank for rank in self._ranks().values() if rank not in failures]
        return RunResult(state, return_values=dict.fromkeys(well), failures=failures)

    def _meet(self, machines: Machines, limit_s: float) -> None:
        """Wait for the other machines' ends: who holds the store leaves last, and all know of the same checkpoints."""
        self._committed = machines.meet(self._committed, limit_s, self._signals)

    def _ranks(self) -> dict[int, int]:
        return {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}

    def _alive(self) -> _Life:
        assert self._life is not None
        return self._life

    # ------------------------------------------------------------------ what torch's agent asks for

    def _rendezvous(self, worker_group: WorkerGroup) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """torch's, and then all machines agree on the number of this start: their next ones may differ."""
        worker_group.store = self._store = None  # the last start's, whose port may be asked for again
        listening = nullcontext() if self._machines is None else self._machines.listening()
        with self._signals.raising(), listening:  # other machines may never come
            super()._rendezvous(worker_group)  # pyright: ignore[reportCallIssue]
            store: Any
            store, here, machines = worker_group.store, worker_group.group_rank, worker_group.group_world_size
            store.set(f"lockstep/generation/{here}", str(self._generation + 1))
            numbers = store.multi_get([f"lockstep/generation/{machine}" for machine in range(machines or 1)])
        self._generation = max(int(number) for number in numbers)
        if not self._is_alone:
            self._machines = Machines(store, here or 0, machines or 1, self._least)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec, generation = worker_group.spec, self._generation
        pulses, flights = self._folder / f"pulse-{generation}", self._folder / f"flight-{generation}"
        create_pulses(pulses, spec.local_world_size)
        flights.mkdir()
        place = (
            "" if self._is_alone else _place_of(worker_group.store, f"{spec.rdzv_handler.get_run_id()}/{generation}")
        )
        envs = {}
        for worker in worker_group.workers:
            env = environment_of(
                worker,
                worker_group,
                generation=generation,
                max_restarts=spec.max_restarts,
                run_id=spec.rdzv_handler.get_run_id(),
                uses_agent_store=spec.rdzv_handler.use_agent_store,
            )
            if not spec.virtual_local_rank:  # under which no worker knows its place on this machine
                env |= {PULSE: str(pulses), FLIGHT: str(flights), STORE: place}
            env |= self._supervision.variables
            if self._supervision.guard:
                env[GUARD] = self._supervision.guard
            env[ORIGINS] = json.dumps({**dict.fromkeys(env, "launcher"), **self._supervision.origins})
            envs[worker.local_rank] = env
        filters = {
            "duplicate_stdout_filters": spec.duplicate_stdout_filters,
            "duplicate_stderr_filters": spec.duplicate_stderr_filters,
        }
        workers = Workers(spec.role, self._program, envs, self._logs_specs, self._prefixes(worker_group), **filters)
        limits = self._supervision
        watch = Watch(limits.stopped_limit_s, limits.hang_limit_s)
        attempt = attempt_of(next(iter(envs.values())))
        limits.log.attempt(attempt, worker_group.workers[0].world_size, flights)
        self._life = _Life(attempt, workers, pulses, flights, watch, time.monotonic(), out_of_memory_kills())
        workers.start_with(self._start_worker)
        return workers.pids()

    def _start_worker(self, local_rank: int, start: Start) -> WorkerProcess:
        def bind(command: list[str]) -> list[str]:
            options = self._worker_group.spec.numa_options
            words = maybe_bind(tuple(command), gpu_index=local_rank, numa_options=options)
            return list(words)

        return self._starter.start(start, bind)

    def _prefixes(self, worker_group: WorkerGroup) -> dict[int, str] | None:
        if not self._prefix:
            return None
        return {
            worker.local_rank: Template(self._prefix).safe_substitute(
                role_name=worker_group.spec.role, rank=worker.global_rank, local_rank=worker.local_rank
            )
            for worker in worker_group.workers
        }

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        raise AssertionError("_attend() looks at the workers")

    def _shutdown(self, death_sig: signal.Signals = signal.SIGKILL, timeout: int = 0) -> None:
        if self._life is not None:
            self._life.workers.close(signal.SIGKILL)
            self._life = None


def _place_of(store: Any, run: str) -> str:
    """Where this start's guards meet: a corner of the machines' store; "" where that takes no connections."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return f"{store.host}:{store.port}/lockstep/guard/{run}" if isinstance(store, TCPStore) else ""


def _tell_launcher_above(error_files: dict[int, str], first: Ended, ranks: dict[int, int]) -> None:
    """What failed first, where whoever started this launcher looks, as torchrun does."""
    local = next(local for local, rank in ranks.items() if rank == first.rank)
    if ERROR_FILE in os.environ and os.path.exists(error_files[local]):
        get_error_handler().dump_error_file(error_files[local], first.exit_code)


def say(text: str, before: str = "") -> None:
    """One line to the user."""
    sys.stderr.write(f"{before}lockstep: {text}\n")
    sys.stderr.flush()
