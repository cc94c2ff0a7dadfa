"""Records that something has happened to: what is wrong is said with its file and line, and the rest is shown."""

from __future__ import annotations

import json
import os
import random
import resource
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from profiled_worlds import World
from reported_runs import add_launch, add_notes, began_ns

from lockstep.cli import main
from lockstep.cli.profile import describe
from lockstep.errors import ConfigError
from lockstep.observe.profile.rank_reader import OtherFormat
from lockstep.observe.profile.run_record import file_of
from lockstep.observe.profile.window import LAUNCH
from lockstep.observe.report.source import RunReader
from lockstep.observe.report.terminal import TerminalView
from lockstep.observe.report.writing import LiveDocument, document_in

_WORLD = World(work_us=lambda rank, step: 1000 + 100 * rank, steps=12, collectives=2)


def said(folder: Path) -> tuple[str, str]:
    """What `lockstep profile` and the report's warning say of it."""
    _, document = document_in(folder)
    cards = [card["text"] for card in document["cards"] if card["title"] == "Some of the record cannot be read"]
    return "\n".join(describe(folder)), "\n".join(cards)


def middle(change: Callable[[bytes], bytes]) -> Callable[[list[bytes]], list[bytes]]:
    """Of the tenth line something else is made."""
    return lambda lines: [*lines[:9], change(lines[9]), *lines[10:]]


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (middle(lambda line: line[: len(line) // 2] + b"\n"), 10),
        (middle(lambda line: b"\x00\xff\x81" + line), 10),
        (middle(lambda line: b'{"step":7,"phases_us":[1,2]}\n'), 10),
        (middle(lambda line: b'{"step":7,"wall_us":"long"}\n'), 10),
        (middle(lambda line: b'{"step":7,"count":0}\n'), 10),
        (middle(lambda line: b'{"step":7.5,"count":1}\n'), 10),
        (middle(lambda line: b'{"step":7,"spans":[[9,0]]}\n'), 10),
        (middle(lambda line: b'{"step":7,"ops":[[0,1,null,3,4,5]]}\n'), 10),
        (middle(lambda line: b'{"buckets":7,"at_us":1,"count":"x"}\n'), 10),
        (middle(lambda line: b'{"values":"x","at_us":1}\n'), 10),
        (middle(lambda line: b'{"weather":7,"at_us":1}\n'), 10),
        (middle(lambda line: b'{"values":NaN,"at_us":1}\n'), 10),
        (middle(lambda line: b'{"finding":3.5,"at_us":1}\n'), 10),
        (middle(lambda line: b'{"facts":[],"at_us":1}\n'), 10),
        (middle(lambda line: b'{"word":0,"group":"g","text":"t","site":7,"label":"","bytes":1}\n'), 10),
        (middle(lambda line: b'{"word":0,"group":"g","text":"t","site":"s","label":"","bytes":NaN}\n'), 10),
        (lambda lines: [lines[0].replace(b'"start":1', b'"start":"2"'), *lines[1:]], 1),
        (lambda lines: [lines[0].replace(b'"start":1', b'"start":null'), *lines[1:]], 1),
        (lambda lines: [lines[0].replace(b'"clock_ns":', b'"clock_ns":0.5,"was":'), *lines[1:]], 1),
        (lambda lines: [lines[0].replace(b'"host":"', b'"host":{},"program":"'), *lines[1:]], 1),
        (lambda lines: [lines[0].replace(b'"flops_per_token":0.0', b'"flops_per_token":null'), *lines[1:]], 1),
        (lambda lines: lines[1:], 1),
    ],
)
def test_line_that_is_none_is_named_and_what_came_before_counts(
    tmp_path: Path, damage: Callable[[list[bytes]], list[bytes]], line: int
) -> None:
    path = file_of(_WORLD.run(tmp_path).folder, 1)
    path.write_bytes(b"".join(damage(path.read_bytes().splitlines(keepends=True))))
    profile, report = said(tmp_path)
    assert f"damaged  rank-1.jsonl: line {line} is none of a record: " in profile
    assert f"rank-1.jsonl: line {line} is none of a record: " in report
    record = RunReader(tmp_path).read().run.ranks.get(1)
    assert (0 if record is None else len(record.lines)) == (0 if line == 1 else 6)


@pytest.mark.parametrize(
    ("kind", "fields", "said_of"),
    [
        ("layout", {"step": 4, "units": [["a", 1]]}, "layout of step 4"),
        ("layout", {"step": 4, "strategy": 7, "units": [["a", 1, "float32", "x", 4]]}, "layout of step 4"),
        ("coverage", {"epoch": 2, "length": 9, "samples": 3, "digest": "zz"}, "coverage of epoch 2"),
        ("coverage", {"epoch": 2}, "coverage of epoch 2"),
        ("replicas", {"step": 4}, "replicas of step 4"),
        ("finding", {"text": "HANG"}, "finding"),
        ("facts", {"variables": {"RANK": 1}}, "facts"),
    ],
)
def test_note_that_nothing_can_be_made_of_is_named_and_the_rest_is_shown(
    tmp_path: Path, kind: str, fields: dict[str, Any], said_of: str
) -> None:
    _WORLD.run(tmp_path)
    add_notes(tmp_path, 0, ("layout", 1, {"step": 1, "units": [["w", 2, "float32", 8, 8]]}), (kind, 9, fields))
    profile, report = said(tmp_path)
    assert "2 of 2 ranks" in profile
    assert report.startswith(f"rank-0.jsonl: its note of {said_of} is damaged: ")
    _, document = document_in(tmp_path)
    assert document["run"]["steps"] == 12
    assert document["owners"]["units"][0]["name"] == "w"


def of_format(version: int, path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'{"start":1,', b'{"start":%d,' % version))


