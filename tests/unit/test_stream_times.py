"""What a program on a GPU spends its time on is what the stream does, not the thread that queues."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_gpu import NEVER, Number, ScriptedGpu, Stream, clock, gpu

from lockstep.cli.profile import describe
from lockstep.observe.flight import Record
from lockstep.observe.profile.device_values import read_later
from lockstep.observe.profile.phases import (
    BACKWARD,
    DATA,
    EXPOSED,
    FORWARD,
    OPTIMIZER,
    OTHER,
    PHASES,
    TAIL,
    UNKNOWN,
    Step,
)
from lockstep.observe.profile.run_record import Run, Steps
from lockstep.observe.profile.step_clock import MARKS, StepClock
from lockstep.observe.profile.stream_times import as_seen
from lockstep.observe.profile.verdict import judge
from lockstep.observe.profile.waits import unseen
from lockstep.observe.profile.writer import RunWriter
from whole_records import read_run

__all__ = ["clock", "gpu"]  # fixtures


def train(
    clock: StepClock, gpu: ScriptedGpu, *, data_us: float = 0, extra_us: float = 0, is_brief: bool = False
) -> None:
    """One step: forward 10 ms, backward 20 ms, optimizer 1 ms, which the thread queues in a moment."""
    clock.switch(DATA)
    gpu.now_us += data_us
    clock.switch(FORWARD)
    gpu.queue(10_000)
    clock.switch(BACKWARD)
    gpu.queue(20_000 + extra_us)
    clock.switch(OPTIMIZER)
    gpu.queue(1_000)
    clock.step_done(clock.step + 1, 0, is_brief=is_brief)


def taken(clock: StepClock, gpu: ScriptedGpu) -> list[Step]:
    """The steps, once the GPU has come so far."""
    gpu.synchronize()
    gpu.now_us += 100
    return [clock.steps.popleft() for _ in range(len(clock.steps))]


def spent_ms(step: Step) -> dict[str, float]:
    return {name: round(ns / 1e6, 1) for name, ns in zip(PHASES, step.summed_ns, strict=True) if round(ns / 1e6, 1)}


def test_phases_are_those_of_the_stream(clock: StepClock, gpu: ScriptedGpu) -> None:
    train(clock, gpu)
    (step,) = taken(clock, gpu)
    assert spent_ms(step) == {"forward": 10, "backward": 20, "optimizer": 1}
    assert step.times is not None


def test_no_event_is_recorded_before_the_program_uses_its_gpu(clock: StepClock, gpu: ScriptedGpu) -> None:
    gpu.is_used = False
    other = StepClock()
    other.close_reader = lambda: None
    before = len(gpu.fires_us)
    for _ in range(3):
        train(other, gpu)
    assert len(gpu.fires_us) == before
    assert type(other.marks) is list
    assert type(other.waits) is list
    assert [spent_ms(step).get("backward", 0) for step in taken(other, gpu)] == [0, 0, 0]


def test_a_thread_that_runs_ahead_hides_its_wait_for_data(clock: StepClock, gpu: ScriptedGpu) -> None:
    for _ in range(5):
        train(clock, gpu, data_us=5_000)
        assert not [step for step in clock.steps if step.step == clock.step], "the GPU has not come so far"
    first, *rest = taken(clock, gpu)
    assert spent_ms(first) == {"data": 5, "forward": 10, "backward": 20, "optimizer": 1}
    assert [spent_ms(step) for step in rest] == [{"forward": 10, "backward": 20, "optimizer": 1}] * 4
    assert [step.step for step in (first, *rest)] == [2, 3, 4, 5, 6]
    assert all(0 <= after.began_ns - before.ended_ns < 2_000 for before, after in itertools.pairwise((first, *rest)))


def test_a_loader_that_is_too_slow_for_the_gpu_counts(clock: StepClock, gpu: ScriptedGpu) -> None:
    for _ in range(8):
        train(clock, gpu, data_us=51_000)
    assert spent_ms(taken(clock, gpu)[-1]) == {"data": 20, "forward": 10, "backward": 20, "optimizer": 1}


def test_who_waited_for_whom_is_known_of_a_gpu(gpu: ScriptedGpu, tmp_path: Path) -> None:
    """Rank 1 comes 15 ms late to a collective that takes 8 ms."""
    for rank, (work_us, stall_us) in enumerate(((10_000, 23_000), (25_000, 8_000))):
        gpu.now_us = gpu.main.free_us = 1e6
        play_rank(gpu, tmp_path, rank, work_us, stall_us)
    run = read_run(tmp_path)
    assert {line.on_gpu for record in run.ranks.values() for line in record.steady} == {1}
    verdict = judge(run)
    assert (verdict.unseen, verdict.is_on_gpu) == ("", True)
    assert [round(share.waited_ms) for share in verdict.shares] == [15, 0]
    assert [round(share.phases_ms["exposed"]) for share in verdict.shares] == [23, 8]
    assert [(advice.kind, advice.rank) for advice in verdict.advice] == [("straggler", 1)]
    assert any("times are the GPU's" in line for line in describe(tmp_path))

    old = {rank: replace(record, lines=tuple(map(by_thread, record.lines))) for rank, record in run.ranks.items()}
    assert [op.text for op in unseen(Run(tmp_path, old)).values()] == ["all_reduce float32 [4] sum"]


def by_thread(line: Steps) -> Steps:
    return replace(line, on_gpu=0)


def test_a_clock_whose_record_was_closed_waits_for_its_gpu_as_before(
    clock: StepClock, gpu: ScriptedGpu, tmp_path: Path
) -> None:
    RunWriter(tmp_path, clock, rank=0, world_size=1, attempt="a/0").close()
    train(clock, gpu)
    gpu.now_us += 2e6
    train(clock, gpu)
    assert [step.times is not None for step in clock.steps] == [True]
    assert [step.times is not None for step in taken(clock, gpu)] == [True, True]


def play_rank(gpu: ScriptedGpu, folder: Path, rank: int, work_us: int, stall_us: int) -> None:
    records: list[Record] = []
    clock = StepClock()
    clock.close_reader = lambda: None
    writer = RunWriter(
        folder, clock, rank=rank, world_size=2, attempt="a/0", records=lambda since, until: records[since:until]
    )
    for step in range(1, 21):
        clock.switch(FORWARD)
        gpu.queue(work_us)
        clock.switch(BACKWARD)
        gpu.queue(20_000)
        began_ns = clock.time()
        words = "WORLD", "all_reduce float32 [4] sum", "train.py:1", ""
        records.append(Record(len(records), step, step, began_ns, began_ns + 1000, 0, False, *words))
        gpu.queue(stall_us)
        clock.stream_waited(step - 1, began_ns)
        clock.switch(OPTIMIZER)
        clock.step_done(step, step)
        if step % 5 == 0:
            writer.look()
    writer.close()


def test_events_are_used_again(clock: StepClock, gpu: ScriptedGpu) -> None:
    train(clock, gpu)
    taken(clock, gpu)
    train(clock, gpu)
    taken(clock, gpu)
    made = len(gpu.fires_us)
    for _ in range(20):
        train(clock, gpu)
        assert taken(clock, gpu)
    assert len(gpu.fires_us) == made


def wait(clock: StepClock, gpu: ScriptedGpu, number: int, stall_us: float) -> None:
    """The stream stands until others have come; the thread goes on."""
    began_ns = clock.time()
    gpu.queue(stall_us)
    clock.stream_waited(number, began_ns)


def test_what_the_stream_stands_for_is_exposed(clock: StepClock, gpu: ScriptedGpu) -> None:
    clock.switch(BACKWARD)
    gpu.queue(20_000)
    wait(clock, gpu, 7, 30_000)
    clock.step_done(2, 8)
    (step,) = taken(clock, gpu)
    assert spent_ms(step) == {"backward": 20, "exposed": 30}
    ((number, began_ns, ended_ns),) = step.waits
    assert (number, round((ended_ns - began_ns) / 1e6)) == (7, 30)


def test_what_is_there_when_it_is_asked_for_is_hidden(clock: StepClock, gpu: ScriptedGpu) -> None:
    began_ns = clock.time()  # an asynchronous operation
    clock.switch(BACKWARD)
    gpu.queue(20_000)
    wait(clock, gpu, 7, 0)
    clock.step_done(2, 8)
    (step,) = taken(clock, gpu)
    assert spent_ms(step) == {"backward": 20}
    (one,) = step.waits
    ends = {number: ended_ns for number, _, ended_ns in step.waits}
    assert step.times is not None
    seen = as_seen(operation(7, began_ns, left_ns=began_ns + 5), step.times, ends)
    assert (round((seen.left_ns - seen.entered_ns) / 1e6), seen.left_ns) == (20, one[2])


def operation(number: int, entered_ns: int, left_ns: int = 0) -> Record:
    return Record(number, number, 2, entered_ns, left_ns, 0, False, "WORLD", "all_reduce", "train.py:1", "")


def test_the_tail_of_a_backward_is_what_the_stream_waits_after_its_last_gradient(
    clock: StepClock, gpu: ScriptedGpu
) -> None:
    clock.switch(BACKWARD)
    gpu.queue(20_000)
    assert clock.gpu is not None
    last_ns = gpu.monotonic_ns()
    clock.gpu.stamp(last_ns)  # by autograd's thread
    gpu.queue(12_000)
    ended_ns = gpu.monotonic_ns()
    clock.waits.append((TAIL, last_ns, ended_ns))
    clock.marks.append((OTHER, ended_ns))
    clock.step_done(2, 0)
    (step,) = taken(clock, gpu)
    assert spent_ms(step) == {"backward": 20, "exposed": 12}


def test_an_operation_that_is_waited_for_in_the_next_step_was_under_way_since_this_one(
    clock: StepClock, gpu: ScriptedGpu
) -> None:
    train(clock, gpu)
    began_ns = clock.time()
    train(clock, gpu)
    wait(clock, gpu, 3, 4_000)
    train(clock, gpu)
    step = taken(clock, gpu)[-1]
    assert step.times is not None
    seen = as_seen(operation(3, began_ns), step.times, {3: step.waits[0][2]})
    assert round((seen.left_ns - seen.entered_ns) / 1e6) == 35
    assert seen.entered_ns < step.began_ns


def test_what_runs_on_another_stream_is_nobody_s_wait(clock: StepClock, gpu: ScriptedGpu) -> None:
    aside = Stream(raw=5)
    clock.switch(FORWARD)
    gpu.queue(10_000)
    with gpu.on(aside):
        began_ns = clock.time()
        wait(clock, gpu, 4, 6_000)
    clock.step_done(2, 5)
    (step,) = taken(clock, gpu)
    assert spent_ms(step) == {"forward": 10}
    assert not step.waits
    assert step.times is not None
    seen = as_seen(operation(4, began_ns), step.times, {})
    assert round((seen.left_ns - seen.entered_ns) / 1e6) == 6


def test_phases_may_change_their_stream(clock: StepClock, gpu: ScriptedGpu) -> None:
    other = Stream(raw=5)
    clock.switch(FORWARD)
    gpu.queue(10_000)
    other.free_us = gpu.main.free_us  # it waits for that
    with gpu.on(other):
        clock.switch(BACKWARD)
        gpu.queue(20_000)
        wait(clock, gpu, 4, 6_000)
        clock.switch(OTHER)
    gpu.main.free_us = other.free_us
    clock.step_done(2, 5)
    assert [spent_ms(step) for step in taken(clock, gpu)] == [{"forward": 10, "backward": 20, "exposed": 6}]


def test_a_wait_of_the_thread_alone_costs_the_stream_what_it_had_nothing_to_do(
    clock: StepClock, gpu: ScriptedGpu
) -> None:
    clock.switch(FORWARD)
    gpu.queue(10_000)
    since_ns = gpu.monotonic_ns()  # without a stamp
    gpu.now_us += 12_000
    clock.waited(UNKNOWN, since_ns, gpu.monotonic_ns())
    clock.step_done(2, 5)
    assert [spent_ms(step) for step in taken(clock, gpu)] == [{"exposed": 12}]


def test_a_gpu_that_hangs_holds_up_nobody_and_loses_nothing(clock: StepClock, gpu: ScriptedGpu) -> None:
    train(clock, gpu)
    taken(clock, gpu)
    gpu.queue(NEVER)
    train(clock, gpu)
    train(clock, gpu)
    before_us = gpu.now_us
    assert not clock.steps
    assert gpu.now_us - before_us < 100, "it was only asked"
    clock.until_ns = gpu.monotonic_ns() + 10**9
    steps = list(clock.steps)
    assert [step.step for step in steps] == [3, 4]
    assert gpu.now_us - before_us < 1_100_000
    assert [step.times for step in steps] == [None, None]
    assert [sum(step.summed_ns) == step.ended_ns - step.began_ns for step in steps] == [True, True]


def test_of_a_gpu_that_is_far_behind_no_more_events_are_kept(clock: StepClock, gpu: ScriptedGpu) -> None:
    gpu.queue(NEVER)
    for _ in range(600):
        train(clock, gpu)
    assert len(gpu.fires_us) < 300 * 10
    assert type(clock.marks) is list


def test_an_error_of_cuda_is_the_program_s_own_affair(clock: StepClock, gpu: ScriptedGpu) -> None:
    train(clock, gpu)
    gpu.is_broken = True
    train(clock, gpu)
    train(clock, gpu)
    steps = [clock.steps.popleft() for _ in range(len(clock.steps))]
    assert [(step.step, step.times) for step in steps] == [(2, None), (3, None), (4, None)]
    assert [set(spent_ms(step)) for step in steps] == [set[str]()] * 3, "what its thread took"


def test_an_error_while_it_is_asked(clock: StepClock, gpu: ScriptedGpu) -> None:
    train(clock, gpu)
    wait(clock, gpu, 3, 100)
    train(clock, gpu)
    gpu.is_broken = True
    first, second = clock.steps
    assert (first.times, second.times) == (None, None)
    assert [number for number, *_ in second.waits] == [UNKNOWN], "the thread's times say nothing of it"


def test_nothing_is_recorded_into_a_graph(clock: StepClock, gpu: ScriptedGpu) -> None:
    clock.switch(FORWARD)
    gpu.queue(10_000)
    captured = Stream(raw=6)
    captured.is_capturing = True
    with gpu.on(captured):
        clock.switch(BACKWARD)
        clock.time()
    clock.switch(OPTIMIZER)
    gpu.queue(1_000)
    clock.step_done(2, 0)
    train(clock, gpu)
    gpu.main.is_capturing = True  # at the end of a step
    train(clock, gpu)
    gpu.main.is_capturing = False
    train(clock, gpu)
    train(clock, gpu)
    assert [step.times is not None for step in taken(clock, gpu)] == [False, True, False, False, True]


def test_values_of_a_device_that_fails_are_given_up_in_silence(gpu: ScriptedGpu) -> None:
    value = Number(2.5)
    assert read_later({"loss": [value, 1.0]})() == {"loss": 3.5}
    later = read_later({"loss": [value]})
    assert len(gpu.fires_us) == 1, "to end one waits for whoever copies from the device: it is used again"
    gpu.is_broken = True
    assert later() == {}
    gpu.is_broken = False
    gpu.main.is_capturing = True
    assert read_later({"loss": [value]})() == {}, "in a graph nothing is computed yet"
    assert read_later({"loss": [1.5]})() == {"loss": 1.5}


def test_a_value_of_a_device_is_what_it_was_and_its_memory_is_used_again(gpu: ScriptedGpu) -> None:
    value = Number(2.5)
    gpu.queue(1_000)
    later = read_later({"loss": [value, value]})
    value.value = 7.0  # the program's own sum goes on
    assert later() is None
    gpu.now_us += 1_000
    assert [later(), later()] == [{"loss": 5.0}] * 2, "a logger reads it, too"
    assert len(Number.made) == 3
    assert read_later({"loss": [value]})() == {"loss": 7.0}
    assert later() == {"loss": 5.0}
    assert read_later({"loss": [value]})() == {"loss": 7.0}
    assert len(Number.made) == 3
    read_later({"loss": [value]})  # and never asked
    assert read_later({"loss": [value, value]})() == {"loss": 14.0}
    assert len(Number.made) == 4, "a device may still write to what nobody has read"


@pytest.mark.parametrize("rate", [1 - 5e-5, 1 + 5e-5])
@pytest.mark.parametrize("behind_us", [0, 500_000])
def test_clocks_that_drift_apart_are_kept_together(
    clock: StepClock, gpu: ScriptedGpu, rate: float, behind_us: int
) -> None:
    """Also where the thread never waits for its GPU: then only probes tell."""
    gpu.rate = rate
    gpu.queue(behind_us)
    came_us: dict[int, float] = {}  # when the GPU really did, to the beginning of a step
    off_us: list[float] = []
    for number in range(3, 3000):
        train(clock, gpu)
        came_us[number] = gpu.main.free_us
        gpu.now_us = gpu.main.free_us - behind_us + 20
        off_us += [step.began_ns / 1e3 - came_us[step.step] for step in clock.steps if step.step in came_us]
        clock.steps.clear()
    assert len(off_us) > 2900
    assert max(map(abs, off_us)) < 100, "90 s of drift would be 4500"


def test_a_step_that_is_only_counted_shares_its_time_as_the_last_one_on_the_gpu(
    clock: StepClock, gpu: ScriptedGpu
) -> None:
    train(clock, gpu)
    clock.is_brief = True
    clock.leave_gpu()
    clock.switch(DATA)
    gpu.now_us += 30_000  # hidden
    clock.switch(OTHER)
    gpu.now_us += 1_000
    clock.step_done(3, 0)
    timed, counted = taken(clock, gpu)
    assert spent_ms(timed) == {"forward": 10, "backward": 20, "optimizer": 1}
    assert spent_ms(counted) == spent_ms(timed)
    assert counted.times is not None
    train(clock, gpu)
    assert [step.times is not None for step in taken(clock, gpu)] == [True]


def test_steps_of_a_loop_that_marks_its_phases_are_only_counted_in_a_row(clock: StepClock, gpu: ScriptedGpu) -> None:
    for is_next_brief in (False, True, True, True, False, False):
        train(clock, gpu, is_brief=is_next_brief)
    steps = taken(clock, gpu)
    assert [step.is_brief for step in steps] == [False, False, True, True, True, False]
    assert all(step.times is not None for step in steps)
    like = {"forward": 10, "backward": 20, "optimizer": 1}
    assert spent_ms(steps[1]) == spent_ms(steps[5]) == like
    for step in steps[2:5]:
        whole = (step.ended_ns - step.began_ns) / 1e6
        assert sum(spent_ms(step).values()) == pytest.approx(whole, abs=0.3)
        assert spent_ms(step).keys() <= like.keys() | {"other"}


def test_a_step_with_too_many_marks_has_its_thread_s_times(clock: StepClock, gpu: ScriptedGpu) -> None:
    for _ in range(MARKS):
        clock.switch(FORWARD)
    train(clock, gpu)
    train(clock, gpu)
    assert [step.times is not None for step in taken(clock, gpu)] == [False, True]


def test_the_gpu_of_the_loss_is_the_one(clock: StepClock, gpu: ScriptedGpu) -> None:
    assert clock.peak_mib == 64
    clock.device = 3
    gpu.now_us += 1.1e6  # memory is looked at once a second
    train(clock, gpu)
    assert gpu.devices == [0, 3]
    assert clock.peak_mib == 67
    train(clock, gpu)
    assert [step.times is not None for step in taken(clock, gpu)] == [True, True]


def test_what_was_before_a_new_beginning_has_no_events(clock: StepClock, gpu: ScriptedGpu) -> None:
    clock.switch(FORWARD)
    gpu.queue(10_000)
    gpu.synchronize()
    clock.restart()
    train(clock, gpu)
    (step,) = taken(clock, gpu)
    assert spent_ms(step) == {"forward": 10, "backward": 20, "optimizer": 1}
    assert EXPOSED not in [phase for phase, _ in step.marks]
