"""Clipping over every layout that ranks can hold gradients in, as threads: the value of one process, few operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from lockstep.comm.communicator import Communicator
from lockstep.errors import ConfigError, TrainingError, UnsupportedArgument
from lockstep.parallel.clip import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from lockstep.parallel.dtensors import DTensor, Replicate, Shard, mesh_of_ranks
from lockstep.parallel.grad_pieces import in_runs, own_gradients
from lockstep.parallel.shard_face import Face
from lockstep.parallel.shard_layout import Cut, ShardLayout
from lockstep.parallel.shard_slot import ShardSlot
from lockstep.testing.worlds import run_threads

SHAPES = ((7, 5), (3,), (1, 4), (8, 3), (), (2, 3, 2))
Gradients = Sequence[Tensor | None]


def gradients(
    seed: int, shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) * (i + 1) for i, shape in
            enumerate(shapes)]  # fmt: skip


def expected(wholes: Gradients, max_norm: float, norm_type: float = 2.0) -> tuple[float, list[Tensor]]:
    """One process, in fp64."""
    params = [Parameter(torch.zeros(whole.shape, dtype=torch.float64)) for whole in wholes if whole is not None]
    for param, whole in zip(params, [whole for whole in wholes if whole is not None], strict=True):
        param.grad = whole.double()
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type).item()
    return norm, [param.grad for param in params if param.grad is not None]


def plain(comm: Communicator, wholes: Gradients) -> list[Parameter]:
    """Every rank has everything."""
    params = []
    for whole in wholes:
        param = Parameter(torch.zeros(() if whole is None else whole.shape, dtype=_dtype(whole)))
        param.grad = None if whole is None else whole.clone()
        params.append(param)
    return params


def sharded(comm: Communicator, wholes: Gradients, replicas: int = 1) -> list[Parameter]:
    """One unit, as fully_shard leaves it: gradients are pieces of one flat tensor, presented as DTensors."""
    lines = comm if replicas == 1 else comm.mesh(replica=replicas, shard=-1)["shard"]
    ranks = torch.tensor(comm.global_ranks)
    grid, names = (ranks, ("shard",)) if replicas == 1 else (ranks.view(replicas, -1), ("replica", "shard"))
    mesh = mesh_of_ranks("cpu", grid, comm.global_ranks[comm.rank], names)
    shapes = [(1,) if whole is None else tuple(whole.shape) or (1,) for whole in wholes]
    layout = ShardLayout([Cut(shape) for shape in shapes], lines.world_size)
    dtype = next((_dtype(whole) for whole in wholes if whole is not None), torch.float32)
    flat = torch.zeros(layout.shard_numel, dtype=dtype)
    placements = (Shard(0),) if replicas == 1 else (Replicate(), Shard(0))
    faces = [Face(shape, shape, mesh, placements, spread=None) for shape in shapes]
    group = SimpleNamespace(comm=lines, params=[], faces=faces)
    for index, whole in enumerate(wholes):
        start, stop = layout.local_span(index, lines.rank)
        piece = flat[start:stop].view(layout.piece_shape(index, lines.rank))
        local = torch.zeros_like(piece)
        param: Any = Parameter(faces[index].piece(local))
        param._lockstep_slot = ShardSlot(group, index)  # type: ignore[arg-type]
        group.params.append(param)
        if whole is not None:
            first, count = layout.rows(index, lines.rank)
            piece.copy_(whole.view(shapes[index]).narrow(0, first, count))
            param.grad = faces[index].piece(piece)
    return group.params


def pieces_match(comm: Communicator, params: Sequence[Parameter], wholes: Sequence[Tensor], rel: float) -> None:
    """This rank's pieces are those of `wholes`."""
    given_params = [param for param in params if param.grad is not None]
    for param, whole in zip(given_params, wholes, strict=True):
        grad: Any = param.grad
        if isinstance(grad, DTensor):
            axis = grad.device_mesh.ndim - 1
            count, me = grad.device_mesh.size(axis), grad.device_mesh.get_coordinate()[axis]
            chunks = whole.reshape(grad.shape).chunk(count)
            whole = chunks[me] if me < len(chunks) else whole.new_empty(0)
            grad = grad.to_local()
        torch.testing.assert_close(grad.double().flatten(), whole.flatten(), rtol=rel, atol=1e-30)


def _dtype(whole: Tensor | None) -> torch.dtype:
    return torch.float32 if whole is None else whole.dtype


