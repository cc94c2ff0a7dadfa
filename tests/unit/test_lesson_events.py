"""Events of a lesson: kept as lines, put together as screens, drawn as lanes; nothing of torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lesson_trace import trace
from lockstep.cli.pager import pages
from lockstep.errors import ConfigError
from lockstep.learn.events import Event, Screen, count, file_of, numbers, read_events, screens, spark, words
from lockstep.learn.lanes import draw, rows
from lockstep.learn.replay import replay


def screen(rank: int, title: str, at: int = 0) -> Event:
    return Event(rank, "screen", at, at, title, f"about {title}")


def show(rank: int, at: int, value: float, name: str = "x") -> Event:
    return Event(rank, "show", at, at, name, dtype="float32", shape=(1,), bytes=4, after=(value,))


def message(kind: str, rank: int, peer: int, began: int, ended: int, value: float = 1.0) -> Event:
    values = {"before": (value,)} if kind == "send" else {"after": (value,)}
    return Event(rank, kind, began, ended, peer=peer, dtype="float32", shape=(1,), bytes=4, **values)


def write(folder: Path, ranks: list[list[Event]]) -> None:
    for rank, events in enumerate(ranks):
        text = "".join(json.dumps(event.to_json()) + "\n" for event in events)
        file_of(folder, rank).write_text(text)


def test_events_come_back_from_their_lines(tmp_path: Path) -> None:
    ranks = [[screen(0, "one"), message("send", 0, 1, 2, 5, 3.5)], [screen(1, "one"), message("recv", 1, 0, 1, 6, 3.5)]]
    write(tmp_path, ranks)
    assert read_events(tmp_path) == ranks


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, [[screen(0, "one"), show(0, 1, 7.0)]])
    path = file_of(tmp_path, 0)
    path.write_text(path.read_text()[:-5])
    assert read_events(tmp_path) == [[screen(0, "one")]]


def test_a_folder_without_events_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lockstep learn NAME"):
        read_events(tmp_path)


def test_screens_gather_what_all_ranks_did_under_one_title() -> None:
    found = screens([
        [show(0, 0, 0.0), screen(0, "one", 1), show(0, 2, 1.0), screen(0, "two", 5), show(0, 6, 2.0)],
        [screen(1, "one", 1), show(1, 3, 10.0), screen(1, "two", 5), show(1, 7, 20.0)],
    ])  # fmt: skip
    assert [(one.title, one.text) for one in found] == [("one", "about one"), ("two", "about two")]
    assert [[event.after[0] for event in one.events] for one in found] == [[1.0, 10.0], [2.0, 20.0]]


def test_a_rank_that_is_gone_is_missing_until_it_is_back() -> None:
    first, second = screens([
        [screen(0, "before"), show(0, 1, 1.0), screen(0, "after"), show(0, 9, 2.0)],
        [screen(1, "before"), screen(1, "killed here"), screen(1, "after"), show(1, 9, 3.0)],
    ])  # fmt: skip
    assert [event.rank for event in first.events] == [0]
    assert [event.rank for event in second.events] == [0, 1]


def test_steps_of_a_ring_stand_side_by_side_though_the_ranks_ran_one_after_the_other() -> None:
    """Each step of a rank ends at its own time, but no message of a step waits for another one of it."""
    world_size, events = 3, []
    for rank in range(world_size):
        for step in range(2):
            began, ended = 100 * step + 10 * rank, 100 * step + 90
            events.append(message("send", rank, (rank + 1) % world_size, began, ended, 10.0**rank))
            events.append(
                message("recv", rank, (rank - 1) % world_size, began, ended, 10.0 ** ((rank - 1) % world_size))
            )
    assert [row.level for row in rows(events)] == [0, 0, 0, 1, 1, 1]


def test_a_chain_goes_down_the_page_whatever_the_clocks_say() -> None:
    events = [
        message("send", 0, 1, 0, 900),  # hears late that it has arrived
        message("recv", 1, 0, 0, 10),
        message("send", 1, 2, 11, 12, 11.0),
        message("recv", 2, 1, 0, 20, 11.0),
    ]
    assert [(row.level, row.events[0].before) for row in rows(events)] == [(0, (1.0,)), (1, (11.0,))]


def test_a_collective_comes_after_the_messages_that_it_is_made_of() -> None:
    parts = [message("send", 0, 1, 5, 6), message("recv", 1, 0, 5, 7)]
    whole = [Event(rank, "broadcast", 1, 9, peer=0, after=(1.0,)) for rank in (0, 1)]
    assert [row.events[0].kind for row in rows([*whole, *parts])] == ["send", "broadcast"]


def test_a_name_that_is_too_long_for_a_lane_has_a_line_of_its_own() -> None:
    events = [show(rank, 0, 10.0**rank, "a_name_as_long_as_a_lane_is") for rank in range(3)]
    ranks, name, values = (line.plain for line in draw(events, 3, 80))
    assert name.strip() == "a_name_as_long_as_a_lane_is:"
    assert [ranks.index(f"rank {rank}") for rank in range(3)] == [values.index(f"[{10**rank}]") for rank in range(3)]


def test_nothing_is_drawn_where_nothing_happened() -> None:
    assert draw([], 3, 80) == []


@pytest.mark.parametrize("height", [1, 9, 14, 21, 500])
def test_a_screen_that_is_higher_than_the_window_goes_on_on_the_next_page(height: int) -> None:
    high = Screen("High", "words " * 30, tuple(show(0, at, at) for at in range(30)))
    found = pages([high, Screen("Empty", "", ())], 2, "lesson", 80, height)
    lines = [line.plain for page in found for line in page]
    assert [line for line in lines if " x = " in line] == [f" x = [{at}]" for at in range(30)]
    assert all(page[0].plain.startswith("lesson  1/2  High") for page in found[:-1])
    assert found[-1][0].plain == "lesson  2/2  Empty"
    assert all("rank 0" in "".join(line.plain for line in page) for page in found[:-1])
    if height > 8:  # the head alone has seven lines
        assert max(map(len, found)) <= height
    assert (len(found) == 2) == (height == 500)


def test_a_message_whose_other_end_is_missing_is_drawn_open() -> None:
    (_, line) = draw([message("send", 0, 1, 0, 5)], 2, 80)
    assert "o" in line.plain
    assert "?" in line.plain


@given(
    st.lists(
        st.builds(
            message,
            st.sampled_from(["send", "recv"]),
            st.integers(0, 2),
            st.integers(0, 2),
            st.integers(0, 50),
            st.integers(50, 99),
        ).filter(lambda event: event.rank != event.peer)
        | st.builds(show, st.integers(0, 2), st.integers(0, 99), st.floats(-1e6, 1e6)),
        max_size=30,
    ),
    st.integers(20, 120),
)
def test_whatever_happened_is_drawn_once_and_fits(events: list[Event], width: int) -> None:
    assert sum(len(row.events) for row in rows(events)) == len(events)
    lines = draw(events, 3, width)
    if width >= 60:
        assert all(line.cell_len <= width for line in lines)


@pytest.mark.parametrize(
    ("values", "shape", "text"),
    [((1.0,), (), "1"), ((1.0, 2.5), (2,), "[1, 2.5]"), ((1.0,) * 12, (40,), "[1, 1, 1, ..]"), ((), (0,), "[]")],
)
def test_numbers(values: tuple[float, ...], shape: tuple[int, ...], text: str) -> None:
    assert numbers(values, shape) == text


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (9_999, "9999 B"), (65_536, "64 KiB"), (64 << 20, "64 MiB")])
def test_bytes(size: int, text: str) -> None:
    assert count(size) == text


def test_spark_is_as_high_as_the_values() -> None:
    assert spark((0.0, 5.0, 10.0)) == "_-#"
    assert spark((1.0, 1.0)) == "__"
    assert len(spark(tuple(map(float, range(1000))))) == 24


def test_a_trace_leaves_out_what_was_measured() -> None:
    text = trace([[screen(0, "one"), show(0, 1, 12.3, "step_ms"), show(0, 2, 7.0)]])
    assert text == "1. one\n  rank 0  step_ms was measured\n  rank 0  x = [7]\n"


def test_words_of_what_a_rank_says() -> None:
    assert words(Event(2, "say", text="it is over")) == "it is over"
    assert words(Event(0, "barrier", name="all are there")) == "barrier  all are there"


def test_nothing_in_a_lesson_becomes_markup() -> None:
    hostile = "</script><script>alert(1)</script>&<b>"
    (found,) = screens([[screen(0, hostile), Event(0, "say", 1, 1, text=hostile), show(0, 2, 1.0, hostile)]])
    page = replay(hostile, hostile, [found], 1)
    assert page.isascii()
    assert page.count("<script") == 2
    assert "<b>" not in page
