"""Checkpoints whose author wants harm: the digests fit, where anything can fit."""

from __future__ import annotations

import copy
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.checkpoint.manifest import BYTES_MAX, NAME
from small_checkpoints import body_for, entry, raw_file, raw_manifest

ONE, TWO = "rank-00000.safetensors", "rank-00001.safetensors"
DATA, ROW = bytes(range(24)), bytes(range(12))  # t: two rows of three I32
HEADER = {"t": entry("I32", (2, 3), 0, 24)}
TENSORS = {"t": ["I32", [2, 3]]}


class Case(NamedTuple):
    """One checkpoint: how it is made in its folder, and what is to be said of it."""

    make: Callable[[Path], None]
    says: str  # a pattern; "" where it is a good one


def good(folder: Path) -> None:
    """The checkpoint of which the others are variations."""
    content = raw_file(HEADER, DATA)
    (folder / ONE).write_bytes(content)
    (folder / NAME).write_bytes(raw_manifest(body_for({ONE: (content, [DATA])}, TENSORS)))


def body() -> dict[str, Any]:
    """The body of the good one's manifest."""
    return body_for({ONE: (raw_file(HEADER, DATA), [DATA])}, TENSORS)


# ------------------------------------------------------------------ manifests


def manifest(change: Callable[[dict[str, Any]], Any] | None = None, says: str = ".", text: Any = None) -> Case:
    """The good one with another manifest, whose digest fits: `change` changes its body; or its `text`, or all bytes."""

    def make(folder: Path) -> None:
        good(folder)
        changed = copy.deepcopy(body())
        if change is not None:
            changed = change(changed) or changed
        if callable(text):
            changed = text(json.dumps(changed, separators=(",", ":")))
        (folder / NAME).write_bytes(text if isinstance(text, bytes) else raw_manifest(changed))

    return Case(make, f"manifest.json.*{says}")


def replaced(*keys: str, by: Any, says: str = ".") -> Case:
    """Another value somewhere in the manifest."""

    def change(found: dict[str, Any]) -> None:
        place = found
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = by

    return manifest(change, says)


def file_named(name: str) -> Case:
    """A manifest that names a file elsewhere."""
    return manifest(lambda found: found["files"].update({name: found["files"][ONE]}), "is no name of a file")


def values(by: dict[str, Any], says: str = ".", **tables: Any) -> Case:
    """A manifest with these values."""
    return manifest(lambda found: found.update(values=by, **tables), says)


def _many(count: int) -> Callable[[str], str]:
    entries = ",".join(f'"v{n}":0' for n in range(count))
    return lambda text: text.replace('"values":{}', f'"values":{{{entries}}}')


def _sparse(folder: Path) -> None:
    good(folder)
    os.truncate(folder / NAME, BYTES_MAX + 1)


