"""`lockstep run` as users run it: scripts that know nothing of lockstep, real signals, real restarts."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from command_runs import Run, children, is_alive, wait_for
from ports import free_port

pytestmark = pytest.mark.limit_s(120)

_TWO = ("--nproc-per-node", "2")

# what users have: torch, DDP, gloo, a snapshot; a DataLoader with spawned workers, which need the script again
_DDP = """
import os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return torch.full((4,), float(i))

def main(steps):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    print(f"rank {rank} is up: pid {os.getpid()} start {os.environ['TORCHELASTIC_RESTART_COUNT']}\\n", end="")
    model = DDP(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = 0
    if os.path.exists("snapshot.pt"):
        snapshot = torch.load("snapshot.pt")
        model.module.load_state_dict(snapshot["model"])
        first = snapshot["step"]
    again = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"  # with workers, which have to find this script once more
    several = {"num_workers": 1, "multiprocessing_context": "spawn"} if rank and again else {}
    rows = list(DataLoader(Numbers(), batch_size=4, **several))
    for step in range(first, steps):
        model(rows[step % 2]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "step": step + 1}, "snapshot.new")
            os.replace("snapshot.new", "snapshot.pt")
            print(f"step {step + 1}")
        if step == 9 and os.environ["TORCHELASTIC_RESTART_COUNT"] != "2":
            dist.barrier()
            while not os.path.exists(f"go{os.environ['TORCHELASTIC_RESTART_COUNT']}"):
                time.sleep(0.02)
    print(f"rank {rank} done, weights {float(model.module.weight.sum()):.6f}\\n", end="")
    dist.destroy_process_group()

if __name__ == "__main__":
    main(int(sys.argv[1]))
"""

_FAILS = """
import os, sys, time
print("words", sys.argv[1:], os.environ["LOCAL_RANK"], flush=True)
if os.environ["RANK"] == "1":
    print("complaint", file=sys.stderr)
    {}[
        "lost"]
time.sleep(600)
"""

_WAITS = """
import os, signal, sys, time
end = sys.argv[1]
def stop(number, frame):
    print(f"rank {os.environ['RANK']} heard {number}\\n", end="", flush=True)
    if end != "stay":
        sys.exit(int(end))
for number in (signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, stop)
signal.signal(signal.SIGTERM, stop)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Python loses an interrupt in what it calls after a fork
child = os.fork()
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
if child == 0:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(600)
    os._exit(0)
print(f"rank {os.environ['RANK']} is up: pid {os.getpid()}\\nchild pid {child}\\n", end="", flush=True)
while True:
    time.sleep(0.1)  # a signal that comes just before a sleep is handled after it
"""

# signals come to the launcher from when the rank has ended until there is no launcher any more
_HAUNTS = """
import os, signal, time
launcher, rank = os.getppid(), os.getpid()
if os.fork() == 0:
    os.setsid()
    while os.path.exists(f"/proc/{rank}"):
        time.sleep(0.0005)
    try:
        while True:
            os.kill(launcher, signal.SIGTERM)
            time.sleep(0.0005)
    except ProcessLookupError:
        os._exit(0)
raise SystemExit(75)
"""

_STARTS = """
import os, subprocess, time
for kind, apart in (("child", False), ("daemon's child", True)):
    child = subprocess.Popen(["sleep", "600"], start_new_session=apart)
    print(f"rank {os.environ['RANK']} starts {kind} pid {child.pid}\\n", end="", flush=True)
print(f"rank {os.environ['RANK']} is up: pid {os.getpid()}\\n", end="", flush=True)
if os.environ["RANK"] == "2":
    os._exit(0)
time.sleep(600)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    texts = {"ddp": _DDP, "fails": _FAILS, "waits": _WAITS, "haunts": _HAUNTS, "starts": _STARTS}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    runs: list[Run] = []

    def one(*words: str, **variables: str) -> Run:
        runs.append(Run(tmp_path, "run", *words, **variables))
        return runs[-1]

    yield one
    for run in runs:
        run.close()
    for pid in processes_in(tmp_path):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def offspring_in(run: Run) -> list[int]:
    """What the ranks of `_WAITS` and `_STARTS` have started, and leave to itself."""
    return [int(pid) for pid in re.findall(r"child pid (\d+)", run.text())]


def processes_in(folder: Path) -> list[int]:
    """What still runs there: of such offspring also that of which nobody was told."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours
            if Path(os.readlink(link)) == folder:
                found.append(int(link.parent.name))
    return found


def listening(pids: list[int]) -> list[str]:
    """Addresses at which these processes accept connections, in the kernel's words."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
            except FileNotFoundError:
                continue
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes]


