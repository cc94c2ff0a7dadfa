"""What may be left on a disk after a power failure, worked out from the system calls that strace has seen.

Only what was synchronised is sure to be there: the bytes of a file by fsync of it, a name in a folder by fsync of that.
Of all else any part may be there: each change of names that builds on no other one, and of a file's bytes the old ones,
the new ones, zeros or a half. A rename is one change, until one of its folders is synchronised and the other is not.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

OPTIONS = ("-xx", "-s", "1000000000")  # for strace: all bytes, and nothing that has to be unquoted
_CALL = re.compile(r"(\w+)\((.*)\)\s+= (-?\d+)(.*)")
_OPENED = re.compile(r"(\d+)<(.*)>")
_UNKNOWN = {"link", "linkat", "symlink", "symlinkat", "writev", "pwritev", "pwritev2", "copy_file_range", "sendfile"}
_UNKNOWN |= {"truncate", "fallocate", "splice", "creat", "open"}
_RANDOM_STATES = 6


class File:
    """The bytes of a file."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = data
        self.durable = data


class Folder:
    """The names in a folder."""

    def __init__(self) -> None:
        self.entries: dict[str, File | Folder] = {}
        self.durable: dict[str, File | Folder] = {}


class Edit(NamedTuple):
    """One name in one folder."""

    folder: Folder
    name: str
    node: File | Folder | None  # None: the name is gone


Change = tuple[Edit, ...]  # made as a whole, or not at all
Tree = dict[str, bytes | None]  # relative path -> what a file holds; None for a folder


