"""What README and docs/ say of commands, flags, variables, names, findings and figures is what the code has."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import lockstep
from lockstep import cli, errors
from lockstep.demos.catalog import DEMOS
from lockstep.launch.torchrun_flags import parser
from lockstep.observe.settings import MODES

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")))
    if path.name != "log.md"  # tells of what was tried, also with flags that are gone
}
SOURCE = "\n".join(
    path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".js")
)
SUBCOMMANDS = {"checkpoint": ("ls", "verify", "show", "export", "import")}
FOREIGN_FLAGS = {"--pdb", "--slow", "--signal"}  # pytest's, our tests', Slurm's
_VARIABLE = r"\bLOCKSTEP_[A-Z_]+\b"


# ------------------------------------------------------------------ links


def _anchors(page: str) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.+)$", PAGES[page], re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_link_leads_somewhere() -> None:
    dead = []
    for page, text in PAGES.items():
        for target in re.findall(r"\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"", text):
            path, _, anchor = (target[0] or target[1]).partition("#")
            there = (ROOT / page).parent / path if path else ROOT / page
            name = there.resolve().relative_to(ROOT).as_posix() if there.exists() else ""
            if not name or (anchor and anchor not in _anchors(name)):
                dead.append(f"{page}: {path}#{anchor}")
    assert not dead


def test_every_page_can_be_found_from_readme() -> None:
    assert {page for page in PAGES if f"]({page}" not in PAGES["README.md"]} == {"README.md"}


def test_every_picture_is_shown() -> None:
    pictures = {path.name for path in (ROOT / "docs" / "images").iterdir()}
    assert pictures == {name for text in PAGES.values() for name in re.findall(r"images/([\w.-]+)", text)}


# ------------------------------------------------------------------ commands


def _commands() -> Iterator[tuple[str, str]]:
    """(page, command) of indented and fenced blocks, and of single words in backquotes."""
    for page, text in PAGES.items():
        for line in text.splitlines():
            block = re.match(r"    (?:\$ )?(?:\.venv/bin/)?((?:lockstep|torchrun|python|make) .+)", line)
            found = [block[1]] if block else re.findall(r"`((?:lockstep|torchrun|make) [^`]+)`", line)
            yield from ((page, re.split(r"   +|  # | #", words)[0].strip()) for words in found)


@cache
def _help(*words: str) -> str:
    """What `lockstep WORDS --help` prints; its exit is nobody's business here."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        cli.main([*words, "--help"])
    return said.getvalue()


def _flags(text: str) -> list[str]:
    return re.findall(r"(?<![\w-])(--[a-z][\w.-]*[a-z]|-[a-z](?![\w-]))", text)


def _faults(command: str) -> Iterator[str]:
    """What of a command line there is not."""
    program, *words = command.split()
    if program == "torchrun":  # `lockstep run` takes all its flags
        program, words = "lockstep", ["run", *words]
    if program == "make":
        if f"\n{words[0]}:" not in (ROOT / "Makefile").read_text():
            yield f"no target {words[0]}"
    elif program == "python":
        if not (ROOT / words[0]).is_file():
            yield f"no file {words[0]}"
    elif words[0] != "COMMAND" and not words[0].startswith("-"):
        if words[0] not in cli._COMMANDS:
            yield f"no command {words[0]}"
            return
        has_two = words[0] in SUBCOMMANDS and words[1:2] and words[1] in SUBCOMMANDS[words[0]]
        known = {*_flags(_help(*words[: 2 if has_two else 1])), "--help"}
        own = itertools.takewhile(lambda word: word != "-m" and not word.endswith(".py"), words)
        yield from (f"no flag {flag}" for flag in _flags(" ".join(own)) if flag not in known)
        _, _, program_of_ours = command.partition(" -m lockstep ")
        if program_of_ours:
            yield from _faults(f"lockstep {program_of_ours}")


def test_every_command_is_one() -> None:
    commands = list(_commands())
    assert len(commands) > 60  # else the blocks are written otherwise than they are looked for
    wrong = [f"{page}: {command}: {fault}" for page, command in commands for fault in _faults(command)]
    assert not [line for line in wrong if "lockstep train --train.stepz" not in line]  # is shown to be refused
    assert len(wrong) == 1