def test_stock_script_survives_kills_of_a_rank_and_of_the_fork_server(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start(*_TWO, "--max-restarts=1", "--log-dir=logs", "--redirects=0:2", "ddp.py", "20")
    run.await_text("step 10\n")
    agent = run.process.pid
    ranks = run.pids()
    server = next(pid for pid in children(agent) if pid not in ranks)
    addresses = listening([agent, server, *ranks])
    assert addresses
    loopback = {"0100007F", "00000000000000000000000001000000"}
    host = socket.inet_aton(socket.gethostbyname(socket.gethostname()))[::-1].hex().upper()  # Gloo's own choice
    assert set(addresses) <= loopback | {host} - {"00000000"}
    os.kill(server, signal.SIGKILL)
    wait_for(lambda: set(children(agent)) - {server, *ranks}, "another fork server is loading", run.text)
    victim = run.pid_of(1)
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: len(run.pids()) == 4, "both ranks came back", run.text)
    assert is_alive(run.pid_of(0))
    assert set(run.pids()[2:]) <= set(children(agent))
    (tmp_path / "go1").touch()
    said = run.end(0)
    assert run.said()[:1] == [f"rank 1 (pid {victim}) was killed by SIGKILL; rank 0 was ended by the launcher"]
    assert said.count("step 11\n") == 1
    assert said.count("step 20\n") == 1
    assert len(set(re.findall(r"rank \d done, weights (\S+)", said))) == 1
    written = sorted(str(path.relative_to(tmp_path / "logs")) for path in (tmp_path / "logs").rglob("*.log"))
    assert [re.sub("^[^/]+/", "", path) for path in written] == ["attempt_0/0/stderr.log", "attempt_1/0/stderr.log"]


@pytest.mark.parametrize("how", ["warm", "fresh"])
def test_exception_is_told_with_its_line_and_flags_are_honoured(
    how: str, start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start(f"--start={how}", "-t", "3", "--nproc_per_node=2", "--role=me", "fails.py", "--x", "${local_rank}")
    said = run.end(1)
    assert "[me0]:words ['--x', '0'] 0\n" in said
    assert "[me1]:words ['--x', '1'] 1\n" in said
    assert "[me1]:complaint\n" in said
    assert "[me1]:KeyError: 'lost'\n" in said
    assert said.count("Traceback") == 1
    assert re.fullmatch(
        r"rank 1 \(pid \d+\) failed at fails.py:6: KeyError: 'lost'; rank 0 was ended by the launcher", run.said()[0]
    )
    assert "--max-restarts 0" in run.said()[1]


def test_signals_reach_all_once_and_75_asks_for_more(start: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "waits_module").mkdir()
    (tmp_path / "waits_module" / "__main__.py").write_text(_WAITS)
    run = start(*_TWO, "-m", "waits_module", "75")
    wait_for(lambda: len(run.pids()) == 2, "both came up", run.text)
    run.signal(signal.SIGUSR1)
    said = run.end(75)
    for rank in (0, 1):
        assert said.count(f"rank {rank} heard {int(signal.SIGUSR1)}") == 1
    assert run.said() == ["stopping; once more ends all processes at once"]


_SAVES = """
import os, signal, sys, time
def save(number, frame):
    os.mkdir(f"saved-{os.environ['RANK']}")
    sys.exit(75)
signal.signal(signal.SIGHUP, save)
print("up", flush=True)
while True:
    time.sleep(0.1)  # not signal.pause(), which misses a signal that comes just before it
"""


def test_terminal_that_is_closed_lets_the_ranks_save(tmp_path: Path) -> None:
    (tmp_path / "saves.py").write_text(_SAVES)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "lockstep", "run", "--record=off", *_TWO, "saves.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as run:
        os.close(theirs)
        said = b""
        while said.count(b"up") < 2:
            said += os.read(ours, 1024)
        os.close(ours)  # from now on nothing can be written there
        run.send_signal(signal.SIGHUP)
        assert run.wait() == 75
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}


