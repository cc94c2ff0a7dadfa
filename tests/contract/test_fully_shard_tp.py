"""Around parallelize_module, fully_shard is torch's: layouts, bits, tools. And the training is that of one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from fsdp2_sides import Cases
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import lockstep
from shard_sides import ADAMW, SGD, Side, seeded, to_local
from tp_models import VOCABULARY, loss_of
from tp_sides import grid_of, is_shared, pieces, steps, whole, wholes

CASES = Cases(__name__)
BITS = {"torch": 0.0}  # two ranks along every axis: there is only one order to add in
# One tensor on several meshes is more than torch's kernels for lists of DTensors take.
ONE_BY_ONE = functools.partial(ADAMW, foreach=False)


def trained(
    side: Side, shape: tuple[int, ...], sequence: bool = True, sharing: bool = True, **kwargs: Any
) -> list[Any]:
    grid = grid_of(side, shape)
    model = grid.model(sequence=sequence, sharing=sharing, **kwargs)
    losses = steps(grid, model, make_optimizer=ADAMW if sequence else ONE_BY_ONE)
    assert not side.is_ours or is_shared(model) == (sharing and shape[-2] > 1)
    return [losses, pieces(model), wholes(model)]


@CASES.add(4, against="torch", tolerance=BITS)
def two_by_two(side: Side) -> Any:
    """In memory that all see, and gathered; norms as DTensors, and plain."""
    return [trained(side, (2, 2), sequence, sharing) for sequence, sharing in ((True, True), (False, False))]


@CASES.add(4, against="torch", tolerance=BITS)
def replicas_too(side: Side) -> Any:
    return [trained(side, shape) for shape in ((2, 1, 2), (2, 2, 1))]


@CASES.add(2, against="torch")
def an_axis_of_one(side: Side) -> Any:
    return [trained(side, shape) for shape in ((1, 2), (2, 1))]


@CASES.add(2, 4, against="one", tolerance={"one": 1e-5})
def one_process(side: Side) -> Any:
    """The same training, with the batches of all ranks along dp."""
    found = []
    for shape, sequence in (((2, 2), True),) if side.comm.world_size == 4 else (((1, 2), True), ((2, 1), False)):
        grid = grid_of(side, shape)
        model = grid.model(sequence=sequence)
        steps(grid, model, 5, ADAMW if sequence else ONE_BY_ONE)
        found.append(wholes(model))
    return found


@CASES.add(2, against="one", tolerance={"one": 1e-5})
def inference_before_training(side: Side) -> Any:
    """Torch's buffers that were made for inference cannot be trained with."""
    grid = grid_of(side, (1, 2))
    model = grid.model()
    with torch.inference_mode():
        model(grid.tokens(0))
    steps(grid, model)
    return wholes(model)


