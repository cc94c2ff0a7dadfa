"""Waiting for something that another thread or process does, without guessing how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable

_SHORTEST_S = 0.002


def wait_until(condition: Callable[[], bool], timeout_s: float, longest_pause_s: float = 0.01) -> bool:
    """Return True as soon as `condition()` is true, False when it is not so within `timeout_s`.

    It looks again and again, less often from time to time, after `longest_pause_s` at the latest.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = _SHORTEST_S
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, longest_pause_s)
    return True
