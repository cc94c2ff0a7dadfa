"""Where the terminal view has its figures from: the end of each record, and flight records, also of dead ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from lockstep.observe.flight import FlightRecorder, pack_words
from lockstep.observe.onlooker import Onlooker
from lockstep.observe.profile.run_record import Start, Steps, file_of, start_line, steps_line
from lockstep.observe.report.rank_rows import Stand, Tail, row_of
from lockstep.observe.report.source import places_of
from lockstep.observe.report.terminal import TerminalView
from lockstep.observe.sights import flight_path
from lockstep.observe.status import Status
from lockstep.observe.wording import Finding

PHASES_US = (5_000, 20_000, 40_000, 15_000, 10_000, 10_000)


def run(status: str = "running", **fields: Any) -> dict[str, Any]:
    return {"id": "gpt2-tiny", "status": status, "wall_s": 192.4, **fields}


def start(rank: int = 0, attempt: str = "a/0") -> Start:
    return Start(rank, 2, attempt, 4711, "node-7", 0, 0)


def steps(step: int, wall_us: int = 100_000, count: int = 1) -> Steps:
    phases = tuple(count * us for us in PHASES_US)
    return Steps(step, count, 0, count * wall_us, wall_us, phases, tokens=count * 500, rss_mib=640)


LAUNCHED = json.dumps({"launch": "x", "time_ns": 1, "host": "h", "pid": 1})


def attempt(name: str, flights: str) -> str:
    return json.dumps({"attempt": name, "world_size": 2, "time_ns": 1, "flights": flights})


def append(path: Path, *lines: str) -> None:
    with path.open("a") as file:
        file.writelines(lines)


def test_a_record_is_read_on_as_it_grows(tmp_path: Path) -> None:
    path = file_of(tmp_path, 0)
    tail = Tail(path)
    tail.read()
    append(path, '{"sta')
    tail.read()
    assert not tail.host
    path.unlink()

    append(path, start_line(start()), steps_line(steps(1)))
    tail.read()
    append(path, steps_line(steps(2)), '{"values": 2, "at_us": 7, "loss": 0.5}\n', steps_line(steps(10, count=8))[:20])
    tail.read()
    assert (tail.step, tail.values, len(tail.paces)) == (2, {"loss": 0.5}, 2)
    append(path, steps_line(steps(10, count=8))[20:], '{"values": 9, "lr": 0.1}\n')
    tail.read()

    assert (tail.host, tail.step, tail.memory_mib) == ("node-7", 10, 640)
    assert tail.values == {"loss": 0.5, "lr": 0.1}
    assert [pace.wall_us // pace.count for pace in tail.paces] == [100_000] * 3


def test_of_a_long_record_the_end_is_read(tmp_path: Path) -> None:
    path = file_of(tmp_path, 0)
    append(path, start_line(start()), *(steps_line(steps(step)) for step in range(1, 2000)))

    tail = Tail(path)
    tail.read()

    assert (tail.host, tail.step, len(tail.paces)) == ("node-7", 1999, 32)


@pytest.mark.parametrize(
    "line",
    [
        *("5", "null", "[]", '["start"]', '"start"', "{}", '{"start": 1}', '{"step": "x"}', '{"step": 3, "count": 0}'),
        *('{"step": 3, "phases_us": 7}', '{"step": 3, "phases_us": [1]}', '{"step": 3, "wall_us": "long"}'),
        *('{"values": "x"}', '{"values": NaN}', '{"values": [], "loss": 7}', "\x00\x00", '{"step": 9, "tokens": null}'),
    ],
)
def test_line_that_is_none_of_a_record_is_left_out(tmp_path: Path, line: str) -> None:
    path = file_of(tmp_path, 0)
    append(path, start_line(start()), steps_line(steps(1)), line + "\n", '{"values": 2, "loss": 0.5}\n')
    tail = Tail(path)
    tail.read()
    append(path, line + "\n", steps_line(steps(2)))
    tail.read()
    row = row_of(0, tail, None, Stand("good", "running"))
    assert (row.step, row.host, len(row.steps_ms), tail.values) == (2, "node-7", 2, {"loss": 0.5})
    assert row.step_ms == pytest.approx(100.0)


def test_a_rank_that_starts_again_begins_anew(tmp_path: Path) -> None:
    path = file_of(tmp_path, 0)
    append(path, start_line(start()), steps_line(steps(7)), '{"step": 8, "wa')
    tail = Tail(path)
    tail.read()
    append(path, start_line(start(attempt="a/1")), steps_line(steps(6)))
    tail.read()

    assert tail.step == 6


@pytest.mark.parametrize("count", [2, 9, 99])
def test_another_run_takes_the_place_of_the_first(tmp_path: Path, count: int) -> None:
    path = file_of(tmp_path, 0)
    append(path, start_line(start()), *(steps_line(steps(step)) for step in range(1, 9)))
    tail = Tail(path)
    tail.read()
    path.rename(tmp_path / "older")
    append(path, start_line(start()), *(steps_line(steps(step)) for step in range(1, count)))
    tail.read()

    assert tail.step == count - 1


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([], []),
        ([attempt("a", "/one"), attempt("b", "")], []),
        ([attempt("a", "/one"), attempt("b", "/two"), '{"news": "b"}'], ["/two"]),
        ([attempt("b", "/two"), '{"at', attempt("b", "/three")], ["/two", "/three"]),
    ],
)
def test_the_newest_start_says_where_its_flight_records_lie(tmp_path: Path, lines: list[str], found: list[str]) -> None:
    assert places_of(tmp_path)[1] == ()
    append(tmp_path / "launch.jsonl", *(line + "\n" for line in [LAUNCHED, *lines]), '{"attempt": "c", "flig')

    assert places_of(tmp_path)[1] == tuple(map(Path, found))


@pytest.fixture
def flights(tmp_path: Path) -> Iterator[tuple[Path, list[FlightRecorder]]]:
    """Two ranks of this machine, told of in launch.jsonl; this process is both."""
    folder = tmp_path / "flights"
    folder.mkdir()
    recorders = [FlightRecorder(flight_path(folder, rank), rank, 2) for rank in range(2)]
    append(tmp_path / "launch.jsonl", LAUNCHED + "\n", attempt("a", str(folder)) + "\n")
    for recorder in recorders:
        recorder.tell(Status(recorder.rank, 2, os.getpid(), "here", step=5).to_json())
    yield tmp_path, recorders
    for recorder in recorders:
        recorder.close()


def test_an_onlooker_sees_ranks_after_their_files_are_gone(flights: tuple[Path, list[FlightRecorder]]) -> None:
    folder, recorders = flights
    recorders[1].enter(0, pack_words("world", "barrier", "t.py:1 f"))
    onlooker = Onlooker()
    onlooker.follow(places_of(folder)[1])
    assert list(onlooker.sights()) == [0, 1]

    for rank in range(2):
        flight_path(folder / "flights", rank).unlink()

    assert [sight.status.step for sight in onlooker.sights().values()] == [5, 5]
    assert [record.text for record in onlooker.records_of(1)] == ["barrier"]
    onlooker.follow([folder / "other"])
    assert not onlooker.sights()
    onlooker.close()


def test_a_file_that_is_being_made_is_looked_at_again(tmp_path: Path) -> None:
    path = flight_path(tmp_path, 0)
    path.write_bytes(b"")
    onlooker = Onlooker()
    onlooker.follow([tmp_path])
    assert not onlooker.sights()
    path.unlink()
    recorder = FlightRecorder(path, 0, 1)
    recorder.tell(Status(0, 1, os.getpid(), "here").to_json())

    assert list(onlooker.sights()) == [0]
    onlooker.close()
    recorder.close()


def test_what_the_ranks_have_found_is_a_card_until_the_document_has_it(
    flights: tuple[Path, list[FlightRecorder]],
) -> None:
    folder, _ = flights
    cards: list[dict[str, Any]] = []
    view = TerminalView(folder, lambda: {"run": run(), "cards": list(cards)})
    onlooker = Onlooker()
    onlooker.follow(places_of(folder)[1])
    onlooker.sights()
    found = Finding("gone", (1,), "lockstep: GONE in step 5.\n  rank 1 was last seen", True, "gone:1")
    record, _ = next(iter(onlooker._records.values()))
    record.put_up(found.to_json().encode())

    assert view.look().cards == [{"severity": "error", "title": "GONE in step 5.", "text": "  rank 1 was last seen"}]
    cards.append({"severity": "error", "title": "rank 1 has ended", "text": found.text})
    assert view.look().cards == cards
    onlooker.close()
    view._onlooker.close()


def test_the_view_joins_records_and_flights(flights: tuple[Path, list[FlightRecorder]]) -> None:
    folder, _ = flights
    append(file_of(folder, 0), start_line(start()), steps_line(steps(4)), '{"values": 4, "loss": 2.5}\n')
    (folder / "rank-x.jsonl").touch()
    view = TerminalView(folder, lambda: {"run": run(world_size=2), "cards": []})

    seen = view.look()

    assert [(each.ranks, each.host, each.step, str(each.stand)) for each in seen.rows] == [
        ((0,), "here", 5, "running"),
        ((1,), "here", 5, "running"),
    ]
    assert seen.values == {"loss": 2.5}
    assert (seen.rows[0].step_ms, seen.rows[0].tokens_per_s) == (100.0, 5000.0)
    view._onlooker.close()


def test_time_passes_while_nothing_new_is_recorded(tmp_path: Path) -> None:
    began = (datetime.now(timezone.utc) - timedelta(seconds=90)).isoformat()
    running, over = (
        TerminalView(tmp_path, lambda status=status: {"run": run(status, began=began), "cards": []}).look().run
        for status in ("running", "finished")
    )

    assert 90 <= running["wall_s"] < 150
    assert over["wall_s"] == 192.4
