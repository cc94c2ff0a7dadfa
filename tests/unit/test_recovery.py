"""Whether a run that failed starts again, on how many ranks, and what a person reads about it."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.comm.pulse import NONE, Beat
from lockstep.launch.ended import Ended
from lockstep.launch.recovery import (
    OUT_OF_MEMORY,
    Cause,
    Decision,
    Fault,
    RestartPolicy,
    cause_of,
    decide,
    exit_code_of,
    fault_of,
    report_of,
)
from lockstep.launch.worker import INTERRUPTED, REQUEUE, Failure

KILLED = Cause("SIGKILL")
BAD_LINE = Cause("ValueError", "train.py:31", is_exception=True)
NO_MEMORY = Cause(OUT_OF_MEMORY)


def failure(kind: str = "ValueError", message: str = "bad", **fields: Any) -> Failure:
    values: dict[str, Any] = {"exit_code": 1, "is_expected": False, "is_consequence": False, "time_s": 1.0}
    return Failure(rank=0, kind=kind, message=message, trace="", **{**values, **fields})


def ended(rank: int, exit_code: int, said: Failure | None = None, **fields: Any) -> Ended:
    values: dict[str, Any] = {"was_ended": False, "last_line": "", **fields}
    return Ended(rank, 100 + rank, exit_code, failure=said, **values)


def fault(cause: Cause = KILLED, rank: int = 0, processes: int = 4, **fields: Any) -> Fault:
    return Fault(cause, rank, processes, **fields)


# ------------------------------------------------------------------ causes


@pytest.mark.parametrize(
    ("process", "cause", "text"),
    [
        (ended(0, -9), KILLED, "SIGKILL"),
        (ended(0, -11), Cause("SIGSEGV"), "SIGSEGV"),
        (ended(0, -40), Cause("signal 40"), "signal 40"),
        (ended(0, 3), Cause("exit code 3"), "exit code 3"),
        (ended(0, -9, out_of_memory=True), NO_MEMORY, "out of memory"),
        (ended(0, 1, failure("MemoryError", "MemoryError", where="a.py:1")), NO_MEMORY, "out of memory"),
        (
            ended(0, 1, failure("RuntimeError", "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tr")),
            NO_MEMORY,
            "out of memory",
        ),
        (
            ended(0, 1, failure("OutOfMemoryError", "CUDA out of memory. Tried", where="a.py:7")),
            Cause("CUDA out of memory", "a.py:7", is_exception=True),
            "CUDA out of memory at a.py:7",
        ),
        (ended(0, 1, failure(where="train.py:31")), BAD_LINE, "ValueError at train.py:31"),
        (ended(0, 1, failure()), Cause("ValueError", "", is_exception=True), "ValueError"),
        (
            ended(0, -9, was_ended=True, stuck="no progress for 600 s"),
            Cause("no progress for 600 s"),
            "no progress for 600 s",
        ),
        (
            ended(0, -9, stuck="no progress for 5 s (rank 0: step 4, 29 operations; rank 1: 30 operations)"),
            Cause("no progress for 5 s"),
            "no progress for 5 s",
        ),
        (
            ended(0, 1, failure("PeerLost", is_consequence=True), stuck="stopped (SIGSTOP) for 10 s"),
            Cause("stopped (SIGSTOP) for 10 s"),
            "stopped (SIGSTOP) for 10 s",
        ),
    ],
)
def test_cause(process: Ended, cause: Cause, text: str) -> None:
    assert cause_of(process) == cause
    assert str(cause) == text


def test_fault_is_of_the_first_failure_with_what_was_reached() -> None:
    processes = [ended(0, 1, failure("PeerLost", is_consequence=True)), ended(1, -9), ended(2, 0)]
    beats = [Beat(0, 100, 17, 10, 99), Beat(1, 101, 16, NONE, 98), Beat(2, 102, 17, 12, 97)]
    assert fault_of(processes, beats, 3, 5.5) == Fault(KILLED, 1, 3, 16, 12, 5.5)
    assert fault_of(processes, [], 3, 5.5) == Fault(KILLED, 1, 3, NONE, NONE, 5.5)


@pytest.mark.parametrize("codes", [(0, 0), (REQUEUE, REQUEUE), (INTERRUPTED, INTERRUPTED), (0, REQUEUE)])
def test_ends_are_no_faults(codes: tuple[int, ...]) -> None:
    assert fault_of([ended(rank, code) for rank, code in enumerate(codes)], [], 2, 1.0) is None
    assert report_of([ended(rank, code) for rank, code in enumerate(codes)], [], Decision(False, 2, "")) == ""


# ------------------------------------------------------------------ never again


@pytest.mark.parametrize(
    ("process", "step", "is_hopeless"),
    [
        (ended(0, 2), NONE, True),
        (ended(0, 2), 500, True),
        (ended(0, 2, failure("ConfigError", exit_code=2, is_expected=True)), NONE, True),
        (ended(0, 1, failure("UnsupportedArgument")), 7, True),
        (ended(0, 1, failure("DataError", is_expected=True)), NONE, True),
        (ended(0, 1, failure("StaleGeneration", is_expected=True)), 90, True),
        (ended(0, 1, failure("CheckpointMismatch", is_expected=True)), NONE, True),
        (ended(0, 1, failure("SyntaxError", where="train.py:3")), NONE, True),
        (ended(0, 1, failure("ModuleNotFoundError", where="train.py:3")), NONE, True),
        (ended(0, 1, failure("ModuleNotFoundError", where="train.py:3")), 8, False),
        (ended(0, 1, failure("OSError")), NONE, False),
        (ended(0, 1, failure("CheckpointError", "rank 0: out/.generation-1: Permission denied")), 90, True),
        (ended(0, 1, failure("TrainingError", "cannot write out/a: Read-only file system")), 90, True),
        (ended(0, 1, failure("CheckpointError", "rank 0: No space left on device")), 90, False),
        (ended(0, 1, failure("ReplicaDrift", "REPLICAS\nNo evidence in .lockstep: Permission denied")), 90, False),
        (ended(0, 1), NONE, False),
        (ended(0, -9), NONE, False),
        (ended(0, 2, stuck="no progress for 5 s"), NONE, False),
    ],
)
def test_what_must_fail_again_is_never_tried_again(process: Ended, step: int, is_hopeless: bool) -> None:
    found = fault_of([process], [Beat(0, 100, step, count=1)], 1, 1.0)
    assert found is not None
    assert bool(found.hopeless) == is_hopeless
    decision = decide(RestartPolicy(max_restarts=1000), [found])
    assert decision.restart != is_hopeless
    assert decision.why.startswith("no restart: " if is_hopeless else "restart 1 of 1000")


def test_same_exception_after_the_same_step_is_not_tried_a_third_time() -> None:
    policy = RestartPolicy(max_restarts=10)
    here, later = fault(BAD_LINE, step=7), fault(BAD_LINE, step=8)
    assert decide(policy, [here]).restart
    assert decide(policy, [here, later]).restart
    assert decide(policy, [here, fault(step=7)]).restart
    last = decide(policy, [here, fault(step=3), fault(BAD_LINE, rank=2, step=7)])
    assert last == Decision(
        False, 4, "no restart: ValueError at train.py:31 came twice after step 7, so it would fail again"
    )


def test_exception_of_a_script_that_tells_no_steps() -> None:
    policy = RestartPolicy(max_restarts=10)
    soon, late = fault(BAD_LINE, lived_s=9.0), fault(BAD_LINE, lived_s=9_000.0)
    assert decide(policy, [soon, late]).restart
    assert decide(policy, [late, late]).restart
    assert decide(policy, [soon, soon]).why.endswith("came twice soon after the start, so it would fail again")


# ------------------------------------------------------------------ the budget


def test_budget_is_per_cause_and_full_again_after_progress() -> None:
    policy = RestartPolicy(max_restarts=2)
    other = Cause("SIGSEGV")
    history = [fault(committed=10), fault(committed=10), fault(other, committed=10), fault(other, committed=10)]
    assert [decide(policy, history[: n + 1]).restarts for n in range(4)] == [1, 2, 1, 2]
    ended_by = decide(policy, [*history, fault(committed=10)])
    assert not ended_by.restart
    assert "2 of 2 restarts after SIGKILL are used up" in ended_by.why
    assert decide(policy, [*history, fault(committed=11)]).restarts == 1
    assert not decide(policy, [*history, fault(committed=NONE)]).restart, "it failed before it had loaded"


def test_progress_is_counted_from_the_latest_checkpoint_ever() -> None:
    """A run that falls back behind a damaged checkpoint and comes to it again has gained nothing."""
    policy = RestartPolicy(max_restarts=3)
    history = [fault(committed=c) for c in (20, 10, 20)]
    assert [decide(policy, history[: n + 1]).restarts for n in range(3)] == [1, 2, 3]
    assert not decide(policy, [*history, fault(committed=20)]).restart


def test_no_restart_where_none_is_allowed() -> None:
    decision = decide(RestartPolicy(max_restarts=0), [fault()])
    assert not decision.restart
    assert decision.why == "no restart: none is allowed (--max-restarts 0)"
    assert "(--restarts 0)" in decide(RestartPolicy(0, flag="--restarts"), [fault()]).why


def test_many_causes_in_turn_do_not_make_a_run_endless() -> None:
    policy = RestartPolicy(max_restarts=2)
    history = [fault(Cause(f"exit code {n}"), committed=5) for n in range(10, 19)]
    assert all(decide(policy, history[: n + 1]).restart for n in range(8))
    assert decide(policy, history) == Decision(False, 4, "no restart: 8 restarts have brought no new checkpoint")


# ------------------------------------------------------------------ fewer processes


def even(processes: int) -> bool:
    return processes in (1, 2, 4, 8)


def test_rank_that_dies_again_and_again_leaves_a_smaller_run() -> None:
    policy = RestartPolicy(max_restarts=3, min_processes=2)
    history = [fault(NO_MEMORY, rank=3)]
    assert decide(policy, history, even).processes == 4
    history.append(fault(NO_MEMORY, rank=3))
    decision = decide(policy, history, even)
    assert (decision.restart, decision.processes) == (True, 2)
    assert decision.why == "restart with 2 processes instead of 4: rank 3 failed 2 times by out of memory"
    history.append(fault(NO_MEMORY, rank=1, processes=2))
    assert decide(policy, history, even).restarts == 1, "fewer processes have a budget of their own"
    history.append(fault(NO_MEMORY, rank=1, processes=2))
    assert decide(policy, history, even).processes == 2, "not below the smallest number"
    assert decide(policy, history[:2], lambda n: n != 3).processes == 2
    assert decide(policy, history[:2]).processes == 3
    assert decide(replace(policy, min_processes=None), history[:2], even).processes == 4


def test_budget_that_is_used_up_by_different_ranks_leaves_a_smaller_run_too() -> None:
    policy = RestartPolicy(max_restarts=2, min_processes=1)
    history = [fault(rank=rank) for rank in (0, 1, 2)]
    assert [decide(policy, history[: n + 1], even).processes for n in range(3)] == [4, 4, 2]
    assert decide(policy, history, even).why == "restart with 2 processes instead of 4: 3 failures by SIGKILL"
    assert not decide(policy, history, lambda n: False).restart
    history += [fault(rank=rank, processes=2) for rank in (0, 1, 0)]
    assert [decide(policy, history[: n + 1], even).processes for n in (3, 4, 5)] == [2, 2, 1]


def test_exception_of_the_program_is_no_reason_for_fewer_processes() -> None:
    policy = RestartPolicy(max_restarts=2, min_processes=1)
    history = [fault(BAD_LINE, step=step) for step in (1, 2, 3)]
    assert [decide(policy, history[: n + 1]).processes for n in range(3)] == [4, 4, 4]
    assert not decide(policy, history).restart


# ------------------------------------------------------------------ the exit code

AGAIN, NEVER = Decision(True, 2, "restart"), Decision(False, 2, "no restart")
LOST_PEER = ended(0, 1, failure("PeerLost", is_consequence=True))


@pytest.mark.parametrize(
    ("processes", "decision", "newest", "code"),
    [
        ([ended(0, 0), ended(1, 0)], None, NONE, 0),
        ([ended(0, REQUEUE), ended(1, 0)], None, NONE, REQUEUE),
        ([LOST_PEER, ended(1, REQUEUE)], None, None, REQUEUE),
        ([LOST_PEER, ended(1, -15)], None, NONE, INTERRUPTED),
        ([LOST_PEER, ended(1, -15)], None, None, INTERRUPTED),
        ([LOST_PEER, ended(1, -15)], None, 0, REQUEUE),
        ([ended(0, INTERRUPTED), ended(1, 0)], None, 8, REQUEUE),
        ([ended(0, -9, was_ended=True), ended(1, INTERRUPTED)], None, 8, REQUEUE),
        ([ended(0, INTERRUPTED), ended(1, -9)], AGAIN, 8, REQUEUE),
        ([ended(0, INTERRUPTED), ended(1, -9)], NEVER, 8, 1),
        ([ended(0, REQUEUE), ended(1, 2, failure("ConfigError", exit_code=2))], NEVER, 8, 2),
        ([ended(0, 1), ended(1, -9, was_ended=True)], NEVER, NONE, 1),
    ],
)
def test_exit_code_of_a_run(processes: list[Ended], decision: Decision | None, newest: int | None, code: int) -> None:
    assert exit_code_of(processes, decision, newest=newest) == code
    if code == REQUEUE and any(e.exit_code not in (0, REQUEUE) for e in processes):
        assert exit_code_of(processes, decision, newest=newest, will_not_wait=True) == INTERRUPTED


# ------------------------------------------------------------------ for any history

CAUSES = st.one_of(
    st.sampled_from([KILLED, NO_MEMORY, BAD_LINE, Cause("SIGSEGV")]),
    st.builds(lambda line: Cause("OSError", f"data.py:{line}", is_exception=True), st.integers(1, 1000)),
)
POLICIES = st.builds(
    RestartPolicy,
    max_restarts=st.integers(0, 5),
    min_processes=st.one_of(st.none(), st.integers(1, 8)),
    shrink_after=st.integers(2, 4),
)


@st.composite
def next_faults(draw: st.DrawFn, gains: int) -> Fault:
    """One that comes `gains` checkpoints after the last, for a run of some number of processes."""
    step = draw(st.one_of(st.just(NONE), st.integers(0, 50)))
    return Fault(draw(CAUSES), draw(st.integers(0, 7)), 0, step, gains, draw(st.sampled_from([1.0, 1e5])))


def run_on(policy: RestartPolicy, faults: list[Fault]) -> tuple[list[Fault], list[Decision]]:
    """What happens to a run of 8 processes, one fault after the other; their `committed` are gains over the last."""
    history: list[Fault] = []
    decisions: list[Decision] = []
    processes, committed = 8, NONE
    for found in faults:
        committed += found.committed
        history.append(replace(found, rank=found.rank % processes, processes=processes, committed=committed))
        decisions.append(decide(policy, tuple(history), even))
        if not decisions[-1].restart:
            break
        processes = decisions[-1].processes
    return history, decisions


@settings(max_examples=50)
@given(POLICIES, st.lists(next_faults(0), min_size=21, max_size=21))
def test_no_run_is_restarted_for_ever_without_a_new_checkpoint(policy: RestartPolicy, faults: list[Fault]) -> None:
    _, decisions = run_on(policy, faults)
    assert not decisions[-1].restart
    assert len(decisions) <= 4 * policy.max_restarts + 1


@given(POLICIES, st.lists(st.one_of(next_faults(0), next_faults(1)), max_size=30))
def test_invariants_of_any_run(policy: RestartPolicy, faults: list[Fault]) -> None:
    history, decisions = run_on(policy, faults)
    processes = [past.processes for past in history]
    assert processes == sorted(processes, reverse=True)
    for number, decision in enumerate(decisions):
        past = history[: number + 1]
        assert even(decision.processes)
        assert decision.processes == 8 or decision.processes >= (policy.min_processes or 8)
        assert decision == decide(policy, past, even), "it depends on nothing else"
        assert decision.restarts <= policy.max_restarts + 1
        if policy.max_restarts and all(p.committed < past[-1].committed for p in past[:-1]):
            assert decision.restart, "after progress, the first failure is always forgiven"
        if decision.restart:
            assert decide(replace(policy, max_restarts=policy.max_restarts + 1), past, even).restart
        hopeless = [*past[:-1], replace(past[-1], hopeless="it says why")]
        assert not decide(policy, hopeless, even).restart


@given(POLICIES.filter(lambda policy: policy.max_restarts > 0), CAUSES, st.integers(1, 8), st.integers(NONE, 9))
def test_a_single_failure_is_always_restarted_on_as_many(
    policy: RestartPolicy, cause: Cause, processes: int, step: int
) -> None:
    decision = decide(policy, [Fault(cause, 0, processes, step)], even)
    assert (decision.restart, decision.processes, decision.restarts) == (True, processes, 1)


@given(st.integers(1, 3), st.integers(1, 300))
def test_thousand_kills_with_progress_between_them_are_survived(max_restarts: int, kills: int) -> None:
    history = [fault(committed=n // max_restarts) for n in range(kills)]
    assert decide(RestartPolicy(max_restarts=max_restarts), history).restart


# ------------------------------------------------------------------ the report


def test_report_of_a_kill() -> None:
    processes = [ended(0, 1, failure("PeerLost", is_consequence=True)), ended(1, -signal.SIGKILL)]
    beats = [Beat(0, 100, 121, 100, 9), Beat(1, 101, 120, NONE, 9)]
    decision = decide(RestartPolicy(), [fault(processes=2, committed=100)])
    assert report_of(processes, beats, decision, newest=100, host="node-3").splitlines() == [
        "rank 1 (pid 101, node-3) was killed by SIGKILL; rank 0 left because of it",
        "finished: step 121 (rank 1: 120); lost: 21 steps since the checkpoint of step 100",
        "restart 1 of 3 after SIGKILL, from step 100 with 2 processes",
    ]


_LOST = failure("PeerLost", is_consequence=True)


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ([ended(0, -9)], "; so was rank 0 (pid 100), 1.00 s after rank 1"),
        ([ended(0, -9, at_s=-0.995)], "; so was rank 0 (pid 100)"),  # at once, as far as one can see
        (
            [ended(0, -9), ended(2, 1, _LOST)],
            "; so was rank 0 (pid 100), 1.00 s after rank 1; rank 2 left because of it",
        ),
        ([ended(0, -9, _LOST, was_ended=True)], "; rank 0 was ended by the launcher"),
        (
            [ended(0, -9, was_ended=True), ended(2, 0)],
            "; rank 0 was ended by the launcher; rank 2 ended with exit code 0",
        ),
        ([ended(0, -9, was_ended=True), ended(2, -15, was_ended=True)], "; the other ranks were ended by the launcher"),
        ([ended(rank, 1, _LOST) for rank in (0, 2, 3)], "; the other ranks left because of it"),
        (
            [ended(0, 1, failure()), ended(2, 3), ended(3, -9, was_ended=True), ended(4, REQUEUE), ended(5, 1, _LOST)],
            "; ranks 0,2 failed too; rank 3 was ended by the launcher; rank 4 stopped; rank 5 left because of it",
        ),
        ([], ""),
    ],
)
def test_report_names_all_that_were_killed_and_nobody_whom_the_launcher_has_ended(
    others: list[Ended], text: str
) -> None:
    said = report_of([ended(1, -9, at_s=-1.0), *others], [], Decision(False, 2, "no restart: none is allowed"))
    assert said.splitlines()[0] == f"rank 1 (pid 101) was killed by SIGKILL{text}"


def test_report_does_not_name_with_a_rank_that_hung_one_that_was_killed() -> None:
    processes = [ended(0, -9, at_s=2.0), ended(1, -9, stuck="stopped (SIGSTOP) for 10 s", at_s=1.0)]
    said = report_of(processes, [], Decision(False, 2, "no restart: none is allowed"))
    assert "so was" not in said
    assert said.startswith("rank 1 (pid 101) ")


@pytest.mark.parametrize(
    ("message", "lines"),
    [
        ("no device.", ["ValueError: no device; rank 1 failed too"]),
        ("got None, expected\n * a device", ["ValueError: got None, expected", " * a device", "rank 1 failed too"]),
    ],
)
def test_report_keeps_what_the_others_did_apart_from_the_error(message: str, lines: list[str]) -> None:
    processes = [ended(0, 1, failure(message=message)), ended(1, 1, failure(time_s=2.0))]
    said = report_of(processes, [], Decision(False, 1, "")).splitlines()[: len(lines)]
    assert said == [f"rank 0 (pid 100) failed: {lines[0]}", *lines[1:]]


def test_report_of_an_exception_that_ends_the_run() -> None:
    process = ended(0, 1, failure(where="train.py:31"))
    decision = Decision(False, 1, "no restart: none is allowed (--max-restarts 0)")
    said = report_of([process], [Beat(0, 100, 1, NONE, 9)], decision, newest=NONE, again="lockstep run train.py")
    assert said.splitlines() == [
        "rank 0 (pid 100) failed at train.py:31: ValueError: bad",
        "finished: step 1; lost: all of it, as there is no checkpoint",
        "no restart: none is allowed (--max-restarts 0)",  # nothing is there to go on from
    ]
    said = report_of([process], [Beat(0, 100, 9, 8, 9)], decision, newest=8, again="lockstep run train.py")
    assert said.splitlines()[-1] == f"{decision.why}; to go on: lockstep run train.py"


def test_report_of_a_script_that_tells_nothing_and_of_one_that_lost_nothing() -> None:
    decision = Decision(True, 1, "restart 1 of 3 after out of memory", 1)
    oom = ended(0, -9, out_of_memory=True)
    assert report_of([oom], [Beat(0, 100)], decision).splitlines() == [
        "rank 0 (pid 100) was killed by the kernel: out of memory",
        "restart 1 of 3 after out of memory with 1 process",
    ]
    assert report_of([oom], [Beat(0, 100)], decision, newest=NONE).splitlines()[1:] == [
        "restart 1 of 3 after out of memory, from the beginning with 1 process",
    ]
    assert report_of([oom], [Beat(0, 100, 4)], decision).splitlines()[1:] == [
        "finished: step 4; lost: what came after the last checkpoint",
        "restart 1 of 3 after out of memory with 1 process",
    ]
    assert report_of([oom], [Beat(0, 100, 40, NONE, 3)], decision, newest=40).splitlines()[1:] == [
        "finished: step 40; lost: 0 steps since the checkpoint of step 40",
        "restart 1 of 3 after out of memory, from step 40 with 1 process",
    ]


def test_report_of_a_hang_names_who_was_behind() -> None:
    processes = [ended(0, -9, was_ended=True), ended(1, -9, was_ended=True, stuck="no progress for 600 s")]
    beats = [Beat(0, 100, 8, 6, 9), Beat(1, 101, 8, 6, 7)]
    said = report_of(processes, beats, Decision(True, 2, "restart 1 of 3 after no progress for 600 s", 1), newest=6)
    assert said.splitlines()[0] == (
        "rank 1 (pid 101) was ended by its launcher: no progress for 600 s; rank 0 was ended by the launcher"
    )
    assert said.splitlines()[1] == "finished: step 8; lost: 2 steps since the checkpoint of step 6"


def test_report_of_many_ranks_stays_short() -> None:
    beats = [Beat(rank, 100 + rank, 50 - rank, 30, 9) for rank in range(64)]
    said = report_of([ended(rank, -9) for rank in range(64)], beats, Decision(True, 64, "restart 1 of 3", 1), newest=30)
    assert "finished: step 50 (rank 1: 49, " in said
    assert "rank 8: 42, ...); lost: 20 steps" in said
