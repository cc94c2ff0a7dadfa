"""Communication hooks written for torch's class, torch's own among them, do the same under ours."""

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ddp_sides import Cases, Side, gradients, scalar, seeded, snapshot
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # these modules of torch use its own deprecated functions
    from torch.distributed.algorithms.ddp_comm_hooks import (
        DDPCommHookType,
        debugging_hooks,
        default_hooks,
        post_localSGD_hook,
        powerSGD_hook,
        register_ddp_comm_hook,
    )
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer, _apply_optimizer_in_backward

CASES = Cases(__name__)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 3))


def train(
    side: Side,
    register: Callable[[Any], Any],
    *,
    make: Callable[[], nn.Module] = mlp,
    steps: int = 6,
    inputs: Callable[[int], Tensor] | None = None,
    **kwargs: Any,
) -> Any:
    model = seeded(make)
    ddp = side.wrap(model, **kwargs)
    register(ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        scalar(ddp(side.batch(step, 6, 8) if inputs is None else inputs(step))).backward()
        optimizer.step()
    return snapshot(model)


def hook(hook: Callable[..., Any], state: Any = None) -> Callable[[Any], None]:
    return lambda ddp: ddp.register_comm_hook(state, hook)


# ------------------------------------------------------------------ torch's hooks


@CASES.add(2, 4, tolerance={4: 1e-5})
def default_hooks_of_torch(side: Side) -> Any:
    return [
        train(side, hook(default_hooks.allreduce_hook)),
        train(side, hook(default_hooks.allreduce_hook, dist.group.WORLD), bucket_cap_mb=0.001),
        train(side, hook(default_hooks.fp16_compress_hook)),
        train(side, hook(default_hooks.fp16_compress_hook), gradient_as_bucket_view=True),
        train(side, hook(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))),
        train(side, hook(debugging_hooks.noop_hook)),
    ]


def power(approximation: Callable[..., Any], **options: Any) -> Callable[[Any], None]:
    def register(ddp: Any) -> None:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3, **options)
        ddp.register_comm_hook(state, approximation)

    return register


@CASES.add(2)
def power_sgd(side: Side) -> Any:
    """Its collectives follow each other in callbacks of futures. (Torch's batched variant fails by itself.)"""
    compressed = default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    return [
        train(side, power(powerSGD_hook.powerSGD_hook), steps=8),
        train(side, power(powerSGD_hook.powerSGD_hook, use_error_feedback=False, warm_start=False)),
        train(side, power(compressed, batch_tensors_with_same_shape=True)),
    ]


@CASES.add(2)
def by_their_enum(side: Side) -> Any:
    chosen = (DDPCommHookType.ALLREDUCE, DDPCommHookType.FP16_COMPRESS, DDPCommHookType.NOOP)
    return [train(side, lambda ddp, k=kind: register_ddp_comm_hook(k, ddp, None)) for kind in chosen]


@CASES.add(2)
def post_local_sgd(side: Side) -> Any:
    model = seeded(mlp)
    ddp = side.wrap(model)
    state = post_localSGD_hook.PostLocalSGDState(None, dist.group.WORLD, 3)
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=3)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), averager)
    for step in range(8):
        optimizer.zero_grad()
        scalar(ddp(side.batch(step, 6, 8))).backward()
        optimizer.step()
    return snapshot(model)


@CASES.add(2)
def builtin_hooks(side: Side) -> Any:
    kinds = dist.BuiltinCommHookType
    return [
        train(side, lambda ddp: ddp._register_builtin_comm_hook(kinds.ALLREDUCE)),
        train(side, lambda ddp: ddp._register_builtin_comm_hook(kinds.FP16_COMPRESS)),
        train(side, lambda ddp: ddp._register_builtin_comm_hook(kinds.ALLREDUCE), bucket_cap_mb=0.001),
    ]


@CASES.add(2)
def zero_redundancy(side: Side) -> Any:
    model = seeded(mlp)
    ddp = side.wrap(model)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    for step in range(5):
        optimizer.zero_grad()
        scalar(ddp(side.batch(step, 6, 8))).backward()
        optimizer.step()
    return snapshot(model)


# ------------------------------------------------------------------ optimizers inside backward


@CASES.add(2)
def fused_optimizer(side: Side) -> Any:
    found = []
    for optimizer, options in ((torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.AdamW, {"lr": 0.01})):
        model = seeded(mlp)
        ddp = side.wrap(model)
        ddp._register_fused_optim(optimizer, **options)
        for step in range(5):
            scalar(ddp(side.batch(step, 6, 8))).backward()
            ddp.zero_grad()
        found.append(snapshot(model))
    return found


