"""lockstep.init() on real processes: every way in, and every wrong environment."""

from __future__ import annotations

import contextlib
import io
import os
import re
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep.comm.launcher_variables import slurm_port
from lockstep.comm.place import Place
from lockstep.comm.preflight import await_listener, unmet
from lockstep.comm.torch_names import process_group_of
from lockstep.comm.waiting import wait_until
from lockstep.errors import CollectiveTimeout, ConfigError, EnvironmentProblems
from lockstep.testing.worlds import run_processes
from ports import free_port

CLEAN: dict[str, str | None] = dict.fromkeys(
    [
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS",
        "GLOO_SOCKET_IFNAME", "LOCKSTEP_ENV", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID",
    ]
)  # fmt: skip


@pytest.fixture
def port() -> int:
    return free_port()


def plain(rank: int, world_size: int, port: int, address: str = "localhost", **more: str) -> dict[str, str | None]:
    place = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": address, "MASTER_PORT": port}
    return {**CLEAN, **{name: str(value) for name, value in place.items()}, **more}


def attempt(rank: int, arguments: list[dict[str, Any]] | None = None, **shared: Any) -> dict[str, Any]:
    """Call init() in this process and say what came of it. `arguments`: one set for each rank."""
    settings = {"timeout_s": 20.0, "start_timeout_s": 10.0, **shared, **(arguments[rank] if arguments else {})}
    heard = io.StringIO()
    with contextlib.redirect_stderr(heard):
        try:
            comm = lockstep.init(**settings)
        except lockstep.errors.LockstepError as error:
            return {"error": type(error), "text": str(error), "missing": getattr(error, "missing", None)}
    with comm:
        total = torch.tensor([10**comm.rank])
        comm.all_reduce(total)
        found = {
            "total": total.item(),
            "rank": (comm.rank, comm.world_size, dist.get_rank(), dist.get_world_size()),
            "place": comm.place,
            "threads": torch.get_num_threads(),
            "said": heard.getvalue(),
            "transport": comm.transport.name,
            "timeout_s": (comm.timeout_s, torch_timeout(comm)),
            "listens": listening_addresses(),
        }
        half = comm.split(comm.rank)
        assert half is not None
        found["split_timeout_s"] = (half.timeout_s, torch_timeout(half))
    return {**found, "open_after": dist.is_initialized()}


def torch_timeout(comm: lockstep.Communicator) -> timedelta | None:
    group = process_group_of(comm)
    return None if group is None else group._get_backend(comm.device).options._timeout


def listening_addresses() -> set[str]:
    """Where this process listens, in the kernel's own notation."""
    inodes = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(f"/proc/self/fd/{entry}")))
    found = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].split(":")[0])
    return found


LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


def errors_of(results: list[dict[str, Any]], kind: type[BaseException]) -> list[str]:
    for result in results:
        assert result.get("error") is kind, result
    return [result["text"] for result in results]


# ---------------------------------------------------------------------- ways in


