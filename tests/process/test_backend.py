"""Every call of torch.distributed on the backend "lockstep", beside the same call on Gloo."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backend_groups import equal_on_both
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed import nn as differentiable
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_reduce,
    all_to_all_single,
    broadcast,
    reduce_scatter_tensor,
)

from lockstep.comm import preflight
from lockstep.comm.process_group import transport_of
from lockstep.testing.worlds import run_processes

SHAPES = ((), (1,), (7,), (3, 5), (0,), (2, 0, 3), (1001,))
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
REDUCE_OPS = (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT)
BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)


def value(shape: tuple[int, ...] = (7,), dtype: torch.dtype = torch.float32, rank: int | None = None) -> Tensor:
    """What a rank holds: whole numbers from 1 to 5, which any order of summation adds to the same."""
    rank = dist.get_rank() if rank is None else rank
    return ((torch.arange(math.prod(shape)) * 7 + rank * 3) % 5 + 1).reshape(shape).to(dtype)


def all_reductions() -> list[Tensor]:
    results = []
    for dtype in (*FLOATS, *INTEGERS, torch.complex64):
        ops = [dist.ReduceOp.SUM] if dtype.is_complex else [*REDUCE_OPS]
        ops += [dist.ReduceOp.AVG] if dtype.is_floating_point else []
        ops += BITWISE if dtype in INTEGERS else []
        for op in ops:
            results.append(value(dtype=dtype))
            dist.all_reduce(results[-1], op)
    for shape in SHAPES:
        results.append(value(shape))
        work = dist.all_reduce(results[-1], async_op=True)
        assert work is not None
        work.wait()
    return results


def reductions_to_one_rank() -> list[Tensor]:
    results = []
    for root in range(dist.get_world_size()):
        for op in (*REDUCE_OPS, dist.ReduceOp.AVG):
            tensor = value((3, 5))
            dist.reduce(tensor, root, op)
            results += [tensor] if dist.get_rank() == root else []  # elsewhere Gloo leaves partial sums
    return results


def reduce_scatters() -> list[Tensor]:
    results, W = [], dist.get_world_size()
    for size in (1, 5, 0):
        for op in (*REDUCE_OPS, dist.ReduceOp.AVG):
            results.append(torch.zeros(size))
            dist.reduce_scatter(results[-1], [value((size,), rank=dist.get_rank() + r) for r in range(W)], op)
            results.append(torch.zeros(size, 2))
            dist.reduce_scatter_tensor(results[-1], value((W * size, 2)), op)
    return results


def broadcasts() -> list[Tensor]:
    results = []
    for root in range(dist.get_world_size()):
        for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex64):
            results.append(value(dtype=dtype))
            dist.broadcast(results[-1], root)
        for shape in SHAPES:
            results.append(value(shape))
            dist.broadcast(results[-1], root)
    return results


def all_gathers() -> list[Any]:
    results, W = [], dist.get_world_size()
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bool, torch.complex64):
            results.append([torch.zeros(shape, dtype=dtype) for _ in range(W)])
            dist.all_gather(results[-1], value(shape, dtype))
    for shape in ((7,), (3, 5), (0,)):
        results.append(torch.zeros(W * shape[0], *shape[1:]))
        dist.all_gather_into_tensor(results[-1], value(shape))
    return results


def gathers_and_scatters() -> list[Any]:
    results, W, rank = [], dist.get_world_size(), dist.get_rank()
    for root in range(W):
        for shape in ((), (3, 5), (0,)):
            outputs = [torch.zeros(shape) for _ in range(W)] if rank == root else None
            dist.gather(value(shape), outputs, root)
            back = torch.zeros(shape)
            dist.scatter(back, [value(shape, rank=root + r) for r in range(W)] if rank == root else None, root)
            results += [outputs or [], back]
    return results


def all_to_alls() -> list[Any]:
    results, W, rank = [], dist.get_world_size(), dist.get_rank()
    for shape in ((W,), (2 * W, 3), (0, 3)):
        results.append(torch.zeros(shape))
        dist.all_to_all_single(results[-1], value(shape))
    given, taken = [rank + r for r in range(W)], [r + rank for r in range(W)]
    results.append(torch.zeros(sum(taken), 3))
    dist.all_to_all_single(results[-1], value((sum(given), 3)), taken, given)
    return results


def objects() -> list[Any]:
    rank, W = dist.get_rank(), dist.get_world_size()
    mine = {"rank": rank, "tensor": torch.full((rank + 1,), 0.5), "set": {rank}}
    everyone: list[Any] = [None] * W
    dist.all_gather_object(everyone, mine)
    said = [mine, rank] if rank == 1 else [None, None]
    dist.broadcast_object_list(said, 1)
    at_zero: list[Any] | None = [None] * W if rank == 0 else None
    dist.gather_object(mine, at_zero)
    dealt = [None]
    dist.scatter_object_list(dealt, [("for", r) for r in range(W)] if rank == 0 else None)
    if rank == 0:
        dist.send_object_list(["a", 1.5], 1)
    received = ["", 0.0]
    if rank == 1:
        dist.recv_object_list(received, 0)
    return [everyone, said, at_zero or [], dealt, received]


def messages() -> list[Any]:
    rank, W = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % W, (rank - 1) % W
    results: list[Any] = [torch.zeros(3, 5), torch.zeros(0), torch.zeros(7, dtype=torch.complex64)]
    for tensor in results[:3]:
        sending = dist.isend(value(tuple(tensor.shape), tensor.dtype), right)
        results.append(dist.recv(tensor, left))
        assert sending is not None
        sending.wait()
    received = [torch.zeros(1), torch.zeros(2)]
    ops = [dist.P2POp(dist.irecv, received[tag], left, tag=tag) for tag in (1, 0)]
    ops += [dist.P2POp(dist.isend, value((tag + 1,)), right, tag=tag) for tag in (0, 1)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    if rank == 0:
        anyone = [torch.zeros(2) for _ in range(W - 1)]
        sources = [dist.recv(tensor, tag=5) for tensor in anyone]
        assert [int(tensor[0]) for tensor in anyone] == sources
        results.append(sorted(sources))
    else:
        dist.send(torch.tensor([float(rank), 1.0]), 0, tag=5)
    return [*results, *received]


def coalesced() -> list[Any]:
    W = dist.get_world_size()
    sums = [value((size,)) for size in (3, 0, 8)]
    with distributed_c10d._coalescing_manager():
        for tensor in sums:
            dist.all_reduce(tensor)
    wholes = [torch.zeros(W * size) for size in (3, 8)]
    with distributed_c10d._coalescing_manager(async_ops=True) as gathering:
        for whole, tensor in zip(wholes, (sums[0], sums[2]), strict=True):
            dist.all_gather_into_tensor(whole, tensor)
    gathering.wait()
    parts = [torch.zeros(3), torch.zeros(8)]
    with distributed_c10d._coalescing_manager():
        for part, whole in zip(parts, wholes, strict=True):
            dist.reduce_scatter_tensor(part, whole)
    return [*sums, *wholes, *parts]


def functional() -> list[Any]:
    """What DTensor and torch.compile use: C++ that finds the group by its name."""
    W = dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    splits = [1] * W
    results = [
        all_reduce(value(), "sum", group),
        all_reduce(value(), "avg", group),
        all_gather_tensor(value((3, 5)), 0, group),
        all_gather_tensor(value((3, 5)), 1, group),
        reduce_scatter_tensor(value((2 * W, 3)), "sum", 0, group),
        all_to_all_single(value((W, 3)), splits, splits, group),
        broadcast(value(), 1, group),
    ]
    results = [torch.ops._c10d_functional.wait_tensor(torch.as_tensor(result)) for result in results]
    whole = torch.zeros(3 * W)
    torch.ops._c10d_functional.all_gather_into_tensor_out(value((3,)), W, group.group_name, out=whole)
    return [*results, torch.ops._c10d_functional.wait_tensor(whole)]


def differentiable_calls() -> list[Tensor]:
    """torch.distributed.nn: operations with a backward, which is another operation."""
    leaf = value((4,)).requires_grad_()
    loss = differentiable.all_reduce(leaf * 2).sum() + torch.stack(list(differentiable.all_gather(leaf * 3))).sum()
    loss.backward()
    assert leaf.grad is not None
    return [leaf.grad, loss.detach()]


def some_tensors() -> list[Tensor]:
    """A parameter, tensors made in inference mode, a sparse tensor."""
    parameter = torch.nn.Parameter(value())
    dist.all_reduce(parameter)
    with torch.inference_mode():
        frozen = value()
        dist.all_reduce(frozen, dist.ReduceOp.AVG)
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, dist.get_rank() + 1]]), torch.ones(2), (9,), check_invariants=True
    )
    dist.all_reduce(sparse)
    return [parameter.detach(), frozen.clone(), sparse.to_dense()]


def barriers() -> list[bool]:
    dist.barrier()
    work = dist.barrier(async_op=True)
    assert work is not None
    return [work.wait()]


CASES: dict[str, Callable[[], list[Any]]] = {
    case.__name__: case
    for case in (
        all_reductions,
        reductions_to_one_rank,
        reduce_scatters,
        broadcasts,
        all_gathers,
        gathers_and_scatters,
        all_to_alls,
        objects,
        messages,
        coalesced,
        functional,
        differentiable_calls,
        some_tensors,
        barriers,
    )
}


def every_case() -> list[list[Any]]:
    return [case() for case in CASES.values()]


def on_two_hosts() -> list[list[Any]]:
    """Every case, and that the group knew of the hosts."""
    group = dist.group.WORLD
    transport = transport_of(group)
    assert transport is None or transport.name == "shm+gloo"
    return every_case()


def run_every_case(rank: int, world_size: int, folder: str, hosts: Sequence[int]) -> int:
    """hosts: rank -> host, where they are several."""
    if not hosts:
        return len(equal_on_both(rank, world_size, folder, every_case))
    machine_id = preflight.machine_id
    preflight.machine_id = lambda: f"host {hosts[rank]}"
    try:
        return len(equal_on_both(rank, world_size, folder, on_two_hosts))
    finally:
        preflight.machine_id = machine_id


@pytest.mark.parametrize(("world_size", "hosts"), [(2, ()), (3, ()), (3, (0, 1, 0))])
def test_every_call_equals_gloo(world_size: int, hosts: Sequence[int], tmp_path: Path) -> None:
    counts = run_processes(world_size, run_every_case, world_size, str(tmp_path), hosts, connect=False)
    assert counts == [len(CASES)] * world_size
