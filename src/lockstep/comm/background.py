"""A thread that is started when there is first something for it to do."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar, final

Owner = TypeVar("Owner")
Item = TypeVar("Item")


@final
class Background(Generic[Owner, Item]):
    """Calls `do(owner, item)` for every item it is given, in order, in a thread of its own.

    It refers to its owner weakly but while it works, so an owner nobody holds any more ends the thread by `close`.
    """

    def __init__(self, owner: Owner, do: Callable[[Owner, Item], object], name: str) -> None:
        self._owner = weakref.ref(owner)
        self._do = do
        self._name = name
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._lock = threading.RLock()  # a garbage collection may close it while it is called
        self._thread: threading.Thread | None = None
        self._closed = False

    def call(self, item: Item) -> bool:
        """Let the thread take care of `item`. False after `close`: then nothing happens."""
        with self._lock:
            if self._closed:
                return False
            if self._thread is None:
                arguments = (self._owner, self._do, self._items)
                thread = threading.Thread(target=_serve, args=arguments, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
            self._items.put(item)
            return True

    def is_here(self) -> bool:
        """Whether the caller is this thread."""
        return threading.current_thread() is self._thread

    def close(self, patience_s: float | None = None) -> None:
        """End the thread, once it has ended what it is at; not waited for where it calls this itself."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._items.put(None)
            if thread is not threading.current_thread():
                thread.join(patience_s)


def _serve(ref: weakref.ref[Any], do: Callable[[Any, Any], object], items: queue.SimpleQueue[Any]) -> None:
    while (item := items.get()) is not None:
        owner = ref()
        if owner is None:
            return
        do(owner, item)
        del owner, item
