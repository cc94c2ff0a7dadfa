"""What `lockstep doctor` makes of the reports of all ranks: versions, ways, clocks, speed."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from lockstep.launch.doctor import group
from lockstep.launch.doctor.check import Check
from lockstep.launch.doctor.group import Facts, Link, Pair


def verdicts(checks: list[Check]) -> list[str]:
    return [check.status for check in checks]


def fact(rank: int, host: str = "a", **changes: object) -> Facts:
    made = Facts(
        rank=rank,
        host=host,
        machine=host,
        pid=100 + rank,
        versions={"torch": "2.13.0", "cuda": ""},
        devices=0,
        gpus=0,
        addresses=[f"10.0.0.{ord(host) - 96}"],
        port=4000 + rank,
        meets_at="a",
        leads_to=["10.0.0.1"],
    )
    made.update(changes)  # pyright: ignore[reportCallIssue, reportArgumentType]
    return made


def test_machines_that_did_not_come() -> None:
    came = [group.Came(host=name, pid=7, node_rank=number) for name, number in (("a", 0), ("c", 2))]
    assert group.check_machines(came, 2, 3.0, is_static=False).status == "ok"
    late = group.check_machines(came, 4, 3.0, is_static=True)
    assert late.status == "FAIL"
    assert "2 of 4 came in 3 s: a (node rank 0), c (node rank 2); node rank 1, 3 did not" in late.found
    twice = group.check_machines([came[0], {**came[1], "node_rank": 0}], 2, 3.0, is_static=True)
    assert "node rank 0 was given twice: a (pid 7) and c (pid 7)" in twice.found


def test_ranks_and_versions() -> None:
    assert group.check_ranks([fact(0), fact(1, "b")], 2, 0).found == "2 on 2 machines"
    assert "missing: 1, 2" in group.check_ranks([fact(0)], 3, 1).found
    assert group.check_ranks([], 0, 1).status == "FAIL"
    assert verdicts(group.check_same_versions([fact(0), fact(1)])) == ["ok"]
    odd = fact(2, "b", versions={"torch": "2.12.0", "cuda": "13"})
    torch, cuda = group.check_same_versions([fact(0), fact(1), odd])
    assert "torch differs: 2.13.0 on ranks 0, 1 (a); 2.12.0 on rank 2 (b)" in torch.found
    assert torch.fix.startswith("pip install torch==2.13.0")
    assert "cuda differs: none on ranks 0, 1 (a); 13 on rank 2 (b)" in cuda.found


def test_gpus_that_torch_cannot_use() -> None:
    assert group.check_torch_gpus([fact(0), fact(1, devices=2, gpus=2)]) == []
    (check,) = group.check_torch_gpus([fact(0, devices=2), fact(1, devices=2, gpus=2)])
    assert "rank 0 (a): 2 GPUs, of which torch can use none: torch has no CUDA" in check.found
    (check,) = group.check_torch_gpus([fact(0, devices=2, versions={"cuda": "13"})])
    assert "driver is too old" in check.found


def test_links_and_meeting() -> None:
    facts = {0: fact(0), 1: fact(1, "b")}
    there, back = Link(src=0, dst=1, result="open", detail=""), Link(src=1, dst=0, result="silent", detail="no answer")
    assert group.check_links([], facts) == []
    assert verdicts(group.check_links([there], facts)) == ["ok"]
    (check,) = group.check_links([there, back], facts)
    assert check.found == "rank 1 (b) cannot reach rank 0 (a) at 10.0.0.1:4000: no answer"
    assert "another network: export GLOO_SOCKET_IFNAME" in check.fix
    (check,) = group.check_links([{**back, "result": "refused"}], facts)
    assert check.fix == "on a: iptables -I INPUT -s 10.0.0.2 -p tcp -j ACCEPT, or ufw allow from it"
    assert len(group.check_links([back] * 9, facts)) == 5
    assert group.check_meeting(list(facts.values())) == []
    (check,) = group.check_meeting([fact(0), fact(1, "b", leads_to=["127.0.1.1"])])
    assert "leads to that machine itself" in check.found
    assert check.fix.endswith("--local-addr 10.0.0.1")
    assert "not known" in group.check_meeting([fact(0), fact(1, "b", leads_to=[])])[0].found
    assert group.check_meeting([fact(0), fact(1, leads_to=["127.0.0.1"])]) == []  # the same machine


def test_errors_are_said_once() -> None:
    facts = {rank: fact(rank) for rank in range(3)}
    same, other = group.check_joined({0: "rank 0: x", 2: "rank 2: x", 1: "y"}, facts)
    assert (same.found, other.found) == ("ranks 0, 2 (a): x", "rank 1 (a): y")
    assert group.check_joined({}, facts) == []


def test_clocks() -> None:
    facts = {0: fact(0), 1: fact(1, "b")}
    near = group.Clock(rank=1, offset_s=0.02, error_s=0.001)
    assert verdicts(group.check_clocks([near], facts)) == ["ok"]
    assert verdicts(group.check_clocks([{**near, "offset_s": 0.3, "error_s": 0.5}], facts)) == ["ok"]  # nobody knows
    (check,) = group.check_clocks([{**near, "offset_s": -3.5}], facts)
    assert "b is 3.5 s behind rank 0's machine" in check.found
    assert group.check_clocks([], facts) == []


def test_all_reduce() -> None:
    right = group.Reduced(nbytes=16 * 2**20, seconds=0.01, is_right=True, transport="shm (cpu)", warning="")
    assert group.check_all_reduce([]) == []
    (check,) = group.check_all_reduce([right, {**right, "seconds": 0.02}])
    assert check.found.startswith("16 MiB in 20 ms over shm (cpu)")
    assert verdicts(group.check_all_reduce([right, {**right, "is_right": False}])) == ["FAIL"]
    assert verdicts(group.check_all_reduce([{**right, "warning": "no shared memory"}, right])) == ["ok", "warn"]


def pairs(seconds: Mapping[tuple[int, int], float], nbytes: int = 4 * 2**20) -> list[Pair]:
    return [Pair(first=a, second=b, nbytes=nbytes, seconds=s) for (a, b), s in seconds.items()]


def test_a_pair_that_is_slower_than_the_others_is_named() -> None:
    facts = {rank: fact(rank, "ab"[rank // 3]) for rank in range(6)}
    even = {(a, b): 0.002 for a in range(6) for b in range(a + 1, 6)}
    assert verdicts(group.check_pairs(pairs(even), facts)) == ["ok", "ok"]  # each kind has its own median
    assert verdicts(group.check_pairs(pairs({**even, (0, 4): 0.0059}), facts)) == ["ok", "ok"]
    local, remote = group.check_pairs(pairs({**even, (1, 4): 0.008}), facts)
    assert local.status == "ok"
    assert remote.status == "warn"
    assert "rank 1 (a) and rank 4 (b): 0.524 GB/s, 4.0 times slower than the median between machines" in remote.found
    slow = {pair: 0.02 for pair in even if 5 in pair and pair[0] < 3}
    checks = group.check_pairs(pairs({**even, **slow}), facts)
    assert verdicts(checks) == ["ok", "warn", "warn", "warn"]
    assert all("rank 5 is in all slow pairs" in check.fix for check in checks[1:])
    assert group.check_pairs([], facts) == []
    local, _ = group.check_pairs(pairs({**even, (0, 1): 0.02}), facts)
    assert local.fix == "other programs on their cores? see top"  # no cable joins them


def test_a_network_that_is_slow_as_a_whole() -> None:
    facts = {0: fact(0), 1: fact(1, "b")}
    assert verdicts(group.check_pairs(pairs({(0, 1): 4.0}), facts)) == ["warn"]
    (check,) = group.check_pairs(pairs({(0, 1): 0.004}), facts)
    assert check.found == "1 between machines: 1.05 GB/s each way"


@pytest.mark.parametrize("world_size", [1, 2, 3, 16, 17, 18, 33])
def test_every_pair_is_measured_once(world_size: int) -> None:
    found = group.stages(world_size)
    met = [pair for stage in found for pair in stage]
    assert sorted(met) == [(a, b) for a in range(world_size) for b in range(a + 1, world_size)]
    for stage in found:
        busy = [rank for pair in stage for rank in pair]
        assert len(busy) == len(set(busy))
        assert len(stage) == (1 if world_size <= 16 else world_size // 2)