MANIFESTS = {
    "name up": file_named("../rank-00000.safetensors"),
    "name absolute": file_named("/etc/passwd"),
    "name down": file_named("x/rank-00000.safetensors"),
    "name up and down": file_named("rank-00000.safetensors/../../x"),
    "name short": file_named("rank-0.safetensors"),
    "name of no rank": file_named("rank-00002.safetensors"),
    "name and a new line": file_named("rank-00001.safetensors\n"),
    "name with other digits": file_named("rank-0000\u0661.safetensors"),
    "name with a zero byte": file_named("rank-00001.safetensors\0"),
    "name empty": file_named(""),
    "name of the manifest": file_named(NAME),
    "format of another time": manifest(text=b'{"format":"lockstep-checkpoint-9"}\n', says="lockstep-checkpoint-2"),
    "format none": manifest(text=b"", says="not the manifest"),
    "byte order mark": manifest(text=b"\xef\xbb\xbf{}", says="ascii"),
    "not text": manifest(text=b"\xff\xfe" * 200, says="ascii"),
    "zeros": manifest(text=bytes(500), says="not the manifest"),
    "too large": Case(_sparse, "has at most"),
    "key twice": manifest(text=lambda text: text.replace('"step":1', '"step":2,"step":1'), says="twice"),
    "path twice": manifest(text=lambda text: text.replace('{"t":', '{"t":["I32",[2,3]],"t":'), says="twice"),
    "key more": manifest(lambda found: {**found, "code": "x"}, "has not exactly"),
    "key less": manifest(lambda found: {k: v for k, v in found.items() if k != "kinds"}, "has not exactly"),
    "keys turned": manifest(lambda found: dict(reversed(found.items())), "has not exactly"),
    "white space": manifest(text=lambda text: text.replace('"step":1', '"step": 1'), says="not written as"),
    "escape": manifest(text=lambda text: text.replace('{"t":', '{"\\u0074":'), says="not written as"),
    "no object": manifest(text=lambda text: "[]", says="has not exactly"),
    "no json": manifest(text=lambda text: "{", says="damaged"),
    "python": manifest(text=lambda text: "__import__('os').system('true')", says="damaged"),
    "deep list": manifest(text=lambda text: "[" * 1_000_000, says="nested too deeply"),
    "deep object": manifest(text=lambda text: '{"a":' * 1_000_000, says="nested too deeply"),
    "deep, closed": manifest(text=lambda text: "[" * 100_000 + "]" * 100_000, says="nested too deeply"),
    "many tokens": manifest(text=lambda text: "[" + "[]," * 9_000_000 + "0]", says="more than 8000000"),
    "million values": manifest(text=_many(1_000_001), says="more than 1000000 entries"),
    "half a million containers": manifest(
        lambda found: found.update(values={"/".join(f"{i:x}" for i in range(n, n + 63)): 0 for n in range(9_000)}),
        "more than 500000 containers",
    ),
    "step true": replaced("step", by=True),
    "step negative": replaced("step", by=-1),
    "step a float": replaced("step", by=1.0),
    "step a text": replaced("step", by="1"),
    "step null": replaced("step", by=None),
    "step large": replaced("step", by=2**63),
    "step of 5000 digits": manifest(text=lambda text: text.replace('"step":1', f'"step":{"9" * 5000}')),
    "step of another folder": replaced("step", by=2, says="not of this folder"),
    "generation negative": replaced("generation", by=-1),
    "parent a number": replaced("parent", by=1, says="parent"),
    "parent a path": replaced("parent", by="../x", says="parent"),
    "world of none": replaced("world_size", by=0),
    "world of millions": replaced("world_size", by=10**6),
    "files a list": replaced("files", by=[], says="no table"),
    "tensors null": replaced("tensors", by=None, says="no table"),
    "record a list": replaced("files", ONE, by=[24, "", ""]),
    "bytes negative": replaced("files", ONE, "bytes", by=-1),
    "bytes few": replaced("files", ONE, "bytes", by=9),
    "bytes a float": replaced("files", ONE, "bytes", by=96.0),
    "digest short": replaced("files", ONE, "sha256", by="0" * 63, says="digest"),
    "digest in capitals": replaced("files", ONE, "sha256", by="A" * 64, says="digest"),
    "digest a list": replaced("files", ONE, "sha256", by=[], says="digest"),
    "crc odd": replaced("files", ONE, "crc32", by="0" * 9, says="crc32"),
    "crc in spaces": replaced("files", ONE, "crc32", by=" " * 8, says="crc32"),
    "crc a number": replaced("files", ONE, "crc32", by=7, says="crc32"),
    "dtype unknown": replaced("tensors", "t", by=["F31", [2, 3]], says="no dtype"),
    "dtype a list": replaced("tensors", "t", by=[["F32"], [2, 3]], says="no dtype"),
    "shape negative": replaced("tensors", "t", by=["I32", [-2, -3]]),
    "shape a float": replaced("tensors", "t", by=["I32", [2.0, 3]]),
    "shape true": replaced("tensors", "t", by=["I32", [True, 6]]),
    "shape a text": replaced("tensors", "t", by=["I32", "23"], says="no shape"),
    "shape null": replaced("tensors", "t", by=["I32", None], says="no shape"),
    "shape not a number": manifest(text=lambda text: text.replace("[2,3]", "[NaN,3]"), says="NaN"),
    "shape infinite": manifest(text=lambda text: text.replace("[2,3]", "[Infinity]"), says="Infinity"),
    "shape huge": replaced("tensors", "t", by=["I32", [2**62, 2**62]], says="too large"),
    "shape huge by wrapping": replaced("tensors", "t", by=["I32", [2**32, 2**32, 6]], says="too large"),
    "shape huge and empty": replaced("tensors", "t", by=["I32", [2**61, 0]], says="too large"),
    "shape of many dims": replaced("tensors", "t", by=["I32", [1] * 65], says="no shape"),
    "shape of a million dims": replaced("tensors", "t", by=["I32", [1] * 1_000_000], says="no shape"),
    "shape larger than the file": replaced("tensors", "t", by=["I32", [2**40]], says="its files at most"),
    "alias of nothing": replaced("aliases", by={"a": "b"}, says="no tensor of it"),
    "alias of itself": replaced("aliases", by={"a": "a"}, says="no tensor of it"),
    "alias of an alias": replaced("aliases", by={"a": "t", "b": "a"}, says="no tensor of it"),
    "alias of a list": replaced("aliases", by={"a": []}, says="no tensor of it"),
    "alias and tensor": replaced("aliases", by={"t": "t"}, says="twice"),
    "value and tensor": values({"t": 1}, "twice"),
    "value in a tensor": values({"t/x": 1}, "no container"),
    "tensor in a value": values({"x": 1}, "no container|in one", aliases={"x/y": "t"}),
    "path empty": values({"": 1}, "no path"),
    "path of dots": values({"../../x": 1, "/etc/passwd": 2}, "no path"),
    "path unescaped": values({"a~": 1}, "no path"),
    "path of the format": values({"__metadata__": 1}, "no path"),
    "path deep": values({"/".join("x" * 65): 1}, "no path"),
    "path long": values({"x" * 10_000_000 + "~": 1}, "no path"),
    "kind of nothing": values({}, "is not there", kinds={"x": "list"}),
    "kind unknown": values({"x/0": 1}, "which it is not", kinds={"x": "os.system"}),
    "kind a list": values({"x/0": 1}, ".", kinds={"x": ["list"]}),
    "kind of a tensor": values({}, "which it is not", kinds={"t": "list"}),
    "list with a gap": values({"x/0": 1, "x/2": 1}, "which it is not", kinds={"x": "list"}),
    "list with a huge index": values({"x/0": 1, f"x/{10**17}": 1}, "which it is not", kinds={"x": "list"}),
    "number too long": values({f"x/{10**18}": 1}, "which it is not", kinds={"x": "int_dict"}),
    "value a list of lists": values({"x": [[1]]}, "list in a list"),
    "value an object": values({"x": {"a": 1}}, "is no value"),
    "value of two": values({"x": {"int": "0x10", "float": "0"}}, "is no value"),
    "value a short int": values({"x": {"int": "0x10"}}, "not written as"),
    "value no int": values({"x": {"int": "zz"}}),
    "value a short float": values({"x": {"float": "7ff0"}}),
    "value a plain float": values({"x": {"float": "3ff0000000000000"}}, "not written as"),
    "value infinite": manifest(text=lambda text: text.replace('"values":{}', '"values":{"x":1e999}')),
    "value of a million digits": manifest(
        text=lambda text: text.replace('"values":{}', f'"values":{{"x":{"7" * 10**6}}}')
    ),
    "path of a lone surrogate": manifest(text=lambda text: text.replace('"values":{}', '"values":{"\\ud800":1}')),
    "value of a lone surrogate": manifest(text=lambda text: text.replace('"values":{}', '"values":{"x":"\\ud800"}')),
}


