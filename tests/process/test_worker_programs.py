"""A worker, forked or fresh, runs a program exactly as Python runs it: the same words, the same end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.comm.waiting import wait_until
from lockstep.launch.fork_server import Start, why_not_fork
from lockstep.launch.processes import ForkServer, WorkerProcess, adopting_orphans, reap_strangers, start_fresh, wait_for
from lockstep.launch.program import Program, python_command
from lockstep.launch.worker import AGENT_PID, ERROR_FILE, read_failure
from lockstep.observe.process_guard import FLIGHT

_LIMIT_S = 30.0

SCRIPTS = {
    "facts": """
        import os, sys, sibling
        print(sys.argv, sys.path[0], sys.path[1:] == [p for p in sys.path[1:] if p], __file__, __name__, __spec__)
        print(__builtins__.__name__, __cached__, __package__, __doc__, sibling.WORD, os.getcwd(), "main" in globals())
        print(sys.modules["__main__"].__dict__ is globals(), "lockstep.launch.fork_server" in str(sys.path))
        """,
    "no end of line": 'print("a", end=""); import sys; sys.stderr.write("b")',
    "exit none": "import sys; sys.exit()",
    "exit number": "raise SystemExit(3)",
    "exit large": "raise SystemExit(256 + 7)",
    "exit words": 'import sys; print("out"); sys.exit("words")',
    "exit at once": "import os; os._exit(4)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "aborted": "import os; os.abort()",
    "interrupted": "raise KeyboardInterrupt",
    "raises": 'def f(x):\\n    return x / 0\\nprint("before")\\nf(1)',
    "raises twice": 'try:\\n    {}["a"]\\nexcept KeyError as e:\\n    raise ValueError("b") from e',
    "no syntax": "print('before')\\ndef f(:\\n    pass",
    "exit order": """
        import atexit, threading, weakref
        class Thing: pass
        thing = Thing()
        weakref.finalize(thing, print, "finalized")
        atexit.register(print, "first registered")
        atexit.register(lambda: print("last registered", __name__))
        started = threading.Event()
        def late():
            started.wait(); threading.main_thread().join(); print("thread outlived main", __name__)
        threading.Thread(target=late).start()
        started.set()
        print("main ends")
        """,
    "hooks": """
        import sys
        sys.excepthook = lambda kind, error, trace: print("hook", kind.__name__, trace.tb_lineno)
        1 / 0
        """,
    "children": """
        import concurrent.futures, multiprocessing, os, pickle, sys
        class Point:
            def __init__(self, x): self.x = x
            def double(self): return Point(2 * self.x)
        def work(point): return point.double()
        if __name__ == "__main__":
            print(pickle.loads(pickle.dumps(Point(4))).x)
            for method in ("fork", "spawn", "forkserver"):
                context = multiprocessing.get_context(method)
                with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
                    print(method, [point.x for point in pool.map(work, [Point(1), Point(2)])])
        """,
    "annotations": """
        from __future__ import annotations
        import dataclasses, inspect, typing
        @dataclasses.dataclass
        class Item:
            size: int = 3
        def shown(): return 1
        print(typing.get_type_hints(Item), inspect.getsource(shown), Item(4))
        """,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    inner = folder / "scripts"
    (inner / "pack").mkdir(parents=True)
    (inner / "sibling.py").write_text("WORD = 'sibling'\n")
    for name, text in SCRIPTS.items():
        lines = text.replace("\\n", "\n").splitlines()
        margin = 8 if text.startswith("\n") else 0
        (inner / f"{name.replace(' ', '_')}.py").write_text("\n".join(line[margin:] for line in lines) + "\n")
    (inner / "pack" / "__init__.py").write_text("print('pack', __name__)\n")
    (inner / "pack" / "near.py").write_text("WORD = 'near'\n")
    module = "import multiprocessing as m, os, sys\nfrom .near import WORD\ndef f(): print('child', WORD, flush=True)\n"
    main = (
        "if __name__ == '__main__':\n    print(sys.argv, WORD, __spec__.name, sys.path[0] == os.getcwd(), flush=True)\n"
    )
    spawn = (
        "    p = m.get_context('spawn').Process(target=f)\n    p.start()\n    p.join()\n    sys.exit(p.exitcode + 9)\n"
    )
    (inner / "pack" / "__main__.py").write_text(module + main + spawn)
    (inner / "pack" / "broken.py").write_text("import not_there_at_all\n")
    return inner


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with adopting_orphans():
        server = ForkServer(["numpy"], {**os.environ, AGENT_PID: str(os.getpid()), "OMP_NUM_THREADS": "1"})
        try:
            yield server
        finally:
            server.close()


def at_once(descriptor: int, limit_s: float) -> bool:
    """As a launcher waits that nobody disturbs."""
    return bool(wait_for([descriptor], min(limit_s, _LIMIT_S)))


@pytest.fixture(scope="module")
def known(server: ForkServer) -> list[int]:
    """The fork server, and the ranks that earlier tests have left in their pools."""
    assert server.problem(at_once) == ""
    return _children()


def outcome(
    start: Callable[[Start], WorkerProcess | None], program: Program, files: Path, known: list[int]
) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of a worker; nothing of it stays."""
    paths = [files / name for name in ("out", "err", "error.json")]
    for path in paths:
        path.unlink(missing_ok=True)
    environ = {**os.environ, AGENT_PID: str(os.getpid()), ERROR_FILE: str(paths[2]), "RANK": "5"}
    worker = start(Start(program, environ, os.getcwd(), str(paths[0]), str(paths[1])))
    assert worker is not None
    assert os.getpgid(worker.pid) == os.getsid(worker.pid) == worker.pid
    try:
        assert wait_for([worker.handle], _LIMIT_S), f"it runs for ever: {paths[0].read_text()}{paths[1].read_text()}"
        assert worker.reap()
    finally:
        worker.kill()
        while not worker.reap():
            wait_for([worker.handle], _LIMIT_S)
    assert wait_until(lambda: reap_strangers(known) or set(_children()) <= set(known), _LIMIT_S)
    assert worker.exit_code is not None
    return worker.exit_code, paths[0].read_text(), paths[1].read_text()


