"""Sharded training over several hosts: the bits of one host, nothing gathered inside one, and every failure named."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import lockstep
import shard_programs
from host_ranks import hosts, pretending
from killed_steps import train_and_die, wait_for_survivors
from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.comm.communicator import Communicator
from lockstep.comm.op import CommOp, Work
from lockstep.comm.transport import Transport, TransportLayer
from lockstep.comm.waiting import wait_until
from lockstep.errors import CommError, ConfigError, PeerFailed, PeerLost
from lockstep.parallel.fsdp import FullyShardedDataParallel
from lockstep.parallel.shard_slot import slot_of
from lockstep.parallel.torch_fsdp import MixedPrecisionPolicy, ShardingStrategy
from lockstep.testing.failures import RankFailed
from lockstep.testing.worlds import run_processes
from lockstep.train.evaluate import prove_equal
from shard_models import MLP_UNITS, Branches, Checkpointed, Tiny, mlp
from shard_sides import ADAMW, Side, difference, scalar, seeded, train
from shm_ranks import LIMIT_S, named_memory, named_since

TWO_AND_TWO, ONE_AND_TWO, INTERLEAVED = (0, 0, 1, 1), (0, 1, 1), (0, 1, 0, 1)


def groups_of(model: nn.Module) -> list[Any]:
    slots = [slot_of(param) for param in model.parameters()]
    return list({id(slot.group): slot.group for slot in slots if slot is not None}.values())


# ------------------------------------------------------------------ bits


def branches(side: Side) -> Any:
    """Every rank uses another unit, some of them none."""
    model: Any = seeded(Branches)
    side.shard_units(model, ("enter", "left", "right"))
    optimizer = ADAMW(model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        use = ("left", "right", "none")[(side.rank + step // 2) % 3]
        side.backward(scalar(model(side.batch(step, 6, 8), use)), model)
        lockstep.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return side.snapshot(model)


def programs(side: Side) -> list[Any]:
    """Sizes that nothing divides, units used here and there, dtypes, accumulation, what stays whole."""
    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    return [
        train(side, mlp, MLP_UNITS),
        train(side, Tiny, ("narrow", "wide"), reshard_after_forward=False),
        train(side, mlp, MLP_UNITS, mp_policy=narrow),
        branches(side),
        shard_programs.accumulation_of_both_kinds(side),
    ]


def same_bits(comm: Communicator, machines: Sequence[int]) -> list[str | None]:
    """Over all ranks, and, where hosts have equally many, inside hosts: what each differs in from one host."""
    expected = programs(Side("ours", comm, comm))
    with hosts(comm, machines) as ours:
        assert ours.transport.name == "shm+gloo"
        assert ours.shared(5) is None
        meshes = [ours, *([ours.mesh(replica=2, shard=2)] if comm.world_size == 4 else [])]
        return [difference(programs(Side("ours", ours, mesh)), expected) for mesh in meshes]


@pytest.mark.parametrize("machines", [ONE_AND_TWO, TWO_AND_TWO, INTERLEAVED], ids=str)
def test_the_same_bits_on_one_host_and_on_two(machines: Sequence[int]) -> None:
    for found in run_processes(len(machines), same_bits, machines):
        assert found == [None] * (2 if len(machines) == 4 else 1)


# ------------------------------------------------------------------ what goes where


class Counter(TransportLayer):
    """Adds up what is given to each group, in bytes, by kind and purpose."""

    def __init__(self, inner: Transport, given: dict[tuple[tuple[int, ...], str, str], int]) -> None:
        super().__init__(inner)
        self.given = given

    def submit(self, op: CommOp) -> Work:
        key = (self.global_ranks, op.kind, op.label.split()[0])
        self.given[key] = self.given.get(key, 0) + sum(tensor.nbytes for tensor in op.inputs)
        return self.inner.submit(op)

    def over(self, inner: Transport) -> Counter:
        return Counter(inner, self.given)


def said_in_a_step(comm: Communicator) -> dict[tuple[tuple[int, ...], str, str], int]:
    """In the third step of a model that is cut inside hosts."""
    given: dict[tuple[tuple[int, ...], str, str], int] = {}
    with hosts(comm, TWO_AND_TWO) as ours:
        mesh = Communicator(Counter(ours.transport, given)).mesh(replica=2, shard=2)
        model = seeded(mlp)
        Side("ours", comm, mesh).shard_units(model, MLP_UNITS)
        for _ in range(3):
            given.clear()
            model(torch.randn(4, 8)).sum().backward()
        for group in groups_of(model):
            assert group.is_shared
            assert group.comm.transport.name == "shm"
        assert sum(group.layout.shard_numel for group in groups_of(model)) == 17 * 8 + 17 + 9 * 33 + 9 + 2 * 17 + 2
    return given


def test_between_hosts_go_gradients_of_pieces_and_nothing_else() -> None:
    pieces = 4 * (17 * 8 + 17 + 9 * 33 + 9 + 2 * 17 + 2)
    for rank, given in enumerate(run_processes(4, said_in_a_step)):
        host, line = ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]
        control = {key: given.pop(key) for key in tuple(given) if key[0] == (0, 1, 2, 3)}
        assert {label for _, _, label in control} == {"shard.begin", "shard.round"}
        assert sum(control.values()) < 100
        assert given == {(host, "reduce_scatter", "reduce"): 2 * pieces, (line, "all_reduce", "reduce"): pieces}


# ------------------------------------------------------------------ one word


def digest(comm: Communicator, sharding: Any, mesh: Any = None) -> str:
    """After some steps, with torch's default group. Their length is a power of two: it rounds no product."""
    model = lockstep.parallelize(seeded(lambda: Checkpointed(False)), sharding, mesh=mesh)
    optimizer = lockstep.optimizer_for(model, torch.optim.SGD, lr=2**-4)
    generator = torch.Generator().manual_seed(comm.rank)
    for _ in range(3):
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        lockstep.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if sharding == "hybrid":
        assert all(group.is_shared for group in groups_of(model))
    return prove_equal(model, comm)