# ------------------------------------------------------------------ tensor files


def content(*files: bytes | tuple[bytes, list[bytes]], says: str = ".", tensors: Any = None) -> Case:
    """The good one with other files, whose digests fit; with the bytes of their pieces, or those of the good one."""

    def make(folder: Path) -> None:
        held = {
            f"rank-{rank:05}.safetensors": found if isinstance(found, tuple) else (found, [DATA])
            for rank, found in enumerate(files)
        }
        for name, (data, _) in held.items():
            (folder / name).write_bytes(data)
        (folder / NAME).write_bytes(raw_manifest(body_for(held, TENSORS if tensors is None else tensors)))

    return Case(make, says)


def header(found: Any, says: str = ".", data: bytes = DATA) -> Case:
    """The good one with another header."""
    return content(raw_file(found, data), says=f"{ONE}.*{says}")


def text(change: Callable[[str], str], says: str = ".") -> Case:
    """The good one with another text of its header."""
    return header(change(json.dumps(HEADER, separators=(",", ":"))).encode(), says)


def piece(start: list[Any] | None, shape: list[int], data: bytes = DATA) -> tuple[bytes, list[bytes]]:
    """A file with some rows of t."""
    nbytes = 4 * max(1, shape[0]) * 3
    meta = {"__metadata__": {"starts": json.dumps({"t": start}, separators=(",", ":"))}} if start else {}
    return raw_file({**meta, "t": entry("I32", shape, 0, nbytes)}, data[:nbytes]), [data[:nbytes]]


def _long_header(folder: Path) -> None:
    """A header of 110 MB in a file without blocks."""
    good(folder)
    with (folder / ONE).open("wb") as file:
        file.write((110_000_000).to_bytes(8, "little"))
        file.truncate(110_000_100)
    found = body()
    found["files"][ONE] = {**found["files"][ONE], "bytes": 110_000_100}
    (folder / NAME).write_bytes(raw_manifest(found))


def meta(found: Any, says: str) -> Case:
    """The good one with other metadata."""
    return header({"__metadata__": found, **HEADER}, says)


