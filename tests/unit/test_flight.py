"""The flight record: the last operations of a rank, as others see them."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.comm.waiting import wait_until
from lockstep.errors import ConfigError
from lockstep.observe.flight import RECORDS, FlightRecorder, MessageNumbers, pack_words
from lockstep.observe.sights import FlightRecord

# A writer whose records say everything twice: `seq` is the number, and so is the text.
WRITER = """
import sys
from lockstep.observe.flight import FlightRecorder, pack_words
recorder = FlightRecorder(sys.argv[1], 3, 5)
words = [pack_words("world", f"op {n}", f"train.py:{n} f", f"label {n}") for n in range(7919)]
number = 0
while True:
    recorder.set_step(number // 4)
    recorder.leave(recorder.enter(number, words[number % 7919]))
    if number % 64 == 0:
        recorder.tell(b"%d " % number * (1 + number % 997))
    number += 1
"""


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[FlightRecorder]:
    made = FlightRecorder(tmp_path / "flight", rank=3, world_size=5)
    yield made
    made.close()


@pytest.fixture
def record(recorder: FlightRecorder) -> Iterator[FlightRecord]:
    opened = FlightRecord(recorder.path)
    yield opened
    opened.close()


def is_whole(number: int, seq: int, step: int, text: str, site: str, label: str) -> bool:
    word = number % 7919
    return (seq, step, text, site, label) == (number, number // 4, f"op {word}", f"train.py:{word} f", f"label {word}")


# ------------------------------------------------------------------ one rank


def test_a_new_record_says_who_it_is(record: FlightRecord) -> None:
    header = record.header()
    assert (header.rank, header.world_size, header.pid, header.step, header.started) == (3, 5, os.getpid(), 0, 0)
    assert record.records() == []
    assert record.status() == b""


def test_many_alike_are_entered_as_one_after_the_other(
    recorder: FlightRecorder, record: FlightRecord, tmp_path: Path
) -> None:
    each = FlightRecorder(tmp_path / "each", rank=3, world_size=5)
    other = FlightRecord(each.path)
    words = pack_words("dp", "collective", "train.py:88 step", "by this line")
    all_at_once, one_by_one = count(5), count(5)
    for step, many in enumerate((1, 8, RECORDS + 3)):
        for made, numbers in (recorder, all_at_once), (each, one_by_one):
            made.set_step(step)
            made.enter(next(numbers), words)
        entered = [each.enter(next(one_by_one), words) for _ in range(many)]
        assert [*recorder.enter_all(all_at_once, words, many, recorder.its_step())] == entered
        found = [[one._replace(entered_ns=0) for one in seen.records()] for seen in (record, other)]
        assert found[0] == found[1]
        assert recorder.started == each.started
    each.close()
    other.close()


def test_an_operation_is_open_until_it_is_left(recorder: FlightRecorder, record: FlightRecord) -> None:
    recorder.set_step(7)
    before_ns = time.monotonic_ns()
    number = recorder.enter(2, pack_words("dp", "all_reduce float32 [4] sum", "train.py:88 step", "bucket0"))
    (one,) = record.records()
    assert (one.number, one.seq, one.step, one.is_message) == (number, 2, 7, False)
    assert (one.group, one.text, one.site, one.label) == (
        "dp",
        "all_reduce float32 [4] sum",
        "train.py:88 step",
        "bucket0",
    )
    assert before_ns <= one.entered_ns <= time.monotonic_ns()
    assert one.left_ns == 0
    recorder.leave(number)
    (one,) = record.records()
    assert one.left_ns >= one.entered_ns
    assert record.header().step == 7


def test_leaving_what_the_ring_has_overwritten_changes_nothing(recorder: FlightRecorder, record: FlightRecord) -> None:
    words = pack_words("world", "barrier", "x.py:1 f")
    first = recorder.enter(0, words)
    for seq in range(1, RECORDS + 1):
        recorder.enter(seq, words)
    recorder.leave(first)
    assert all(one.left_ns == 0 for one in record.records())


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([0, 1, 2, 500, RECORDS - 1, RECORDS, RECORDS + 1, 2 * RECORDS + 77]),
    st.integers(0, 3 * RECORDS),
    st.integers(0, 1 << 32),
)
def test_the_ring_holds_the_newest(tmp_path_factory: pytest.TempPathFactory, count: int, since: int, seed: int) -> None:
    """Whatever is issued, in whatever groups: the last 2048 are there, in order, with what was said of them."""
    random = Random(seed)
    recorder = FlightRecorder(tmp_path_factory.mktemp("flight") / "flight", 0, 2)
    record = FlightRecord(recorder.path)
    said = []
    for number in range(count):
        if random.random() < 0.2:
            recorder.set_step(recorder.step + 1)
        group, is_message = random.choice("abc"), random.random() < 0.3
        text = random.choice(["send", "", "all_reduce float32 [3, 5] sum", "größer"])
        assert recorder.enter(random.randrange(1 << 40), pack_words(group, text, "f.py:1 g"), is_message) == number
        said.append((number, recorder.step, group, text, is_message))
    found = [(one.number, one.step, one.group, one.text, one.is_message) for one in record.records()]
    later = [one.number for one in record.records(since)]
    record.close()
    recorder.close()
    assert found == said[-RECORDS:]
    assert later == [number for number in range(count)[-RECORDS:] if number >= since]


@given(*[st.text(max_size=150)] * 4)
@settings(max_examples=150, deadline=None)
def test_words_of_any_length_stay_within_their_fields(group: str, text: str, site: str, label: str) -> None:
    words = pack_words(group, text, site, label)
    assert len(words.stored) <= 206  # what a record has room for
    parts = words.stored.decode(errors="replace").split("\0")
    assert len(parts) == 4
    for said, kept in zip((group, text, site, label), parts, strict=True):
        is_cut = kept.endswith("..") and len(kept.encode()) < len(said.encode()) + 3
        assert kept == said.replace("\0", " ") or is_cut


def digests(folder: Path, calls: list[tuple[str, str, int, bool]]) -> dict[str, int]:
    """By group, of a rank that issued these: group, text, step, is it a message."""
    recorder = FlightRecorder(folder / "flight", 0, 2)
    record = FlightRecord(recorder.path)
    for number, (group, text, step, is_message) in enumerate(calls):
        recorder.set_step(step)
        recorder.enter(number, pack_words(group, text, "x.py:1 f"), is_message)
    found = {one.group: one.digest for one in record.records() if not one.is_message}
    record.close()
    recorder.close()
    return found


CALLS = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from(["x", "y"]), st.integers(0, 3), st.booleans()), max_size=8
)


@settings(max_examples=120, deadline=None)
@given(CALLS, CALLS)
def test_digests_are_equal_exactly_where_the_collectives_are(
    tmp_path_factory: pytest.TempPathFactory, first: list, second: list
) -> None:
    """Group by group: the texts and steps of its collectives, in order. Messages and other groups do not count."""

    def by_group(calls: list[tuple[str, str, int, bool]]) -> dict[str, list[tuple[str, int]]]:
        found: dict[str, list[tuple[str, int]]] = {}
        for group, text, step, is_message in calls:
            if not is_message:
                found.setdefault(group, []).append((text, step))
        return found

    mine, its = (digests(tmp_path_factory.mktemp("flight"), calls) for calls in (first, second))
    for group in mine.keys() & its.keys():
        assert (mine[group] == its[group]) == (by_group(first)[group] == by_group(second)[group])


def test_the_digest_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Python's hash of a string is not: it differs from process to process."""
    assert digests(tmp_path, [("world", "all_reduce float32 [4] sum", 3, False), ("world", "barrier", 4, False)]) == {
        "world": 2961197744485394868
    }


# ------------------------------------------------------------------ the status


def test_the_newest_status_is_read(recorder: FlightRecorder, record: FlightRecord) -> None:
    recorder.tell(b"a" * 5000)
    assert record.status() == b"a" * 5000
    alive_ns = record.header().alive_ns
    recorder.tell(b"b")
    assert record.status() == b"b"
    assert record.header().alive_ns > alive_ns


def test_threads_may_enter_at_the_same_time(recorder: FlightRecorder, record: FlightRecord) -> None:
    def issue(group: str) -> None:
        words = pack_words(group, "all_reduce", "x.py:1 f")
        for seq in range(200):
            recorder.leave(recorder.enter(seq, words))

    threads = [threading.Thread(target=issue, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.enter(0, pack_words("end", "", ""))
    found = record.records()
    assert [one.number for one in found] == list(range(801))
    for name in "abcd":
        assert [one.seq for one in found if one.group == name] == list(range(200))


# ------------------------------------------------------------------ another process


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "flight")])
    yield process
    process.kill()
    process.wait()


