"""Every demo of the gallery: stock torch's failure, named by lockstep with the culprit's rank and line."""

from __future__ import annotations

import contextlib
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

import warm_programs
from command_runs import Run, complaints
from lockstep.cli import demo_side
from lockstep.cli.demo import says_all
from lockstep.cli.demo_side import Side
from lockstep.demos.catalog import DEMOS, Demo, Place
from lockstep.observe import guard
from lockstep.observe.settings import GuardSettings

pytestmark = pytest.mark.limit_s(90)

_LIMIT_S = 20.0  # of which none is waited for where the ranks end, or once they stand still and all is said
_LOOKS = 12  # in 3 s: the second that ranks may be apart, and the 2 s of `LOCKSTEP_HANG_S`
_ROWS = range(1, 44)
_LINES, _COLUMNS = 12, 110  # of a report
_BEGINS = re.compile(r"lockstep: (?!report: |waiting )([A-Z][A-Z_ ]+)\b(?!, above)")
_GOES_ON = re.compile(r"  |Why it matters: |Likely fix: |Evidence: ")
_PAGE = (Path(__file__).parents[2] / "docs" / "diagnosis.md").read_text(encoding="utf-8")
_TOLD_IN_TWO_WAYS = "no_sync_on_one_rank"  # by whichever of two parts of the guard sees it first, each in its words
_ALIKE = (  # what the page leaves out, or has an example of
    (r"(?m)^\[rank\d\]: ", ""),  # who says it: a rank, or the launcher for it
    (r"\s+", " "),
    (r" <module>", ""),
    (r"[\w./-]*/(?=[\w-]+\.p[yt]\b)", ""),
    (r"\bpid \d+ on \S+?(?=\.? )", "pid 1 on host"),
    (r" on \S+ \(pid \d+\)", " on host"),
    (r" \((?:host \S+, )?pid \d+\)", ""),
    (r"\b\d+\.\d s\b", "2.0 s"),
    (r"\b[0-9a-f]{6}(?:[0-9a-f]{10}\b|\.\.)", "digest"),
    (r"(127\.0\.0\.1:|\bport )\d+", r"\1 29500"),
    (r"waiting for ranks 1, 2 at", "waiting for rank 2 at"),  # where rank 1 has yet to start
)
_ONLY_SAID = ("NOT FINITE", "DATA", "BUFFERS", "SAVE")  # of which no error is made
_STAND_STILL = ("HANG", "STOPPED")  # nor of these, and the ranks do not end


@pytest.fixture(autouse=True)
def _starts_are_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `_output`'s processes; the `lockstep demo` of the last tests is all as its user starts it."""
    warm_programs.get_ready()
    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "TimeoutExpired")}
    monkeypatch.setattr(demo_side, "subprocess", SimpleNamespace(Popen=warm_programs.Popen, **names))
    monkeypatch.setattr(demo_side, "_BEGIN", str(Path(__file__).with_name("counted_begin.py")))


def _output(demo: Demo, folder: Path, *, whole: bool = False) -> tuple[int | None, str]:
    """(exit code, None where it was ended; what was said) until lockstep has said all, or, `whole`, to the end."""
    variables = {"LOCKSTEP_HANG_S": "2", "LOCKSTEP_EVIDENCE": str(folder / "evidence")}
    lines: list[str] = []
    with Side(demo, "lockstep", folder, variables) as side:
        for line in side.lines(_LIMIT_S):
            lines.append(line.text)
            if not whole and says_all(demo, "\n".join(lines)) and _looks(demo, lines):
                break
        return side.exit_code, "\n".join(lines)


def _reports(output: str) -> list[list[str]]:
    """What the guards said, report by report."""
    found: list[list[str]] = []
    is_within = False
    for line in output.splitlines():
        begun = _BEGINS.search(line)  # what another rank was about to say may stand before it
        if begun is not None:
            found.append([line[begun.start() :]])
        elif is_within and _GOES_ON.match(line):
            found[-1].append(line)
        else:
            is_within = False
            continue
        is_within = True
    return found


def _blamed(head: str) -> list[str]:
    """Whom the first line of a report names."""
    return re.findall(r"Culprits?: (ranks? [\d,]+)", head)


