"""Two hosts with two ranks each, made of one machine: the ranks of one host are one machine to lockstep."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import comm_cases
import lockstep
import warm_programs
from lockstep.comm import preflight
from lockstep.comm.communicator import Communicator
from lockstep.comm.hierarchical import HierarchicalTransport
from lockstep.comm.reduction import tree_reduce
from lockstep.comm.transport import TransportLayer
from lockstep.errors import CommError, TransportClosed
from lockstep.parallel.named_state import whole_tensors
from machines_apart import ADDRESSES, MachinesApart, skip_without_machines

RANKS_PER_HOST = 2
WORLD_SIZE = 2 * RANKS_PER_HOST
TIMEOUT_S = 20.0
_PATIENCE_S = 100.0  # for all processes, most of it for their imports
_PORT = "29500"


class Ended(NamedTuple):
    """How the process of one rank ended."""

    code: int
    said: dict[str, Any]
    log: str


class Hosts(MachinesApart):
    """Two machines, and the ranks of a job on them."""

    def run(self, *arguments: str, folder: Path) -> list[Ended]:
        """One process for each rank, as torchrun would start it; how they ended, in rank order."""
        ranks = [self._start(rank, arguments, folder) for rank in range(WORLD_SIZE)]
        deadline = time.monotonic() + _PATIENCE_S
        try:
            for process in ranks:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return [_ended(process.returncode, rank, folder) for rank, process in enumerate(ranks)]

    def _start(self, rank: int, arguments: tuple[str, ...], folder: Path) -> warm_programs.Popen:
        host, local_rank = divmod(rank, RANKS_PER_HOST)
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(WORLD_SIZE),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(RANKS_PER_HOST),
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": _PORT,
            "GLOO_SOCKET_IFNAME": "link0",
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }
        command = [*self.inside(host), sys.executable, __file__, str(folder), *arguments]
        with (folder / f"rank{rank}.log").open("wb") as log:
            return warm_programs.Popen(command, env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT)


def _ended(code: int, rank: int, folder: Path) -> Ended:
    said = folder / f"rank{rank}.json"
    return Ended(code, json.loads(said.read_text()) if said.exists() else {}, (folder / f"rank{rank}.log").read_text())


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    skip_without_machines()
    with contextlib.closing(Hosts(names=())) as made:
        yield made


@pytest.mark.slow
@pytest.mark.limit_s(120)
@pytest.mark.parametrize(
    ("victim", "task"), [(3, "work"), (2, "wait")], ids=["and one is killed", "a leader is killed"]
)
def test_two_hosts(hosts: Hosts, tmp_path: Path, victim: int, task: str) -> None:
    """The table of cases, sums of the tree, steps with whole copies and with pieces, over shared memory and a network.
    Then one rank is killed, in the middle of steps with pieces.
    """
    for rank, (code, said, log) in enumerate(hosts.run(task, str(victim), folder=tmp_path)):
        assert code == (-signal.SIGKILL if rank == victim else 0), f"rank {rank}:\n{log}"
        assert said["machines"] == 2
        assert said["cases"] == (list(comm_cases.CASES) if task == "work" else [])
        if rank != victim:
            assert (said["error"], said["lost"]) == ("PeerFailed", victim), f"rank {rank}: {said}\n{log}"
            assert f"rank {victim} (pid" in said["text"]
            assert "was killed" in said["text"]


# ---------------------------------------------------------------------- what runs on each rank


def values(rank: int, count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


def sums_are_the_tree(comm: Communicator) -> None:
    for count in (1, 1000, 3_000_000):
        expected = tree_reduce([values(rank, count) for rank in comm.global_ranks], "mean")
        tensor = values(comm.global_ranks[comm.rank], count)
        comm.all_reduce(tensor, "mean")
        assert torch.equal(tensor, expected)
        tensor = comm.empty(count)
        tensor.copy_(values(comm.global_ranks[comm.rank], count))
        comm.all_reduce(tensor, "mean", async_op=True).wait()
        assert torch.equal(tensor, expected)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 90), nn.Tanh(), nn.Linear(90, 7))


def step_is_the_tree(comm: Communicator) -> None:
    """The gradient after DDP's backward is the tree's sum of what each rank would have had alone, its share of it."""
    alone: list[list[Tensor]] = []
    for rank in range(comm.world_size):
        twin = model()
        twin(values(rank, 400).view(10, 40)).pow(2).mean().backward()
        alone.append([param.grad / comm.world_size for param in twin.parameters() if param.grad is not None])
    wrapper = lockstep.DistributedDataParallel(model(), process_group=comm)
    for _ in range(2):  # the first learns, the second launches while backward runs
        wrapper.zero_grad()
        wrapper(values(comm.rank, 400).view(10, 40)).pow(2).mean().backward()
        for param, *grads in zip(wrapper.parameters(), *alone, strict=True):
            assert param.grad is not None
            assert torch.equal(param.grad, tree_reduce(grads, "sum"))


def cut(comm: Communicator, mesh: Any) -> Any:
    made: Any = model()
    for module in (made[0], made[2], made):
        lockstep.fully_shard(module, mesh=mesh)
    return made


def pieces_are_trained_as_copies(comm: Communicator) -> None:
    """Cut over all ranks, and over those of each host; weights after some steps, bit for bit."""
    found: list[list[Tensor]] = []
    wrapper = lockstep.DistributedDataParallel(model(), process_group=comm)
    for trained in (wrapper, cut(comm, comm), cut(comm, comm.mesh(host=2, rank=2))):
        for step in range(3):
            trained(values(comm.rank + 10 * step, 400).view(10, 40)).pow(2).mean().backward()
            lockstep.clip_grad_norm_(trained.parameters(), 0.1)
            with torch.no_grad():
                for param in trained.parameters():
                    assert param.grad is not None
                    param.sub_(param.grad, alpha=0.5)  # no product that is rounded
            trained.zero_grad()
        found.append([whole.clone() for _, whole in whole_tensors(trained)])
    for weights in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(weights, found[0], strict=True))


def work(comm: Communicator) -> list[str]:
    sums_are_the_tree(comm)
    for order in ([0, 2, 1, 3], [3, 0, 1, 2]):  # neighbours on different hosts
        group = comm.split(0, key=order.index(comm.rank))
        assert group is not None
        sums_are_the_tree(group)
    step_is_the_tree(comm)
    pieces_are_trained_as_copies(comm)
    closing_ends_what_is_under_way(comm)
    for case in comm_cases.CASES.values():
        case(comm)
    return list(comm_cases.CASES)


def closing_ends_what_is_under_way(comm: Communicator) -> None:
    """On a leader and on another rank of its host, while the other host has not come."""
    group = comm.split(0)
    assert group is not None
    if comm.rank < RANKS_PER_HOST:
        works = [group.all_reduce(torch.ones(10), async_op=True) for _ in range(2)]
        group.close()
        for work in works:
            with pytest.raises(TransportClosed):
                work.wait()
    comm.barrier()
    group.close()


def error_of_a_dead_rank(comm: Communicator, victim: int) -> CommError:
    """What the others raise once `victim` is gone."""
    trained = cut(comm, comm)

    def train() -> None:
        for step in itertools.count():
            loss = trained(values(comm.rank, 400).view(10, 40)).mean()
            if comm.rank == victim and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()

    with pytest.raises(CommError) as raised:
        train()
    return raised.value


def main(folder: str, task: str, victim: str) -> None:
    answer = Path(folder) / f"rank{os.environ['RANK']}.json"
    with lockstep.init(timeout_s=TIMEOUT_S, verbose=False) as comm:
        machines = comm.all_gather_object(preflight.machine_id())
        below = comm.transport
        while isinstance(below, TransportLayer):
            below = below.inner
        assert isinstance(below, HierarchicalTransport)
        assert comm.transport.name == "shm+gloo"
        said: dict[str, Any] = {"machines": len(set(machines)), "cases": work(comm) if task == "work" else []}
        answer.write_text(json.dumps(said))
        error = error_of_a_dead_rank(comm, int(victim))
    said.update(error=type(error).__name__, lost=getattr(error, "rank", None), text=str(error))
    answer.write_text(json.dumps(said))
    os._exit(0)  # at exit the process that holds the store waits some seconds for the farewell of the dead rank


if __name__ == "__main__":
    main(*sys.argv[1:])
