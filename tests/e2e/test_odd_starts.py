"""Commands that are started where something usual is missing, or stopped before they have come far."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chaos import TINY
from command_runs import Run, children, is_alive, wait_for

pytestmark = pytest.mark.limit_s(120)

_COMMAND = [sys.executable, "-m", "lockstep"]

# each rank writes down where its standard streams lead
_STREAMS = """
import os, sys
rank = os.environ["RANK"]
print("a line of rank", rank, flush=True)
print("a complaint of rank", rank, file=sys.stderr, flush=True)
with open(f"rank-{rank}", "w") as file:
    print(*(os.readlink(f"/proc/self/fd/{n}") for n in range(3)), repr(sys.stdin.read()), file=file)
sys.exit(int(sys.argv[1]) if rank == "1" else 0)
"""


def _in_shell(redirection: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    shell = ["sh", "-c", f'exec "$@" {redirection}', "sh"]
    return subprocess.run([*shell, *_COMMAND, *words], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("closed", "code"), [((1,), 0), ((2,), 0), ((0, 1, 2), 1)], ids=str)
def test_closed_streams_lead_nowhere_and_change_no_run(tmp_path: Path, closed: tuple[int, ...], code: int) -> None:
    (tmp_path / "streams.py").write_text(_STREAMS)
    redirection = " ".join(f"{number}{'<' if number == 0 else '>'}&-" for number in closed)
    done = _in_shell(redirection, "run", "--record=kept", "-n2", "streams.py", str(code), folder=tmp_path)
    assert done.returncode == code, done
    for rank in (0, 1):
        found = (tmp_path / f"rank-{rank}").read_text().split()
        assert found[3] == "''"
        assert all(found[number] == "/dev/null" for number in closed if number < 2), "a worker's stderr goes to a file"
        assert (f"a line of rank {rank}" in done.stdout) == (1 not in closed)
        assert (f"a complaint of rank {rank}" in done.stderr) == (2 not in closed)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [("--version",), ("--help",), ("samples", "nowhere"), ("run",)], ids=" ".join)
def test_closed_streams_change_no_exit_code(tmp_path: Path, words: tuple[str, ...]) -> None:
    expected = _in_shell("", *words, folder=tmp_path).returncode
    assert _in_shell("<&- >&- 2>&-", *words, folder=tmp_path).returncode == expected


@pytest.mark.parametrize("words", [(), ("--help",), ("--version",), ("demo",)], ids=" ".join)
def test_reader_that_has_gone_is_no_traceback(tmp_path: Path, words: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as nobody:
        done = subprocess.run([*_COMMAND, *words], stdout=nobody, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    with open("/dev/full", "w") as full:
        done = subprocess.run([*_COMMAND, *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert re.fullmatch(r"lockstep: \S+: No space left on device\n", done.stderr)


@pytest.mark.parametrize("columns", ["1", "5", "8", "0", "many"])
def test_help_has_an_end_in_any_width(columns: str) -> None:
    environ = {**os.environ, "COLUMNS": columns}
    done = subprocess.run([*_COMMAND, "report", "--help"], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "-" in done.stdout


# ------------------------------------------------------------------ without a folder

_LOSES_IT = """
import os, shutil, signal, sys, time
print(f"rank {os.environ['RANK']} is up: pid {os.getpid()}\\n", end="", flush=True)
if os.environ["RANK"] == "1":
    shutil.rmtree(os.getcwd())
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
_LOST = "the current folder was deleted: change to one that is there, by cd"


@pytest.mark.parametrize(
    "words", [("run", "-n2", "../x.py"), ("train",), ("doctor",), ("report",), ("puzzle", "1")], ids=" ".join
)
def test_deleted_folder_is_one_sentence(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "x.py").write_text("")
    (tmp_path / "here").mkdir()
    shell = ["sh", "-c", 'rmdir ../here && exec "$@"', "sh", *_COMMAND, *words]
    done = subprocess.run(shell, cwd=tmp_path / "here", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"lockstep: {_LOST}\n")