@pytest.mark.parametrize(("switch", "transport"), [("on", "shm"), ("off", "gloo")])
def test_plain_environment(port: int, switch: str, transport: str) -> None:
    env = [{**plain(rank, 2, port), "LOCKSTEP_SHM": switch} for rank in range(2)]
    results = run_processes(2, attempt, env=env, connect=False)
    for rank, result in enumerate(results):
        assert result["total"] == 11
        assert result["rank"] == (rank, 2, rank, 2)
        place = result["place"]
        assert (place.launcher, place.local_rank, place.local_world_size, place.port) == ("environment", rank, 2, port)
        assert result["transport"] == transport
        assert result["timeout_s"] == (20.0, timedelta(seconds=20))
        assert result["split_timeout_s"] == (20.0, None if transport == "shm" else timedelta(seconds=20))
        assert result["threads"] == max(1, len(os.sched_getaffinity(0)) // 2)
        assert result["listens"] <= LOOPBACK, "nothing listens beyond this machine"
        assert not result["open_after"]
    assert results[1]["said"] == "", "rank 0 speaks for all"
    assert results[0]["said"].count("\n") == 1
    assert "lockstep: 2 ranks (environment: RANK, WORLD_SIZE)" in results[0]["said"]
    assert f"localhost:{port}" in results[0]["said"]


def again(rank: int, port: int) -> list[Any]:
    """init() twice while open, and again after closing, also with the ranks exchanged."""
    first = lockstep.init(rank=rank, world_size=2, address="127.0.0.1", port=port, timeout_s=20, verbose=False)
    with pytest.raises(ConfigError) as caught:
        lockstep.init(rank=rank, world_size=2, address="127.0.0.1", port=port)
    first.close()
    first.close()
    totals = []
    for rounds in range(3):
        with lockstep.init(
            rank=rank, world_size=2, address="127.0.0.1", port=port, timeout_s=20, verbose=False
        ) as comm:
            total = torch.tensor([comm.rank + rounds])
            comm.all_reduce(total)
            totals.append(total.item())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with lockstep.init(verbose=False) as comm:
        totals.append(comm.world_size)
    still_there = dist.is_initialized()
    dist.destroy_process_group()
    return [str(caught.value), totals, still_there, listening_addresses() <= LOOPBACK]


def test_init_twice_and_again(port: int) -> None:
    for text, totals, still_there, on_loopback in run_processes(2, again, port, env=CLEAN, connect=False):
        assert "it was called before" in text
        assert re.search(r"test_init\.py:\d+", text)
        assert totals == [1, 3, 5, 1]
        assert still_there
        assert on_loopback


def over_own_group(rank: int, folder: str) -> dict[str, Any]:
    """The user's own group is taken over, kept, and not contradicted."""
    store = dist.FileStore(f"{folder}/own", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=17))
    heard = io.StringIO()
    with contextlib.redirect_stderr(heard), lockstep.init() as comm:
        seen = (comm.rank, comm.world_size, comm.timeout_s, comm.place and comm.place.local_rank)
        total = torch.tensor([10**comm.rank])
        comm.all_reduce(total)
    left_alone = torch.tensor([1.0])
    dist.all_reduce(left_alone)
    with pytest.raises(EnvironmentProblems) as caught:
        lockstep.init(rank=1 - rank, world_size=5, port=3)
    with lockstep.init(timeout_s=9, verbose=False) as shorter:
        limit = shorter.timeout_s
    dist.destroy_process_group()
    return {
        "seen": seen, "total": total.item(), "left": left_alone.item(), "limit": limit, "said": heard.getvalue(),
        "problems": len(caught.value.problems),
    }  # fmt: skip


def test_over_the_users_own_group(tmp_path: Path) -> None:
    results = run_processes(2, over_own_group, str(tmp_path), env=CLEAN, connect=False)
    for rank, result in enumerate(results):
        assert result["seen"] == (rank, 2, 17.0, rank)
        assert (result["total"], result["left"], result["limit"], result["problems"]) == (11, 2.0, 9.0, 3)
    assert "torch.distributed.init_process_group" in results[0]["said"]


