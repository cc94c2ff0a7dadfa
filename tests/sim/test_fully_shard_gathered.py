"""Where whole parameters are gathered, on ranks that are threads: how many there are at once, and from whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lockstep
from lockstep.comm.communicator import Communicator
from lockstep.comm.op import CommOp, Work
from lockstep.comm.transport import Transport, TransportLayer
from lockstep.errors import PeerFailed, ShardingError
from lockstep.parallel import unsharded
from lockstep.parallel.shard_context import context_of, unit_of
from lockstep.parallel.shard_group import ShardState
from lockstep.testing.worlds import run_threads
from shard_models import MLP_UNITS, mlp
from shard_sides import SGD, Side, scalar, seeded

UNITS = 8


class Seen(torch.autograd.Function):
    """Its input; calls `look` in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, look: Callable[[], None]) -> Tensor:
        ctx.look = look
        look()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.look()
        return grad, None


class Layer(nn.Linear):
    look: Callable[[], None]

    def forward(self, x: Tensor) -> Tensor:
        return Seen.apply(super().forward(x).tanh(), self.look)


class Chain(nn.Module):
    """Layers of which a rank runs those it is told to; all but the first and the last may be frozen."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(4, 4) for _ in range(UNITS))
        for layer in list(self.layers)[1:-1] if frozen else []:
            layer.requires_grad_(False)

    def forward(self, x: Tensor, route: Sequence[int]) -> Tensor:
        for number in route:
            x = self.layers[number](x)
        return x


def gathered(model: Any, mesh: Any, units: Sequence[nn.Module], **kwargs: Any) -> Any:
    """The model, sharded so that nothing is in shared memory."""
    for unit in units:
        lockstep.fully_shard(unit, mesh=mesh, **kwargs)
    lockstep.fully_shard(model, mesh=mesh)
    context_of(unit_of(model)).wholes.sharing = False  # type: ignore[arg-type]
    return model


def most_at_once(
    comm: Communicator, frozen: bool, routes: Sequence[Sequence[int]], ahead: tuple[int, int] = (0, 0)
) -> list[tuple[int, int]]:
    """Per step, how many units at most are whole, or being gathered, while forward and backward are in one.

    ahead: how many modules each is told to prefetch in forward and in backward.
    """
    model = Chain(frozen)
    gathered(model, comm, model.layers)
    context = context_of(unit_of(model))  # type: ignore[arg-type]
    most: list[tuple[int, int]] = []

    def look() -> None:
        count = sum(group.state is not ShardState.SHARDED for group in context.groups)
        forward, backward = most[-1]
        most[-1] = (forward, max(backward, count)) if context.in_backward else (max(forward, count), backward)

    for layer in model.layers:
        layer.look = look
        layer.set_modules_to_forward_prefetch([model.layers[0]] * ahead[0])
        layer.set_modules_to_backward_prefetch([model.layers[0]] * ahead[1])
    for _ in range(3):
        most.append((0, 0))
        model(torch.ones(2, 4), routes[comm.rank]).sum().backward()
    return most


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
def test_two_units_at_once(frozen: bool, stride: int) -> None:
    """Also on a rank that runs every second unit, and through frozen units, which have nothing to reduce."""
    routes = [range(UNITS), [0, *range(stride, UNITS, stride)]]
    first, second = run_threads(2, most_at_once, frozen, routes)
    assert first[1:] == [(2, 2)] * 2
    assert max(map(max, second[1:])) <= 2


def test_as_many_more_as_modules_to_prefetch() -> None:
    routes = [range(UNITS)] * 2
    assert run_threads(2, most_at_once, True, routes, (3, 0))[0][1:] == [(4, 2)] * 2
    assert run_threads(2, most_at_once, True, routes, (0, 3))[0][1:] == [(2, 4)] * 2


# ------------------------------------------------------------------ parts that neighbours keep


def parts_in_memory(model: nn.Module) -> int:
    groups = context_of(unit_of(model)).groups  # type: ignore[arg-type]
    return sum(group.kept_part is not None and group.kept_part._part is not None for group in groups)


def trained(comm: Communicator, reshard_after_forward: bool | int) -> list[Tensor]:
    """On two replicas of four pieces."""
    side = Side("ours", comm)
    with comm.mesh(replica=2, shard=4) as mesh:
        model = seeded(mlp)
        units = [model.get_submodule(name) for name in MLP_UNITS]
        gathered(model, mesh, units, reshard_after_forward=reshard_after_forward)
        optimizer = SGD(model.parameters())
        kept: list[int] = []
        for step in range(2):
            optimizer.zero_grad()
            x = side.batch(step, 6, 8).requires_grad_()
            x.register_hook(lambda _: kept.append(parts_in_memory(model)))
            loss = scalar(model(x))
            kept.append(parts_in_memory(model))
            sizes = [tuple(param.device_mesh.mesh.shape) for param in model.parameters()]
            assert sizes == [(2, 2) if reshard_after_forward == 2 else (2, 4)] * len(sizes)
            if comm.rank % 3 == step:  # what one rank does alone
                model.state_dict()
                model[2].reshard()
            if step == 1:
                model[0].unshard()
            loss.backward()
            assert kept[-2:] == [3 if reshard_after_forward == 2 else 0, 0]  # none at the end of backward
            model(side.batch(9, 6, 8))  # what is kept of it is of no use after the step
            optimizer.step()
        return [piece.to_local().clone() for piece in model.state_dict().values()]


def test_parts_beside_replicas() -> None:
    """What is kept, and what one rank does alone, changes nothing: bit for bit as with nothing kept."""
    parts, whole = (run_threads(8, trained, choice) for choice in (2, True))
    for ours, wanted in zip(parts, whole, strict=True):
        assert all(map(torch.equal, ours, wanted))


# ------------------------------------------------------------------ gradients that cannot be cut


class Sparse(nn.Module):
    """An embedding whose gradient is sparse on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor, sparse: bool) -> Tensor:
        return self.head(functional.embedding(tokens, self.embed.weight, sparse=sparse))


