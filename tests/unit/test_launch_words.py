"""`lockstep run`'s words, and what it finds out about a program before it starts it."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import train as training
from lockstep.cli.train import choose_processes, newest_step, parse_train, read_processes
from lockstep.comm.pulse import NONE
from lockstep.errors import ConfigError, LaunchError
from lockstep.launch import starter as starting
from lockstep.launch import torchrun_flags
from lockstep.launch.fork_server import Start
from lockstep.launch.guess import guess_program, guess_threads
from lockstep.launch.job import Launch
from lockstep.launch.launcher import LOOPBACK
from lockstep.launch.loopback import LoopbackRendezvous
from lockstep.launch.preload import is_installed, modules_to_preload
from lockstep.launch.processes import WorkerProcess
from lockstep.launch.program import Program, read_program
from lockstep.launch.torchrun_flags import read_flags
from lockstep.launch.worker import stop_signals
from lockstep.observe.last_words import sees_another
from lockstep.observe.profile.window import RUN
from lockstep.observe.torch_flight_recorder import TIMING
from lockstep.recipes import gpt2


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("train.py", "tool", "plain"):
        (tmp_path / name).write_text("import torch\n")
    (tmp_path / "tool").chmod(0o755)
    (tmp_path / "pack").mkdir()
    return tmp_path


def read(folder: Path, *words: str) -> Launch:
    return read_flags(words, folder / "logs")


# ------------------------------------------------------------------ flags


@pytest.mark.parametrize("flag", ["-n", "--nproc", "--nproc-per-node"])
def test_number_of_processes_has_the_short_names_that_train_has(folder: Path, flag: str) -> None:
    assert read(folder, flag, "3", "train.py").config.nproc_per_node == 3


def test_torchruns_words_mean_what_they_mean_there(folder: Path) -> None:
    job = read(
        folder, "--nproc_per_node=3", "--max-restarts", "2", "-r", "0:3,1:1", "-t", "2", "--log-dir", "kept",
        "--role=r", "--local-ranks-filter=0,2", "--duplicate-stdout-filters=a,b", "train.py", "--nproc-per-node", "9",
    )  # fmt: skip
    assert job.program == Program("script", "train.py", ("--nproc-per-node", "9"))
    assert (job.config.nproc_per_node, job.config.max_restarts, job.config.role) == (3, 2, "r")
    assert job.config.duplicate_stdout_filters == ["a", "b"]
    assert job.supervision.policy.max_restarts == 2
    assert job.supervision.policy.min_processes == 3
    assert (folder / "kept").is_dir()
    assert not (folder / "logs").exists()
    destinations = job.config.logs_specs.reify({rank: {} for rank in range(3)})  # pyright: ignore
    assert [bool(destinations.stdouts[rank]) for rank in range(3)] == [True, True, False]
    assert set(destinations.tee_stderrs) == {0, 2}
    assert job.modules == ("torch",)
    assert "SIGUSR1" in job.config.signals_to_handle


@pytest.mark.parametrize(
    ("words", "backend", "port"),
    [
        ((), LOOPBACK, 0),
        (("--standalone",), LOOPBACK, 0),
        (("--standalone", "--master-port=5"), LOOPBACK, 0),
        (("--master-port=5123",), LOOPBACK, 5123),
        (("--master-port=5123", "--master-addr=localhost"), LOOPBACK, 5123),
        (("--master-port=5123", "--master-addr=10.1.2.3"), "static", 0),
        (("--nnodes=2", "--node-rank=1", "--master-addr=h"), "static", 0),
        (("--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-endpoint=h:1"), "c10d", 0),
        (("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"), "c10d", 0),
    ],
)
def test_one_machine_meets_itself_on_the_loopback_interface(
    words: tuple[str, ...], backend: str, port: int, folder: Path
) -> None:
    job = read(folder, *words, "train.py")
    assert (job.config.rdzv_backend, job.port) == (backend, port)


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (("-m", "pack.mod", "-x"), Program("module", "pack.mod", ("-x",))),
        (("--no-python", "./tool", "a"), Program("command", "./tool", ("a",))),
        (("--no-python", "sh", "-c"), Program("command", "sh", ("-c",))),
        (("--run-path", "train.py", "a"), Program("script", "train.py", ("a",))),
    ],
)
def test_what_is_run(words: tuple[str, ...], program: Program, folder: Path) -> None:
    assert read(folder, *words).program == program
    assert read_program(program.words()) == program


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("nothing.py",), "there is no script 'nothing.py'"),
        (("--start-method=fork", "train.py"), "--start-method fork"),
        (("--no-python", "-m", "tool"), "leave one out"),
        (("--no-python", "tool"), "--no-python tool: there is no such command on PATH; ./tool is here"),
        (("--no-python", "plain"), "on PATH; if ./plain is meant: chmod +x ./plain"),
        (("--no-python", "./plain"), "on PATH; if ./plain is meant: chmod +x ./plain"),
        (("--no-python", "none-such"), "--no-python none-such: there is no such command on PATH"),
        (("--record=tool", "train.py"), "--record tool cannot hold a record: it is a file. Name a folder, or off"),
        (("--record=tool/x", "train.py"), "--record tool/x cannot hold a record: Not a directory"),
        (("--nnodes=2", "--max-restarts=1", "train.py"), "use --rdzv-backend c10d"),
        (("--nnodes=2", "--node-rank=5", "train.py"), "--node-rank 5, but --nnodes 2: machines are 0 to 1"),
        (("--nnodes=2", "--node-rank=-1", "train.py"), "--node-rank -1, but --nnodes 2"),
        (("--nnodes=2", "--master-port=0", "train.py"), "ports are 1 to 65535"),
        (("--master-port=99999", "train.py"), "ports are 1 to 65535"),
        (("--nnodes=2", "--rdzv-backend=c10d", "train.py"), "needs --rdzv-endpoint HOST:PORT"),
        (("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=h:99999", "train.py"), "--rdzv-endpoint h:99999"),
        (("--nproc-per-node=3:2", "train.py"), "--nproc-per-node 3:2"),
        (("--nproc-per-node=0:2", "train.py"), "--nproc-per-node 0:2"),
        (("--nproc-per-node=auto:2", "train.py"), "--nproc-per-node auto:2"),
        (("-n", "many", "train.py"), "--nproc-per-node many: it takes a number of processes, a range like 2:4, auto"),
        (("-n", "1.5", "train.py"), "--nproc-per-node 1.5: it takes a number"),
        (("-n", "-1", "train.py"), "--nproc-per-node -1: at least one process has to run"),
        (("-n", "xpu", "train.py"), "--nproc-per-node xpu: torch sees none here. Name a number"),
        (("-n",), "-n needs a value. `lockstep run --help` explains"),
        (("--nproc-per-node=0", "train.py"), "at least one process"),
        *((("--nnodes", text, "train.py"), f"--nnodes {text}: it takes a number of machines from 1, or a range")
          for text in ("2:1", "0", "-1", "0:2", "x", "1:2:3", "2.5", "")),
        (("--max-restarts=-1", "train.py"), "--max-restarts -1: it is a number from 0"),
        (("--max-restarts=x", "train.py"), "--max-restarts takes a whole number, not 'x'. `lockstep run --help`"),
        (("--grace-s=x", "train.py"), "--grace-s takes a number, not 'x'"),
        (("--shutdown-timeout=-1", "train.py"), "--shutdown-timeout -1: it is a number from 0"),
        (("--log-dir=/proc/none/such", "train.py"), "--log-dir /proc/none/such cannot be made: No such file"),
        (("--local-ranks-filter=a", "train.py"), "comma-separated"),
        (("--redirects=7", "train.py"), "--redirects 7: it takes 0, 1, 2 or 3, or ranks with theirs: 0:3,1:1"),
        (("--tee=0:3,1", "train.py"), "--tee 0:3,1: it takes"),
        (("--grace-s=-1", "train.py"), "--grace-s -1"),
        *((("--signals-to-handle", f"SIGTERM,{name}", "train.py"), f"'{name}' is no signal that can be heard")
          for name in ("SIGWHAT", "SIGKILL", "SIGSTOP", "SIG_IGN")),
        (("--monitor-interval=0", "train.py"), "--monitor-interval"),
        (("--monitor-interval=nan", "train.py"), "--monitor-interval nan: it is a number of seconds above 0"),
        (("--logs-specs=none_such", "train.py"), "none_such"),
        (("--event-log-handler=none_such", "train.py"), "--event-log-handler none_such"),
        (("--numa-binding=node", "train.py"), "there is none here"),
        (("--nproc-per-node=9999", "train.py"), "so many would only kill it"),
        (("--nproc-per-node=2",), "missing: SCRIPT. `lockstep run --help` explains"),
        (("--node", "2", "train.py"), "--node is not the whole name of an option: write one of --node-rank, --"),
        (("--wacth", "train.py"), "unknown option --wacth: did you mean --watch?"),
        (("--guard=onn", "train.py"), "--guard takes one of 'off', 'on', 'strict', 'check', not 'onn'"),
        (("pack",), "pack is a folder: name the script in it"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(words: tuple[str, ...], answer: str, folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(folder, *words)
    assert answer in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "answer"),
    [
        ("LOCKSTEP_GUARD=onn", "the guard is one of off, on, strict, check"),
        ("LOCKSTEP_HANG_S=0", "it is a number of seconds above 0"),
        ("LOCKSTEP_REPLICA_EVERY=-1", "give a number of steps, or 0 for never"),
        ("LOCKSTEP_SHM=of", "it is on or off"),
        ("LOCKSTEP_ENV=of", "it can be off (use arguments only) or auto"),
        ("LOCKSTEP_PROFILE=10", "LOCKSTEP_PROFILE 10: it takes the first and the last step"),
        ("LOCKSTEP_LOG=wand", "LOCKSTEP_LOG wand: there is no logger 'wand'"),
        ("LOCKSTEP_RUN=tool", "LOCKSTEP_RUN tool cannot hold a record: it is a file"),
    ],
)
def test_variable_that_means_nothing_is_refused_before_anything_starts(
    variable: str, answer: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*variable.split("="))
    with pytest.raises(ConfigError) as caught:
        read(folder, "train.py")
    assert answer in str(caught.value)


def test_module_that_there_is_not_is_said_as_python_says_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read(folder, "-m", "none_such.train")
    assert caught.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith(f"lockstep: No module named none_such: it is looked for in {folder}, on PYTHONPATH, and ")
    assert said.count("\n") == 1


def test_what_lockstep_sets_is_not_said_to_come_from_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read(folder, "train.py").supervision.origins[TIMING] == "launcher"
    monkeypatch.setenv(TIMING, "0")
    assert TIMING not in read(folder, "train.py").supervision.origins


def test_record_that_nobody_asked_for_is_left_out_where_it_cannot_be(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "runs").write_text("a file where a folder has to be")
    job = read(folder, "train.py")
    assert job.supervision.variables[RUN] == ""
    said = capsys.readouterr().err
    assert "this run leaves no record" in said
    assert "--record DIR names another place" in said
    assert said.count("\n") == 1
    job.supervision.log.begin()
    assert capsys.readouterr().err == ""


def test_script_that_cannot_be_read_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != ("train.py", os.R_OK))  # root may read all
    with pytest.raises(ConfigError, match=r"^train\.py cannot be read by this user"):
        read(folder, "train.py")


def test_port_that_is_taken_is_said_with_who_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError) as caught:
            LoopbackRendezvous(port=port).next_rendezvous()
    assert re.match(rf"port {port} of 127.0.0.1 is taken by pid {os.getpid()} \(.+\). Leave out", str(caught.value))


def test_run_is_not_told_of_the_record_of_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str | None] = []

    def launch(*_: object) -> int:
        found.append(os.environ.get(RUN))
        return 0

    monkeypatch.setattr(training, "_launch", launch)
    monkeypatch.setenv(RUN, "elsewhere")
    assert training.train(["-n", "2", "--out", str(folder / "out")]) == 0
    assert found == [None]


def test_a_range_starts_with_the_most_and_may_shrink(folder: Path) -> None:
    job = read(folder, "-n", "2:4", "train.py", "-n", "9")
    assert job.program.arguments == ("-n", "9")
    assert job.config.nproc_per_node == 4
    assert job.supervision.policy.min_processes == 2


def test_shutdown_timeout_asks_the_others_first(folder: Path) -> None:
    plain, given = read(folder, "train.py").supervision, read(folder, "--shutdown-timeout=7", "train.py").supervision
    assert (plain.asks_first, given.asks_first, given.failure_grace_s) == (False, True, 7.0)


def test_older_torch_has_other_flags(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = torchrun_flags.get_args_parser()  # before 2.13: with a port, and without --shutdown-timeout
    for action in made._actions:
        action.default = 29500 if action.dest == "master_port" else action.default
        if action.dest == "shutdown_timeout":
            made._actions.remove(action)
    for name in ("--shutdown-timeout", "--shutdown_timeout"):
        del made._option_string_actions[name]
    monkeypatch.setattr(torchrun_flags, "get_args_parser", lambda: made)
    job = read(folder, "train.py")
    assert (job.config.rdzv_backend, job.port, job.supervision.asks_first) == (LOOPBACK, 0, False)


def test_signals_that_are_ignored_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import signal

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert stop_signals([signal.SIGTERM, signal.SIGHUP]) == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)


# ------------------------------------------------------------------ a guess before torch is there


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (("--nproc-per-node", "2", "train.py", "a", "-m"), Program("script", "train.py", ("a", "-m"))),
        (("-m", "pack", "--x"), Program("module", "pack", ("--x",))),
        (("--no-python", "tool"), None),
        (("--start=fresh", "train.py"), None),
        (("--help",), None),
    ],
)
def test_guess_is_right_where_it_matters(words: tuple[str, ...], program: Program | None, folder: Path) -> None:
    if words[-1] == "-m":
        words = words[:-1]
        program = Program("script", "train.py", ("a",))
    assert guess_program(words) == program
    if program is not None:
        assert read(folder, *words).program == program


@pytest.mark.parametrize(
    ("words", "environ", "many"),
    [
        ((), {}, False),
        (("--nproc-per-node=2",), {}, True),
        (("--nproc_per_node", "4"), {}, True),
        (("--nproc", "4"), {}, True),
        (("--nproc-per-node", "1"), {}, False),
        ((), {"PET_NPROC_PER_NODE": "gpu"}, True),
        (("--nproc-per-node=2",), {"OMP_NUM_THREADS": "8"}, False),
    ],
)
def test_threads_are_limited_for_several_processes(words: tuple[str, ...], environ: dict[str, str], many: bool) -> None:
    assert guess_threads(words, environ) == ({"OMP_NUM_THREADS": "1"} if many else {})


# ------------------------------------------------------------------ what a program imports


def test_installed_modules_are_found_through_the_programs_own_files(tmp_path: Path) -> None:
    files = {
        "train.py": "import os, numpy as n, torch.nn as nn\nfrom mine import model\nfrom safetensors import torch as t",
        "mine/__init__.py": "from __future__ import annotations\nfrom . import data\nimport mpi4py",
        "mine/model.py": "try:\n    import transformers\nexcept ImportError:\n    import rich\nfrom .data import *",
        "mine/data.py": "from ..mine.deep.er import x\ndef f():\n    import rich\nimport numpy\nimport train",
        "mine/deep/er.py": "if 1:\n    from tyro import cli\nelse:\n    import broken",
        "broken.py": "import (",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = modules_to_preload(Program("script", "train.py"), tmp_path)
    assert [name for name in found if is_installed(name)] == [
        "numpy", "torch.nn", "safetensors", "safetensors.torch", "transformers", "tyro", "tyro.cli",
    ]  # fmt: skip
    from_model = modules_to_preload(Program("module", "mine.model"), tmp_path)
    assert [name for name in from_model if is_installed(name)][:1] == ["transformers"]
    assert set(from_model) <= set(found)
    assert modules_to_preload(Program("command", "train.py"), tmp_path) == []
    assert modules_to_preload(Program("script", "not_there.py"), tmp_path) == []


def test_only_installed_packages_are_imported_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "surely_mine.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [is_installed(name) for name in ("torch.nn", "lockstep.comm", "os", "this", "surely_mine", "nowhere")] == [
        True, True, False, False, False, False,
    ]  # fmt: skip


# ------------------------------------------------------------------ how workers are started


class _Server:
    """A fork server that answers as it is told."""

    def __init__(self, problem: str | None = "", workers: list[WorkerProcess | None] | None = None) -> None:
        self._problem, self.workers, self.closed, self.pid = problem, workers or [], 0, 17

    def problem(self, wait: object) -> str | None:
        return self._problem

    def start(self, start: Start, wait: object) -> WorkerProcess | None:
        return self.workers.pop(0)

    def suits(self, *settings: object) -> bool:
        return True

    def close(self) -> None:
        self.closed += 1


def starter_with(
    monkeypatch: pytest.MonkeyPatch, servers: list[_Server], said: list[str], program: Program, is_warm: bool = True
) -> tuple[starting.Starter, list[str]]:
    commands: list[str] = []
    monkeypatch.setattr(starting, "ForkServer", lambda *settings: servers.pop(0))
    monkeypatch.setattr(starting, "start_fresh", lambda start, command: commands.append(command[-1]) or "fresh")
    made = starting.Starter(
        program, modules=[], is_warm=is_warm, wait=lambda descriptor, limit_s: True, say=said.append
    )
    return made, commands


def test_fork_server_that_dies_is_replaced_and_one_with_threads_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "may_have_accelerator", lambda: False)
    program, said = Program("script", "train.py"), []
    start = Start(program, {}, "", "", "")
    worker: Any = "forked"
    dead, alive = _Server(workers=[None]), _Server(workers=[worker, worker])
    made, commands = starter_with(monkeypatch, [dead, alive], said, program)
    assert [made.start(start), made.start(start)] == ["forked", "forked"]
    assert (dead.closed, alive.closed, commands, said) == (1, 0, [], [])
    made.close()
    assert alive.closed == 1
    threaded = _Server(problem="it has threads")
    made, commands = starter_with(monkeypatch, [threaded], said, program)
    assert [made.start(start), made.start(start)] == ["fresh", "fresh"]
    assert (threaded.closed, commands) == (1, ["train.py", "train.py"])
    assert said == ["workers are started as fresh interpreters, which takes longer: it has threads"]
    mortal = [_Server(workers=[None]), _Server(problem=None), _Server(workers=[None])]
    made, commands = starter_with(monkeypatch, list(mortal), said, program)
    assert made.start(start) == "fresh"
    assert [server.closed for server in mortal] == [1, 1, 1]
    assert said[1:] == ["the fork server has ended 3 times: one worker is started as a fresh interpreter"]


@pytest.mark.parametrize(
    "case", ["command", "not_there.py", "tool.pyc", "folder", "PYTHON_EXEC", "accelerator", "--start fresh"]
)
def test_where_a_fork_cannot_be_a_fresh_interpreter_is_started(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "tool.pyc").touch()
    (folder / "folder").mkdir()
    monkeypatch.setattr(starting, "has_accelerator", lambda: case == "accelerator")
    monkeypatch.setenv("PYTHON_EXEC", "other" if case == "PYTHON_EXEC" else sys.executable)
    name = case if case in ("not_there.py", "tool.pyc", "folder") else "train.py"
    program = Program("command" if case == "command" else "script", name)
    said: list[str] = []
    made, commands = starter_with(monkeypatch, [], said, program, is_warm=case != "--start fresh")
    assert made.start(Start(program, {}, "", "", "")) == "fresh"
    assert (commands, said, made._server) == ([name], [], None)


def test_another_ranks_end_is_told_from_an_error_of_ones_own() -> None:
    closed = "[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:39839. This is typically"
    assert sees_another(RuntimeError(closed))
    assert not sees_another(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not sees_another(KeyError("Connection closed by peer"))


# ------------------------------------------------------------------ lockstep train -n


@pytest.mark.parametrize(("text", "numbers"), [(None, (0, 0)), ("3", (3, 3)), ("1:4", (1, 4))])
def test_number_of_processes_or_a_range(text: str | None, numbers: tuple[int, int]) -> None:
    assert read_processes(text) == numbers


@pytest.mark.parametrize("text", ["0", "-1", "0:3", "3:1", "x", "1:", "1:2:3", "", ":2", "9999999"])
def test_impossible_number_of_processes_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="-n"):
        read_processes(text)


@pytest.mark.parametrize(
    ("numbers", "cores", "chosen"), [((1, 4), 8, 4), ((1, 3), 8, 2), ((3, 4), 2, 4), ((2, 2), 1, 2), ((1, 7), 1, 4)]
)
def test_most_processes_that_divide_the_batch(
    numbers: tuple[int, int], cores: int, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    monkeypatch.setattr("lockstep.cli.train.may_have_accelerator", lambda: False)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    run = gpt2.tiny()
    run = replace(run, train=replace(run.train, batch=8, microbatch=None))
    assert choose_processes(run, *numbers) == chosen
    with pytest.raises(ConfigError, match="cannot be divided among 7 processes"):
        choose_processes(run, 5, 7)


# ------------------------------------------------------------------ where another start goes on


@pytest.mark.parametrize(
    ("resume", "checkpoints", "step"),
    [
        ("", (), NONE),
        ("", ("step-00000025-g1",), NONE),
        ("auto", (), NONE),
        ("auto", ("step-00000025-g1", "step-00000130-g2", "step-00000030-g3.partial", "notes"), 130),
        ("elsewhere:7", ("step-00000025-g1",), None),
    ],
)
def test_step_from_which_a_run_goes_on_before_its_ranks_have_told(
    resume: str, checkpoints: tuple[str, ...], step: int | None, tmp_path: Path
) -> None:
    for name in checkpoints:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "manifest.json").touch()
    assert newest_step(parse_train([f"--out={tmp_path}", f"--resume={resume}"])) == step


def test_directory_of_checkpoints_that_cannot_be_read_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    assert newest_step(parse_train([f"--out={tmp_path}", "--resume=auto"])) is None
