"""What is recorded of the calls of one group, ready to be stored: programs make the same calls from the same lines."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any, final

from lockstep.observe.call_site import SITES
from lockstep.observe.flight import Words, pack_words

_KEPT = 4096  # more than a program has lines that communicate; what never repeats is packed anew

Line = tuple[Any, ...]  # id of code, instruction; and all that tells two calls from there apart


@final
class LineWords:
    """The words of calls, of a bounded number. `of_lines` is for whoever counts each call of Python's."""

    def __init__(self, group: str) -> None:
        self.of_lines: dict[Line, Words] = {}  # of calls from a line of the user's
        self.of_sites: dict[tuple[Any, ...], Words] = {}  # by the user's line in words, and what was called
        self._group = group
        self._codes: list[object] = []  # of these lines, which keep the ids that they go by

    def of(self, key: tuple[Any, ...], text: Callable[[], str], label: str = "") -> Words:
        """The words of a call. key: what tells it from others, the site first. text: called where it is not kept."""
        words = self.of_sites.get(key)
        if words is None:
            if len(self.of_sites) >= _KEPT:
                self.of_sites.clear()
            words = self.of_sites[key] = pack_words(self._group, text(), key[0], label)
        return words

    def learn(self, line: Line, frame: FrameType, site: str, words: Words) -> None:
        """Put them into `of_lines`, if the line of `frame` is the user's own: then `site` is that of each call from it.

        site: as `call_site` has found it.
        """
        _, its_site, is_best = SITES.get((id(frame.f_code), frame.f_lasti), (None, "", False))
        if not is_best or its_site != site:
            return
        if len(self._codes) >= _KEPT:
            self.of_lines.clear()
            self._codes.clear()
        self._codes.append(frame.f_code)
        self.of_lines[line] = words
