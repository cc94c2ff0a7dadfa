"""`join`: ranks with fewer batches stay in step, their old batches do not count, and a loop may end in any way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

import lockstep
from lockstep.comm.communicator import Communicator
from lockstep.comm.reduction import tree_reduce
from lockstep.errors import DataError
from lockstep.parallel.fsdp_module import FSDPModule
from lockstep.parallel.uneven_inputs import JoinedBatches
from lockstep.testing.failures import RankFailed
from lockstep.testing.worlds import run_threads
from shard_models import MLP_UNITS, mlp
from shard_sides import SGD, Side

WHOLE = mlp()  # made once: ranks that are threads share torch's generator


def sharded(comm: Communicator) -> Any:
    model = copy.deepcopy(WHOLE)
    Side("ours", comm, comm).shard_units(model, MLP_UNITS)
    assert isinstance(model, FSDPModule)
    return model


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def expected(counts: tuple[int, ...], divide_by_all: bool) -> list[Tensor]:
    """The weights of one process that adds the gradients of the ranks that have a batch of their own."""
    model = copy.deepcopy(WHOLE)
    params = list(model.parameters())
    optimizer = SGD(params)
    for step in range(max(counts)):
        parts: list[list[Tensor]] = []
        for rank, count in enumerate(counts):
            loss = model(batch(step, rank)).pow(2).mean()
            grads = torch.autograd.grad(loss, params)
            parts.append([grad if step < count else torch.zeros_like(grad) for grad in grads])
        divisor = len(counts) if divide_by_all else sum(step < count for count in counts)
        for index, param in enumerate(params):
            param.grad = tree_reduce([part[index] for part in parts], "sum") / divisor
        optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("divide_by_all", [True, False])
@pytest.mark.parametrize("counts", [(3, 1), (0, 2), (2, 3, 0), (1, 1), (2, 0, 1, 4)])
def test_old_batches_do_not_count(counts: tuple[int, ...], divide_by_all: bool) -> None:
    def body(comm: Communicator) -> tuple[Any, list[tuple[bool, int]]]:
        model = sharded(comm)
        optimizer = SGD(model.parameters())
        seen = []
        batches = model.join((batch(step, comm.rank) for step in range(counts[comm.rank])), divide_by_all)
        for inputs in batches:
            seen.append((batches.has_own, batches.active_ranks))
            model(inputs).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = Side("ours", comm, comm).snapshot(model)
        return [state[f"state {name}"] for name, _ in model.named_parameters()], seen

    wanted = expected(counts, divide_by_all)
    for rank, (weights, seen) in enumerate(run_threads(len(counts), body)):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights, wanted, strict=True))
        steps = range(max(counts))
        assert seen == [(step < counts[rank], sum(step < count for count in counts)) for step in steps]


def test_no_rank_has_a_batch() -> None:
    assert run_threads(2, lambda comm: list(sharded(comm).join([]))) == [[], []]


def test_a_second_epoch() -> None:
    def body(comm: Communicator) -> list[int]:
        batches = sharded(comm).join([batch(step, comm.rank) for step in range(1 + comm.rank)])
        return [sum(1 for _ in batches) for _ in range(2)]

    assert run_threads(2, body) == [[2, 2]] * 2


@pytest.mark.parametrize(
    "given",
    [
        {
            "x": torch.arange(6.0).view(2, 3).t(),
            "mask": torch.tensor([True, False]),
            "step": 3,
            "name": "a",
            "none": None,
        },
        (torch.arange(4, dtype=torch.int64), [torch.tensor(1.5), torch.ones(2, dtype=torch.bfloat16)], 0.5, True),
        torch.empty(0, 3),
        [],
    ],
    ids=["dict", "tuple", "empty", "nothing"],
)
def test_a_rank_without_any_batch_gets_one_like_the_others(given: Any) -> None:
    def body(comm: Communicator) -> list[Any]:
        return list(sharded(comm).join([given] if comm.rank else []))

    for received in run_threads(3, body):
        [one] = received
        assert type(one) is type(given)
        leaves, wanted = (_pytree.tree_flatten(value) for value in (one, given))
        assert leaves[1] == wanted[1]
        for mine, theirs in zip(leaves[0], wanted[0], strict=True):
            if isinstance(theirs, Tensor):
                assert mine.dtype == theirs.dtype
                assert torch.equal(mine, theirs)
            else:
                assert mine == theirs


def test_a_batch_that_cannot_be_sent_is_an_error_on_all_ranks() -> None:
    def body(comm: Communicator) -> str:
        with pytest.raises(DataError) as raised:
            list(sharded(comm).join([{"x": torch.ones(2), "what": object()}] if comm.rank == 1 else []))
        comm.barrier()
        return str(raised.value)

    for message in run_threads(3, body):
        assert "rank 1's cannot be sent" in message


class Stop(Exception):
    pass


def leave_by_break(batches: JoinedBatches[Tensor], step: Callable[[Tensor], None]) -> None:
    for number, inputs in enumerate(batches):
        step(inputs)
        if number == 1:
            break


def leave_by_exception(batches: JoinedBatches[Tensor], step: Callable[[Tensor], None]) -> None:
    def body() -> None:
        for number, inputs in enumerate(batches):
            step(inputs)
            if number == 1:
                raise Stop

    with pytest.raises(Stop):
        body()


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_exception])
def test_after_the_loop_every_batch_counts_again(leave: Callable[..., None]) -> None:
    """Left in the second step, when rank 1 has no batch of its own any more."""

    def body(comm: Communicator) -> bool:
        model = sharded(comm)

        def step(inputs: Tensor) -> None:
            model.zero_grad()
            model(inputs).pow(2).mean().backward()

        leave(model.join([batch(n, comm.rank) for n in range(1 if comm.rank else 3)], False), step)
        step(batch(7, comm.rank))
        alone = copy.deepcopy(WHOLE)
        for rank in range(2):
            (alone(batch(7, rank)).pow(2).mean() / 2).backward()
        found = Side("ours", comm, comm).snapshot(model)
        grads = {name: param.grad for name, param in alone.named_parameters() if param.grad is not None}
        return all(torch.allclose(found[f"grad {name}"], grad, atol=1e-6) for name, grad in grads.items())

    assert run_threads(2, body) == [True, True]


@pytest.mark.parametrize("no_sync", [True, False])
def test_accumulation(no_sync: bool) -> None:
    """Rank 1 runs out in the middle of the second step: its half of it counts, the other half is zeros."""
    counts = (4, 3)

    def body(comm: Communicator) -> Any:
        model = sharded(comm)
        optimizer = SGD(model.parameters())
        for number, inputs in enumerate(model.join([batch(n, comm.rank) for n in range(counts[comm.rank])])):
            model.set_requires_gradient_sync(number % 2 == 1 or not no_sync)
            model(inputs).pow(2).mean().backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return Side("ours", comm, comm).snapshot(model)

    alone = copy.deepcopy(WHOLE)
    optimizer = SGD(alone.parameters())
    for number in range(4):
        for rank in range(2):
            if number < counts[rank]:
                (alone(batch(number, rank)).pow(2).mean() / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    for found in run_threads(2, body):
        for name, param in alone.named_parameters():
            assert torch.allclose(found[f"state {name}"], param, atol=1e-6), name


def test_a_rank_that_leaves_the_loop_alone_ends_the_others() -> None:
    def body(comm: Communicator) -> None:
        model = sharded(comm)
        for inputs in model.join([batch(n, comm.rank) for n in range(3)]):
            model(inputs).pow(2).mean().backward()
            if comm.rank == 1:
                break

    with pytest.raises(RankFailed) as raised:
        run_threads(3, body, timeout_s=10)
    assert raised.value.errors.keys() == {0, 2}
    assert all(error.kind == "PeerLost" for error in raised.value.errors.values())


def test_a_loader_that_raises_ends_all() -> None:
    def loader(rank: int) -> Iterator[Tensor]:
        yield batch(0, rank)
        if rank == 1:
            raise Stop
        yield batch(1, rank)

    def body(comm: Communicator) -> None:
        model = sharded(comm)
        for inputs in model.join(loader(comm.rank)):
            model(inputs).pow(2).mean().backward()

    with pytest.raises(RankFailed) as raised:
        run_threads(2, body, timeout_s=10)
    assert {rank: error.kind for rank, error in raised.value.errors.items()} == {0: "PeerLost", 1: "Stop"}


def test_a_model_that_became_part_of_a_larger_one() -> None:
    """`join` of the inner model, steps of the outer: what does not count is as the loop says, not as it was."""

    def body(comm: Communicator) -> Any:
        inner: Any = copy.deepcopy(WHOLE)
        outer = nn.Sequential(inner)
        lockstep.fully_shard(inner, mesh=comm)
        lockstep.fully_shard(outer, mesh=comm)
        for inputs in inner.join([batch(n, comm.rank) for n in range(1 if comm.rank else 2)]):
            outer.zero_grad()
            outer(inputs).pow(2).mean().backward()
        return Side("ours", comm, comm).snapshot(outer)

    alone = nn.Sequential(copy.deepcopy(WHOLE))
    (alone(batch(1, 0)).pow(2).mean() / 2).backward()
    for found in run_threads(2, body):
        for name, param in alone.named_parameters():
            assert param.grad is not None
            assert torch.allclose(found[f"grad {name}"], param.grad, atol=1e-6), name
