from __future__ import annotations

import sys
from threading import Event, Thread
from typing import Any

import pytest
from torch import nn

from lockstep.observe.instances import instances
from lockstep.observe.native import IS_IN_C


class Pretender:
    """Says that it is a module, as stand-ins of tests do."""

    asked = 0

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        self.asked += 1
        return nn.Module


def test_finds_objects_of_a_class_and_of_its_subclasses_and_asks_nobody() -> None:
    layer, pretender = nn.Linear(2, 2), Pretender()
    found = instances(nn.Module)
    assert any(thing is layer for thing in found)
    assert not any(thing is pretender for thing in found)
    assert all(issubclass(type(thing), nn.Module) for thing in found)
    assert any(thing is pretender for thing in instances(Pretender))
    assert pretender.asked == 0
    with pytest.raises(TypeError):
        instances(1)  # type: ignore[arg-type]


@pytest.mark.skipif(not IS_IN_C, reason="in Python other threads run meanwhile")
def test_a_tuple_that_another_thread_fills_meanwhile_is_filled() -> None:
    is_over, filled, failures = Event(), [0], []

    def fill() -> None:
        while not is_over.is_set():
            try:
                tuple(i for i in range(11))  # has room for ten, and for more once it is seen that there are more
                filled[0] += 1
            except SystemError as error:
                failures.append(error)

    before = sys.getswitchinterval()
    thread = Thread(target=fill)
    thread.start()
    try:
        sys.setswitchinterval(1e-5)
        for _ in range(20):  # a list of all objects that is there for longer fails in half of them
            instances(nn.Module)
    finally:
        sys.setswitchinterval(before)
        is_over.set()
        thread.join()
    assert filled[0] > 0
    assert not failures
