"""Functions and methods of others that are replaced while a guard watches, and put back."""

from __future__ import annotations

import functools
import os
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any, TypeVar, final

from lockstep.observe.torch_import import when_imported

T = TypeVar("T")
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
_MISSING: Any = object()
_PASSED_BY = " (importlib._bootstrap)"  # `warnings` passes by files of such a name when it looks for who called


@final
class Patches:
    """What was replaced. `undo` puts it back, but for what somebody else has replaced since."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, wrap: Wrap, *takers: Any) -> None:
        """Put `wrap(old)` in the place of `owner.name`, also in the modules that have taken it from there by now.

        What `old` warns its caller of names the caller's line, as if there were no `wrap`.
        """
        old = vars(owner).get(name, _MISSING)  # as it lies there; a class may inherit it
        new = wrap(getattr(owner, name))
        pass_by(new)
        setattr(owner, name, new)

        def restore() -> None:
            if vars(owner).get(name) is new:
                delattr(owner, name) if old is _MISSING else setattr(owner, name, old)

        self._undo.append(restore)
        for taker in takers:
            if hasattr(taker, name):
                self.replace(taker, name, lambda _: new)

    def replace_in(self, module: str, owner: str, name: str, wrap: Wrap) -> None:
        """`replace` in class `owner` of `module`, from the module's import on."""
        self.add(when_imported(module, lambda: self.replace(getattr(sys.modules[module], owner), name, wrap)))

    def add(self, *undo: Callable[[], None]) -> None:
        """Something else to be undone."""
        self._undo += undo

    def insert(self, to: list[T], one: T) -> None:
        """Add `one` to a list."""
        to.append(one)
        self.add(partial(to.remove, one))

    def undo_in_children(self) -> None:
        """Put all back in processes that are forked off: what they do is not to be told as this one's."""
        ours = weakref.WeakMethod(self.undo)
        os.register_at_fork(after_in_child=lambda: (undo := ours()) and undo())

    def undo(self) -> None:
        """Put all back, the last one first."""
        while self._undo:
            self._undo.pop()()


def around(call: Callable[..., Any]) -> Wrap:
    """For `Patches`: `call` in the place of a function; it is given that function, then the arguments.

    As a wrap of one's own, but with one call more: for what is not called in every step.
    """
    pass_by(call)

    def wrap(old: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(old)
        def new(*args: Any, **kwargs: Any) -> Any:
            return call(old, *args, **kwargs)

        return new

    return wrap


def pass_by(call: Any) -> None:
    """The frames of `call` are none to `warnings`."""
    while isinstance(call, partial):
        call = call.func
    function = getattr(call, "__func__", call)
    if isinstance(function, FunctionType) and not function.__code__.co_filename.endswith(_PASSED_BY):
        function.__code__ = function.__code__.replace(co_filename=function.__code__.co_filename + _PASSED_BY)


class SharedPatches(ABC):
    """What is seen in one place for all who want to know: begun by the first who attaches, ended with the last."""

    def __init__(self) -> None:
        self._users = 0
        self._patches = Patches()
        self._end()
        os.register_at_fork(after_in_child=partial(self._keep, 0))  # who has attached is a part of the parent

    def attach(self) -> Callable[[], None]:
        """See it from now on. The result ends that, once all who have attached call it."""
        self._users += 1
        if self._users == 1:
            self._begin()
        return lambda: self._keep(self._users - 1)

    def _keep(self, users: int) -> None:
        self._users = max(0, users)
        if self._users == 0:
            self._patches.undo()
            self._end()

    @abstractmethod
    def _begin(self) -> None:
        """Put into `_patches` what is to be undone."""

    @abstractmethod
    def _end(self) -> None:
        """Be as at the beginning: all is put back, and nothing of the program is kept."""
