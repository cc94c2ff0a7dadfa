"""What a launcher does with its workers: each event alone, the order among them, and what holds after any events."""

from __future__ import annotations

import math
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.launch.course import Course, Orders, Request, Seen
from lockstep.launch.worker import INTERRUPTED, REQUEUE

_GRACE_S, _FAILURE_GRACE_S, _CONSEQUENCE_S = 60.0, 0.25, 2.0
_TOLD = Request(signal.SIGTERM, "host2 was asked to stop by SIGTERM: stopping")


def course(*, asks_first: bool = False, failure_grace_s: float = _FAILURE_GRACE_S) -> Course:
    limits: Any = SimpleNamespace(grace_s=_GRACE_S, failure_grace_s=failure_grace_s, asks_first=asks_first)
    return Course(limits)


def seen(now_s: float = 0.0, **what: Any) -> Seen:
    nothing: dict[str, Any] = {"signals": (), "told": None, "asked": {}, "stopped": {}}
    return Seen(now_s, **nothing | {"has_failed": False, "cause_is_known": False, "are_asking": False} | what)


@pytest.mark.parametrize(
    ("event", "number", "words"),
    [
        ({"signals": (signal.SIGINT,)}, signal.SIGINT, "stopping; once more ends all processes at once"),
        ({"told": _TOLD}, *_TOLD),
        ({"asked": {3: signal.SIGUSR1}}, signal.SIGUSR1, "rank 3 got SIGUSR1: stopping"),
        ({"stopped": {2: -signal.SIGHUP}}, signal.SIGHUP, "rank 2 was ended by SIGHUP: stopping"),
        ({"stopped": {2: INTERRUPTED}}, signal.SIGTERM, "rank 2 ended with exit code 130: stopping"),
        ({"signals": (signal.SIGINT,), "told": _TOLD, "asked": {3: signal.SIGUSR1}}, signal.SIGINT, None),
        ({"told": _TOLD, "asked": {3: signal.SIGUSR1}, "stopped": {2: INTERRUPTED}}, _TOLD.number, None),
    ],
)
def test_whoever_asks_is_heard_once_and_all_have_the_grace(event: dict[str, Any], number: int, words: str) -> None:
    run = course()
    assert run.look(seen(1.0)) == Orders()
    heard, act = run.look(seen(2.0, **event))
    assert heard is not None
    assert (heard.number, act) == (number, "pass on")
    assert words is None or heard.words == words
    assert run.look(seen(3.0, **event)) == Orders()
    assert run.deadline_s == 2.0 + _GRACE_S
    assert run.look(seen(2.0 + _GRACE_S, **event)) == Orders(None, "kill")


def test_ranks_that_agreed_to_stop_are_waited_for_without_a_request() -> None:
    run = course()
    assert run.look(seen(1.0, stopped={1: REQUEUE})) == Orders()
    assert run.look(seen(2.0, stopped={0: REQUEUE, 1: REQUEUE})) == Orders()
    assert (run.request, run.deadline_s) == (None, 1.0 + _GRACE_S)


@pytest.mark.parametrize(
    ("is_known", "asks_first", "wait_s"),
    [(True, False, _FAILURE_GRACE_S), (False, False, _CONSEQUENCE_S), (False, True, _FAILURE_GRACE_S)],
)
def test_after_a_failure_the_others_have_little_time(is_known: bool, asks_first: bool, wait_s: float) -> None:
    run = course(asks_first=asks_first)
    assert run.look(seen(5.0, has_failed=True, cause_is_known=is_known)).act == ("ask to end" if asks_first else "")
    assert run.deadline_s == 5.0 + wait_s
    assert run.look(seen(5.0 + wait_s, has_failed=True, cause_is_known=True)).act == "kill"


def test_a_cause_that_becomes_known_shortens_the_wait() -> None:
    run = course()
    run.look(seen(5.0, has_failed=True))
    run.look(seen(5.5, has_failed=True, cause_is_known=True))
    assert run.deadline_s == 5.5 + _FAILURE_GRACE_S


