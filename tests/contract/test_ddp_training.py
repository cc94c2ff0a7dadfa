"""Trained by torch's DistributedDataParallel and by ours, a model has the same weights, bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from ddp_sides import Cases, Side, scalar, seeded, snapshot, train
from torch import Tensor, nn

from shard_models import Tied, mlp

CASES = Cases(__name__)
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)


# ------------------------------------------------------------------ optimizers, sizes of buckets


@CASES.add(1, 2, 3, 4)
def sgd(side: Side) -> Any:
    return train(side, mlp)


@CASES.add(1, 2, 3, 4)
def adamw(side: Side) -> Any:
    # Adam divides by the root of a square: differences of one rounding grow
    return train(side, mlp, optimizer=ADAMW, steps=8)


@CASES.add(1, against="plain")
def one_rank_is_no_ddp(side: Side) -> Any:
    return [train(side, mlp, optimizer=ADAMW), train(side, conv, inputs=lambda step: side.batch(step, 4, 3, 6, 6))]


@CASES.add(2, 3, against="plain", tolerance=1e-6)
def the_mean_by_hand(side: Side) -> Any:
    return train(side, mlp)


@CASES.add(2, 4, tolerance={4: 1e-6})  # torch's first step has one bucket: another order of summation at four ranks
def small_buckets(side: Side) -> Any:
    return train(side, mlp, bucket_cap_mb=0.001)


@CASES.add(2, 4, tolerance={4: 1e-6})  # torch's first step counts the caps from the first parameter, ours from the last
def cap_per_bucket(side: Side) -> Any:
    return train(side, mlp, bucket_cap_mb_list=[0.0005, 0.001, 0.002])


@CASES.add(2)
def cap_of_nothing(side: Side) -> Any:
    return train(side, mlp, bucket_cap_mb=0)


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 600), nn.ReLU(), nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 3))


@CASES.add(2, tolerance={4: 1e-6})
def above_the_first_cap(side: Side) -> Any:
    return train(side, wide)


@CASES.add(2)
def accepted_flags(side: Side) -> Any:
    return [
        train(side, mlp, gradient_as_bucket_view=True),
        train(side, mlp, batched_grad_copy=True),
        train(side, mlp, static_graph=True),
        train(side, mlp, find_unused_parameters=True),
        train(side, mlp, forward_sync_buffers=False),
        train(side, mlp, skip_all_reduce_unused_params=True),
        train(side, mlp, init_sync=False),
    ]


@CASES.add(2)
def zero_grad_that_keeps_tensors(side: Side) -> Any:
    model = seeded(mlp)
    ddp = side.wrap(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        scalar(ddp(side.batch(step, 6, 8))).backward()
        optimizer.step()
    return snapshot(model)


# ------------------------------------------------------------------ kinds of parameters


def conv() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 5, 3),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Conv2d(5, 4, 3),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(16, 2),
    )


@CASES.add(1, 2, 3, 4)
def batch_norm(side: Side) -> Any:
    return train(side, conv, inputs=lambda step: side.batch(step, 4, 3, 6, 6))


@CASES.add(2)
def channels_last(side: Side) -> Any:
    def make() -> nn.Module:
        return conv().to(memory_format=torch.channels_last)

    def inputs(step: int) -> Tensor:
        return side.batch(step, 4, 3, 6, 6).to(memory_format=torch.channels_last)

    strides = [parameter.stride() for parameter in make().parameters()]
    return [strides, train(side, make, inputs=inputs), train(side, make, inputs=inputs, gradient_as_bucket_view=True)]


class Transposed(nn.Module):
    """Parameters whose memory is not in the order of their dimensions, or has gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(5, 8).t())
        self.gaps = nn.Parameter(torch.randn(5, 6)[:, ::2])
        self.expanded_bias = nn.Parameter(torch.randn(1))
        self.scalar = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.turned @ self.gaps).tanh() + self.expanded_bias) * self.scalar


@CASES.add(2)
def non_contiguous(side: Side) -> Any:
    return train(side, Transposed)


@CASES.add(2, 4)
def tied_weights(side: Side) -> Any:
    return train(side, Tied, inputs=lambda step: side.tokens(step, 11, 6, 4), optimizer=ADAMW)


def half_frozen() -> nn.Sequential:
    model = mlp()
    model[2].requires_grad_(False)
    model[0].bias.requires_grad_(False)
    return model


@CASES.add(2)
def frozen_parameters(side: Side) -> Any:
    return train(side, half_frozen)


