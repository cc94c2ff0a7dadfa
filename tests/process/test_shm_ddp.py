"""DistributedDataParallel over shared memory: its buckets lie there, and training is what it is over Gloo."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from comm_cases import bits
from lockstep import DistributedDataParallel
from lockstep.comm.communicator import Communicator
from lockstep.comm.waiting import wait_until
from lockstep.errors import TransportClosed
from lockstep.testing.worlds import run_processes, run_threads
from shared_segments import mapped_segments
from shm_ranks import lies_in_segment, segment_bytes, shared


class Mixed(nn.Module):
    """Several buckets in two dtypes, one of them larger than a staging slot."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(40, 300)
        self.second = nn.Linear(300, 300)
        self.last = nn.Linear(300, 40).double()
        self.wide = nn.Parameter(torch.empty(400_000))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)

    def forward(self, rows: Tensor, weights: Tensor) -> Tensor:
        hidden = self.second(self.first(rows).relu())
        return self.last(hidden.double()).square().sum() + (self.wide * weights).sum()


def backward(ddp: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    rows, weights = torch.randn(8, 40, generator=generator), torch.randn(400_000, generator=generator)
    ddp(rows, weights).backward()


def wrapped(comm: Communicator) -> DistributedDataParallel:
    return DistributedDataParallel(Mixed(), process_group=comm, bucket_cap_mb=0.1)


def train(comm: Communicator) -> list[Tensor]:
    """The bits of all parameters after some steps."""
    ddp = wrapped(comm)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    for step in range(4):
        with ddp.no_sync():
            backward(ddp, comm.rank, 10 + step)
        backward(ddp, comm.rank, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return [bits(parameter.detach()) for parameter in ddp.parameters()]


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def train_on_both(comm: Communicator) -> bool:
    with shared(comm) as ours:
        return equal(train(ours), train(comm))


def test_the_same_model_as_over_gloo() -> None:
    assert run_processes(2, train_on_both) == [True, True]


def train_on_shm(comm: Communicator) -> list[list[int]]:
    with shared(comm) as ours:
        return [parameter[:4000].tolist() for parameter in train(ours)]


def test_the_same_model_as_in_threads() -> None:
    """Three ranks: Gloo has another order of the sum, threads have not."""
    cores = torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks that are processes: some processors' products have other bits with more
    try:
        expected = [parameter[:4000].tolist() for parameter in run_threads(3, train)[0]]
    finally:
        torch.set_num_threads(cores)
    assert run_processes(3, train_on_shm) == [expected] * 3


def buckets_in_the_segment(comm: Communicator) -> None:
    with shared(comm) as ours:
        ddp = wrapped(ours)
        kept: list[tuple[Tensor, Tensor]] = []
        for step in range(3):
            backward(ddp, comm.rank, step)
            assert len(ddp.reducer.exchange.buckets) > 2
            for bucket in ddp.reducer.exchange.buckets:
                assert lies_in_segment(bucket.flat)
            for parameter in ddp.parameters():
                assert parameter.grad is not None
                assert lies_in_segment(parameter.grad)
            wide = ddp.module.wide.grad
            kept.append((wide, wide.clone()))  # the caller holds it: the next step must take other memory
            ddp.zero_grad()
        for gradient, expected in kept:
            assert torch.equal(gradient, expected)
        assert len({gradient.data_ptr() for gradient, _ in kept}) == 3
        backward(ddp, comm.rank, 5)
    gradients = [parameter.grad for parameter in ddp.parameters() if parameter.grad is not None]
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    optimizer.step()  # gradients outlive the communicator
    assert all(gradient.isfinite().all() for gradient in gradients)
    with pytest.raises(TransportClosed):
        backward(ddp, comm.rank, 6)


def test_buckets_lie_in_the_segment() -> None:
    run_processes(2, buckets_in_the_segment)


def memory_of_steps(comm: Communicator) -> None:
    gc.collect()  # what an earlier job of this process left in cycles must not go in the middle
    with shared(comm) as ours:
        wrapped(ours)  # what a first use takes for good
        ours.barrier()
        before = segment_bytes()
        ours.barrier()
        ddp = wrapped(ours)
        backward(ddp, comm.rank, 0)
        ddp.zero_grad()
        backward(ddp, comm.rank, 1)  # with the plan that the first backward has found
        ours.barrier()
        during = segment_bytes()
        assert during > before
        for step in range(5):
            ours.barrier()
            backward(ddp, comm.rank, 2 + step)
            ddp.zero_grad(set_to_none=step % 2 == 0)
        ours.barrier()
        assert segment_bytes() == during
        ours.barrier()
        del ddp
        gc.collect()
        ours.barrier()
        assert segment_bytes() == before
        ours.barrier()


def test_memory_of_a_wrapped_model() -> None:
    run_processes(2, memory_of_steps)


def over_a_group_of_the_user(comm: Communicator) -> None:
    """What was chosen for a torch group goes with the group."""
    before = mapped_segments()
    for _ in range(3):
        group = dist.new_group([0, 1])
        ddp = DistributedDataParallel(Mixed(), process_group=group)
        backward(ddp, comm.rank, 0)
        assert lies_in_segment(ddp.module.wide.grad)
        assert len(mapped_segments()) == len(before) + 1
        again = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
        assert len(mapped_segments()) == len(before) + 1  # the second model uses the same
        del ddp, again
        comm.barrier()
        dist.destroy_process_group(group)
        del group
    gc.collect()
    assert wait_until(lambda: mapped_segments() == before, 5)


def test_a_group_of_the_user() -> None:
    run_processes(2, over_a_group_of_the_user)
