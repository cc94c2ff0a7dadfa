"""A rank that raises, dies or builds another model: the others learn it, and all go on together or none."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lockstep
from lockstep.comm.communicator import Communicator
from lockstep.errors import CommError, LockstepError, ModelMismatch, PeerFailed
from lockstep.testing.failures import RankFailed
from lockstep.testing.worlds import run_processes


class Boom(Exception):
    pass


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def expected(model: nn.Module, step: int, world_size: int) -> list[Tensor]:
    """The mean of all ranks' gradients, by one process."""
    twin = mlp()
    twin.load_state_dict(model.state_dict())
    sum((twin(batch(step, rank)).pow(2).mean() for rank in range(world_size)), torch.zeros(())).backward()
    return [param.grad / world_size for param in twin.parameters() if param.grad is not None]


def is_right(model: nn.Module, step: int, world_size: int) -> bool:
    grads = [param.grad for param in model.parameters()]
    return all(
        grad is not None and torch.allclose(grad, wanted, atol=1e-6)
        for grad, wanted in zip(grads, expected(model, step, world_size), strict=True)
    )


def explode_at(param: Tensor) -> Any:
    def explode(grad: Tensor) -> None:
        raise Boom("in the middle")

    return param.register_hook(explode)


# ------------------------------------------------------------------ raising