@pytest.mark.parametrize("words", [["report"], ["profile"], ["watch"], ["watch", "--no-terminal"]], ids=" ".join)
@pytest.mark.parametrize(("ranks", "version"), [((0, 1), 2), ((1,), 2), ((0,), 7), ((0, 1), 0)])
def test_record_of_another_format_is_refused_by_every_reader(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], ranks: tuple[int, ...], version: int
) -> None:
    folder, began = _WORLD.run(tmp_path).folder, began_ns(tmp_path)
    add_launch(folder, {"launch": "x", "time_ns": began, "host": "h", "pid": 1}, {"over": "x", "code": 0, "time_ns": 1})
    for rank in ranks:
        of_format(version, file_of(folder, rank))
    assert main([*words, str(folder)]) == 2
    said = capsys.readouterr()
    upgrade = "upgrade lockstep, or " if version > 1 else ""
    assert said.err == (
        f"lockstep: {file_of(folder, ranks[0])}: line 1 begins a record of format {version}, and this lockstep knows "
        f"format 1: {upgrade}use the version that wrote it\n"
    )
    assert said.out == ""
    assert not (folder / "report.html").exists()


def test_record_that_another_version_goes_on_with_is_refused_whenever_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of(_WORLD.run(tmp_path).folder, 1)
    monkeypatch.setattr("lockstep.observe.report.writing._PERIOD_S", 0)  # each look is due
    monkeypatch.setattr("lockstep.observe.report.writing._SHARE", 0)
    live = LiveDocument(tmp_path)
    view = TerminalView(tmp_path, live)
    assert view.look().run["steps"] == 12
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines, lines[0].replace(b'"start":1', b'"start":2'), *lines[1:]]))
    for look in (RunReader(tmp_path).read, view.look, live, live):
        with pytest.raises(OtherFormat, match=rf"rank-1.jsonl: line {len(lines) + 1} begins a record of format 2, and"):
            look()


def test_file_without_a_whole_line_and_a_last_line_without_an_end(tmp_path: Path) -> None:
    folder = _WORLD.run(tmp_path).folder
    path, now = file_of(folder, 1), time.time_ns()
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    profile, report = said(folder)
    assert "damaged  rank-1.jsonl: its last line has no end; what can be read is counted\n" in profile
    assert report == "rank-1.jsonl: its last line has no end"
    for cut in (b"", whole[:40], bytes(5000)):
        path.write_bytes(cut)
        profile, report = said(folder)
        assert "damaged  rank-1.jsonl: there is no whole line in it; what can be read is counted\n" in profile
        assert report == "rank-1.jsonl: there is no whole line in it"
    file_of(folder, 0).write_bytes(b"")
    with pytest.raises(ConfigError, match=r"holds no record that can be read: rank-0.jsonl: there is no whole line"):
        document_in(folder)
    add_launch(folder, {"launch": "x", "time_ns": now, "host": socket.gethostname(), "pid": os.getpid()})
    _, document = document_in(folder)
    assert document["run"]["status"] == "running"
    assert [card["title"] for card in document["cards"]] == []  # its ranks are about to write
    add_launch(folder, {"over": "x", "code": 0, "time_ns": now})
    _, document = document_in(folder)
    assert [card["title"] for card in document["cards"]] == ["Nothing that ranks recorded can be read"]


