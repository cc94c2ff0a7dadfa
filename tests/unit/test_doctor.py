"""Each check of `lockstep doctor`, with facts that are right and facts that are wrong; only fakes are probed."""

from __future__ import annotations

import os
import re
import resource
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from lockstep.comm.control_groups import memory_limit
from lockstep.comm.preflight import Interface, Knock
from lockstep.errors import ConfigError
from lockstep.launch.doctor import examination, machine, probes
from lockstep.launch.doctor.asked import Asked, read_asked
from lockstep.launch.doctor.check import Check, has_failed, size, summary
from lockstep.launch.doctor.machine import Limits, Memory, Port
from lockstep.launch.doctor.variables import KNOWN, check_variables, meant_by

INF = float("inf")
GIB = 2**30
ALONE = Asked((), 1, 2)
FIRST = Asked((), 2, 2, "node0", 29500, "--master-addr", 0, True)
SECOND = Asked((), 2, 2, "node0", 29500, "--master-addr", 1, False)
C10D = Asked((), 2, 2, "node0", 29500, "--rdzv-endpoint")


def verdicts(checks: list[Check]) -> list[str]:
    return [check.status for check in checks]


# ---------------------------------------------------------------------- what is printed


def test_a_check_is_lines_of_less_than_80_columns_and_says_all() -> None:
    check = Check("FAIL", "all-reduce", "word " * 60 + "x" * 100, "type this " * 20)
    lines = check.text().splitlines()
    assert lines[0].startswith("FAIL all-reduce word")
    assert [len(line) for line in lines if len(line) > 79] == [116]  # one word cannot be cut
    assert " ".join(check.text().split()).count("word") == 60
    assert sum("-> type" in line for line in lines) == 1
    assert Check("ok", "x", "a\n  b").text() == "ok   x          a b"


def test_summary_counts_and_only_fail_fails() -> None:
    checks = [Check("ok", "a", ""), Check("warn", "b", ""), Check("warn", "c", "")]
    assert summary(checks) == "1 ok, 2 warn, 0 FAIL"
    assert not has_failed(checks)
    assert has_failed([*checks, Check("FAIL", "d", "")])
    assert [size(n) for n in (INF, 3 * GIB, 64 * 2**20, 2048, 7)] == ["unlimited", "3 GiB", "64 MiB", "2 KiB", "7 B"]


# ---------------------------------------------------------------------- what was asked


def test_flags_of_one_machine() -> None:
    asked = read_asked([], {})
    assert (asked.machines, asked.processes, asked.port, asked.source) == (1, 2, 29500, "")
    assert asked.words == ("--nproc-per-node", "2", "--standalone")
    asked = read_asked(["--nproc_per_node=3", "--master-port", "7", "--json", "--wait-s", "2"], {"MASTER_PORT": "8"})
    assert (asked.processes, asked.port, asked.source, asked.is_json, asked.wait_s) == (3, 7, "--master-port", True, 2)
    asked = read_asked([], {"MASTER_PORT": "8", "PET_NPROC_PER_NODE": "4"})
    assert (asked.processes, asked.port, asked.source) == (4, 8, "MASTER_PORT")
    assert read_asked(["--nproc-per-node", "auto"], {}).processes == os.cpu_count()
    assert read_asked(["--nproc-per-node", "2:5"], {}).processes == 5


