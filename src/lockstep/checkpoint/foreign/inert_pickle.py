"""A pickle as data: nothing that it names is imported, nothing is called, no object of a class is made.

Plain values become Python's own. What pickle would do by running code (look up a class, call it, set its state) becomes
a symbol that says so: `Name`, `Call`, `Persistent`. Readers of one format then know the few symbols that it needs and
refuse all others by name. Protocols 2 to 5, as far as picklers write them; no hash of a container is ever taken.

Source: opcodes and their effect on the stack, CPython's Lib/pickletools.py.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, final

from lockstep.errors import CheckpointDamaged, CheckpointError

_INT_BYTES_MAX = 256  # more digits than Python converts to text, and than any counter has
_KEY_MAX = 1 << 60  # equal hashes cannot be made of smaller integers


class Limits(NamedTuple):
    """How large a pickle may be: a short one can describe a very large thing."""

    bytes: int = 128 << 20
    values: int = 8_000_000


@final
@dataclass(frozen=True, slots=True)
class Name:
    """A class or function that the pickle refers to. It was not looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        module = "builtins" if self.module == "__builtin__" else self.module  # its name in Python 2, and in protocol 2
        return f"{module}.{self.name}"


@final
@dataclass(eq=False, slots=True)
class Call:
    """What `function(*args)` would return, and what was then done to it. It was not called."""

    function: Any  # a Name; in a hostile pickle any value
    args: Any
    items: list[tuple[Any, Any]] = field(default_factory=list)  # result[key] = value
    added: list[Any] = field(default_factory=list)  # result.append(value), result.add(value)
    states: list[Any] = field(default_factory=list)  # result.__setstate__(state)

    def is_of(self, *names: str) -> bool:
        """Whether the function is one of these, written with dots."""
        return isinstance(self.function, Name) and str(self.function) in names

    def is_plain(self) -> bool:
        """Whether it is a call, with arguments in a tuple, and nothing else was done."""
        return isinstance(self.args, tuple) and not (self.items or self.added or self.states)


@final
@dataclass(eq=False, slots=True)
class Persistent:
    """An object that is kept outside of the pickle, by what the pickle says of it."""

    id: Any


_MARK = object()
_MISSING = object()
_CALL_COST = 4  # its memory in that of other values


def read_inert(data: bytes, source: str, limits: Limits | None = None) -> Any:
    """The value of pickle `data`, with symbols in place of all that would need code. Containers may hold themselves.

    Memory: at most some 100 bytes for each of `limits.values`. `source` is named in errors.
    Raises: CheckpointDamaged for what no pickler writes; CheckpointError for what is too large or too old.
    """
    limits = limits or Limits()
    if len(data) > limits.bytes:
        raise CheckpointError(f"{source} has {len(data)} bytes, more than the {limits.bytes} that are read")
    return _Machine(data, source, limits.values).run()


