"""Small models with the shapes that are hard to cut."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def mlp() -> nn.Sequential:
    """Sizes that no world size divides, and dimensions smaller than four ranks."""
    return nn.Sequential(nn.Linear(8, 33), nn.ReLU(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 3))


MLP_UNITS = ("0", "2", "4")


def large() -> nn.Sequential:
    """Weights of several hundred KiB, which two and four ranks can share equally, and which only one can."""
    return nn.Sequential(nn.Linear(8, 260), nn.ReLU(), nn.Linear(260, 264), nn.Tanh(), nn.Linear(264, 263))


class Tiny(nn.Module):
    """Parameters of one element and of one row, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.row = nn.Parameter(torch.randn(1, 8))
        self.narrow = nn.Linear(8, 1)
        self.wide = nn.Linear(1, 5)
        self.fixed = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.narrow(x * self.row).tanh()) * self.scale + self.fixed.sum()


class Empty(nn.Module):
    """A parameter without elements beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.linear = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.nothing.sum()


def conv() -> nn.Sequential:
    """Buffers that are not parameters, and kernels of four dimensions.

    No bias before a mean is taken away: its gradient would be nothing but rounding.
    """
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, bias=False),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Conv2d(5, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(16, 2),
    )


class Adapted(nn.Module):
    """A frozen linear layer and a trained product of two thin matrices beside it."""

    def __init__(self, inside: int, outside: int, rank: int = 2) -> None:
        super().__init__()
        self.frozen = nn.Linear(inside, outside).requires_grad_(False)
        self.A = nn.Parameter(torch.randn(rank, inside) / inside)
        self.B = nn.Parameter(torch.randn(outside, rank) / rank)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + x @ self.A.t() @ self.B.t()


def adapted() -> nn.Sequential:
    return nn.Sequential(Adapted(8, 13), nn.Tanh(), Adapted(13, 5), nn.Tanh(), nn.Linear(5, 4).requires_grad_(False))


class Block(nn.Module):
    """Units inside a unit."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size))
        self.up = nn.Linear(size, 3 * size)
        self.down = nn.Linear(3 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x * self.gain).tanh())


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block(8)
        self.second = Block(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))


NESTED_UNITS = ("first.up", "first.down", "first", "second.up", "second")


class Tied(nn.Module):
    """One weight that is the first and the last of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mix(self.embed(tokens)).tanh())


class InPlace(nn.Module):
    """Outputs of units are changed in place, used twice, cut into views, and handed through."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = Several()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y += 1
        y.relu_()
        left, right, whole, given, same = self.second(y)
        whole = whole * 2
        whole += y
        return self.head(left * right) + whole.sum() + given.mean() + same.mean()


class Several(nn.Module):
    """One layer that is used, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.used(x)
        return (*y.tanh().chunk(2, 1), y, x, x)


class Apart(nn.Module):
    """A head that the caller runs by itself, in the same unit as a layer that forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.body(x))


class Cut(nn.Module):
    """Units that no gradient reaches: one behind a detach, one that runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.detached = nn.Linear(8, 8)
        self.silent = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.detached(x).detach()
        with torch.no_grad():
            y = self.silent(y)
        return self.head(y)


class Twice(nn.Module):
    """The same unit twice in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.shared = nn.Linear(8, 8)
        self.leave = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.shared(self.shared(self.enter(x)).tanh()))


class Branches(nn.Module):
    """Units of which a forward uses one, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 8)
        self.leave = nn.Linear(8, 3)

    def forward(self, x: Tensor, use: str) -> Tensor:
        x = self.enter(x).tanh()
        x = self.left(x) if use == "left" else self.right(x) if use == "right" else x
        return self.leave(x)


# Ranks that are threads share one generator: a checkpoint that sets it back would disturb who is making a model.
again = functools.partial(checkpoint, preserve_rng_state=False)


class Checkpointed(nn.Module):
    """Blocks whose activations are computed again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.enter = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Block(8) for _ in range(2)])
        self.leave = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = again(block, x, use_reentrant=self.reentrant)
        return self.leave(x)


class CheckpointedInside(nn.Module):
    """A unit that computes a part of itself again."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.enter = nn.Linear(8, 8)
        self.block = Block(8)
        self.leave = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(again(self.block, self.enter(x), use_reentrant=self.reentrant))


@dataclass
class Pair:
    left: Tensor
    right: Tensor
    name: str = "pair"


class Outputs(nn.Module):
    """What comes in nested comes out nested: a tuple, a dict, or a dataclass."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.left = nn.Linear(8, 3)
        self.right = nn.Linear(8, 5)

    def forward(self, inputs: dict[str, Any]) -> Any:
        x = inputs["x"][0]
        left, right = self.left(x), self.right(x)
        kinds = {"tuple": (left, [right, None, 3]), "dict": {"a": left, "b": {"c": right}}, "pair": Pair(left, right)}
        return kinds[self.kind]


class Holder(nn.Module):
    """A unit whose output is not a tensor, inside a root."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.inner = Outputs(kind)

    def forward(self, x: Tensor) -> Any:
        return self.inner({"x": [self.enter(x)], "flag": True})


# ------------------------------------------------------------------ language models


def gpt2(dropout: float = 0.0) -> nn.Module:
    """The head's weight is the embedding's."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=61,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    return GPT2LMHeadModel(config)


GPT2_UNITS = ("transformer.h.0", "transformer.h.1")


def llama(tied: bool) -> nn.Module:
    """Fewer heads for keys and values than for queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


LLAMA_UNITS = ("model.layers.0", "model.layers.1")
