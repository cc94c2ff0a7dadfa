"""W ranks of M microbatches have the gradient of one process with one big batch, also with uneven padding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.comm.communicator import Communicator
from lockstep.observe.profile.step_clock import StepClock
from lockstep.parallel.ddp import DistributedDataParallel
from lockstep.testing.failures import RankFailed
from lockstep.testing.worlds import run_threads
from lockstep.train.evaluate import IGNORED, evaluate, prove_equal
from lockstep.train.step import Microbatch, accumulate_gradient, agree, clip_gradient, microbatch_seed

V, B, T = 11, 12, 5


class Bigram(nn.Module):
    """Logits of the next token from the last one."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(V, 8, generator=generator))
        self.head = nn.Parameter(torch.randn(8, V, generator=generator))

    def forward(self, input_ids: Tensor) -> Any:
        return SimpleNamespace(logits=self.table[input_ids] @ self.head)


def batch(padding: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randint(V, (B, T), generator=generator)
    targets = torch.randint(V, (B, T), generator=generator)
    if padding:
        for row in range(B):
            targets[row, T - row % (T + 1) :] = IGNORED
        targets[:3] = IGNORED  # the first rank of four has nothing to learn
    return inputs, targets


def share(comm: Communicator, accumulation: int, padding: bool) -> list[Microbatch]:
    size = B // comm.world_size // accumulation
    inputs, targets = batch(padding)
    first = comm.rank * accumulation
    return [
        (inputs[i * size : (i + 1) * size], targets[i * size : (i + 1) * size])
        for i in range(first, first + accumulation)
    ]


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (1, 4), (2, 1), (2, 3), (3, 2), (4, 3)])
def test_gradient_is_that_of_one_big_batch(world_size: int, accumulation: int, padding: bool) -> None:
    reference = Bigram()
    inputs, targets = batch(padding)
    logits = reference(input_ids=inputs).logits
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    expected.backward()

    def one(comm: Communicator) -> tuple[float, int, Tensor, Tensor]:
        replica = DistributedDataParallel(Bigram(), process_group=comm)
        microbatches = share(comm, accumulation, padding)
        tokens, stopping = agree(comm, microbatches, wants_to_stop=False)
        assert not stopping
        loss = accumulate_gradient(replica, microbatches, tokens, 0, 0, comm, StepClock())
        return loss, tokens, replica.module.table.grad.clone(), replica.module.head.grad.clone()

    for loss, tokens, table, head in run_threads(world_size, one):
        assert tokens == int((targets != IGNORED).sum())
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        torch.testing.assert_close(table, reference.table.grad, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(head, reference.head.grad, rtol=1e-6, atol=1e-7)


def test_one_rank_that_wants_to_stop_stops_all() -> None:
    def one(comm: Communicator) -> list[bool]:
        return [agree(comm, share(comm, 1, False), comm.rank == who)[1] for who in (9, 2, 0)]

    assert run_threads(3, one) == [[False, True, True]] * 3


@pytest.mark.filterwarnings("ignore:.*gradients are not finite")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_loss_names_step_and_first_rank_on_every_rank(bad: float) -> None:
    def one(comm: Communicator) -> None:
        replica = DistributedDataParallel(Bigram(), process_group=comm)
        if comm.rank >= 1:
            with torch.no_grad():
                replica.module.head.fill_(bad)
        accumulate_gradient(replica, share(comm, 1, False), B * T, 0, 41, comm, StepClock())

    with pytest.raises(RankFailed) as caught:
        run_threads(3, one)
    assert set(caught.value.errors) == {0, 1, 2}
    for error in caught.value.errors.values():
        assert error.kind == "NonFiniteLoss"
        assert "at step 42, first on rank 1" in error.message


def test_clipping_returns_the_norm_before_and_refuses_infinity() -> None:
    def one(comm: Communicator) -> None:
        replica = DistributedDataParallel(Bigram(), process_group=comm)
        for parameter in replica.parameters():
            parameter.grad = torch.ones_like(parameter)
        whole = (2 * 8 * V) ** 0.5
        assert clip_gradient(replica, 0, 0) == pytest.approx(whole)
        assert clip_gradient(replica, 1.0, 0) == pytest.approx(whole)
        assert clip_gradient(replica, 1.0, 0) == pytest.approx(1.0, rel=1e-4)
        replica.module.table.grad.fill_(float("inf"))
        clip_gradient(replica, 1.0, 6)

    with pytest.raises(RankFailed, match=r"norm is .* at step 7"):
        run_threads(2, one)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_validation_is_the_same_for_every_world_even_if_a_rank_has_nothing(world_size: int) -> None:
    inputs, targets = (tensor[3:6] for tensor in batch(padding=True))
    logits = Bigram()(input_ids=inputs).logits
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    def one(comm: Communicator) -> float:
        model = Bigram().train()
        mine = [(inputs[i : i + 1], targets[i : i + 1]) for i in range(comm.rank, 3, comm.world_size)]
        loss = evaluate(model, mine, comm)
        assert model.training
        return loss

    losses = run_threads(world_size, one)
    assert len(set(losses)) == 1
    assert losses[0] == pytest.approx(expected.item(), rel=1e-6)


def test_proof_names_the_rank_that_differs() -> None:
    def one(comm: Communicator, odd: int) -> str:
        model = Bigram()
        model.register_buffer("count", torch.tensor(1 if comm.rank == odd else 0))
        return prove_equal(model, comm)

    digests = run_threads(3, one, 9)
    assert len(set(digests)) == 1
    assert len(digests[0]) == 64
    with pytest.raises(RankFailed, match=r"rank 2 has") as caught:
        run_threads(3, one, 2)
    assert {error.kind for error in caught.value.errors.values()} == {"ReplicaError"}
    assert "rank 1" not in str(caught.value.errors[0].message)


def test_dropout_seeds_are_distinct_and_fit() -> None:
    seeds = {microbatch_seed(seed, step, index) for seed in (0, 1337) for step in range(50) for index in range(20)}
    assert len(seeds) == 2 * 50 * 20
    assert 0 <= microbatch_seed(2**62, 10**9, 10**6) < 2**63
