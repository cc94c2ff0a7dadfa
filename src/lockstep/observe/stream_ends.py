"""Operations that a GPU has yet to end: whoever waits for one has only had its stream wait.

So the end of such a wait says nothing. An event behind it does, which is asked for by the guard's thread and never
waited for. No torch is imported here.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from typing import final

from lockstep.observe.flight import FlightRecorder
from lockstep.observe.profile.stream_event import StreamEvent


@final
class StreamEnds:
    """Of one rank. Any thread may add to them, one settles them."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        self._under_way: deque[tuple[StreamEvent, Sequence[int]]] = deque()  # and what has ended once it has come
        self.were_aborted = False  # groups of streams: from then on nobody knows what comes to its end

    def are_due(self) -> bool:
        """Whether some have not come."""
        return self.were_aborted or bool(self._under_way)

    def waited(self, numbers: Sequence[int]) -> None:
        """The current stream waits for these operations of the flight record.

        In a CUDA graph that is being captured nothing happens, so nothing is waited for.
        """
        if sys.modules["torch"].cuda.is_current_stream_capturing():
            self._recorder.leave_all(numbers)
            return
        self._under_way.append((StreamEvent(), numbers))

    def settle(self) -> None:
        """Leave what has ended. After an error of the device, which every call is told of from then on, that is all."""
        for _ in range(len(self._under_way)):
            event, numbers = self._under_way.popleft()
            try:
                has_come = event.has_come()
            except RuntimeError:
                has_come = True
            if has_come:
                self._recorder.leave_all(numbers)
            else:
                self._under_way.append((event, numbers))