_GOES_ON = """
import os, signal, sys, time
print(f"rank {os.environ['RANK']} is up: pid {os.getpid()}\\n", end="", flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system in memory of 4 MiB."""
    path = tmp_path_factory.mktemp("small")
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)]
    made = subprocess.run(mount, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"no file system can be mounted: {made.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_run_goes_on_where_the_folder_for_temporary_files_has_become_full(tmp_path: Path, small: Path) -> None:
    (tmp_path / "goes_on.py").write_text(_GOES_ON)
    words = ("run", "--record=off", *_TWO, "--max-restarts=1", "goes_on.py")
    with contextlib.closing(Run(tmp_path, *words, TMPDIR=str(small))) as run:
        wait_for(lambda: len(run.pids()) == 2, "both came up", run.text)
        with contextlib.suppress(OSError), (small / "others").open("wb", buffering=0) as others:
            while others.write(bytes(4096)):
                continue
        (tmp_path / "go").touch()
        run.end(0)
        said = run.said()
    assert said[0] == "the guards hear less of how ranks end: No space left on device; make room in $TMPDIR"
    assert "was killed by SIGKILL" in said[1]
    assert said[2] == "restart 1 of 1 after SIGKILL with 2 processes"


@pytest.mark.parametrize("words", [("run", *_TWO, "saves.py"), ("run", "saves"), ("train", "-n", "2")], ids=" ".join)
def test_too_few_open_files_are_one_sentence_before_anything_is_loaded(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "saves.py").write_text(_SAVES)
    (tmp_path / "saves").write_text(_SAVES)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    command = [sys.executable, "-m", "lockstep", *words]
    said = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (12, most)),
        check=False,
    )
    assert said.returncode == 2
    assert re.fullmatch(
        r"lockstep: a process may open 12 files here, but a launcher needs \d+. Type: .+\n", said.stderr
    )


def test_nothing_is_left_of_a_launcher_that_was_killed_nor_of_its_workers(start: Callable[..., Run]) -> None:
    run = start(*_TWO, "--grace-s=600", "waits.py", "stay")
    wait_for(lambda: len(run.pids()) == 2, "both came up", run.text)
    run.process.send_signal(signal.SIGTERM)
    run.await_text("rank 0 heard 15")
    run.await_text("rank 1 heard 15")
    assert all(map(is_alive, run.pids()))
    assert all(map(is_alive, offspring_in(run))), "the signal is for the ranks alone"
    others = [pid for pid in children(run.process.pid) if pid not in run.pids()]
    run.process.kill()
    run.end(-signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, others)), "the fork server was gone", run.text)
    wait_for(lambda: not any(map(is_alive, offspring_in(run))), "the workers' children were gone", run.text)


@pytest.mark.parametrize("how", ["warm", "fresh"])
def test_killed_launcher_takes_along_what_its_workers_have_started_but_no_daemons(
    start: Callable[..., Run], how: str
) -> None:
    """Nor what a rank has left that ended well, which stays as without a launcher."""
    run = start(f"--start={how}", "--nproc-per-node=3", "--record=off", "starts.py")
    wait_for(lambda: len(offspring_in(run)) == 6 and len(run.pids()) == 3, "all had started theirs", run.text)
    plain = {int(r): int(p) for r, p in re.findall(r"rank (\d) starts child pid (\d+)", run.text())}
    daemons = [pid for pid in offspring_in(run) if pid not in plain.values()]
    wait_for(lambda: not Path(f"/proc/{run.pid_of(2)}").exists(), "it was seen that rank 2 ended well", run.text)
    (heir,) = [pid for pid in children(run.process.pid) if "while read" in Path(f"/proc/{pid}/cmdline").read_text()]
    run.process.kill()
    run.end(-signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, (heir, plain[0], plain[1]))), "the plain children were gone", run.text)
    assert len(daemons) == 3
    assert all(map(is_alive, [*daemons, plain[2]]))


def test_run_that_was_shown_is_stopped_where_the_watcher_is_killed(start: Callable[..., Run], tmp_path: Path) -> None:
    watcher = start("--watch", "--record=kept", "waits.py", "0")
    wait_for(lambda: len(children(watcher.process.pid)) == 1, "the run was started", watcher.text)
    (launcher,) = children(watcher.process.pid)
    wait_for(lambda: len(children(launcher)) == 3, "its rank, its fork server and its heir came up", watcher.text)
    left = [launcher, *children(launcher)]
    watcher.process.kill()
    watcher.end(-signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, left)), "the run was gone", watcher.text)
    assert '{"over": ' in (tmp_path / "kept" / "launch.jsonl").read_text(), "it was asked to stop, not killed"


def test_interrupt_that_comes_to_the_watcher_alone_stops_the_run(start: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "kept" / "output.txt").mkdir(parents=True)
    watcher = start("--watch", "--record=kept", "waits.py", "0")
    watcher.await_text("watch kept at")
    (launcher,) = children(watcher.process.pid)
    watcher.process.send_signal(signal.SIGINT)
    said = watcher.end(130)
    assert not is_alive(launcher)
    assert "what was printed is not kept in kept: Is a directory" in said
    assert "stopped" in watcher.said()[-1], "the end of what was printed is shown all the same"


_SAVES_SLOWLY = """
import os, signal, sys, time
from lockstep.comm.pulse import open_pulse

print(f"rank {os.environ['RANK']} is up: pid {os.getpid()}\\n", end="", flush=True)
pulse = open_pulse(os.environ)

def save(number, frame):
    if "before" in sys.argv:
        pulse.committed(5)
    print("rank", os.environ["RANK"], "is in between", flush=True)
    time.sleep(600)

signal.signal(signal.SIGINT, save)
while True:
    time.sleep(0.02)
"""


