"""One thread works for all; the others wait for their result, not for the turn."""

from __future__ import annotations

import threading

from lockstep.comm.background import Background
from lockstep.comm.turn import Turn
from lockstep.comm.waiting import wait_until

LONG_S = 30.0


def test_nobody_else_while_one_has_it() -> None:
    turn = Turn()
    assert turn.take(lambda: False, 0.0)
    assert turn.is_mine()
    answers: list[object] = []
    other = threading.Thread(target=lambda: answers.extend((turn.take(lambda: False, 0.01), turn.is_mine())))
    other.start()
    other.join()
    assert answers == [False, False]
    turn.give()
    assert not turn.is_mine()
    turn.give()  # nothing happens
    assert not turn.take(lambda: True, 0.0)  # nothing is left to do


def test_whose_result_is_there_does_not_wait_for_the_turn() -> None:
    turn = Turn()
    done = [False]
    waiting = threading.Thread(target=turn.take, args=(lambda: done[0], LONG_S))
    assert turn.take(lambda: False, 0.0)
    waiting.start()
    assert wait_until(lambda: len(turn._sleepers) == 1, 5)
    done[0] = True
    turn.tell()
    waiting.join()
    assert turn.is_mine()  # all the time
    turn.give()


def test_the_turn_goes_round() -> None:
    """Whoever gives it back can take it again at once, but whoever waits gets it or its result."""
    turn = Turn()
    inside: list[int] = []
    most = [0]
    counts = [0, 0, 0, 0]

    def work(number: int) -> None:
        while counts[number] < 200:
            try:
                if turn.take(lambda: counts[number] == 200, LONG_S):
                    inside.append(number)
                    most[0] = max(most[0], len(inside))
                    counts[number] += 1
                    inside.remove(number)
            finally:
                turn.give()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most[0], counts) == (1, [200] * 4)


# ---------------------------------------------------------------------- the thread that works while nobody waits


class Owner:
    def __init__(self) -> None:
        self.seen: list[int] = []
        self.names: set[str] = set()
        self.background = Background(self, Owner.work, "behind")

    def work(self, item: int) -> None:
        self.seen.append(item)
        self.names.add(threading.current_thread().name)
        if item < 0:
            self.background.close()


def test_items_in_order_on_a_thread_of_their_own() -> None:
    before = threading.active_count()
    owner = Owner()
    assert threading.active_count() == before  # none before the first item
    for number in range(100):
        owner.background.call(number)
    owner.background.close()
    assert owner.seen == list(range(100))
    assert owner.names == {"behind"}
    assert threading.active_count() == before
    owner.background.call(5)
    owner.background.close()
    assert owner.seen == list(range(100))
    assert threading.active_count() == before


def test_it_may_close_itself() -> None:
    owner = Owner()
    before = threading.active_count()
    owner.background.call(-1)
    assert wait_until(lambda: threading.active_count() == before, 5)
    assert owner.seen == [-1]


def test_closing_beside_the_first_call() -> None:
    """Whichever comes first, no thread stays."""
    before = threading.active_count()
    for _ in range(200):
        owner = Owner()
        caller = threading.Thread(target=owner.background.call, args=(1,))
        caller.start()
        owner.background.close()
        caller.join()
        assert owner.seen in ([], [1])
    assert wait_until(lambda: threading.active_count() == before, 5)
