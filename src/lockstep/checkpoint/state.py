"""A training state as flat tables and back: nested containers on one side, paths (`model/h.0.attn.bias`) on the other.

A path is the keys from the outside in, joined with `/`. In a key `~` is written `~0`, `/` is `~1`, and the empty key is
`~2`. What a path alone does not say, that a container is a list or has numbers as keys, stands in `kinds`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.errors import CheckpointError

State = dict[str, Any]  # str -> tensor, None, bool, int, float, str, list, tuple, dict, or object with state_dict()

SHARDS = "shards"  # under this key lies the state of each shard, by its number
DEPTH_MAX = 64
CONTAINERS_MAX = 500_000
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
_ESCAPED = {"~0": "~", "~1": "/", "~2": ""}


@dataclass(frozen=True)
class FlatState:
    """A state by path. Every leaf is in one of `tensors`, `values` and `aliases`."""

    tensors: dict[str, Any]  # Tensors as they were, DTensors, of any device, strided; or TensorPieces
    values: dict[str, Any]  # None, bool, int, float, str, a list of these, or {}
    kinds: dict[str, str]  # containers that are no dict with keys of text: what they are, by path
    aliases: dict[str, str]  # path of a tensor that is another one, as tied weights are -> path of that one


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


def join(prefix: str, key: str) -> str:
    """The path of what lies under `key` in the container at `prefix`, "" for the state itself."""
    return f"{prefix}/{component(key, prefix)}" if prefix else component(key, "")


def component(key: str | int, parent: str) -> str:
    """`key`, of the container at `parent`, as a part of a path. Raises: CheckpointError where it cannot be one."""
    if isinstance(key, int):
        if abs(key) >= 10**18:
            raise CheckpointError(f"{parent} has an integer of more than 18 digits as a key: use text")
        return str(key)
    if not key.isascii():
        checked_text(key, f"a key of {parent or 'the state'}")
    return key.replace("~", "~0").replace("/", "~1") if "~" in key or "/" in key else key or "~2"


def checked_text(text: str, path: str) -> str:
    """`text`. Raises: CheckpointError, naming `path`, where it is none: with half a surrogate pair."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise CheckpointError(f"{path} is no text: {error}; pass it as a tensor of bytes") from error
    return text


def keys_of(path: str) -> list[str]:
    """The keys that `path` is made of; the inverse of `join`, for dicts with keys of text."""
    return [_key(name) for name in path.split("/")] if path else []


def is_under(path: str, prefix: str) -> bool:
    """Whether `path` lies in the container at `prefix`, "" for the state itself."""
    return not prefix or path.startswith(f"{prefix}/")


def is_at(path: str, prefix: str) -> bool:
    """Whether `path` is `prefix`, or lies in the container there."""
    return path == prefix or is_under(path, prefix)


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