class Heard(io.StringIO):
    """Standard error that leaves a file where it is told who is waited for."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def write(self, text: str) -> int:
        if "waiting for" in text:
            self.file.touch()
        return super().write(text)


def over_own_group_late(rank: int, folder: str, backend: str) -> str:
    """Rank 1 comes once rank 0 has said that it waits for it."""
    dist.init_process_group(backend, store=dist.FileStore(f"{folder}/own", 2), rank=rank, world_size=2)
    heard = Heard(Path(folder, "told"))
    assert rank == 0 or wait_until(heard.file.exists, 60)
    with contextlib.redirect_stderr(heard), lockstep.init() as comm:
        comm.barrier()
    dist.destroy_process_group()
    return heard.getvalue()


@pytest.mark.parametrize("backend", ["gloo", "lockstep"])
def test_who_is_late_over_the_users_own_group_is_said(backend: str, tmp_path: Path) -> None:
    """With no guard to do so, as under torchrun."""
    said = run_processes(2, over_own_group_late, str(tmp_path), backend, env=CLEAN, connect=False)
    at = "the store of init_process_group"
    assert re.match(rf"lockstep: waiting for rank 1 at {at}, up to \d+ s; seen: rank 0 on \S+ \(pid \d+\)\n", said[0])
    assert "waiting" not in said[1]


def test_slurm_step() -> None:
    job = next(job for job in range(os.getpid(), os.getpid() + 1000) if is_free(slurm_port(job, 0)))
    step = {"SLURM_JOB_ID": job, "SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 2, "SLURM_NTASKS": 2, "SLURM_NODEID": 0}
    named = {"SLURM_STEP_NODELIST": "n[07]", "SLURM_STEP_TASKS_PER_NODE": "2"}
    env = [
        {
            **CLEAN,
            **{name: str(value) for name, value in step.items()},
            **named,
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
        }
        for rank in range(2)
    ]
    results = run_processes(2, attempt, env=env, connect=False)
    assert [result["total"] for result in results] == [11, 11]
    assert "lockstep: 2 ranks (slurm: SLURM_PROCID, SLURM_STEP_NUM_TASKS)" in results[0]["said"]
    assert all(result["listens"] <= LOOPBACK for result in results)


def is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


def test_meeting_in_a_file(tmp_path: Path) -> None:
    arguments = [{"rank": rank, "world_size": 2, "file": str(tmp_path / "meet")} for rank in range(2)]
    results = run_processes(2, attempt, arguments, env=CLEAN, connect=False)
    assert [result["total"] for result in results] == [11, 11]
    (text,) = set(
        errors_of(
            run_processes(
                2,
                attempt,
                [{**a, "file": str(tmp_path / "no" / "meet")} for a in arguments],
                env=CLEAN,
                connect=False,
            ),
            EnvironmentProblems,
        )
    )
    assert "does not exist or cannot be written" in text


def test_one_process_needs_no_network() -> None:
    results = run_processes(
        2, attempt, env=[{**CLEAN, "OMP_NUM_THREADS": "1"}, {**plain(1, 2, 1), "LOCKSTEP_ENV": "off"}], connect=False
    )
    for result in results:
        assert result["rank"] == (0, 1, 0, 1)
        assert "lockstep: 1 rank (one process)" in result["said"]
        assert result["listens"] <= LOOPBACK
    assert results[0]["threads"] == 1, "the user's OMP_NUM_THREADS counts"
    assert results[1]["threads"] == len(os.sched_getaffinity(0))


# ---------------------------------------------------------------------- wrong environments


def test_ranks_that_disagree_on_the_world_size(port: int) -> None:
    results = run_processes(2, attempt, env=[plain(0, 2, port), plain(1, 3, port)], connect=False)
    (text,) = set(errors_of(results, EnvironmentProblems))
    assert re.search(r"disagree on the world size at localhost:\d+: rank . on \S+ \(pid \d+\) was started with", text)
    assert "with 2" in text
    assert "with 3" in text


def test_a_rank_started_twice(port: int) -> None:
    results = run_processes(2, attempt, env=[plain(0, 2, port), plain(0, 2, port)], connect=False)
    (text,) = set(errors_of(results, EnvironmentProblems))
    assert re.search(r"rank 0 was claimed twice at localhost:\d+: by pid \d+ on \S+ and by pid \d+", text)


def test_nobody_opens_the_meeting_point(port: int) -> None:
    results = run_processes(2, attempt, env=[plain(1, 2, port), plain(1, 2, port)], connect=False, start_timeout_s=1.0)
    for text in errors_of(results, EnvironmentProblems):
        assert f"rank 0 is not at localhost:{port}" in text
        assert "refuses connections" in text


def test_a_rank_that_never_arrives_is_named(port: int) -> None:
    results = run_processes(2, attempt, env=[plain(0, 3, port), plain(1, 3, port)], connect=False, start_timeout_s=2.0)
    (text,) = set(errors_of(results, CollectiveTimeout))
    assert re.search(
        r"rank 2 never arrived .* in 2 s; seen: rank 0 on \S+ \(pid \d+\), rank 1 on \S+ \(pid \d+\)", text
    )
    assert {result["missing"] for result in results} == {(2,)}


@contextlib.contextmanager
def silent() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        yield listener.getsockname()[1]


def serve(listener: socket.socket, reads: int, reply: bytes) -> None:
    with contextlib.suppress(OSError):  # the listener was closed: the test is over
        while True:
            with listener.accept()[0] as connection, contextlib.suppress(ConnectionError):
                if reads:
                    connection.recv(reads)
                connection.sendall(reply)


@contextlib.contextmanager
def server(reads: int, reply: bytes) -> Iterator[int]:
    """Reads once, answers and hangs up."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        thread = threading.Thread(target=serve, args=(listener, reads, reply))
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize(
    ("listener", "expected"),
    [
        (silent, "no torch store replied in 1 s"),
        (lambda: server(100, b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"), "Choose another port"),
        (lambda: server(0, b""), "it hangs up"),
        (lambda: server(0, b"SSH-2.0-OpenSSH_9.2"), "it says b'SSH-2.0-OpenSSH_9.2'"),
    ],
    ids=["silent", "web server", "hangs up", "ssh"],
)
def test_a_port_that_answers_but_is_not_this_job(listener: Any, expected: str) -> None:
    with listener() as port:
        env = [plain(rank, 2, port) for rank in range(2)]
        results = run_processes(2, attempt, env=env, connect=False, timeout_s=1.0, start_timeout_s=1.0)
    first, second = errors_of(results, EnvironmentProblems)
    assert f"rank 0 must open port {port} of localhost, but it is in use by another program" in first
    assert f"port {port} of localhost" in second
    assert "answers, but is not this job" in second
    assert expected in second


def beside_a_store(rank: int, port: int, run: str | None) -> dict[str, Any]:
    """`attempt`, while a store of another job listens at the port."""
    store = dist.TCPStore("127.0.0.1", port, None, True, timedelta(seconds=5), False) if rank == 0 else None
    if store is not None and run is not None:
        store.set("lockstep/host", f'{{"run": "{run}", "pid": 5, "host": "elsewhere"}}')
    return attempt(rank, start_timeout_s=2.0)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (None, "a torch store without a lockstep rank 0"),
        ("other", "it belongs to run 'other', pid 5 on elsewhere; this is 'mine'"),
    ],
    ids=["torch", "lockstep"],
)
def test_a_port_of_another_job(port: int, run: str | None, expected: str) -> None:
    env = [plain(rank, 2, port, TORCHELASTIC_RUN_ID="mine") for rank in range(2)]
    first, second = errors_of(run_processes(2, beside_a_store, port, run, env=env, connect=False), EnvironmentProblems)
    assert f"rank 0 must open port {port} of localhost, but it is in use: {expected}" in first
    assert f"port {port} of localhost answers, but is not this job: {expected}" in second
    assert f". Choose another port: MASTER_PORT={port % 65535 + 1} for every rank" in first


