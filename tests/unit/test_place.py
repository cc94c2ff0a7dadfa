"""Place: every launcher's variables, their precedence, and every problem at once."""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.control_groups import core_quota
from lockstep.comm.devices import fair_threads
from lockstep.comm.handshake import Record, disagreement
from lockstep.comm.kernel import core_mask
from lockstep.comm.launcher_variables import expand_hosts, expand_tasks, slurm_port
from lockstep.comm.place import Place, find_place, place_on_machines, read_place
from lockstep.comm.preflight import gloo_interface, interface_of, listen, local_address
from lockstep.comm.shm.peers import is_running
from lockstep.errors import EnvironmentProblems

PLAIN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
TORCHRUN = {
    **PLAIN,
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "TORCHELASTIC_RUN_ID": "run7",
    "TORCHELASTIC_RESTART_COUNT": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    "SLURM_JOB_ID": "123",
    "SLURM_STEP_ID": "4",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "n[09-10]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}


def problems_of(environ: dict[str, str], **arguments: object) -> list[str]:
    with pytest.raises(EnvironmentProblems) as caught:
        find_place(environ, **arguments)  # pyright: ignore
    return list(caught.value.problems)


# ---------------------------------------------------------------------- who is asked, in which order


def test_nothing_says_one_process() -> None:
    place = find_place({})
    assert (place.rank, place.world_size, place.launcher, place.hosts_store) == (0, 1, "one process", False)
    assert place.describe() == "1 rank (one process)"
    assert place.meeting_point == "nowhere"


def test_plain_variables() -> None:
    place = find_place(PLAIN)
    assert (place.rank, place.world_size, place.address, place.port) == (1, 2, "localhost", 29500)
    assert place.launcher == "environment"
    assert place.source("rank") == "RANK"
    assert place.source("local_rank") == "default", "nobody has said it: the machines of all ranks will"
    assert not place.hosts_store
    assert find_place({**PLAIN, "RANK": "0"}).hosts_store


def test_torchrun() -> None:
    place = find_place({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"})
    assert place.launcher == "torchrun"
    assert (place.local_rank, place.local_world_size, place.node_rank) == (0, 2, 0)
    assert (place.run_id, place.restart_count, place.agent_store) == ("run7", 3, True)
    assert not place.hosts_store, "torchrun's agent holds the store"
    assert place.describe() == "2 ranks (torchrun: RANK, WORLD_SIZE), restart 3"


def test_torchrun_inside_slurm_is_torchrun() -> None:
    place = find_place({**SLURM, **TORCHRUN})
    assert (place.launcher, place.rank, place.world_size) == ("torchrun", 1, 2)


def test_slurm_step() -> None:
    place = find_place(SLURM)
    assert (place.rank, place.world_size, place.launcher) == (2, 3, "slurm")
    assert (place.local_rank, place.local_world_size, place.node_rank) == (0, 1, 1), "uneven nodes are as Slurm says"
    assert (place.address, place.port) == ("n09", slurm_port(123, 4))
    assert place.run_id == "slurm-123.4"


def test_slurm_on_one_node_stays_on_loopback() -> None:
    one = {
        **SLURM,
        "SLURM_STEP_NODELIST": "n09",
        "SLURM_STEP_TASKS_PER_NODE": "3",
        "SLURM_LOCALID": "2",
        "SLURM_NODEID": "0",
    }
    assert find_place(one).address == "127.0.0.1"


def test_a_meeting_point_that_is_set_wins_over_slurms() -> None:
    place = find_place({**SLURM, "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4000"})
    assert (place.address, place.port, place.launcher) == ("10.0.0.9", 4000, "slurm")


@pytest.mark.parametrize("missing", ["SLURM_STEP_ID", "SLURM_PROCID"])
def test_slurm_outside_a_step_is_one_process_and_says_so(missing: str) -> None:
    place = find_place({name: value for name, value in SLURM.items() if name != missing})
    assert place.world_size == 1
    assert "srun" in place.describe()


def test_slurm_step_of_one_task_is_one_process() -> None:
    assert find_place({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"}).world_size == 1


def test_arguments_win_field_by_field() -> None:
    place = find_place(TORCHRUN, rank=0, port=5)
    assert (place.rank, place.world_size, place.port, place.address) == (0, 2, 5, "localhost")
    assert place.source("rank") == "init(rank=...)"
    assert place.source("world_size") == "WORLD_SIZE"
    assert not place.agent_store, "another port is not the agent's"
    assert place.source("local_rank") == "default", "LOCAL_RANK belongs to another rank"


def test_arguments_that_repeat_the_environment_keep_the_rest_of_it() -> None:
    place = find_place(TORCHRUN, rank=1, world_size=2)
    assert (place.local_rank, place.local_world_size, place.agent_store) == (1, 2, True)


def test_off_ignores_the_environment_but_not_the_arguments() -> None:
    off = {**TORCHRUN, "LOCKSTEP_ENV": "off"}
    assert find_place(off).world_size == 1
    place = find_place(off, rank=2, world_size=3, address="h", port=1)
    assert (place.rank, place.world_size, place.address, place.port) == (2, 3, "h", 1)


def test_one_rank_needs_no_meeting_point() -> None:
    assert find_place({"RANK": "0", "WORLD_SIZE": "1"}).address == ""
    assert find_place({}, world_size=1).rank == 0


def test_a_file_needs_no_address() -> None:
    place = find_place({"RANK": "0", "WORLD_SIZE": "2"}, file="/x/meet")
    assert (place.meeting_point, place.hosts_store) == ("/x/meet", False)


def test_empty_variables_are_not_set() -> None:
    assert find_place({"RANK": "", "WORLD_SIZE": "", "SLURM_PROCID": ""}).launcher == "one process"


def test_ipv6_meeting_point_has_brackets() -> None:
    assert find_place({**PLAIN, "MASTER_ADDR": "fe80::1"}).meeting_point == "[fe80::1]:29500"


def test_place_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        find_place({}).rank = 3  # pyright: ignore


# ---------------------------------------------------------------------- what is wrong, all of it


@pytest.mark.parametrize("name", list(PLAIN))
def test_each_missing_variable_is_named(name: str) -> None:
    assert problems_of({key: value for key, value in PLAIN.items() if key != name}) == [f"{name} is not set"]


def test_all_missing_variables_are_named_at_once() -> None:
    assert problems_of({"RANK": "1"}) == ["WORLD_SIZE is not set", "MASTER_ADDR is not set", "MASTER_PORT is not set"]
    assert problems_of({"LOCAL_RANK": "1"})[:2] == ["WORLD_SIZE is not set", "RANK is not set"]


def test_many_problems_in_one_error_with_a_hint() -> None:
    environ = {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "http://x", "MASTER_PORT": "70000", "LOCKSTEP_ENV": "on"}
    with pytest.raises(EnvironmentProblems) as caught:
        find_place({**environ, "TORCHELASTIC_RESTART_COUNT": "x"})
    text = str(caught.value)
    assert len(caught.value.problems) == 5
    for expected in ("LOCKSTEP_ENV='on'", "RANK=2, but WORLD_SIZE=2", "http://x", "MASTER_PORT=70000", "'x' is not a"):
        assert expected in text
    assert "torchrun --standalone --nproc-per-node=2" in text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"RANK": "one"}, "RANK='one' is not a whole number"),
        ({"RANK": "1.0"}, "RANK='1.0' is not a whole number"),
        ({"RANK": "-1"}, "RANK=-1 is less than 0"),
        ({"RANK": "2"}, "RANK=2, but WORLD_SIZE=2: ranks are 0 to 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 is less than 1"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2, but LOCAL_WORLD_SIZE=2"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0 is less than 1"),
        ({"LOCAL_WORLD_SIZE": "3"}, "WORLD_SIZE=2 is no multiple of LOCAL_WORLD_SIZE=3"),
        ({"GROUP_RANK": "x"}, "GROUP_RANK='x' is not a whole number"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 is less than 1"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536 is no port: they end at 65535"),
        ({"MASTER_ADDR": "host:29500"}, "MASTER_ADDR='host:29500' is not a host name or an IP address alone"),
    ],
)
def test_each_wrong_value(changes: dict[str, str], expected: str) -> None:
    assert problems_of({**TORCHRUN, **changes}) == [expected]


def test_uneven_machines_are_right_where_the_launcher_says_so() -> None:
    uneven = {**TORCHRUN, "WORLD_SIZE": "3", "GROUP_WORLD_SIZE": "2"}
    assert find_place(uneven).local_world_size == 2
    assert problems_of({**uneven, "GROUP_WORLD_SIZE": "1"}) == ["WORLD_SIZE=3 is no multiple of LOCAL_WORLD_SIZE=2"]


def test_wrong_slurm_values() -> None:
    found = problems_of(
        {**SLURM, "SLURM_STEP_NODELIST": "n[1-", "SLURM_JOB_ID": "x", "SLURM_STEP_TASKS_PER_NODE": "2*3"}
    )
    assert len(found) == 3
    assert all(any(name in text for text in found) for name in ("NODELIST", "SLURM_JOB_ID", "TASKS_PER_NODE"))


def test_half_given_arguments() -> None:
    assert problems_of({}, rank=0)[0] == "init(world_size=...) is needed too"
    assert problems_of({}, world_size=2) == [
        "init(rank=...) is needed too",
        "init(address=...) or MASTER_ADDR is needed",
        "init(port=...) or MASTER_PORT is needed",
    ]
    assert problems_of({}, rank=True, world_size=1) == ["rank=True is not a whole number"]
    assert "at one of them" in problems_of({}, rank=0, world_size=2, file="f", port=3)[0]


@given(
    st.dictionaries(
        st.sampled_from([*TORCHRUN, *SLURM]), st.sampled_from(["", "0", "1", "2", "-3", "x", "n[1-2]", "n["])
    )
)
def test_no_environment_gives_anything_but_a_valid_place_or_named_problems(environ: dict[str, str]) -> None:
    place, problems = read_place(environ)
    if problems:
        assert all(problem.text for problem in problems)
        return
    assert 0 <= place.rank < place.world_size
    assert 0 <= place.local_rank < max(place.local_world_size, 1) or place.source("local_world_size") == "default"
    assert place.world_size == 1 or (place.address and 0 < place.port < 65536)


# ---------------------------------------------------------------------- machines


def test_local_fields_come_from_the_machines_where_no_launcher_gave_them() -> None:
    machines = ["a", "b", "a", "b", "a"]
    places = [place_on_machines(Place(rank, 5, 0, 1, 0, "h", 1, "", "environment", ()), machines) for rank in range(5)]
    assert [(p.local_rank, p.local_world_size, p.node_rank) for p in places] == [
        (0, 3, 0), (0, 2, 1), (1, 3, 0), (1, 2, 1), (2, 3, 0),
    ]  # fmt: skip
    given_ = place_on_machines(find_place(TORCHRUN), ["a", "b"])
    assert (given_.local_rank, given_.local_world_size) == (1, 2), "the launcher's word counts"


def record(rank: int, **changes: object) -> Record:
    fields = {
        "rank": rank, "world_size": 2, "local_rank": None, "pid": 10 + rank, "host": f"h{rank}", "machine": "m",
        "address": "", "cores": "f", "gpus": 0, "visible_gpus": "", "lockstep": "1", "torch": "2.13.0",
    }  # fmt: skip
    return Record(**{**fields, **changes})  # pyright: ignore


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({}, {}, ""),
        ({}, {"torch": "2.12.0"}, "rank 1 on h1 (pid 11) has lockstep 1 and torch 2.12.0"),
        ({"local_rank": 0, "gpus": 2}, {"local_rank": 0, "gpus": 2}, "both were given local rank 0"),
        ({"local_rank": 0}, {"local_rank": 0}, ""),
        ({"local_rank": 0}, {"local_rank": 0, "machine": "n"}, ""),
        ({"gpus": 1}, {"gpus": 1}, "h0 has 1 GPU(s) for 2 ranks"),
        ({"gpus": 2}, {"gpus": 2}, ""),
        ({"gpus": 1}, {"gpus": 1, "machine": "n"}, ""),
        ({"gpus": 1, "visible_gpus": "0"}, {"gpus": 1, "visible_gpus": "1"}, ""),
        ({"gpus": 1, "visible_gpus": "3"}, {"gpus": 1, "visible_gpus": "3"}, "(CUDA_VISIBLE_DEVICES=3)"),
    ],
)
def test_what_keeps_ranks_from_being_one_job(first: dict, second: dict, expected: str) -> None:
    text = disagreement([record(0, **first), record(1, **second)])
    assert (expected in text) if expected else text == ""


