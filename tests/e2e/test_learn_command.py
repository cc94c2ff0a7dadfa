"""`lockstep learn` and `lockstep puzzle`, as a learner types them."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

import lockstep.cli.puzzle as command
from command_runs import is_alive
from lockstep.comm.waiting import wait_until
from lockstep.errors import ConfigError
from lockstep.lessons import LESSONS
from lockstep.observe.report.source import find_run
from lockstep.puzzles import PUZZLES

GOLDEN = Path(__file__).parents[1] / "golden/lessons"
_PATIENCE_S = 50


def lockstep(folder: Path, *words: str, limit_s: float = 100) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lockstep", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=limit_s,
        stdin=subprocess.DEVNULL,
    )


def test_all_are_listed(tmp_path: Path) -> None:
    lessons, puzzles = lockstep(tmp_path, "learn"), lockstep(tmp_path, "puzzle")
    assert [name for name in LESSONS if name not in lessons.stdout] == []
    assert f"0 of {len(PUZZLES)} are solved" in puzzles.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_has_gone_is_no_error(tmp_path: Path) -> None:
    """`lockstep learn | head -1`"""
    reading, writing = os.pipe()
    os.close(reading)
    words = [sys.executable, "-m", "lockstep", "learn"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE) as process:
        os.close(writing)
        assert process.communicate(timeout=50)[1] == b""
    assert process.returncode == 1


def test_a_lesson_in_a_pipe(tmp_path: Path) -> None:
    done = lockstep(tmp_path, "learn", "send_receive")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "send_receive  3/3  A chain: the value grows on its way" in done.stdout
    assert "total = [111]" in done.stdout
    page = tmp_path / "runs/learn-send_receive/replay.html"
    assert str(page.relative_to(tmp_path)) in done.stdout
    assert "A chain: the value grows" in page.read_text()
    with pytest.raises(ConfigError, match="there is no run in "):  # or `lockstep report` would take it for the newest
        find_run(None, tmp_path / "runs")


def test_what_a_lesson_has_started_ends_with_it(tmp_path: Path) -> None:
    """A signal to the command alone, as `timeout` sends it."""
    started, stand_in = tmp_path / "pid", tmp_path / "python"
    stand_in.write_text("#!/bin/sh\necho $$ > pid.new && mv pid.new pid && exec sleep 100\n")
    stand_in.chmod(0o700)
    program = (
        "import sys; from pathlib import Path; from lockstep.learn.program import play;"
        f"sys.executable = {str(stand_in)!r}; play(Path('mine.py'), 2, Path('run'), {{}})"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path) as process:
        wait_until(started.exists, _PATIENCE_S)
        process.terminate()
        assert process.wait(_PATIENCE_S) == 128 + signal.SIGTERM
    assert not is_alive(int(started.read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is noticed later")
def test_the_ranks_of_a_lesson_that_is_killed_end_too(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        '"""Mine."""\n'
        "import os, time\n"
        "with open('pids', 'a') as file:\n"
        "    file.write(f'{os.getpid()}\\n')\n"
        "time.sleep(300)\n"
    )
    pids = tmp_path / "pids"
    with subprocess.Popen([sys.executable, "-m", "lockstep", "learn", "mine.py", "-n", "2"], cwd=tmp_path) as process:
        wait_until(lambda: pids.exists() and pids.read_text().count("\n") == 2, _PATIENCE_S)
        process.kill()
    assert wait_until(lambda: not any(is_alive(int(pid)) for pid in pids.read_text().split()), _PATIENCE_S)


def test_a_folder_without_room_is_one_sentence(tmp_path: Path) -> None:
    program = (
        "import resource; from lockstep.cli import main;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); main(['learn', 'send_receive'])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    said = "lockstep: runs/learn-send_receive has no room for what the processes tell: File too large\n"
    assert done.stderr == said


def test_a_folder_in_which_nobody_can_write_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")  # also root has no folder in there
    done = lockstep(tmp_path, "learn", "send_receive")
    assert done.returncode == 1
    said = "lockstep: runs/learn-send_receive: Not a directory; start it in a folder in which you can write\n"
    assert done.stderr == said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("send_recive",), "did you mean `lockstep learn send_receive`"),
        (("mine.py",), "there is no file 'mine.py'"),
        (("send_receive", "-n", "1"), "2 to 8 processes"),
    ],
)
def test_what_cannot_be_run_is_said(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    done = lockstep(tmp_path, "learn", *words)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_program_of_ones_own_that_fails_shows_what_it_said(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        '"""Mine."""\n'
        "from lockstep.learn.stage import Stage, run\n"
        "def mine(stage: Stage) -> None:\n"
        "    stage.screen('One', 'idea')\n"
        "    stage.show(x=float(stage.comm.rank))\n"
        "    if stage.comm.rank == 1:\n"
        "        raise ValueError('on purpose')\n"
        "run(mine)\n"
    )
    done = lockstep(tmp_path, "learn", "mine.py", "-n", "2")
    assert done.returncode == 1
    assert "mine  1/1  One" in done.stdout
    assert "on purpose" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="the screens are read from a pseudo-terminal as Linux makes it")
def test_keys_turn_the_screens(tmp_path: Path) -> None:
    terminal, inside = pty.openpty()
    words = [sys.executable, "-m", "lockstep", "learn", "send_receive", "-n", "2"]
    environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "90", "LINES": "30"}
    try:
        with subprocess.Popen(words, cwd=tmp_path, stdin=inside, stdout=inside, stderr=inside, env=environ) as process:
            os.close(inside)
            shown = bytearray()

            def has(text: str) -> bool:
                with suppress(OSError):  # the program has ended, and nobody has the terminal any more
                    while select.select([terminal], [], [], 0.05)[0]:
                        shown.extend(os.read(terminal, 1 << 16))
                return text.encode() in shown

            assert wait_until(lambda: has("1/3"), _PATIENCE_S), bytes(shown)
            for key, page in ((b"\x1b[C", "2/3"), (b"\r", "3/3"), (b"\x1b[D", "2/3")):
                shown.clear()
                os.write(terminal, key)
                assert wait_until(lambda page=page: has(page), 20), bytes(shown)
            os.write(terminal, b"q")
            assert wait_until(lambda: has("to play it back"), 20), bytes(shown)
            assert process.wait(20) == 0
    finally:
        os.close(terminal)


@pytest.mark.slow
@pytest.mark.limit_s(240)
def test_a_puzzle_from_the_hole_to_the_solution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On two processes; that it is run on each of `ranks` is in tests/unit/test_puzzle_command.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "PUZZLES", (replace(PUZZLES[0], ranks=(2,)), *PUZZLES[1:]))

    def puzzle(*words: str) -> tuple[int, str]:
        return command.puzzle(words), capsys.readouterr().out

    assert puzzle("1")[0] == 0
    path = tmp_path / "puzzles/p01_shift.py"
    path.write_text(
        path.read_text().replace("    ...\n", "    comm.recv(arrived, src=left)\n    comm.send(mine, dst=right)\n")
    )
    code, stuck = puzzle("1")
    assert code == 1
    assert "DEADLOCK" in stuck
    assert "p01_shift.py" in stuck
    assert "not yet" in stuck

    path.write_text(puzzle("1", "--solution")[1])
    code, solved = puzzle("1")
    assert code == 0, solved
    assert "solved. Next: `lockstep puzzle 2`" in solved
    assert f"1 of {len(PUZZLES)} are solved" in puzzle()[1]


# ------------------------------------------------------------------ without `lockstep learn`


@pytest.mark.slow
@pytest.mark.limit_s(240)
@pytest.mark.parametrize(
    "names",
    [[name for name in LESSONS if name not in ("checkpoint", "pitfalls")], ["checkpoint"]],
    ids=["twelve", "checkpoint"],
)
def test_lessons_run_with_torchrun(names: list[str], tmp_path: Path) -> None:
    """`pitfalls` starts twelve jobs of two: it takes minutes, and nothing of it depends on who started it."""
    flags = ["--standalone", "--nproc-per-node", "2", "--max-restarts", str(int(names == ["checkpoint"]))]
    program = Path(__file__).parents[1] / "torchrun_lessons.py"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *flags, str(program), *names],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=230,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in names:
        golden = (GOLDEN / f"{name}.txt").read_text().partition("--- 3 ranks")[0]
        titles = re.findall(r"(?m)^\d+\. (.*)$", golden)
        assert titles
        assert [title for title in titles if f"\n{title}\n" not in done.stdout] == [], name
    assert list(tmp_path.glob("lockstep-*")) == [], "what the lessons kept is gone"


_FAILS = """
from lockstep.learn.stage import Stage, run

def lesson(stage: Stage) -> None:
    (stage.folder / "kept").touch()
    raise ValueError("the lesson's own")

run(lesson)
"""


@pytest.mark.parametrize(("restarts", "left"), [("1", ["kept"]), ("0", [])])
def test_what_a_lesson_kept_is_there_for_the_ranks_that_are_started_again(
    restarts: str, left: list[str], tmp_path: Path
) -> None:
    """A rank that fails because another was killed is ended by torchrun, or not yet: it deletes nothing."""
    environ = os.environ | {"TMPDIR": str(tmp_path), "TORCHELASTIC_MAX_RESTARTS": restarts}
    done = subprocess.run([sys.executable, "-c", _FAILS], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ValueError: the lesson's own" in done.stderr
    assert [path.name for path in tmp_path.glob("lockstep-lesson-*/*")] == left