def test_flags_of_several_machines() -> None:
    words = ["--nnodes", "3", "--node-rank", "0", "--master-addr", "a", "--master-port", "5"]
    asked = read_asked(words, {})
    assert (asked.machines, asked.processes, asked.host, asked.port) == (3, 1, "a", 5)
    assert (asked.node_rank, asked.is_host, asked.source) == (0, True, "--master-addr")
    assert "timeout=60" in asked.words
    words = ["--nnodes", "2:4", "--rdzv-backend", "c10d", "--rdzv-endpoint", "a:5", "--rdzv-conf", "is_host=1"]
    asked = read_asked([*words, "--local-addr", "b", "--rdzv-id", "7", "--wait-s", "9"], {})
    assert (asked.machines, asked.is_host, asked.node_rank) == (2, True, None)
    assert asked.words[asked.words.index("--rdzv-conf") + 1] == "is_host=1,join_timeout=9"
    assert {"7", "b", "a:5", "2:4"} <= set(asked.words)
    for endpoint, host, port in (("[::1]:5", "::1", 5), ("a", "a", 29400), ("[fe80::1]", "fe80::1", 29400)):
        asked = read_asked([*words[:4], "--rdzv-endpoint", endpoint], {})
        assert (asked.host, asked.port, asked.is_host) == (host, port, None), endpoint


def test_a_rank_that_slurm_or_a_shell_started_is_a_machine_with_one() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "a", "MASTER_PORT": "5"}
    asked = read_asked([], environ)
    assert (asked.machines, asked.processes, asked.host, asked.port) == (3, 1, "a", 5)
    assert (asked.node_rank, asked.is_host, asked.source) == (1, False, "MASTER_ADDR")
    slurm = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "4"}
    asked = read_asked([], {**slurm, "SLURM_STEP_NODELIST": "n[1-2]"})
    assert (asked.machines, asked.host, asked.node_rank, asked.is_host) == (2, "n1", 0, True)
    assert read_asked(["--standalone"], environ).machines == 1
    for wrong in ({"RANK": "0", "WORLD_SIZE": "2"}, {"WORLD_SIZE": "2"}, {**environ, "RANK": "3"}):
        asked = read_asked([], wrong)  # no rank of any run: what is wrong is said, and this machine looked at
        assert (asked.machines, asked.processes) == (1, 2), wrong