def steps_with_a_sparse_one(comm: Communicator, sharing: bool) -> list[str]:
    model = Sparse()
    gathered(model, comm, [model.head])
    context_of(unit_of(model)).wholes.sharing = sharing  # type: ignore[arg-type]
    found = []
    for step in range(3):
        try:
            model(torch.tensor([1, 2]), step == 1 and comm.rank == 1).sum().backward()
            found.append("ok")
        except (ShardingError, PeerFailed) as error:
            assert model.embed.weight.grad is None
            found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize("sharing", [True, False])
def test_a_sparse_gradient_is_named_and_the_next_step_is_in_order(sharing: bool) -> None:
    peer, own = run_threads(2, steps_with_a_sparse_one, sharing)
    assert [own[0], own[2], peer[0], peer[2]] == ["ok"] * 4
    assert "ShardingError: rank 1: parameter 'embed.weight' gets a sparse gradient" in own[1]
    assert "sparse=False" in own[1]
    assert "PeerFailed" in peer[1]


def wrapped(comm: Communicator) -> str:
    with pytest.raises(ShardingError) as raised:
        lockstep.FullyShardedDataParallel(nn.Embedding(4, 3, sparse=True), process_group=comm)
    return str(raised.value)


def test_the_older_wrapper_says_the_same() -> None:
    assert all("ignored_states" in message for message in run_threads(2, wrapped))


# ------------------------------------------------------------------ hooks of gradients


def stepped_by(comm: Communicator, which: int | None) -> list[Tensor]:
    """Every second backward the hook of one parameter steps and clears all; None: the program does."""
    side = Side("ours", comm)
    model = gathered(seeded(mlp), comm, [])
    optimizer = SGD(model.parameters())

    def step(_: Tensor) -> None:
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()

    if which is not None:
        list(model.parameters())[which].register_post_accumulate_grad_hook(step)
    for number in range(4):
        scalar(model(side.batch(number, 6, 8))).backward()
        if which is None:
            step(torch.empty(0))
    assert all(param.grad is None for param in model.parameters())
    return [piece.to_local().clone() for piece in model.state_dict().values()]