def opened(path: Path) -> FlightRecord:
    """The record at `path`, once its writer has filled the ring."""

    def tried() -> FlightRecord | None:
        try:
            found = FlightRecord(path)
        except (OSError, ConfigError):
            return None
        if found.header().started > RECORDS:
            return found
        found.close()
        return None

    found: list[FlightRecord] = []
    wait_until(lambda: bool(found.extend(filter(None, [tried()])) or found), timeout_s=20)
    return found[0]


def test_a_reader_beside_a_writer_sees_only_whole_records(tmp_path: Path, writer: subprocess.Popen[bytes]) -> None:
    record = opened(tmp_path / "flight")
    try:
        seen = 0
        while seen < 100_000:
            for one in record.records():
                assert is_whole(one.number, one.seq, one.step, one.text, one.site, one.label), one
                seen += 1
            status = record.status().split()
            assert len(set(status)) <= 1
    finally:
        record.close()


def test_after_a_kill_the_record_is_whole(tmp_path: Path, writer: subprocess.Popen[bytes]) -> None:
    """In the middle of anything: all records but the one under way can be read; the status is whole or empty."""
    record = opened(tmp_path / "flight")
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    try:
        found, header = record.records(), record.header()
        assert header.pid == writer.pid
        assert found[-1].number == header.started - 1
        assert len(found) >= RECORDS - 1  # the oldest may be the slot it wrote in
        assert all(is_whole(o.number, o.seq, o.step, o.text, o.site, o.label) for o in found)
        assert all(one.left_ns >= one.entered_ns for one in found[:-1])
        assert len(set(record.status().split())) <= 1
    finally:
        record.close()