@pytest.mark.parametrize(
    ("words", "environ", "expected"),
    [
        (["--nnodes", "two"], {}, "a number of machines"),
        (["--nnodes", "3:2"], {}, "a number of machines"),
        (["--nnodes", "2"], {}, "--node-rank on each machine"),
        (["--nnodes", "1:2", "--node-rank", "0"], {}, "rendezvous that counts"),
        (["--nnodes", "2", "--rdzv-backend", "c10d"], {}, "needs --rdzv-endpoint"),
        (["--nnodes", "2", "--rdzv-backend", "etcd", "--rdzv-endpoint", "a:5"], {}, "c10d or static"),
        (["--nnodes", "2", "--node-rank", "0"], {"MASTER_ADDR": "a"}, "give --master-addr a"),
        (["--nnodes", "2", "--node-rank", "2"], {}, "--node-rank 2, but --nnodes 2: machines are 0 to 1"),
        (["--nnodes", "2", "--node-rank", "0", "--master-port", "0"], {}, "ports are 1 to 65535"),
        (["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "a:99999"], {}, "ports are 1 to 65535"),
        (["--master-port", "99999"], {}, "ports are 1 to 65535"),
        (["--nproc-per-node", "0"], {}, "number of processes"),
        (["--nproc-per-node", "some"], {}, "number of processes"),
        (["--wait-s", "0"], {}, "above 0"),
        ([], {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1"}, "starts ranks itself"),
        (["train.py"], {}, "unexpected 'train.py'"),
        (["--nproc-per", "2"], {}, "unknown option --nproc-per: did you mean --nproc-per-node?"),
        (["--wait-s", "soon"], {}, "--wait-s takes a number, not 'soon'. `lockstep doctor --help` explains"),
        (["-n", "9999"], {}, "so many would only kill it"),
    ],
)
def test_flags_that_cannot_be(words: list[str], environ: Mapping[str, str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        read_asked(words, environ)


# ---------------------------------------------------------------------- variables


def test_wheel_holds_their_names() -> None:
    builder = WheelBuilder(str(Path(__file__).parents[2]))
    inside = {each.distribution_path for each in builder.recurse_included_files()}
    assert "lockstep/launch/doctor/variables.json" in inside


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MASTER_ADDRESS", "MASTER_ADDR"),
        ("master_addr", "MASTER_ADDR"),
        ("MASTER_POT", "MASTER_PORT"),
        ("WORLDSIZE", "WORLD_SIZE"),
        ("LOCALRANK", "LOCAL_RANK"),
        ("NCCL_SOCKET_IFNAMES", "NCCL_SOCKET_IFNAME"),
        ("NCCL_SOKCET_IFNAME", "NCCL_SOCKET_IFNAME"),
        ("GLOO_SOCKET_IFACE", "GLOO_SOCKET_IFNAME"),
        ("NCCL_IB_DISABLED", "NCCL_IB_DISABLE"),
        ("CUDA_VISIBLE_DEVICE", "CUDA_VISIBLE_DEVICES"),
        ("OMP_NUM_THREAD", "OMP_NUM_THREADS"),
        ("TORCH_DISTRIBUTED_DEBUGS", "TORCH_DISTRIBUTED_DEBUG"),
        ("LOCKSTEP_GAURD", "LOCKSTEP_GUARD"),
        ("LOCKSTEP_REPLICAS_EVERY", "LOCKSTEP_REPLICA_EVERY"),
    ],
)
def test_misspelt_variable(name: str, meant: str) -> None:
    assert meant_by(name) == meant
    (check,) = check_variables({name: "7"}, ALONE, cores=64)
    assert check.status == "warn"
    assert f"export {meant}=7" in check.fix


def test_every_variable_that_settings_name_is_known_with_all_its_misspellings() -> None:
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
    documented = re.findall(r"^\| `(LOCKSTEP_[A-Z_]+)` \| .+ \|$", page[: page.index("## How strict")], re.MULTILINE)
    assert len(documented) > 5
    assert sorted(documented) == sorted(name for name in KNOWN if name.startswith("LOCKSTEP_"))
    for name in documented:
        assert meant_by(name) == ""
        for wrong in (name.lower(), name.replace("_", ""), name + "S", name[:-1], name[:-2] + name[:-3:-1]):
            assert meant_by(wrong) == name, wrong


@pytest.mark.parametrize(
    "name",
    [
        "MASTER_ADDR", "PATH", "HOME", "NCCL_IB_SL", "NCCL_IB_ECE_ENABLE", "NCCL_CHECKS_DISABLE", "NCCL_RAS_ENABLE",
        "TORCH_NCCL_ENABLE_TIMING", "OMP_PROC_BIND", "OMP_PLACES", "CUDA_HOME", "LOCALE", "LOCAL_BIN", "WORLD",
        "NCCL_SHM_USE_CUDA_MEMCPY", "NCCL_MNNVL_ENABLE", "NCCL_CONF_FILE", "LOCKSTEP_TEST", "MASTER", "SLURM_JOB_ID",
    ],
)  # fmt: skip
def test_variable_that_is_right_or_somebody_elses(name: str) -> None:
    assert meant_by(name) == ""
    assert verdicts(check_variables({name: "1"}, ALONE, cores=64)) == ["ok"]


@pytest.mark.parametrize(
    ("environ", "asked", "status", "expected"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, ALONE, "FAIL", "ranks are 0 to 1"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, ALONE, "FAIL", "MASTER_PORT is not set"),
        ({"RANK": "one", "WORLD_SIZE": "1"}, ALONE, "FAIL", "not a whole number"),
        ({"SLURM_NTASKS": "4"}, ALONE, "warn", "no task of a step"),
        ({"RANK": "0", "WORLD_SIZE": "1", "SLURM_PROCID": "1"}, ALONE, "warn", "RANK=0, but SLURM_PROCID=1"),
        ({"SLURM_NNODES": "3"}, ALONE, "warn", "only this machine is examined"),
        ({"MASTER_ADDR": "b"}, FIRST, "warn", "the flag counts"),
        ({}, Asked((), 2, 1, "127.0.0.1", 1, "--master-addr"), "warn", "each asks itself"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, FIRST, "FAIL", "no other machine"),
        ({"NCCL_SOCKET_IFNAME": "=lo"}, FIRST, "FAIL", "no other machine"),
        ({"NCCL_P2P_DISABLE": "1"}, ALONE, "warn", "do not talk directly"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, ALONE, "warn", "nothing overlaps"),
        ({"TORCH_DISTRIBUTED_DEBUG": "detail"}, ALONE, "warn", "crashes while DDP"),
        ({"NCCL_BLOCKING_WAIT": "1"}, ALONE, "warn", "another name now"),
        ({"LOCKSTEP_SHM": "off"}, ALONE, "warn", "sockets"),
        ({"MASTER_PORT": "abc"}, ALONE, "FAIL", "no port"),
        ({"OMP_NUM_THREADS": "4"}, ALONE, "warn", "each other's way"),
    ],
)
def test_variables_that_do_harm(environ: Mapping[str, str], asked: Asked, status: str, expected: str) -> None:
    checks = check_variables(environ, asked, cores=4)
    assert verdicts(checks) == [status], checks
    assert expected in checks[0].found
    assert checks[0].fix


def test_variables_that_do_none() -> None:
    environ = {"NCCL_P2P_DISABLE": "0", "OMP_NUM_THREADS": "2", "MASTER_ADDR": "node0", "GLOO_SOCKET_IFNAME": "lo"}
    assert verdicts(check_variables(environ, ALONE, cores=4)) == ["ok"]
    assert "MASTER_ADDR" in check_variables(environ, ALONE, cores=4)[0].found
    assert verdicts(check_variables({"MASTER_ADDR": "node0"}, FIRST, cores=4)) == ["ok"]


# ---------------------------------------------------------------------- one machine


def test_own_name() -> None:
    def look(addresses: list[str], asked: Asked, problem: str = "") -> Check:
        own = [Interface("lo", "127.0.0.1"), Interface("eth0", "10.0.0.1")]
        return machine.check_own_name("h", addresses, own, problem, asked)

    assert look(["10.0.0.1"], FIRST).status == "ok"
    assert look(["127.0.1.1"], ALONE).status == "ok"
    assert look(["127.0.1.1"], FIRST).status == "warn"
    assert (look(["10.0.0.9"], ALONE).status, look(["10.0.0.9"], FIRST).status) == ("warn", "FAIL")
    assert (look([], ALONE, "unknown").status, look([], FIRST, "unknown").status) == ("warn", "FAIL")
    assert look([], FIRST, "unknown").fix == "export GLOO_SOCKET_IFNAME=eth0, or: echo '10.0.0.1 h' >> /etc/hosts"
    assert "export GLOO_SOCKET_IFNAME=eth0" in look(["10.0.0.9"], FIRST).fix


def test_interfaces() -> None:
    there = [Interface("lo", "127.0.0.1"), Interface("docker0", "172.17.0.1"), Interface("eth0", "10.0.0.1")]

    def look(chosen: str, asked: Asked = FIRST, **environ: str) -> list[Check]:
        return machine.check_interfaces(there, chosen, environ, asked)

    assert verdicts(look("eth0")) == ["ok"]
    assert "Gloo takes eth0, NCCL eth0" in look("eth0")[0].found
    assert "Gloo takes lo" in look("lo", ALONE)[0].found
    assert verdicts(look("docker0")) == ["warn"]
    assert verdicts(look("eth0", GLOO_SOCKET_IFNAME="eth1")) == ["FAIL"]
    assert verdicts(look("eth0", GLOO_SOCKET_IFNAME="eth")) == ["FAIL"]  # Gloo wants the whole name
    assert verdicts(look("eth0", NCCL_SOCKET_IFNAME="eth")) == ["ok"]  # NCCL the beginning
    assert verdicts(look("eth0", NCCL_SOCKET_IFNAME="=eth")) == ["FAIL"]
    assert verdicts(look("eth0", NCCL_SOCKET_IFNAME="^docker0,lo")) == ["ok"]
    assert verdicts(look("eth0", GLOO_SOCKET_IFNAME="x", NCCL_SOCKET_IFNAME="y")) == ["FAIL", "FAIL"]


def test_without_loopback_no_rank_is_started_to_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.comm.preflight.local_address", lambda towards: "")
    monkeypatch.setattr(examination, "_channels", lambda: pytest.fail("a store would wait for a minute"))
    said: list[Check] = []
    assert examination.examine(ALONE, {}, said.append) == 0
    assert [(check.name, check.fix) for check in said if check.status == "FAIL"] == [
        ("interfaces", "ip link set lo up")
    ]


@pytest.mark.parametrize(
    "error", [ConfigError("LOCKSTEP_SHM='foo': it is on or off"), OSError(11, "Resource temporarily unavailable")]
)
def test_what_no_launcher_takes_is_a_check_and_does_not_end_the_examination(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "_meet", lambda *_: None)

    def refuse(*_: object) -> int:
        raise error

    monkeypatch.setattr(examination, "_examine_ranks", refuse)
    said: list[Check] = []
    assert examination.examine(ALONE, {}, said.append) == 0
    assert ("FAIL", f"none was started: {error}") in [check[::2] for check in said]
    assert said[-1].name == "clock"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("LOCKSTEP_GUARD", "foo", "one of off, on, strict, check"),
        ("LOCKSTEP_HANG_S", "abc", "a number of seconds above 0"),
    ],
)
def test_a_setting_that_is_refused_is_said_once(
    name: str, value: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "_meet", lambda *_: None)
    monkeypatch.setattr(examination, "_examine_ranks", lambda *_: pytest.fail("it would say that again"))
    said: list[Check] = []
    examination.examine(ALONE, {name: value}, said.append)
    (check,) = [check for check in said if check.status == "FAIL"]
    assert (check.name, check.fix) == ("guard", f"unset {name}")
    assert expected in check.found


def test_where_too_few_files_can_be_opened_no_store_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "_meet", lambda *_: pytest.fail("it would wait for a minute"))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (12, 12))
    said: list[Check] = []
    assert examination.examine(ALONE, {}, said.append) == 0
    assert [check.name for check in said if check.status == "FAIL"] == ["limits", "ranks"]