def test_folder_that_is_deleted_during_a_run_is_said_at_the_restart(tmp_path: Path) -> None:
    (tmp_path / "loses_it.py").write_text(_LOSES_IT)
    (tmp_path / "here").mkdir()
    shell = ["sh", "-c", 'cd here && exec "$@"', "sh", *_COMMAND]
    words = ("run", "--record=off", "-n2", "--max-restarts=3", "../loses_it.py")
    done = subprocess.run([*shell, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"lockstep: {_LOST}"
    assert "restart 1 of 3" in done.stderr
    assert not any(is_alive(int(pid)) for pid in re.findall(r"pid (\d+)", done.stdout))


# ------------------------------------------------------------------ names that are no UTF-8

_OTHER_BYTES = os.fsdecode(b"caf\xe9")
_GUARDED = """
import sys
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1 and len(sys.argv) > 1:
    raise ValueError(sys.argv[1])
dist.barrier()
dist.destroy_process_group()
"""


def test_script_whose_name_is_no_text_is_run_and_guarded(tmp_path: Path) -> None:
    folder, name = tmp_path / _OTHER_BYTES, f"{_OTHER_BYTES}.py"
    folder.mkdir()
    (folder / name).write_text(_GUARDED)
    good, bad = (
        subprocess.run([*_COMMAND, "run", "-n2", name, *words], cwd=folder, capture_output=True, text=True, check=False)
        for words in ((), (_OTHER_BYTES,))
    )
    assert (good.returncode, bad.returncode) == (0, 1), good.stderr + bad.stderr
    at = rf"caf\\udce9\.py:{_GUARDED.splitlines().index('    raise ValueError(sys.argv[1])') + 1}"
    assert re.search(rf"rank 1 raised at {at}:\n +ValueError: caf\\udce9\n", bad.stderr), bad.stderr
    (found,) = (folder / ".lockstep").glob("*/finding.txt")
    assert "ValueError: caf\\udce9" in found.read_text()
    for done in (good, bad):
        assert "lockstep: report: " in done.stderr
        assert "GUARD" not in done.stderr


def test_folder_whose_name_no_checkpoint_can_keep_is_refused_before_training(tmp_path: Path) -> None:
    command = [*_COMMAND, "train", f"--out={_OTHER_BYTES}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    said = "lockstep: --out caf\\udce9: it is no UTF-8, as a checkpoint keeps it: rename it\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ stopped at once

# it interrupts itself once it has a fork server and a folder of its own
_HAS_ALL = """
import os, signal, sys, time
import lockstep.launch.launcher as launcher, lockstep.launch.torchrun_flags as flags
from lockstep.cli import main
from lockstep.launch.processes import children

def interrupt(*_):
    if os.listdir(os.environ["TMPDIR"]):
        with open(os.environ["STARTED"], "w") as file:
            file.write(" ".join(map(str, children())))
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(600)

launcher.local_config = flags.read_flags = interrupt
main(sys.argv[1:])
"""


@pytest.mark.parametrize("words", [("run", "x.py"), ("train", "--out=new")], ids=lambda words: words[0])
@pytest.mark.parametrize("is_late", [False, True])
def test_interrupt_while_it_starts_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, words: tuple[str, ...], is_late: bool
) -> None:
    (tmp_path / "x.py").write_text("import time\ntime.sleep(600)\n")
    (tmp_path / "has_all.py").write_text(_HAS_ALL)
    (tmp_path / "temporary").mkdir()
    launcher = [str(tmp_path / "has_all.py"), *words] if is_late else ["-m", "lockstep", *words]
    places = {"TMPDIR": "temporary", "XDG_CACHE_HOME": "cache", "STARTED": "started"}
    environ = {**os.environ, **{name: str(tmp_path / place) for name, place in places.items()}}
    before = set(os.listdir("/dev/shm"))
    with subprocess.Popen(
        [sys.executable, *launcher],
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        if not is_late:
            wait_for(lambda: children(run.pid) or run.poll() is not None, "it has begun")
            (tmp_path / "started").write_text(" ".join(map(str, children(run.pid))))
            run.send_signal(signal.SIGINT)
        said, complaints = run.communicate()
    assert (run.returncode, complaints) == (130, "lockstep: stopped while the processes were starting\n")
    assert said == ("lockstep: training in new\n" if words[0] == "train" else "")
    started = [int(pid) for pid in (tmp_path / "started").read_text().split()]
    assert started
    wait_for(lambda: not any(map(is_alive, started)), "the fork server was gone")
    left = {path.name for path in tmp_path.iterdir()} - {"cache"}
    assert left == {"has_all.py", "started", "temporary", "x.py"}
    assert list((tmp_path / "temporary").iterdir()) == []
    assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("lockstep")}


# it is interrupted while a module is imported, which could swallow an exception, or die of it with a traceback
_WHILE_IT_IMPORTS = """
import os, runpy, signal, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

module = sys.argv.pop(1)
sys.meta_path.insert(0, Interrupt())
runpy.run_module("lockstep", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    "module", ["lockstep.cli", "typing", "lockstep.launch.words", "lockstep.cli.run", "argparse", "torch"]
)
def test_interrupt_of_an_import_is_one_sentence(tmp_path: Path, module: str) -> None:
    (tmp_path / "x.py").write_text("print('it ran')\n")
    command = [sys.executable, "-c", _WHILE_IT_IMPORTS, module, "run", "x.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    has_begun = module == "torch"
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == f"lockstep: stopped{' while the processes were starting' * has_begun}\n"


def test_interrupt_of_a_command_that_starts_nothing_is_one_sentence(tmp_path: Path) -> None:
    code = "import os, signal, sys, lockstep.cli as cli; cli._command = lambda *_: os.kill(os.getpid(), signal.SIGINT)"
    command = [sys.executable, "-c", f"{code}; sys.exit(cli.main(['report']))"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "lockstep: stopped\n")


def test_module_that_is_not_in_its_package_is_said_as_python_says_it(tmp_path: Path) -> None:
    run = Run(tmp_path, "run", "--nproc-per-node", "2", "-m", "xml.none_such", warm=True)
    said = run.end(1)
    assert "_Error" not in said
    assert re.search(r"rank \d \(pid \d+\) ended with exit code 1, .*No module named xml.none_such", said)


def test_training_whose_reader_has_gone_says_so_and_is_not_started_again(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {n} of {n * n % 97} bottles\n" for n in range(400)))
    words = ["train", "-n", "2", "--data.path=a.txt", "--out=out", *TINY, "--train.log_every=1", "--train.steps=5000"]
    process = subprocess.Popen(
        [*_COMMAND, *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    while not process.stdout.readline().startswith("step 2/"):
        assert process.poll() is None
    process.stdout.close()
    assert process.stderr is not None
    said = process.stderr.read()
    assert process.wait() == 2
    process.stderr.close()
    assert re.search(r"^lockstep: the reader of what is printed has gone, .* `lockstep train ... > FILE`", said, re.M)
    assert "restart" not in said
    log = (tmp_path / "out" / "profile" / "launch.jsonl").read_text()
    assert "rank 0 gave up: the reader of what is printed has gone" in log
    told = r"rank 1 gave up: (in step \d+ rank 0 raised: ConfigError: the reader|RAISED in step \d+\.  Culprit: rank 0)"
    assert re.search(told, log), f"what the other rank was told of it, by its transport or by its guard: {log}"
    assert "SystemExit" not in log
