"""The methods that every operation calls, in C where the library was built with a compiler: see `held.h`.

`LOCKSTEP_NATIVE=off` has them in Python all the same, as has a build without a compiler: slower, and alike in all else.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.observe.settings import NATIVE

_Method = TypeVar("_Method", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type[Any])


try:
    if TYPE_CHECKING or os.environ.get(NATIVE) == "off":
        raise ImportError
    from lockstep.observe.native._methods import SOURCES, in_c, read_in_c, standing

    sources = sorted(Path(__file__).parent.glob("*.[ch]"))
    if zlib.crc32(b"".join([path.read_bytes() for path in sources])) != SOURCES:  # it was built of others
        raise ImportError
    IS_IN_C = True
except (ImportError, OSError):
    IS_IN_C = False
    standing = int  # a thread that is in C++ without a frame of Python's that tells it; 0: none is

    def in_c(method: _Method, held: tuple[Any, ...] = ()) -> _Method:
        """`method`, tried in C first, which declines all that is not as usual. held: of a function, what C needs."""
        return method

    def read_in_c(of: _Class) -> _Class:
        """The class itself, whose `__slots__` the methods in C read where they lie."""
        return of
