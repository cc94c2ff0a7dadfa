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
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from string import Template
from typing import Any, NamedTuple, final

from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError
from torch.numa.binding import _maybe_wrap_command_args_with_numa_binding as maybe_bind

from lockstep.comm.pulse import NONE, PULSE, Beat, create_pulses, read_pulses
from lockstep.errors import LaunchError
from lockstep.launch.ended import Ended, describe, first_failure, signal_name
from lockstep.launch.fork_server import Start
from lockstep.launch.job import Launch
from lockstep.launch.machines import Machines
from lockstep.launch.meeting import Meeting
from lockstep.launch.out_of_memory import out_of_memory_kills
from lockstep.launch.processes import WorkerProcess, reap_strangers
from lockstep.launch.recovery import Cause, Decision, Fault, decide, exit_code_of, fault_of, report_of
from lockstep.launch.starter import Starter
from lockstep.launch.stop_signals import StoppedEarly, StopSignals
from lockstep.launch.watch import Watch, process_states
from lockstep.launch.worker import ERROR_FILE, REQUEUE
from lockstep.launch.workers import Workers, environment_of
from lockstep.observe.board import tell_end
from lockstep.observe.endings import BECAUSE_OF_ANOTHER
from lockstep.observe.post_mortem import post_mortem, words_in
from lockstep.observe.process_guard import FLIGHT, STORE
from lockstep.observe.profile.run_facts import ORIGINS
from lockstep.observe.profile.writer import attempt_of

_LOOK_S = 0.25  # between two looks at what processes do; their ends are seen at once
_OTHERS_END_S = 300.0  # torchrun's: programs of other machines may end later
_STOPPING_S = 10.0  # beyond the grace: for another machine to hear of it, and to end its processes
_CONSEQUENCE_S = 2.0  # a rank that saw another one fail may be quicker than that one's own end


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
    guards: Any = None  # store in which the guards of several machines meet
    told: set[int] = field(default_factory=set)  # ranks whose end the guards know of
    look_s: float = 0.0  # when the watch looks next
    ask_s: float = 0.0  # when the other machines are asked next


