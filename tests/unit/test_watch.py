"""Processes that live but do nothing are noticed, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.control_groups import out_of_memory_kills
from lockstep.comm.pulse import Beat
from lockstep.comm.waiting import wait_until
from lockstep.launch.watch import Stuck, Watch, _states_by_ps, process_states

RUNNING = {0: "R", 1: "S", 2: "S"}


def beats(*counts: int, step: int = 5) -> list[Beat]:
    return [Beat(rank, 100 + rank, step=step, count=count) for rank, count in enumerate(counts)]


# ------------------------------------------------------------------ stopped


def test_stopped_process_is_stuck_at_its_limit_and_not_before() -> None:
    watch = Watch(stopped_limit_s=10)
    states = {0: "S", 1: "T", 2: "R"}
    assert [watch.look(float(s), states, []) for s in range(10)] == [None] * 10
    assert watch.look(10.0, states, []) == Stuck((1,), "stopped (SIGSTOP) for 10 s")


def test_time_of_being_stopped_begins_anew_when_it_runs_in_between() -> None:
    watch = Watch(stopped_limit_s=10)
    for second in range(100):
        state = "R" if second % 10 == 0 else "T"
        assert watch.look(float(second), {0: state}, []) is None
    watch.look(100.0, {0: "R"}, [])
    stuck = [watch.look(101.0 + s, {0: "T", 1: "T" if s > 2 else "R"}, []) for s in range(14)]
    assert stuck[:10] == [None] * 10
    assert stuck[10] == Stuck((0,), "stopped (SIGSTOP) for 10 s")
    assert stuck[13] == Stuck((0, 1), "stopped (SIGSTOP) for 10 s")


def test_process_at_a_debugger_may_stay() -> None:
    watch = Watch(stopped_limit_s=10, hang_limit_s=20)
    for second in range(1000):
        assert watch.look(float(second), {0: "t", 1: "S"}, beats(3, 3)) is None


@pytest.mark.parametrize("state", list("RSDIZXWP"))
def test_no_other_state_is_a_stop(state: str) -> None:
    watch = Watch(stopped_limit_s=1)
    for second in range(50):
        assert watch.look(float(second), {0: state}, []) is None


# ------------------------------------------------------------------ no progress


def test_silence_of_all_ranks_is_a_hang_and_the_one_behind_is_named() -> None:
    watch = Watch(hang_limit_s=60)
    for second in range(30):
        assert watch.look(float(second), RUNNING, beats(second, second, second)) is None
    found = [watch.look(30.0 + second, RUNNING, beats(29, 27, 29)) for second in range(61)]
    assert found[:60] == [None] * 60
    detail = "rank 0: step 5, 29 operations; rank 1: step 5, 27 operations; rank 2: step 5, 29 operations"
    assert found[60] == Stuck((1,), "no progress for 60 s", detail)


def test_step_counts_before_operations_and_equal_ranks_are_all_named() -> None:
    def stuck(said: list[Beat]) -> tuple[int, ...]:
        watch = Watch(hang_limit_s=4)
        watch.look(0.0, RUNNING, said)
        watch.look(4.0, RUNNING, said)
        found = watch.look(8.0, RUNNING, said)
        assert found is not None
        return found.ranks

    assert stuck([Beat(0, 1, 4, count=99), Beat(1, 2, 5, count=3), Beat(2, 3, 5, count=3)]) == (0,)
    assert stuck(beats(7, 7, 7)) == (0, 1, 2)


def test_silence_of_ranks_that_wait_for_another_machine_is_left_to_its_launcher_for_a_while() -> None:
    for is_elsewhere, limit_s in ((True, 65), (False, 60)):
        watch = Watch(hang_limit_s=60)
        found = [watch.look(float(s), RUNNING, beats(3, 3, 3), lambda says=is_elsewhere: says) for s in range(66)]
        assert found[:limit_s] == [None] * limit_s
        assert found[limit_s] is not None


def test_one_rank_that_gets_on_keeps_all_alive() -> None:
    watch = Watch(hang_limit_s=5)
    for second in range(500):
        assert watch.look(float(second), RUNNING, beats(1, second // 4, 1)) is None


def test_before_the_first_sign_of_life_nothing_is_a_hang() -> None:
    watch = Watch(hang_limit_s=5)
    silent = [Beat(0, 1), Beat(1, 2)]
    for second in range(500):
        assert watch.look(float(second), RUNNING, silent if second > 50 else []) is None


def test_rank_that_others_wait_for_is_stuck_without_any_sign_of_life() -> None:
    """Of stock torch's operations the launcher knows nothing: a guard has said that this is a hang."""
    watch = Watch(hang_limit_s=60)
    for count in (0, 9):  # also where another rank gives one
        said = [Beat(0, 1, count=count), Beat(1, 2, stuck_s=59)]
        assert watch.look(float(count), RUNNING, said) is None
        said = [Beat(0, 1, count=count + 1), Beat(1, 2, stuck_s=60)]
        assert watch.look(count + 1.0, RUNNING, said) == Stuck((1,), "no progress for 60 s")
    assert watch.look(20.0, {0: "S"}, said) is None  # it has ended since
    assert Watch(hang_limit_s=0).look(0.0, RUNNING, said) is None


def test_zero_is_never() -> None:
    watch = Watch(stopped_limit_s=0, hang_limit_s=0)
    for second in range(0, 100_000, 4):
        assert watch.look(float(second), {0: "T", 1: "S"}, beats(3, 2)) is None


