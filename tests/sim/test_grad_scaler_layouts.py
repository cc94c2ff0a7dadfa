"""The gradient scaler over sharded, whole and lent gradients, as threads: all ranks skip the same steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lockstep.comm.communicator import Communicator
from lockstep.parallel.clip import clip_grad_norm_
from lockstep.parallel.dtensors import Replicate, Shard, as_dtensor, local_tensor, mesh_of_ranks
from lockstep.parallel.grad_pieces import own_gradients
from lockstep.parallel.grad_scaler import GradScaler
from lockstep.parallel.shard_face import Face
from lockstep.parallel.shard_slot import ShardSlot
from lockstep.testing.worlds import run_threads

SCALE = 8.0


class Descent(torch.optim.Optimizer):
    """SGD on what each rank has; optimizers of torch would have DTensor communicate."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    local_tensor(param).sub_(local_tensor(param.grad))


def sharded(comm: Communicator, rows: int, dtype: torch.dtype = torch.float32, replicas: int = 1) -> Parameter:
    """Zeros [rows] over the ranks, or over each of `replicas` lines of them."""
    line = comm if replicas == 1 else comm.mesh(replica=replicas, shard=-1)["shard"]
    grid = torch.tensor(comm.global_ranks)
    mesh = mesh_of_ranks(
        "cpu",
        grid if replicas == 1 else grid.view(replicas, -1),
        comm.global_ranks[comm.rank],
        ("a", "b")[: min(replicas, 2)],
    )
    chunk = -(-rows // line.world_size)
    local = torch.zeros(max(0, min(chunk, rows - line.rank * chunk)), dtype=dtype)
    placements = (Shard(0),) if replicas == 1 else (Replicate(), Shard(0))
    face = Face((rows,), (rows,), mesh, placements, spread=None)
    param: Any = Parameter(face.piece(local))
    group = SimpleNamespace(comm=line, params=[param], faces=[face])
    param._lockstep_slot = ShardSlot(group, 0)  # type: ignore[arg-type]
    return param


def put(param: Any, value: float) -> None:
    """A gradient of `value`s, times the scale."""
    grad = torch.full_like(local_tensor(param), value * SCALE)
    param.grad = (
        as_dtensor(grad, param.device_mesh, param.placements, param.shape) if hasattr(param, "placements") else grad
    )


def scaler_in_use(**kwargs: Any) -> GradScaler:
    scaler = GradScaler("cpu", init_scale=SCALE, growth_interval=2, **kwargs)
    assert scaler.scale(torch.ones(())).item() == SCALE
    return scaler


def steps(scaler: GradScaler, optimizer: Descent) -> tuple[int, float]:
    scaler.step(optimizer)
    scaler.update()
    return optimizer.steps, scaler.get_scale()


def values(params: Sequence[Tensor]) -> list[list[float]]:
    return [local_tensor(param.detach()).tolist() for param in params]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("replicas", [1, 2])
def test_what_one_rank_finds_all_ranks_skip(value: float, replicas: int) -> None:
    def rank(comm: Communicator) -> list[Any]:
        params = [sharded(comm, 8, replicas=replicas), Parameter(torch.zeros(2))]
        scaler, optimizer = scaler_in_use(), Descent(params)
        for param in params:
            put(param, 1.0)
        if comm.rank % (comm.world_size // replicas) == 1:  # in every replica: they have equal gradients
            local_tensor(params[0].grad)[1] = value  # type: ignore[arg-type]
        told: list[Any] = [steps(scaler, optimizer), values(params)]
        for _ in range(2):
            for param in params:
                put(param, 0.5)
            told.append(steps(scaler, optimizer))
        return [*told, values(params)]

    for told in run_threads(4 if replicas == 2 else 3, rank):
        skipped, untouched, first, second, moved = told
        assert skipped == (0, SCALE / 2)
        assert {number for row in untouched for number in row} == {0.0}
        assert (first, second) == ((1, SCALE / 2), (2, SCALE)), "and grows again after two steps"
        assert {number for row in moved for number in row} == {-1.0 - 1.0}, "unscaled by the scale of the time"


def test_ranks_without_any_gradient_take_part() -> None:
    def rank(comm: Communicator) -> list[Any]:
        params = [sharded(comm, 1), sharded(comm, 4)]
        scaler, optimizer = scaler_in_use(), Descent(params)
        if comm.rank == 0:
            put(params[0], math.inf)
        first = steps(scaler, optimizer)
        params[0].grad = None
        return [first, steps(scaler, optimizer)]

    assert run_threads(3, rank) == [[(0, SCALE / 2), (1, SCALE / 2)]] * 3


def test_unscale_clip_and_step() -> None:
    def rank(comm: Communicator) -> list[Any]:
        params = [sharded(comm, 4), sharded(comm, 5)]
        scaler, optimizer = scaler_in_use(), Descent(params)
        for param in params:
            put(param, 2.0)
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(params, 3.0).item()
        before = comm._collectives
        told = steps(scaler, optimizer)
        return [norm, told, comm._collectives - before, {round(n, 5) for row in values(params) for n in row}]

    assert run_threads(3, rank) == [[6.0, (1, SCALE), 0, {-1.0}]] * 3


def test_one_operation_for_all_units_and_none_for_plain_parameters() -> None:
    def rank(comm: Communicator) -> list[int]:
        counts = []
        for params in ([sharded(comm, 3) for _ in range(4)], [Parameter(torch.zeros(2))]):
            for param in params:
                put(param, 1.0)
            before = comm._collectives
            steps(scaler_in_use(), Descent(params))
            counts.append(comm._collectives - before)
        return counts

    assert run_threads(2, rank) == [[1, 0]] * 2


@pytest.mark.parametrize("lines", ["rows and all", "all and rows", "rows and columns"])
def test_lines_of_several_groups_tell_each_other(lines: str) -> None:
    """A parameter for each row of the ranks 0 1 / 2 3, and one over all of them or for each column."""

    def rank(comm: Communicator) -> tuple[int, float]:
        row, column = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
        assert row is not None
        assert column is not None
        comms = {"rows and all": [row, comm], "all and rows": [comm, row], "rows and columns": [row, column]}[lines]
        params = [sharded(one, 4) for one in comms]
        for param, one in zip(params, comms, strict=True):
            put(param, math.inf if comm.rank == 3 and one is row else 1.0)
        return steps(scaler_in_use(), Descent(params))

    assert run_threads(4, rank) == [(0, SCALE / 2)] * 4


def test_fp16_gradients_are_accepted_where_they_are_sharded() -> None:
    def rank(comm: Communicator) -> list[Any]:
        params = [sharded(comm, 4, torch.float16)]
        put(params[0], 1.0)
        told = steps(scaler_in_use(), Descent(params))
        return [told, values(params)]

    assert run_threads(2, rank) == [[(1, SCALE), [[-1.0, -1.0]]]] * 2
    plain = Parameter(torch.zeros(2, dtype=torch.float16))
    put(plain, 1.0)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler_in_use().unscale_(Descent([plain]))


def test_a_disabled_scaler_does_nothing() -> None:
    def rank(comm: Communicator) -> tuple[int, float]:
        param = sharded(comm, 4)
        put(param, 1.0)
        return steps(GradScaler("cpu", enabled=False), Descent([param]))

    assert run_threads(2, rank) == [(1, 1.0)] * 2


def test_gradients_that_someone_else_holds() -> None:
    class Owner:
        def __init__(self, comm: Communicator) -> None:
            self.comm = comm
            self.piece = torch.full((3,), SCALE)

        def gradient_pieces(self, params: Sequence[Tensor]) -> list[Tensor]:
            return [self.piece]

    def rank(comm: Communicator) -> list[Any]:
        param, owner = Parameter(torch.zeros(6)), Owner(comm)
        own_gradients([param], owner)
        param.grad = torch.full((6,), math.nan)  # of this rank alone: not looked at
        scaler, optimizer = scaler_in_use(), Descent([param])
        scaler.unscale_(optimizer)
        told: list[Any] = [owner.piece.tolist(), steps(scaler, optimizer)]
        if comm.rank == 1:
            owner.piece[2] = math.nan
        return [*told, steps(scaler, optimizer)]

    assert run_threads(2, rank) == [[[1.0] * 3, (1, SCALE), (1, SCALE / 2)]] * 2


def test_alone_it_is_torchs_own_bit_for_bit() -> None:
    """Plain parameters, a sparse one among them, a step that overflows, and its state in and out."""
    results = []
    for cls in (GradScaler, torch.amp.GradScaler):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = cls("cpu", init_scale=2.0**10, growth_interval=2)
        told = []
        for step in range(5):
            optimizer.zero_grad()
            loss = model(torch.tensor([1, 3, 1, step])).square().sum() * (math.inf if step == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            told.append(scaler.get_scale())
        again = cls("cpu")
        again.load_state_dict(scaler.state_dict())
        results.append((told, again.state_dict(), [param.tolist() for param in model.parameters()]))
    assert results[0] == results[1]
    assert len(set(results[0][0])) == 2
    empty = Descent([Parameter(torch.zeros(2))])
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler_in_use().step(empty)
