"""What FullyShardedDataParallel does with gradients: hooks, dtypes, and when it gathers and reduces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook

from fsdp_models import adamw, batch, build, equal, train, wrapped
from lockstep.comm.communicator import Communicator
from lockstep.comm.op import CommOp, Work
from lockstep.comm.transport import Transport, TransportLayer
from lockstep.errors import ConfigError, UnsupportedArgument
from lockstep.parallel.dtensors import local_tensor
from lockstep.parallel.fsdp import FullyShardedDataParallel as Fsdp
from lockstep.parallel.shard_context import context_of, unit_of
from lockstep.parallel.shard_group import ShardGroup, ShardState
from lockstep.parallel.torch_fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
from lockstep.testing.worlds import run_threads

# ------------------------------------------------------------------ hooks


def mean(comm: Communicator, gradient: Tensor, shard: Tensor | None = None) -> None:
    """What is done without a hook, as a hook."""
    if shard is None:
        comm.all_reduce(gradient)
        gradient.div_(comm.world_size)
    else:
        comm.reduce_scatter_tensor(shard, gradient)
        shard.div_(comm.world_size)


def replaced(comm: Communicator, gradient: Tensor, shard: Tensor | None = None) -> None:
    """A hook may put other data into its tensors, of another dtype too."""
    gradient.data = gradient.double()
    if shard is not None:
        shard.data = shard.double()
    mean(comm, gradient, shard)


@pytest.mark.parametrize("hook", [mean, replaced])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_a_hook_reduces_instead(strategy: ShardingStrategy, hook: Any) -> None:
    """Also what has been accumulated without synchronisation."""

    def body(comm: Communicator) -> None:
        ends = []
        for is_hooked in (False, True):
            model = wrapped(comm, sharding_strategy=strategy)
            if is_hooked:
                model.register_comm_hook(comm, hook)
            with model.no_sync():
                model(batch(7, comm.rank)).sum().backward()
            train(model, adamw(model), comm.rank)
            ends.append(dict(model.state_dict()))
        assert equal(*ends)

    run_threads(2, body)


def test_a_hook_gets_the_whole_gradient_of_a_unit() -> None:
    def body(comm: Communicator) -> None:
        model = wrapped(comm)
        seen: list[tuple[int, int]] = []

        def hook(state: list[tuple[int, int]], gradient: Tensor, shard: Tensor) -> None:
            state.append((gradient.numel(), shard.numel()))
            mean(comm, gradient, shard)

        model.register_comm_hook(seen, hook)
        model(batch(0, comm.rank)).sum().backward()
        padded = 2 * (4 * 4 + 4 + 2 * 7)  # up.weight [7, 4], up.bias [7], down.weight [4, 7]
        assert sorted(seen)[1:] == [(padded, padded // 2)] * 2

    run_threads(2, body)


@pytest.mark.parametrize(("hook", "dtype"), [(bf16_compress_hook, torch.bfloat16), (fp16_compress_hook, torch.float16)])
def test_compressing_hooks_are_a_dtype_of_reduction(hook: Any, dtype: torch.dtype) -> None:
    """torch's own functions do not run on a CPU."""

    def body(comm: Communicator) -> None:
        ends = []
        for precision in (MixedPrecision(reduce_dtype=dtype), MixedPrecision(reduce_dtype=torch.float64)):
            model = wrapped(comm, mixed_precision=precision)
            if precision.reduce_dtype is torch.float64:
                model.register_comm_hook(None, hook)
            train(model, adamw(model), comm.rank)
            ends.append(dict(model.state_dict()))
        assert equal(*ends)

    run_threads(2, body)


def test_hooks_that_are_refused() -> None:
    def body(comm: Communicator) -> None:
        model = wrapped(comm)
        with pytest.raises(ConfigError, match="hook=5 is not callable"):
            model.register_comm_hook(None, 5)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match=r"register_comm_hook\(\) on a wrapper inside another"):
            model[1].register_comm_hook(comm, mean)
        model.register_comm_hook(comm, mean)
        with pytest.raises(ConfigError, match="has a hook already"):
            model.register_comm_hook(comm, mean)
        hybrid = Fsdp(build(), comm, ShardingStrategy.HYBRID_SHARD)
        with pytest.raises(UnsupportedArgument, match="HYBRID_SHARD adds along two axes"):
            hybrid.register_comm_hook(comm, mean)

    run_threads(2, body)


