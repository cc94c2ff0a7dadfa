"""Joined with DistributedDataParallel's buckets, reduced to their owners: the same weights as without, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.comm.communicator import Communicator
from lockstep.errors import ConfigError, PeerFailed, UnsupportedArgument
from lockstep.parallel.clip import clip_grad_norm_
from lockstep.parallel.ddp import DistributedDataParallel
from lockstep.parallel.sharded_optimizer import ShardedOptimizer
from lockstep.parallel.zero.overlap import ReduceScatterMean
from lockstep.testing.worlds import run_threads
from optimizer_cases import WORLDS, same_tensors, state_difference, weights

ADAMW = torch.optim.AdamW


class Net(nn.Module):
    """Several buckets of odd sizes; a parameter used now and then, one never, one frozen, one of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)

        def values(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator) / 3)

        self.first, self.bias, self.second = values(9, 13), values(13), values(13, 7)
        self.sometimes, self.never = values(7), values(5)
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)
        self.wide = nn.Parameter(values(7).detach().double())
        self.embedding = values(300, 9)

    def forward(self, rows: Tensor, use: bool) -> Tensor:
        hidden = (self.embedding[rows] @ self.first + self.bias).tanh() @ self.second
        if use:
            hidden = hidden * self.sometimes
        return ((hidden * self.frozen).double() * self.wide).square().mean()


NET = Net()


def rows(step: int, rank: int) -> Tensor:
    return torch.randint(0, 300, (11,), generator=torch.Generator().manual_seed(1000 * step + rank))


def make(comm: Communicator, how: str, **kwargs: Any) -> tuple[Any, Net, Any]:
    """A wrapped model and its optimizer: of one process each ("plain"), sharded, or joined."""
    model = copy.deepcopy(NET)
    ddp = lockstep.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=0.001)
    optimizer: Any
    if how == "plain":
        optimizer = ADAMW(model.parameters(), lr=0.01, fused=True)
    elif how == "sharded":
        optimizer = ShardedOptimizer(model.named_parameters(), ADAMW, lr=0.01, process_group=comm)
    else:
        optimizer = ShardedOptimizer(model.named_parameters(), ADAMW, lr=0.01, ddp=ddp)
    return ddp, model, optimizer


def train(comm: Communicator, how: str, micro: int = 1, sync_all: bool = False, clip: bool = False) -> list[Tensor]:
    ddp, model, optimizer = make(comm, how)
    norms: list[Tensor] = []
    buffers: set[tuple[int, ...]] = set()
    for step in range(6):
        for k in range(micro):
            ddp.require_backward_grad_sync = sync_all or k == micro - 1
            ddp(rows(10 * step + k, comm.rank), use=(step + comm.rank + k) % 4 == 1).backward()
        if how == "joined":
            assert all(param.grad is None for param in model.parameters())
        if clip:
            norms.append(clip_grad_norm_(model.parameters(), 1e-4))
            assert norms[-1] > 1e-3
        optimizer.step()
        buffers.add(tuple(bucket.flat.data_ptr() for bucket in ddp.reducer.exchange.buckets))
        (optimizer if step % 2 else model).zero_grad()
    assert how != "joined" or sync_all or len(buffers) == 1, "a bucket took new memory"
    return [*weights(model), *norms]


@pytest.mark.parametrize(
    "options", [{}, {"micro": 3}, {"micro": 2, "sync_all": True}, {"clip": True}], ids=lambda o: "+".join(o) or "usual"
)
def test_equal_to_ddp_and_the_class_itself(options: dict[str, Any]) -> None:
    for world_size in WORLDS:
        expected = run_threads(world_size, train, "plain", **options)[0]
        for how in ("sharded", "joined"):
            for found in run_threads(world_size, train, how, **options):
                if how == "joined" and ("sync_all" in options or "clip" in options):  # sums in another order
                    assert all(torch.allclose(*pair, rtol=1e-4) for pair in zip(found, expected, strict=True))
                else:
                    assert same_tensors(found, expected), (world_size, how)


