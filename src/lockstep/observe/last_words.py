"""How a rank left, in a sentence that the others can quote."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Sequence

from lockstep.errors import CommError, LockstepError, PeerFailed, PeerLost, ReplicaError
from lockstep.observe.call_site import is_users
from lockstep.observe.status import LastWords, in_words

DEBUG = "LOCKSTEP_DEBUG"  # set to anything: whole traces, and failed imports of the fork server, are told
_CHARS, _FEW, _SHORT = 400, 3, 120  # of an error; notes, and members of a group, that stand beside; of each of these
_UNPRINTABLE = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_ON_THIS_RANK = ". On this rank, "  # after it stands what the quoting rank saw itself, which is not for others
# what follows where a GPU has no room: of other processes, and advice
_NEIGHBOURS = re.compile(r"(?<=is free\.) (Process \d+ has|Including non-PyTorch memory).*")
# what torch raises where another rank has gone
_PEER_IS_GONE = re.compile(
    r"[Cc]onnection (was )?(closed|reset|refused|aborted)|[Bb]roken pipe|NCCL.*(remote|peer)|Timed out waiting"
    r"|caused pair closure|^Operation timed out!"
)
_BROUGHT = re.compile(r"(?:Caught \w+ in|--) (.+?)(?:\.\nOriginal | terminated with .*\n)Traceback")  # by torch
# what a function that was given to `then` of a future has raised, as C++ tells it; the first, where others met that
_CALLED = re.compile(r".*when running the callback: (\w+):? ?(.*?)\n\nAt:\n(.+?)(?:\n\n|$)", re.DOTALL)
_TORCH_NETWORK = ("DistNetworkError", "DistBackendError", "DistStoreError", "QueueEmptyError")


def last_words(error: BaseException) -> LastWords:
    """`error`, which ends this rank, in short."""
    if isinstance(error, SystemExit) and error.__context__ is not None:  # `except ...: sys.exit(1)`
        error = error.__context__
    kind, message, where = quoted(error)
    first = message.partition("\n")[0].partition(_ON_THIS_RANK)[0]
    message = first if len(first) <= _CHARS else first[: _CHARS - 2] + ".."
    seen = seen_in(error)
    return LastWords(kind, message, where, seen is not None, seen.rank if isinstance(seen, PeerLost) else None)


def _of_users_code(error: BaseException) -> BaseException:
    """`error`, or the one that it hides: of the user's code, from which a package that called that has raised it."""
    frames, cause = traceback.extract_tb(error.__traceback__), error.__cause__
    if cause is None or cause is error or isinstance(error, LockstepError) or sees_another(error):
        return error
    is_users_word = bool(frames) and is_users(frames[-1].filename)
    return error if is_users_word or not users_line(cause) else _of_users_code(cause)


def quoted(error: BaseException) -> tuple[str, str, str]:
    """The class of `error` or of the user's that it hides, what that says, and `users_line`, of where it came up."""
    error = _of_users_code(error)
    kind, text = type(error).__name__, _text_of(error)
    if called := _CALLED.match(text):
        frames = re.findall(r"^  (.+)\((\d+)\): ", called[3], re.MULTILINE)
        where = innermost([(file, int(line)) for file, line in frames[::-1]])  # they come from within
        return called[1], f"{called[2]} (in a callback)".lstrip(), where or users_line(error)
    brought = _BROUGHT.match(text)
    if brought is None:
        head, newline, rest = text.partition("\n")
        return kind, head + _beside(error, text) + newline + rest, users_line(error)
    last = text.splitlines()[-1].removeprefix(f"{kind}: ")
    return kind, f"{last} (in {brought[1]})", innermost(places_in(text)) or users_line(error)


def _text_of(error: BaseException) -> str:
    try:
        text = str(error).strip() or type(error).__name__
    except Exception:  # noqa: BLE001 - as Python prints it
        return "<exception str() failed>"
    text = _NEIGHBOURS.sub("", "\n".join(text.splitlines()))
    return _UNPRINTABLE.sub(lambda at: at[0].encode("unicode_escape").decode(), text)


