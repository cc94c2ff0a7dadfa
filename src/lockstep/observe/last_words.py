"""How a rank left, in a sentence that the others can quote."""

from __future__ import annotations

import os
import re
import traceback

from lockstep.errors import CommError, PeerFailed
from lockstep.observe.call_site import is_users
from lockstep.observe.status import LastWords

_CHARS = 400
# what torch raises where another rank has gone
_PEER_IS_GONE = re.compile(
    r"[Cc]onnection (was )?(closed|reset|refused|aborted)|[Bb]roken pipe|NCCL.*(remote|peer)|Timed out waiting"
    r"|caused pair closure"
)
_TORCH_NETWORK = ("DistNetworkError", "DistBackendError", "DistStoreError", "QueueEmptyError")


def last_words(error: BaseException) -> LastWords:
    """`error`, which ends this rank, in short."""
    lines = (str(error) or type(error).__name__).splitlines()
    message = lines[0] if len(lines[0]) <= _CHARS else lines[0][: _CHARS - 2] + ".."
    return LastWords(type(error).__name__, message, users_line(error), sees_another(error))


def sees_another(error: BaseException) -> bool:
    """True for what a rank raises because another one has gone."""
    if isinstance(error, CommError | PeerFailed):
        return True
    names = {kind.__name__ for kind in type(error).__mro__}
    is_torch = bool(names & set(_TORCH_NETWORK))
    is_network = isinstance(error, RuntimeError | OSError) and _PEER_IS_GONE.search(str(error)) is not None
    return is_torch or is_network


def users_line(error: BaseException) -> str:
    """Where in the user's own code `error` came up, "train.py:31": not in an installed package, Python's or lockstep's.

    "" where no frame is the user's.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return innermost([(error.filename, error.lineno or 0)])
    return innermost([(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)])


def innermost(places: list[tuple[str, int]]) -> str:
    """The last of these (file, line) that is the user's; the path from the current folder, or a whole one."""
    here = os.getcwd() + os.sep
    own = ((os.path.abspath(file), line) for file, line in reversed(places) if is_users(file))
    return next((f"{path.removeprefix(here)}:{line}" for path, line in own), "")