def test_time_in_which_nobody_looked_is_no_evidence() -> None:
    """The machine slept, or a Ctrl-Z stopped the launcher and all ranks together."""
    watch = Watch(stopped_limit_s=10, hang_limit_s=60)
    watch.look(0.0, RUNNING, beats(1, 1, 1))
    watch.look(1.0, RUNNING, beats(2, 2, 2))
    stopped = {0: "T", 1: "T", 2: "T"}
    assert watch.look(2.0, stopped, beats(2, 2, 2)) is None
    assert watch.look(50_000.0, stopped, beats(2, 2, 2)) is None
    assert watch.look(50_001.0, RUNNING, beats(2, 2, 2)) is None
    assert watch.look(50_002.0, RUNNING, beats(3, 2, 2)) is None


@given(
    st.lists(st.tuples(st.floats(0.01, 30.0), st.sampled_from("RSTtZ"), st.integers(0, 1)), max_size=60),
    st.floats(1.0, 40.0),
    st.floats(1.0, 40.0),
)
def test_no_alarm_without_that_much_evidence(
    looks: list[tuple[float, str, int]], stopped_limit_s: float, hang_limit_s: float
) -> None:
    """Compared with the plain definition: the last looks, in a row, all stopped (or all silent), cover the limit."""
    watch = Watch(stopped_limit_s, hang_limit_s)
    now_s, count, stopped_s, silent_s = 0.0, 0, None, None
    for gap_s, state, more in looks:
        now_s, count = now_s + gap_s, count + more
        seen_s = min(gap_s, 5.0)
        stopped_s = None if state != "T" else 0.0 if stopped_s is None else stopped_s + seen_s
        silent_s = None if more or not count or state == "t" else seen_s if silent_s is None else silent_s + seen_s
        found = watch.look(now_s, {0: state}, [Beat(0, 1, count=count)])
        if stopped_s is not None and stopped_s >= stopped_limit_s + 1e-6:
            assert found is not None
            assert "SIGSTOP" in found.what
        elif silent_s is not None and silent_s >= hang_limit_s + 1e-6:
            assert found is not None
        elif (stopped_s or 0.0) < stopped_limit_s - 1e-6 and (silent_s or 0.0) < hang_limit_s - 1e-6:
            assert found is None


# ------------------------------------------------------------------ looking


@contextmanager
def child(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def both_ways(pid: int) -> set[str]:
    """The state as both ways of looking see it."""
    return {process_states({7: pid}).get(7, ""), _states_by_ps([pid]).get(pid, "")}


def test_state_of_a_real_process_is_seen_through_its_life(tmp_path: Path) -> None:
    program = tmp_path / "x) T 1"  # what it is called must not be taken for its state
    program.symlink_to("/bin/sleep")
    watch = Watch(stopped_limit_s=10)
    with child(str(program), "1000") as process:
        assert wait_until(lambda: both_ways(process.pid) == {"S"}, 20)
        process.send_signal(signal.SIGSTOP)
        assert wait_until(lambda: both_ways(process.pid) == {"T"}, 20)
        states = process_states({3: process.pid, 4: 2**22 + 1})  # the second cannot exist
        assert [watch.look(s, states, []) for s in (0.0, 5.0)] == [None, None]
        assert watch.look(10.0, states, []) == Stuck((3,), "stopped (SIGSTOP) for 10 s")
        process.send_signal(signal.SIGCONT)
        assert wait_until(lambda: both_ways(process.pid) == {"S"}, 20)
        os.kill(process.pid, signal.SIGKILL)
        assert wait_until(lambda: both_ways(process.pid) == {"Z"}, 20)
    assert both_ways(process.pid) == {""}
    assert _states_by_ps([]) == {}


def test_process_that_a_debugger_holds_is_told_from_a_stopped_one() -> None:
    traced = """
import ctypes, os, signal
if ctypes.CDLL(None).ptrace(0, 0, 0, 0):
    raise SystemExit(77)
os.kill(os.getpid(), signal.SIGSTOP)
"""
    with child(sys.executable, "-c", traced) as process:
        assert wait_until(lambda: both_ways(process.pid) <= {"t", "Z"}, 20)
        if both_ways(process.pid) == {"Z"}:
            pytest.skip("this machine does not let processes be traced")
        os.waitpid(process.pid, 0)  # its stop, which is told to who traces it


# ------------------------------------------------------------------ out of memory


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_kernels_count_of_kills_is_found_wherever_it_is(tmp_path: Path) -> None:
    assert out_of_memory_kills() >= 0
    assert out_of_memory_kills(tmp_path) == 0
    write(tmp_path / "proc/vmstat", "pgfault 12\noom_kill 3\n")
    assert out_of_memory_kills(tmp_path) == 3
    write(tmp_path / "proc/self/cgroup", "9:name=systemd:/a\n4:cpu,memory:/job/7\n0::/user/x:y\n")
    assert out_of_memory_kills(tmp_path) == 3
    write(tmp_path / "sys/fs/cgroup/memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    assert out_of_memory_kills(tmp_path) == 4, "inside a container the group is the root"
    write(tmp_path / "sys/fs/cgroup/memory/job/7/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    assert out_of_memory_kills(tmp_path) == 5
    write(tmp_path / "proc/self/cgroup", "0::/user/x:y\n")
    assert out_of_memory_kills(tmp_path) == 3
    write(tmp_path / "sys/fs/cgroup/user/x:y/memory.events", "low 0\nhigh 0\nmax 9\noom 8\noom_kill 6\n")
    assert out_of_memory_kills(tmp_path) == 6