MIXTURES: dict[str, Callable[[Communicator, Gradients], list[Parameter]]] = {
    "plain": plain,
    "one unit": sharded,
    "two units": lambda comm, wholes: [*sharded(comm, wholes[:2]), *sharded(comm, wholes[2:])],
    "unit and plain": lambda comm, wholes: [*plain(comm, wholes[:3]), *sharded(comm, wholes[3:])],
    "hybrid": lambda comm, wholes: sharded(comm, wholes, 2 if comm.world_size % 2 == 0 else 1),
    "every rank a replica": lambda comm, wholes: sharded(comm, wholes, comm.world_size),
    "all of them": lambda comm, wholes: [
        *sharded(comm, wholes[:2]),
        *plain(comm, wholes[2:3]),
        *sharded(comm, wholes[3:5], comm.world_size // (2 - comm.world_size % 2)),
        *sharded(comm, wholes[5:], comm.world_size),
    ],
}


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("norm_type", [2.0, 1, math.inf, "inf", 0.5, 3.0])
def test_norm_and_gradients_are_those_of_one_process(mixture: str, norm_type: Any) -> None:
    wholes = gradients(1)
    norm, clipped = expected(wholes, 0.7, float(norm_type))
    bits = set()

    def rank(comm: Communicator) -> float:
        params = MIXTURES[mixture](comm, wholes)
        found = clip_grad_norm_(params, 0.7, norm_type)
        assert type(found) is Tensor
        assert (found.shape, found.dtype, found.requires_grad) == ((), torch.float32, False)
        pieces_match(comm, params, clipped, 1e-6)
        return found.item()

    for world_size in (1, 2, 3, 4):
        for found in run_threads(world_size, rank):
            assert found == pytest.approx(norm, rel=1e-6)
            bits.add(found)
    assert len(bits) == 1, "the same bits on every rank of every world"


@settings(max_examples=25, deadline=None)
@given(
    world_size=st.integers(1, 4),
    shapes=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6),
    cut=st.integers(0, 6),
    replicated=st.booleans(),
    absent=st.integers(0, 63),
    norm_type=st.sampled_from([2.0, 1.0, math.inf, 0.5]),
    max_norm=st.sampled_from([0.0, 0.1, 3.0, math.inf]),
)
def test_any_shapes(
    world_size: int, shapes: list[tuple[int, ...]], cut: int, replicated: bool, absent: int, norm_type: float,
    max_norm: float,
) -> None:  # fmt: skip
    present = [not absent >> i & 1 for i in range(len(shapes))]
    wholes = [whole if here else None for whole, here in zip(gradients(2, shapes), present, strict=True)]
    # torch has no largest element of an empty tensor, and a norm over no tensors
    norm, clipped = expected(
        [w for w in wholes if w is not None and w.numel()] or [torch.zeros(1)], max_norm, norm_type
    )
    clipped = [whole for whole in clipped if any(w is not None and w.numel() for w in wholes)]

    def rank(comm: Communicator) -> None:
        replicas = world_size if replicated else 1
        params = [*sharded(comm, wholes[:cut], replicas), *plain(comm, wholes[cut:])]
        assert clip_grad_norm_(params, max_norm, norm_type).item() == pytest.approx(norm, rel=1e-6)
        pieces_match(comm, [param for param in params if param.numel()], clipped, 2e-6)

    run_threads(world_size, rank)


def test_one_operation_for_all_units_and_none_for_plain_parameters() -> None:
    def rank(comm: Communicator) -> tuple[int, int]:
        same_ranks = comm.split(0)
        assert same_ranks is not None
        before = comm._collectives
        units = [*sharded(comm, gradients(1)), *sharded(same_ranks, gradients(2)), *sharded(comm, gradients(3))]
        clip_grad_norm_([*units, *plain(comm, gradients(4))], 1.0)
        taken = comm._collectives - before + same_ranks._collectives
        before = comm._collectives
        clip_grad_norm_(plain(comm, gradients(4)), 1.0)
        return taken, comm._collectives - before

    assert run_threads(3, rank) == [(1, 0)] * 3
    assert run_threads(1, rank) == [(0, 0)]


def test_ranks_without_any_gradient_take_part() -> None:
    """One element, and so one rank with a piece; gradients on one rank only; on none."""

    def rank(comm: Communicator) -> list[float]:
        single = sharded(comm, [torch.full((1,), 3.0)])
        norms = [clip_grad_norm_(single, 1.0).item()]
        params = sharded(comm, [torch.full((6,), 2.0)])
        if comm.rank != 1:
            params[0].grad = None
        norms.append(clip_grad_norm_(params, 1.0).item())
        norms.append(clip_grad_norm_(sharded(comm, [None, None]), 1.0).item())
        return norms

    assert run_threads(3, rank) == [[3.0, pytest.approx(8**0.5), 0.0]] * 3