def test_a_name_that_nobody_asks_for_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_own_name", lambda: ([], "unknown"))
    for environ, count in (({}, 1), ({"GLOO_SOCKET_IFNAME": "lo"}, 0)):
        checks = list(probes.examine_machine(ALONE, environ))
        assert [check.name for check in checks].count("own name") == count


def test_port() -> None:
    taken = Port(29500, False, ("pid 7 (python serve.py)",))
    assert machine.check_port(Port(29500, True), FIRST).status == "ok"
    found = machine.check_port(taken, FIRST)
    assert found.status == "FAIL"
    assert "taken by pid 7 (python serve.py)" in found.found
    assert "kill 7" in found.fix
    assert "--master-port 29501" in found.fix
    assert machine.check_port(taken, ALONE).status == "warn"  # nobody asked for this one
    named = machine.check_port(taken, Asked((), 1, 2, "", 29500, "MASTER_PORT"))
    assert (named.status, "export MASTER_PORT=29501" in named.fix) == ("FAIL", True)
    assert "may not see" in machine.check_port(Port(29500, False), FIRST).found
    assert "Permission" in machine.check_port(Port(80, False, (), "Permission denied"), FIRST).found


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (Knock("refused", "10.0.0.1"), "nobody listens there"),
        (Knock("silent", "10.0.0.1"), "firewall"),
        (Knock("unreachable", "10.0.0.1", "No route to host"), "No route to host"),
        (Knock("stranger", "10.0.0.1", "it says b'SSH'"), "not this job: it says b'SSH'"),
    ],
)
def test_way_that_is_closed(found: Knock, expected: str) -> None:
    check = machine.check_way(SECOND, found, 9.0)
    assert check.status == "FAIL"
    assert expected in check.found
    assert "node0:29500" in check.found
    assert check.fix