def _beside(error: BaseException, text: str) -> str:
    """What `error` tells beside its `text`: notes, the members of a group, what it was raised from."""
    is_own = not (isinstance(error, LockstepError) or sees_another(error))
    notes, cause = getattr(error, "__notes__", None), error.__cause__ if is_own else None
    more = [_text_of(Exception(note)) for note in notes[:_FEW]] if isinstance(notes, list) else []
    if "BaseExceptionGroup" in {kind.__name__ for kind in type(error).__mro__}:  # Python has it from 3.11 on
        inner: Sequence[BaseException] = getattr(error, "exceptions", ())
        more += [in_words(kind, said) + f" at {at}" * bool(at) for kind, said, at in map(quoted, inner[:_FEW])]
        more += [f"and {len(inner) - _FEW} more"] * (len(inner) > _FEW)
    if cause is not None and _text_of(cause) not in text:
        more.append(f"from {in_words(type(cause).__name__, _text_of(cause))}")
    shown = [one if len(one) <= _SHORT else one[: _SHORT - 2] + ".." for one in (m.partition("\n")[0] for m in more)]
    return f" ({'; '.join(shown)})" if shown else ""


def places_in(trace: str) -> list[tuple[str, int]]:
    """(file, line) of each frame of a traceback that was printed."""
    return [(file, int(line)) for file, line in re.findall(r'^  File "(.+)", line (\d+)', trace, re.MULTILINE)]


def peer_failed(rank: int, words: str, me: int, seen: BaseException) -> PeerFailed:
    """What rank `me` raises for `rank`, which ended as `words` say, in place of what it has `seen` of that."""
    return PeerFailed(f"{words}{_ON_THIS_RANK}{me}: {seen}", rank)


def sees_another(error: BaseException) -> bool:
    """True for what a rank raises because another one has gone; not for a connection of its own, as of a download."""
    if isinstance(error, CommError | PeerFailed):
        return True
    names = {kind.__name__ for kind in type(error).__mro__}
    is_network = isinstance(error, RuntimeError) and _PEER_IS_GONE.search(_text_of(error)) is not None
    return is_network or not names.isdisjoint(_TORCH_NETWORK)


def says_all(error: BaseException) -> bool:
    """True where how it was met in our code and torch's tells nobody anything: it is about what ranks have done."""
    return sees_another(error) or isinstance(error, ReplicaError)


def seen_in(error: BaseException) -> BaseException | None:
    """The first of `error` and of what it was raised from that is another rank's doing; None where none is."""
    at, passed = error, set[int]()
    while at is not None and id(at) not in passed and not sees_another(at):
        passed.add(id(at))
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return None if at is None or id(at) in passed else at


def own_before(error: BaseException | None) -> BaseException | None:
    """Of what was being handled when `error` came up: the newest that is no doing of another rank; or `error`."""
    passed = set[int]()
    while error is not None and says_all(error):
        passed.add(id(error))
        error = error.__cause__ or error.__context__
        error = None if id(error) in passed else error
    return error


def handled(error: BaseException | None) -> str:
    """What a rank in the `finally` or `except` of `error` has met, of its own: "KeyError: 'x', at train.py:31"."""
    kind, said, where, *_ = ("", "", "") if (own := own_before(error)) is None else last_words(own)
    is_end = isinstance(own, StopIteration | StopAsyncIteration)  # of the data, say: no error
    return f"{in_words(kind, said)}, at {where}" if where and not is_end else ""


def end_in_users_code(error: BaseException) -> None:
    """Leave out how it was met in our code and torch's, if it `says_all`: else, and where asked for, it stays whole."""
    if not says_all(error) or DEBUG in os.environ:
        return
    last, trace, own = None, error.__traceback__, own_before(error)
    while trace is not None:
        last = trace if is_users(trace.tb_frame.f_code.co_filename) else last
        trace = trace.tb_next
    if last is None:
        error.__traceback__ = None
    else:
        last.tb_next = None
    error.__cause__, error.__context__, error.__suppress_context__ = None, own, own is None


def users_line(error: BaseException) -> str:
    """Where in the user's own code `error` came up, "train.py:31"; "" where that was never: see `is_users`."""
    places = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno or 0))
    return innermost(places)


def innermost(places: list[tuple[str, int]]) -> str:
    """The last of these (file, line) that is the user's; the path from the current folder, or a whole one."""
    here = os.getcwd() + os.sep
    own = ((os.path.abspath(file), line) for file, line in reversed(places) if is_users(file))
    return next((f"{path.removeprefix(here)}:{line}" for path, line in own), "")