@CASES.add(2)
def fused_optimizer_of_some_parameters(side: Side) -> Any:
    model = seeded(mlp)
    ddp = side.wrap(model)
    ddp._register_fused_optim(torch.optim.SGD, lr=0.1, optim_params=list(model[0].parameters()))
    rest = torch.optim.SGD(model[2:].parameters(), lr=0.2)
    for step in range(5):
        scalar(ddp(side.batch(step, 6, 8))).backward()
        rest.step()
        ddp.zero_grad()
    return snapshot(model)


@CASES.add(2)
def optimizer_applied_in_backward(side: Side) -> Any:
    """Torch's hook asks for streams of an accelerator, also where there is none: here it gets idle ones."""
    found = []
    idle = functools.partial(torch.Stream, device="cpu")  # a CUDA build without a driver has no other
    with (
        mock.patch.object(torch, "Stream", idle),
        mock.patch.object(torch.accelerator, "current_stream", mock.MagicMock()),
    ):
        for views in (False, True):
            model = seeded(mlp)
            _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
            ddp = side.wrap(model, gradient_as_bucket_view=views, bucket_cap_mb=0.001)
            for step in range(5):
                scalar(ddp(side.batch(step, 6, 8))).backward()
            found.append(snapshot(model))
    return found


# ------------------------------------------------------------------ hooks of users


def reduce(bucket: Any) -> Any:
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


@CASES.add(2)
def what_a_bucket_says(side: Side) -> Any:
    seen: list[Any] = []

    def watch(state: str, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.gradients()
        parameters = bucket.parameters()
        seen.append(
            (
                state,
                bucket.index(),
                bucket.is_last(),
                bucket.buffer().clone(),
                [gradient.clone() for gradient in gradients],
                [(list(parameter.shape), parameter.detach().clone()) for parameter in parameters],
                bucket.buffer().data_ptr() == gradients[0].data_ptr(),
            )
        )
        return reduce(bucket)

    def in_order_of_index() -> Any:
        """The first step apart: torch has one bucket there, we have the final number of them."""
        steps = [list(part) for _, part in itertools.groupby(seen, key=lambda one: one[1] == 0)]
        return [len(steps) > 1, seen[-4:]]

    state = train(side, hook(watch, "mine"), bucket_cap_mb=0.001)
    return [in_order_of_index(), state]


@CASES.add(2)
def buffers_replaced(side: Side) -> Any:
    """A future with another tensor, a list with one, set_buffer, and results of another dtype."""

    def other(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        copy = bucket.buffer().clone().div_(2)
        return dist.all_reduce(copy, async_op=True).get_future().then(lambda future: future.value()[0] * 3)

    def replaced(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        bucket.set_buffer(torch.ones_like(bucket.buffer()))
        return reduce(bucket)

    def unannotated(state, bucket):  # noqa: ANN001, ANN202 - the point of it
        future = torch.futures.Future()
        dist.all_reduce(bucket.buffer())
        future.set_result(bucket.buffer())
        return future

    class Callable:
        def __init__(self) -> None:
            self.__name__ = self.__qualname__ = "an object"  # torch reads both

        def __call__(self, state, bucket):  # noqa: ANN001, ANN204 - torch refuses any other annotation
            return reduce(bucket)

    return [train(side, hook(one)) for one in (other, replaced, unannotated, Callable())]


@CASES.add(2)
def sparse_buckets(side: Side) -> Any:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 4, sparse=True)
            self.out = nn.Linear(4, 2)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.out(self.table(tokens).sum(1)).tanh()

    seen: list[Any] = []

    def watch(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        seen.append((buffer.is_sparse, list(buffer.shape), len(bucket.parameters())))
        work = dist.all_reduce(buffer, async_op=True)

        def finish(future: Any) -> Tensor:
            return future.value()[0] / dist.get_world_size()

        return work.get_future().then(finish)

    def plain(ddp: Any) -> None:
        pass

    inputs = lambda step: side.tokens(step, 7, 3, 2)  # noqa: E731 - an argument
    states = [train(side, register, make=Tables, inputs=inputs) for register in (hook(watch), plain)]
    return [sorted(seen[-2:]), states]


@CASES.add(2)
def hook_and_accumulation(side: Side) -> Any:
    model = seeded(mlp)
    ddp = side.wrap(model)
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    for step in range(3):
        model.zero_grad()
        with ddp.no_sync():
            scalar(ddp(side.batch(step, 6, 8))).backward()
        scalar(ddp(side.batch(10 + step, 6, 8))).backward()
    return gradients(model)


@CASES.add(2, against="plain", tolerance=1e-2)
def hook_and_unused_parameters(side: Side) -> Any:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor, use: list[int]) -> Tensor:
            for index in use:
                x = self.layers[index](x).tanh()
            return x

    model = seeded(Half)
    ddp = side.wrap(model, bucket_cap_mb=0.0003)
    if side.is_ours:
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    for step in range(4):
        model.zero_grad()
        scalar(ddp(side.batch(step, 6, 8), [0, 1] if side.rank == step % 2 else [0, 3])).backward()
        side.end_backward(model)
    return gradients(model)


# ------------------------------------------------------------------ hooks that are refused


def refused(register: Callable[[Any], Any], ddp: Any) -> list[str]:
    found = answer(register, ddp)
    assert len(found) == 2, f"{register} was taken"
    return found


def answer(register: Callable[[Any], Any], ddp: Any) -> list[str]:
    """The kind of error and how its text begins; ["taken"] where there is none."""
    try:
        register(ddp)
    except Exception as error:  # noqa: BLE001 - which one it is, is the answer
        mro = [kind.__name__ for kind in type(error).__mro__]
        kind = next(name for name in mro if name in ("TypeError", "ValueError", "RuntimeError", "AssertionError"))
        return [kind, str(error)[:30]]
    return ["taken"]


@CASES.add(2)
def refusals(side: Side) -> Any:
    def wrong_bucket(state: object, bucket: int) -> torch.futures.Future[torch.Tensor]: ...

    def wrong_return(state: object, bucket: dist.GradBucket) -> int: ...

    found = []
    for bad in (1, None, "text", wrong_bucket, wrong_return):
        found.append(refused(hook(bad), side.wrap(seeded(mlp))))
    wrapped = default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)
    for halved in (default_hooks.bf16_compress_hook, wrapped):  # taken by a build of torch with a NCCL that adds them
        found.append(answer(hook(halved), side.wrap(seeded(mlp))))
    ddp = side.wrap(seeded(mlp))
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    found.append(refused(hook(default_hooks.allreduce_hook), ddp))
    found.append(refused(lambda d: d._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE), ddp))
    builtin = side.wrap(seeded(mlp))
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    found.append(refused(lambda d: d._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE), builtin))
    found.append(refused(hook(default_hooks.allreduce_hook), builtin))
    found.append(refused(lambda d: d._register_buffer_comm_hook(None, 1), side.wrap(seeded(mlp))))
    return [line[0] for line in found]


