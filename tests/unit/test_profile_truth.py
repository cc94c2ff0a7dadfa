"""Exposed, hidden and waiting of runs that were made so: the real record, written on a clock that tests move.

Each rank is a list of acts. Work lets its clock go on by as long as it takes; a collective ends so many microseconds
after the last rank has started it. What the profile must say of that is worked out by hand.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from profiled_worlds import World
from scripted_ranks import STEPS, Act, Flying, backward, forward, optimizer, recorded, stand, start, wait
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lockstep.observe.profile.verdict import Verdict, judge
from lockstep.train.config import ModelConfig
from lockstep.train.metrics import flops_per_token


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
    assert verdict.waits.pairs[0].waited_s == pytest.approx(0.003 * (STEPS - 2))


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


def test_wait_that_ends_in_the_next_step_is_listed_there_and_names_the_late_one(tmp_path: Path) -> None:
    """The data comes at 0; they start the next at 8 and at 10, and wait for it from 9.5 and 11.5 on: it comes at 14."""
    run = recorded(
        tmp_path,
        [forward(1000), wait("g"), backward(8000), start("g", 4000), optimizer(500)],
        [forward(1000), wait("g"), backward(10_000), start("g", 4000), optimizer(500)],
    )
    verdict = judge(run)
    assert told(verdict) == [
        {"step": 14.0, "exposed": 4.5, "waited": 0.5, "hidden": 1.5},
        {"step": 14.0, "exposed": 2.5, "waited": 0.0, "hidden": 1.5},
    ]
    assert verdict.unseen == "", "the thread stood in each of them, though in a later step"
    (pair,) = verdict.waits.pairs
    assert (pair.rank, pair.last, pair.text) == (0, 1, "all_reduce float32 [1000] sum")
    for record in run.ranks.values():
        for line in record.steady:
            (done,) = [op for op in line.ops or () if op.began_us >= 0]
            assert done.entered_us < 0 < done.waited_us, "it was started before the step began"
    answers = {answer.name: answer.step_ms for answer in verdict.what_ifs}
    assert answers["as recorded"] == pytest.approx(14.0)
    assert answers["communication for nothing"] == pytest.approx(11.5)
    assert answers["network twice as fast"] == pytest.approx(12.0)


def test_ranks_that_leave_a_collective_at_different_times_have_waited_for_nobody(tmp_path: Path) -> None:
    """As a ring has it: rank 1 has its last part 2 ms before rank 0. So it is the first in the next one."""
    both = [forward(3000), stand("a", 10_000), stand("b", 10_000)]
    run = recorded(tmp_path, both, both, later_us=[2000, 0])
    verdict = judge(run)
    assert [(pair.rank, pair.last) for pair in verdict.waits.pairs] == [(1, 0)], "and rank 0 for nobody"
    assert [share.waited_ms for share in verdict.shares] == pytest.approx([0.0, 4.0])
    answers = {answer.name: answer.step_ms for answer in verdict.what_ifs}
    assert answers["as recorded"] == pytest.approx(verdict.shares[0].step_ms)


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