def by_python(program: Program) -> tuple[int, str, str]:
    """The same of Python itself."""
    words = ["-m", program.name] if program.kind == "module" else [program.name]
    command = [sys.executable, "-u", *words, *program.arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    return done.returncode, done.stdout, done.stderr


PROGRAMS = [
    *(Program("script", f"{name.replace(' ', '_')}.py", ("a", "--b=c d")) for name in SCRIPTS),
    *(Program("module", name, ("x",)) for name in ("pack", "pack.near", "pack.broken", "pack.nowhere", "nowhere")),
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_worker_does_what_python_does(
    program: Program,
    folder: Path,
    server: ForkServer,
    known: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    assert server.problem(at_once) == ""
    code, out, err = by_python(program)

    def forked(start: Start) -> WorkerProcess | None:
        return server.start(start, at_once)

    def fresh(start: Start) -> WorkerProcess:
        return start_fresh(start, [*python_command("program"), *program.words()])

    for name, start in (("forked", forked), ("fresh", fresh)):
        did = outcome(start, program, tmp_path, known)
        assert did[:2] == (code, out), f"{name}: {did}, Python: {(code, out, err)}"
        if code == -signal.SIGABRT:
            assert "Fatal Python error: Aborted" in did[2]
        elif program.name != "interrupted.py":  # its trace begins with our own frames
            assert did[2] == err, name
        failure = read_failure(tmp_path / "error.json")
        has_raised = code == 1 and ("Error" in err or program.name == "hooks.py")
        assert (failure is not None) == has_raised
        assert failure is None or (failure.rank, failure.exit_code) == (5, 1)


def test_random_numbers_of_forked_workers_are_their_own(
    folder: Path, server: ForkServer, known: list[int], tmp_path: Path
) -> None:
    script = tmp_path / "numbers.py"
    script.write_text("import random, numpy\nprint(random.random(), numpy.random.random())\n")
    program = Program("script", str(script))
    said = [outcome(lambda start: server.start(start, at_once), program, tmp_path, known)[1] for _ in range(3)]
    drawn = " ".join(said).split()
    assert len(drawn) == len(set(drawn)) == 6


def test_worker_begins_only_when_its_launcher_knows_it(folder: Path, server: ForkServer, tmp_path: Path) -> None:
    """What a launcher that dies in the middle leaves behind: a forked process that nobody told to go."""

    class GivesUp(Exception):
        pass

    def give_up(descriptor: int, limit_s: float) -> bool:
        wait_for([descriptor], _LIMIT_S)  # the worker exists
        raise GivesUp

    marker = tmp_path / "ran"
    (tmp_path / "mark.py").write_text(f"open({str(marker)!r}, 'w')\n")
    other = ForkServer([], {**os.environ, AGENT_PID: str(os.getpid())})
    try:
        assert other.problem(at_once) == ""
        environ = {**os.environ, AGENT_PID: str(os.getpid())}
        before = _children()
        with pytest.raises(GivesUp):
            other.start(Start(Program("script", str(tmp_path / "mark.py")), environ, os.getcwd(), "", ""), give_up)
        pids = [pid for pid in _children() if pid not in before]
        for pid in pids:
            os.waitpid(pid, 0)
        assert len(pids) == 1
        assert not marker.exists()
    finally:
        other.close()


def test_server_that_has_ended_is_noticed(tmp_path: Path) -> None:
    with adopting_orphans():
        server = ForkServer([], {**os.environ, AGENT_PID: str(os.getpid())})
        try:
            assert server.problem(at_once) == ""
            start = Start(Program("script", "x.py"), dict(os.environ), os.getcwd(), "", "")
            os.kill(server._process.pid, signal.SIGSTOP)
            assert server.start(start, lambda descriptor, limit_s: bool(wait_for([descriptor], 0.1))) is None
            os.kill(server._process.pid, signal.SIGKILL)
            assert server.start(start, at_once) is None
        finally:
            server.close()
        unborn = ForkServer(["lockstep.launch.program", "antigravity_is_no_module"], {**os.environ, AGENT_PID: "1"})
        try:
            assert unborn.problem(at_once) is None  # its launcher is not pid 1
        finally:
            unborn.close()


def test_threads_that_stay_forbid_a_fork(tmp_path: Path) -> None:
    code = (
        "import threading\nfrom lockstep.launch.fork_server import why_not_fork\nprint([why_not_fork()])\n"
        "stop = threading.Event()\nthreading.Thread(target=stop.wait, name='x').start()\n"
        "print([why_not_fork()])\nstop.set()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_LIMIT_S, check=True)
    first, second = done.stdout.splitlines()
    assert first == "['']"
    assert "an import has started 1 thread(s)" in second
    assert callable(why_not_fork)


def test_the_thread_of_an_allocator_that_knows_of_forks_forbids_none(tmp_path: Path) -> None:
    """pyarrow starts it, which `datasets` imports, and so does transformers' Trainer where that is installed."""
    code = (
        "import threading\nfrom lockstep.launch.fork_server import why_not_fork\n"
        "named, stop = threading.Event(), threading.Event()\n"
        "def work():\n"
        "    with open(f'/proc/self/task/{threading.get_native_id()}/comm', 'w') as file:\n"
        "        file.write('jemalloc_bg_thd')\n"
        "    named.set()\n"
        "    stop.wait()\n"
        "threading.Thread(target=work).start()\nnamed.wait()\nprint([why_not_fork()])\nstop.set()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_LIMIT_S, check=True)
    assert done.stdout == "['']\n"


def test_command_that_is_no_python(tmp_path: Path) -> None:
    with adopting_orphans():
        known = _children()

        def fresh(start: Start) -> WorkerProcess:
            return start_fresh(start, [*python_command("program"), *start.program.words()])

        shell = Program("command", "sh", ("-c", 'echo "$RANK $0"; exit 6', "word"))
        assert outcome(fresh, shell, tmp_path, known)[:2] == (6, "5 word\n")
        code, out, err = outcome(fresh, Program("command", "no-such-command"), tmp_path, known)
        assert (code, out) == (1, "")
        assert err == "lockstep: no-such-command cannot be started: No such file or directory\n"
        (tool := tmp_path / "tool").write_text("echo nobody is named who reads this\n")
        tool.chmod(0o755)
        code, _, err = outcome(fresh, Program("command", str(tool)), tmp_path, known)
        assert code == 1
        assert err.endswith("cannot be started: Exec format error; its first line has to name who runs it, #!/bin/sh\n")


def _children() -> list[int]:
    found: list[int] = []
    for listing in Path("/proc/self/task").glob("*/children"):
        found += [int(pid) for pid in listing.read_text().split()]
    return found


_KILLED_AT_BIRTH = """
import os, signal
from lockstep.launch.fork_server import _fork_orphan
from lockstep.launch.processes import WorkerProcess, adopting_orphans, wait_for
os.setsid = lambda: os.kill(os.getpid(), signal.SIGKILL)
with adopting_orphans():
    worker = WorkerProcess(_fork_orphan())
    assert wait_for([worker.handle], 30) and worker.reap()
    print(worker.exit_code)
"""


def test_worker_that_is_killed_before_it_has_done_anything_is_known_all_the_same() -> None:
    command = [sys.executable, "-c", _KILLED_AT_BIRTH]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    assert (done.stdout, done.stderr) == ("-9\n", "")


def test_rank_whose_record_has_no_place_runs_without_a_guard(tmp_path: Path) -> None:
    (tmp_path / "ok.py").write_text("print('ran')\n")
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environ = {**os.environ, **ranks, FLIGHT: str(tmp_path / "gone"), AGENT_PID: str(os.getpid())}
    words = [*python_command("program"), *Program("script", "ok.py").words()]
    done = subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=_LIMIT_S)
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert done.stderr.startswith("lockstep: rank 1 is not guarded: [Errno 2] No such file or directory")
