"""When torch's Flight Recorder may be asked: its tables of groups are read without their lock."""

from __future__ import annotations

import threading

from lockstep.observe.first_uses import FirstUses


class Group:
    """Of which calls may be under way."""

    inside = 0


def test_torch_is_not_asked_while_a_thread_is_in_a_first_operation() -> None:
    uses, group = FirstUses(), Group()
    assert uses.ask(lambda: "counts") == "counts"
    group.inside = 1
    uses.begin(group)
    assert uses.ask(lambda: "counts") is None
    group.inside = 0
    assert uses.ask(lambda: "counts") == "counts"
    group.inside = 1  # what comes later is not the first
    assert uses.ask(lambda: "counts") == "counts"


def test_who_waits_for_other_ranks_in_there_is_asked_about() -> None:
    """Else nothing would be known of the operation that it stands in."""
    uses = FirstUses()
    with uses.held():
        answers = [uses.ask(lambda: "counts") for _ in range(6)]
        with uses.held():
            assert uses.ask(lambda: "counts") is None
    assert answers == [None] * 4 + ["counts"] * 2
    assert uses.ask(lambda: "counts") == "counts"


def test_a_first_operation_waits_until_torch_has_answered() -> None:
    uses, group, order = FirstUses(), Group(), list[str]()
    asked, begins = threading.Event(), threading.Event()

    def begin() -> None:
        asked.wait(10)
        begins.set()
        uses.begin(group)
        order.append("begun")

    def question() -> None:
        asked.set()
        begins.wait(10)
        thread.join(0.1)
        order.append("answered")

    thread = threading.Thread(target=begin)
    thread.start()
    uses.ask(question)
    thread.join()
    assert order == ["answered", "begun"]
