"""Which steps are looked at closely: all of the first, all long ones, and of others one in sixteen."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator

from lockstep.observe.pace import EVERY, FIRST, SHORT_NS, Pace, one_of_each


def looked_at(pace: Pace, steps: int, step_ns: int, since: int = 0) -> Iterator[int]:
    """The steps that are."""
    for step in range(since + 1, since + steps + 1):
        if not pace.is_brief:
            yield step
            pace.plan(step, step * step_ns)
        elif step + 1 >= pace.until:
            pace.is_brief = False


def test_the_first_steps_and_then_one_of_every_sixteen() -> None:
    found = [*looked_at(Pace(), 320 * FIRST, SHORT_NS // 2)]
    assert found[:FIRST] == [*range(1, FIRST + 1)]
    later = [step for step in found if step >= FIRST + EVERY]
    assert Counter(step // EVERY for step in later) == dict.fromkeys(range(FIRST // EVERY + 1, 320 * FIRST // EVERY), 1)
    apart = {after - before for before, after in itertools.pairwise(later)}
    assert apart >= {1, 15, 16, 17, 31}
    assert max(apart) < 2 * EVERY
    for period in range(2, 9):  # what comes back every few steps is met as often as it is there
        met = Counter(step % period for step in later)
        assert all(abs(met[at] * period / len(later) - 1) < 0.2 for at in range(period)), (period, met)


def test_long_steps_are_all_looked_at_and_short_ones_no_more_once_they_are_long() -> None:
    pace = Pace()
    assert [*looked_at(pace, 3 * FIRST, SHORT_NS + 1)] == [*range(1, 3 * FIRST + 1)]
    assert len([*looked_at(pace, 100 * EVERY, SHORT_NS // 2, 3 * FIRST)]) <= 102
    longer = [*looked_at(pace, 100 * EVERY, SHORT_NS + 1, 3 * FIRST + 100 * EVERY)]
    assert len(longer) > 98 * EVERY


def test_a_process_that_goes_on_from_a_checkpoint_has_its_own_first_steps() -> None:
    assert [*looked_at(Pace(), FIRST, 1, since=5000)] == [*range(5001, 5001 + FIRST)]


def test_who_needs_a_step_gets_it() -> None:
    pace = Pace()
    pace.dues += [lambda step: (step // 50 + 1) * 50, lambda step: math.inf]
    found = {*looked_at(pace, 4 * FIRST, 1)}
    assert found >= {*range(50, 4 * FIRST, 50)}
    assert len(found) < 2 * FIRST
    pace.dues.append(lambda step: step + 1)
    pace.reset()
    assert len([*looked_at(pace, 4 * FIRST, 1)]) == 4 * FIRST


def test_after_a_step_that_is_not_as_the_others_all_are_looked_at_again() -> None:
    pace = Pace()
    for _ in looked_at(pace, FIRST + EVERY + 3, 1):
        pass
    while not pace.is_brief:
        pace.plan(FIRST + 100, 1)
    pace.leave()
    since = FIRST + 200
    assert [*looked_at(pace, FIRST - 1, 1, since)] == [*range(since + 1, since + FIRST)]
    pace.leave()  # one that is looked at anyway: nothing begins anew
    assert len([*looked_at(pace, 10 * EVERY, 1, since + FIRST)]) < 3 * EVERY


def test_it_begins_anew() -> None:
    pace = Pace()
    for _ in looked_at(pace, 2 * FIRST, 1):
        pass
    pace.reset()
    assert not pace.is_brief
    assert pace.until == 0


def test_it_is_the_same_on_all_ranks() -> None:
    assert [one_of_each(step) for step in (0, 1024, 4096, 100_000)] == [23, 1032, 4111, 100_008]
