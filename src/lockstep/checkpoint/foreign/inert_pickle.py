"""A pickle as data: nothing that it names is imported, nothing is called, no object of a class is made.

Plain values become Python's own. What pickle would do by running code (look up a class, call it, set its state) becomes
a symbol that says so: `Name`, `Call`, `Persistent`. Readers of one format then know the few symbols that it needs and
refuse all others by name. Protocols 2 to 5, as far as picklers write them; no hash of a container is ever taken.

Source: opcodes and their effect on the stack, CPython's Lib/pickletools.py, which also tells them apart here.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, final

from lockstep.errors import CheckpointDamaged, CheckpointError

PICKLE_BYTES_MAX = 128 << 20
_VALUES_MAX = 8_000_000  # a short pickle can describe a very large thing
_INT_BITS_MAX = 2048  # more digits than Python converts to text, and than any counter has
_KEY_MAX = 1 << 60  # equal hashes cannot be made of smaller integers


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
_CALL_COST = 4  # its memory in that of other values


def read_inert(data: bytes, source: str, values_max: int = _VALUES_MAX) -> Any:
    """The value of pickle `data`, with symbols in place of all that would need code. Containers may hold themselves.

    Memory: at most some 100 bytes for each of `values_max`. `source` is named in errors.
    Raises: CheckpointDamaged for what no pickler writes; CheckpointError for what is too large or too old.
    """
    machine = _Machine(source, len(data), values_max)
    try:
        for opcode, argument, at in pickletools.genops(data):
            machine.step(opcode.name, argument, at or 0)
    except (ValueError, DeprecationWarning) as error:  # a warning, where it is an error: of a backslash in a name
        machine.fail(f"is cut off or damaged: {ascii(str(error))[1:-1]:.200}")
    return machine.result()


@final
class _Machine:
    """The stack machine that a pickle is a program for."""

    def __init__(self, source: str, length: int, values_max: int) -> None:
        self._source = source
        self._length = length
        self._at = 0
        self._frame_end = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._left = values_max

    def step(self, operation: str, argument: Any, at: int) -> None:
        if (operation == "PROTO") != (at == 0):
            self.fail("does not say first, and once, that it is of protocol 2 to 5")
        if self._at < self._frame_end < at:
            self.fail("has an operation that leaves its frame")
        self._at = at
        action = _ACTIONS.get(operation)
        if action is None:
            self.fail(f"has the operation {operation}, which no pickler of protocol 2 to 5 writes")
        action(self, argument)

    def result(self) -> Any:
        if self._at + 1 != self._length:
            self.fail(f"goes on for {self._length - self._at - 1} bytes after its end")
        value = self.pop()
        if self._stack:
            self.fail(f"ends with {len(self._stack)} values too many")
        return value

    def fail(self, what: str) -> NoReturn:
        raise CheckpointDamaged(f"{self._source} {what} (at byte {self._at})")

    def protocol(self, version: int) -> None:
        if not 2 <= version <= 5:
            self.fail(f"is of protocol {version}; 2 to 5 are read")

    def frame(self, size: int) -> None:
        begin = self._at + 9
        if self._at < self._frame_end or begin + size > self._length:
            self.fail(f"has a frame of {size} bytes that does not fit")
        self._frame_end = begin + size

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

    def top(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            self.fail("uses a value that is not there")
        return self._stack[-1]

    def pop(self) -> Any:
        value = self.top()
        self._stack.pop()
        return value

    def last(self, count: int) -> list[Any]:
        return [self.pop() for _ in range(count)][::-1]

    def since_mark(self) -> list[Any]:
        index = len(self._stack) - 1
        while index >= 0 and self._stack[index] is not _MARK:
            index -= 1
        if index < 0:
            self.fail("takes values up to a mark that is not there")
        values = self._stack[index + 1 :]
        del self._stack[index:]
        return values

    def remember(self, index: int | None) -> None:
        self.spend(1)
        self._memo[len(self._memo) if index is None else index] = self.top()

    def recall(self, index: int) -> None:
        if index not in self._memo:
            self.fail(f"asks for value {index}, which it has not kept")
        self.push(self._memo[index])

    # -------------------------------------------------------------- values

    def integer(self, value: int) -> None:
        if value.bit_length() > _INT_BITS_MAX:
            self.fail(f"has an integer of {value.bit_length()} bits")
        self.push(value)

    def text(self, value: str) -> None:
        if not value.isascii():
            value.encode()  # ValueError for half of a character, which Python's own pickles may have
        self.push(value)

    def name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            self.fail(f"names a class by {type(module).__name__} and {type(name).__name__} in place of text")
        self.push(Name(module, name))

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
                kind = type(key).__name__
                raise CheckpointError(f"{self._source} has a dict with a {kind} as key, not text or integer")
            if key in target:
                self.fail("sets a key of a dict twice" + (f": {key[:80]!r}" if isinstance(key, str) else ""))
            target[key] = value

    def new_with_keywords(self) -> None:
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


def is_key(value: Any) -> bool:
    """Whether dicts may be keyed by it: strings, whose hashes are secret, small integers, and calls (by identity)."""
    if isinstance(value, int):
        return -_KEY_MAX < value < _KEY_MAX
    return isinstance(value, str | Call) or value is None


_Action = Callable[[_Machine, Any], object]
_ACTIONS: dict[str, _Action] = {
    "PROTO": _Machine.protocol,
    "FRAME": _Machine.frame,
    "STOP": lambda m, _: None,
    "MARK": lambda m, _: m.push(_MARK),
    "POP": lambda m, _: m.pop(),
    "POP_MARK": lambda m, _: m.since_mark(),
    # values
    "NONE": lambda m, _: m.push(None),
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "LONG4"), _Machine.integer),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), _Machine.text),
    **dict.fromkeys(("BINFLOAT", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"), _Machine.push),
    # containers
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "TUPLE1": lambda m, _: m.push(tuple(m.last(1))),
    "TUPLE2": lambda m, _: m.push(tuple(m.last(2))),
    "TUPLE3": lambda m, _: m.push(tuple(m.last(3))),
    "TUPLE": lambda m, _: m.push(tuple(m.since_mark())),
    "EMPTY_LIST": lambda m, _: m.push([]),
    "APPEND": lambda m, _: m.append(m.last(1)),
    "APPENDS": lambda m, _: m.append(m.since_mark()),
    "EMPTY_DICT": lambda m, _: m.push({}),
    "SETITEM": lambda m, _: m.set_items(m.last(2)),
    "SETITEMS": lambda m, _: m.set_items(m.since_mark()),
    "EMPTY_SET": lambda m, _: m.push_call(Name("builtins", "set"), ()),
    "ADDITEMS": lambda m, _: m.append(m.since_mark()),
    "FROZENSET": lambda m, _: m.push_call(Name("builtins", "frozenset"), (m.since_mark(),)),
    # memo
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.recall),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.remember),
    # symbols
    "GLOBAL": lambda m, names: m.name(*names.split(" ", 1)),
    "STACK_GLOBAL": lambda m, _: m.name(*m.last(2)),
    "REDUCE": lambda m, _: m.push_call(*m.last(2)),
    "NEWOBJ": lambda m, _: m.push_call(*m.last(2)),
    "NEWOBJ_EX": lambda m, _: m.new_with_keywords(),
    "BUILD": lambda m, _: m.build(),
    "BINPERSID": lambda m, _: m.push(Persistent(m.pop())),
}
