"""A training state into flat tables by path; what no checkpoint can hold is refused by name.

Training stands still meanwhile: a tensor costs about two microseconds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, is_dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.parameter import Parameter, is_lazy

from lockstep.checkpoint.state import DEPTH_MAX, FlatState, checked_text, component
from lockstep.checkpoint.tensor_file import DTYPES, dtype_name
from lockstep.comm.tensor_parts import TensorPieces, is_dtensor, local_of
from lockstep.errors import CheckpointError

_SCALARS = frozenset({type(None), bool, int, float, str})  # exactly: a subclass would come back as something else
_PLAIN = frozenset({Tensor, Parameter})  # of these types exactly most tensors are, which makes looking at them short
_DTYPES = frozenset(DTYPES.values())
_HINTS = {
    "bytes": "pass torch.frombuffer(bytearray(x), dtype=torch.uint8)",
    "bytearray": "pass torch.frombuffer(x, dtype=torch.uint8)",
    "ndarray": "pass torch.from_numpy(x)",
    "generic": "pass x.item()",
    **dict.fromkeys(("set", "frozenset"), "pass sorted(x)"),
    "complex": "pass [x.real, x.imag]",
    **dict.fromkeys(("device", "dtype", "PurePath", "str"), "pass str(x)"),
    "Enum": "pass x.value",
    "deque": "pass list(x)",
    "Mapping": "pass dict(x)",
    "tuple": "pass tuple(x)",
    "list": "pass list(x)",
    "int": "pass int(x)",
    "float": "pass float(x)",
    "type": "pass its name",
    **dict.fromkeys(
        ("function", "method", "builtin_function_or_method"),
        "code is not saved: leave it out, and make it again from the config",
    ),
}


def flatten(state: Any) -> FlatState:
    """`state`, a dict or an object with `state_dict()`, in flat form. Memory: the tensors' own; lists are copied.

    Objects inside it that have a `state_dict()` are asked for it. Dicts of other kinds become plain ones, except
    Counters. Tensors that are one memory are aliases of the first, as far as this rank can see.
    Raises: CheckpointError, naming the path, for what is neither tensor, value nor container of these; for keys that
    are neither text nor integers; for tensors without memory (meta) and those that no file can hold.
    """
    state = _asked(state)
    if not isinstance(state, dict) or isinstance(state, Counter) or not all(type(key) is str for key in state):
        raise CheckpointError(f"a state is a dict with keys of text, not {_described(state)}; pass {{'name': x}}")
    if "__metadata__" in state:
        raise CheckpointError("'__metadata__' cannot be a key of a state: safetensors files use that name themselves")
    flat = _Flattening(FlatState({}, {}, {}, {}))
    with torch.no_grad():
        for key, value in state.items():
            flat.add(component(key, ""), value)
    return flat.made


@final
@dataclass(frozen=True)
class _Flattening:
    """A state that is being taken apart."""

    made: FlatState
    at: dict[int, str] = field(default_factory=dict)  # address -> the first tensor that begins there
    alike: dict[tuple[Any, ...], str] = field(default_factory=dict)  # where others do: by all that makes them one

    def add(self, path: str, value: Any) -> None:
        """Whatever lies at `path`."""
        if isinstance(value, Tensor):
            self._add_tensor(path, value)
            return
        value = _asked(value)
        if type(value) in _SCALARS:
            self.made.values[path] = checked_text(value, path) if type(value) is str else value
        elif isinstance(value, dict):
            self._add_dict(path, value)
        elif type(value) in (list, tuple):
            self._add_list(path, value)
        elif isinstance(value, TensorPieces):
            dtype_name(value.dtype, path)
            self.made.tensors[path] = value  # never tied
        else:
            raise CheckpointError(f"{path} is {_described(value)}, which a checkpoint does not hold; {_hint(value)}")

    def _add_dict(self, path: str, value: dict[Any, Any]) -> None:
        kind = _dict_kind(value, path)
        if kind:
            self.made.kinds[path] = kind
        if not value:
            self.made.values[path] = {}
            return
        _check_depth(path)
        for key, child in value.items():
            self.add(f"{path}/{component(key, path)}", child)

    def _add_list(self, path: str, value: list[Any] | tuple[Any, ...]) -> None:
        types = set(map(type, value))
        is_flat = types <= _SCALARS
        if type(value) is tuple or not is_flat:
            self.made.kinds[path] = type(value).__name__
        if is_flat:
            self.made.values[path] = list(value)
            for text in value if str in types else ():
                if type(text) is str:
                    checked_text(text, path)
            return
        _check_depth(path)
        for index, child in enumerate(value):
            self.add(f"{path}/{index}", child)

    def _add_tensor(self, path: str, tensor: Tensor) -> None:
        is_plain = type(tensor) in _PLAIN
        if not is_plain and is_lazy(tensor):
            raise CheckpointError(f"{path} has no shape yet: run a batch through the model first")
        if tensor.is_meta or tensor.layout != torch.strided or tensor.is_nested or tensor.dtype not in _DTYPES:
            _check_tensor(tensor, path)  # says which
        local = tensor if is_plain else local_of(tensor)
        address = local.data_ptr()
        if address:
            first = self.at.setdefault(address, path)
            if first != path:
                self.alike.setdefault(_identity(self.made.tensors[first]), first)
                first = self.alike.setdefault(_identity(tensor), path)
                if first != path:
                    self.made.aliases[path] = first
                    return
        elif local.numel():
            raise CheckpointError(
                f"{path} has given its memory back: save the sharded parameters, or unshard them first"
            )
        self.made.tensors[path] = tensor


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """What is equal for tensors that are one."""
    local = local_of(tensor)
    place = (local.device, local.data_ptr(), local.stride(), local.shape)
    return (*place, local.dtype, local.is_conj(), local.is_neg(), tensor.shape, is_dtensor(tensor))


def _check_depth(path: str) -> None:
    if path.count("/") + 1 >= DEPTH_MAX:
        raise CheckpointError(f"{path} is nested {DEPTH_MAX} deep, more than can be; does a container contain itself?")


def _check_tensor(tensor: Tensor, path: str) -> None:
    if tensor.is_meta:
        raise CheckpointError(f"{path} is on the meta device: fill the model first, with lockstep.materialize(model)")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise CheckpointError(f"{path} is a sparse, quantized or nested tensor: save the dense tensors that it is of")
    dtype_name(tensor.dtype, path)


def _asked(value: Any) -> Any:
    if type(value) in _SCALARS or type(value) is dict or isinstance(value, Tensor | type):
        return value
    for name in ("state_dict_in_pieces", "state_dict"):  # the first gathers nothing
        if callable(getattr(value, name, None)):
            return getattr(value, name)()
    return value


def _dict_kind(value: dict[Any, Any], path: str) -> str:
    types = set(map(type, value))
    if types - {int, str} or len(types) > 1:
        names = sorted(found.__name__ for found in types)
        raise CheckpointError(f"{path} has keys of the types {', '.join(names)}: they are all str, or all int")
    name = "counter" if isinstance(value, Counter) else "dict"
    kind = f"int_{name}" if int in types else name
    return "" if kind == "dict" else kind


def _described(value: Any) -> str:
    if isinstance(value, dict):
        return f"{type(value).__name__} with keys like {next(iter(value), None)!r}"
    return f"of type {type(value).__module__}.{type(value).__qualname__}"


def _hint(value: Any) -> str:
    if is_dataclass(value):
        return "pass dataclasses.asdict(x)"
    names = (found.__name__ for found in type(value).__mro__)
    other = "pass tensors, None, bool, int, float, str, and lists, tuples and dicts of them"
    return next((_HINTS[name] for name in names if name in _HINTS), other)
