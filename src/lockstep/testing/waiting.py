"""Waiting for something that another thread or process does, without guessing how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable

_PAUSE_S = 0.01


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Return True as soon as `condition()` is true, False when it is not so within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_S)
    return True