@final
class Agent(SimpleElasticAgent):
    """One machine's part of a run."""

    def __init__(
        self,
        job: Launch,
        spec: WorkerSpec,
        starter: Starter,
        signals: StopSignals,
        meeting: Meeting | None,
    ) -> None:
        """meeting: of the machines; None where there is one, or it is not known how they meet."""
        super().__init__(spec, shutdown_timeout=0)
        self._job, self._supervision, self._starter, self._signals = job, job.supervision, starter, signals
        self._least, self._most = job.config.min_nodes, job.config.max_nodes
        self._is_alone = self._most == 1
        self._machines: Machines | None = None  # of the last start, or before it those that wait; where several may be
        self._meeting = meeting
        if meeting is not None and not self._is_alone:
            self._machines = Machines(meeting.store, signals, 0, 1, can_spare_one=self._least < self._most)
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
            self._tell_ends(life)
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
            return _Request(told.number, told.words)
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
        assert self._machines is not None
        return self._machines.ask(spec.rdzv_handler.num_nodes_waiting, 0) > 0

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

    def _tell_ends(self, life: _Life) -> None:
        """Let the guards know how processes ended: they see at most that they did, and on this machine only."""
        if len(life.workers.running()) + len(life.told) == len(life.workers.processes):
            return
        for ended in self._ended(life):
            if ended.rank not in life.told:
                life.told.add(ended.rank)
                how = BECAUSE_OF_ANOTHER if ended.was_ended else describe(ended).partition("\n")[0]
                tell = partial(tell_end, life.flights, ended.rank, how)
                tell(None)
                if self._machines is not None:
                    self._machines.ask(partial(tell, life.guards), None)

    def _ended(self, life: _Life) -> list[Ended]:
        words = words_in(life.flights)
        ended = life.workers.ended(self._ranks(), out_of_memory_kills() > life.oom_kills)
        return [replace(one, words=words.get(one.rank)) for one in ended]

    def _look_back(self, life: _Life) -> tuple[list[Ended], list[Beat]]:
        beats = read_pulses(life.pulses)
        life.pulses.unlink()
        found = post_mortem(life.flights)
        if found:
            sys.stderr.write(found + "\n")
        self._committed = max([self._committed, *(beat.committed for beat in beats)])
        ended = self._ended(life)
        self._supervision.log.ended(life.attempt, ended, found, life.flights)
        shutil.rmtree(life.flights)
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
        if first.is_consequence:
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
        elif machines is not None:
            machines.linger()
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
        self._committed = machines.meet(self._committed, limit_s)

    def _ranks(self) -> dict[int, int]:
        return {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}

    def _alive(self) -> _Life:
        assert self._life is not None
        return self._life

    # ------------------------------------------------------------------ what torch's agent asks for

    def _rendezvous(self, worker_group: WorkerGroup) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """torch's, and then all machines agree on the number of this start: their next ones may differ."""
        worker_group.store = self._store = None  # the last start's, whose port may be asked for again
        join = super()._rendezvous

        def meet() -> list[bytes]:
            join(worker_group)  # pyright: ignore[reportCallIssue]
            if self._meeting is not None:
                self._meeting.begins()
            store: Any = worker_group.store
            store.set(f"lockstep/generation/{worker_group.group_rank}", str(self._generation + 1))
            return store.multi_get([f"lockstep/generation/{n}" for n in range(worker_group.group_world_size or 1)])

        try:
            numbers = self._signals.wait_aside(meet, self._look_around)  # other machines may never come
        except (RendezvousTimeoutError, RendezvousConnectionError, DistError) as error:
            if self._meeting is None or self._machines is None:
                raise
            late = self._machines.ask(self._meeting.late, "")
            if not late and isinstance(error, RendezvousTimeoutError):
                raise
            raise LaunchError(late or self._meeting.ended) from error
        self._generation = max(int(number) for number in numbers)
        if not self._is_alone:
            here, count = worker_group.group_rank or 0, worker_group.group_world_size or 1
            store, can_spare_one = worker_group.store, count > self._least
            run = self._meeting.store if self._meeting is not None and self._least == self._most else None
            self._machines = Machines(store, self._signals, here, count, can_spare_one=can_spare_one, run=run)

    def _look_around(self) -> None:
        """What other machines say while they are awaited.

        Raises: StoppedEarly where one has asked all to stop, LaunchError where they cannot be one run.
        """
        told = None if self._machines is None else self._machines.told_stop()
        if told is not None:
            say(told.words)
            self._signals.arrived.append(told.number)
            raise StoppedEarly
        if self._machines is not None and self._meeting is not None:
            problem = self._machines.ask(self._meeting.problem, "")
            if problem:
                self._machines.linger()
                raise LaunchError(problem)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec, generation = worker_group.spec, self._generation
        pulses, flights = self._job.folder / f"pulse-{generation}", self._job.folder / f"flight-{generation}"
        create_pulses(pulses, spec.local_world_size)
        flights.mkdir()
        prefix = f"lockstep/guard/{spec.rdzv_handler.get_run_id()}/{generation}"
        store = None if self._is_alone else _outermost(worker_group.store)
        if store is None and not self._is_alone:
            say("the guard sees no ranks of other machines: they meet at no address, as --rdzv-endpoint HOST:PORT is")
        place = "" if store is None else f"{store.host}:{store.port}/{prefix}"
        envs = {}
        for worker in worker_group.workers:
            env = environment_of(worker, worker_group, generation)
            if not spec.virtual_local_rank:  # under which no worker knows its place on this machine
                env |= {PULSE: str(pulses), FLIGHT: str(flights), STORE: place}
            env |= self._supervision.variables
            env[ORIGINS] = json.dumps({**dict.fromkeys(env, "launcher"), **self._supervision.origins})
            envs[worker.local_rank] = env
        names = "duplicate_stdout_filters", "duplicate_stderr_filters"
        filters = {name: getattr(spec, name) for name in names}
        logs: LogsSpecs | None = self._job.config.logs_specs
        assert logs is not None
        workers = Workers(spec.role, self._job.program, envs, logs, self._prefixes(worker_group), **filters)
        limits = self._supervision
        watch = Watch(limits.stopped_limit_s, limits.hang_limit_s)
        attempt = attempt_of(next(iter(envs.values())))
        limits.log.attempt(attempt, worker_group.workers[0].world_size, flights)
        self._life = _Life(attempt, workers, pulses, flights, watch, time.monotonic(), out_of_memory_kills())
        self._life.guards = None if store is None else PrefixStore(prefix, store)
        workers.start_with(self._start_worker)
        return workers.pids()

    def _start_worker(self, local_rank: int, start: Start) -> WorkerProcess:
        def bind(command: list[str]) -> list[str]:
            options = self._worker_group.spec.numa_options
            words = maybe_bind(tuple(command), gpu_index=local_rank, numa_options=options)
            return list(words)

        return self._starter.start(start, bind)

    def _prefixes(self, worker_group: WorkerGroup) -> dict[int, str] | None:
        prefix = self._job.config.log_line_prefix_template
        if not prefix:
            return None
        return {
            worker.local_rank: Template(prefix).safe_substitute(
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


def _outermost(store: Any) -> TCPStore | None:
    """The machines' store, in a corner of which their guards meet; None where it takes no connections."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None


def _tell_launcher_above(error_files: dict[int, str], first: Ended, ranks: dict[int, int]) -> None:
    """What failed first, where whoever started this launcher looks, as torchrun does."""
    local = next(local for local, rank in ranks.items() if rank == first.rank)
    if ERROR_FILE in os.environ and os.path.exists(error_files[local]):
        get_error_handler().dump_error_file(error_files[local], first.exit_code)


def say(text: str, before: str = "") -> None:
    """One line to the user."""
    sys.stderr.write(f"{before}lockstep: {text}\n")
    sys.stderr.flush()
