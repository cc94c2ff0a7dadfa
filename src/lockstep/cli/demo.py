"""`lockstep demo`: small programs with one fault each, run with stock torch and then with lockstep."""

from __future__ import annotations

import re
import shutil
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from lockstep.cli.demo_side import Line, Side, Who
from lockstep.demos.catalog import DEMOS, HANG_S, Demo
from lockstep.errors import ConfigError
from lockstep.launch.words import Words, refuse_name
from lockstep.observe.report.terminal import ending_by_exception

_SHOWN = 30  # lines of stock torch
_LONGEST = 600  # letters of a line
_WIDTH = 150  # columns, where no terminal says how many
_PATIENCE_S = 20.0  # for lockstep, should it have nothing to say
_AFTERMATH_S = 1.0  # once it has said all
_NAMES: dict[Who, str] = {"torch": "stock torch", "lockstep": "lockstep"}
_ERROR = re.compile(r"(?:\[rank\d+\]: )?((?:[\w.]+\.)?\w*(?:Error|Exception)\b.*|terminate called .*|.*fail at.*)")
_PREFIXED = re.compile(r"((?:\[rank\d+\]: ?)?)(.*)")
_DUMP = ("Traceback (most recent call last)", "Fatal Python error")  # what begins so goes on with frames
_FRAMES = ("  ", "Thread 0x", "Current thread 0x", "Extension modules: ")
_OURS = re.compile(r"(?:\[rank\d+\]: )?(?:lockstep: |lockstep\.errors\.)(.*)|.*?\bWarning: (.*)")


class Word(NamedTuple):
    """What one side had to say."""

    at_s: float | None  # when the first sentence came that helps; None: never
    text: str


def demo(words: Sequence[str]) -> int:
    """`lockstep demo [NAME]`; 0 where it could be shown. Raises: ConfigError for a name that there is not."""
    parser = Words(prog="lockstep demo", description=__doc__)
    parser.add_argument("name", nargs="?", help="which one; without a name, all are listed")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long stock torch is waited for (default: 10)")
    parser.add_argument("--source", action="store_true", help="show the program, run nothing")
    args = parser.read(words)
    if args.name is None and args.source:
        raise ConfigError("--source shows the program of one demo: `lockstep demo NAME --source`")
    if args.name is None:
        _list()
        return 0
    if args.name not in DEMOS:
        refuse_name("there is no demo", args.name, DEMOS, "lockstep demo", "lockstep demo")
    if not 0 < args.seconds < 1e6:
        raise ConfigError(f"--seconds {args.seconds:g}: it is a number above 0")
    one = DEMOS[args.name]
    if args.source:
        print(one.source, end="")
        return 0
    with ending_by_exception():  # what was started is ended first
        _show(one, args.seconds)
    return 0


def _list() -> None:
    width = max(map(len, DEMOS))
    for one in DEMOS.values():
        print(_wrapped(f"{one.name:{width}}  ", one.title))
        print(_wrapped(" " * (width + 2), f"stock torch: {one.stock}"))
    print(f"\n`lockstep demo {next(iter(DEMOS))}` runs one with stock torch, then with lockstep; --source shows it.")


def _show(one: Demo, seconds: float) -> None:
    print(f"{one.name}: {one.title}\n{one.script}", flush=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-demo-") as folder:
        said: dict[Who, Word] = {}
        for who in _NAMES:
            print(f"\n--- {one.command(stock=who == 'torch')}", flush=True)
            place = Path(folder) / who
            place.mkdir()
            said[who] = _run(one, who, place, seconds)
    print()
    for who, word in said.items():
        when = "" if word.at_s is None else f", after {word.at_s:.1f} s"
        known = f" ({one.stock})" if who == "torch" else ""
        print(_wrapped("", f"{_NAMES[who]}{when}: {word.text}{known}"), flush=True)


def _run(one: Demo, who: Who, folder: Path, seconds: float) -> Word:
    """Show one side as it happens; what it said first that helps."""
    pattern = _OURS if who == "lockstep" else _ERROR
    first: Word | None = None
    lines: list[str] = []
    limit_s = seconds if who == "torch" else _PATIENCE_S
    with Side(one, who, folder, {"LOCKSTEP_HANG_S": HANG_S, "LOCKSTEP_EVIDENCE": ""}) as side:
        for line in _without_frames(side.lines(limit_s)):
            lines.append(line.text)
            if who == "lockstep" or len(lines) <= _SHOWN:
                print(_wrapped(f"{line.at_s:6.1f} s  ", line.text), flush=True)
            found = pattern.match(line.text)
            if first is None and found is not None:
                first = Word(line.at_s, next(filter(None, found.groups()), ""))
            elif first is not None and first.text.endswith(":") and re.search(r"\w", line.text):
                first = first._replace(text=line.text.strip())  # what helps is below the heading
            if who == "lockstep" and side.limit_s == limit_s and one.says and says_all(one, "\n".join(lines)):
                side.limit_s = line.at_s + _AFTERMATH_S
        code = side.exit_code
    if who == "torch" and len(lines) > _SHOWN:
        print(f"         ... {len(lines) - _SHOWN} more lines", flush=True)
    if first is not None:
        return first
    silent = f"no complaint in {limit_s:g} s" if lines else f"still silent after {limit_s:g} s"
    return Word(None, silent if code is None else f"no complaint, exit code {code}")


def says_all(one: Demo, output: str) -> bool:
    """Whether `output` has all that lockstep has to say of this demo."""
    return all(re.search(pattern, output) for pattern in one.says)


def _without_frames(lines: Iterable[Line]) -> Iterator[Line]:
    """Of dumps only the first line and the error; not where the report lies, which goes with its folder."""
    within: dict[str, int] = {}  # dumps that have begun, by the prefix of a rank; without one, two may mix
    for line in lines:
        found = _PREFIXED.fullmatch(line.text)
        prefix, rest = found.groups() if found is not None else ("", line.text)
        begun = within.get(prefix, 0)
        if not ((begun and (not rest or rest.startswith(_FRAMES))) or rest.startswith("lockstep: report: ")):
            within[prefix] = begun + 1 if rest.startswith(_DUMP) else max(0, begun - 1)
            yield line


def _wrapped(head: str, text: str) -> str:
    """`head` and `text` in as many lines as the terminal needs, indented as `text` is: what helps is never cut."""
    body = text.lstrip()
    head += " " * (len(text) - len(body))
    return textwrap.fill(
        body if len(body) <= _LONGEST else f"{body[:_LONGEST]}...",
        max(len(head) + 30, shutil.get_terminal_size((_WIDTH, 0)).columns), initial_indent=head,
        subsequent_indent=" " * (len(head) + 2), break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
