"""The tensors in a file of `torch.save`: views of its storages, as the symbols in its pickle describe them.

Source: the functions that torch's pickles call, torch/_utils.py and torch/_tensor.py; storages, torch/serialization.py.
"""

from __future__ import annotations

import math
from typing import Any, final

import torch
from torch import Tensor

from lockstep.checkpoint.foreign.inert_pickle import Call, Name, Persistent
from lockstep.checkpoint.foreign.zip_records import ZipRecords
from lockstep.errors import CheckpointError

_DIMS_MAX = 64
_DIM_MAX = 1 << 48
_ELEMENTS_MAX = 1 << 60
_VIEWS_OF_A_FILE = 16  # tensors may overlap: together they may be so many times as large as their file
_SMALL_BYTES = 64 << 20  # and this much, for small files
_STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.storage.UntypedStorage": torch.uint8,
}
_LATER = (
    *("uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_DTYPES = {
    **{str(dtype): dtype for dtype in _STORAGES.values()},
    **{f"torch.{name}": getattr(torch, name) for name in _LATER},
}
_DENSE = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
_MARKED = (torch.complex64, torch.complex128, torch.float32, torch.float64)  # numbers and their imaginary parts
_PARAMETER = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_WITH_ATTRIBUTES = "torch._tensor._rebuild_from_type_v2"
_PLAIN_TYPES = ("torch.Tensor", "torch.nn.parameter.Parameter")


def dtype_of(name: Any) -> torch.dtype | None:
    """The dtype of dense tensors that symbol `name` stands for, None where it is something else."""
    return _DTYPES.get(str(name)) if isinstance(name, Name) else None


def shape_of(value: Any) -> tuple[int, ...] | None:
    """What a tuple, or the symbol of a torch.Size, says of a tensor's shape; None where it is none."""
    shape = _numbers(value)
    return shape if shape is not None and math.prod(max(n, 1) for n in shape) <= _ELEMENTS_MAX else None


def _numbers(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, Call) and value.is_of("torch.Size") and value.is_plain() and len(value.args) == 1:
        value = value.args[0]
    if not isinstance(value, tuple) or len(value) > _DIMS_MAX:
        return None
    return value if all(type(n) is int and 0 <= n <= _DIM_MAX for n in value) else None


@final
class StoredTensors:
    """Makes the tensors of one archive; those that shared memory share it again."""

    def __init__(self, records: ZipRecords, root: str) -> None:
        self._records = records
        self._root = root
        self._storages: dict[str, Tensor] = {}  # as bytes
        self._made: dict[str, Tensor] = {}
        self._bytes_left = _VIEWS_OF_A_FILE * records.file.bytes + _SMALL_BYTES

    def tensor(self, call: Call) -> Tensor | None:
        """The tensor that `call` would make; None where it makes something else than a dense tensor.

        Attributes of tensors, and whether they require gradients, are left out.
        Raises: CheckpointDamaged where it does not fit its storage.
        """
        if call.is_of(*_PARAMETER) and call.is_plain() and call.args and isinstance(call.args[0], Call):
            call = call.args[0]
        if call.is_of(_WITH_ATTRIBUTES) and call.is_plain() and len(call.args) == 4:
            function, made, args, _ = call.args
            if isinstance(made, Name) and str(made) in _PLAIN_TYPES:
                call = Call(function, args)
        if not call.is_of(*_DENSE) or not call.is_plain():
            return None
        has_dtype = call.is_of(_DENSE[1])
        if len(call.args) - has_dtype not in (6, 7):
            self._records.file.fail(f"a tensor is made of {len(call.args)} values")
        storage, offset, size, stride, _, hooks, *rest = call.args
        if not (isinstance(hooks, Call) and hooks.is_of("collections.OrderedDict") and hooks.is_plain()):
            raise CheckpointError(f"{self._records.file.name} holds a tensor with hooks, which are code")
        elements = self._elements(storage, dtype_of(rest.pop(0)) if has_dtype else None)
        marks = rest[0] if rest and rest[0] is not None else {}
        if type(marks) is not dict or not marks.keys() <= {"conj", "neg"}:
            self._records.file.fail("a tensor has marks other than conj and neg")
        marked = [name for name in ("conj", "neg") if marks.get(name) is True]
        if marked and elements.dtype not in _MARKED:
            self._records.file.fail(f"a tensor of {elements.dtype} is marked as conjugate or negative")
        return self._view(elements, storage.id[2], offset, shape_of(size), _numbers(stride), marked)

    def _elements(self, storage: Any, dtype: torch.dtype | None) -> Tensor:
        """The storage as a flat tensor, of `dtype` where that is not told by the storage."""
        known = isinstance(storage, Persistent) and isinstance(storage.id, tuple) and len(storage.id) == 5
        kind, storage_type, key, _, numel = storage.id if known else (None,) * 5
        own_dtype = _STORAGES.get(str(storage_type)) if isinstance(storage_type, Name) else None
        if kind != "storage" or own_dtype is None or not isinstance(key, str) or type(numel) is not int:
            self._records.file.fail(f"a tensor has no storage of a known type ({_shown(storage_type)})")
        name = f"{self._root}/data/{key}"
        size = self._records.size(name)
        if numel < 0 or numel * own_dtype.itemsize != size:
            self._records.file.fail(f"{_shown(name)} has {size} bytes, not {numel} elements of {own_dtype}")
        if key not in self._storages:
            data = torch.empty(size, dtype=torch.uint8)
            self._records.read_into(data.numpy().data, name)
            self._storages[key] = data
        dtype = dtype or own_dtype
        return self._storages[key][: size // dtype.itemsize * dtype.itemsize].view(dtype)

    def _view(self, elements: Tensor, key: str, offset: Any, shape: Any, strides: Any, marked: list[str]) -> Tensor:
        """The tensor itself where the file has its conjugate or negative."""
        if shape is None or strides is None or len(shape) != len(strides) or type(offset) is not int or offset < 0:
            self._records.file.fail(f"a tensor of storage {_shown(key)} has no right shape, strides or offset")
        place = f"{elements.dtype} {offset} {shape} {strides} {marked} {key}"  # text: equal hashes could be made
        if place in self._made:
            return self._made[place]
        last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        count = math.prod(shape)
        if offset > elements.numel() or (count and last >= elements.numel()):
            self._records.file.fail(f"a tensor of shape {list(shape)} is larger than its storage {_shown(key)}")
        self._bytes_left -= count * elements.dtype.itemsize
        if self._bytes_left < 0:
            raise CheckpointError(f"{self._records.file.name} describes tensors that are far larger than the file")
        tensor = elements.as_strided(shape, strides, offset)
        if "conj" in marked and tensor.is_complex():
            tensor = tensor.conj_physical()
        self._made[place] = tensor.neg() if "neg" in marked else tensor
        return self._made[place]


def _shown(value: Any) -> str:
    """`value`, which comes from a file, in a form that is safe to print."""
    text = str(value) if isinstance(value, str | Name) else type(value).__name__
    return ascii(text)[1:-1][:200]