def test_all_problems_at_once() -> None:
    wrong = plain(3, 2, 29500, address="no-such-host.invalid")
    results = run_processes(
        2, attempt, env=wrong, connect=False, threads=0, start_timeout_s=-1.0, backend="nccl", device="cpu"
    )
    for text in errors_of(results, EnvironmentProblems):
        for expected in (
            "(5 problem(s))",
            "RANK=3, but",
            "no-such-host.invalid",
            "threads=0",
            "start_timeout_s=-1",
            "nccl",
        ):
            assert expected in text
        assert "torchrun --standalone" in text


def test_an_address_of_another_machine(port: int) -> None:
    env = [plain(rank, 2, port, address="192.0.2.1") for rank in range(2)]  # a network kept for examples
    first, second = errors_of(
        run_processes(2, attempt, env=env, connect=False, start_timeout_s=1.0), EnvironmentProblems
    )
    assert "192.0.2.1) is no address of this machine" in first
    assert f"rank 0 is not at 192.0.2.1:{port}" in second


def test_packets_that_nobody_answers() -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        for _ in range(4):  # a full queue: the kernel drops what comes next, as a firewall does
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        place = Place(1, 2, 0, 1, 0, "localhost", port, "", "environment", ())
        found = await_listener(place, ["127.0.0.1"], 0.3, print)
    assert found.result == "silent"
    assert f"rank 0 is not at localhost:{port}: 127.0.0.1 does not answer" in unmet(place, found, 0.3)
    assert "firewall" in unmet(place, found, 0.3)


def test_a_start_that_is_refused_shows_the_users_line_and_no_way_through_our_code() -> None:
    with pytest.raises(EnvironmentProblems, match="rank=5, but") as caught:
        lockstep.init(rank=5, world_size=2, address="127.0.0.1", port=29500)
    assert caught.value.__suppress_context__
    assert [Path(entry.path).name for entry in caught.traceback] == [Path(__file__).name, "init.py"]


def test_missing_variables() -> None:
    results = run_processes(2, attempt, env={**CLEAN, "RANK": "0"}, connect=False)
    for text in errors_of(results, EnvironmentProblems):
        assert "(3 problem(s))" in text
        assert all(f"{name} is not set" in text for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the GPU that must be missing")
def test_a_gpu_that_is_not_there() -> None:
    results = run_processes(2, attempt, env=CLEAN, connect=False, device="cuda:1")
    assert all("torch sees 0 GPU(s)" in text for text in errors_of(results, EnvironmentProblems))
