"""Pickles read as data: equal to what pickle gives where that is plain, symbols for the rest, errors for all else."""

from __future__ import annotations

import collections
import io
import pickle
import random
import struct
import tracemalloc
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.checkpoint.foreign.inert_pickle import Call, Name, Persistent, read_inert
from lockstep.errors import CheckpointDamaged, CheckpointError

PROTOCOLS = (2, 3, 4, 5)
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**200), 2**200),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=300),
)
_KEYS = st.one_of(st.text(st.characters(exclude_categories=["Cs"]), max_size=9), st.integers(-(2**59), 2**59))
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=6),
        st.lists(inner, max_size=6).map(tuple),
        st.dictionaries(_KEYS, inner, max_size=6),
    ),
    max_leaves=40,
)


def read(data: bytes, **limit: int) -> Any:
    return read_inert(data, "sample", **limit)


class _Point:
    """An object with a state."""

    def __init__(self, x: int) -> None:
        self.x = x


class _Reduced:
    """An object that is rebuilt by `function(*args)`, as a pickle that was made to do harm is."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.made = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.made


@given(_VALUES, st.sampled_from(PROTOCOLS))
@settings(max_examples=100)
def test_plain_values_are_those_of_pickle(value: Any, protocol: int) -> None:
    found = read(pickle.dumps(value, protocol))
    assert found == value
    assert repr(found) == repr(value)  # True is no 1, and a tuple no list


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_large_and_shared_values(protocol: int) -> None:
    shared = ["x" * 70_000, 2**1000]
    value = [shared, shared, tuple(range(300)), {str(i): i for i in range(3000)}]
    if protocol > 2:
        value.append(b"\xff" * 70_000)
    found = read(pickle.dumps(value, protocol))
    assert found == value
    assert found[0] is found[1]


def test_bytes_of_later_protocols() -> None:
    assert read(pickle.dumps([b"\x00\xff", bytearray(b"ab" * 200)], 5)) == [b"\x00\xff", bytearray(b"ab" * 200)]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_containers_that_hold_themselves(protocol: int) -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    table: dict[str, Any] = {}
    table["self"] = (table,)
    found = read(pickle.dumps([loop, table], protocol))
    assert found[0][1] is found[0]
    assert found[1]["self"][0] is found[1]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_needs_code_is_a_symbol(protocol: int) -> None:
    ordered = collections.OrderedDict([("a", 1), ("b", 2)])
    found = read(pickle.dumps([_Point(3), ordered, PurePosixPath("a/b"), len, collections.Counter("aab")], protocol))
    point, mapping, path, function, counter = found
    assert (point.function, point.args, point.states) == (Name(__name__, "_Point"), (), [{"x": 3}])
    assert (str(mapping.function), mapping.items) == ("collections.OrderedDict", [("a", 1), ("b", 2)])
    assert (str(path.function), path.args) == ("pathlib.PurePosixPath", ("a", "b"))
    assert function == Name("__builtin__" if protocol == 2 else "builtins", "len")
    assert (str(counter.function), counter.args) == ("collections.Counter", ({"a": 2, "b": 1},))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_sets_are_symbols_so_that_nothing_is_hashed(protocol: int) -> None:
    some, fixed = read(pickle.dumps([{1, 2, 3}, frozenset("ab")], protocol))
    assert (str(some.function), sorted(some.added or some.args[0])) == ("builtins.set", [1, 2, 3])
    assert (str(fixed.function), sorted(fixed.added or fixed.args[0])) == ("builtins.frozenset", ["a", "b"])


def test_persistent_ids() -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return ("storage", 7) if isinstance(obj, _Point) else None

    out = io.BytesIO()
    Pickler(out, 2).dump({"a": _Point(1)})
    found = read(out.getvalue())["a"]
    assert isinstance(found, Persistent)
    assert found.id == ("storage", 7)


# ------------------------------------------------------------------ harm

_NAMES = [b"cos\nsystem\n", b"cbuiltins\neval\n", b"cposix\nsystem\n", b"cos.path\n../..\n", b"c\n\n"]
_ARGUMENT = b"X\x04\x00\x00\x00boom\x85"
HOSTILE = {
    **{f"reduce {name!r}": b"\x80\x02" + name + _ARGUMENT + b"R." for name in _NAMES},
    "new object": b"\x80\x02cos\nsystem\n" + _ARGUMENT + b"\x81.",
    "new object with keywords": b"\x80\x04\x8c\x02os\x8c\x06system\x93)}\x92.",
    "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93" + _ARGUMENT + b"R.",
    "stack global of a made name": b"\x80\x04\x8c\x02os\x8c\x0cpath.os.exec\x93)R.",
    "call of a call": b"\x80\x02cbuiltins\ngetattr\ncos\nsystem\nX\x01\x00\x00\x00x\x86R" + _ARGUMENT + b"R.",
    "build": b"\x80\x02cos\nsystem\n)\x81}X\x08\x00\x00\x00__dict__cos\nsystem\nsb.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_harm_is_only_a_symbol(name: str) -> None:
    found = read(HOSTILE[name])
    assert isinstance(found, Call)
    assert isinstance(found.function, Name | Call)


REFUSED = {
    "empty": b"",
    "no protocol": b"N.",
    "protocol 0": pickle.dumps([1], 0),
    "protocol 1": pickle.dumps([1], 1),
    "protocol 6": b"\x80\x06N.",
    "protocol twice": b"\x80\x02\x80\x02N.",
    "no end": b"\x80\x02N",
    "nothing at the end": b"\x80\x02.",
    "two values at the end": b"\x80\x02NN.",
    "a mark at the end": b"\x80\x02(.",
    "more after the end": b"\x80\x02N.N",
    "instance by the old opcode": b"\x80\x02(ios\nsystem\n.",
    "object by the old opcode": b"\x80\x02(cos\nsystem\no.",
    "copyreg extension": b"\x80\x02\x82\x01.",
    "persistent id as text": b"\x80\x02Pboom\n.",
    "duplicate": b"\x80\x02N2.",
    "decimal integer": b"\x80\x02I1\n.",
    "decimal long": b"\x80\x02L1L\n.",
    "evaluated string": b"\x80\x02S'a'\n.",
    "out-of-band buffer": b"\x80\x05\x97.",
    "name is no text": b"\x80\x04K\x01K\x02\x93.",
    "name without end": b"\x80\x02cos",
    "name that is no text": b"\x80\x02c\xff\n\xff\n.",
    "text that is no UTF-8": b"\x80\x02X\x01\x00\x00\x00\xff.",
    "lone surrogate": pickle.dumps("\ud800", 4),
    "memo that was not set": b"\x80\x02h\x05.",
    "memo of nothing": b"\x80\x02q\x00.",
    "memo of a mark": b"\x80\x02(q\x00N.",
    "pop of nothing": b"\x80\x020N.",
    "mark that is not there": b"\x80\x02NN1N.",
    "tuple across a mark": b"\x80\x02N(\x85.",
    "append to a tuple": b"\x80\x02)Na.",
    "append to nothing": b"\x80\x02Na.",
    "append to text": b"\x80\x02X\x00\x00\x00\x00Na.",
    "items of a list": b"\x80\x02]NNs.",
    "key without value": b"\x80\x02}(Nu.",
    "key twice": b"\x80\x02}NNsNNs.",
    "key True and 1": b"\x80\x02}\x88NsK\x01Ns.",
    "unhashable key": b"\x80\x02}]Ns.",
    "tuple as key": b"\x80\x02})Ns.",
    "float as key": b"\x80\x02}G\x00\x00\x00\x00\x00\x00\x00\x00Ns.",
    "state of a list": b"\x80\x02]Nb.",
    "state of a name": b"\x80\x02cos\nsystem\nNb.",
    "keywords": b"\x80\x04\x8c\x02os\x8c\x06system\x93)}K\x01K\x02s\x92.",
    "frame beyond the end": b"\x80\x04\x95\xff\x00\x00\x00\x00\x00\x00\x00N.",
    "frame in a frame": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x95\x01\x00\x00\x00\x00\x00\x00\x00N.",
    "operation across frames": b"\x80\x04\x95\x01\x00\x00\x00\x00\x00\x00\x00K\x01.",
    "negative length": b"\x80\x02\x8b\xff\xff\xff\xff.",
}
_HUGE = struct.pack("<Q", 1 << 60)
REFUSED |= {f"2^60 {code!r}": b"\x80\x05" + code + _HUGE + b"N." for code in (b"\x8d", b"\x8e", b"\x96", b"\x95")}
REFUSED |= {f"2^31 {code!r}": b"\x80\x05" + code + b"\xff\xff\xff\x7fN." for code in (b"X", b"B", b"\x8b")}
_COLLIDING = [(2**61 - 1) * n for n in range(1, 5)]  # all hash to 0


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_pickler_writes_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="sample "):
        read(REFUSED[name])


def test_keys_with_equal_hashes_cannot_be_made() -> None:
    assert len({hash(n) for n in _COLLIDING}) == 1
    with pytest.raises(CheckpointError, match="as key"):
        read(pickle.dumps(dict.fromkeys(_COLLIDING, 0), 2))


def test_integers_have_a_limit() -> None:
    assert read(pickle.dumps(2**2000, 2)) == 2**2000
    with pytest.raises(CheckpointDamaged, match="integer of 4001 bits"):
        read(pickle.dumps(2**4000, 2))


# ------------------------------------------------------------------ size


@pytest.mark.parametrize("code", [b"]", b"}", b")", b"N", b"(", b"K\x01"])
def test_number_of_values_is_limited(code: bytes) -> None:
    with pytest.raises(CheckpointError, match="more values than are read"):
        read(b"\x80\x02" + code * 1001, values_max=1000)


@pytest.mark.parametrize("put", [lambda i: b"\x94", lambda i: b"r" + struct.pack("<L", 2**32 - 1 - i)])
def test_memo_counts_as_values(put: Any) -> None:
    with pytest.raises(CheckpointError, match="more values than are read"):
        read(b"\x80\x04N" + b"".join(put(i) for i in range(1001)) + b".", values_max=1000)


def test_memory_follows_the_limit_and_not_the_length() -> None:
    data = b"\x80\x02" + b"]" * 300_000 + b"."
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="more values"):
        read(data, values_max=10_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 * 10_000


@pytest.mark.parametrize(("inner", "around"), [(b"]", b"a"), (b"K\x00", b"\x85"), (b"}N", b"s"), (b"c\n\n", b")R")])
def test_depth_is_no_recursion(inner: bytes, around: bytes) -> None:
    depth = 30_000
    opening = inner if around in (b"a", b"s") else b""
    if around == b")R":
        data = b"\x80\x02" + inner + around * depth + b"."
    elif opening:
        data = b"\x80\x02" + opening * (depth + 1) + (b"" if around == b"a" else b"N" + around) + around * depth + b"."
    else:
        data = b"\x80\x02" + inner + around * depth + b"."
    assert read(data) is not None  # and it is freed again, without an overflow of the stack


def test_short_pickle_of_a_long_tree_is_small() -> None:
    """Lists of lists of the same lists: 10^30 leaves, if anyone walked them."""
    data = b"\x80\x02]q\x00" + b"".join(b"](" + b"h%c" % i * 10 + b"eq%c" % (i + 1) + b"0" for i in range(30))
    assert len(read(data + b"h\x1e\x86.")[1]) == 10


# ------------------------------------------------------------------ damage


def _sample(protocol: int) -> bytes:
    ordered = collections.OrderedDict([("weight", _Reduced(len, (1, 2), [3.5], None)), ("bias", True)])
    value = {"model": ordered, "step": 12, "text": "é" * 300, "big": -(2**100), "list": [1, (2, 3), {4: 70_000}]}
    return pickle.dumps([value, value, {5, 6}, _Point(7), b"\x00\xff"], protocol)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_truncation_is_an_error(protocol: int) -> None:
    data = _sample(protocol)
    assert read(data)
    for length in range(len(data)):
        with pytest.raises(CheckpointError):
            read(data[:length])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_any_changed_bytes_are_an_error_or_a_value(protocol: int) -> None:
    data, chance = _sample(protocol), random.Random(protocol)
    outcomes = collections.Counter()
    for _ in range(2000):
        changed = bytearray(data)
        for _ in range(chance.choice((1, 1, 2, 5))):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        try:
            read(bytes(changed), values_max=10_000)
            outcomes["value"] += 1
        except CheckpointError:
            outcomes["error"] += 1
    assert min(outcomes["value"], outcomes["error"]) > 100, outcomes