class Disk:
    """A folder of a disk, as programs see it and as it is after a power failure."""

    def __init__(self, root: Path, tree: Tree) -> None:
        """`tree` is what there is in `root`, all of it durable."""
        self._root = str(root)
        self._top = Folder()
        for path, data in sorted(tree.items()):
            parent = self._node(str((root / path).parent))
            assert isinstance(parent, Folder)
            parent.entries[Path(path).name] = Folder() if data is None else File(data)
            parent.durable = dict(parent.entries)
        self._changes: list[Change] = []  # not sure yet, in order
        self._positions: dict[int, int] = {}  # open file -> where the next write goes

    def apply(self, line: str) -> bool:
        """Do what a line of strace tells; whether it changed anything that a power failure would show.

        Raises: AssertionError for a call that is not modelled.
        """
        found = _CALL.fullmatch(line)
        if not found or int(found[3]) < 0:
            return False
        name, args = found[1], found[2].split(", ")
        if name in _UNKNOWN:
            raise AssertionError(f"{name} is not modelled: {line[:200]}")
        if name == "openat":
            return self._open(args, int(found[3]), created="O_CREAT" in args[2], emptied="O_TRUNC" in args[2])
        if name in ("write", "pwrite64", "lseek", "ftruncate"):
            return self._write(name, args, int(found[3]))
        if name in ("fsync", "fdatasync"):
            return self._sync(self._node(opened_path(args[0])))
        if name in ("mkdir", "mkdirat"):
            return self._change(self._place(args, Folder()))
        if name in ("unlink", "unlinkat", "rmdir"):
            return self._change(self._place(args, None))
        if name in ("rename", "renameat", "renameat2"):
            half = 1 if name == "rename" else 2
            moved = self._node(_joined(args[:half]))
            return self._change(self._place(args[:half], None), self._place(args[half : 2 * half], moved))
        return False

    def after_failure(self, rng: random.Random) -> Iterator[Tree]:
        """What may be there if the power fails now: the extremes, each change alone, and some of all others."""
        everything, count = set(range(len(self._changes))), len(self._changes)
        choices = [(set(), "old"), *((everything, kind) for kind in ("new", "old", "zeros", "half"))]
        choices += [({index}, kind) for index in range(count) for kind in ("new", "old")]
        for _ in range(_RANDOM_STATES if count > 1 else 0):
            choices.append(({index for index in range(count) if rng.random() < 0.5}, "any"))
        for chosen, kind in choices:
            yield self._tree(self._with_earlier(chosen), kind, rng)

    # ------------------------------------------------------------------ calls

    def _open(self, args: Sequence[str], descriptor: int, *, created: bool, emptied: bool) -> bool:
        path = _joined(args[:2])
        self._positions[descriptor] = 0
        node = self._node(path)
        if node is None and created:
            edit = self._place(args[:2], File())
            return edit is not None and self._change(edit)
        if isinstance(node, File) and emptied:
            node.data = b""
            return True
        return False

    def _write(self, name: str, args: Sequence[str], result: int) -> bool:
        opened = _OPENED.match(args[0])
        node = self._node(opened_path(args[0]))
        if opened is None or not isinstance(node, File):
            return False
        descriptor = int(opened[1])
        if name == "lseek":
            self._positions[descriptor] = result
            return False
        if name == "ftruncate":
            node.data = node.data[: int(args[1])].ljust(int(args[1]), b"\0")
            return True
        written = _plain(args[1])[:result]
        start = int(args[3]) if name == "pwrite64" else self._positions[descriptor]
        if name == "write":
            self._positions[descriptor] += result
        node.data = node.data[:start].ljust(start, b"\0") + written + node.data[start + len(written) :]
        return True

    def _sync(self, node: File | Folder | None) -> bool:
        if isinstance(node, File):
            node.durable = node.data
        elif node is not None:
            node.durable = dict(node.entries)
            left = (tuple(edit for edit in change if edit.folder is not node) for change in self._changes)
            self._changes = [change for change in left if change]
        return node is not None

    def _change(self, *edits: Edit | None) -> bool:
        change = tuple(edit for edit in edits if edit is not None)
        for edit in change:
            _enter(edit.folder.entries, edit)
        if change:
            self._changes.append(change)
        return bool(change)

    # ------------------------------------------------------------------ names

    def _node(self, path: str) -> File | Folder | None:
        parts = self._parts(path)
        node: File | Folder | None = None if parts is None else self._top
        for part in parts or ():
            node = node.entries.get(part) if isinstance(node, Folder) else None
        return node

    def _place(self, args: Sequence[str], node: File | Folder | None) -> Edit | None:
        """The entry that the arguments of a call name; None where it is outside."""
        path = _joined(args)
        parent = self._node(str(Path(path).parent))
        return Edit(parent, Path(path).name, node) if isinstance(parent, Folder) else None

    def _parts(self, path: str) -> tuple[str, ...] | None:
        inside = path == self._root or path.startswith(self._root + "/")
        return Path(path[len(self._root) + 1 :]).parts if inside else None

    # ------------------------------------------------------------------ after the failure

    def _with_earlier(self, chosen: set[int]) -> set[int]:
        """`chosen` changes, and those that they build on: earlier ones of the same names."""
        result = set(chosen)
        for index in sorted(chosen, reverse=True):
            names = {(id(edit.folder), edit.name) for edit in self._changes[index]}
            for earlier in range(index - 1, -1, -1):
                others = {(id(edit.folder), edit.name) for edit in self._changes[earlier]}
                if names & others:
                    result.add(earlier)
                    names |= others
        return result

    def _tree(self, chosen: set[int], kind: str, rng: random.Random) -> Tree:
        entries: dict[int, dict[str, File | Folder]] = {}
        for index in sorted(chosen):
            for edit in self._changes[index]:
                _enter(entries.setdefault(id(edit.folder), dict(edit.folder.durable)), edit)
        tree: Tree = {}

        def walk(folder: Folder, prefix: str, above: frozenset[int]) -> None:
            for name, node in entries.get(id(folder), folder.durable).items():
                if isinstance(node, File):
                    kinds = ("old", "new", "zeros", "half")
                    tree[prefix + name] = _bytes_after(node, rng.choice(kinds) if kind == "any" else kind)
                elif id(node) not in above:
                    tree[prefix + name] = None
                    walk(node, f"{prefix}{name}/", above | {id(node)})

        walk(self._top, "", frozenset({id(self._top)}))
        return tree


def write_tree(tree: Tree, root: Path) -> None:
    """Make `root`, which must not exist, with all that is in `tree`."""
    root.mkdir()
    for path, data in tree.items():
        if data is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(data)


def _bytes_after(file: File, kind: str) -> bytes:
    if file.data == file.durable or kind == "old":
        return file.durable
    new = {"new": file.data, "zeros": bytes(len(file.data)), "half": file.data[: len(file.data) // 2]}
    return new[kind]


def _enter(entries: dict[str, File | Folder], edit: Edit) -> None:
    if edit.node is None:
        entries.pop(edit.name, None)
    else:
        entries[edit.name] = edit.node


def _plain(text: str) -> bytes:
    assert text[0] == text[-1] == '"', f"not a whole string: {text[:80]}"
    return bytes.fromhex(text[1:-1].replace("\\x", ""))


def opened_path(text: str) -> str:
    """The path of the open file or folder that strace names first."""
    return bytes.fromhex(text[text.index("<") + 1 : text.index(">")].replace("\\x", "")).decode()


def _joined(args: Sequence[str]) -> str:
    """The path in (path) or (folder, path), with what may follow."""
    if args[0].startswith('"'):
        return _plain(args[0]).decode()
    name = _plain(args[1]).decode()
    return name if name.startswith("/") else f"{opened_path(args[0])}/{name}"
