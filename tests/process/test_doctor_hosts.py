"""`lockstep doctor` on two hosts, which are two network namespaces: what works, and two hops that are often broken."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_hierarchical_hosts import Hosts, hosts

import warm_programs

__all__ = ["hosts"]
_PATIENCE_S = 80.0
_MEETING = "10.99.0.1:29500"  # nobody else sees it
_C10D = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", _MEETING, "--wait-s", "20"]


def run(made: Hosts, folder: Path, words: list[list[str]], **variables: str) -> list[tuple[int, str]]:
    """Exit code and output of the doctor of each host. variables: of the second."""
    doctors = []
    for host in range(2):
        command = [*made.inside(host), sys.executable, "-m", "lockstep", "doctor", *words[host]]
        environ = {**os.environ, **(variables if host else {})}
        with (folder / f"host{host}").open("wb") as file:
            doctors.append(warm_programs.Popen(command, env=environ, cwd=folder, stdout=file, stderr=subprocess.STDOUT))
    try:
        codes = [one.wait(_PATIENCE_S) for one in doctors]
    finally:
        for one in doctors:
            one.kill()
            one.wait()
    return [(code, " ".join((folder / f"host{host}").read_text().split())) for host, code in enumerate(codes)]


@pytest.mark.slow
@pytest.mark.limit_s(180)
def test_two_hosts_and_what_keeps_them_apart(hosts: Hosts, tmp_path: Path) -> None:
    first = second = _C10D  # the one whose address it is opens the port, whatever its own name leads to
    two = ["--nproc-per-node", "2", "--local-addr"]
    for code, said in run(hosts, tmp_path, [[*first, *two, "10.99.0.1"], [*second, *two, "10.99.0.2"]]):
        assert code == 0, said
        assert "ok ranks 4 on 2 machines" in said
        assert "ok links 2 ways between machines are open" in said
        assert "ok clock machines agree within" in said
        assert "2 inside a machine: median" in said
        assert "4 between machines: median" in said
    for code, said in run(hosts, tmp_path, [first, second]):  # torch announces the machine of rank 0 as localhost
        assert code == 1, said
        assert "FAIL way rank 0's machine is announced as" in said
        assert "add: --local-addr 10.99.0.1" in said
    three = ["--nnodes", "3", "--master-addr", "10.99.0.1", "--wait-s", "8", "--node-rank"]
    for code, said in run(hosts, tmp_path, [[*three, "0"], [*three, "1"]]):  # also on the one without the store
        assert code == 1, said
        assert re.search(r"FAIL machines 2 of 3 came in \d s: .* node rank 2 did not", said), said
    inside = hosts.inside(1)
    for words in (
        ["link", "add", "wrong0", "type", "veth", "peer", "name", "wrong1"],
        ["address", "add", "10.88.0.1/24", "dev", "wrong0"],
        ["link", "set", "wrong0", "up"],
        ["link", "set", "wrong1", "up"],
    ):
        subprocess.run([*inside, "ip", *words], check=True)
    static = ["--nnodes", "2", "--master-addr", "10.99.0.1", "--wait-s", "20", "--node-rank"]
    for code, said in run(hosts, tmp_path, [[*static, "0"], [*static, "1"]], GLOO_SOCKET_IFNAME="wrong0"):
        assert code == 1, said
        assert re.search(r"cannot reach rank 1 \(\S+\) at 10\.88\.0\.1:", said), said
        assert "export GLOO_SOCKET_IFNAME" in said
