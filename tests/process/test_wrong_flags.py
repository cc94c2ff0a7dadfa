"""Flags of `lockstep run` that keep machines from meeting, which are launchers of this one: each says what is wrong."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from command_runs import Run, children, is_alive, wait_for
from ports import free_port, mute_program, web_server

pytestmark = pytest.mark.limit_s(120)

Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """The launcher of one machine, whose ranks would say that they are there."""
    (tmp_path / "hello.py").write_text("print('a rank has begun', flush=True)\n")
    runs: list[Run] = []

    def one(*words: str) -> Run:
        runs.append(Run(tmp_path, "run", "--nnodes=2", *words, "--record=off", "hello.py", warm=True))
        return runs[-1]

    yield one
    for run in runs:
        run.close()


def static(number: int, port: int, *more: str, address: str = "127.0.0.1") -> tuple[str, ...]:
    return (f"--node-rank={number}", f"--master-addr={address}", f"--master-port={port}", *more)


def counting(port: int, name: str, *more: str) -> tuple[str, ...]:
    return ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id={name}", *more)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def mute() -> Iterator[int]:
    with mute_program() as port:
        yield port


@pytest.fixture
def web() -> Iterator[int]:
    with web_server() as port:
        yield port


def refuse(run: Run, pattern: str) -> None:
    """It ends by itself, says `pattern` as its last words, and has started nothing."""
    assert "a rank has begun" not in run.end(1)
    assert re.search(pattern, run.said()[-1]), run.text()


def interrupt(*runs: Run) -> None:
    """Ctrl-C ends what waits, and nothing is left."""
    left = [pid for run in runs for pid in children(run.process.pid)]
    for run in runs:
        run.process.send_signal(signal.SIGINT)
    for run in runs:
        run.end(130)
        assert run.said()[-1] == "stopped while the processes were starting"
    wait_for(lambda: not any(map(is_alive, left)), "their processes were gone")


def test_machines_at_different_ports_say_whom_they_wait_for(start: Start, port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other_port = listener.getsockname()[1]
    first, second = start(*static(0, port)), start(*static(1, other_port))
    first.await_text(rf"waiting for machine 1 at 127.0.0.1:{port}, .*here: machine 0 on .*pid {first.process.pid}\)")
    second.await_text(rf"machine 1 waits for machine 0 at 127.0.0.1:{other_port} .*refuses connections")
    interrupt(first, second)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (static(0, 0), static(0, 0), "--node-rank 0 was given twice at 127.0.0.1:"),
        (static(0, 0), static(1, 0, "--nnodes=3"), "machines disagree on --nnodes at .* with 2, .* with 3"),
        (counting(0, "one"), counting(0, "one", "--nnodes=1:2"), "machines disagree on --nnodes at .* with 1:2"),
    ],
    ids=["both are machine 0", "static of 2 and of 3", "c10d of 2 and of 1:2"],
)
def test_contradiction_ends_both(
    first: tuple[str, ...], second: tuple[str, ...], expected: str, start: Start, port: int
) -> None:
    runs = [start(*(re.sub("([=:])0$", rf"\g<1>{port}", word) if "port" in word or "endpoint" in word else word
                    for word in words)) for words in (first, second)]  # fmt: skip
    for run in runs:
        refuse(run, expected)
    assert runs[0].said()[-1] == runs[1].said()[-1]
    assert all(f"(pid {run.process.pid})" in runs[0].said()[-1] for run in runs)


def test_machines_of_runs_with_other_names_do_not_meet(start: Start, port: int) -> None:
    first, second = start(*static(0, port, "--rdzv-id=a")), start(*static(1, port, "--rdzv-id=b"))
    refuse(second, rf"belongs to run 'a' of \S+ \(pid {first.process.pid}\); this is run 'b'")
    first.await_text(rf"machine 1 on \S+ \(pid {second.process.pid}\), but with --rdzv-id 'b', not 'a'")
    interrupt(first)


def test_port_that_is_no_meeting_point(start: Start, mute: int, web: int) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False)
    owners = [start(*static(0, port)) for port in (mute, store.port)]
    waiting = [start(*static(1, web)), start(*counting(mute, "one"))]
    refuse(start(*static(1, store.port)), "is a torch store that no `lockstep run` holds")
    for run in owners:
        refuse(run, r"^port \d+ of \S+ is taken by .*pid \d+ .*, so machine 0 cannot open it: .*choose another port")
    for run in waiting:
        run.await_text(r"127.0.0.1:\d+ answers, but no torch store replies: another program\?")
    interrupt(*waiting)


def test_rendezvous_that_nobody_knows(start: Start) -> None:
    refuse(start("--rdzv-backend=nosuch"), "^--rdzv-backend nosuch: .*not registered")


def test_address_that_leads_nowhere(start: Start, port: int) -> None:
    run = start(*static(1, port, address="nosuch.invalid"))
    refuse(run, f"--master-addr: host 'nosuch.invalid' cannot be found from {socket.gethostname()}")


def test_machine_that_holds_the_meeting_point_is_killed(start: Start, port: int) -> None:
    first, second = start(*static(0, port, "--nnodes=3")), start(*static(1, port, "--nnodes=3"))
    second.await_text("waiting for machine 2")
    first.process.kill()
    refuse(second, f"^nobody answers at 127.0.0.1:{port} any more: the machine that held it has ended")


_STOCK = """
import os
import torch.distributed as dist
if os.environ["RANK"] == "1":
    os.environ.update(RANK="0", MASTER_PORT="1")
dist.init_process_group("gloo")
"""


def test_stock_script_that_changes_what_it_was_given(start: Start, tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(_STOCK)
    run = start("--nnodes=1", "--nproc-per-node=2", "--grace-s=0")
    changed = "RANK=0, but the launcher gave 1"
    run.await_text(f"lockstep: rank 1: init_process_group at hello.py:6 <module>: {changed}: the ranks may never")
    run.await_text("MISMATCH in step 1, group init_process_group")
    run.await_text(r"rank 0: init_process_group at hello.py:6 .*\n +rank 1: init_process_group:port=1 at hello.py:6 ")
    run.process.send_signal(signal.SIGINT)
    run.end(130)


def test_machines_that_meet_in_a_file_run_and_say_what_is_not_seen(start: Start, tmp_path: Path) -> None:
    words = ("--rdzv-backend=c10d", f"--rdzv-endpoint={tmp_path / 'meet'}", "--rdzv-conf=store_type=file")
    runs = [start(*words, "--rdzv-id=one") for _ in range(2)]
    for run in runs:
        run.end(0)
        assert "a rank has begun" in run.text()
        assert len(run.said()) == 1
        assert run.said()[0].startswith("the guard sees no ranks of other machines")
