"""Real language models, trained by both and by one process on the whole batch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from fsdp2_sides import Cases
from torch import nn

from shard_models import GPT2_UNITS, LLAMA_UNITS, MLP_UNITS, conv, gpt2, llama, mlp
from shard_sides import Side, seeded, train

CASES = Cases(__name__)
# Some gradients of these models are zero but for roundings (a key's bias): Adam must not divide them by themselves.
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)


def language_model(side: Side, model: nn.Module, units: tuple[str, ...], steps: int, **kwargs: Any) -> Any:
    side.shard_units(model, units, **kwargs)
    optimizer = ADAMW(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        tokens = side.tokens(step, 61, 2, 12)
        side.backward(model(input_ids=tokens, labels=tokens, use_cache=False).loss, model)
        optimizer.step()
    return side.snapshot(model)


@CASES.add(2, against=("torch", "plain", "one"))
def gpt2_for_twenty_steps(side: Side) -> Any:
    return language_model(side, seeded(gpt2), GPT2_UNITS, 20)


@CASES.add(1, 3, 4, against=("plain", "one"))
def gpt2_on_other_worlds(side: Side) -> Any:
    return gpt2_for_twenty_steps(side)


@CASES.add(2, against=("torch", "plain", "one"))
def llama_for_twenty_steps(side: Side) -> Any:
    return language_model(side, seeded(lambda: llama(tied=False)), (*LLAMA_UNITS, "model.embed_tokens", "lm_head"), 20)


@CASES.add(2)
def llama_with_tied_weights(side: Side) -> Any:
    return language_model(side, seeded(lambda: llama(tied=True)), LLAMA_UNITS, 3, reshard_after_forward=True)


@CASES.add(2)
def gpt2_with_checkpoints(side: Side) -> Any:
    found = []
    for reentrant in (True, False):
        model = seeded(gpt2)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        model.train()
        found.append(language_model(side, model, GPT2_UNITS, 3))
    return found


@CASES.add(2)
def gpt2_with_dropout(side: Side) -> Any:
    """As tuples; what dropout draws is not disturbed."""
    model = seeded(lambda: gpt2(0.1))
    side.shard_units(model, GPT2_UNITS)
    torch.manual_seed(7 + side.rank)
    for step in range(3):
        tokens = side.tokens(step, 61, 2, 12)
        loss, *_ = model(tokens, labels=tokens, return_dict=False)
        side.backward(loss, model)
    return side.snapshot(model)


@CASES.add(2)
def gpt2_in_every_way_at_once(side: Side) -> Any:
    """Accumulation, clipping by torch's own function, evaluation."""
    model = seeded(gpt2)
    side.shard_units(model, ("transformer.h.0.mlp", *GPT2_UNITS))
    optimizer = ADAMW(model.parameters())
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        with side.no_sync(model):
            tokens = side.tokens(50 + step, 61, 2, 12)
            side.backward(model(input_ids=tokens, labels=tokens).loss, model)
        tokens = side.tokens(step, 61, 2, 12)
        side.backward(model(input_ids=tokens, labels=tokens).loss, model)
        optimizer.step()
        model.eval()
        with torch.no_grad():
            seen.append(model(torch.arange(5)[None]).logits.clone())
        model.train()
    return [seen, side.snapshot(model)]


@CASES.add(2, 4)
def batch_norm(side: Side) -> Any:
    return train(side, conv, ("0", "3"), inputs=lambda step: side.batch(step, 4, 3, 6, 6))


@CASES.add(2)
def channels_last(side: Side) -> Any:
    def inputs(step: int) -> torch.Tensor:
        return side.batch(step, 4, 3, 6, 6).to(memory_format=torch.channels_last)

    return train(side, conv, ("0", "3"), inputs=inputs)


@CASES.add(2)
def a_module_that_counts(side: Side) -> Any:
    """A unit that changes itself in forward: a buffer in place, and a plain attribute."""

    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 3)
            self.register_buffer("calls", torch.zeros(1))
            self.seen = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.seen += 1
            return super().forward(x) + self.calls

    model = seeded(lambda: nn.Sequential(nn.Linear(8, 8), Counting()))
    side.shard_units(model, ("0", "1"))
    for step in range(2):
        side.backward(model(side.batch(step, 6, 8)).square().mean(), model)
    return [model[1].seen, side.snapshot(model)]


@CASES.add(2)
def other_optimizers(side: Side) -> Any:
    makers = (
        functools.partial(torch.optim.AdamW, lr=1e-2, foreach=False),
        functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True, amsgrad=True),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        functools.partial(torch.optim.RMSprop, lr=1e-2),
        functools.partial(torch.optim.Adagrad, lr=1e-2),
        functools.partial(torch.optim.Adamax, lr=1e-2),
    )
    return [train(side, mlp, MLP_UNITS, steps=2, optimizer=make) for make in makers]


@pytest.mark.parametrize(("name", "world_size"), CASES.parameters())
def test_equals_torch_and_the_truth(name: str, world_size: int) -> None:
    CASES.check(name, world_size)