@pytest.mark.parametrize(
    ("saved", "words", "said"),
    [
        ("before", (), "the processes were ended at once; the newest checkpoint is that of step 5"),
        ("never", (), "the processes were ended at once; what they had not saved is lost"),
        (
            "never",
            ("--grace-s=1",),
            "the processes were ended when their time was over; what they had not saved is lost",
        ),
    ],
)
def test_what_is_said_of_ranks_that_were_killed_while_they_stopped_is_true(
    tmp_path: Path, saved: str, words: tuple[str, ...], said: str
) -> None:
    (tmp_path / "saves_slowly.py").write_text(_SAVES_SLOWLY)
    with contextlib.closing(Run(tmp_path, "run", "--record=off", *_TWO, *words, "saves_slowly.py", saved)) as run:
        wait_for(lambda: len(run.pids()) == 2, "both came up", run.text)
        run.signal(signal.SIGINT)
        for rank in (0, 1):
            run.await_text(f"rank {rank} is in between")
        if not words:
            run.signal(signal.SIGINT)
        run.end(130)
        assert run.said() == ["stopping; once more ends all processes at once", said]


def test_second_signal_kills_at_once_with_all_that_workers_started(start: Callable[..., Run]) -> None:
    run = start(*_TWO, "--grace-s=600", "waits.py", "stay")
    wait_for(lambda: len(run.pids()) == 2, "both came up", run.text)
    run.process.send_signal(signal.SIGTERM)
    run.await_text("rank 1 heard 15")
    run.process.send_signal(signal.SIGINT)
    run.end(130)
    assert run.said()[-1] == "the processes were ended at once; what they had not saved is lost"
    wait_for(lambda: not any(map(is_alive, offspring_in(run))), "their children were gone", run.text)
    assert len(offspring_in(run)) == 2


def test_signals_in_its_last_second_change_no_exit_code(start: Callable[..., Run]) -> None:
    start("haunts.py").end(75)


def test_machine_that_waits_for_others_can_be_stopped(start: Callable[..., Run]) -> None:
    words = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=two")
    run = start(*words, "--local-addr=127.0.0.1", "waits.py", "0")
    wait_for(lambda: listening([run.process.pid]), "it waits for the other machine", run.text)
    run.process.send_signal(signal.SIGINT)
    run.end(130)
    assert run.said()[-1] == "stopped while the processes were starting"


def test_stopped_process_counts_as_dead_and_a_range_shrinks(start: Callable[..., Run]) -> None:
    port = f"--master-port={free_port()}"  # each start has to take it anew
    run = start("--nproc-per-node=1:2", port, "--max-restarts=3", "--stopped-limit-s=0.5", "waits.py", "0")
    for number, (strike, started) in enumerate(
        ((signal.SIGSTOP, 2), (signal.SIGKILL, 4), (signal.SIGKILL, 6)), start=1
    ):
        wait_for(lambda count=started: len(run.pids()) == count, f"start {number} came up", run.text)
        os.kill(run.pid_of(1), strike)
    wait_for(lambda: len(run.pids()) == 7, "one process came up", run.text)
    run.signal(signal.SIGHUP)
    said = run.end(0)
    told = " ".join(run.said())
    assert "was ended by its launcher: stopped (SIGSTOP) for 0.5 s" in told
    assert "restart with 1 process instead of 2" in told.replace("processes instead", "process instead")
    assert said.count("rank 0 heard 1\n") == 1


def test_machines_restart_and_stop_together(start: Callable[..., Run]) -> None:
    endpoint = f"--rdzv-endpoint=localhost:{free_port()}"
    words = ("--nnodes=2", "--rdzv-backend=c10d", endpoint, "--rdzv-id=two", "--max-restarts=1")
    one, other = (start(*words, "--local-addr=127.0.0.1", "waits.py", "75") for _ in range(2))
    wait_for(lambda: one.pids() and other.pids(), "both machines came up", lambda: one.text() + other.text())
    os.kill(one.pids()[0], signal.SIGKILL)
    wait_for(lambda: len(one.pids()) == len(other.pids()) == 2, "both came back", lambda: one.text() + other.text())
    one.process.send_signal(signal.SIGTERM)
    one.end(75)
    other.end(75)
    assert "was killed by SIGKILL" in one.said()[0]
    began, stopped, *_ = other.said()
    assert began == "a machine has come, or begun anew: the ranks here begin anew with it"
    assert stopped == f"{socket.gethostname()} was asked to stop by SIGTERM: stopping"
