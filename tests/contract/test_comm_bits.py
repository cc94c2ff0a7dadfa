"""Sums of random numbers: shared memory, threads and `tree_reduce` give the same bits, however the bytes move."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from comm_cases import bits
from comm_cases_large import KIB, counts, near_and_far
from lockstep.comm.communicator import Communicator
from lockstep.comm.op import Reduction
from lockstep.comm.reduction import tree_reduce
from lockstep.testing.worlds import run_processes, run_threads
from shm_ranks import on_shm, shared

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)


def noise(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Numbers of all magnitudes and signs, some of them zero, subnormal or infinite; no order of a sum is exact."""
    generator = torch.Generator().manual_seed(1000 * rank + count)
    words = count * (2 if dtype.is_complex else 1)
    real = torch.float32 if dtype.is_complex else dtype
    tensor = torch.randn(words, generator=generator, dtype=torch.float64)
    tensor *= torch.pow(10.0, torch.randint(-6, 4, (words,), generator=generator))
    tensor = tensor.to(real)
    for number, special in enumerate((0.0, -0.0, torch.finfo(real).smallest_normal / 2, float("inf"))):
        tensor[7 * number + rank :: 997] = special
    return torch.view_as_complex(tensor.view(-1, 2)) if dtype.is_complex else tensor


def identical(found: Tensor, expected: Tensor) -> None:
    """Equal bits; one NaN is as good as another."""
    found, expected = (torch.view_as_real(t) if t.is_complex() else t for t in (found, expected))
    assert found.dtype == expected.dtype
    missing = expected.isnan()
    assert torch.equal(found.isnan(), missing)
    assert torch.equal(bits(found.masked_fill(missing, 0)), bits(expected.masked_fill(missing, 0)))


def tree(tensors: list[Tensor], reduce: Reduction) -> Tensor:
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    result = tree_reduce(real, reduce)
    return torch.view_as_complex(result) if tensors[0].is_complex() else result


def sums_of_noise(comm: Communicator, borders: tuple[int, ...]) -> int:
    W, rank = comm.world_size, comm.rank
    checked = 0
    for dtype in DTYPES:
        sizes = [1, 2, 1009, *counts(dtype, *borders)]
        for number, count in enumerate(sizes):
            reduce: Reduction = ("sum", "mean")[number % 2]
            wholes = [noise(r, W * (count // W), dtype) for r in range(W)]
            everything = tree(wholes, reduce)
            part = slice(rank * (count // W), (rank + 1) * (count // W))
            for place in near_and_far(comm):
                tensor = place(wholes[rank])
                comm.all_reduce(tensor, reduce)
                identical(tensor, everything)
                tensor = place(wholes[rank])
                comm.reduce(tensor, number % W, reduce)
                identical(tensor, everything if rank == number % W else wholes[rank])
                tensor = torch.zeros(count // W, dtype=dtype)
                comm.reduce_scatter_tensor(tensor, place(wholes[rank]), reduce)
                identical(tensor, everything[part])
                inputs = [place(wholes[rank][r * (count // W) : (r + 1) * (count // W)]) for r in range(W)]
                comm.reduce_scatter(tensor, inputs, reduce)
                identical(tensor, everything[part])
                checked += 4
    for reduce in ("product", "max", "min"):
        wholes = [noise(r, 300_001, torch.float32) for r in range(W)]
        for place in near_and_far(comm):
            tensor = place(wholes[rank])
            comm.all_reduce(tensor, reduce)
            identical(tensor, tree(wholes, reduce))
            checked += 1
    return checked


BORDERS = {2: (512 * KIB, 1024 * KIB), 3: (32 * KIB, 512 * KIB), 5: (32 * KIB, 512 * KIB)}


def sums_on_shm(comm: Communicator) -> object:
    return on_shm(comm, lambda ours: sums_of_noise(ours, BORDERS[ours.world_size]))


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_shared_memory_sums_in_the_order_of_the_tree(world_size: int) -> None:
    assert len(set(run_processes(world_size, sums_on_shm))) == 1


def test_threads_sum_in_the_order_of_the_tree() -> None:
    assert len(set(run_threads(3, sums_of_noise, (4 * KIB,)))) == 1


def the_same_as_gloo(comm: Communicator) -> None:
    """Two ranks have one order only. A mean is exact for two, however it is made."""
    with shared(comm) as ours:
        for dtype in DTYPES:
            for count in (3, 1009, *counts(dtype, 32 * KIB, 512 * KIB)):
                for reduce in ("sum", "mean"):
                    tensor = noise(comm.rank, count, dtype)
                    expected = tensor.clone()
                    comm.all_reduce(expected, reduce)
                    for place in near_and_far(ours):
                        found = place(tensor)
                        ours.all_reduce(found, reduce)
                        identical(found, expected)


def test_two_ranks_give_what_gloo_gives() -> None:
    run_processes(2, the_same_as_gloo)
