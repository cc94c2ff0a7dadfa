"""Ranks whose steps differ: an error on all of them, which says what each was doing, and no hang."""

from __future__ import annotations

import collections
import contextlib
from typing import Any

import pytest
import torch

import lockstep
from lockstep.comm.communicator import Communicator
from lockstep.errors import CollectiveMismatch, PeerFailed, ShardingError
from lockstep.testing.worlds import run_processes
from shard_models import MLP_UNITS, mlp
from shard_sides import Side, seeded
from shm_ranks import LIMIT_S, shared

DIFFERENT = 1  # the rank that does something else, in its third step


def step(model: Any, inputs: torch.Tensor, what: str) -> None:
    model.zero_grad()
    if what == "no backward":
        model(inputs)
        return
    with torch.no_grad() if what == "no gradients" else contextlib.nullcontext():
        loss = model(inputs).pow(2).mean()
    if what == "no gradients":
        return
    loss.backward(retain_graph=True)
    if what == "another backward":
        loss.backward()


def go_on_after(comm: Communicator, what: str) -> tuple[str, bool]:
    """What this rank heard, and whether the gradients of the step after that are right."""
    model = seeded(mlp)
    Side("ours", comm, comm).shard_units(model, MLP_UNITS)
    inputs = torch.ones(4, 8)
    steps = (what if number == 2 and comm.rank == DIFFERENT else "" for number in range(5))
    with pytest.raises(CollectiveMismatch) as raised:
        collections.deque(step(model, inputs, special) for special in steps)
    for _ in range(2):
        step(model, inputs, "")
    alone = seeded(mlp)
    alone(inputs).pow(2).mean().backward()
    found = Side("ours", comm, comm).snapshot(model)
    grads = {f"grad {name}": param.grad for name, param in alone.named_parameters() if param.grad is not None}
    return str(raised.value), all(torch.allclose(found[name], grad, atol=1e-6) for name, grad in grads.items())


def in_both_memories(comm: Communicator, what: str) -> list[tuple[str, bool]]:
    with shared(comm) as ours:
        return [go_on_after(comm, what), go_on_after(ours, what)]


FORWARD, EVALUATION, BACKWARD = "a forward with gradients", "a forward without gradients", "a backward"


@pytest.mark.parametrize(
    ("what", "others", "different"),
    [
        ("no backward", BACKWARD, FORWARD),
        ("another backward", FORWARD, BACKWARD),
        ("no gradients", FORWARD, EVALUATION),
    ],
)
def test_steps_that_differ(what: str, others: str, different: str) -> None:
    for found in run_processes(3, in_both_memories, what, timeout_s=LIMIT_S):
        for heard, is_right in found:
            assert f"rank 0 begins {others}; rank 1 begins {different}; rank 2 begins {others}" in heard
            assert is_right


def change_in_forward(comm: Communicator) -> list[str]:
    """Rank 1 alone changes a whole parameter in memory that all see."""
    heard = []
    with shared(comm) as ours:
        model: Any = seeded(mlp)
        lockstep.fully_shard(model, mesh=ours)

        def change(*_: object) -> None:
            with torch.no_grad():
                model[0].bias.add_(1)

        for number in range(3):
            handle = model[1].register_forward_hook(change) if (comm.rank, number) == (1, 1) else None
            try:
                model(torch.ones(4, 8)).sum().backward()
                heard.append("")
            except (ShardingError, PeerFailed) as error:
                heard.append(f"{type(error).__name__}: {error}")
            if handle is not None:
                handle.remove()
    return heard


def test_a_whole_parameter_that_one_rank_changes() -> None:
    for rank, (first, second, third) in enumerate(run_processes(2, change_in_forward, timeout_s=LIMIT_S)):
        assert (first, third) == ("", "")
        assert second.startswith("ShardingError" if rank else "PeerFailed"), second
        assert ("0.bias" if rank else "rank 1") in second