def raise_in_backward(comm: Communicator, where: int, caps: float | None) -> dict[str, Any]:
    """Rank 1 raises when the gradient of layer `where` comes, in the first step and in a later one."""
    model = mlp()
    ddp = lockstep.DistributedDataParallel(model, bucket_cap_mb=caps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = []
    for step in range(6):
        optimizer.zero_grad()
        loss = ddp(batch(step, comm.rank)).pow(2).mean()
        if step not in (0, 3):
            loss.backward()
            assert is_right(model, step, comm.world_size), step
            optimizer.step()
            continue
        handle = explode_at(model[where].weight) if comm.rank == 1 else None
        try:
            loss.backward()
            told.append("nothing")
        except (Boom, PeerFailed) as error:
            told.append(f"{type(error).__name__}: {error}")
        if handle is not None:
            handle.remove()
        assert all(param.grad is None for param in model.parameters()) or told[-1] == "nothing"
    return {"told": told, "weights": [param.detach().clone() for param in model.parameters()]}


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_rank_raises_in_backward(world_size: int) -> None:
    for where, caps in ((4, None), (2, 0.0001), (0, 0.0001)):
        ranks = run_processes(world_size, raise_in_backward, where, caps, timeout_s=20)
        for rank, found in enumerate(ranks):
            assert len(found["told"]) == 2
            if rank == 1:
                assert all(text.startswith("Boom") for text in found["told"])
            else:
                assert all(text.startswith("PeerFailed") and "rank 1 raised" in text for text in found["told"]), found[
                    "told"
                ]
            assert all(torch.equal(a, b) for a, b in zip(found["weights"], ranks[0]["weights"], strict=True))


def all_raise_in_backward(comm: Communicator) -> list[str]:
    model = mlp()
    ddp = lockstep.DistributedDataParallel(model, bucket_cap_mb=0.0001)
    told = []
    for step in range(4):
        model.zero_grad()
        loss = ddp(batch(step, comm.rank)).pow(2).mean()
        if step in (0, 2):
            # not in the same layer
            handle = explode_at(model[2 * comm.rank].weight)
            try:
                loss.backward()
            except (Boom, PeerFailed) as error:
                told.append(type(error).__name__)
            handle.remove()
        else:
            loss.backward()
            assert is_right(model, step, comm.world_size)
    return told


def test_all_ranks_raise_in_backward() -> None:
    assert run_processes(2, all_raise_in_backward, timeout_s=20) == [["Boom", "Boom"]] * 2


def raise_in_hook(comm: Communicator, bad_step: int, bad_bucket: int) -> None:
    """Rank 0's communication hook raises. What the hook would have sent is its own affair, so nobody can go on."""
    model = mlp()
    ddp = lockstep.DistributedDataParallel(model, bucket_cap_mb=0.0001)
    state = {"step": 0}

    def hook(state, bucket):  # noqa: ANN001, ANN202 - torch's hooks need not be annotated
        if comm.rank == 0 and (state["step"], bucket.index()) == (bad_step, bad_bucket):
            raise Boom("in the hook")
        work = dist.all_reduce(bucket.buffer().div_(comm.world_size), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    ddp.register_comm_hook(state, hook)
    for step in range(3):
        state["step"] = step
        model.zero_grad()
        try:
            ddp(batch(step, comm.rank)).pow(2).mean().backward()
        except BaseException:
            assert all(param.grad is None for param in model.parameters())
            raise
        assert is_right(model, step, comm.world_size)


@pytest.mark.parametrize(("bad_step", "bad_bucket"), [(0, 0), (2, 1)])
def test_a_hook_raises_on_one_rank(bad_step: int, bad_bucket: int) -> None:
    with pytest.raises(RankFailed) as caught:
        run_processes(2, raise_in_hook, bad_step, bad_bucket, timeout_s=20)
    errors = caught.value.errors
    assert (errors[0].kind, errors[0].message) == ("Boom", "in the hook")
    assert errors[1].kind not in ("AssertionError", "ProcessDied", "Hang"), errors[1]


def raise_in_forward(comm: Communicator) -> dict[str, Any]:
    """With buffers: a forward raises on one rank, on another, on all; one without gradients raises and is repeated."""

    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()
            self.norm = nn.BatchNorm1d(3)
            self.broken = False

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.layers(x))
            if self.broken:
                raise Boom("in forward")
            return y

    torch.manual_seed(0)
    model = Fragile()
    ddp = lockstep.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = []
    for step in range(7):
        optimizer.zero_grad()
        model.broken = (step == 1 and comm.rank == 1) or (step == 2 and comm.rank == 0) or step == 4
        try:
            ddp(batch(step, comm.rank)).pow(2).mean().backward()
        except (Boom, PeerFailed) as error:
            told.append(f"{step} {type(error).__name__}")
            assert all(param.grad is None for param in model.parameters())
            continue
        optimizer.step()
        model.broken = comm.rank == 1
        with torch.no_grad():
            if model.broken:
                with pytest.raises(Boom):
                    ddp(batch(step, comm.rank))
                model.broken = False
            ddp(batch(step, comm.rank))
    return {"told": told, "state": {name: value.clone() for name, value in model.state_dict().items()}}


def test_forward_raises() -> None:
    zero, one = run_processes(2, raise_in_forward, timeout_s=20)
    assert zero["told"] == ["1 PeerFailed", "2 Boom", "4 Boom"]
    assert one["told"] == ["1 Boom", "2 PeerFailed", "4 Boom"]
    for name, value in zero["state"].items():
        if name.endswith(("weight", "bias")):  # buffers are each rank's own until the next forward
            assert torch.equal(value, one["state"][name]), name


# ------------------------------------------------------------------ dying


def die_in_backward(comm: Communicator, step_of_death: int) -> Any:
    model = mlp()
    ddp = lockstep.DistributedDataParallel(model, bucket_cap_mb=0.0001)

    def die(grad: Tensor) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    for step in range(3):
        if step == step_of_death and comm.rank == 1:
            model[2].weight.register_hook(die)
        model.zero_grad()
        try:
            ddp(batch(step, comm.rank)).pow(2).mean().backward()
        except CommError:
            assert all(param.grad is None for param in model.parameters())
            raise
    return None


@pytest.mark.parametrize("step_of_death", [0, 2])
def test_a_rank_is_killed_in_backward(step_of_death: int) -> None:
    with pytest.raises(RankFailed) as caught:
        run_processes(2, die_in_backward, step_of_death, timeout_s=50)
    errors = caught.value.errors
    assert errors[1].message == "killed by SIGKILL"
    assert errors[0].kind == "PeerLost", errors[0]  # not the timeout of 50 s


def never_comes(comm: Communicator) -> str:
    """Rank 1 stays away from the second step until rank 0 has given it up."""
    model = mlp()
    ddp = lockstep.DistributedDataParallel(model)
    ddp(batch(0, comm.rank)).pow(2).mean().backward()
    store = dist.distributed_c10d._get_default_store()
    if comm.rank == 1:
        store.wait(["rank 0 gave up"], timedelta(seconds=20))
        return "waited"
    try:
        ddp(batch(1, comm.rank)).pow(2).mean().backward()
        told = "nothing was raised"
    except CommError as error:
        told = type(error).__name__
    store.set("rank 0 gave up", "")
    return f"{told}, no gradients: {all(param.grad is None for param in model.parameters())}"


def wrap_one(comm: Communicator) -> None:
    lockstep.DistributedDataParallel(mlp())


def test_a_rank_that_does_not_come() -> None:
    run_processes(2, wrap_one)  # new processes load torch for longer than the short limit below allows
    assert run_processes(2, never_comes, timeout_s=3) == ["CollectiveTimeout, no gradients: True", "waited"]


# ------------------------------------------------------------------ different models


def named(**layers: nn.Module) -> nn.Module:
    return nn.ModuleDict(layers)


def frozen_bias() -> nn.Module:
    model = named(a=nn.Linear(2, 3))
    model["a"].bias.requires_grad_(False)
    return model


DIFFERENT: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], tuple[str, ...]]] = {
    "name": (
        lambda: named(a=nn.Linear(2, 3)),
        lambda: named(b=nn.Linear(2, 3)),
        ("rank 1 has parameter 'b.weight'", "'a.weight'"),
    ),
    "shape": (
        lambda: named(a=nn.Linear(2, 3)),
        lambda: named(a=nn.Linear(2, 4)),
        ("rank 1", "'a.weight'", "[4, 2]", "[3, 2]"),
    ),
    "dtype": (
        lambda: named(a=nn.Linear(2, 3)),
        lambda: named(a=nn.Linear(2, 3).double()),
        ("rank 1", "float64", "float32"),
    ),
    "order": (
        lambda: named(a=nn.Linear(2, 2), b=nn.Linear(2, 2)),
        lambda: named(b=nn.Linear(2, 2), a=nn.Linear(2, 2)),
        ("rank 1 has parameter 'b.weight' where rank 0 has parameter 'a.weight'",),
    ),
    "requires_grad": (
        lambda: named(a=nn.Linear(2, 3)),
        frozen_bias,
        ("rank 1", "'a.bias'", "requires_grad False", "True"),
    ),
    "more": (
        lambda: named(a=nn.Linear(2, 2)),
        lambda: named(a=nn.Linear(2, 2), b=nn.Linear(2, 2)),
        ("rank 1 has parameter 'b.weight'", "rank 0 lacks"),
    ),
    "fewer": (
        lambda: named(a=nn.Linear(2, 2), b=nn.Linear(2, 2, bias=False)),
        lambda: named(a=nn.Linear(2, 2)),
        ("rank 1 lacks parameter 'b.weight'",),
    ),
    "buffer": (
        lambda: named(a=nn.BatchNorm1d(2)),
        lambda: named(a=nn.BatchNorm1d(2, track_running_stats=False)),
        ("rank 1 lacks buffer",),
    ),
}


