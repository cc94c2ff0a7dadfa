"""Whether the processes of the other ranks still live."""

from __future__ import annotations

import os
import select
import weakref
from collections.abc import Sequence
from typing import final

from lockstep.comm.kernel import process_state


@final
class Peers:
    """The processes that map one segment, by their rank in it.

    On Linux through descriptors of the processes themselves: they tell of an end that the parent has not noticed yet,
    and a process that was given a dead one's number is not mistaken for it.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids = tuple(pids)
        self._handles: list[int | None] = [None] * len(pids)
        weakref.finalize(self, _close, self._handles)
        for index, pid in enumerate(pids):
            if pid != os.getpid() and hasattr(os, "pidfd_open"):
                try:
                    self._handles[index] = os.pidfd_open(pid)
                except ProcessLookupError:
                    self._handles[index] = -1  # has ended already
                except OSError:  # an old kernel, or a sandbox without this call
                    continue

    def has_ended(self, index: int) -> bool:
        """True once this process can do nothing any more."""
        handle = self._handles[index]
        if handle is None:
            return not is_running(self.pids[index])
        if handle < 0:
            return True
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(0))


def _close(handles: list[int | None]) -> None:
    for handle in handles:
        if handle is not None and handle >= 0:
            os.close(handle)


def is_running(pid: int) -> bool:
    """False where process `pid` of this machine has ended, also where its parent has not noticed yet."""
    state = process_state(pid)
    if state:
        return state not in "ZX"
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True