# ------------------------------------------------------------------ files that are none


def test_a_record_is_never_written_over(recorder: FlightRecorder) -> None:
    with pytest.raises(FileExistsError):
        FlightRecorder(recorder.path, 0, 1)


def test_a_file_of_another_size_is_refused(recorder: FlightRecorder, tmp_path: Path) -> None:
    whole = recorder.path.read_bytes()
    for size in (0, 1, 511, len(whole) - 1, len(whole) + 1):
        path = tmp_path / f"cut-{size}"
        path.write_bytes((whole + b"\0")[:size])
        with pytest.raises(ConfigError, match=f"no flight record: it has {size} bytes"):
            FlightRecord(path)


def test_a_file_that_begins_otherwise_is_refused(recorder: FlightRecorder, tmp_path: Path) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(b"\0" + recorder.path.read_bytes()[1:])
    with pytest.raises(ConfigError, match="does not begin as one"):
        FlightRecord(path)


def test_noise_behind_the_header_never_raises(recorder: FlightRecorder, tmp_path: Path) -> None:
    """A record that a dying machine has damaged is read as far as it goes."""
    whole = bytearray(recorder.path.read_bytes())
    whole[48:56] = (2000).to_bytes(8, "little")  # of operations
    path = tmp_path / "noise"
    path.write_bytes(bytes(whole[:512]) + os.urandom(len(whole) - 512))
    record = FlightRecord(path)
    try:
        assert record.records() == []
    finally:
        record.close()