def test_who_opens_the_port() -> None:
    assert machine.check_way(SECOND, Knock("open", "10.0.0.1"), 0.0).status == "ok"
    assert machine.check_hosting(FIRST, is_here=True) is None
    assert machine.check_hosting(C10D, is_here=True) is None
    assert machine.check_hosting(C10D, is_here=False) is None
    elsewhere = machine.check_hosting(FIRST, is_here=False)
    assert elsewhere is not None
    assert "no address of it" in elsewhere.found


def test_versions() -> None:
    right = {"lockstep": "0.1", "torch": "2.13.0+cpu", "numpy": "2"}
    assert verdicts(machine.check_versions(right, (3, 11, 7))) == ["ok"]
    assert verdicts(machine.check_versions({**right, "torch": "2.9.1"}, (3, 11, 7))) == ["FAIL"]
    (check,) = machine.check_versions({**right, "numpy": ""}, (3, 11, 7))
    assert (check.status, check.fix) == ("FAIL", "pip install numpy")
    assert verdicts(machine.check_versions({**right, "torch": ""}, (3, 8, 1))) == ["FAIL", "FAIL"]


def test_methods_in_c() -> None:
    assert machine.check_native(is_in_c=True, word="") == ("ok", "native", "the guard's calls are in C", "")
    assert machine.check_native(is_in_c=False, word="off").status == "ok"
    check = machine.check_native(is_in_c=False, word="")
    assert (check.status, "compiler" in check.fix) == ("warn", True)


