"""A training state as flat tables and back: nested containers on one side, paths (`model/h.0.attn.bias`) on the other.

A path is the keys from the outside in, joined with `/`. In a key `~` is written `~0`, `/` is `~1`, and the empty key is
`~2`. What a path alone does not say, that a container is a list or has numbers as keys, stands in `kinds`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lockstep.checkpoint.tensor_file import dtype_name
from lockstep.comm.tensor_parts import AnyTensor, TensorPieces, is_dtensor, local_of
from lockstep.errors import CheckpointError

State = dict[str, Any]  # str -> tensor, None, bool, int, float, str, list, tuple, dict, or object with state_dict()

DEPTH_MAX = 64
CONTAINERS_MAX = 500_000
_SCALARS = (type(None), bool, int, float, str)  # by exact type: a subclass would come back as something else
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
_ESCAPED = {"~0": "~", "~1": "/", "~2": ""}
_NO_CODE = "code is not saved: leave it out, and make it again from the config"
_HINTS = {
    "bytes": "pass torch.frombuffer(bytearray(x), dtype=torch.uint8)",
    "bytearray": "pass torch.frombuffer(x, dtype=torch.uint8)",
    "ndarray": "pass torch.from_numpy(x)",
    "generic": "pass x.item()",
    "set": "pass sorted(x)",
    "frozenset": "pass sorted(x)",
    "complex": "pass [x.real, x.imag]",
    "device": "pass str(x)",
    "dtype": "pass str(x)",
    "PurePath": "pass str(x)",
    "Enum": "pass x.value",
    "deque": "pass list(x)",
    "Mapping": "pass dict(x)",
    "tuple": "pass tuple(x)",
    "list": "pass list(x)",
    "int": "pass int(x)",
    "float": "pass float(x)",
    "str": "pass str(x)",
    "type": "pass its name",
    "function": _NO_CODE,
    "method": _NO_CODE,
    "builtin_function_or_method": _NO_CODE,
}


@dataclass(frozen=True)
class FlatState:
    """A state by path. Every leaf is in one of `tensors`, `values` and `aliases`."""

    tensors: dict[str, Any]  # Tensors as they were, DTensors, of any device, strided; or TensorPieces
    values: dict[str, Any]  # None, bool, int, float, str, a list of these, or {}
    kinds: dict[str, str]  # containers that are no dict with keys of text: what they are, by path
    aliases: dict[str, str]  # path of a tensor that is another one, as tied weights are -> path of that one


def flatten(state: Any) -> FlatState:
    """`state`, a dict or an object with `state_dict()`, in flat form. Memory: the tensors' own.

    Objects inside it that have a `state_dict()` are asked for it. Dicts of other kinds become plain ones, except
    Counters. Tensors that are one memory are aliases of the first, as far as this rank can see (see `tied_as`).
    Raises: CheckpointError, naming the path, for what is neither tensor, value nor container of these; for keys that
    are neither text nor integers; for tensors without memory (meta) and those that no file can hold.
    """
    state = _asked(state)
    if not isinstance(state, dict) or isinstance(state, Counter) or not all(type(key) is str for key in state):
        raise CheckpointError(f"a state is a dict with keys of text, not {_described(state)}; pass {{'name': x}}")
    if "__metadata__" in state:
        raise CheckpointError("'__metadata__' cannot be a key of a state: safetensors files use that name themselves")
    flat = FlatState({}, {}, {}, {})
    memory: dict[tuple[Any, ...], str] = {}
    for key, value in state.items():
        _add(flat, memory, _component(key, ""), value)
    return flat


def unflatten(flat: FlatState) -> State:
    """The inverse of `flatten`: equal containers and values, and the very tensors. Aliases are one tensor again.

    In a dict, tensors come first, then aliases, then values.
    Raises: CheckpointError for tables that no state has, as of a list without its first element.
    """
    leaves = {**flat.tensors, **{path: flat.tensors[target] for path, target in flat.aliases.items()}, **flat.values}
    try:
        tree = _tree(leaves)
        _check_kinds(tree, flat.kinds)
    except ValueError as fault:
        raise CheckpointError(f"these are not the parts of a state: {fault}") from fault
    for path, leaf in leaves.items():
        *parents, name = path.split("/")
        _walk(tree, parents)[name] = leaf.copy() if isinstance(leaf, list | dict) else leaf
    return {_key(name): _built(child, name, flat.kinds) for name, child in tree.items()}


def check_paths(paths: Iterable[str], values: Mapping[str, Any], kinds: Mapping[str, str]) -> None:
    """Raises: ValueError, saying why, where these cannot be the `paths` of tensors, `values` and `kinds` of a state.

    Time: linear. Memory: CONTAINERS_MAX containers.
    """
    _check_kinds(_tree({**dict.fromkeys(paths), **values}), kinds)


def tied_as(flat: FlatState, aliases: Mapping[str, str]) -> FlatState:
    """`flat` with the aliases that all ranks together have found: one with an empty piece of a tensor cannot see them.

    Raises: CheckpointError where this rank can see that tensors are tied otherwise.
    """
    tensors = {path: tensor for path, tensor in flat.tensors.items() if path not in aliases}
    wrong = {path for path, target in flat.aliases.items() if aliases.get(path) != target}
    wrong |= {path for path in aliases if path in flat.tensors and _memory_of(flat.tensors[path], path)}
    wrong |= {path for path, target in aliases.items() if target not in tensors}
    if wrong:
        raise CheckpointError(f"{', '.join(sorted(wrong))}: tied to another tensor on one rank and not on all")
    return FlatState(tensors, flat.values, flat.kinds, dict(aliases))


def join(prefix: str, key: str) -> str:
    """The path of what lies under `key` in the container at `prefix`, "" for the state itself."""
    return f"{prefix}/{_component(key, prefix)}" if prefix else _component(key, "")


def keys_of(path: str) -> list[str]:
    """The keys that `path` is made of; the inverse of `join`, for dicts with keys of text."""
    return [_key(name) for name in path.split("/")] if path else []


# ------------------------------------------------------------------ flattening


def _add(flat: FlatState, memory: dict[tuple[Any, ...], str], path: str, value: Any) -> None:
    if path.count("/") >= DEPTH_MAX:
        raise CheckpointError(f"{path} is nested more than {DEPTH_MAX} deep; does a container contain itself?")
    value = _asked(value)
    if isinstance(value, TensorPieces):
        dtype_name(value.dtype, path)
        flat.tensors[path] = value  # of one rank each: never tied
    elif isinstance(value, Tensor):
        _add_tensor(flat, memory, path, value)
    elif type(value) in _SCALARS:
        flat.values[path] = _checked(value, path)
    elif isinstance(value, dict):
        kind = _dict_kind(value, path)
        if kind:
            flat.kinds[path] = kind
        if not value:
            flat.values[path] = {}
        for key, child in value.items():
            _add(flat, memory, f"{path}/{_component(key, path)}", child)
    elif type(value) in (list, tuple):
        is_flat = all(type(child) in _SCALARS for child in value)
        if is_flat:
            flat.values[path] = [_checked(child, path) for child in value]
        if type(value) is tuple or not is_flat:
            flat.kinds[path] = type(value).__name__
        for index, child in enumerate(() if is_flat else value):
            _add(flat, memory, f"{path}/{index}", child)
    else:
        raise CheckpointError(f"{path} is {_described(value)}, which a checkpoint does not hold; {_hint(value)}")


def _add_tensor(flat: FlatState, memory: dict[tuple[Any, ...], str], path: str, tensor: Tensor) -> None:
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        raise CheckpointError(f"{path} has no shape yet: run a batch through the model first")
    if tensor.is_meta:
        raise CheckpointError(f"{path} is on the meta device: fill the model first, with lockstep.materialize(model)")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise CheckpointError(f"{path} is a sparse, quantized or nested tensor: save the dense tensors that it is of")
    dtype_name(tensor.dtype, path)
    place = _memory_of(tensor, path)
    first = path if place is None else memory.setdefault(place, path)
    if first == path:
        flat.tensors[path] = tensor
    else:
        flat.aliases[path] = first


def _memory_of(tensor: AnyTensor, path: str) -> tuple[Any, ...] | None:
    """What is equal for tensors that are one; None where this rank has none of its elements."""
    if isinstance(tensor, TensorPieces):
        return None
    local = local_of(tensor)
    if not local.numel():
        return None
    address = local.data_ptr()
    if not address:
        raise CheckpointError(f"{path} has given its memory back: save the sharded parameters, or unshard them first")
    place = (local.device, address, local.stride(), local.shape)
    return (*place, local.dtype, local.is_conj(), local.is_neg(), tensor.shape, is_dtensor(tensor))


def _asked(value: Any) -> Any:
    if isinstance(value, Tensor | type) or type(value) is dict or not callable(getattr(value, "state_dict", None)):
        return value
    return value.state_dict()


def _dict_kind(value: dict[Any, Any], path: str) -> str:
    types = {type(key) for key in value}
    if types - {int, str} or len(types) > 1:
        names = sorted(found.__name__ for found in types)
        raise CheckpointError(f"{path} has keys of the types {', '.join(names)}: they are all str, or all int")
    name = "counter" if isinstance(value, Counter) else "dict"
    kind = f"int_{name}" if int in types else name
    return "" if kind == "dict" else kind


def _component(key: str | int, parent: str) -> str:
    if isinstance(key, int):
        if abs(key) >= 10**18:
            raise CheckpointError(f"{parent} has an integer of more than 18 digits as a key: use text")
        return str(key)
    return _checked(key, f"a key of {parent or 'the state'}").replace("~", "~0").replace("/", "~1") or "~2"


def _checked(value: Any, path: str) -> Any:
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise CheckpointError(f"{path} is no text: {error}; pass it as a tensor of bytes") from error
    return value


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


# ------------------------------------------------------------------ unflattening


class _Node(dict[str, Any]):
    """A container that is being put together: its children by path component."""

    __slots__ = ()


def _tree(leaves: Mapping[str, Any]) -> _Node:
    root, containers = _Node(), 0
    for path, leaf in leaves.items():
        if not path.isascii():
            path.encode()  # raises where it is no text
        names = path.split("/")
        if len(names) > DEPTH_MAX or not _are_components(names, path) or names[0] == "__metadata__":
            raise ValueError(f"{path[:200]!r} is no path")
        place: Any = root
        for name in names[:-1]:
            if name not in place:
                place[name] = _Node()
                containers += 1
            place = place[name]
            if not isinstance(place, _Node):
                raise ValueError(f"{path!r} is in something that is no container")
        if names[-1] in place:
            raise ValueError(f"{path!r} is both a container and in one")
        if containers > CONTAINERS_MAX:
            raise ValueError(f"more than {CONTAINERS_MAX} containers")
        place[names[-1]] = leaf
    return root


def _are_components(names: Sequence[str], path: str) -> bool:
    if "~" not in path:
        return all(names)
    return all(n == "~2" or (n and n.count("~") == n.count("~0") + n.count("~1")) for n in names)


def _walk(tree: _Node, names: Iterable[str]) -> Any:
    place: Any = tree
    for name in names:
        if not isinstance(place, _Node):
            raise KeyError(name)
        place = place[name]
    return place


def _check_kinds(tree: _Node, kinds: Mapping[str, str]) -> None:
    for path, kind in kinds.items():
        try:
            found = _walk(tree, path.split("/"))
        except KeyError:
            raise ValueError(f"{path!r} is said to be a {kind}, but is not there") from None
        if not _may_be(found, kind):
            raise ValueError(f"{path!r} is said to be a {kind}, which it is not")


def _may_be(found: Any, kind: str) -> bool:
    if not isinstance(found, _Node):
        return isinstance(found, {"tuple": list, "counter": dict}.get(kind, ()))
    if kind in ("int_dict", "int_counter"):
        return all(map(_INTEGER.fullmatch, found))
    if kind in ("list", "tuple"):
        return all(str(index) in found for index in range(len(found)))
    return kind == "counter"


def _built(found: Any, path: str, kinds: Mapping[str, str]) -> Any:
    kind = kinds.get(path, "")
    if not isinstance(found, _Node):
        return tuple(found) if kind == "tuple" else Counter() if kind == "counter" else found
    children = {name: _built(child, f"{path}/{name}", kinds) for name, child in found.items()}
    if kind in ("list", "tuple"):
        items = [children[str(index)] for index in range(len(children))]
        return items if kind == "list" else tuple(items)
    made = {int(name) if kind.startswith("int_") else _key(name): child for name, child in children.items()}
    return Counter(made) if kind.endswith("counter") else made


def _key(component: str) -> str:
    return re.sub("~[012]", lambda found: _ESCAPED[found[0]], component)