def _plain(text: str) -> str:
    """Equal for what is said in two runs."""
    for pattern, word in _ALIKE:
        text = re.sub(pattern, word, text)
    return text


def _not_as_on_the_page(name: str, output: str) -> list[str]:
    """Of what docs/diagnosis.md says that lockstep says there: what is not in `output`, word by word."""
    found = re.search(rf"^\| \d+ \| {name} \|.*\| (.+) \|$", _PAGE, re.MULTILINE)
    assert found is not None
    parts = [_plain(part.removesuffix(" ...").rstrip(";")) for part in found[1].split("; ")]
    return [part for part in parts if part not in _plain(output) and name != _TOLD_IN_TWO_WAYS]


def _looks(demo: Demo, lines: list[str]) -> list[int]:
    """How often guards have looked for what they said, see `counted_begin`; [0] where another one may say it.

    The environment is checked before there is a guard, check mode raises by itself, and of ranks that abort one another
    the launcher tells where no guard has lived to do so.
    """
    if demo.places or demo.variables or "SIGABRT" in demo.stock:
        return [0]
    found = (re.search(r"^(?:\[rank\d\]: )?looked (\d+) times for it", line) for line in lines)
    return [int(one[1]) for one in found if one]


def test_every_row_has_a_demo() -> None:
    assert {demo.row for demo in DEMOS.values()} == set(_ROWS)


def test_looks_are_no_further_apart_than_the_bounds_need() -> None:
    """What the other tests count in looks is so many seconds, where the machine has time for them."""
    look_s = GuardSettings().look_s
    assert _LOOKS * look_s <= 3
    assert 2 * guard._CALM * look_s < 1, "in calm hours, too, what differs is named within a second"


_NAMED = [name for name, demo in DEMOS.items() if not demo.quiet]


@pytest.mark.parametrize("name", _NAMED)
def test_culprit_is_named(name: str, tmp_path: Path) -> None:
    demo = DEMOS[name]
    stands = any(word in demo.says[0] for word in _STAND_STILL)
    exit_code, output = _output(demo, tmp_path, whole=not (stands or demo.places))
    missing = [pattern for pattern in demo.says if not re.search(pattern, output)]
    missing += _not_as_on_the_page(name, output)
    assert not missing, f"{missing} is not in:\n{output}"
    looks = _looks(demo, output.splitlines())
    assert looks, f"no guard said it, but the launcher after the end:\n{output}"
    assert looks[0] <= _LOOKS, output
    if not demo.places and not demo.variables:
        _is_a_report(demo, output)
        kind = _reports(output)[0][0]
        expected = None if stands else int(not any(f" {word}" in kind for word in _ONLY_SAID))
        assert exit_code == expected, output
    else:
        assert exit_code in ((None, 1) if demo.places else (1,)), output
        assert not demo.places or re.search(r'meet\.py", line 7\b', output), output  # each error has its call


def _is_a_report(demo: Demo, output: str) -> None:
    """All is said in one report, which is short, comes once, before what the ranks raise of it, and blames nobody else.

    A step that one rank leaves out is said at once, and again when the models are known to differ by it.
    """
    first, *others = _reports(output)
    text = "\n".join(first)
    assert all(re.search(pattern, text) for pattern in demo.says), output
    assert len(first) <= _LINES, output
    assert max(map(len, first)) <= _COLUMNS, output
    assert [one[0].split()[1] for one in others] == ["REPLICAS"] * first[0].startswith("lockstep: STEPS"), output
    assert _blamed(first[0]) == _blamed(demo.says[0]), output
    assert output.count(first[0]) == 1, output
    errors = re.findall(r"^\[rank\d\]: lockstep\.errors\.", output, re.MULTILINE)
    assert not errors or output.index(first[0]) < output.index(errors[0]), output


_ELSEWHERE = {  # where a row was provoked in several ways: how else, and what is said
    38: ((Place("1"), Place("1")), "rank 1 waits for rank 0 at .*: 127.0.0.1 refuses connections"),  # who both miss
    40: ((Place("0"), Place("1", address="no-such-host.invalid")), "host 'no-such-host.invalid' cannot be found"),
}


