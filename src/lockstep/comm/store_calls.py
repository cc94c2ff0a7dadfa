"""Calls of a torch store that may take minutes to return: its machine was stopped, or the cable to it cut."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar, final

from lockstep.comm.background import Background

_LOOK_S = 0.05

T = TypeVar("T")


@final
class StoreCalls:
    """Made one after the other, in a thread that ends with this or by `close`. Each is waited for up to a limit.

    Nothing ends a call of torch's: one that is late stays under way until the cable is mended. Until then no other is
    made, and whoever asks has the default at once.
    """

    def __init__(self, *lost_by: type[Exception]) -> None:
        """lost_by: what calls raise once the process that held the store has gone; after that none is made."""
        self._lost_by = lost_by
        self.is_lost = False  # the store
        self._late: Future[Any] | None = None
        self._thread = Background(self, StoreCalls._make, "lockstep-store")
        self.close = weakref.finalize(self, self._thread.close, 0.0)  # the last call comes before

    @property
    def is_mute(self) -> bool:
        """No call is answered, now or any more."""
        return self.is_lost or (self._late is not None and not self._late.done())

    def ask(
        self, call: Callable[[], T], default: T, limit_s: float, is_called_off: Callable[[], bool] = lambda: False
    ) -> T:
        """What `call` returns; `default` where it has not returned after `limit_s`, or waiting for it is called off.

        is_called_off: asked several times a second. The call is made all the same.
        """
        answer: Future[T] = Future()
        if self.is_mute or not self._thread.call((call, answer)):
            return default
        deadline = time.monotonic() + limit_s
        while not wait([answer], min(_LOOK_S, limit_s)).done:
            if time.monotonic() > deadline:
                self._late = answer
                return default
            if is_called_off():
                return default
        try:
            return answer.result()
        except self._lost_by:
            self.is_lost = True
            return default

    def _make(self, asked: tuple[Callable[[], Any], Future[Any]]) -> None:
        call, answer = asked
        try:
            answer.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where the answer is awaited
            answer.set_exception(error)