def test_a_link_is_not_followed(recorder: FlightRecorder, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(recorder.path)
    with pytest.raises(OSError, match="link"):
        FlightRecord(tmp_path / "link")


def test_what_is_left_to_others_is_done_before_anything_is_entered(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path / "flight", 0, 2)
    record = FlightRecord(recorder.path)
    words, seqs = pack_words("WORLD", "all_reduce", "train.py:2 train"), count()
    recorder.set_step(7)
    for step in (5, 6):
        recorder.left.append(partial(recorder.enter_all, seqs, words, 2, step, 1000 + step))
    recorder.enter(next(seqs), words)
    entered = [(one.number, one.step, one.entered_ns < 2000) for one in record.records()]
    assert entered == [(0, 5, True), (1, 5, True), (2, 6, True), (3, 6, True), (4, 7, False)]
    assert not recorder.left
    record.close()
    recorder.close()


def test_what_is_left_and_fails_is_not_tried_again(tmp_path: Path) -> None:
    recorder, done = FlightRecorder(tmp_path / "flight", 0, 2), []
    recorder.left += [partial(int, "no number"), partial(done.append, 1)]
    with pytest.raises(ValueError, match="no number"):
        recorder.take_up()
    recorder.take_up()
    assert done == [1]
    recorder.close()


def test_two_threads_take_up_what_is_left_once_and_in_its_order(tmp_path: Path) -> None:
    recorder, done = FlightRecorder(tmp_path / "flight", 0, 2), list[int]()
    started, waits = threading.Event(), threading.Event()

    def slow(number: int) -> None:
        started.set()
        waits.wait(0.001)
        done.append(number)

    recorder.left += [partial(slow, number) for number in range(50)]
    other = threading.Thread(target=recorder.take_up)
    other.start()
    assert started.wait(10)
    recorder.take_up()
    assert done == list(range(50))
    other.join()
    recorder.close()


class Lapped(mmap.mmap):
    """Memory that a writer goes on with just after some of it was copied."""

    write: Callable[[], object]

    def __getitem__(self, span: Any) -> Any:
        copied = super().__getitem__(span)
        self.write()
        return copied


@pytest.mark.parametrize("more", [0, 1, 63, 64, 65, 700, RECORDS, RECORDS + 5])
def test_what_is_overwritten_while_it_is_read_is_left_out(
    recorder: FlightRecorder, record: FlightRecord, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    words, begun, left = pack_words("world", "barrier", "x.py:1 f"), RECORDS + 300, [more]
    for seq in range(begun):  # the ring has begun anew: it is read in two parts
        recorder.enter(seq, words)

    def write() -> None:
        for _ in range(left.pop() if left else 0):
            recorder.enter(0, words)

    memory = Lapped(record._fd, record._memory.size())
    memory.write = write
    with monkeypatch.context() as patch:
        patch.setattr(record, "_memory", memory)
        found = [one.number for one in record.records()]
    memory.close()
    assert found == list(range(300 + more, begun))


def test_messages_of_many_tags_are_numbered_in_bounded_memory() -> None:
    numbers = MessageNumbers()
    assert [next(numbers["send", 1, 0]) for _ in range(3)] == [0, 1, 2]
    assert next(numbers["recv", 1, 0]) == 0
    for tag in range(1, 3 * RECORDS):
        assert next(numbers["send", 1, tag]) == 0
    assert next(numbers["send", 1, 0]) == 3, "one that is not forgotten goes on"
    for tag in range(10 * RECORDS):
        next(numbers["send", 2, tag])
    assert len(numbers) == 4 * RECORDS
    assert next(numbers["send", 1, 0]) == 0


def test_a_message_whose_work_was_dropped_is_told_from_one_that_was_waited_for(
    recorder: FlightRecorder, record: FlightRecord
) -> None:
    send = pack_words("WORLD", "send float32 [4] to rank 1 tag 0", "train.py:9")
    sums = pack_words("WORLD", "all_reduce float32 [4] sum", "train.py:9")
    numbers = [recorder.enter(seq, send, is_message=True) for seq in range(2)] + [recorder.enter(0, sums)]
    digest = record.records()[2].digest
    recorder.stood(numbers[0], 0)
    recorder.let_go(numbers[1])
    recorder.let_go(numbers[2])
    assert [one.digest for one in record.records()] == [0, 1, digest]
    assert all(one.left_ns for one in record.records())
    for _ in range(RECORDS):
        recorder.enter(0, send, is_message=True)
    recorder.let_go(numbers[1])  # which is overwritten: nothing of what is there now is touched
    assert not any(one.digest or one.left_ns for one in record.records())
