"""One start of this machine's workers: what they find, what is done while they run, and what they have left."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from string import Template
from typing import Any, NamedTuple, final

from torch.numa.binding import _maybe_wrap_command_args_with_numa_binding as maybe_bind

from lockstep.comm.control_groups import out_of_memory_kills
from lockstep.comm.pulse import PULSE, Beat, create_pulses, read_pulses
from lockstep.launch.course import Course, Seen
from lockstep.launch.crash import place_in, stacks_of
from lockstep.launch.ended import Ended, apart, describe, first_failure, with_aborts
from lockstep.launch.fork_server import Start
from lockstep.launch.guards import Guards
from lockstep.launch.job import Launch
from lockstep.launch.machines import Machines
from lockstep.launch.processes import WorkerProcess, reap_strangers
from lockstep.launch.starter import Starter
from lockstep.launch.stop_signals import StopSignals
from lockstep.launch.watch import STOPPED, Watch, process_states
from lockstep.launch.words import say, tell
from lockstep.launch.workers import Workers, environment_of
from lockstep.observe.board import tell_ends
from lockstep.observe.endings import BECAUSE_OF_ANOTHER
from lockstep.observe.hang import FAILING
from lockstep.observe.onlooker import noticed, post_mortem, told_in
from lockstep.observe.process_guard import FLIGHT, STORE
from lockstep.observe.profile.run_facts import ORIGINS
from lockstep.observe.profile.run_record import attempt_of
from lockstep.observe.wording import Finding

_NEWS_S = 2.0  # for what has happened here to be seen from other machines
_LAST_NEWS_S = 4.0  # and to be said there, before the last rank has been ended for it
_FAILING_S = 3.0  # for operations to fail by what has happened elsewhere
_LOOK_S = 0.25  # between two looks at what processes do; their ends are seen at once


class Outcome(NamedTuple):
    """How an attempt has ended."""

    ended: list[Ended]
    beats: list[Beat]
    lived_s: float  # until the last of them ended
    shall_stop: bool  # the run: somebody has asked for it
    given_up: str  # how it has failed on another machine


@final
class Attempt:
    """The workers of one start, until all have ended."""

    def __init__(
        self,
        job: Launch,
        group: Any,
        generation: int,
        starter: Starter,
        signals: StopSignals,
        machines: Machines | None,
        guards: Guards,
    ) -> None:
        """group: torch's, which says who the workers are. generation: number of this start. machines: where several."""
        self._spec, self._limits = group.spec, job.supervision
        self._starter, self._signals, self._machines, self._guards = starter, signals, machines, guards
        self.ranks: dict[int, int] = {worker.local_rank: worker.global_rank for worker in group.workers}
        self._pulses, self._flights = job.folder / f"pulse-{generation}", job.folder / f"flight-{generation}"
        create_pulses(self._pulses, self._spec.local_world_size)
        self._flights.mkdir()
        guards.follow(self._flights)
        envs = {worker.local_rank: self._environment(worker, group, generation) for worker in group.workers}
        logs, prefix = job.config.logs_specs, job.config.log_line_prefix_template
        assert logs is not None
        names = "duplicate_stdout_filters", "duplicate_stderr_filters"
        filters = {name: getattr(self._spec, name) for name in names}
        prefixes = {
            local: Template(prefix).safe_substitute(role_name=self._spec.role, rank=rank, local_rank=local)
            for local, rank in self.ranks.items()
            if prefix
        }
        self.workers = Workers(self._spec.role, job.program, envs, logs, prefixes or None, **filters)
        self._course = Course(self._limits)
        self._watch = Watch(self._limits.stopped_limit_s, self._limits.hang_limit_s)
        self._name = attempt_of(next(iter(envs.values())))  # in the record of the run
        self._limits.log.attempt(self._name, group.workers[0].world_size, self._flights)
        self._started_s, self._oom_kills = time.monotonic(), out_of_memory_kills()
        self._told: set[int] = set()  # ranks whose end the guards know of
        self._stopped: set[int] = set()  # ranks that were, at the last look
        self._lacks_room = False  # where that is written
        self._noticed = ""  # what guards of this machine know of that has been found, on any
        self._given_up, self._heard_s = "", 0.0  # how the run has failed on another machine; since when that is known
        self._look_s = self._ask_s = 0.0  # when the watch looks next, and when the other machines are asked

    def _environment(self, worker: Any, group: Any, generation: int) -> dict[str, str]:
        env = environment_of(worker, group, generation)
        if not self._spec.virtual_local_rank:  # under which no worker knows its place on this machine
            env |= {PULSE: str(self._pulses), FLIGHT: str(self._flights), STORE: self._guards.place}
        env |= self._limits.variables
        env[ORIGINS] = json.dumps({**dict.fromkeys(env, "launcher"), **self._limits.origins})
        return env

    def start(self) -> None:
        """Start the workers. Raises: LaunchError, StoppedEarly; some may run then, until `close`."""
        self.workers.start_with(self._start_worker)
        self._starter.look(self.workers.running().values())

    def _start_worker(self, local_rank: int, start: Start) -> WorkerProcess:
        def bind(command: list[str]) -> list[str]:
            options = self._spec.numa_options
            return list(maybe_bind(tuple(command), gpu_index=local_rank, numa_options=options))

        return self._starter.start(start, bind)

    def close(self) -> None:
        """End the workers, if they have not ended, and print the last of what they wrote."""
        self._guards.close()
        self.workers.close(signal.SIGKILL)
        self._starter.look(self.workers.running().values())

    # ------------------------------------------------------------------ while they run

    def attend(self) -> bool:
        """Wait until all have ended, whoever has to be ended for it; False where other machines are waiting."""
        workers, course, signals = self.workers, self._course, self._signals
        while workers.running():
            handles = [process.handle for process in workers.running().values() if process.handle >= 0]
            signals.wait(handles, max(0.0, min(_LOOK_S, course.deadline_s - time.monotonic())))
            workers.look()
            if workers.failed() and not self._told:
                codes = [process.exit_code for process in workers.processes.values()]
                for _ in range(6 if -signal.SIGKILL in codes else 1):  # who was killed together is told of together
                    time.sleep(0.02)
                    workers.look()
            self._starter.look(workers.running().values())
            reap_strangers(list(workers.pids().values()))
            self._tell_ends()  # before the time begins in which the others say what they saw
            now_s, beats = time.monotonic(), read_pulses(self._pulses)
            self._act(now_s, beats)
            self._look_at_states(now_s, beats)
            if course.request is None and self._others_wait(now_s):
                return False
        self._tell_ends()  # of those that were ended, to other machines
        return True

    def _seen(self, now_s: float, beats: list[Beat]) -> Seen:
        machines = self._machines if self._course.request is None and not self._signals.count else None
        has_failed = self.workers.failed() or self._ends_by_another(now_s)
        told = told_in(self._flights) if has_failed else {}
        left = [told[rank] for local in self.workers.running() if (rank := self.ranks[local]) in told]
        # not every wait fails, as one at a store or of a GPU: then the guard sees it, and finds why
        is_seen = any(one.waiting for one in left) and not noticed(self._flights)
        return Seen(
            now_s,
            tuple(self._signals.arrived),
            None if machines is None else machines.told_stop(),
            {beat.rank: beat.asked for beat in beats if beat.asked},
            {self.ranks[local]: code for local, code in self.workers.stopped().items()},
            has_failed,
            has_failed and self.workers.cause_is_known(),
            is_seen or any(one.activity == FAILING for one in left),
        )

    def _ends_by_another(self, now_s: float) -> bool:
        """Whether a failure elsewhere ends ranks here. Those that wait may fail by it first, in their own words."""
        fails_soon = now_s < self._heard_s + _FAILING_S and self._guards.are_waiting()
        return bool(self._given_up) and not fails_soon

    def _act(self, now_s: float, beats: list[Beat]) -> None:
        heard, act = self._course.look(self._seen(now_s, beats))
        if heard is not None and self._machines is not None:
            self._machines.tell_stop(heard.number)
        if act == "kill":
            self.workers.kill()
        elif act == "ask to end":
            self.workers.ask_to_end()
        elif heard is not None:
            say(heard.words, "\n" if sys.stderr.isatty() else "")  # rank 0's progress bar is on the cursor's line
            self.workers.pass_on(heard.number, but=[beat.pid for beat in beats if beat.asked])

    def _others_wait(self, now_s: float) -> bool:
        """True where machines have come that this start has no place for, or one of it has begun anew.

        One that has given up will not: all ends here too.
        """
        if self._machines is None or now_s < self._ask_s:
            return False
        self._ask_s = now_s + self._spec.monitor_interval
        if not self._given_up and (why := self._machines.given_up()):
            self._given_up, self._heard_s = why, now_s
        return self._machines.ask(self._spec.rdzv_handler.num_nodes_waiting, 0) > 0

    def _look_at_states(self, now_s: float, beats: list[Beat]) -> None:
        pids = {self.ranks[local]: process.pid for local, process in self.workers.running().items()}
        if now_s < self._look_s or not pids:
            return
        self._look_s = now_s + _LOOK_S
        self._limits.log.flush()
        states = process_states(pids)
        stopped = {rank for rank, state in states.items() if state == STOPPED}
        self._guards.tell_ends(dict.fromkeys(stopped - self._stopped))
        self._stopped = stopped
        self._guards.look(now_s)
        stuck = self._watch.look(now_s, states, beats, self._guards.are_waiting)
        if stuck is not None and not self._given_up:
            what = f"{stuck.what} ({stuck.detail})" if stuck.detail else stuck.what
            self.workers.kill_stuck({local: what for local, rank in self.ranks.items() if rank in stuck.ranks})

    def _tell_ends(self) -> None:
        """Let the guards know how processes ended: they see at most that they did, and on this machine only."""
        if len(self.workers.running()) + len(self._told) == len(self.workers.processes):
            return
        ends: dict[int, str] = {}
        for ended in (all_ended := self._ended()):
            if ended.rank not in self._told:
                self._told.add(ended.rank)
                is_asked = ended.was_stopped and (ended.told or self._signals.count)
                how = BECAUSE_OF_ANOTHER if ended.was_ended or is_asked else describe(ended).partition("\n")[0]
                ends[ended.rank] = how + apart(ended, first_failure(all_ended))
        try:
            tell_ends(self._flights, ends)
        except OSError as error:  # the run goes on
            if not self._lacks_room:
                say(f"the guards hear less of how ranks end: {error.strerror}; make room in $TMPDIR")
            self._lacks_room = True
            return
        self._guards.tell_ends(ends)

    # ------------------------------------------------------------------ when all have ended

    def outcome(self) -> Outcome:
        """What has become of them, read from what they left, which is removed. Once, when all have ended."""
        beats = read_pulses(self._pulses)
        self._pulses.unlink()
        ended = self._ended()
        for one in ended:
            if stacks := stacks_of(self._flights, one.rank):
                tell(f"lockstep: rank {one.rank} has left its stacks:\n{stacks}")
        found_here = post_mortem(self._flights)
        found = found_here or self._found_elsewhere(ended)
        if found:
            tell(found + "\n")
        ended = with_aborts(ended, found)
        self._limits.log.ended(self._name, ended, found_here, self._flights, elsewhere=self._given_up)
        self._noticed = noticed(self._flights)
        shutil.rmtree(self._flights)
        heard = self._course.hear(self._seen(time.monotonic(), beats))
        if heard is not None and self._machines is not None:
            self._machines.tell_stop(heard.number)
        shall_stop = self._course.request is not None or any(one.was_stopped for one in ended)
        lived_s = max(one.at_s for one in ended) - self._started_s
        return Outcome(ended, beats, lived_s, shall_stop, self._given_up)

    def _found_elsewhere(self, ended: Sequence[Ended]) -> str:
        """Of ranks that C++ has aborted here before their guards looked: what those of other machines see in that."""
        is_known = any(one.words is not None or one.failure is not None for one in ended)
        if is_known or all(one.exit_code != -signal.SIGABRT for one in ended):
            return ""
        found = Finding.from_json(up) if (up := self._guards.news(_NEWS_S)) else None
        return found.text if found is not None and found.kind == "mismatch" else ""

    def record_news(self, *, is_over: bool) -> None:
        """What a guard of another machine has found stands in the record of this one too. is_over: wait for it."""
        if self._limits.log.folder and (up := self._noticed or self._guards.news(_LAST_NEWS_S * is_over)):
            *place, rank = Finding.from_json(up).said_to.split()
            if int(rank) not in self.ranks.values():
                self._limits.log.found_elsewhere(self._name, json.loads(up), "".join(place[:1]))

    def _ended(self) -> list[Ended]:
        words = {rank: status.words for rank, status in told_in(self._flights).items()}
        ended = self.workers.ended(self.ranks, out_of_memory_kills() > self._oom_kills)
        where = map(place_in, (stacks_of(self._flights, one.rank) for one in ended))
        return [replace(one, words=words.get(one.rank), where=at) for one, at in zip(ended, where, strict=True)]