FILES = {
    "length 2^60": content((2**60).to_bytes(8, "little") + DATA * 2, says=f"header of {2**60} bytes"),
    "length 2^64-1": content(b"\xff" * 8 + DATA * 2, says="header of"),
    "length of the file": content((48).to_bytes(8, "little") + DATA + ROW, says="header of 48 bytes"),
    "length none": content(bytes(8) + DATA * 2, says="header of 0 bytes"),
    "length and nothing": content(bytes(10), says="header of 0 bytes", tensors={}),
    "header of 110 MB": Case(_long_header, "does not fit|header of 110000000"),
    "not json": header(b"x" * 64),
    "not text": header(b"\xff" * 64, "ascii"),
    "list": header([1, 2], "no JSON object"),
    "deep": header(b"[" * 100_000, "nested too deeply"),
    "many tokens": header(b"[" + b"[]," * 9_000_000 + b"0]", "more than 8000000"),
    "empty": header({}, "end at byte"),
    "path twice": text(lambda found: f"{found[:-1]},{found[1:]}", "twice"),
    "key twice": text(lambda found: found.replace('"shape"', '"dtype":"I32","shape"'), "twice"),
    "white space": text(lambda found: found.replace(",", ", "), "not written as"),
    "zero byte": text(lambda found: found.replace("t", "t\0"), "."),
    "dtype unknown": header({"t": entry("I33", (2, 3), 0, 24)}, "no dtype"),
    "dtype a list": header({"t": entry([], (2, 3), 0, 24)}, "no dtype"),  # pyright: ignore[reportArgumentType]
    "dtype other": header({"t": entry("F32", (2, 3), 0, 24)}, "holds F32.*I32"),
    "shape other": content(raw_file({"t": entry("I32", (3, 2), 0, 24)}, DATA), says="every element once of t"),
    "shape flat": header({"t": entry("I32", (6,), 0, 24)}, r"holds I32 \[6\].*\[2, 3\]"),
    "shape huge": header({"t": entry("I32", (2**62, 2**62), 0, 24)}, "too large"),
    "shape that wraps to 24": header({"t": entry("I32", (2**62 + 6,), 0, 24)}, "too large"),
    "shape negative": header({"t": entry("I32", (-2, -3), 0, 24)}),
    "shape not a number": text(lambda found: found.replace("[2,3]", "[NaN,3]"), "NaN"),
    "shape of 5000 digits": text(lambda found: found.replace("[2,3]", f"[{'2' * 5000}]")),
    "shape a float": header({"t": entry("I32", (2.0, 3), 0, 24)}),
    "shape without elements": header({"t": entry("I32", (2, 0), 0, 24)}, "no elements"),
    "offsets that overlap": header(
        {"t": entry("I32", (2, 3), 0, 24), "u": entry("I32", (2, 3), 0, 24)}, "not written as"
    ),
    "offsets with a gap": header({"t": entry("I32", (2, 3), 8, 32)}, "not written as", bytes(8) + DATA),
    "offsets turned": header({"t": entry("I32", (2, 3), 24, 0)}, "not written as"),
    "offsets negative": header({"t": entry("I32", (2, 3), -24, 0)}, "not written as"),
    "offsets floats": header({"t": entry("I32", (2, 3), 0.0, 24.0)}, "not written as"),
    "offsets far": header({"t": entry("I32", (2, 3), 2**62, 2**62 + 24)}, "not written as"),
    "bytes too many": header(HEADER, "end at byte", DATA + b"x"),
    "bytes too few": header(HEADER, "end at byte", DATA[:-1]),
    "tensor unknown": header({"u": entry("I32", (2, 3), 0, 24)}, "no tensor"),
    "tensor more": content(
        (raw_file({"t": entry("I32", (2, 3), 0, 24), "u": entry("U8", (1,), 24, 25)}, DATA + b"x"), [DATA, b"x"]),
        says="no tensor",
    ),
    "order turned": content(
        (raw_file({"t": entry("U8", (1,), 0, 1), "s": entry("U8", (1,), 1, 2)}, b"ab"), [b"a", b"b"]),
        says="not in order",
        tensors={"t": ["U8", [1]], "s": ["U8", [1]]},
    ),
    "pieces fewer than written": content((raw_file(HEADER, DATA), [DATA, DATA]), says="has 1 pieces.*says 2"),
    "pieces more than written": content((raw_file(HEADER, DATA), []), says="has 1 pieces.*says 0"),
    "entry a list": header({"t": ["I32", [2, 3], [0, 24]]}, "not described"),
    "entry with more": header({"t": {**HEADER["t"], "code": 1}}, "not described"),
    "metadata a list": meta([], "metadata"),
    "metadata with more": meta({"starts": "{}", "x": ""}, "metadata"),
    "metadata empty": meta({}, "metadata"),
    "metadata a table": meta({"starts": {}}, "metadata"),
    "starts of nothing": meta({"starts": "{}"}, "not written as"),
    "starts of others": meta({"starts": '{"u":[1]}'}, "starts are not"),
    "starts a list": meta({"starts": "[]"}, "starts are not"),
    "starts at 0": meta({"starts": '{"t":[0,0]}'}, "not written as"),
    "starts twice": meta({"starts": '{"t":[1,0],"t":[1,0]}'}, "twice"),
    "starts deep": meta({"starts": "[" * 100_000}, "nested too deeply"),
    "starts not json": meta({"starts": "x"}, "."),
    "starts flat": meta({"starts": '{"t":[1]}'}, "starts at"),
    "starts negative": meta({"starts": '{"t":[-1,0]}'}, "."),
    "starts outside": content(piece([1, 0], [2, 3]), says="every element once of t"),
    "starts far outside": content(piece([2**40, 0], [2, 3]), says="every element once of t"),
    "rows twice": content(piece(None, [2, 3]), piece([1, 0], [1, 3]), says="every element once of t"),
    "rows all twice": content(piece(None, [2, 3]), piece(None, [2, 3]), says="every element once of t"),
    "rows one twice, one never": content(piece(None, [1, 3]), piece(None, [1, 3]), says="every element once of t"),
    "rows missing": content(piece(None, [1, 3]), says="its files at most|every element once of t"),
    "rows beyond": content(piece(None, [1, 3]), piece([2, 0], [1, 3]), says="every element once of t"),
    "tensor in no file": content((raw_file({}, b""), []), says="every element once of t", tensors={"t": ["U8", [4]]}),
}