def test_a_command_that_is_none_is_seen() -> None:
    samples = ("lockstep verify x", "lockstep run --gard on train.py", "make tests", "torchrun --nproc_per_nod 2 x.py")
    assert all(list(_faults(command)) for command in samples)
    assert not list(_faults("lockstep run -n 2 train.py --anything"))


def test_readme_shows_how_a_wrong_field_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--train.stepz", "5"]) == 2
    assert f"    $ .venv/bin/lockstep train --train.stepz 5\n    {capsys.readouterr().err}" in PAGES["README.md"]


def test_flags_are_spelt_as_help_spells_them() -> None:
    known = {flag for name in cli._COMMANDS for flag in _flags(_help(name))}
    known |= {flag for name in SUBCOMMANDS["checkpoint"] for flag in _flags(_help("checkpoint", name))}
    known |= {"--help", "--version", *FOREIGN_FLAGS}
    lines = [line for text in PAGES.values() for line in text.splitlines() if "benchmarks/" not in line]
    shown = {flag for line in lines for flag in _flags(line) if flag.startswith("--")} - {"--train.stepz"}
    assert shown <= known, shown - known


def test_names_of_lessons_and_demos_are_there() -> None:
    lessons = {path.stem for path in (ROOT / "src/lockstep/lessons").glob("*.py")}
    for page, command in _commands():
        named = re.match(r"lockstep (learn|demo) ([a-z_]+)$", command)
        if named:
            assert named[2] in (lessons if named[1] == "learn" else DEMOS), (page, command)


# ------------------------------------------------------------------ settings


def test_every_variable_is_in_settings_and_none_is_made_up() -> None:
    code = set(re.findall(_VARIABLE, SOURCE)) | {"LOCKSTEP_CRASH_POINTS"}  # of the tests
    assert set(re.findall(_VARIABLE, PAGES["docs/settings.md"])) == code
    assert {name for text in PAGES.values() for name in re.findall(_VARIABLE, text)} <= code


def test_settings_have_the_modes_and_the_flags_of_run() -> None:
    page = PAGES["docs/settings.md"]
    modes = page[page.index("## How strict") : page.index("## `lockstep run`")]
    assert {*re.findall(r"^\| `([a-z]+)` \|", modes, re.MULTILINE)} == set(MODES)
    own = next(group for group in parser()._action_groups if group.title == "beyond torchrun")
    names = {name for action in own._group_actions for name in action.option_strings}
    section = page[page.index("## `lockstep run`") :]
    assert {*re.findall(r"^\| `(--?[a-z-]+)", section, re.MULTILINE)} == names
    defaults = dict(re.findall(r"^\| `(--[a-z-]+-s)` \| ([\d.]+) \|", section, re.MULTILINE))
    of_run = {a.option_strings[0]: f"{a.default:g}" for a in own._group_actions if a.option_strings[0].endswith("-s")}
    assert defaults == of_run


# ------------------------------------------------------------------ findings


def test_every_kind_of_finding_is_explained() -> None:
    """By the words that its text begins with, in the files that write them."""
    heads: set[str] = set()
    for path in (ROOT / "src/lockstep/observe").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "compose(" in text or "Finding(" in text:
            heads |= set(re.findall(r'"(?:lockstep: )?(NO STEP|NOT FINITE|[A-Z]{2,}_[A-Z]+|[A-Z]{4,})(?=[ :"])', text))
    rows = re.findall(r"^\| `([A-Z_ ]+)[` ].*", PAGES["docs/diagnosis.md"], re.MULTILINE)
    assert {head for head in heads if not head.startswith("SIG")} == {row.removesuffix(" ") for row in rows}


def test_words_that_are_explained_are_said() -> None:
    """Of each phrase, the longest part without an example in it is in the code."""
    page = PAGES["docs/diagnosis.md"]
    part = page[page.index("### Words in it") : page.index("## Where what is watched")]
    phrases = [
        phrase for row in re.findall(r"^\| (`.*?) \|", part, re.MULTILINE) for phrase in re.findall("`(.+?)`", row)
    ]
    said = re.sub(r'"\s*\n\s*f?r?"', "", SOURCE)  # what is written in two lines
    parts = [max(re.findall(r"[a-z',]+(?: [a-z',]+)*", re.sub(r"\branks?\b", "#", one)), key=len) for one in phrases]
    assert len(parts) > 20
    assert [one for one in parts if one not in said] == []