@final
class _Machine:
    """The stack machine that a pickle is a program for."""

    def __init__(self, data: bytes, source: str, values_max: int) -> None:
        self._data = data
        self._source = source
        self._at = 0
        self._frame_end = 0  # 0: in no frame
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._left = values_max

    def run(self) -> Any:
        if self._data[:1] != b"\x80":
            self.fail("does not begin as pickles of protocol 2 to 5 do")
        opcode = b""
        while opcode != b".":
            opcode = self.take(1)
            action = _ACTIONS.get(opcode)
            if action is None:
                self.fail(f"has the operation {opcode!r}, which no pickler of protocol 2 to 5 writes")
            action(self)
            self._check_frame()
        if self._at != len(self._data):
            self.fail(f"goes on for {len(self._data) - self._at} bytes after its end")
        if len(self._stack) != 1 or self._stack[0] is _MARK:
            self.fail(f"ends with {len(self._stack)} values in place of one")
        return self._stack[0]

    def fail(self, what: str) -> NoReturn:
        raise CheckpointDamaged(f"{self._source} {what} (at byte {self._at})")

    # -------------------------------------------------------------- bytes

    def take(self, count: int) -> bytes:
        end = self._at + count
        if count < 0 or end > len(self._data):
            self.fail(f"is cut off: {count} bytes are announced, {len(self._data) - self._at} are left")
        found = self._data[self._at : end]
        self._at = end
        return found

    def number(self, count: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(count), "little", signed=signed)

    def line(self) -> str:
        end = self._data.find(b"\n", self._at)
        if end < 0:
            self.fail("is cut off in a name")
        text = self.take(end - self._at)
        self._at += 1
        return self.text(text)

    def text(self, encoded: bytes) -> str:
        try:
            return encoded.decode("utf-8")
        except UnicodeDecodeError:
            self.fail("has text that is not UTF-8")

    def frame(self) -> None:
        size = self.number(8)
        if self._frame_end or size > len(self._data) - self._at:
            self.fail(f"has a frame of {size} bytes that does not fit")
        self._frame_end = self._at + size

    def _check_frame(self) -> None:
        if self._frame_end and self._at >= self._frame_end:
            if self._at > self._frame_end:
                self.fail("has an operation that leaves its frame")
            self._frame_end = 0

    # -------------------------------------------------------------- stack

    def spend(self, cost: int) -> None:
        self._left -= cost
        if self._left < 0:
            raise CheckpointError(f"{self._source} describes more values than are read: it is no ordinary checkpoint")

    def push(self, value: Any) -> None:
        self.spend(1)
        self._stack.append(value)

    def push_call(self, function: Any, args: Any) -> Call:
        self.spend(_CALL_COST)
        call = Call(function, args)
        self.push(call)
        return call

    def pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            self.fail("takes a value that is not there")
        return self._stack.pop()

    def drop(self) -> None:
        if not self._stack:
            self.fail("takes a value that is not there")
        self._stack.pop()

    def drop_to_mark(self) -> None:
        self.since_mark()

    def top(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            self.fail("uses a value that is not there")
        return self._stack[-1]

    def since_mark(self) -> list[Any]:
        index = len(self._stack) - 1
        while index >= 0 and self._stack[index] is not _MARK:
            index -= 1
        if index < 0:
            self.fail("takes values up to a mark that is not there")
        values = self._stack[index + 1 :]
        del self._stack[index:]
        return values

    def last(self, count: int) -> tuple[Any, ...]:
        return tuple([self.pop() for _ in range(count)][::-1])

    # -------------------------------------------------------------- memo

    def remember(self, index: int) -> None:
        self.spend(1)
        self._memo[index] = self.top()

    def memoize(self) -> None:
        self.remember(len(self._memo))

    def recall(self, index: int) -> None:
        value = self._memo.get(index, _MISSING)
        if value is _MISSING:
            self.fail(f"asks for value {index}, which it has not kept")
        self.push(value)

    # -------------------------------------------------------------- values

    def protocol(self) -> None:
        version = self.number(1)
        if self._at != 2 or not 2 <= version <= 5:
            self.fail(f"is of protocol {version}, or says its protocol twice; 2 to 5 are read")

    def integer(self, width: int) -> None:
        size = self.number(width, signed=width == 4)
        if size > _INT_BYTES_MAX:
            self.fail(f"has an integer of {size} bytes")
        self.push(self.number(size, signed=True))

    def global_name(self) -> None:
        module = self.line()
        self.push(Name(module, self.line()))

    def stack_name(self) -> None:
        module, name = self.last(2)
        if not isinstance(module, str) or not isinstance(name, str):
            self.fail(f"names a class by {type(module).__name__} and {type(name).__name__} in place of text")
        self.push(Name(module, name))

    def new_set(self, kind: str, values: list[Any]) -> None:
        self.push_call(Name("builtins", kind), ()).added += values

    # -------------------------------------------------------------- what is done to values

    def append(self, values: list[Any]) -> None:
        target = self.top()
        if isinstance(target, Call):
            target.added += values
        elif type(target) is list:
            target += values
        else:
            self.fail(f"appends to a {type(target).__name__}")

    def set_items(self, flat: list[Any]) -> None:
        target = self.top()
        if len(flat) % 2:
            self.fail("has a key without a value")
        pairs = list(zip(flat[::2], flat[1::2], strict=True))
        if isinstance(target, Call):
            target.items += pairs
            return
        if type(target) is not dict:
            self.fail(f"sets items of a {type(target).__name__}")
        for key, value in pairs:
            if not is_key(key):
                raise CheckpointError(
                    f"{self._source} has a dict with a {type(key).__name__} as key, not text or integer"
                )
            if key in target:
                self.fail("sets a key of a dict twice" + (f": {key[:80]!r}" if isinstance(key, str) else ""))
            target[key] = value

    def reduce(self) -> None:
        function, args = self.last(2)
        self.push_call(function, args)

    def reduce_with_keywords(self) -> None:
        function, args, keywords = self.last(3)
        if type(keywords) is not dict or keywords:
            self.fail("makes an object with keyword arguments")
        self.push_call(function, args)

    def build(self) -> None:
        state = self.pop()
        target = self.top()
        if not isinstance(target, Call):
            self.fail(f"sets the state of a {type(target).__name__}")
        target.states.append(state)

    def persistent(self) -> None:
        self.push(Persistent(self.pop()))


def is_key(value: Any) -> bool:
    """Whether dicts may be keyed by it: strings, whose hashes are secret, small integers, and calls (by identity)."""
    if isinstance(value, int):
        return -_KEY_MAX < value < _KEY_MAX
    return isinstance(value, str | Call) or value is None


_ACTIONS: dict[bytes, Callable[[_Machine], None]] = {
    b"\x80": lambda m: m.protocol(),
    b"\x95": lambda m: m.frame(),
    b".": lambda m: None,
    b"(": lambda m: m.push(_MARK),
    b"0": lambda m: m.drop(),
    b"1": lambda m: m.drop_to_mark(),
    # values
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"J": lambda m: m.push(m.number(4, signed=True)),
    b"K": lambda m: m.push(m.number(1)),
    b"M": lambda m: m.push(m.number(2)),
    b"\x8a": lambda m: m.integer(1),
    b"\x8b": lambda m: m.integer(4),
    b"G": lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    b"\x8c": lambda m: m.push(m.text(m.take(m.number(1)))),
    b"X": lambda m: m.push(m.text(m.take(m.number(4)))),
    b"\x8d": lambda m: m.push(m.text(m.take(m.number(8)))),
    b"C": lambda m: m.push(m.take(m.number(1))),
    b"B": lambda m: m.push(m.take(m.number(4))),
    b"\x8e": lambda m: m.push(m.take(m.number(8))),
    b"\x96": lambda m: m.push(bytearray(m.take(m.number(8)))),
    # containers
    b")": lambda m: m.push(()),
    b"\x85": lambda m: m.push(m.last(1)),
    b"\x86": lambda m: m.push(m.last(2)),
    b"\x87": lambda m: m.push(m.last(3)),
    b"t": lambda m: m.push(tuple(m.since_mark())),
    b"]": lambda m: m.push([]),
    b"a": lambda m: m.append(list(m.last(1))),
    b"e": lambda m: m.append(m.since_mark()),
    b"}": lambda m: m.push({}),
    b"s": lambda m: m.set_items(list(m.last(2))),
    b"u": lambda m: m.set_items(m.since_mark()),
    b"\x8f": lambda m: m.new_set("set", []),
    b"\x90": lambda m: m.append(m.since_mark()),
    b"\x91": lambda m: m.new_set("frozenset", m.since_mark()),
    # memo
    b"h": lambda m: m.recall(m.number(1)),
    b"j": lambda m: m.recall(m.number(4)),
    b"q": lambda m: m.remember(m.number(1)),
    b"r": lambda m: m.remember(m.number(4)),
    b"\x94": lambda m: m.memoize(),
    # symbols
    b"c": lambda m: m.global_name(),
    b"\x93": lambda m: m.stack_name(),
    b"R": lambda m: m.reduce(),
    b"\x81": lambda m: m.reduce(),
    b"\x92": lambda m: m.reduce_with_keywords(),
    b"b": lambda m: m.build(),
    b"Q": lambda m: m.persistent(),
}