# ---------------------------------------------------------------------- Slurm's notations


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3,7],m2", ["n1", "n2", "n3", "n7", "m2"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[001,010]x", ["n001x", "n010x"]),
        ("r[1-2]n[3-4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
        ("a.example.org,b-[1].example.org", ["a.example.org", "b-1.example.org"]),
    ],
)
def test_host_lists(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "n[1-", "n1]", "n[3-1]", "n[a-b]", "n[]", "n1,,n2", "n[1,[2]]"])
def test_host_lists_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no|unbalanced"):
        expand_hosts(text)


def test_task_counts() -> None:
    assert expand_tasks("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(ValueError, match="no count"):
        expand_tasks("2x3")


def test_neighbouring_jobs_and_steps_have_ports_of_their_own() -> None:
    ports = {slurm_port(job, step) for job in range(500, 520) for step in range(20)}
    assert len(ports) == 400
    assert all(1024 < port < 32768 for port in ports)


# ---------------------------------------------------------------------- cores


@pytest.mark.parametrize(
    ("mask", "neighbours", "quota", "threads"),
    [
        (0xFFFF, [0xFFFF], float("inf"), 16),
        (0xFFFF, [0xFFFF] * 4, float("inf"), 4),
        (0x0F, [0x0F, 0xF0], float("inf"), 4),  # pinned to their own: nothing is shared
        (0b11, [0b11] * 3, float("inf"), 1),
        (0xFFFF, [0xFFFF] * 2, 4.0, 2),
        (0xFF, [0xFF] * 3, float("inf"), 2),
        (0b1, [0b1], 0.5, 1),
    ],
)
def test_ranks_times_threads_are_the_cores(mask: int, neighbours: list[int], quota: float, threads: int) -> None:
    assert fair_threads(mask, neighbours, quota) == threads


def test_core_mask_is_the_affinity() -> None:
    assert bin(core_mask()).count("1") == len(os.sched_getaffinity(0))


def test_quota_of_nested_control_groups(tmp_path: Path) -> None:
    assert core_quota(tmp_path) == float("inf")
    membership = tmp_path / "proc/self/cgroup"
    membership.parent.mkdir(parents=True)
    root = tmp_path / "sys/fs/cgroup"
    (root / "job/step").mkdir(parents=True)
    (root / "cpu/job").mkdir(parents=True)
    membership.write_text("0::/job/step\n")
    assert core_quota(tmp_path) == float("inf")
    (root / "job/step/cpu.max").write_text("max 100000\n")
    (root / "job/cpu.max").write_text("150000 100000\n")
    assert core_quota(tmp_path) == 1.5
    membership.write_text("3:cpuset:/job\n2:cpu:/job\n")
    (root / "cpu/job/cpu.cfs_quota_us").write_text("250000\n")
    (root / "cpu/job/cpu.cfs_period_us").write_text("100000\n")
    assert core_quota(tmp_path) == 2.5


def test_is_running() -> None:
    assert is_running(os.getpid())
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert not is_running(child), "a zombie has ended"
    os.waitpid(child, 0)
    assert not is_running(child)


# ---------------------------------------------------------------------- interfaces


def test_interfaces() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") == ""
    assert local_address("127.0.0.1") == "127.0.0.1"
    assert gloo_interface([], one_machine=True) == "lo"
    assert gloo_interface(["", "127.0.1.1"], one_machine=False) == "", "loopback leads to no other machine"


def test_a_machine_whose_name_leads_nowhere_gets_the_interface_towards_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lockstep.comm.preflight.resolve", lambda host, port: ["127.0.1.1"])
    monkeypatch.setattr("lockstep.comm.preflight.local_address", lambda towards: {"10.0.0.9": "127.0.0.1"}[towards])
    assert gloo_interface(["127.0.1.1", "10.0.0.9"], one_machine=False) == "lo", "the one that has the local address"
    monkeypatch.setattr("lockstep.comm.preflight.resolve", lambda host, port: ["10.0.0.5"])
    assert gloo_interface(["10.0.0.9"], one_machine=False) == "", "gloo finds the right one by the machine's name"
    monkeypatch.setattr("lockstep.comm.preflight.resolve", lambda host, port: "a..b".encode("idna"))
    assert gloo_interface(["127.0.1.1", "10.0.0.9"], one_machine=False) == "lo", "a name that no resolver takes"


def test_a_machine_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_ipv6(family: int, *rest: object) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        return plain(family, *rest)

    plain = socket.socket
    monkeypatch.setattr(socket, "socket", without_ipv6)
    assert local_address("fe80::1") == ""
    place = find_place({**PLAIN, "RANK": "0", "MASTER_ADDR": "fe80::1"})
    held = listen(place, ["fe80::1"], everywhere=False)
    assert (held.listener, held.taken) == (None, False)
    assert "that fails: Address family not supported" in held.problem
