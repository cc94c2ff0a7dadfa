"""Sums of random numbers: every transport and `tree_reduce` give the same bits, however the bytes move.

Gloo's all-reduce and reduce alone have an order of their own, for three ranks or more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from comm_cases import bits
from comm_cases_large import KIB, counts, near_and_far
from lockstep.comm.communicator import Communicator
from lockstep.comm.hierarchical import HierarchicalTransport
from lockstep.comm.hosts import collectives
from lockstep.comm.op import REDUCTIONS, Reduction
from lockstep.comm.reduction import tree_reduce
from lockstep.errors import CollectiveMismatch, ConfigError
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


def scattered(comm: Communicator) -> int:
    """Flat, in lists of equal and of different sizes, waited for at once and in any order."""
    W, rank = comm.world_size, comm.rank
    checked = 0
    for dtype in DTYPES:
        reals: tuple[Reduction, ...] = ("sum", "mean") if dtype.is_complex else REDUCTIONS
        for number, count in enumerate((0, 1, 1009, 100_003)):
            reduce = reals[(number + len(str(dtype))) % len(reals)]
            wholes = [noise(r, W * count, dtype) for r in range(W)]
            expected = tree(wholes, reduce)
            outputs = torch.zeros(2, count, dtype=dtype)
            works = [
                comm.reduce_scatter_tensor(outputs[0], wholes[rank], reduce, async_op=True),
                comm.reduce_scatter(outputs[1], wholes[rank].split(count) if count else [wholes[rank]] * W, reduce),
            ]
            for work in reversed(works):
                work.wait()
            for output in outputs:
                identical(output, expected[rank * count : (rank + 1) * count])
            sizes = [r * count // W for r in range(W)]
            parts = [noise(r, sum(sizes), dtype) for r in range(W)]
            uneven = torch.zeros(sizes[rank], dtype=dtype)
            comm.reduce_scatter(uneven, parts[rank].split(sizes), reduce)
            identical(uneven, tree(parts, reduce)[sum(sizes[:rank]) :][: sizes[rank]])
            checked += 3
    return checked


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_gloo_scatters_sums_in_the_order_of_the_tree(world_size: int) -> None:
    assert len(set(run_processes(world_size, scattered))) == 1


# ---------------------------------------------------------------------- sums that are wider than what travels

WIDER = ((torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float64))


def wide_sums(comm: Communicator) -> int:
    """The tree of the widened elements: nothing that was added is rounded to the narrow dtype."""
    W, rank = comm.world_size, comm.rank
    checked = 0
    for narrow, wide in WIDER:
        for number, count in enumerate((0, 1, 1009, counts(narrow, 512 * KIB // W)[-1])):
            reduce = REDUCTIONS[number % len(REDUCTIONS)]
            wholes = [noise(r, W * count, narrow) for r in range(W)]
            mine = slice(rank * count, (rank + 1) * count)
            expected = tree([whole.to(wide) for whole in wholes], reduce)[mine]
            assert count < 1000 or reduce in ("min", "max") or W == 1 or not narrows(expected, narrow)
            outputs = []
            for place in near_and_far(comm):
                outputs.append(torch.full((count, 2), -1.0, dtype=wide)[:, 0])  # also in memory that is not contiguous
                comm.reduce_scatter_tensor(outputs[-1], place(wholes[rank]), reduce)
            later = [torch.full((count,), -1.0, dtype=wide) for _ in range(2)]
            works = [comm.reduce_scatter_tensor(output, wholes[rank], reduce, async_op=True) for output in later]
            for work in works:
                work.wait()
            for output in (*outputs, *later):
                identical(output, expected)
                checked += 1
    return checked


def narrows(tensor: Tensor, dtype: torch.dtype) -> bool:
    return bool((tensor.to(dtype).to(tensor.dtype) == tensor).all())


def wide_sums_on_shm(comm: Communicator) -> object:
    return on_shm(comm, wide_sums)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("run", "sums"),
    [(run_threads, wide_sums), (run_processes, wide_sums), (run_processes, wide_sums_on_shm)],
    ids=["threads", "gloo", "shm"],
)
def test_sums_wider_than_what_travels(run: Callable[..., list[Any]], sums: object, world_size: int) -> None:
    assert len(set(run(world_size, sums))) == 1


@pytest.mark.parametrize("machines", [[0, 0, 1], [0, 1, 0, 1], [0, 1, 1, 1]], ids=str)
def test_wide_sums_between_hosts(machines: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "BLOCK_BYTES", 300_000)  # several blocks

    def body(comm: Communicator) -> int:
        with Communicator(HierarchicalTransport.over(comm.transport, machines, lambda plain: plain)) as hosts:
            return wide_sums(hosts)

    assert len(set(run_threads(len(machines), body))) == 1


def other_dtypes_are_refused(comm: Communicator) -> None:
    W = comm.world_size
    for output, tensor in (
        *((wide, narrow) for narrow, wide in WIDER),  # a narrow output of a wide sum
        *((torch.bfloat16, torch.float64), (torch.float64, torch.float16), (torch.float32, torch.int32)),
        *((torch.int64, torch.int32), (torch.float16, torch.bfloat16), (torch.complex64, torch.float32)),
    ):
        with pytest.raises(ConfigError, match=r"dtypes differ, .*a wider sum is float32 of bfloat16 or float16"):
            comm.reduce_scatter_tensor(torch.zeros(2, dtype=tensor), torch.zeros(2 * W, dtype=output))
    with pytest.raises(ConfigError, match="one dtype"):
        comm.reduce_scatter(torch.zeros(2), [torch.zeros(2, dtype=torch.bfloat16)] * W)
    with pytest.raises(ConfigError, match=r"dtypes differ, torch.float32 and torch.bfloat16$"):
        comm.all_gather_into_tensor(torch.zeros(2 * W), torch.zeros(2, dtype=torch.bfloat16))


def one_rank_adds_in_another_dtype(comm: Communicator) -> None:
    dtype = torch.float32 if comm.rank else torch.bfloat16
    with pytest.raises(CollectiveMismatch, match=r"(?s)rank 0: .*bfloat16 sum.*rank 1: .*bfloat16 sum in float32"):
        comm.reduce_scatter_tensor(torch.zeros(5, dtype=dtype), torch.ones(5 * comm.world_size, dtype=torch.bfloat16))
    other_dtypes_are_refused(comm)
    assert comm.all_gather_object(comm.rank) == list(range(comm.world_size))


def one_rank_adds_in_another_dtype_on_shm(comm: Communicator) -> object:
    return on_shm(comm, one_rank_adds_in_another_dtype)


def test_ranks_that_add_in_different_dtypes() -> None:
    run_threads(2, one_rank_adds_in_another_dtype)  # of three, whoever comes first is compared with rank 0
    run_processes(3, one_rank_adds_in_another_dtype_on_shm)
    run_processes(2, other_dtypes_are_refused)
