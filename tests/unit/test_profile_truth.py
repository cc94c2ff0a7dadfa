"""Exposed, hidden and waiting of runs that were made so: the real record, written on a clock that tests move.

Each rank is a list of acts. Work lets its clock go on by as long as it takes; a collective ends so many microseconds
after the last rank has started it. What the profile must say of that is worked out by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from profiled_worlds import World
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lockstep.comm.op import CommOp, Work
from lockstep.observe import flight, recording
from lockstep.observe.flight import FlightRecord, FlightRecorder
from lockstep.observe.profile import step_clock
from lockstep.observe.profile.run_record import Run
from lockstep.observe.profile.step_clock import BACKWARD, FORWARD
from lockstep.observe.profile.verdict import Verdict, judge
from lockstep.observe.profile.writer import RunWriter
from lockstep.observe.recording import GuardLayer
from lockstep.train.config import ModelConfig
from lockstep.train.metrics import flops_per_token
from whole_records import read_run

_STEPS = 6


class Act(NamedTuple):
    """One thing that a rank does. us: that work takes, or the data of a collective after its last rank's start."""

    what: str  # "forward", "backward", "start", "wait", "stand"
    us: int = 0
    name: str = ""


def forward(us: int) -> Act:
    return Act("forward", us)


def backward(us: int) -> Act:
    return Act("backward", us)


def start(name: str, us: int) -> Act:
    return Act("start", us, name)


def wait(name: str) -> Act:
    return Act("wait", 0, name)


def stand(name: str, us: int) -> Act:
    return Act("stand", us, name)


class Clock:
    """Of one rank, in nanoseconds."""

    def __init__(self) -> None:
        self.ns = 1_000_000_000

    def __call__(self) -> int:
        return self.ns


class Flying(Work):
    """A collective that ends at a known time."""

    says = True  # when that was

    def __init__(self, clock: Clock, ends_ns: int) -> None:
        self.clock, self.ends_ns = clock, ends_ns
        self.ended_ns = 0

    def wait(self, timeout_s: float | None = None) -> None:
        self.clock.ns = max(self.clock.ns, self.ends_ns)
        self.ended_ns = self.ends_ns * self.says

    def is_done(self) -> bool:
        return self.clock.ns >= self.ends_ns


class Network:
    """The transport of one rank."""

    name, world_size, device, timeout_s = "known", 2, torch.device("cpu"), 1.0

    def __init__(self, rank: int, size: int, clock: Clock, ends_ns: Sequence[int]) -> None:
        self.rank, self.global_ranks, self.clock, self.ends_ns = rank, tuple(range(size)), clock, ends_ns
        self.began_ns: list[int] = []

    def submit(self, op: CommOp) -> Work:
        number = len(self.began_ns)
        self.began_ns.append(self.clock.ns)
        return Flying(self.clock, self.ends_ns[number] if number < len(self.ends_ns) else 0)


class Watching:
    """As a guard, as far as its layer needs one."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self.recorder = recorder

    def group(self, name: str, ranks: Sequence[int]) -> None: ...


def played(rank: int, size: int, acts: Sequence[Act], ends_ns: Sequence[int], folder: Path) -> list[int]:
    """Do `acts` in each step, and record that; when each collective was started."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        for module in (recording, flight, step_clock):
            patch.setattr(module, "monotonic_ns", clock)
        recorder = FlightRecorder(folder / f"flight-{rank}", rank, size)
        steps = recorder.clock
        steps.close_reader = lambda: None
        network = Network(rank, size, clock, ends_ns)
        layer: Any = GuardLayer(network, Watching(recorder))  # pyright: ignore[reportArgumentType]
        steps.restart()
        for step in range(1, _STEPS + 1):
            works: dict[str, Work] = {}
            for number, act in enumerate(acts):
                if act.what in ("start", "stand"):
                    op = CommOp(number, "all_reduce", (torch.ones(1000),), reduce="sum", label=act.name)
                    works[act.name] = layer.submit(op._replace(async_op=act.what == "start"))
                elif act.what == "wait":
                    works[act.name].wait()
                else:
                    steps.switch({"forward": FORWARD, "backward": BACKWARD}[act.what])
                    clock.ns += 1000 * act.us
            steps.step_done(step, recorder.started, tokens=64)
            recorder.set_step(step)
        record = FlightRecord(recorder.path)
        writer = RunWriter(folder, steps, rank=rank, world_size=size, attempt="a/0", records=record.records)
        writer.close()
        record.close()
        recorder.close()
    return network.began_ns


def recorded(folder: Path, *ranks: Sequence[Act]) -> Run:
    """Each rank does its acts `_STEPS` times; a collective ends when its data has moved after its last rank's start."""
    moves = [[act.us for act in acts if act.what in ("start", "stand")] for acts in ranks]
    assert all(ones == moves[0] for ones in moves)
    ends: list[int] = []
    for attempt in range(100):  # until the starts that follow from the ends are those that they follow from
        place = folder / str(attempt)
        place.mkdir()
        begun = [played(rank, len(ranks), acts, ends, place) for rank, acts in enumerate(ranks)]
        before = ends
        ends = [max(times) + 1000 * us for *times, us in zip(*begun, moves[0] * _STEPS, strict=True)]
        if ends == before:
            return read_run(place)
    raise AssertionError("no end")


