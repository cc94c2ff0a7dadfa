"""What a GPU has still to do when Python has waited for it, and a thread that NCCL does not let go."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rank_sights import running
from watched_guard import Watched, failed

from lockstep.observe.flight import FlightRecorder, pack_words
from lockstep.observe.guard import Guard
from lockstep.observe.motion import Stand
from lockstep.observe.native import in_c
from lockstep.observe.profile import stream_event
from lockstep.observe.profile.phases import UNKNOWN
from lockstep.observe.torch_groups import WatchedGroup
from lockstep.observe.torch_watch import TorchWatch


class Event:
    """One of CUDA's driver, on paper."""

    def __init__(self) -> None:
        self.has_come, self.has_failed = False, False


class Gpu:
    """What is asked of it."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def asked(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def event(self) -> int:
        self.events.append(Event())
        return len(self.events) - 1

    def record(self, event: int, stream: int) -> bool:
        self.events[event].has_come = False
        return True

    def has_fired(self, event: int) -> bool:
        if self.events[event].has_failed:
            raise RuntimeError("error 710 of CUDA's driver")
        return self.events[event].has_come


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    gpu = Gpu()
    monkeypatch.setattr(stream_event, "_gpus", {})
    monkeypatch.setattr(stream_event, "driver", lambda: gpu)
    monkeypatch.setattr(stream_event, "Device", lambda number: gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    return gpu.events


@pytest.fixture
def watched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Watched]:
    made = Watched(tmp_path, capsys)
    yield made
    made.guard.close()


def begin(recorder: FlightRecorder, count: int = 1) -> list[int]:
    words = pack_words("WORLD", "send float32 [4] to rank 1 tag 0", "train.py:3 main")
    return [recorder.enter(seq, words, is_message=True) for seq in range(count)]


def are_open(guard: Guard) -> list[int]:
    return [record.number for record in guard.records() if not record.left_ns]


def test_what_was_waited_for_has_ended_once_its_event_has_come(watched: Watched, events: list[Event]) -> None:
    guard = watched.guard
    ends, (first, second, third) = guard.stream_ends, begin(guard.recorder, 3)
    ends.waited([first])
    ends.waited([second, third])
    ends.settle()
    assert are_open(guard) == [first, second, third]
    assert guard.motion.is_queued()
    events[1].has_come = True
    ends.settle()
    assert are_open(guard) == [first]
    (fourth,) = begin(guard.recorder)
    ends.waited([fourth])
    ends.settle()
    assert are_open(guard) == [first, fourth]
    assert len(events) == 2, "to end one waits for whoever copies from the GPU: it is used again"
    events[0].has_failed = True  # nobody will ever know
    ends.settle()
    assert are_open(guard) == [fourth]
    events[1].has_come = True
    ends.settle()
    assert are_open(guard) == []
    assert not guard.motion.is_queued()


def test_nothing_is_recorded_in_a_graph(watched: Watched, events: list[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    watched.guard.stream_ends.waited(begin(watched.guard.recorder))
    assert (events, are_open(watched.guard)) == ([], [])


class Group:
    group_name = "0"

    def _get_sequence_number_for_group(self) -> int:
        return 0


class Work:
    pass


def watch_of(guard: Guard) -> tuple[TorchWatch, Group, WatchedGroup]:
    watch, group = TorchWatch(guard), Group()
    followed = WatchedGroup(group, "WORLD", (0, 1), guard.recorder, "cpu:gloo,cuda:nccl")
    watch._groups.followed[id(group)] = followed
    return watch, group, followed


def test_messages_of_a_batch_end_with_its_work_on_the_gpu(watched: Watched, events: list[Event]) -> None:
    guard = watched.guard
    watch, group, followed = watch_of(guard)
    on_gpu, work, numbers = SimpleNamespace(is_cpu=False), Work(), begin(guard.recorder, 3)
    for number in numbers:
        watch.under_way.follow(followed, number, None, on_gpu, True)
    assert watch._ending_batch(lambda group: work)(group) is work
    assert are_open(guard) == numbers
    assert watch._leaving(lambda work: True)(work)
    guard.stream_ends.settle()
    assert are_open(guard) == numbers
    (event,) = events
    event.has_come = True
    guard.stream_ends.settle()
    assert are_open(guard) == []


def test_messages_of_a_batch_that_torch_has_waited_for_end_on_the_gpu(watched: Watched, events: list[Event]) -> None:
    guard = watched.guard
    watch, group, followed = watch_of(guard)
    followed.batch = numbers = begin(guard.recorder, 2)
    assert watch._ending_batch(lambda group: None)(group) is None
    guard.stream_ends.settle()
    assert are_open(guard) == numbers
    events[0].has_come = True
    guard.stream_ends.settle()
    assert are_open(guard) == []


def test_a_batch_that_nobody_waits_for_ends_where_another_takes_its_place(watched: Watched) -> None:
    guard = watched.guard
    watch, group, followed = watch_of(guard)
    first, second, work = begin(guard.recorder, 3), begin(guard.recorder, 2), Work()
    for followed.batch in (first, second):
        watch._ending_batch(lambda group: work)(group)
    assert are_open(guard) == second


@pytest.mark.parametrize(
    ("tag", "said"), [(0, "send float32 [4] to rank 1 tag 0"), (3, "send float32 [4] tagged 3 to rank 1 tag 0")]
)
@pytest.mark.parametrize("is_cpu", [False, True])
def test_messages_of_nccl_are_numbered_by_their_order_and_those_of_gloo_by_tag(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, tag: int, said: str, is_cpu: bool
) -> None:
    watch, group, _ = watch_of(watched.guard)
    monkeypatch.setattr(watch.under_way, "follow", lambda *followed: None)
    send = watch._noting("send", set(), lambda group, tensors, to, tag: Work())
    tensor = SimpleNamespace(dtype=torch.float32, shape=(4,), is_cpu=is_cpu)
    for each in (0, tag, 7):
        send(group, [tensor], 1, each)
    first, second, _ = watched.guard.records()
    assert second.text == (f"send float32 [4] to rank 1 tag {tag}" if is_cpu else said)
    assert (first.seq, second.seq) == (0, int(not is_cpu or tag == 0))


def test_a_message_on_the_cpu_ends_with_its_wait(watched: Watched, events: list[Event]) -> None:
    watch, _, followed = watch_of(watched.guard)
    on_cpu, work, (number,) = SimpleNamespace(is_cpu=True), Work(), begin(watched.guard.recorder)
    watch.under_way.follow(followed, number, work, on_cpu, True)
    watch._leaving(lambda work: True)(work)
    assert (are_open(watched.guard), events) == ([], [])


@pytest.mark.parametrize("is_c", [False, True])
@pytest.mark.parametrize("error", [None, RuntimeError("gone"), KeyboardInterrupt()], ids=["done", "failed", "Ctrl-C"])
@pytest.mark.parametrize("is_seen", [False, True])
def test_a_wait_that_fails_has_ended(watched: Watched, is_c: bool, error: BaseException | None, is_seen: bool) -> None:
    """is_seen: a look sees it ending first."""
    watch, _, followed = watch_of(watched.guard)
    seen, work, (number,) = list[BaseException](), Work(), begin(watched.guard.recorder)
    watched.guard.saw = seen.append

    def old(work: Any) -> bool:
        if is_seen:
            watch.under_way.open.pop(id(work))
        if error is not None:
            raise error
        return True

    wait = watch._leaving(old)
    wait = in_c(wait, watch._leaving_holds(old)) if is_c else wait
    followed.has_streams = False
    followed.seen = 1
    watch.under_way.follow(followed, number, work, None, is_message=False)
    with contextlib.nullcontext() if error is None else pytest.raises(type(error)):
        assert wait(work)
    assert watch.under_way.open == {}
    assert are_open(watched.guard) == [number] * is_seen
    assert seen == [error] * (type(error) is RuntimeError)


class Flights:
    """What torch says has ended in any group."""

    def __init__(self) -> None:
        self.has_ended = 0

    def ended(self, group: str) -> int:
        return self.has_ended


@pytest.mark.parametrize("is_within", [True, False])
def test_a_wait_of_what_the_guard_has_seen_ending_is_known(watched: Watched, is_within: bool) -> None:
    """is_within: it was seen when the thread stood in the wait already."""
    guard, flights, work = watched.guard, Flights(), Work()
    watch, _, followed = watch_of(guard)
    clock, under_way = guard.recorder.clock, watch.under_way
    clock.close_reader = lambda: None
    followed.seen = 1
    (number,) = begin(guard.recorder)
    under_way.follow(followed, number, work, SimpleNamespace(is_cpu=True), False)

    def look() -> bool:
        for key, call in list(under_way.open.items()):
            under_way._leave_unawaited(cast("Any", flights), key, call)
        return True

    look()
    assert are_open(guard) == [number]
    flights.has_ended = 1
    if not is_within:
        look()
    assert watch._leaving(lambda work: look())(work)
    assert ([one[0] for one in clock.waits], are_open(guard)) == ([number], [])
    ((_, since_ns, until_ns),) = clock.waits
    (record,) = guard.records(number, number + 1)
    assert since_ns <= record.left_ns <= until_ns if is_within else record.left_ns <= since_ns <= until_ns
    assert watch._leaving(lambda work: True)(work)
    assert [one[0] for one in clock.waits] == [number, UNKNOWN], "once"


def test_what_the_guard_has_seen_ending_is_forgotten_with_its_work(watched: Watched) -> None:
    guard, flights, work = watched.guard, Flights(), Work()
    watch, _, followed = watch_of(guard)
    under_way, flights.has_ended = watch.under_way, 1
    followed.seen = 1
    (number,) = begin(guard.recorder)
    under_way.follow(followed, number, work, SimpleNamespace(is_cpu=True), False)
    ((key, call),) = under_way.open.items()
    under_way._leave_unawaited(cast("Any", flights), key, call)
    under_way.begin(cast("Any", flights), None)
    watch._groups.followed.clear()
    under_way.look()
    assert [*under_way._awaited] == [key]
    del work
    assert not under_way._awaited, "before another Work can lie at its place"
    under_way.look()
    assert not under_way._awaited


@pytest.mark.parametrize("is_followed", [True, False])
def test_waits_of_a_stream_have_their_numbers_where_its_times_will_be_known(
    watched: Watched, is_followed: bool
) -> None:
    watch, _, followed = watch_of(watched.guard)
    clock, on_gpu, work = watched.guard.recorder.clock, SimpleNamespace(is_cpu=False), Work()
    clock.close_reader = lambda: None
    clock.gpu = cast("Any", SimpleNamespace(expects=lambda number: is_followed))
    first, second = begin(watched.guard.recorder, 2)
    watch.under_way.follow(followed, first, None, on_gpu, False, 5)  # synchronous: the thread goes on
    watch.under_way.follow(followed, second, work, on_gpu, False, 6)
    wait = watch._leaving(lambda work: True)
    assert wait(work)
    assert wait(Work())  # one of C++
    assert [number for number, *_ in clock.waits] == ([first, second, UNKNOWN] if is_followed else [UNKNOWN] * 3)
    assert clock.waits[0][1] == 5
    assert are_open(watched.guard) == [first, second]


def test_which_collectives_a_gpu_has_not_come_to(watched: Watched) -> None:
    guard = watched.guard
    watch, _, followed = watch_of(guard)
    words = pack_words("WORLD", "all_reduce float32 [4] sum", "train.py:3 main")
    followed.pending.extend((7 + seq, guard.recorder.enter(40 + seq, words)) for seq in range(3))
    for begun, queued in ((-1, 43), (6, 40), (7, 41), (9, 43)):
        watch.under_way._flights = cast("Any", SimpleNamespace(begun=lambda group, begun=begun: begun))
        assert watch.under_way.first_queued() == {"WORLD": queued}
    assert guard.motion.is_queued() is False  # nobody has attached it
    assert watch.under_way.has_queued()


def test_the_end_waits_for_the_gpu_while_the_guard_looks(watched: Watched, events: list[Event]) -> None:
    guard = watched.guard
    guard.drain()  # nothing is under way
    guard.stream_ends.waited(begin(guard.recorder))
    guard.drain()  # nobody looks, who would say what is wrong
    guard.start()
    guard.stream_ends.were_aborted = True
    guard.drain()  # it may never come
    guard.stream_ends.were_aborted = False
    waits = threading.Thread(target=guard.drain)
    waits.start()
    waits.join(0.3)
    assert waits.is_alive()
    events[0].has_come = True
    waits.join(10.0)
    assert not waits.is_alive()


@pytest.mark.parametrize("how", ["stands", "moves", "was told", "no abort"])
def test_who_cannot_be_told_is_ended(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    """NCCL may keep a thread in C++ also after an abort: no error can be raised there."""
    guard, ended = watched.guard, list[int]()
    monkeypatch.setattr(os, "_exit", ended.append)
    watched.sees(running(3))
    guard.stream_ends.were_aborted = how != "no abort"
    stands = Stand(("train.py:31 main",), "", 0.0 if how == "moves" else 12.0)
    monkeypatch.setattr(guard.motion, "look", lambda now_s: stands)
    guard.motion.stand = stands
    if how == "was told":
        watched.board.ranks = failed()
        guard.look_now()
        with pytest.raises(Exception, match="RAISED"):
            guard.raise_if_found()
    said = "\n".join(watched.sees(failed()))
    assert ended == ([1] if how == "stands" else [])
    assert ("for 10 s it has stood at train.py:31 main, and NCCL does not let it go" in said) == (how == "stands")


@pytest.mark.parametrize("how", ["stands", "moves", "aborted just now", "elsewhere"])
def test_who_gloo_does_not_let_go_is_ended(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    """Long after an abort, and only in a call of torch's or ours: here the thread is in one of ours, as it looks."""
    guard, ended, over = watched.guard, list[int](), threading.Event()
    monkeypatch.setattr(os, "_exit", ended.append)
    watched.sees(running(3))
    guard._aborted_s = time.monotonic() - (0.0 if how == "aborted just now" else 12.0)
    stands = Stand(("train.py:31 main",), "", 0.0 if how == "moves" else 12.0)
    monkeypatch.setattr(guard.motion, "look", lambda now_s: stands)
    guard.motion.stand = stands
    elsewhere = threading.Thread(target=lambda: over.wait())
    elsewhere.start()
    if how == "elsewhere":
        guard.motion.thread_id = elsewhere.ident or 0
    said = "\n".join(watched.sees(failed()))
    over.set()
    elsewhere.join()
    assert ended == ([1] if how == "stands" else [])
    assert ("for 10 s it has stood at train.py:31 main, and Gloo does not let it go" in said) == (how == "stands")
