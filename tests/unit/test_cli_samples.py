"""`lockstep samples`: which samples a step used, and which steps used a sample."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.data.sample_log import Span, sample_ids, sample_record, stream_spans


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Ten steps of 6 samples each over epochs of 25."""
    records = [
        {"step": step, **sample_record(stream_spans(6 * (step - 1), 6 * step, 25), 25, "keyed", 3)}
        for step in range(1, 11)
    ]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def test_samples_of_steps(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", str(run), "1", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    expected = sample_ids(sample_record([Span(0, 0, 6)], 25, "keyed", 3))
    assert lines[0] == f"step 1, epoch 0, 6 samples: {' '.join(map(str, expected))}"
    assert [line.split(":")[0] for line in lines] == [
        "step 1, epoch 0, 6 samples",
        "step 5, epoch 0, 1 samples",
        "step 5, epoch 1, 5 samples",
    ]


def test_steps_of_a_sample(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = sample_ids(sample_record([Span(0, 24, 25)], 25, "keyed", 3))[0]
    assert main(["samples", str(run), "--find", str(wanted), "99"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"sample {wanted}: step 5 (epoch 0), step ")
    assert "(epoch 1)" in first
    assert second == "sample 99: not used"


def test_summary(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", str(run / "samples.jsonl")]) == 0
    assert capsys.readouterr().out.startswith("steps 1 to 10, 60 samples; ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{}", "11"], "has no step 11: it has steps 1 to 10"),
        (["{}/nothing"], "does not exist: give the directory of a run"),
        (["{}/broken"], "line 2 of"),
        (["{}/bytes"], "line 1 of"),
    ],
)
def test_wrong_words(run: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    (run / "broken").write_text('{"step": 1, "samples": []}\nno json\n')
    (run / "bytes").write_bytes(b"\xff\xfe")
    assert main(["samples", *(word.format(run) for word in words)]) == 2
    assert said in capsys.readouterr().err
