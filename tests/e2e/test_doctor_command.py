"""`lockstep doctor` as users run it: two ranks, and every hop that can be broken on one machine."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from ports import free_port, mute_program, web_server

_PATIENCE_S = 60.0
_SETTINGS = ("MASTER_", "GLOO_", "NCCL_", "LOCKSTEP_", "PET_", "TORCH", "OMP_", "RANK", "WORLD_SIZE", "LOCAL_RANK")
_COMMAND = (sys.executable, "-m", "lockstep")


def start(*words: str, command: Sequence[str] = _COMMAND, **variables: str) -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS)}
    return subprocess.Popen(
        [*command, "doctor", *words],
        env={**environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], exit_code: int) -> str:
    """What it printed. It ends by itself, and soon."""
    try:
        out, err = process.communicate(timeout=_PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == exit_code, out + err
    assert "Traceback" not in err
    return out


def doctor(exit_code: int, *words: str, **variables: str) -> str:
    return " ".join(finish(start(*words, **variables), exit_code).split())


def several(number: int, port: int, wait_s: float = 20.0) -> list[str]:
    """Flags of one of two machines."""
    words = ["--nnodes", "2", "--node-rank", str(number), "--master-addr", "localhost", "--master-port", str(port)]
    return [*words, "--wait-s", f"{wait_s:g}"]


def test_two_ranks() -> None:
    said: dict[str, Any] = json.loads(finish(start("--json", "--nproc-per-node", "2"), 0))
    assert said["ok"] is True
    found = {check["name"]: check["found"] for check in said["checks"] if check["status"] == "ok"}
    assert {"ranks", "all-reduce", "pairs", "clock", "own name", "interfaces", "memory"} <= set(found)
    assert found["ranks"] == "2 on 1 machine"
    assert "right on every rank" in found["all-reduce"]
    assert all(set(check) == {"status", "name", "found", "fix"} for check in said["checks"])


def test_two_doctors_meet_and_say_the_same() -> None:
    """As on two machines, which are one here; the misspelt variable of one is named by it alone."""
    port = free_port()
    processes = [start(*several(0, port)), start(*several(1, port), NCCL_SOCKET_IFNAMES="eth0")]
    first, second = (finish(process, 0) for process in processes)
    assert all(len(line) < 80 for line in first.splitlines())
    for name in ("machines", "all-reduce", "pairs"):
        lines = [line for text in (first, second) for line in text.splitlines() if line.startswith(f"ok   {name}")]
        assert len(lines) == 2
        assert lines[0] == lines[1]
    assert "NCCL_SOCKET_IFNAME meant?" not in first
    assert "NCCL_SOCKET_IFNAMES means nothing" in second


@pytest.mark.parametrize("program", [mute_program, web_server])
def test_port_that_another_program_has(program: Any) -> None:
    with program() as port:
        processes = [start(*several(number, port, 1.0)) for number in range(2)]
        holder, other = (" ".join(finish(process, 1).split()) for process in processes)
    assert f"FAIL port port {port} is taken by pid {os.getpid()}" in holder
    assert f"FAIL way localhost:{port} answers, but is not this job" in other


def test_names_and_addresses_that_lead_nowhere() -> None:
    with contextlib.ExitStack() as stack:
        queue = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port = queue.getsockname()[1]
        for _ in range(4):  # a full queue: the kernel drops what comes next, as a firewall does
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        assert f"FAIL way localhost:{port}: 127.0.0.1 does not answer for" in doctor(1, *several(1, port, 0.5))
    words = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "no-such-host.invalid:2000"]
    unknown = doctor(1, *words)
    assert "--rdzv-endpoint: host 'no-such-host.invalid' cannot be found" in unknown
    assert "correct --rdzv-endpoint" in unknown


def test_a_machine_that_does_not_come_is_named() -> None:
    processes = [start(*several(number, free_port(), 0.5)) for number in range(2)]
    first, second = (" ".join(finish(process, 1).split()) for process in processes)
    assert "1 of 2 came in" in first
    assert "node rank 1 did not" in first
    assert "nobody listens there" in second


def test_without_torch_all_that_comes_before_the_ranks_is_looked_at() -> None:
    code = "import sys; sys.modules['torch'] = None; from lockstep.cli import main; sys.exit(main())"
    said = finish(start(command=(sys.executable, "-c", code), MASTER_ADDR="no-such-host.invalid"), 1)
    assert "FAIL ranks      not tried, because torch cannot be imported" in said
    assert "MASTER_ADDR=no-such-host.invalid cannot be found" in " ".join(said.split())
    assert "ok   port" in said