def told(verdict: Verdict) -> list[dict[str, float]]:
    return [
        {
            "step": share.step_ms,
            "exposed": share.phases_ms["exposed"],
            "waited": share.waited_ms,
            "hidden": share.hidden_ms,
        }
        for share in verdict.shares
    ]


def test_what_a_rank_stands_in_is_exposed_and_what_it_stands_for_the_last_is_waiting(tmp_path: Path) -> None:
    run = recorded(
        tmp_path,
        [forward(4000), backward(5000), stand("g", 1500)],
        [forward(7000), backward(5000), stand("g", 1500)],
    )
    verdict = judge(run)
    assert told(verdict) == [
        {"step": 13.5, "exposed": 4.5, "waited": 3.0, "hidden": 0.0},
        {"step": 13.5, "exposed": 1.5, "waited": 0.0, "hidden": 0.0},
    ]
    assert verdict.overlap == 0.0
    assert [(pair.rank, pair.last) for pair in verdict.waits.pairs] == [(0, 1)]
    assert verdict.waits.pairs[0].waited_s == pytest.approx(0.003 * (_STEPS - 2))


def test_what_is_under_way_while_a_rank_works_is_hidden_and_the_rest_is_exposed(tmp_path: Path) -> None:
    both = [forward(3000), start("bucket", 8000), backward(5000), wait("bucket")]
    verdict = judge(recorded(tmp_path, both, both))
    assert told(verdict) == [{"step": 11.0, "exposed": 3.0, "waited": 0.0, "hidden": 5.0}] * 2
    assert verdict.overlap == pytest.approx(5 / 8)
    answers = {answer.name: answer.step_ms for answer in verdict.what_ifs}
    assert answers["as recorded"] == pytest.approx(11.0)
    assert answers["network twice as fast"] == pytest.approx(8.0), "4 ms of moving, behind 5 ms of work"
    assert answers["communication for nothing"] == pytest.approx(8.0)


def test_late_rank_and_hidden_communication_at_once(tmp_path: Path) -> None:
    """Rank 0 starts at 2, rank 1 at 4; so the data is there at 10, where they have stood since 7 and since 9.

    By then all had started: what they stand in is data that moves, though rank 1 has cost 2 ms.
    """
    run = recorded(
        tmp_path,
        [forward(2000), start("bucket", 6000), backward(5000), wait("bucket")],
        [forward(4000), start("bucket", 6000), backward(5000), wait("bucket")],
    )
    verdict = judge(run)
    assert told(verdict) == [
        {"step": 10.0, "exposed": 3.0, "waited": 0.0, "hidden": 5.0},
        {"step": 10.0, "exposed": 1.0, "waited": 0.0, "hidden": 5.0},
    ]
    answers = {answer.name: answer.step_ms for answer in verdict.what_ifs}
    assert answers["rank 1 as fast as the others"] == pytest.approx(8.0)


def test_two_at_once_count_once_and_more_work_before_a_wait_is_no_lateness(tmp_path: Path) -> None:
    def acts(us: int) -> list[Act]:
        return [
            start("a", 4000), forward(us), start("b", 6000), backward(1000), wait("a"), wait("b"), stand("c", 500)
        ]  # fmt: skip

    verdict = judge(recorded(tmp_path, acts(1000), acts(2000), acts(3000)))
    # a ends at 4; b is started at 1, 2, 3 and ends at 9; they stand from 2, 3, 4; c follows for all at once
    assert [share["exposed"] for share in told(verdict)] == [7.5, 6.5, 5.5]
    assert [share["waited"] for share in told(verdict)] == [0.0] * 3, "all had started what they stood in"
    assert [share["hidden"] for share in told(verdict)] == [2.0, 3.0, 4.0]
    assert [share["step"] for share in told(verdict)] == [9.5] * 3


def test_rank_that_stands_before_the_last_has_started_waits_until_then(tmp_path: Path) -> None:
    """Rank 1 starts at 9, its data is there at 12; rank 0 has stood since 6: 3 ms for rank 1, and 3 for the data."""
    run = recorded(
        tmp_path,
        [forward(2000), start("bucket", 3000), backward(4000), wait("bucket")],
        [forward(9000), start("bucket", 3000), backward(1000), wait("bucket")],
    )
    verdict = judge(run)
    assert told(verdict) == [
        {"step": 12.0, "exposed": 6.0, "waited": 3.0, "hidden": 4.0},
        {"step": 12.0, "exposed": 2.0, "waited": 0.0, "hidden": 1.0},
    ]