def test_disk_that_takes_only_a_part_is_said_by_the_rank_and_by_who_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # as a disk with so little room
    try:
        World(work_us=lambda rank, step: 1000, steps=5).run(tmp_path)  # each rank writes once
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [file_of(tmp_path, rank).stat().st_size for rank in (0, 1)] == [1000, 1000]
    told = capsys.readouterr().err
    assert [f"rank {rank} is not recorded any more: " in told for rank in (0, 1)] == [True, True]
    assert said(tmp_path)[1] == "rank-0.jsonl: its last line has no end\nrank-1.jsonl: its last line has no end"


def test_record_without_a_step_that_can_be_read_is_not_said_to_have_had_none(tmp_path: Path) -> None:
    folder = _WORLD.run(tmp_path).folder
    for rank in (0, 1):
        path = file_of(folder, rank)
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join([*lines[:3], b"other\n", *lines[3:]]))
    with pytest.raises(ConfigError, match=r"no step that has ended: rank-0.jsonl: line 4 is .* no JSON .* 'other'"):
        list(describe(folder))
    _, document = document_in(folder)
    assert [card["title"] for card in document["cards"]] == ["Some of the record cannot be read"]


def test_what_is_none_of_a_launcher_is_named_and_half_a_line_of_one_that_was_killed_is_not(tmp_path: Path) -> None:
    folder = _WORLD.run(tmp_path).folder
    begun = json.dumps({"launch": "x", "time_ns": began_ns(folder), "host": "h", "pid": 1}) + "\n"
    (folder / LAUNCH).write_text(f'{begun}{begun[:20]}{begun}{{"over":')
    assert said(folder)[1] == ""
    for other in ("\ufffd\x07", '{"attempt": 3}', "null"):
        (folder / LAUNCH).write_text(f"{begun}{other}\n")
        assert said(folder)[1] == f"launch.jsonl: line 2 is none of a launcher: {other!r}"


def test_file_that_cannot_be_opened_and_one_that_is_not_there(tmp_path: Path) -> None:
    path = file_of(_WORLD.run(tmp_path).folder, 1)
    path.unlink()
    profile, report = said(tmp_path)
    assert "1 of 2 ranks" in profile
    assert not report
    path.mkdir()  # as without rights: the tests may run as root
    profile, report = said(tmp_path)
    assert "damaged  rank-1.jsonl: Is a directory" in profile
    assert report == "rank-1.jsonl: Is a directory"


def test_nothing_that_can_be_read_is_said_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no record of a run"):
        said(tmp_path)
    for rank in (0, 1):
        file_of(tmp_path, rank).write_bytes(random.Random(rank).randbytes(500) + b"\n")
    with pytest.raises(ConfigError, match=r"can be read[;:] rank-\d.jsonl: line 1 "):
        said(tmp_path)
    with pytest.raises(ConfigError, match=r"no record of a rank that can be read; rank-0.jsonl: line 1 "):
        list(describe(tmp_path))


def test_no_flipped_byte_is_more_than_an_error_that_says_so(tmp_path: Path) -> None:
    folder = _WORLD.run(tmp_path).folder
    add_notes(folder, 1, ("buckets", 4, {"step": 4, "count": 3, "bytes": 6000, "last_bytes": 1000, "hidden_us": 1500}))
    add_launch(folder, {"launch": "x", "time_ns": 1, "host": "h", "pid": 1})
    path, chance = file_of(folder, 1), random.Random(5)
    whole = path.read_bytes()
    for _ in range(50):
        flipped = bytearray(whole)
        for _ in range(chance.choice((1, 1, 8))):
            flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
        path.write_bytes(flipped)
        with suppress(ConfigError):
            said(folder)