def continued(comm: Communicator) -> bool:
    """State saved joined, loaded unjoined."""
    states: list[Any] = []
    ends: list[list[Tensor]] = []
    for hows in (("joined", "sharded"), ("sharded", "joined")):
        ddp, model, optimizer = make(comm, hows[0])
        ddp(rows(0, comm.rank), use=True).backward()
        optimizer.step()
        states.append(optimizer.state_dict())
        ddp, other, optimizer = make(comm, hows[1])
        other.load_state_dict(model.state_dict())
        optimizer.load_state_dict(states[-1])
        ddp(rows(1, comm.rank), use=False).backward()
        optimizer.step()
        ends.append(weights(other))
    return state_difference(states[0], states[1]) is None and same_tensors(*ends)


def test_state_does_not_depend_on_the_buckets() -> None:
    assert all(run_threads(3, continued))


def cleared(comm: Communicator) -> bool:
    """Gradients that are cleared, and a step without any, leave weights and state alone."""
    ddp, model, optimizer = make(comm, "joined")
    before = weights(model)
    ddp(rows(0, comm.rank), use=True).backward()
    optimizer.zero_grad()
    optimizer.step()
    return same_tensors(weights(model), before) and len(optimizer.state) == 0


def test_cleared_gradients_are_not_stepped() -> None:
    assert all(run_threads(2, cleared))


def failing(comm: Communicator) -> list[Tensor]:
    """One rank raises in a backward: no rank has gradients of this step, and the next one is in order."""
    ddp, model, optimizer = make(comm, "joined")
    ddp(rows(2, comm.rank), use=False).backward()

    def fail(_: Tensor) -> None:
        raise ValueError("one rank's own")

    loss = ddp(rows(0, comm.rank), use=False)
    handle = model.first.register_hook(fail) if comm.rank == 1 else None
    with pytest.raises(ValueError if comm.rank == 1 else PeerFailed, match=r"rank 1 raised|one rank's own"):
        loss.backward()
    if handle is not None:
        handle.remove()
    ddp(rows(1, comm.rank), use=False).backward()
    optimizer.step()
    return weights(model)


def unfailing(comm: Communicator) -> list[Tensor]:
    ddp, model, optimizer = make(comm, "joined")
    ddp(rows(1, comm.rank), use=False).backward()
    optimizer.step()
    return weights(model)


def test_a_step_that_failed_leaves_nothing() -> None:
    expected = run_threads(2, unfailing)[0]
    assert all(same_tensors(found, expected) for found in run_threads(2, failing))


def refused(comm: Communicator) -> None:
    ddp, model, optimizer = make(comm, "joined")
    assert isinstance(ddp.reducer.exchange.hook, ReduceScatterMean)
    with pytest.raises(ConfigError, match="takes no communication hook"):
        ddp.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    with pytest.raises(ConfigError, match=r"rank \d: join\(\) .* would not step its part"):
        ddp.join()
    with pytest.raises(UnsupportedArgument, match="communication hook"):
        ShardedOptimizer(model.parameters(), ADAMW, ddp=ddp)
    ddp(rows(0, comm.rank), use=False).backward()
    with ddp.no_sync():
        ddp(rows(1, comm.rank), use=False).backward()
    with pytest.raises(ConfigError, match="outside of no_sync"):
        optimizer.step()
    other = DistributedDataParallel(copy.deepcopy(NET), process_group=comm)
    with pytest.raises(ConfigError, match=r"'first', 'bias'.*does not step"):
        ShardedOptimizer([other.module.embedding], ADAMW, ddp=other)
    with pytest.raises(ConfigError, match="ddp=Net"):
        ShardedOptimizer(other.parameters(), ADAMW, ddp=other.module)
    with pytest.raises(ConfigError, match="not both"):
        ShardedOptimizer(other.parameters(), ADAMW, ddp=other, process_group=comm)


def test_what_cannot_be_joined() -> None:
    run_threads(2, refused)
