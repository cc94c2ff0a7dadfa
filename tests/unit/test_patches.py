"""What is replaced of others is put back as it was, and only what is still ours."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.observe.patches import Patches, around


class Parent:
    def said(self) -> str:
        return "parent"

    @staticmethod
    def plain(number: int) -> int:
        return number


class Child(Parent):
    pass


def louder(old: Callable[..., str]) -> Callable[..., str]:
    def said(self: Any) -> str:
        return old(self) + "!"

    return said


def test_a_method_is_replaced_and_put_back() -> None:
    before = vars(Parent)["said"]
    patches = Patches()
    patches.replace(Parent, "said", louder)
    patches.replace(Parent, "said", louder)
    assert Child().said() == "parent!!"

    patches.undo()

    assert vars(Parent)["said"] is before


def test_what_a_class_inherits_is_inherited_again() -> None:
    patches = Patches()
    patches.replace(Child, "said", louder)
    assert (Child().said(), Parent().said()) == ("parent!", "parent")

    patches.undo()

    assert "said" not in vars(Child)
    assert Child().said() == "parent"


def test_a_static_method_stays_one() -> None:
    before = vars(Parent)["plain"]
    patches = Patches()
    patches.replace(Parent, "plain", lambda old: staticmethod(lambda number: old(number) + 1))
    assert Parent.plain(1) == Parent().plain(1) == 2

    patches.undo()

    assert vars(Parent)["plain"] is before


def test_who_has_taken_it_gets_the_new_one_and_the_old_one_back() -> None:
    home, early, late = (SimpleNamespace() for _ in range(3))
    home.said = early.said = before = lambda self: "module"
    patches = Patches()
    patches.replace(home, "said", louder, early, late)
    assert early.said is home.said
    assert home.said(None) == "module!"
    assert vars(late) == {}

    patches.undo()

    assert home.said is early.said is before


def test_what_somebody_has_replaced_since_is_theirs() -> None:
    patches = Patches()
    before = vars(Parent)["said"]
    patches.replace(Parent, "said", louder)
    theirs = louder(Parent.said)
    Parent.said = theirs  # type: ignore[method-assign]
    try:
        patches.undo()

        assert vars(Parent)["said"] is theirs
    finally:
        Parent.said = before  # type: ignore[method-assign]


def test_all_is_undone_once_the_last_first() -> None:
    order: list[int] = []
    patches = Patches()
    for number in range(3):
        patches.add(lambda number=number: order.append(number))

    patches.undo()
    patches.undo()

    assert order == [2, 1, 0]


def test_a_warning_names_the_line_that_called_and_not_ours() -> None:
    class Warner(Parent):
        def said(self) -> str:
            warnings.warn("do it otherwise", FutureWarning, stacklevel=2)
            return "parent"

    patches = Patches()
    patches.replace(Warner, "said", louder)
    patches.replace(Warner, "said", louder)

    with pytest.warns(FutureWarning) as seen:
        line, said = sys._getframe().f_lineno, Warner().said()

    assert said == "parent!!"
    assert [(one.filename, one.lineno) for one in seen] == [(__file__, line)]


def test_what_stands_around_a_function_gets_it_with_its_arguments() -> None:
    def doubled(times: int, old: Callable[..., int], /, *args: int, **kwargs: int) -> int:
        return times * old(*args, **kwargs)

    patches, home = Patches(), SimpleNamespace(plus=lambda old, new=1: old + new)
    before = home.plus
    patches.replace(home, "plus", around(partial(doubled, 2)))
    assert home.plus(3) == 8
    assert home.plus(old=1, new=2) == 6  # names of arguments are theirs

    patches.undo()

    assert home.plus is before


def test_a_warning_passes_by_what_stands_around() -> None:
    class Loud:
        def call(self, old: Callable[..., str], /, *args: Any) -> str:
            return old(*args) + "!"

    class Warner:
        def said(self) -> str:
            warnings.warn("do it otherwise", FutureWarning, stacklevel=2)
            return "warner"

    Patches().replace(Warner, "said", around(Loud().call))

    with pytest.warns(FutureWarning) as seen:
        line, said = sys._getframe().f_lineno, Warner().said()

    assert said == "warner!"
    assert [(one.filename, one.lineno) for one in seen] == [(__file__, line)]