def build_different(comm: Communicator) -> dict[str, str]:
    found = {}
    for name, (zero, other, _) in DIFFERENT.items():
        try:
            lockstep.DistributedDataParallel(other() if comm.rank == 1 else zero())
            found[name] = "accepted"
        except ModelMismatch as error:
            found[name] = str(error)
    lockstep.DistributedDataParallel(mlp())  # the group is usable after all that
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_different_models_are_refused_on_every_rank(world_size: int) -> None:
    for found in run_processes(world_size, build_different, timeout_s=20):
        for name, (_, _, words) in DIFFERENT.items():
            assert all(word in found[name] for word in words), f"{name}: {found[name]}"


# ------------------------------------------------------------------ misuse after construction


def misuse(comm: Communicator) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = mlp()
    model[0].bias.requires_grad_(False)
    ddp = lockstep.DistributedDataParallel(model)
    model[0].bias.requires_grad_(True)
    try:
        ddp(batch(0, comm.rank))
        found["thawed"] = "accepted"
    except LockstepError as error:
        found["thawed"] = f"{type(error).__name__}: {error}"
    model[0].bias.requires_grad_(False)
    ddp(batch(0, comm.rank)).sum().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            ddp.module(batch(0, comm.rank)).sum().backward()
    found["around"] = [str(warning.message) for warning in caught]
    frozen = mlp()
    ddp = lockstep.DistributedDataParallel(frozen)
    frozen[0].weight.requires_grad_(False)  # after wrapping, on all ranks: it is unused from now on
    frozen[0].bias.requires_grad_(False)
    for step in range(2):
        frozen.zero_grad()
        ddp(batch(step, comm.rank)).pow(2).mean().backward()
    found["refrozen"] = [param.grad is None for param in frozen.parameters()]
    return found


def test_misuse_after_construction() -> None:
    for found in run_processes(2, misuse, timeout_s=20):
        assert found["thawed"].startswith("ModelMismatch")
        assert "0.bias" in found["thawed"]
        assert len(found["around"]) == 1
        assert "Call the wrapper, not its .module" in found["around"][0]
        assert found["refrozen"] == [True, True, False, False, False, False]