@pytest.mark.parametrize(("says", "hidden", "overlap"), [(True, 3.0, 1.0), (False, 20.0, 1.0)])
def test_hidden_is_while_it_is_under_way_where_its_end_is_known_and_else_until_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, says: bool, hidden: float, overlap: float
) -> None:
    monkeypatch.setattr(Flying, "says", says)
    both = [forward(1000), start("bucket", 3000), backward(20_000), wait("bucket")]
    verdict = judge(recorded(tmp_path, both, both))
    assert told(verdict) == [{"step": 21.0, "exposed": 0.0, "waited": 0.0, "hidden": hidden}] * 2
    assert verdict.overlap == overlap


def test_late_rank_that_hides_all_of_it_is_waited_for_where_the_end_is_known(tmp_path: Path) -> None:
    """Rank 1 starts at 9, and the data is there at 12, while it works until 20: rank 0 has stood since 5."""
    run = recorded(
        tmp_path,
        [forward(1000), start("bucket", 3000), backward(4000), wait("bucket"), backward(8000)],
        [forward(9000), start("bucket", 3000), backward(11_000), wait("bucket")],
    )
    assert told(judge(run)) == [
        {"step": 20.0, "exposed": 7.0, "waited": 4.0, "hidden": 4.0},
        {"step": 20.0, "exposed": 0.0, "waited": 0.0, "hidden": 3.0},
    ]


def test_rank_with_more_to_do_meanwhile_holds_nobody_up(tmp_path: Path) -> None:
    """Both start at 1, and the data is there at 9: rank 0 stands for that, whatever rank 1 does until 10."""
    run = recorded(
        tmp_path,
        [forward(1000), start("bucket", 8000), backward(5000), wait("bucket"), forward(3000), stand("g", 500)],
        [forward(1000), start("bucket", 8000), backward(9000), wait("bucket"), forward(2000), stand("g", 500)],
    )
    verdict = judge(run)
    assert [(share["step"], share["exposed"], share["waited"]) for share in told(verdict)] == [
        (12.5, 3.5, 0.0),
        (12.5, 0.5, 0.0),
    ]
    assert not verdict.waits.pairs
    answers = {answer.name: answer.step_ms for answer in verdict.what_ifs}
    assert answers["as recorded"] == pytest.approx(12.5)
    assert answers["communication for nothing"] == pytest.approx(12.0)
    assert answers["network twice as fast"] == pytest.approx(12.25)
    assert answers["rank 1 as fast as the others"] == pytest.approx(12.5), (
        "rank 0 stands in the bucket until 9 then too"
    )


def gpt2(config: ModelConfig) -> nn.Module:
    from transformers.models.gpt2.configuration_gpt2 import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=257,
            n_positions=config.context,
            n_embd=config.width,
            n_layer=config.layers,
            n_head=config.heads,
        )
    )
    model.set_attn_implementation("eager")  # whose products can be counted
    return model


def counted(model: nn.Module, inputs: torch.Tensor) -> int:
    """Arithmetic of forward and backward, as torch counts it in each matrix product."""
    with FlopCounterMode(display=False) as counter:
        output = model(inputs)
        getattr(output, "logits", output).sum().backward()
    return counter.get_total_flops()


def test_mfu_of_a_transformer_is_its_arithmetic_over_what_the_devices_can_do(tmp_path: Path) -> None:
    config = ModelConfig(layers=2, heads=4, width=128, context=32)
    model = gpt2(config)
    block, head, attention = 12 * 128 * 128, 257 * 128, 2 * 2 * 32 * 128  # weights; two products with each token before
    by_hand = 3 * (2 * (2 * block + head) + 2 * attention)  # backward takes twice what forward takes
    assert counted(model, torch.ones(2, 32, dtype=torch.int64)) == 2 * 32 * by_hand
    known = flops_per_token(model, config)
    assert by_hand <= known <= 1.05 * by_hand, "the formula has biases and positions too"
    both = [forward(2000), backward(4000), stand("g", 2000)]
    run = recorded(tmp_path, both, both)
    verdict = judge(run, peak_flops=1e10, flops_per_token=known)
    assert [share.tokens_per_s for share in verdict.shares] == pytest.approx([8000.0] * 2)  # 64 in 8 ms, of both ranks
    assert verdict.mfu == pytest.approx(known * 64 / 0.008 / (2 * 1e10))


def test_mfu_of_a_program_whose_tokens_nobody_counts_is_that_of_its_samples(tmp_path: Path) -> None:
    """An MLP: two layers of 64 x 64 weights without more, of which the first needs no gradient of its input."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False))
    by_hand = 2 * 64 * 64 * (2 + 3)  # forward twice; gradients of two weights and of one input
    assert counted(model, torch.ones(8, 64)) == 8 * by_hand
    world = World(work_us=lambda rank, step: 3000, moves_us=1000, collectives=1)  # 8 samples of each rank in 4 ms
    run = world.run(tmp_path)
    verdict = judge(run, peak_flops=1e9, flops_per_token=by_hand)
    assert verdict.mfu == pytest.approx(by_hand * (2 * 8 / 0.004) / (2 * 1e9))
