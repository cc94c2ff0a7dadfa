"""Calls of a store that may hang: who asks goes on, and no later call waits for one that is late."""

from __future__ import annotations

import threading

from lockstep.comm.store_calls import StoreCalls
from lockstep.comm.waiting import wait_until


def lose() -> str:
    raise RuntimeError("Connection reset by peer")


def test_a_late_call_blocks_none_that_come_after_it() -> None:
    calls, is_mended, made = StoreCalls(RuntimeError), threading.Event(), list[str]()
    try:
        assert calls.ask(lambda: is_mended.wait() and "late", "default", 0.01) == "default"
        assert calls.is_mute
        assert calls.ask(lambda: made.append("meanwhile"), "default", 60.0) == "default"
    finally:
        is_mended.set()
    assert wait_until(lambda: not calls.is_mute, 10.0)
    assert calls.ask(lambda: "in time", "default", 60.0) == "in time"
    assert made == []  # what was asked meanwhile is not made up for


def test_a_call_that_is_called_off_is_made_and_so_is_the_next_one() -> None:
    calls, is_going_on, made = StoreCalls(RuntimeError), threading.Event(), list[str]()
    calls.ask(lambda: is_going_on.wait() and made.append("first"), None, 60.0, lambda: True)
    assert not calls.is_mute
    is_going_on.set()
    assert calls.ask(lambda: made.append("second") or len(made), 0, 60.0) == 2
    assert made == ["first", "second"]


def test_after_the_store_has_gone_none_is_made() -> None:
    calls, made = StoreCalls(RuntimeError), list[str]()
    assert calls.ask(lose, "default", 60.0) == "default"
    assert calls.is_lost
    assert calls.is_mute
    assert calls.ask(lambda: made.append("later"), "default", 60.0) == "default"
    assert made == []


def test_all_are_made_in_one_thread_that_ends_with_it() -> None:
    calls = StoreCalls(RuntimeError)
    threads = {calls.ask(threading.current_thread, None, 60.0) for _ in range(3)}
    assert len(threads) == 1
    assert threading.current_thread() not in threads
    del calls
    assert wait_until(lambda: not any(thread.is_alive() for thread in threads if thread), 10.0)


def test_after_close_none_is_made() -> None:
    calls, made = StoreCalls(RuntimeError), list[str]()
    calls.close()
    assert calls.ask(lambda: made.append("later"), "default", 60.0) == "default"
    assert made == []
