"""Programs that leave torch's world and make another one: under `lockstep run` each meets, and the guard goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_runs import Run
from ports import free_port

_WORLDS = """
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

way, ports, fault = sys.argv[1], sys.argv[2].split(","), int(sys.argv[3])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.TCPStore("127.0.0.1", int(ports[0]), size, rank == 0) if way == "store" else None
for world in range(3):
    call = {"rank": rank, "world_size": size}
    if way == "fresh":
        os.environ["MASTER_PORT"], call = ports[world], {}
    elif way == "other":
        os.environ["MASTER_PORT"], call = ports[0], {}
    elif way == "tcp":
        call["init_method"] = f"tcp://127.0.0.1:{ports[0]}"
    elif way == "file":
        call["init_method"] = f"file://{os.getcwd()}/meeting"
    elif way == "store":
        call["store"] = store
    elif way == "launcher's store":
        call["store"] = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, rank == 0)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30), **call)
    half = dist.new_group([0, 1])
    total = torch.full((3,), rank + 1.0 + world)
    dist.all_reduce(total, group=half)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    if world == fault:
        dist.all_reduce(total, dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)
    del model, optimizer
    dist.barrier()
    dist.destroy_process_group()
    print("world", world, total.tolist())
"""


_SPAWNING = """
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(index, size, port):
    os.environ.update(RANK=str(index), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    total = torch.full((3,), index + 1.0)
    dist.all_reduce(total)
    print("spawned", total.tolist(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    way, port = sys.argv[1:]
    if way == "spawn":
        mp.spawn(work, (2, port), 2)
    else:
        os.environ["MASTER_PORT"] = port
        mp.set_start_method(way)
        processes = [mp.Process(target=work, args=(index, 2), kwargs={"port": port}) for index in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
"""


_RPC = """
import os
import sys

import torch.multiprocessing as mp
from torch.distributed import rpc


def work(index, port):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port)
    for world in range(2):
        rpc.init_rpc(f"worker{index}", rank=index, world_size=2)
        if index:
            print("asked", rpc.rpc_sync("worker0", pow, (world, 2)), flush=True)
        rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), 2)
"""


def run(folder: Path, way: str, fault: int = -1, guard: str = "on") -> Run:
    (folder / "script.py").write_text(_WORLDS)
    ports = ",".join(str(free_port()) for _ in range(3))
    return Run(folder, "run", "--nproc-per-node", "2", "script.py", way, ports, str(fault), LOCKSTEP_GUARD=guard)


@pytest.mark.limit_s(90)
@pytest.mark.parametrize("way", ["same", "fresh", "other", "tcp", "file", "store", "launcher's store"])
def test_each_world_meets_afresh(way: str, tmp_path: Path) -> None:
    """In the launcher's store, at ports of the program's own, in a file, or in the program's store, if it is one."""
    said = run(tmp_path, way).end(0)
    for world in range(3):
        assert said.count(f"world {world} {[3.0 + 2 * world] * 3}") == 2
    assert "MISMATCH" not in said
    assert "may never meet" not in said
    assert not list(tmp_path.glob("meeting*"))


@pytest.mark.limit_s(90)
def test_worlds_meet_where_nothing_is_guarded(tmp_path: Path) -> None:
    assert run(tmp_path, "fresh", guard="off").end(0).count("world 2 ") == 2


@pytest.mark.limit_s(90)
@pytest.mark.parametrize(("way", "start"), [("spawn", "warm"), ("forkserver", "fresh"), ("fork", "warm")])
def test_processes_that_a_script_starts_itself_meet_as_without_a_launcher(way: str, start: str, tmp_path: Path) -> None:
    """At a port of their own, where the launcher's variables would let none of them listen; it is said what to do."""
    (tmp_path / "script.py").write_text(_SPAWNING)
    said = Run(tmp_path, "run", "--start", start, "script.py", way, str(free_port())).end(0)
    assert said.count("spawned [3.0, 3.0, 3.0]") == 2
    assert said.count("lockstep: processes that rank 0 has started are ranks of their own: nobody watches them.") == 1
    assert "`lockstep run -n N` starts N ranks" in said


@pytest.mark.limit_s(90)
def test_processes_that_a_script_starts_itself_call_each_other(tmp_path: Path) -> None:
    """By torch's RPC, which meets in the same way, twice."""
    (tmp_path / "script.py").write_text(_RPC)
    said = Run(tmp_path, "run", "script.py", str(free_port())).end(0)
    assert ("asked 0" in said, "asked 1" in said) == (True, True)
    assert said.count("lockstep: processes that rank 0 has started are ranks of their own: nobody watches them.") == 1


@pytest.mark.limit_s(90)
def test_the_third_world_is_guarded_as_the_first(tmp_path: Path) -> None:
    said = run(tmp_path, "same", fault=2).end(1)
    assert "MISMATCH in step 7, group WORLD'3." in said
    for rank, how in enumerate(("sum", "max")):
        assert f"rank {rank}: all_reduce float32 [3] {how} at script.py:37 <module>" in said
