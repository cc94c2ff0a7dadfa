"""What ranks let each other know: it survives its way, stays small, and shows enough to compare by."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.observe.flight import Mark, Record
from lockstep.observe.status import FINISHED, RAISED, RUNNING, Folding, LastWords, Progress, Stalled, Status, Waiting

NUMBERS = st.integers(0, (1 << 62) - 1)
SECONDS = st.floats(0, 1e6)
MARKS = st.builds(Mark, NUMBERS, NUMBERS, NUMBERS)
RECORDS = st.builds(Record, *[NUMBERS] * 6, st.booleans(), *[st.text(max_size=20)] * 4)
PROGRESS = st.builds(Progress, st.lists(st.integers(0, 99)).map(tuple), NUMBERS, st.lists(MARKS, max_size=4).map(tuple))
STATUSES = st.builds(
    Status,
    rank=st.integers(0, 99),
    world_size=st.integers(1, 100),
    pid=NUMBERS,
    host=st.text(max_size=9),
    step=NUMBERS,
    step_s=SECONDS,
    state=st.sampled_from([RUNNING, RAISED, FINISHED]),
    groups=st.dictionaries(st.text(max_size=5), PROGRESS, max_size=3),
    waiting=st.lists(st.builds(Waiting, RECORDS, SECONDS), max_size=3).map(tuple),
    last=st.none() | RECORDS,
    stack=st.lists(st.text(max_size=9), max_size=3).map(tuple),
    unmoved_s=SECONDS,
    activity=st.sampled_from(["", "checkpoint"]),
    words=st.none() | st.builds(LastWords, *[st.text(max_size=9)] * 3, st.booleans()),
    stalled=st.none() | st.builds(Stalled, st.text(max_size=9), *[st.lists(NUMBERS).map(tuple)] * 2, st.text()),
)


@settings(max_examples=50, deadline=None)
@given(STATUSES)
def test_a_status_survives_its_way(status: Status) -> None:
    assert Status.from_json(status.to_json()) == status


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"3", b"null", b"{}", b'{"groups": []}', b"\xff"])
def test_what_is_no_status_is_refused(text: bytes) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        Status.from_json(text)


@settings(max_examples=60, deadline=None)
@given(STATUSES, st.data())
def test_a_status_cut_short_is_refused(status: Status, data: st.DataObject) -> None:
    """As the memory of a rank that died holds it."""
    text = status.to_json()
    with pytest.raises((ValueError, KeyError, TypeError)):
        Status.from_json(text[: data.draw(st.integers(0, len(text) - 1))])


@pytest.mark.parametrize("field", ["groups", "waiting", "last", "stack", "words", "stalled"])
@pytest.mark.parametrize("value", [3, "x", [3], {"a": 3}, [[1, 2], 3]])
def test_fields_of_another_kind_are_refused_or_kept(field: str, value: object) -> None:
    """Never an error that the reader does not expect."""
    raw = json.loads(Status(0, 2, 1, "h").to_json())
    raw[field] = value
    try:
        Status.from_json(json.dumps(raw).encode())
    except (ValueError, KeyError, TypeError):
        return
    assert field in ("stack", "words")  # words of words


# ------------------------------------------------------------------ small enough


@cache
def folded(count: int, name: int = 0) -> Progress:
    fold = Folding(range(8))
    for seq in range(count):
        fold.add(Mark(seq, seq // 7, (1 << 61) + 977 * seq + name))
    return fold.progress()


@pytest.mark.parametrize("groups", [1, 10, 40, 200])
def test_a_status_of_many_groups_fits(groups: int) -> None:
    """The newest mark of each is there, and how far each has come."""
    whole = Status(0, 8, 1, "h", groups={f"group{i}": folded(3000, i % 5) for i in range(groups)})
    text = whole.to_json()
    assert len(text) <= 60_000
    read = Status.from_json(text)
    assert read.groups.keys() == whole.groups.keys()
    for name, progress in read.groups.items():
        assert progress.count == 3000
        assert progress.marks[-1] == whole.groups[name].marks[-1]
    assert (read.groups == whole.groups) == (groups <= 10)


@pytest.mark.parametrize("models", [10, 400, 4000])
def test_a_status_of_many_models_fits_and_tells_of_the_last_ones(models: int) -> None:
    facts = {
        f"sync world/8/{number}": {str(step): [1, 0, "train.py:7 train"] for step in range(9)}
        for number in range(models)
    }
    whole = Status(0, 8, 1, "h", groups={"world": folded(3000)}, facts=facts)
    text = whole.to_json()
    assert len(text) <= 56_000
    read = Status.from_json(text)
    assert (read.facts == facts) == (models <= 10)
    assert read.facts.items() <= facts.items()
    assert [*read.facts] == [*facts][-len(read.facts) :]
    assert read.groups["world"].marks[-1] == whole.groups["world"].marks[-1]


def test_of_more_groups_than_fit_those_that_are_used_are_told() -> None:
    """The first one, of all ranks, is used to the end; the others were made in one step each, and are gone."""
    world = Folding(range(8))
    for step in range(2001):
        world.add(Mark(step, step, 1 << 61))
    used = {"world": world.progress()}
    gone = {f"group{step}": Progress((0, 1), 1, (Mark(0, step, 977 * step),)) for step in range(2000)}
    whole = Status(0, 8, 1, "h", step=2000, groups=used | gone, facts={"caught": {"caught": [1, "t.py:1", "an error"]}})
    read = Status.from_json(whole.to_json())
    assert len(whole.to_json()) <= 56_000
    assert {"world", "group1999", "group1800"} < read.groups.keys()
    assert len(read.groups) >= 200
    assert read.facts == whole.facts


def test_without_room_for_groups_the_rest_is_told() -> None:
    whole = Status(0, 8, 1, "h", groups={"world": folded(3000)}, activity="checkpoint")
    assert Status.from_json(whole.to_json(room=220)) == replace(whole, groups={})


# ------------------------------------------------------------------ what is kept to compare by


@pytest.mark.parametrize("count", [0, 1, 31, 96, 97, 98, 5000])
def test_the_marks_stay_few_and_keep_the_newest(count: int) -> None:
    marks = folded(count).marks
    assert len(marks) <= 97
    assert [mark.seq for mark in marks[-32:]] == list(range(max(0, count - 32), count))
    assert list(marks) == sorted(marks)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4000), st.integers(0, 950))
def test_ranks_that_are_apart_still_have_a_mark_in_common(behind: int, ahead: int) -> None:
    """One may be almost a thousand collectives ahead: they meet at the newest common 32nd, or later."""
    slow, fast = folded(behind), folded(behind + ahead)
    common = {mark.seq for mark in slow.marks} & {mark.seq for mark in fast.marks}
    assert common
    assert max(common) >= behind - 32


def test_marks_may_be_left_out() -> None:
    """A guard that came late saw only some of the operations."""
    fold = Folding([0, 1])
    for seq in (3, 4, 900, 901):
        fold.add(Mark(seq, 0, seq))
    assert fold.progress().count == 902
    assert [mark.seq for mark in fold.progress().marks] == [3, 4, 900, 901]