@CASES.add(2)
def annotations_as_text(side: Side) -> Any:
    """With `from __future__ import annotations` they are text, and torch refuses them."""

    def texts(state, bucket: "dist.GradBucket"):  # noqa: ANN001, ANN202 - the point of it
        return reduce(bucket)

    texts.__annotations__ = {"bucket": "dist.GradBucket"}
    return refused(hook(texts), side.wrap(seeded(mlp)))[0]


@CASES.add(2, against="plain")
def a_hook_that_raises(side: Side) -> Any:
    """On every rank at the same step: the error comes out of backward, and the next step is right."""
    model = seeded(mlp)
    ddp = side.wrap(model)
    calls = itertools.count()

    def sometimes(state, bucket):  # noqa: ANN001, ANN202 - torch refuses any other annotation
        if next(calls) == 1:
            raise ZeroDivisionError("from the hook")
        return reduce(bucket)

    if side.is_ours:
        ddp.register_comm_hook(None, sometimes)
    for step in range(4):
        model.zero_grad()
        loss = scalar(ddp(side.batch(step, 6, 8)))
        if side.is_ours and step == 1:
            with pytest.raises(ZeroDivisionError, match="from the hook"):
                loss.backward()
            assert all(param.grad is None for param in model.parameters())
        else:
            loss.backward()
            side.end_backward(model)
    return gradients(model)


# ------------------------------------------------------------------ buffers


@CASES.add(2)
def buffer_hooks(side: Side) -> Any:
    from torch.nn.parallel.distributed import _BufferCommHookLocation as Location

    found = []
    # a hook that leaves work in flight before the forward would race with it
    for location, asynchronous in (
        (Location.PRE_FORWARD, False),
        (Location.POST_FORWARD, False),
        (Location.POST_FORWARD, True),
    ):
        seen: list[list[str]] = []

        def average(ddp: Any, buffers: dict[str, Tensor], seen: Any = seen, asynchronous: bool = asynchronous) -> Any:
            seen.append(list(buffers))
            running = [buffer for buffer in buffers.values() if buffer.is_floating_point()]
            futures = [dist.all_reduce(buffer, async_op=True).get_future() for buffer in running]
            if asynchronous:
                return futures
            torch.futures.wait_all(futures)
            return None

        model = seeded(lambda: nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5)))
        ddp = side.wrap(model)
        ddp._register_buffer_comm_hook(ddp, average, location)
        for step in range(4):
            scalar(ddp(side.batch(step, 6, 8))).backward()
        found.append([seen, snapshot(model)])
    return found


@CASES.add(2)
def buffers_not_synchronised(side: Side) -> Any:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5))

    nothing = functools.partial(train, side, lambda ddp: None, make=make)
    return [nothing(forward_sync_buffers=False), nothing(forward_sync_buffers=True), nothing(broadcast_buffers=False)]


@pytest.mark.parametrize(("name", "world_size"), CASES.parameters())
def test_equals_torch_or_the_truth(name: str, world_size: int) -> None:
    CASES.check(name, world_size)
