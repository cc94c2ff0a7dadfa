"""The chaos run's pure parts: its plan, the choice of victims, the table, and what it calls a difference."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from chaos_plan import PHASES, SHARES, Blow, Strike, choose, draw_plan, p95, recoveries, table
from chaos_verdict import Result, differences_between, faults_of, size_of
from lockstep.data.coverage import Coverage
from lockstep.data.sample_log import sample_ids, sample_record, stream_spans

_LENGTH, _BATCH = 10, 4


def test_seed_stands_for_the_plan() -> None:
    assert draw_plan(7, 50, 3, 2) == draw_plan(7, 50, 3, 2)
    assert draw_plan(7, 50) != draw_plan(8, 50)


def test_plan_has_what_was_asked_for_and_every_victim_and_every_moment() -> None:
    plan = draw_plan(1, 1000, 5, 7)
    assert Counter(strike.signal for strike in plan) == {"SIGKILL": 1000, "SIGSTOP": 5, "SIGTERM": 7}
    assert {strike.role for strike in plan} == set(SHARES)
    assert {strike.role for strike in plan if strike.signal == "SIGSTOP"} == {"rank"}
    assert {strike.role for strike in draw_plan(1, 0, 0, 500)} == {"rank", "supervisor"}
    tenths = Counter(int(10 * strike.moment) for strike in plan)
    assert set(tenths) == set(range(10))
    assert min(tenths.values()) > 60
    halves = Counter(int(2 * strike.which) for strike in plan)
    assert set(halves) == {0, 1}
    assert min(halves.values()) > 400


@pytest.mark.parametrize(
    ("role", "which", "present", "expected"),
    [
        ("rank", 0.0, {"rank": [11, 12, 13], "supervisor": [1]}, ("rank", 0)),
        ("rank", 0.99, {"rank": [11, 12, 13], "supervisor": [1]}, ("rank", 2)),
        ("rank", 0.5, {"rank": [], "fork server": [5], "supervisor": [1]}, ("fork server", 0)),
        ("rank", 0.5, {"rank": [], "fork server": [], "supervisor": [1]}, ("supervisor", 0)),
        ("fork server", 0.5, {"rank": [11], "supervisor": [1]}, ("supervisor", 0)),
        ("supervisor", 0.5, {"rank": [11], "fork server": [5], "supervisor": [1]}, ("supervisor", 0)),
        ("supervisor", 0.5, {"rank": [11], "fork server": [5], "supervisor": []}, None),
    ],
)
def test_who_is_not_there_yet_is_represented_by_who_starts_it(
    role: Any, which: float, present: dict[Any, list[int]], expected: tuple[str, int] | None
) -> None:
    assert choose(Strike("SIGKILL", role, which, 0.0), present) == expected


def test_in_a_restart_a_strike_waits_for_whom_it_is_meant() -> None:
    strike = Strike("SIGKILL", "rank", 0.5, 0.0)
    assert choose(strike, {"rank": [], "fork server": [5], "supervisor": [1]}, is_start=False) is None
    assert choose(strike, {"rank": [11, 12], "fork server": [5], "supervisor": [1]}, is_start=False) == ("rank", 1)
    server = strike._replace(role="fork server")
    assert choose(server, {"rank": [11], "fork server": [5], "supervisor": [1]}, is_start=False) == ("fork server", 0)


def test_signals_hit_only_whom_they_are_for() -> None:
    present: dict[Any, list[int]] = {"rank": [], "fork server": [5], "supervisor": [1]}
    assert choose(Strike("SIGTERM", "rank", 0.0, 0.0), present) == ("supervisor", 0)
    assert choose(Strike("SIGSTOP", "rank", 0.0, 0.0), present) is None
    assert choose(Strike("SIGSTOP", "rank", 0.5, 0.0), {"rank": [11, 12]}) == ("rank", 1)


def test_table_counts_every_blow_once() -> None:
    blows = [
        Blow("SIGKILL", victim, phase, None, None)
        for victim, phase in itertools.product(("rank 0", "rank 1", "supervisor"), PHASES)
    ]
    blows += [Blow("SIGKILL", "fork server", "step", None, None)] * 3 + [Blow("SIGSTOP", "rank 1", "save", None, None)]
    rows = [line.rsplit(maxsplit=5) for line in table(blows)]
    assert rows[0] == ["victim", "start-up", "step", "save", "restart", "all"]
    assert [row[0] for row in rows[1:]] == ["rank 0", "rank 1", "rank 1 (SIGSTOP)", "fork server", "supervisor", "all"]
    assert rows[3][1:] == ["0", "0", "1", "0", "1"]
    assert rows[4][1:] == ["0", "3", "0", "0", "3"]
    assert rows[-1][1:] == ["3", "6", "4", "3", "16"]


def test_recoveries_are_told_by_kind_and_without_those_that_were_cut_short() -> None:
    blows = [Blow("SIGKILL", f"rank {n % 2}", "step", 0, 0.1 * n) for n in range(1, 22)]
    blows += [Blow("SIGKILL", "rank 0", "step", None, None), Blow("SIGKILL", "supervisor", "step", 1, 4.0)]
    assert list(recoveries(blows)) == [
        "SIGKILL of a rank to the next step: median 1.10 s, 95 % 2.00 s, worst 2.10 s "
        "(21 of 22, which no other followed before it)",
        "SIGKILL of a supervisor to the next step: median 4.00 s, 95 % 4.00 s, worst 4.00 s "
        "(1 of 1, which no other followed before it)",
    ]
    assert list(recoveries([])) == []
    assert p95([3.0]) == 3.0


# ------------------------------------------------------------------ the verdict


@dataclass
class _Made:
    """A result as a run of `steps` steps leaves it."""

    steps: int = 7

    def result(self) -> Result:
        coverage = Coverage(_LENGTH)
        metrics, samples = [], []
        for step in range(self.steps):
            spans = stream_spans(step * _BATCH, (step + 1) * _BATCH, _LENGTH)
            for span in spans:
                coverage.add(sample_ids(sample_record([span], _LENGTH, "keyed", 3)), span.epoch)
            record = {"step": step + 1, "loss": 1.0 / (step + 1), "eta_s": step * 0.1, "tokens_per_s": 9.0}
            metrics.append(record)
            samples.append({"step": step + 1, **sample_record(spans, _LENGTH, "keyed", 3)})
        metrics.append({"step": self.steps, "val_loss": 0.25})
        tensors = {"model/w": torch.arange(6.0), "optimizer/state/0/step": torch.tensor(7.0)}
        values = {"step": self.steps, "loader/consumed": self.steps * _BATCH}
        state = coverage.state_dict(self.steps * _BATCH // _LENGTH)
        return Result(self.steps, tensors, values, state, metrics, json.loads(json.dumps(samples)))


def test_equal_results_have_no_differences_and_no_faults() -> None:
    one, other = _Made().result(), _Made().result()
    slower = [{**line, "eta_s": 77.7, "tokens_per_s": 0.1} if "loss" in line else line for line in one.metrics]
    assert differences_between(one._replace(metrics=slower), other) == []
    assert faults_of(one) == []
    assert size_of(one) == "2 tensors of 0.00 MB, 2 values, 7 steps, 28 samples in 3 epochs of 10"


def test_one_bit_is_a_difference() -> None:
    wanted = _Made().result()
    for path, bit in (("model/w", 0), ("model/w", 191), ("optimizer/state/0/step", 31)):
        found = _Made().result()
        found.tensors[path].view(-1).view(torch.uint8)[bit // 8] ^= 1 << (bit % 8)
        assert differences_between(wanted, found) == [f"tensors: {path} differs in 1 bytes"]


def test_nan_equals_itself_and_zero_is_not_minus_zero() -> None:
    wanted, found = _Made().result(), _Made().result()
    wanted.tensors["model/w"][0] = found.tensors["model/w"][0] = float("nan")
    assert differences_between(wanted, found) == []
    wanted.tensors["model/w"][0], found.tensors["model/w"][0] = 0.0, -0.0
    assert differences_between(wanted, found) == ["tensors: model/w differs in 1 bytes"]


def test_other_names_shapes_dtypes_values_and_ends_are_differences() -> None:
    wanted = _Made().result()
    tensors, values = dict(wanted.tensors), dict(wanted.values)
    less = {path: tensor for path, tensor in tensors.items() if path != "model/w"}
    for found, said in (
        (wanted._replace(step=6), "it ended after step 6, not 7"),
        (wanted._replace(tensors=less), "tensors: model/w is only in one of them"),
        (wanted._replace(tensors=tensors | {"x": tensors["model/w"]}), "tensors: x is only in one of them"),
        (
            wanted._replace(tensors=tensors | {"model/w": torch.arange(6.0).view(2, 3)}),
            "tensors: model/w has another dtype or shape",
        ),
        (
            wanted._replace(tensors=tensors | {"model/w": torch.arange(6)}),
            "tensors: model/w has another dtype or shape",
        ),
        (wanted._replace(values=values | {"step": 7.0}), "values: step is 7.0, not 7"),
        (wanted._replace(values=values | {"new": None}), "values: new is null, not null"),
    ):
        assert differences_between(wanted, found) == [said]


def test_steps_that_miss_or_come_twice_are_found_in_both_logs() -> None:
    good = _Made().result()
    for name in ("metrics", "samples"):
        lines = getattr(good, name)
        for changed in (lines[1:], [*lines, lines[2]], [lines[1], lines[0], *lines[2:]]):
            found = good._replace(**{name: changed})
            assert faults_of(found)[0].startswith(f"{name}.jsonl has")
            same = sorted(map(str, lines)) == sorted(map(str, changed))
            assert bool(differences_between(good, found)) == (not same)


def test_samples_of_another_step_are_found() -> None:
    good = _Made().result()
    lines = [dict(line) for line in good.samples]
    lines[3]["samples"] = lines[0]["samples"]
    assert any(fault.startswith("by samples.jsonl, epoch 0") for fault in faults_of(good._replace(samples=lines)))
    assert len(differences_between(good, good._replace(samples=lines))) == 2


def test_samples_used_twice_are_found_in_the_log_and_in_the_digest() -> None:
    good = _Made().result()
    lines = [dict(line) for line in good.samples]
    lines[0]["samples"] = [[0, 0, 3], [0, 4, 5]]  # in place of 0 to 4: position 3 is left out, 4 comes twice
    faults = faults_of(good._replace(samples=lines))
    assert [fault.partition(" has ")[0] for fault in faults] == ["by samples.jsonl, epoch 0"]
    coverage = Coverage(_LENGTH)
    coverage.load_state_dict(dict(good.coverage))
    coverage.add([1], 0)
    said = faults_of(good._replace(coverage=coverage.state_dict(2)))
    assert said == [
        "the coverage digest says: epoch 0: 11 samples were used where 10 should be: 1 or more came twice; "
        "the file has 10 samples"
    ]