# ------------------------------------------------------------------ dtypes


def test_gradients_stay_in_the_dtype_of_computation() -> None:
    """And are added to in it where they are kept."""

    def body(comm: Communicator) -> None:
        dtypes = torch.bfloat16, torch.float32, torch.bfloat16
        kept, plain = (
            wrapped(comm, mixed_precision=MixedPrecision(*dtypes, keep_low_precision_grads=keep))
            for keep in (True, False)
        )
        for step in range(2):
            for model in (kept, plain):
                model(batch(step, comm.rank)).sum().backward()
            for low, full in zip(kept.parameters(), plain.parameters(), strict=True):
                assert low.grad is not None
                assert full.grad is not None
                assert (low.grad.dtype, full.grad.dtype, low.dtype) == (torch.bfloat16, torch.float32, torch.float32)
                if step == 0:
                    assert torch.equal(local_tensor(low.grad), local_tensor(full.grad).bfloat16())
                torch.testing.assert_close(
                    local_tensor(low.grad).float(), local_tensor(full.grad), rtol=1e-2, atol=1e-2
                )
        assert kept.clip_grad_norm_(1e-3) > 0

    run_threads(2, body)


# ------------------------------------------------------------------ order


class Recorder(TransportLayer):
    """Writes down gathers and reductions by the unit they are for; gathers with the number of units that are whole."""

    def __init__(self, inner: Transport, lines: list[str], groups: list[ShardGroup]) -> None:
        super().__init__(inner)
        self.lines = lines
        self.groups = groups

    def submit(self, op: CommOp) -> Work:
        verb, _, label = op.label.partition(" ")
        if verb == "gather":
            whole = sum(group.state is not ShardState.SHARDED for group in self.groups)
            self.lines.append(f"gather {label[0]} beside {whole}")
        elif verb == "reduce":
            self.lines.append(f"reduce {label[0]}")
        return self.inner.submit(op)

    def over(self, inner: Transport) -> Recorder:
        return Recorder(inner, self.lines, self.groups)


def recorded_step(comm: Communicator, **kwargs: Any) -> str:
    """The second step of a model whose units 1 and 2 are inside unit 0."""
    lines: list[str] = []
    groups: list[ShardGroup] = []
    model = wrapped(Communicator(Recorder(comm.transport, lines, groups)), **kwargs)
    for number in (1, 2):
        module = model[number].module
        module.register_forward_pre_hook(lambda *_, number=number: lines.append(f"forward {number}"))
        module.down.register_full_backward_hook(lambda *_, number=number: lines.append(f"backward {number}"))
    unit = unit_of(model._fsdp_wrapped_module)
    assert unit is not None
    context_of(unit).wholes.sharing = False
    groups += context_of(unit).groups
    for step in range(2):
        lines.clear()
        model(batch(step, comm.rank).requires_grad_()).sum().backward()
    return ", ".join(lines)


PRE, POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST
FORWARD = "gather 0 beside 0, gather 1 beside 1, gather 2 beside 2, forward 1, forward 2, "
BACKWARD = {
    PRE: "gather 2 beside 1, gather 1 beside 2, backward 2, reduce 2, backward 1, reduce 1, reduce 0",
    POST: "gather 2 beside 1, backward 2, gather 1 beside 1, reduce 2, backward 1, reduce 1, reduce 0",
    None: "gather 2 beside 1, backward 2, reduce 2, gather 1 beside 1, backward 1, reduce 1, reduce 0",
}


@pytest.mark.parametrize("when", [PRE, POST, None])
def test_backward_gathers_the_next_unit_when_asked_to(when: BackwardPrefetch | None) -> None:
    """Beside the computation of the one before, after it, or after its reduction has begun."""
    assert run_threads(2, recorded_step, backward_prefetch=when) == [FORWARD + BACKWARD[when]] * 2


@pytest.mark.parametrize("kwargs", [{"forward_prefetch": True}, {"limit_all_gathers": False}])
def test_forward_always_gathers_one_unit_ahead(kwargs: dict[str, bool]) -> None:
    assert run_threads(2, recorded_step, **kwargs) == [FORWARD + BACKWARD[PRE]] * 2
