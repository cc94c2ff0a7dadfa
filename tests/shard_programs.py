"""Training programs that hold on every side and with ranks of any kind: processes and threads."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import torch
from torch import nn

from shard_accumulation import (
    a_head_in_chunks,
    a_unit_that_nobody_uses,
    a_unit_twice_in_one_forward,
    accumulation_in_shards,
    accumulation_of_both_kinds,
    accumulation_of_different_units,
    accumulation_without_reduction,
    backward_through_part_of_the_outputs,
    backward_twice_through_one_graph,
    two_forwards_one_backward,
    two_forwards_two_backwards,
    zero_grad_that_keeps_tensors,
)
from shard_models import (
    MLP_UNITS,
    NESTED_UNITS,
    Checkpointed,
    CheckpointedInside,
    Cut,
    Empty,
    Holder,
    InPlace,
    Nested,
    Tied,
    Tiny,
    adapted,
    conv,
    large,
    mlp,
)
from shard_sides import ADAMW, SGD, Side, scalar, seeded, train


def adamw_for_twenty_steps(side: Side) -> Any:
    return train(side, mlp, MLP_UNITS, steps=20)


def nested_units_for_twenty_steps(side: Side) -> Any:
    return train(side, Nested, NESTED_UNITS, steps=20, optimizer=ADAMW)


def one_unit(side: Side) -> Any:
    return train(side, mlp, optimizer=SGD)


def large_parameters(side: Side) -> Any:
    return train(side, large, MLP_UNITS, steps=2)


def parameters_of_one_element(side: Side) -> Any:
    return [train(side, Tiny), train(side, Tiny, ("narrow", "wide"))]


def a_parameter_without_elements(side: Side) -> Any:
    return train(side, Empty)


def frozen_parameters(side: Side) -> Any:
    def make() -> nn.Module:
        model = mlp()
        model[0].requires_grad_(False)  # a unit of its own
        model[2].bias.requires_grad_(False)
        return model

    return train(side, make, MLP_UNITS)


def adapters_beside_frozen_layers(side: Side) -> Any:
    return [train(side, adapted, ("0", "2", "4")), train(side, adapted, ("0.frozen", "0", "2"))]


def tied_weights(side: Side) -> Any:
    """The root holds the shared weight, and one unit the layer between its uses."""
    return train(side, Tied, ("mix",), inputs=lambda step: side.tokens(step, 11, 6, 4))


def units_of_several_modules(side: Side) -> Any:
    model = seeded(mlp)
    side.shard([model[0], model[2]])
    side.shard(model)
    optimizer = ADAMW(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        side.backward(scalar(model(side.batch(step, 6, 8))), model)
        optimizer.step()
    return side.snapshot(model)


def reshard_after_forward(side: Side) -> Any:
    return [train(side, Nested, NESTED_UNITS, reshard_after_forward=choice) for choice in (True, False, None)]


def checkpointed_units(side: Side) -> Any:
    found = []
    for reentrant in (False, True):
        found.append(train(side, lambda r=reentrant: Checkpointed(r), ("blocks.0", "blocks.1")))
        found.append(train(side, lambda r=reentrant: Checkpointed(r), ("blocks.0.up", "blocks.0", "blocks.1")))
    return found


def checkpoints_inside_a_unit(side: Side) -> Any:
    found = []
    for reentrant in (False, True):
        found.append(train(side, lambda r=reentrant: CheckpointedInside(r)))
        found.append(train(side, lambda r=reentrant: CheckpointedInside(r), ("block.up", "leave")))
    return found


def outputs_that_are_not_tensors(side: Side) -> Any:
    found = [train(side, lambda k=kind: Holder(k), ("inner",)) for kind in ("tuple", "dict", "pair")]
    found += [
        train(side, lambda k=kind: Holder(k), ("inner.left", "inner.right", "inner")) for kind in ("tuple", "dict")
    ]
    return found


def forward_without_gradients_between_steps(side: Side) -> Any:
    model = seeded(conv)
    side.shard_units(model, ("0", "3"))
    optimizer = ADAMW(model.parameters())
    seen = []
    for step in range(3):
        with torch.no_grad():
            model(side.batch(40 + step, 4, 3, 6, 6))
        model.eval()
        with torch.no_grad():
            seen.append(side.whole({"out": model(side.batch(50, 4, 3, 6, 6))}))
        model.train()
        optimizer.zero_grad()
        side.backward(scalar(model(side.batch(step, 4, 3, 6, 6))), model)
        optimizer.step()
    model.eval()
    with torch.inference_mode():
        seen.append({"out": model(side.batch(50, 4, 3, 6, 6)).clone()})
    model.train()
    side.backward(scalar(model(side.batch(9, 4, 3, 6, 6))), model)
    return [seen, side.snapshot(model)]


def inputs_that_require_gradients(side: Side) -> Any:
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    x = side.batch(0, 6, 8).requires_grad_()
    side.backward(scalar(model(x)), model)
    assert x.grad is not None
    return [x.grad, side.snapshot(model)]


def outputs_in_odd_ways(side: Side) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")  # torch's; ours needs none
        return train(side, InPlace, ("first", "second", "head"))


def units_that_no_gradient_reaches(side: Side) -> Any:
    return train(side, Cut, ("detached", "silent", "head"))


def optimizers_in_backward(side: Side) -> Any:
    """Each parameter is stepped as soon as its gradient is there, and the gradient given up.

    At the end the hooks are taken off: what they hold is a cycle through torch's C++, which no collector sees.
    """
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    optimizers = {param: SGD([param]) for param in model.parameters()}

    def step(param: Any) -> None:
        optimizers[param].step()
        param.grad = None

    hooked = list(model.parameters()) if side.shards else []
    handles = [param.register_post_accumulate_grad_hook(step) for param in hooked]
    for number in range(3):
        side.backward(scalar(model(side.batch(number, 6, 8))), model)
        if not side.shards:
            for param in model.parameters():
                step(param)
    for handle in handles:
        handle.remove()
    return side.snapshot(model)


def a_gradient_of_a_gradient(side: Side) -> Any:
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    for step in range(2):
        x = side.batch(step, 6, 8).requires_grad_()
        (slope,) = torch.autograd.grad(scalar(model(x)), [x], create_graph=True)
        side.backward(slope.square().sum(), model)
    return side.snapshot(model)


def inference_before_training(side: Side) -> Any:
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    with torch.inference_mode():
        seen = model(torch.ones(2, 8)).clone()
    side.backward(scalar(model(side.batch(0, 6, 8))), model)
    return [seen.tolist(), side.snapshot(model)]


def a_model_is_freed(side: Side) -> Any:
    """With its parameters, once nobody holds it, trained or not."""
    alive = []
    for trains in (False, True):
        model = seeded(mlp)
        side.shard_units(model, MLP_UNITS)
        if trains:
            side.backward(scalar(model(side.batch(0, 6, 8))), model)
        watched = [weakref.ref(thing) for thing in (model, model[0], model[0].weight)]
        del model
        gc.collect()
        alive.append([one() is not None for one in watched])
    return alive


EVERYWHERE = (adamw_for_twenty_steps, nested_units_for_twenty_steps)
AGAINST_ONE_PROCESS = (
    one_unit,
    parameters_of_one_element,
    frozen_parameters,
    adapters_beside_frozen_layers,
    tied_weights,
    units_of_several_modules,
    reshard_after_forward,
    checkpointed_units,
    checkpoints_inside_a_unit,
    outputs_that_are_not_tensors,
    two_forwards_two_backwards,
    backward_through_part_of_the_outputs,
    a_unit_that_nobody_uses,
    accumulation_in_shards,
    accumulation_without_reduction,
    accumulation_of_both_kinds,
    accumulation_of_different_units,
    zero_grad_that_keeps_tensors,
    units_that_no_gradient_reaches,
    optimizers_in_backward,
)
# Its copy of gradients takes no empty tensor, its buffers that were made for inference cannot be trained with, and what
# it frees in the first of two backwards is gone in the second.
REFUSED_BY_TORCH = (a_parameter_without_elements, inference_before_training, a_gradient_of_a_gradient)
# A unit that runs twice is reduced twice, which rounds otherwise than one reduction of the sum.
ROUNDED = (two_forwards_one_backward, a_unit_twice_in_one_forward, backward_twice_through_one_graph, a_head_in_chunks)
# A unit's inputs go through a function of torch's: gradients of one that is used twice are added in another order.
ROUNDED_BY_TORCH = (outputs_in_odd_ways,)
# Statistics, and gradients of inputs, are each rank's own.
OF_EACH_RANK = (forward_without_gradients_between_steps, inputs_that_require_gradients)