@CASES.add(4, against="torch", tolerance=BITS)
def cut_along_another_dim(side: Side) -> Any:
    """Along the one that tensor parallelism cuts, and along the other one."""
    found = []
    for dim in (0, 1):
        grid = grid_of(side, (2, 2))
        model: Any = seeded(lambda: nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)))
        parallelize_module(model, grid.tp, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        side.shard(
            model, mesh=grid.dp, shard_placement_fn=lambda param, dim=dim: Shard(dim) if param.ndim > 1 else None
        )
        model(grid.side.batch(0, 5, 8)).pow(2).mean().backward()
        found += [pieces(model), wholes(model)]
    return found


@CASES.add(4, against="torch", tolerance=BITS)
def rows_that_tensor_parallelism_does_not_share_equally(side: Side) -> Any:
    """21 rows, 11 and 10 of them, cut into 6, 5, 5 and 5."""
    grid = grid_of(side, (2, 2))
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 21)))
    if side.shards:
        parallelize_module(model, grid.tp, {"2": ColwiseParallel(output_layouts=Replicate())})
        side.shard(model, mesh=grid.dp)
    optimizer = ONE_BY_ONE(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        model(grid.side.batch(step, 5, 8)).pow(2).mean().backward()
        optimizer.step()
    return [pieces(model), wholes(model)]


@CASES.add(4, against="torch", tolerance={"torch": 1e-6})
def accumulation(side: Side) -> Any:
    """In shards, and on each rank, where torch adds along tp once for all backwards."""
    found = []
    for syncs in (True, False):
        grid = grid_of(side, (2, 2))
        model = grid.model()
        for step in range(3):
            model.set_requires_gradient_sync(syncs or step == 2)
            tokens = grid.tokens(step)
            loss_of(model(tokens), tokens).backward()
        found += [pieces(model), wholes(model)]
    return found


@CASES.add(4, against="torch", tolerance=BITS)
def mixed_precision(side: Side) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return [trained(side, (2, 2), mp_policy=policy, sharing=sharing) for sharing in (True, False)]


@CASES.add(4, against="torch", tolerance=BITS)
def parameters_kept_whole(side: Side) -> Any:
    return trained(side, (2, 2), reshard_after_forward=False)


@CASES.add(4, against="torch", tolerance=BITS)
def activation_checkpoints(side: Side) -> Any:
    grid = grid_of(side, (2, 2))
    model = grid.model()
    for layer in model.layers:
        run = layer.forward
        layer.forward = lambda x, run=run: checkpoint(run, x, use_reentrant=False)
    return [steps(grid, model), wholes(model)]


@CASES.add(4, against="torch", tolerance=BITS)
def a_parallel_loss(side: Side) -> Any:
    """The model's output is a DTensor, of which no rank has all."""
    grid = grid_of(side, (2, 2))
    model: Any = seeded(lambda: nn.Sequential(nn.Linear(8, 12), nn.Linear(12, VOCABULARY)))
    parallelize_module(model, grid.tp, {"1": ColwiseParallel(use_local_output=False)})
    side.shard(model, mesh=grid.dp)
    with loss_parallel():
        loss = nn.functional.cross_entropy(model(grid.side.batch(0, 5, 8)), grid.side.tokens(1, VOCABULARY, 5))
        loss.backward()
    return [whole(loss.detach()), pieces(model), wholes(model)]


# ------------------------------------------------------------------ tools


@CASES.add(2, 4, against=("torch", "one"), tolerance={"torch": 1e-6})
def clipping(side: Side) -> Any:
    """By torch's functions and by ours; norms that are plain are on another mesh, which torch's cannot mix."""
    shape = (2, 2) if side.comm.world_size == 4 else (1, 2)
    found = []
    for sequence in (True, False):
        grid = grid_of(side, shape)
        model = grid.model(sequence=sequence)
        tokens = grid.tokens(0)
        loss_of(model(tokens), tokens).backward()
        norms: list[Any] = [
            lockstep.clip_grad_norm_(model.parameters(), 0.05, norm_type=p) for p in (2.0, 1.0, float("inf"))
        ]
        norms.append(lockstep.get_total_norm([param.grad for param in model.parameters()]))
        if sequence:
            norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.04)))
        found.append([norms, [whole(param.grad) for param in model.parameters()]])
    return found


@CASES.add(4, against="torch", tolerance=BITS)
def state_dicts(side: Side) -> Any:
    """Whole ones, by torch's functions: saved, loaded into another model, and trained on."""
    grid = grid_of(side, (2, 2))
    model = grid.model()
    optimizer = ADAMW(model.parameters())
    tokens = grid.tokens(0)
    loss_of(model(tokens), tokens).backward()
    optimizer.step()
    whole_ones = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state = get_model_state_dict(model, options=whole_ones)
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=whole_ones)
    other = grid.model()
    for param in other.parameters():
        to_local(param).zero_()
    set_model_state_dict(other, dict(state), options=whole_ones)
    other_optimizer = ADAMW(other.parameters())
    set_optimizer_state_dict(other, other_optimizer, optimizer_state, options=whole_ones)
    other_optimizer.zero_grad()
    loss_of(other(tokens), tokens).backward()
    other_optimizer.step()
    return [state, list(optimizer_state["state"]), pieces(other), wholes(other)]


@CASES.add(4, against="torch", tolerance=BITS)
def loading(side: Side) -> Any:
    """Sharded state dicts, in place and by taking the tensors over."""
    grid = grid_of(side, (2, 2))
    model = grid.model()
    steps(grid, model, 1)
    found = []
    for assign in (False, True):
        other = grid.model()
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        other.load_state_dict(state, assign=assign)
        found += [steps(grid, other, 1, SGD), pieces(other), wholes(other)]
    return found


@pytest.mark.parametrize(("name", "world_size"), CASES.parameters())
def test_equals_torch_and_one_process(name: str, world_size: int) -> None:
    CASES.check(name, world_size)