@pytest.mark.parametrize(
    ("grace_s", "asking", "lives"),
    [(_FAILURE_GRACE_S, 6, 8), (_FAILURE_GRACE_S, 40, 22), (0.0, 40, 1)],
    ids=["until it has said so", "not for ever", "not where no time is to be given"],
)
def test_who_asks_why_it_has_failed_is_left_alone(grace_s: float, asking: int, lives: int) -> None:
    run, failed = course(failure_grace_s=grace_s), {"has_failed": True, "cause_is_known": True}
    acts = [run.look(seen(5.0 + tenths / 10, **failed, are_asking=tenths < asking)).act for tenths in range(40)]
    assert acts == [""] * lives + ["kill"] * (40 - lives)


@pytest.mark.parametrize(("asking", "asked_at"), [(0, 0), (3, 3), (40, 20)])
def test_nobody_is_asked_to_end_while_some_are_about_to_say_why_they_fail(asking: int, asked_at: int) -> None:
    """As by `--shutdown-timeout`, whose SIGTERM ends a program at once that does not expect it."""
    run, failed = course(asks_first=True, failure_grace_s=7.0), {"has_failed": True, "cause_is_known": True}
    acts = [run.look(seen(5.0 + tenths / 10, **failed, are_asking=tenths < asking)).act for tenths in range(40)]
    assert [tenths for tenths, act in enumerate(acts) if act] == [asked_at]
    assert acts[asked_at] == "ask to end"


def test_who_ends_because_this_launcher_asked_is_no_request() -> None:
    run = course(asks_first=True)
    run.look(seen(5.0, has_failed=True))
    assert run.look(seen(5.1, has_failed=True, asked={1: signal.SIGTERM}, stopped={1: -signal.SIGTERM})) == Orders()
    assert run.look(seen(5.2, has_failed=True, signals=(signal.SIGINT,))).act == "pass on"


def test_second_signal_kills_at_once_also_where_it_comes_with_the_first() -> None:
    run = course()
    assert run.look(seen(1.0, signals=(signal.SIGINT,))).act == "pass on"
    assert run.look(seen(1.1, signals=(signal.SIGINT, signal.SIGINT))) == Orders(None, "kill")
    heard, act = course().look(seen(1.0, signals=(signal.SIGTERM, signal.SIGINT)))
    assert heard is not None  # the other machines have to know
    assert (heard.number, act) == (signal.SIGTERM, "kill")


_EVENTS = st.lists(
    st.tuples(
        st.sampled_from([{}, {"told": _TOLD}, {"asked": {0: 10}}, {"stopped": {1: REQUEUE}}, {"stopped": {1: -15}}]),
        st.sampled_from([{}, {"has_failed": True}, {"has_failed": True, "cause_is_known": True}]),
        st.integers(0, 1),  # signals that arrive
        st.floats(0.0, 30.0),
    ),
    max_size=12,
)


@given(st.booleans(), _EVENTS)
def test_after_any_events_nobody_is_asked_twice_and_the_end_is_never_put_off(asks_first: bool, events: Any) -> None:
    run, now_s, signals = course(asks_first=asks_first), 0.0, ()
    passed_on, asked, deadline_s = 0, 0, math.inf
    for left, failed, arrived, passed_s in events:
        now_s, signals = now_s + passed_s, (*signals, *[signal.SIGINT] * arrived)
        heard, act = run.look(seen(now_s, signals=signals, **left, **failed))
        passed_on, asked = passed_on + (act == "pass on"), asked + (act == "ask to end")
        assert run.deadline_s <= deadline_s
        assert (act == "kill") == (now_s >= deadline_s or len(signals) > 1)
        assert heard is None or heard == run.request
        assert run.request is not None or not signals
        deadline_s = run.deadline_s
        if act or signals or failed:
            assert act == "kill" or now_s < deadline_s < math.inf
    assert passed_on <= 1
    assert asked <= 1
