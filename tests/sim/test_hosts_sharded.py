"""Sharded training on threads that stand for ranks of several hosts: the same bits as whole copies, nobody waits."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import lockstep
import shard_programs
from host_ranks import run_on_hosts
from lockstep.comm.communicator import Communicator
from lockstep.errors import PeerFailed
from lockstep.parallel.shard_slot import slot_of
from shard_models import MLP_UNITS, mlp
from shard_sides import Side, difference

WHOLE = mlp()  # made once: ranks that are threads share torch's generator
PROGRAMS = (
    shard_programs.parameters_of_one_element,
    shard_programs.tied_weights,
    shard_programs.a_unit_that_nobody_uses,
    shard_programs.accumulation_without_reduction,
    shard_programs.forward_without_gradients_between_steps,
    shard_programs.a_gradient_of_a_gradient,
)


def against_whole_copies(comm: Communicator, program: Callable[[Side], Any], is_hybrid: bool) -> str | None:
    mesh = comm.mesh(replica=2, shard=-1) if is_hybrid else comm
    return difference(program(Side("ours", comm, mesh)), program(Side("plain", comm)))


@pytest.mark.parametrize(
    ("machines", "is_hybrid"), [((0, 1, 1), False), ((0, 0, 1, 1), True)], ids=["over all", "in hosts"]
)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_equals_whole_copies(program: Callable[[Side], Any], machines: Sequence[int], is_hybrid: bool) -> None:
    assert run_on_hosts(machines, against_whole_copies, program, is_hybrid) == [None] * len(machines)


def joined(comm: Communicator, counts: Sequence[int]) -> list[dict[str, Tensor | None]]:
    """Weights after ranks had different numbers of batches: cut over all ranks, and inside hosts."""
    found = []
    for mesh in (comm, comm.mesh(replica=2, shard=2)):
        model: Any = copy.deepcopy(WHOLE)
        side = Side("ours", comm, mesh)
        side.shard_units(model, MLP_UNITS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for inputs in model.join(side.batch(step, 4, 8) for step in range(counts[comm.rank])):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(side.snapshot(model))
    return found


def test_hosts_with_different_numbers_of_batches() -> None:
    [[over_all, in_hosts], *others] = run_on_hosts((0, 0, 1, 1), joined, (1, 3, 0, 2))
    assert difference(over_all, in_hosts) is None
    assert all(difference(other, over_all) is None for found in others for other in found)


def cut_twice(comm: Communicator, sharding: Any) -> bool:
    """The ranks let go of the first model at different times."""
    models = [lockstep.parallelize(copy.deepcopy(WHOLE), sharding, mesh=comm)]
    models[0](torch.ones(2, 8)).sum().backward()
    if comm.rank == 1:
        models.clear()
        gc.collect()
    comm.barrier()
    models.append(lockstep.parallelize(copy.deepcopy(WHOLE), sharding, mesh=comm))
    models[-1](torch.ones(2, 8)).sum().backward()
    slots = [slot_of(param) for model in models for param in model.parameters()]
    return {slot and slot.group.comm.global_ranks for slot in slots} == {(0, 1) if comm.rank < 2 else (2, 3)}


def test_hosts_are_cut_alike_whenever_ranks_let_go_of_a_model() -> None:
    assert run_on_hosts((0, 0, 1, 1), cut_twice, "hybrid", timeout_s=10.0) == [True] * 4


def one_hook_raises(comm: Communicator, is_hybrid: bool) -> list[str]:
    """Rank 1's hook on reduced gradients raises in its third step, while the reduction after it waits to begin."""
    mesh = comm.mesh(replica=2, shard=2) if is_hybrid else comm
    model: Any = copy.deepcopy(WHOLE)
    side = Side("ours", comm, mesh)
    side.shard_units(model, MLP_UNITS)
    heard = []
    for step in range(4):
        if (comm.rank, step) == (1, 2):
            model[4].set_all_reduce_hook(raise_once(model[4]))
        try:
            model(torch.ones(4, 8)).square().mean().backward()
            heard.append("")
        except (PeerFailed, ArithmeticError) as error:
            heard.append(type(error).__name__)
            assert all(param.grad is None for param in model.parameters())
        if step < 3:
            model.zero_grad()
    alone = copy.deepcopy(WHOLE)
    alone(torch.ones(4, 8)).square().mean().backward()
    found = side.snapshot(model)
    for name, param in alone.named_parameters():
        torch.testing.assert_close(found[f"grad {name}"], param.grad)
    return heard


def raise_once(unit: Any) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        unit.set_all_reduce_hook(lambda reduced: None)
        raise ArithmeticError

    return hook


@pytest.mark.parametrize("is_hybrid", [False, True], ids=["over all", "in hosts"])
def test_a_rank_that_raises_between_two_reductions(is_hybrid: bool) -> None:
    """It still does what the others wait for, inside its host and between hosts."""
    for rank, heard in enumerate(run_on_hosts((0, 0, 1, 1), one_hook_raises, is_hybrid, timeout_s=10.0)):
        assert heard == ["", "", "ArithmeticError" if rank == 1 else "PeerFailed", ""]