def digests(comm: Communicator, machines: Sequence[int]) -> dict[str, str]:
    with pretending(comm.rank, machines):
        found = {sharding: digest(comm, sharding) for sharding in ("none", "optimizer", "gradients", "full", "hybrid")}
        if machines == TWO_AND_TWO:
            found["a mesh of torch's"] = digest(comm, "hybrid", init_device_mesh("cpu", (2, 2)))
        wrapped: Any = FullyShardedDataParallel(mlp(), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
        wrapped(torch.ones(2, 8)).sum().backward()
        members = {(group.comm.global_ranks, group.replicate_comm.global_ranks) for group in groups_of(wrapped)}
    here = tuple(rank for rank, machine in enumerate(machines) if machine == machines[comm.rank])
    there = tuple(rank for rank in range(len(machines)) if rank % 2 == comm.rank % 2)
    assert members == {(here, there)}
    return found


def test_one_word_cuts_inside_hosts() -> None:
    """Every sharding has the digest of whole copies, also where the script says nothing of hosts."""
    for found in run_processes(4, digests, TWO_AND_TWO):
        assert len(found) == 6
        assert len(set(found.values())) == 1, found


def refused(comm: Communicator, machines: Sequence[int]) -> str:
    with pretending(comm.rank, machines), pytest.raises(ConfigError) as raised:
        lockstep.parallelize(mlp(), "hybrid")
    return str(raised.value)


def test_hosts_that_differ_cannot_hold_equal_pieces() -> None:
    for said in run_processes(3, refused, ONE_AND_TWO):
        assert "the hosts have ranks [0], [1, 2]" in said


# ------------------------------------------------------------------ checkpoints


def saved_and_loaded(comm: Communicator, folder: str) -> list[bool]:
    """From two hosts to one and back, each way into another layout."""
    found: list[bool] = []
    model = seeded(mlp)
    with hosts(comm, TWO_AND_TWO) as ours:
        layouts = [("two", ours, ours.mesh(replica=2, shard=2)), ("one", comm, comm), ("again", ours, ours)]
        before: Any = None
        for number, (name, group, mesh) in enumerate(layouts):
            model = seeded(mlp, seed=number)
            side = Side("ours", comm, mesh)
            side.shard_units(model, MLP_UNITS)
            if before is not None:
                assert Checkpointer(before[0], group).load({"model": model.state_dict()}) is not None
                found.append(difference(side.snapshot(model), before[1]) is None)
            model(side.batch(number, 6, 8)).sum().backward()
            ADAMW(model.parameters()).step()
            model.zero_grad()
            with Checkpointer(Path(folder) / name, group) as checkpointer:
                checkpointer.save(number, {"model": model.state_dict()})
            before = (checkpointer.directory, side.snapshot(model))
    return found


def test_a_checkpoint_of_two_hosts_is_one_of_one(tmp_path: Path) -> None:
    assert run_processes(4, saved_and_loaded, str(tmp_path)) == [[True, True]] * 4


# ------------------------------------------------------------------ ends


def train_and_interrupt(comm: Communicator, folder: str, is_hybrid: bool, place: str) -> str:
    """Rank 1 interrupts rank 0, which waits for it at `place` in the third step, as Ctrl-C does; what each hears."""
    processes, waits = comm.all_gather_object(os.getpid()), Path(folder) / "waits"

    def interrupt(_: torch.Tensor) -> None:
        assert wait_until(waits.exists, LIMIT_S)
        os.kill(processes[0], signal.SIGINT)

    with hosts(comm, TWO_AND_TWO) as ours:
        model = seeded(mlp)
        Side("ours", comm, ours.mesh(replica=2, shard=2) if is_hybrid else ours).shard_units(model, MLP_UNITS)
        try:
            for step in range(4):
                act = {(0, 2): lambda _: waits.touch(), (1, 2): interrupt}.get((comm.rank, step), lambda _: None)
                inputs = torch.randn(4, 8)
                if place == "forward":
                    act(inputs)
                out = model(inputs)
                if place == "backward":
                    out.register_hook(act)
                out.sum().backward()
        except (CommError, PeerFailed, KeyboardInterrupt) as error:
            return type(error).__name__
    return "nothing"


@pytest.mark.parametrize(
    ("is_hybrid", "place"), [(False, "forward"), (True, "backward")], ids=["over all, forward", "in hosts, backward"]
)
def test_a_rank_that_is_interrupted(is_hybrid: bool, place: str, tmp_path: Path) -> None:
    """It raises that itself; and no other, on whatever host, waits for its limit."""
    interrupted, *others = run_processes(4, train_and_interrupt, str(tmp_path), is_hybrid, place, timeout_s=LIMIT_S)
    assert interrupted == "KeyboardInterrupt"
    assert all(heard in ("PeerLost", "PeerFailed", "CollectiveMismatch") for heard in others), others


def trained_and_killed(comm: Communicator, folder: str, victim: int, is_hybrid: bool, place: str) -> list[CommError]:
    """`victim` dies at `place`; what the others hear."""
    with hosts(comm, TWO_AND_TWO) as ours:
        model = seeded(mlp)
        Side("ours", comm, ours.mesh(replica=2, shard=2) if is_hybrid else ours).shard_units(model, MLP_UNITS)
        heard = train_and_die(model, place if comm.rank == victim else None)
        wait_for_survivors(comm, folder)
    return heard


@pytest.mark.parametrize(
    ("victim", "is_hybrid", "place"),
    [(1, False, "forward"), (2, True, "backward")],
    ids=["over all, in forward", "in hosts, the leader, in backward"],
)
def test_a_rank_that_is_killed(victim: int, is_hybrid: bool, place: str, tmp_path: Path) -> None:
    before = named_memory()
    with pytest.raises(RankFailed) as raised:
        run_processes(4, trained_and_killed, str(tmp_path), victim, is_hybrid, place, timeout_s=LIMIT_S)
    assert raised.value.errors.keys() == {victim}, str(raised.value)
    assert raised.value.errors[victim].message == "killed by SIGKILL"
    for first, *later in raised.value.results.values():
        assert isinstance(first, PeerLost)
        assert first.rank in (victim, victim // 2 * 2)  # a host's first rank speaks for it where it cannot say more
        assert len(later) >= 1
    assert not named_since(before)
