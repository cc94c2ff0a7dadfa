"""Whether a run that failed starts again, and on how many ranks: pure functions of what has happened so far.

Every cause of failure has a budget of restarts of its own, which is full again once a later checkpoint is durable than
ever before when this cause struck. What must fail again is not tried again.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from lockstep.comm.pulse import NONE, Beat
from lockstep.launch.ended import Ended, apart, describe, first_failure, signal_name
from lockstep.launch.worker import INTERRUPTED, REQUEUE
from lockstep.observe.replica_diff import alike
from lockstep.observe.wording import names

USER_ERROR = 2  # exit code of a run that was asked for the impossible
OUT_OF_MEMORY = "out of memory"
_AT_START_S = 60.0  # a script that tells no steps and fails this early has finished none
_IN_VAIN = 4  # budgets, of whatever causes: then a run without progress ends
_HOPELESS = {
    "ConfigError": "it was asked for what cannot be done",
    "UnsupportedArgument": "it was asked for what cannot be done",
    "EnvironmentProblems": "its environment has to change first",
    "DataError": "its data have to change first",
    "UnsizedDataset": "its data have to change first",
    "CheckpointMismatch": "the checkpoint is of another model",
    "StaleGeneration": "another run has taken the directory of checkpoints",
}
_NO_RIGHT = re.compile("Permission denied|Read-only file system")
_CANNOT_BE_LOADED = ("SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError")
_NAMED = 8  # ranks, at most, in one line
_HOST_MEMORY = ("DefaultCPUAllocator", "Cannot allocate memory", "std::bad_alloc")


@dataclass(frozen=True)
class Cause:
    """Why a run failed. Equal causes share a budget."""

    kind: str  # "SIGKILL", "out of memory", "ValueError", "no progress for 600 s", "exit code 3"
    where: str = ""  # "train.py:31", for exceptions
    is_exception: bool = False  # the program itself raised: the same again, if it gets the same again

    def __str__(self) -> str:
        return f"{self.kind} at {self.where}" if self.where else self.kind


@dataclass(frozen=True)
class Fault:
    """One failure of a run, as far as decisions depend on it."""

    cause: Cause
    rank: int  # that failed first
    processes: int  # that the run had
    step: int = NONE  # that this rank had finished; NONE: unknown, or none
    committed: int = NONE  # last step of which a checkpoint was durable
    lived_s: float = 0.0  # from the start to the failure
    hopeless: str = ""  # why no restart can help


@dataclass(frozen=True)
class RestartPolicy:
    """What a run may do to go on."""

    max_restarts: int = 3  # per cause, without progress; 0: never
    min_processes: int | None = None  # to which a run may shrink; None: it keeps its number
    shrink_after: int = 2  # failures of one rank for one cause in vain, where the program itself is not at fault
    flag: str = "--max-restarts"  # by which a user allows restarts


@dataclass(frozen=True)
class Decision:
    """What happens after a failure."""

    restart: bool
    processes: int  # of the next start
    why: str  # one sentence without a name at the beginning: "restart 2 of 3 after SIGKILL"
    restarts: int = 0  # that this cause has had since the last progress, this one included


def cause_of(ended: Ended) -> Cause:
    """Why this process failed."""
    said = ended.failure
    if ended.stuck:
        return Cause(re.sub(r" \(rank \d.*\)$", "", ended.stuck))  # how far each rank was is no part of it
    if ended.out_of_memory:
        return Cause(OUT_OF_MEMORY)
    if said is not None:
        if said.kind == "MemoryError" or any(word in said.message for word in _HOST_MEMORY):
            return Cause(OUT_OF_MEMORY)
        kind = "CUDA out of memory" if "CUDA out of memory" in said.message else said.kind
        return Cause(kind, said.where, is_exception=True)
    if ended.was_ended and ended.words is not None:  # it was about to leave
        return Cause(ended.words.kind, ended.words.where)
    if ended.exit_code < 0:
        return Cause(signal_name(-ended.exit_code))
    return Cause(f"exit code {ended.exit_code}")


def fault_of(ended: Sequence[Ended], beats: Sequence[Beat], processes: int, lived_s: float) -> Fault | None:
    """The failure of a run whose processes have all `ended`; None if none failed.

    beats: what the ranks last wrote. lived_s: from the start of the processes to the failure.
    """
    first = first_failure(ended)
    if first is None:
        return None
    step = next((beat.step for beat in beats if beat.rank == first.rank), NONE)
    committed = max((beat.committed for beat in beats), default=NONE)
    return Fault(cause_of(first), first.rank, processes, step, committed, lived_s, _hopeless(first, step))


def decide(policy: RestartPolicy, history: Sequence[Fault], fits: Callable[[int], bool] | None = None) -> Decision:
    """What to do after the last fault of `history`, which holds all of this run, each of the others restarted.

    fits: whether the run can be done by that many processes; None: by any number.
    """
    fault, refused = history[-1], partial(Decision, False, history[-1].processes)
    same = _in_vain([past for past in history if past.cause == fault.cause])
    here = [past for past in same if past.processes == fault.processes]
    if fault.hopeless:
        return refused(f"no restart: {fault.hopeless}")
    if policy.max_restarts < 1:
        return refused(f"no restart: none is allowed ({policy.flag} 0)")
    if fault.cause.is_exception and any(_is_same(fault, past) for past in same[:-1]):
        when = f"after step {fault.step}" if fault.step != NONE else "soon after the start"
        return refused(f"no restart: {fault.cause} came twice {when}, so it would fail again")
    if len(_in_vain(history)) > _IN_VAIN * policy.max_restarts:
        return refused(f"no restart: {_IN_VAIN * policy.max_restarts} restarts have brought no new checkpoint")
    used_up = len(here) > policy.max_restarts
    of_this_rank = sum(past.rank == fault.rank for past in here)
    if not fault.cause.is_exception and (used_up or of_this_rank >= policy.shrink_after):
        fewer = _fewer(policy, fault.processes, fits)
        if fewer:
            whose = f"rank {fault.rank} failed {of_this_rank} times" if of_this_rank > 1 else f"{len(here)} failures"
            why = f"restart with {fewer} processes instead of {fault.processes}: {whose} by {fault.cause}"
            return Decision(True, fewer, why, len(here))
    if used_up:
        why = f"no restart: {policy.max_restarts} of {policy.max_restarts} restarts after {fault.cause} are used up"
        return refused(f"{why}, and no new checkpoint came of them")
    why = f"restart {len(here)} of {policy.max_restarts} after {fault.cause}"
    return Decision(True, fault.processes, why, len(here))


def _in_vain(faults: Sequence[Fault]) -> list[Fault]:
    """The last of `faults`, as far back as none of them had a later checkpoint than those before it."""
    best, since = NONE - 1, 0
    for number, fault in enumerate(faults):
        if fault.committed > best:
            best, since = fault.committed, number
    return list(faults[since:])


def _is_same(fault: Fault, past: Fault) -> bool:
    if fault.step != NONE or past.step != NONE:
        return fault.step == past.step
    return max(fault.lived_s, past.lived_s) < _AT_START_S


def _fewer(policy: RestartPolicy, processes: int, fits: Callable[[int], bool] | None) -> int:
    """The next smaller number that is possible; 0 if there is none."""
    least = processes if policy.min_processes is None else max(1, policy.min_processes)
    numbers = range(processes - 1, least - 1, -1)
    return next((number for number in numbers if fits is None or fits(number)), 0)


def _hopeless(ended: Ended, step: int) -> str:
    said = ended.failure
    if ended.stuck or ended.out_of_memory:
        return ""
    if (ended.exit_code if said is None else said.exit_code) == USER_ERROR:
        return "it was asked for what cannot be done"
    if said is None:
        return ""
    if said.kind in _CANNOT_BE_LOADED and step == NONE:
        return "the program cannot be loaded"
    if _NO_RIGHT.search(said.message.partition("\n")[0]):  # of the rest, a finding says why it has no evidence
        return "it has no right to write there, which has to change first"
    return _HOPELESS.get(said.kind, "")


def exit_code_of(
    ended: Sequence[Ended], decision: Decision | None, *, newest: int | None = NONE, will_not_wait: bool = False
) -> int:
    """Of a run that is over.

    decision: after a failure, what would follow; None where no rank failed by itself. newest: step of the newest
    checkpoint, NONE: there is none, None: not known. will_not_wait: whoever asked the run to stop did so twice.
    """
    codes = {e.exit_code for e in ended}
    if codes <= {0, REQUEUE}:
        return max(codes)
    if decision is not None and not decision.restart:
        first = first_failure(ended)
        return first.failure.exit_code if first is not None and first.failure is not None else 1
    return REQUEUE if not will_not_wait and (REQUEUE in codes or newest not in (None, NONE)) else INTERRUPTED


# ------------------------------------------------------------------ what a person reads


def report_of(
    ended: Sequence[Ended],
    beats: Sequence[Beat],
    decision: Decision,
    *,
    newest: int | None = None,
    host: str = "",
    again: str = "",
) -> str:
    """A few lines: which process failed and how, what was lost, what happens now. "" if none failed.

    newest: step of the newest checkpoint, NONE: there is none, None: not known. again: command that goes on from it.
    """
    first = first_failure(ended)
    if first is None:
        return ""
    steps = {beat.rank: beat.step for beat in beats}
    killed = [one for one in ended if one.exit_code == -signal.SIGKILL and not (one.was_ended or one.stuck)]
    also = [one for one in killed if first in killed and one is not first]
    others = "".join(f"; so was rank {one.rank} (pid {one.pid}){apart(one, first)}" for one in also)
    rest = {one.rank: one.fate for one in ended if one is not first and one not in also}
    for fate, ranks in alike(rest).items():
        who = "the other ranks" if 1 < len(ranks) == len(rest) else names(ranks)
        others += f"; {who} {fate.replace('was ', 'were ') if len(ranks) > 1 else fate}"
    name = f"rank {first.rank} (pid {first.pid}{', ' + host if host else ''})"
    described = f"{name} {describe(first)}"
    if others and "\n" in described:  # at the end of the last line it would read as part of that
        lines = [described, others.removeprefix("; ")]
    else:
        lines = [described.rstrip(".") + others if others else described]
    lines += _lost(steps, newest)
    if decision.restart:
        start = "" if newest is None else ", from the beginning" if newest == NONE else f", from step {newest}"
        lines.append(f"{decision.why}{start} with {_count(decision.processes, 'process')}")
    else:
        lines.append(decision.why + (f"; to go on: {again}" if again and newest != NONE else ""))
    return "\n".join(lines)


def _lost(steps: dict[int, int], newest: int | None) -> list[str]:
    """How far the ranks had come, and what of that no checkpoint holds; nothing where they told no steps."""
    done = {rank: step for rank, step in sorted(steps.items()) if step != NONE}
    if not done:
        return []
    furthest = max(done.values())
    behind = [f"rank {rank}: {step}" for rank, step in done.items() if step < furthest]
    few = f" ({', '.join(behind[:_NAMED])}{', ...' if len(behind) > _NAMED else ''})" if behind else ""
    if newest is None:
        lost = "what came after the last checkpoint"
    elif newest == NONE:
        lost = "all of it, as there is no checkpoint" if furthest else "nothing"
    else:
        lost = f"{_count(max(0, furthest - newest), 'step')} since the checkpoint of step {newest}"
    return [f"finished: step {furthest}{few}; lost: {lost}"]


def _count(number: int, what: str) -> str:
    plural = "es" if what.endswith("s") else "s"
    return f"{number} {what}" if number == 1 else f"{number} {what}{plural}"