def test_errors_that_are_named_exist() -> None:
    for page, text in PAGES.items():
        for name in re.findall(r"\| `(\w+)`(?:, (?:`\w+`|quoting it))? \|", text):
            if name[0].isupper() and not name.isupper():
                assert hasattr(errors, name), (page, name)


# ------------------------------------------------------------------ Python


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if "```python" in text])
def test_snippets_are_python_and_use_public_names(page: str) -> None:
    for snippet in re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL):
        compile(textwrap.dedent(snippet), page, "exec")
        for line in re.findall(r"^from lockstep import (.+)$", snippet, re.MULTILINE):
            assert set(line.split(", ")) <= set(lockstep.__all__), line
        used = set(re.findall(r"\blockstep\.([A-Za-z_]+)", snippet))
        assert used <= set(lockstep.__all__), (page, used)


def test_calls_in_the_text_are_public_names() -> None:
    for page, text in PAGES.items():
        for name in re.findall(r"`lockstep\.([A-Za-z_]+)[`(]", text):
            assert name in lockstep.__all__ or (ROOT / "src/lockstep" / name).is_dir(), (page, name)


# ------------------------------------------------------------------ words and figures


def test_words_are_those_of_the_field() -> None:
    for page, text in PAGES.items():
        assert not re.findall(r"(?<![-_\w])(?:masters?|slaves?|process_index|num_processes)(?![-_\w])", text), page


_WHOLE, _SHARED = "gpt-30m, whole step: ", "fully_shard, fused AdamW / FSDP2, fused AdamW on "
_MAIN_THREAD = "step with 8 operations, all on: added processor time of the main thread"
_UNCHANGED = "step of an unchanged script, 8 buckets, later, main thread: all on / all off"
_KILL = "kill -9 to the next step, 95th percentile: "
_FIGURES = (  # what stands in README or settings.md, the benchmark's name, which of its values
    (r"\): (\d+) ms without any", _WHOLE + "torch / alone", "baseline"),
    (r"(\d+) ms with torch's class on Gloo", _WHOLE + "lockstep on gloo / torch", "baseline"),
    (r"(\d+) ms with torch's class on `", _WHOLE + "torch on lockstep / torch", "value"),
    (r"(\d+) ms with ours\.\n", _WHOLE + "lockstep on shared memory / torch", "value"),
    (r"(\d+) ms per step with torch's FSDP2", _WHOLE + _SHARED + "gloo", "baseline"),
    (r"Gloo, (\d+) ms with ours", _WHOLE + _SHARED + "gloo", "value"),
    (r"on shared memory (\d+) and", _WHOLE + _SHARED + "shared memory", "baseline"),
    (r"on shared memory \d+ and (\d+) ms", _WHOLE + _SHARED + "shared memory", "value"),
    (
        r"memory (0\.\d+) of FSDP2's",
        "gpt-30m, peak memory: fully_shard, AdamW / FSDP2, AdamW on shared memory",
        "ratio",
    ),
    (r"Gloo (0\.\d+) \(", "gpt-30m, peak memory: fully_shard, AdamW / FSDP2, AdamW on gloo", "ratio"),
    (r"training up for (\d+) ms", "stall: lockstep save_async / memcpy", "value"),
    (r"(0\.\d+) s from `kill -9`", _KILL + "lockstep run", "median"),
    (r"torchrun (\d\.\d) s", _KILL + "torchrun", "median"),
    (r"(\d+) us of the main thread for 8", _MAIN_THREAD, "value"),
    (r"(\d+) us for an unchanged", _UNCHANGED, "added_us"),
)


@pytest.mark.parametrize(("pattern", "name", "field"), _FIGURES, ids=lambda value: str(value)[:40])
def test_figures_were_measured(pattern: str, name: str, field: str) -> None:
    """Some record of the benchmark has it, rounded as it is shown."""
    found = re.findall(pattern.replace(" ", r"\s"), PAGES["README.md"] + PAGES["docs/settings.md"])
    assert len(found) == 1, pattern
    digits = len(found[0].partition(".")[2])
    lines = [line for path in (ROOT / "benchmarks/results").glob("*.md") for line in path.read_text().splitlines()]
    records = [{**one, **one.get("extra", {})} for one in map(json.loads, (line for line in lines if line[:1] == "{"))]
    values = {f"{record[field]:.{digits}f}" for record in records if record["name"] == name}
    assert found[0] in values