@pytest.mark.parametrize("norm_type", [2.0, math.inf, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_an_error_on_every_rank(norm_type: float, value: float) -> None:
    wholes = [torch.ones(5), torch.ones(2)]
    wholes[0][4] = value  # on the last rank only

    def rank(comm: Communicator) -> tuple[float, str]:
        params = sharded(comm, wholes)
        with pytest.raises(TrainingError, match="error_if_nonfinite=False") as error:
            clip_grad_norm_(params, 1.0, norm_type, error_if_nonfinite=True)
        assert isinstance(error.value, RuntimeError), "as torch's is"
        local: Any = params[1].grad
        untouched = local.to_local().sum().item() == local.to_local().numel()
        assert untouched, "no gradient was scaled"
        norm = clip_grad_norm_(params, 1.0, norm_type).item()
        return norm, str(local.to_local().flatten()[:1].tolist())

    norms = run_threads(2, rank)
    want, want_grad = (math.nan, "[nan]") if math.isnan(value) else (math.inf, "[0.0]")
    assert [str(norm) for norm, _ in norms] == [str(want)] * 2
    assert [grad for _, grad in norms] == [want_grad] * 2, "scaled as torch scales them"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    wholes = gradients(5, dtype=torch.float64)
    wholes = [(whole + 1j * whole.flip(0) if dtype.is_complex and whole.dim() else whole).to(dtype) for whole in wholes]
    exact = sum((whole.to(torch.complex128).abs() ** 2).sum().item() for whole in wholes) ** 0.5

    def rank(comm: Communicator) -> tuple[float, torch.dtype]:
        params = [*sharded(comm, wholes[:4]), *plain(comm, wholes[4:]), *sharded(comm, gradients(6)[:1])]
        params[-1].grad = None
        found = clip_grad_norm_(params, 1.0)
        twice = clip_grad_norm_(params, math.inf)
        assert twice.item() == pytest.approx(1.0, rel=2e-2 if dtype.itemsize == 2 else 1e-5)
        return found.item(), found.dtype

    kept = torch.float64 if dtype is torch.float64 else torch.float32
    rel = 1e-14 if dtype is torch.float64 else 1e-7
    assert run_threads(3, rank) == [(pytest.approx(exact, rel=rel), kept)] * 3


def test_mixed_dtypes_in_one_call() -> None:
    wholes = [*gradients(7)[:3], *gradients(8, dtype=torch.bfloat16)[3:]]
    norm, _ = expected(wholes, 1.0)

    def rank(comm: Communicator) -> float:
        return clip_grad_norm_([*sharded(comm, wholes[:3]), *sharded(comm, wholes[3:])], 1.0).item()

    assert run_threads(2, rank) == [pytest.approx(norm, rel=1e-6)] * 2


def test_the_sum_is_exact_where_fp32_is_not() -> None:
    """A million equal elements: torch sums them in fp32 and is off by far more than a rounding."""
    wholes = [torch.full((1 << 20,), 0.1)]
    exact = 0.1000000014901161 * 1024  # of the fp32 number next to 0.1

    def rank(comm: Communicator) -> float:
        return clip_grad_norm_(sharded(comm, wholes), 1.0).item()

    for world_size in (1, 3):
        assert set(run_threads(world_size, rank)) == {torch.tensor(exact, dtype=torch.float32).item()}


def test_the_two_halves_do_what_the_whole_does() -> None:
    wholes = gradients(9)
    norm, clipped = expected(wholes, 0.5)

    def rank(comm: Communicator) -> None:
        params = sharded(comm, wholes)
        total = clip_grad_norm_(sharded(comm, wholes), math.inf)
        clip_grads_with_norm_(params, 0.5, total)
        pieces_match(comm, params, clipped, 1e-6)

    run_threads(3, rank)
    assert get_total_norm(wholes).item() == pytest.approx(norm, rel=1e-6)
    assert get_total_norm(wholes[0], math.inf).item() == wholes[0].abs().max()


@pytest.mark.parametrize("foreach", [None, True, False])
def test_foreach_changes_no_number(foreach: bool | None) -> None:
    wholes = gradients(10)
    norm, clipped = expected(wholes, 0.5)

    def rank(comm: Communicator) -> None:
        params = sharded(comm, wholes)
        assert clip_grad_norm_(params, 0.5, foreach=foreach).item() == pytest.approx(norm, rel=1e-6)
        pieces_match(comm, params, clipped, 1e-6)

    run_threads(2, rank)


class Pieces:
    """Stands for an optimizer that has averaged gradients for its own part of one flat buffer only."""

    def __init__(self, comm: Communicator, wholes: Sequence[Tensor]) -> None:
        self.comm = comm
        self.params = [Parameter(torch.zeros_like(whole)) for whole in wholes]
        flat = torch.cat([whole.flatten() for whole in wholes])
        mine = flat.tensor_split(comm.world_size)
        self.mine = mine[comm.rank].clone()
        self.at = sum(part.numel() for part in mine[: comm.rank])
        self.asked: list[int] = []

    def gradient_pieces(self, params: Sequence[Tensor]) -> list[Tensor]:
        self.asked.append(len(params))
        pieces, start = [], 0
        for param in self.params:
            stop = start + param.numel()
            if any(param is one for one in params):
                low, high = max(start, self.at), min(stop, self.at + self.mine.numel())
                pieces.append(self.mine[low - self.at : max(high - self.at, low - self.at)])
            start = stop
        return pieces


def test_gradients_that_someone_else_holds() -> None:
    wholes = gradients(11)
    more = gradients(12)
    norm, clipped = expected([*wholes, *more], 0.5)
    flat = torch.cat([whole.flatten() for whole in clipped[: len(wholes)]])
    part, _ = expected([wholes[0], wholes[2]], 0.5)

    def rank(comm: Communicator) -> None:
        owner = Pieces(comm, wholes)
        own_gradients(owner.params, owner)
        owner.params[0].grad = torch.full_like(owner.params[0], 1e6)  # of this rank alone, and no business of anyone
        some = clip_grad_norm_([owner.params[0], owner.params[2]], math.inf)
        assert some.item() == pytest.approx(part, rel=1e-6)
        before = comm._collectives
        found = clip_grad_norm_([*owner.params, *sharded(comm, more)], 0.5)
        assert found.item() == pytest.approx(norm, rel=1e-6)
        assert comm._collectives - before == (comm.world_size > 1)
        assert owner.asked == [2, len(wholes)], "once, with the parameters of the call"
        mine = flat[owner.at : owner.at + owner.mine.numel()]
        torch.testing.assert_close(owner.mine.double(), mine, rtol=1e-6, atol=0)
        own_gradients(owner.params, None)
        assert clip_grad_norm_(owner.params, math.inf).item() == pytest.approx(1e6 * 35**0.5)

    for world_size in (1, 3):
        run_threads(world_size, rank)


def test_an_owner_that_died_has_nothing() -> None:
    def rank(comm: Communicator) -> None:
        owner = Pieces(comm, [torch.zeros(4)])
        params = owner.params
        own_gradients(params, owner)
        params[0].grad = torch.full((4,), 3.0)
        assert clip_grad_norm_(params, math.inf).item() == 0.0
        del owner
        assert clip_grad_norm_(params, math.inf).item() == 6.0

    run_threads(1, rank)


def test_arguments_that_cannot_be_right() -> None:
    params = plain(None, gradients(1))  # type: ignore[arg-type]
    for norm_type in (0, -1.0, -math.inf, math.nan):
        with pytest.raises(UnsupportedArgument, match="norm_type"):
            clip_grad_norm_(params, 1.0, norm_type)
    for max_norm in (-1.0, math.nan):
        with pytest.raises(ConfigError, match="max_norm"):
            clip_grad_norm_(params, max_norm)
        with pytest.raises(ConfigError, match="max_norm"):
            clip_grads_with_norm_(params, max_norm, torch.ones(()))
    with pytest.warns(RuntimeWarning, match="generator of parameters is empty") as warned:
        clip_grad_norm_((param for param in ()), 1.0)
    assert warned[0].filename == __file__


def test_nothing_to_clip() -> None:
    assert clip_grad_norm_([], 1.0).item() == 0.0
    assert clip_grad_norm_(torch.nn.Linear(2, 2).parameters(), 1.0).item() == 0.0


def test_sparse_gradients() -> None:
    table = torch.nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 3, 1])).sum().backward()
    assert clip_grad_norm_(table.parameters(), 1.0).item() == pytest.approx(10**0.5)
    assert table.weight.grad is not None
    assert table.weight.grad.to_dense().norm().item() == pytest.approx(1.0)


def test_what_lies_side_by_side_is_one_run() -> None:
    flat = torch.arange(20.0)
    views = [flat[0:4], flat[4:4], flat[4:10].view(2, 3), flat[11:13], flat[13:14], flat[14:20].view(3, 2).t()]
    runs = in_runs([*views, torch.ones(2)])
    assert [run.shape for run in runs] == [(10,), (3,), (2, 3), (2,)]
    assert torch.equal(runs[0], flat[:10])
    assert torch.equal(runs[1], flat[11:14])
    runs[0].zero_()
    assert views[2].sum() == 0, "the same memory"
    assert [run.shape for run in in_runs([flat[4:8], flat[0:4], flat[:2], flat.double()[2:4]])] == [
        (4,),
        (4,),
        (2,),
        (2,),
    ]