# ------------------------------------------------------------------ what is in the folder


def folder_with(name: str, change: Callable[[Path], None], says: str) -> Case:
    """The good one in which `name` has been moved beside the folder, and something else is in its place."""

    def make(folder: Path) -> None:
        good(folder)
        (folder / name).rename(folder.parent / "outside")
        change(folder / name)

    return Case(make, f"{name}.*{says}")


def _to_outside(path: Path) -> None:
    path.symlink_to(path.parent.parent / "outside")


def _to_sibling(path: Path) -> None:
    path.symlink_to("../outside")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        before = os.getcwd()
        os.chdir(path.parent)  # names of sockets are short
        try:
            made.bind(path.name)
        finally:
            os.chdir(before)


def _linked_folder(folder: Path) -> None:
    real = folder.with_name("real")
    folder.rmdir()
    real.mkdir()
    good(real)
    folder.symlink_to(real)


def _no_folder(folder: Path) -> None:
    folder.rmdir()
    os.mkfifo(folder)


def _hard_link(folder: Path) -> None:
    good(folder)
    os.link(folder / ONE, folder.parent / "copy")  # as of backups that share what did not change


def _in_place(name: str) -> dict[str, Case]:
    return {
        f"{name} a link": folder_with(name, _to_outside, "is a link"),
        f"{name} a short link": folder_with(name, _to_sibling, "is a link"),
        f"{name} a link to nothing": folder_with(name, lambda path: path.symlink_to("nothing"), "is a link"),
        f"{name} a link to itself": folder_with(name, lambda path: path.symlink_to(path.name), "is a link"),
        f"{name} a link to zeros": folder_with(name, lambda path: path.symlink_to("/dev/zero"), "is a link"),
        f"{name} a pipe": folder_with(name, lambda path: os.mkfifo(path), "no regular file"),
        f"{name} a folder": folder_with(name, Path.mkdir, "no regular file"),
        f"{name} a socket": folder_with(name, _socket, "cannot be read"),
        f"{name} away": folder_with(name, lambda path: None, "missing|lacks"),
    }


FOLDERS = {
    **_in_place(NAME),
    **_in_place(ONE),
    "folder a link": Case(_linked_folder, "is a link"),
    "folder a pipe": Case(_no_folder, "not of the kind"),
    "hard link": Case(_hard_link, ""),
}

CASES = {
    "good": Case(good, ""),
    "two files": content(piece(None, [1, 3]), piece([1, 0], [1, 3], DATA), says=""),
    **{f"manifest, {name}": case for name, case in MANIFESTS.items()},
    **{f"file, {name}": case for name, case in FILES.items()},
    **{f"folder, {name}": case for name, case in FOLDERS.items()},
}