class MixedDtypes(nn.Module):
    """Layers of several dtypes in turns, so that their gradients become ready in turns."""

    def __init__(self, dtypes: tuple[torch.dtype, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=dtype) for dtype in dtypes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x.double()


@CASES.add(2, 4)
def mixed_dtypes(side: Side) -> Any:
    return train(side, lambda: MixedDtypes((torch.float32, torch.float64, torch.float32, torch.float64, torch.float64)))


@CASES.add(2)
def mixed_dtypes_in_small_buckets(side: Side) -> Any:
    dtypes = (torch.float32, torch.float64, torch.float32, torch.float64, torch.float64)
    return train(side, lambda: MixedDtypes(dtypes), bucket_cap_mb=0.0003)


@CASES.add(2)
def half_precision(side: Side) -> Any:
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.bfloat16, torch.float16)
    return [
        train(side, lambda: MixedDtypes(dtypes)),
        train(side, lambda: mlp().to(torch.bfloat16), inputs=lambda step: side.batch(step, 6, 8, dtype=torch.bfloat16)),
        train(side, lambda: mlp().to(torch.float16), inputs=lambda step: side.batch(step, 6, 8, dtype=torch.float16)),
    ]


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(8, 5, dtype=torch.complex64))
        self.second = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64).t())
        self.real = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.complex64) @ self.first @ self.second * self.real


@CASES.add(2, 3)
def complex_parameters(side: Side) -> Any:
    return train(side, Complex, optimizer=functools.partial(torch.optim.SGD, lr=1e-4))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 7, num_layers=2)
        self.out = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, state = self.lstm(x)
        return self.out(y), state


@CASES.add(2)
def lstm(side: Side) -> Any:
    return train(
        side, Lstm, inputs=lambda step: side.batch(step, 3, 4, 8), loss_of=lambda out: scalar([out[0], *out[1]])
    )


class EmptyParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.nothing, self.layer(x)])


@CASES.add(2)
def parameter_without_elements(side: Side) -> Any:
    return train(side, EmptyParameter)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.other = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.other(self.layer(x)) + self.layer(x).tanh())


@CASES.add(2, 4)
def parameter_used_several_times(side: Side) -> Any:
    return train(side, Twice)


# ------------------------------------------------------------------ sparse gradients


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8, sparse=True)
        self.bag = nn.EmbeddingBag(13, 8, sparse=True, mode="sum")
        self.out = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.embed(tokens).sum(1) + self.bag(tokens)).tanh()


SPARSE_SGD = functools.partial(torch.optim.SGD, lr=0.1)


@CASES.add(2, 3, 4, tolerance={4: 1e-6})  # torch adds the ranks' rows in a ring, ours in order of rank
def sparse_embeddings(side: Side) -> Any:
    return train(side, Sparse, inputs=lambda step: side.tokens(step, 13, 5, 4), optimizer=SPARSE_SGD)


@CASES.add(1, against="plain")
def sparse_embeddings_on_one_rank(side: Side) -> Any:
    return train(side, Sparse, inputs=lambda step: side.tokens(step, 13, 5, 4), optimizer=SPARSE_SGD)


@CASES.add(2, tolerance=1e-6)
def sparse_embeddings_accumulated(side: Side) -> Any:
    model = seeded(Sparse)
    ddp = side.wrap(model)
    optimizer = SPARSE_SGD(model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        with ddp.no_sync():
            scalar(ddp(side.tokens(100 + step, 13, 5, 4))).backward()
        scalar(ddp(side.tokens(step, 13, 5, 4))).backward()
        optimizer.step()
    return snapshot(model)


# ------------------------------------------------------------------ several models, other contexts


@CASES.add(2, 4)
def two_models_in_turns(side: Side) -> Any:
    generator, critic = seeded(lambda: nn.Linear(4, 8)), seeded(mlp, 1)
    ddp_generator, ddp_critic = side.wrap(generator), side.wrap(critic)
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in (generator, critic)]
    for step in range(5):
        fake = ddp_generator(side.batch(step, 6, 4))
        optimizers[1].zero_grad()
        (scalar(ddp_critic(fake.detach())) - scalar(ddp_critic(side.batch(50 + step, 6, 8)))).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        scalar(ddp_critic(fake)).backward()  # gradients of both: the critic's are thrown away in the next step
        optimizers[0].step()
    return [snapshot(generator), snapshot(critic)]


@CASES.add(2)
def forwards_without_gradient_between_steps(side: Side) -> Any:
    model = seeded(conv)
    ddp = side.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(5):
        ddp.train()
        optimizer.zero_grad()
        scalar(ddp(side.batch(step, 4, 3, 6, 6))).backward()
        optimizer.step()
        with torch.no_grad():
            ddp(side.batch(60 + step, 4, 3, 6, 6))  # moves the running means of this rank
        ddp.eval()
        with torch.no_grad():
            seen.append(ddp(side.batch(70 + step, 4, 3, 6, 6)))
        with torch.inference_mode():
            seen.append(ddp(side.batch(80 + step, 4, 3, 6, 6)).clone())
    return [snapshot(model), [s.clone() for s in seen]]


@CASES.add(2)
def autocast(side: Side) -> Any:
    model = seeded(mlp)
    ddp = side.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = ddp(side.batch(step, 6, 8)).float().pow(2).mean()
        loss.backward()
        optimizer.step()
    return snapshot(model)


@pytest.mark.parametrize(("name", "world_size"), CASES.parameters())
def test_equals_torch(name: str, world_size: int) -> None:
    CASES.check(name, world_size)