def test_when_a_hook_is_called_all_gradients_are_there() -> None:
    expected = run_threads(2, stepped_by, None)
    for which in (0, 2):
        for ours, wanted in zip(run_threads(2, stepped_by, which), expected, strict=True):
            assert all(map(torch.equal, ours, wanted))


# ------------------------------------------------------------------ errors in a gather


class Breaks(TransportLayer):
    """Raises in place of one operation of a gather, also over a part of the ranks."""

    def __init__(self, inner: Transport, passed: list[bool]) -> None:
        super().__init__(inner)
        self.passed = passed  # what comes next, False: raise

    def submit(self, op: CommOp) -> Work:
        if op.kind == "all_gather" and op.label.startswith("gather") and self.passed and not self.passed.pop():
            raise MemoryError
        return self.inner.submit(op)

    def over(self, inner: Transport) -> Breaks:
        return Breaks(inner, self.passed)


def interrupted(
    comm: Communicator, at: int | None, reshard_after_forward: bool | int
) -> tuple[list[str], list[Tensor]]:
    """On the last rank the operation `at` of the second step's gathers raises; without it that step is left out."""
    layer = Breaks(comm.transport, [])
    side, heard = Side("ours", comm), []
    model = seeded(mlp)
    gathered(model, Communicator(layer), [model[0], model[2]], reshard_after_forward=reshard_after_forward)
    optimizer = SGD(model.parameters())
    for step in range(3):
        if at is None and step == 1:
            continue
        if at is not None and step == 1 and comm.rank == comm.world_size - 1:
            layer.passed[:] = [False, *[True] * at]
        try:
            scalar(model(side.batch(step, 6, 8))).backward()
            optimizer.step()
        except (MemoryError, PeerFailed) as error:
            heard.append(type(error).__name__)
        optimizer.zero_grad()
    return heard, [piece.to_local().clone() for piece in model.state_dict().values()]


@pytest.mark.parametrize("choice", [True, 2])
def test_a_gather_that_raises_is_begun_as_a_whole(choice: bool | int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two operations of it: the other ranks wait for all or for none."""
    monkeypatch.setattr(unsharded, "_PLACED_BYTES", 64)  # several operations in a gather
    world_size = 2 * choice
    expected = [pieces for _, pieces in run_threads(world_size, interrupted, None, choice)]
    for at in (0, 1, 2, 5, 8):
        *peers, (own, last) = run_threads(world_size, interrupted, at, choice)
        assert own == ["MemoryError"]
        assert all(heard == ["PeerFailed"] for heard, _ in peers)
        for ours, wanted in zip([*(pieces for _, pieces in peers), last], expected, strict=True):
            assert all(map(torch.equal, ours, wanted))


# ------------------------------------------------------------------ what is refused says what to do


class OwnGather(TransportLayer):
    """Could all-gather in a way of its own; counts."""

    calls = 0

    def submit(self, op: CommOp) -> Work:
        self.calls += op.kind == "all_gather" and op.label.startswith("gather")
        return self.inner.submit(op)

    def over(self, inner: Transport) -> OwnGather:
        return OwnGather(inner)


def gathers_through_a_layer(comm: Communicator, again: bool) -> int:
    layer = OwnGather(comm.transport)
    model = seeded(mlp)
    gathered(model, Communicator(layer), [model[0], model[2]])
    model[0].set_unshard_in_backward(again)  # of the first layer's weight nothing but its own gradient is needed
    scalar(model(torch.ones(2, 8))).backward()
    return layer.calls


def test_a_layer_sees_what_custom_all_gathers_would() -> None:
    """The way that the refusal of `set_custom_all_gather` names."""
    assert run_threads(2, gathers_through_a_layer, True) == [5, 5]  # three units in forward, two again in backward
    assert run_threads(2, gathers_through_a_layer, False) == [4, 4]
