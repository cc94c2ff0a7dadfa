"""Supervises the workers of this machine: starts them, sees how they end, and starts them again where that helps.

It stands on torch.distributed.elastic, torchrun's engine: its rendezvous brings several machines together, its contract
says what workers find in their environment, its log files are where torchrun writes them. Starting, waiting, killing
(attempt.py, course.py) and the decision to restart (recovery.py) are lockstep's.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import replace
from typing import Any, final

from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError

from lockstep.comm.pulse import NONE
from lockstep.errors import LaunchError
from lockstep.launch.attempt import Attempt, Outcome
from lockstep.launch.ended import Ended, first_failure
from lockstep.launch.guards import Guards
from lockstep.launch.job import Launch
from lockstep.launch.machines import Machines
from lockstep.launch.meeting import Meeting
from lockstep.launch.recovery import USER_ERROR, Cause, Decision, Fault, decide, exit_code_of, fault_of, report_of
from lockstep.launch.starter import Starter
from lockstep.launch.stop_signals import StoppedEarly, StopSignals
from lockstep.launch.words import say, tell
from lockstep.launch.worker import ERROR_FILE, REQUEUE
from lockstep.observe.wording import names

_OTHERS_END_S = 300.0  # torchrun's: programs of other machines may end later
_CUT_OFF_S = 30.0  # without an answer of the store, before the start: what may be mended has been
_STOPPING_S = 10.0  # beyond the grace: for another machine to hear of it, and to end its processes


@final
class Agent(SimpleElasticAgent):
    """One machine's part of a run."""

    def __init__(
        self, job: Launch, spec: WorkerSpec, starter: Starter, signals: StopSignals, meeting: Meeting | None
    ) -> None:
        """meeting: of the machines; None where there is one, or it is not known how they meet."""
        super().__init__(spec)
        self._job, self._supervision, self._starter, self._signals = job, job.supervision, starter, signals
        self._least, self._most = job.config.min_nodes, job.config.max_nodes
        self._is_alone = self._most == 1
        self._machines: Machines | None = None  # of the last start, or before it those that wait; where several may be
        self._meeting = meeting
        if meeting is not None and not self._is_alone:
            self._machines = Machines(meeting.store, signals, 0, 1, can_spare_one=self._least < self._most)
        self._heard_s = self._given_up_s = 0.0  # the store, last; when it will be, once it is mute
        self._generation = -1
        self._attempt: Attempt | None = None
        self._history: list[Fault] = []
        self._reported = ""  # of the last failure
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
            attempt = self._attempt
            assert attempt is not None
            if not attempt.attend():
                say("a machine has come, or begun anew: the ranks here begin anew with it")
                self._restart_workers(self._worker_group)  # pyright: ignore[reportCallIssue] - machines came or went
                continue
            attempt.close()  # the last lines are printed before anything is said about them
            outcome = attempt.outcome()
            self._committed = max([self._committed, *(beat.committed for beat in outcome.beats)])
            decision = self._decide(outcome)
            if decision is None or not decision.restart or outcome.shall_stop:
                return self._end(outcome, attempt, decision)
            attempt.record_news(is_over=False)
            self._worker_group.spec.local_world_size = decision.processes
            self._restart_workers(self._worker_group)  # pyright: ignore[reportCallIssue] - no types, by its decorator

    @property
    def is_cut_off(self) -> bool:
        """The other machines cannot be told anything."""
        return self._machines is not None and self._machines.is_mute

    def leave_early(self) -> None:
        """A signal came before there were workers to pass it on to: let the other machines stop too."""
        if self._machines is not None:
            self._machines.tell_stop(self._signals.arrived[0])
            self._meet(self._machines, self._supervision.grace_s)

    def _decide(self, outcome: Outcome) -> Decision | None:
        """What follows from how they ended, said to the user; None where none failed."""
        limits, processes = self._supervision, self._worker_group.spec.local_world_size
        ended, beats, lived_s, shall_stop, given_up = outcome
        fault, first = fault_of(ended, beats, processes, lived_s), first_failure(ended)
        if fault is None or first is None:
            their = [one.rank for one in ended if one.was_ended]
            if shall_stop or not given_up or not their:
                return None
            say(f"{given_up}; {names(their)} {'were' if len(their) > 1 else 'was'} ended by the launcher here")
            return Decision(restart=False, processes=processes, why="")
        if first.is_consequence:
            if shall_stop:
                return None
            if not self._is_alone:
                fault = replace(fault, cause=Cause("the failure of another machine"))  # which decides for itself
        self._history.append(fault)
        decision = decide(limits.policy, self._history, limits.fits)
        if given_up and decision.restart:
            decision = replace(decision, restart=False, why=f"no restart: {given_up}")
        told = decision
        if decision.restart and shall_stop:
            told = replace(decision, restart=False, why="no restart: the run was asked to stop")
        self._report(outcome, first, told)
        return decision

    def _report(self, outcome: Outcome, first: Ended, decision: Decision) -> None:
        limits, ended = self._supervision, outcome.ended
        if limits.tells_traces and first.failure is not None and not first.failure.is_expected:
            tell(first.failure.trace)
        if first.failure is not None and first.failure.is_expected and first.failure.exit_code == USER_ERROR:
            self._reported = first.failure.message
            say(self._reported)  # no rank's own trouble, and no more than its words
            return
        host = "" if self._is_alone else socket.gethostname()
        self._reported = report_of(ended, outcome.beats, decision, newest=self.newest, host=host, again=limits.again)
        for line in self._reported.split("\n"):
            say(line)

    def _end(self, outcome: Outcome, attempt: Attempt, decision: Decision | None) -> RunResult:
        """The run is over."""
        ended, failures = outcome.ended, attempt.workers.failures(attempt.ranks)
        if {e.exit_code for e in ended} <= {0, REQUEUE}:
            failures = {}
        machines = self._machines
        if machines is not None and outcome.shall_stop and not machines.can_spare_one:
            self._meet(machines, self._supervision.grace_s + _STOPPING_S)
        elif machines is not None and not failures:
            self._meet(machines, _OTHERS_END_S)
        elif machines is not None:
            if decision is not None and not outcome.given_up:
                machines.give_up(self._reported.partition("\n")[0])
            attempt.record_news(is_over=not outcome.shall_stop)
            self._part(machines)
        newest = self.newest
        self.exit_code = exit_code_of(ended, decision, newest=newest, will_not_wait=self._signals.count > 1)
        if failures and decision is not None and not decision.restart:
            first = first_failure(ended)
            if first is not None:
                _tell_launcher_above(attempt.workers.error_files, first, attempt.ranks)
        elif failures and (any(e.was_ended for e in ended) or not any(e.exit_code == REQUEUE for e in ended)):
            how, lost = "stopped", ""
            if any(e.was_ended for e in ended):  # they may have saved before, without a word to us
                when = "at once" if self._signals.count > 1 else "when their time was over"
                how, lost = f"the processes were ended {when}", "; what they had not saved is lost"
            say(how + (lost if newest in (None, NONE) else f"; the newest checkpoint is that of step {newest}"))
        state = WorkerState.FAILED if failures else WorkerState.SUCCEEDED
        self._worker_group.state = state
        well = [rank for rank in attempt.ranks.values() if rank not in failures]
        return RunResult(state, return_values=dict.fromkeys(well), failures=failures)

    def _meet(self, machines: Machines, limit_s: float, *, has_failed: bool = False) -> None:
        """Wait for the other machines' ends: who holds the store leaves last, and all know of the same checkpoints."""
        self._committed = machines.meet(self._committed, limit_s, has_failed=has_failed)

    def _part(self, machines: Machines) -> None:
        """All is said, of a run that has failed here."""
        self._meet(machines, self._supervision.failure_grace_s + _STOPPING_S, has_failed=True)

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
            raise LaunchError(late or self._meeting.ended) from error
        self._generation = max(int(number) for number in numbers)
        if not self._is_alone:
            here, count = worker_group.group_rank or 0, worker_group.group_world_size or 1
            store, can_spare_one = worker_group.store, count > self._least
            run = self._meeting.store if self._meeting is not None and self._least == self._most else None
            is_holder = self._meeting is not None and self._meeting.channel.is_holder
            self._machines = Machines(
                store, self._signals, here, count, can_spare_one=can_spare_one, is_holder=is_holder, run=run
            )

    def _look_around(self) -> None:
        """What other machines say while they are awaited.

        Raises: StoppedEarly where one has asked all to stop, LaunchError where they cannot be one run.
        """
        told = None if self._machines is None else self._machines.told_stop()
        if told is not None:
            say(told.words)
            self._signals.arrived.append(told.number)
            raise StoppedEarly
        if self._machines is not None and (why := self._machines.given_up()):
            raise LaunchError(f"no restart: {why}")
        if self._machines is not None and self._meeting is not None:
            now_s, where = time.monotonic(), self._meeting.where
            if not self._machines.is_mute:
                self._heard_s = now_s
            elif self._heard_s:
                say(f"nothing comes back from {where}: up to {_CUT_OFF_S:g} s more")
                self._heard_s, self._given_up_s = 0.0, now_s + _CUT_OFF_S
            elif now_s > self._given_up_s:
                why = "the network is cut, or its machine stands still; `lockstep doctor` tries all ways"
                raise LaunchError(f"nothing has come back from {where}: {why}")
            problem = self._machines.ask(self._meeting.problem, "")
            if problem:
                self._machines.linger()
                raise LaunchError(problem)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        store = None if self._is_alone else _outermost(worker_group.store)
        if store is None and not self._is_alone:
            say("the guard sees no ranks of other machines: they meet at no address, as --rdzv-endpoint HOST:PORT is")
        guards = Guards()
        if store is not None:
            prefix = f"lockstep/guard/{worker_group.spec.rdzv_handler.get_run_id()}/{self._generation}"
            guards = Guards(self._machines, PrefixStore(prefix, store), f"{store.host}:{store.port}/{prefix}")
        machines = self._machines
        try:
            self._attempt = Attempt(
                self._job, worker_group, self._generation, self._starter, self._signals, machines, guards
            )
            self._attempt.start()
        except LaunchError as error:
            if machines is not None:
                machines.give_up(f"{socket.gethostname()} could not start its ranks: {error}")
                self._part(machines)
            raise
        return self._attempt.workers.pids()

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        raise AssertionError("the attempt looks at the workers")

    def _shutdown(self, death_sig: signal.Signals = signal.SIGKILL, timeout: int = 0) -> None:
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None


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