@pytest.mark.parametrize(
    ("devices", "driver", "visible", "status"),
    [
        (0, "", None, "ok"), (0, "550.1", None, "FAIL"), (2, "550.1", None, "ok"), (1, "550.1", None, "FAIL"),
        (4, "550.1", "0,1", "ok"), (4, "550.1", "0", "FAIL"), (4, "550.1", "", "warn"), (4, "550.1", "-1", "warn"),
        (1, "550.1", "0,1,2", "FAIL"),
    ],
)  # fmt: skip
def test_gpus(devices: int, driver: str, visible: str | None, status: str) -> None:
    assert machine.check_gpus(devices, driver, visible, processes=2).status == status


def test_shared_memory_memory_cores() -> None:
    docker = machine.check_shared_memory("/dev/shm", 64 * 2**20, 64 * 2**20, 2)
    assert docker.status == "warn"
    assert "--shm-size=1g" in docker.fix
    assert machine.check_shared_memory("/dev/shm", 64 * 2**20, 2**20, 2).status == "warn"  # Gloo does without
    assert machine.check_shared_memory("/dev/shm", 8 * GIB, 2 * GIB, 2).status == "ok"
    shut = machine.check_shared_memory("/dev/shm", 8 * GIB, 2 * GIB, 2, is_open=False)
    assert (shut.status, "remount,rw /dev/shm" in shut.fix) == ("warn", True)
    assert machine.check_shared_memory("/dev/shm", 8 * GIB, 2 * GIB, 8).status == "warn"
    assert verdicts(machine.check_memory(Memory(8 * GIB, INF, 0), 2)) == ["ok"]
    assert verdicts(machine.check_memory(Memory(8 * GIB, GIB * 0.8, 0), 2)) == ["warn"]
    assert verdicts(machine.check_memory(Memory(GIB * 0.2, INF, 2), 2)) == ["FAIL", "warn"]
    assert machine.check_cores(4, INF, 4).status == "ok"
    assert machine.check_cores(4, 1.5, 2).status == "warn"
    assert machine.check_cores(2, INF, 3).status == "warn"


