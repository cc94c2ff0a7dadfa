"""Files of `torch.save`: state dicts, tensors and plain values, read by what the pickle says, not by running it.

    <name>/data.pkl     the state, with a symbol for each tensor
    <name>/data/<key>   one storage, which several tensors may share
    <name>/byteorder    little, or absent in older files
    <name>/version      of the layout

Written so since torch 1.6. Other classes than the ones named here are refused by their name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, NoReturn, final

import numpy as np

from lockstep.checkpoint.foreign.inert_pickle import PICKLE_BYTES_MAX, Call, Name, Persistent, is_key, read_inert
from lockstep.checkpoint.foreign.torch_tensors import StoredTensors, dtype_of, shape_of
from lockstep.checkpoint.foreign.window import Window
from lockstep.checkpoint.foreign.zip_records import MAGIC, ZipRecords
from lockstep.checkpoint.state import DEPTH_MAX
from lockstep.errors import CheckpointDamaged, CheckpointError

_VALUES_PER_BYTE = 4  # of the pickle: it can use one value many times, as real ones do with few
_VALUES_MIN = 10_000
_VERSIONS = range(1, 11)
_NUMPY_SCALAR = ("numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar")
_NUMPY_ARRAY = ("numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct")
_NUMPY_NUMBER = re.compile(r"b1|[iu][1248]|f[248]")


def read_torch_window(file: Window) -> Any:
    """What `torch.save` has written to a range of an open file, its tensors on the CPU.

    Parameters become tensors, OrderedDicts dicts, torch.Size a tuple, dtypes and devices their names, numbers of numpy
    Python's. Tensors that shared memory share it again.
    Memory: the file's bytes, and the pickle's symbols.
    Raises: CheckpointDamaged for what is not whole; CheckpointError for what would need code, by its name.
    """
    start = file.read(0, min(file.bytes, len(MAGIC)))
    if start[:1] == b"\x80":
        raise CheckpointError(
            f"{file.name} is a bare pickle, as torch wrote it before 1.6: if you trust it, convert it with "
            "torch.save(torch.load(path, weights_only=True), new_path)"
        )
    if start != MAGIC:
        raise CheckpointDamaged(f"{file.name} is no file of torch.save: it does not begin as a zip archive")
    records = ZipRecords(file)
    roots = [name.partition("/")[0] for name in records.names if name.partition("/")[2] == "data.pkl"]
    if len(roots) != 1:
        raise CheckpointDamaged(f"{file.name} is no file of torch.save: its archive has no record data.pkl")
    _check_layout(records, roots[0])
    data = records.read(f"{roots[0]}/data.pkl", PICKLE_BYTES_MAX)
    values = _Values(file.name, StoredTensors(records, roots[0]), _VALUES_MIN + _VALUES_PER_BYTE * len(data))
    return values.value(read_inert(data, f"{file.name}: data.pkl"), ())


def _check_layout(records: ZipRecords, root: str) -> None:
    def small(name: str, default: bytes) -> bytes:
        whole = f"{root}/{name}"
        return records.read(whole, 64) if whole in records.names else default

    name = records.file.name
    if f"{root}/constants.pkl" in records.names:
        raise CheckpointError(f"{name} is a TorchScript archive, which is code: save its state_dict()")
    version, order = small("version", b"3").strip(), small("byteorder", b"little")
    if not version.isdigit() or int(version) not in _VERSIONS:
        raise CheckpointError(f"{name} is of version {version[:20]!r}, which is not known here")
    if order != b"little":
        raise CheckpointError(f"{name} has its numbers in byte order {order[:20]!r}; only little is read")


@final
class _Values:
    """Symbols of one file become values. `path` is where in the state, for errors."""

    def __init__(self, name: str, tensors: StoredTensors, values_max: int) -> None:
        self._name = name
        self._tensors = tensors
        self._left = values_max

    def value(self, found: Any, path: tuple[Any, ...]) -> Any:
        self._left -= 1
        if len(path) > DEPTH_MAX or self._left < 0:
            self._refuse(f"is nested deeper than {DEPTH_MAX}, or has one value in very many places", ())
        if found is None or isinstance(found, bool | int | float | str | bytes | bytearray):
            return found
        if isinstance(found, list | tuple):
            return type(found)(self.value(value, (*path, index)) for index, value in enumerate(found))
        if isinstance(found, dict):
            return self._mapping(found.items(), path)
        if isinstance(found, Call):
            return self._called(found, path)
        dtype = dtype_of(found)
        return str(dtype) if dtype else self._refuse_object(found, path)

    def _mapping(self, items: Iterable[tuple[Any, Any]], path: tuple[Any, ...]) -> dict[Any, Any]:
        whole: dict[Any, Any] = {}
        for key, value in items:
            if not isinstance(key, str | int) or not is_key(key):
                self._refuse("has a dict with a key that is neither text nor a small integer", path)
            if key in whole:
                self._refuse(f"has a dict with the key {key!r} twice", path)
            whole[key] = self.value(value, (*path, key))
        return whole

    def _called(self, call: Call, path: tuple[Any, ...]) -> Any:
        is_mapping = call.is_of("collections.defaultdict") or (call.is_of("collections.OrderedDict") and not call.args)
        if is_mapping and not call.added:  # states: attributes, as `_metadata` of a state dict
            return self._mapping(call.items, path)
        if call.is_of("collections.Counter") and call.is_plain() and len(call.args) == 1:
            counts = self.value(call.args[0], path)
            if isinstance(counts, dict):
                return Counter(counts)
        made = _called_plainly(call) if call.is_plain() else None
        if made is None:
            made = self._tensors.tensor(call)
        return self._refuse_object(call, path) if made is None else made

    def _refuse_object(self, found: Any, path: tuple[Any, ...]) -> NoReturn:
        function = found.function if isinstance(found, Call) else found
        if isinstance(found, Call) and found.is_of(*_NUMPY_ARRAY):
            function = Name("numpy", "ndarray")
        name = ascii(str(function))[1:-1][:200] if isinstance(function, Name) else "that has no name"
        if isinstance(found, Persistent):
            name = "torch.storage.TypedStorage"
        if name.startswith(("torch._utils._rebuild", "torch._tensor._rebuild")):
            self._refuse(f"holds a tensor that is not dense and plain, made by {name}", path)
        self._refuse(f"holds an object of class {name}, which only its code could rebuild", path)

    def _refuse(self, what: str, path: tuple[Any, ...]) -> NoReturn:
        where = ascii("/".join(str(key) for key in path))[1:-1][:200]
        raise CheckpointError(f"{self._name} {what}" + (f" (at {where})" if where else ""))


def _called_plainly(call: Call) -> Any:
    """What a call of a few known functions returns, None for others."""
    match call.args:
        case (size,) if call.is_of("torch.Size"):
            return shape_of(size)
        case (str(kind),) if call.is_of("torch.device"):
            return kind
        case (str(kind), int(index)) if call.is_of("torch.device"):
            return f"{kind}:{index}"
        case (kind, encoded) if call.is_of(*_NUMPY_SCALAR):
            return _numpy_number(kind, _latin1(encoded))
        case _:
            return _latin1(call)


def _latin1(found: Any) -> bytes | None:
    """The bytes that protocol 2 writes as text, or bytes themselves."""
    if isinstance(found, bytes):
        return found
    match found:
        case Call(args=(str(text), "latin1")) if found.is_of("_codecs.encode") and found.is_plain():
            return text.encode("latin1") if max(text, default="") <= "\xff" else None
    return None


def _numpy_number(dtype: Any, data: bytes | None) -> Any:
    """The number that numpy's pickle of a scalar holds, None where it is none."""
    match dtype:
        case Call(args=(str(code), *_), states=[(_, "<" | "|", *_)]) if dtype.is_of("numpy.dtype"):
            if data and _NUMPY_NUMBER.fullmatch(code) and len(data) == int(code[1]):
                return np.frombuffer(data, f"<{code}").item()
    return None
