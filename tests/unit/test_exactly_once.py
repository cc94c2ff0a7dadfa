"""Exactly once: for any history of kills, resumes, ranks, batch sizes and prefetching, nothing is lost or repeated.

LOCKSTEP_HISTORIES=100000 runs more of them. A failure prints its seed, which is the only thing that decides it.
"""

from __future__ import annotations

import os
import random
from functools import cache

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from run_histories import EpochRun, Prefetching, StreamRun, tabled_permutation

from lockstep.data import dataloader
from lockstep.data import order as orders

HISTORIES = int(os.environ.get("LOCKSTEP_HISTORIES", "2000"))
WORLDS, BATCHES, DEPTHS = st.integers(1, 5), st.integers(1, 6), st.integers(1, 5)
TAILS, ORDERS = ["repeat", "drop", "none"], ["torch", "keyed"]


@pytest.fixture(autouse=True)
def _no_processes_and_quick_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataloader, "TorchDataLoader", Prefetching)
    monkeypatch.setattr(orders, "KeyedPermutation", tabled_permutation)
    monkeypatch.setattr(orders, "torch_permutation", cache(orders.torch_permutation))


class Runs(RuleBasedStateMachine):
    """What can happen to a run, in any order."""

    run: EpochRun | StreamRun

    @rule(count=st.integers(1, 9))
    def train(self, count: int) -> None:
        self.run.steps(count)

    @rule()
    def save(self) -> None:
        self.run.save()

    @rule(world_size=WORLDS, batch=BATCHES, depth=DEPTHS)
    def kill_and_resume(self, world_size: int, batch: int, depth: int) -> None:
        self.run.resume(world_size, batch, depth)

    @rule()
    def finish_epoch(self) -> None:
        self.run.finish_epoch()

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.run.save()
            self.run.finish_epoch()


class EpochRuns(Runs):
    @initialize(
        length=st.integers(1, 40),
        order=st.sampled_from(ORDERS),
        tail=st.sampled_from(TAILS),
        drop=st.booleans(),
        named=st.booleans(),
    )
    def start(self, length: int, order: str, tail: str, drop: bool, named: bool) -> None:
        self.run = EpochRun(length, order, tail, drop, named)

    @precondition(lambda self: hasattr(self, "run"))
    @rule()
    def look_again(self) -> None:
        assert isinstance(self.run, EpochRun)
        self.run.look_again()

    @rule()
    def repeat_epoch(self) -> None:
        assert isinstance(self.run, EpochRun)
        self.run.repeat_epoch()


class StreamRuns(Runs):
    @initialize(length=st.integers(1, 40), order=st.sampled_from(ORDERS))
    def start(self, length: int, order: str) -> None:
        self.run = StreamRun(length, order)


@pytest.mark.limit_s(3600 if HISTORIES > 2000 else 400)  # a failure is made short for up to five minutes
@pytest.mark.parametrize("machine", [EpochRuns, StreamRuns])
def test_no_sequence_of_events_loses_or_repeats_a_sample(machine: type[Runs]) -> None:
    """Found, and made short, by Hypothesis."""
    examples = HISTORIES // 25
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=20, deadline=None))


def live(run: EpochRun | StreamRun, chance: random.Random) -> None:
    """A dozen random events."""
    events = ["train", "train", "save", "resume", "finish", "look", "repeat"]
    for event in chance.choices(events, k=12):
        if event == "train":
            run.steps(chance.randint(1, 8))
        elif event == "save":
            run.save()
        elif event == "resume":
            run.resume(chance.randint(1, 5), chance.randint(1, 6), chance.randint(1, 5))
        elif event == "finish":
            run.finish_epoch()
        elif isinstance(run, EpochRun):
            run.look_again() if event == "look" else run.repeat_epoch()
    run.save()
    run.finish_epoch()


@pytest.mark.limit_s(3600 if HISTORIES > 2000 else 150)
@pytest.mark.parametrize(("kind", "histories"), [("epochs", HISTORIES * 2 // 3), ("stream", HISTORIES // 3)])
def test_thousands_of_random_histories(kind: str, histories: int) -> None:
    for seed in range(histories):
        chance = random.Random(seed)
        order, length = chance.choice(ORDERS), chance.randint(1, 40)
        run = (
            StreamRun(length, order)
            if kind == "stream"
            else EpochRun(length, order, chance.choice(TAILS), chance.random() < 0.3, chance.random() < 0.5)
        )
        try:
            live(run, chance)
        except Exception as error:
            raise AssertionError(f"history {seed} of {kind}: {vars(run)}") from error