def test_limits() -> None:
    right = Limits(20000, 20000, INF, 500, 8 * 2**20, False)
    assert verdicts(machine.check_limits(right, 2, 2)) == ["ok"]
    few = right._replace(files=256)
    assert verdicts(machine.check_limits(few, 2, 2)) == ["warn"]
    assert verdicts(machine.check_limits(few._replace(files=39), 2, 2)) == ["FAIL"]
    assert machine.check_limits(few, 2, 2)[0].fix == "ulimit -n 20000"
    assert "raise the hard limit" in machine.check_limits(few._replace(files_max=256), 2, 2)[0].fix
    assert verdicts(machine.check_limits(right._replace(files=1024), 8, 512)) == ["FAIL"]
    assert verdicts(machine.check_limits(right._replace(processes=600), 2, 2)) == ["warn"]
    assert verdicts(machine.check_limits(right._replace(processes=510), 2, 2)) == ["FAIL"]
    assert verdicts(machine.check_limits(right._replace(has_rdma=True), 2, 2)) == ["FAIL"]
    assert verdicts(machine.check_limits(right._replace(has_rdma=True, locked_bytes=INF), 2, 2)) == ["ok"]


def test_clock_jump() -> None:
    assert machine.check_clock_jump([100.0, 100.001]).status == "ok"
    assert "forwards" in machine.check_clock_jump([100.0, 103.0]).found
    assert "back" in machine.check_clock_jump([100.0, 100.0, 40.0, 40.0]).found
    assert machine.check_clock_jump([100.0, 100.2, 100.0]).status == "warn"


# ---------------------------------------------------------------------- probes that read files


def test_who_listens_at_a_port(tmp_path: Path) -> None:
    table = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 0100007F:733C 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0 100 0\n"
        "   1: 0100007F:733C 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0 100 0\n"
        "   2: 0100007F:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4713 1 0 100 0\n"
    )
    assert probes.listeners(table, 29500) == ["4711"]
    (tmp_path / "net").mkdir()
    (tmp_path / "net/tcp").write_text(table)
    for pid, inode in (("7", "4711"), ("8", "4713")):
        (tmp_path / pid / "fd").mkdir(parents=True)
        (tmp_path / pid / "fd/3").symlink_to(f"socket:[{inode}]")
        (tmp_path / pid / "cmdline").write_bytes(b"/usr/bin/python\0serve.py\0")
    assert probes.owners(29500, tmp_path) == ("pid 7 (python serve.py)",)
    assert probes.owners(1, tmp_path) == ()


@pytest.mark.parametrize("version", [1, 2])
def test_memory_limit_of_a_control_group(tmp_path: Path, version: int) -> None:
    assert memory_limit(tmp_path) == INF
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n" if version == 2 else "4:cpu:/a\n5:memory:/a/b\n")
    root = tmp_path / "sys/fs/cgroup"
    folder = root / "a/b" if version == 2 else root / "memory/a/b"
    folder.mkdir(parents=True)
    name = "memory.max" if version == 2 else "memory.limit_in_bytes"
    assert memory_limit(tmp_path) == INF
    (folder / name).write_text("max" if version == 2 else str(2**63 - 4096))
    assert memory_limit(tmp_path) == INF
    (folder.parent / name).write_text(str(3 * GIB))
    assert memory_limit(tmp_path) == 3 * GIB


def test_a_taken_port_is_seen_with_its_owner() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asked = Asked((), 1, 2, "", listener.getsockname()[1])
        found = probes.port_of(asked)
        assert not found.is_free
        assert any(owner.startswith(f"pid {os.getpid()} ") for owner in found.owners)
    assert probes.port_of(asked).is_free