@pytest.mark.parametrize("row", _ELSEWHERE)
def test_other_ways_of_a_wrong_environment(row: int, tmp_path: Path) -> None:
    places, pattern = _ELSEWHERE[row]
    demo = Demo("variant", "", row, "", (pattern,), places=places)
    _, output = _output(demo, tmp_path)
    assert says_all(demo, output), output


_HEAD = """
import sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank = dist.get_rank()
"""
_TRAIN = """
for _ in range(5 - rank):
    ddp(torch.randn(8, 4)).sum().backward()
"""
_VARIANTS = {  # the same for faults in programs: "" where nothing is wrong
    "5 small": (
        "dist.all_reduce(torch.ones(4 + rank))  # here",
        r"they differ in shape\n +rank 0: .* \[4\] .*train\.py:HERE .*\n +rank 1: .* \[5\] .*:HERE",
    ),
    "5 large": (
        "dist.all_reduce(torch.ones(1_000_000 + 200_000 * rank))  # here",
        r"they differ in shape\n +rank 0: .* \[1000000\] .*train\.py:HERE .*\n +rank 1: .* \[1200000\] .*:HERE",
    ),
    "19 wrapped": ("torch.manual_seed(rank)\nddp = DDP(torch.nn.Linear(4, 2))\nrank = 0" + _TRAIN, ""),
    "24 alive": (
        "ddp = DDP(torch.nn.Linear(4, 2))" + _TRAIN + "time.sleep(60 * rank)  # here",
        r"HANG.*Culprit: rank 1 .*\n +rank 1 is not there: at train\.py:HERE",
    ),
    "25 thrown": (
        "ddp = DDP(torch.nn.Linear(4, 2))\nwith ddp.join(throw_on_early_termination=True):"
        + _TRAIN.replace("\n", "\n    "),
        "Rank 1 exhausted all inputs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _VARIANTS)
def test_other_ways_of_a_faulty_program(name: str, tmp_path: Path) -> None:
    body, pattern = _VARIANTS[name]
    source = f"{_HEAD}{body}\ndist.destroy_process_group()\n"
    (tmp_path / "train.py").write_text(source)
    here = [number for number, line in enumerate(source.splitlines(), 1) if "# here" in line]
    words = ("run", "--record=off", "--nproc-per-node=2", "train.py")
    with contextlib.closing(Run(tmp_path, *words, warm=True, LOCKSTEP_HANG_S="2", LOCKSTEP_EVIDENCE="")) as run:
        if pattern:
            run.await_text(pattern.replace("HERE", str(*here)))
        else:
            assert complaints(run.end(0)) == []


@pytest.mark.parametrize("name", [name for name, demo in DEMOS.items() if demo.quiet])
def test_nothing_is_said_where_nothing_is_wrong(name: str, tmp_path: Path) -> None:
    exit_code, output = _output(DEMOS[name], tmp_path, whole=True)
    assert (exit_code, complaints(output)) == (0, []), output


def test_demo_shows_both_sides_and_compares_them(tmp_path: Path) -> None:
    run = Run(tmp_path, "demo", "different_reductions", "--seconds", "60")
    output = run.end(0)
    assert output.count("rank 0 goes on with [3.0, 3.0, 2.0, 2.0]") == 2
    stock, ours = output.splitlines()[-2:]
    assert stock == f"stock torch: no complaint, exit code 0 ({DEMOS['different_reductions'].stock})"
    assert re.fullmatch(r"lockstep, after \d+\.\d s: MISMATCH .*", ours), output


def test_demo_ends_both_sides_that_hang_and_shows_all_that_was_said(tmp_path: Path) -> None:
    run = Run(tmp_path, "demo", "missing_collective", "--seconds", "1", COLUMNS="200")
    output = run.end(0)
    assert re.search(r"^ +\d+\.\d s  Likely fix: ", output, re.MULTILINE), output
    assert "lockstep: report: " not in output  # its folder is gone
    stock, ours = output.splitlines()[-2:]
    assert stock.startswith("stock torch: still silent after 1 s (waits 30 minutes"), output
    assert ours.startswith("lockstep, after "), output
