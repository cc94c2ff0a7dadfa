"""Training under FullyShardedDataParallel gives what torch's gives: every strategy, and what changes a step."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_sides import SGD, Cases, Side, scalar, seeded
from fsdp_sides import BLOCKS, Block, fsdp_class, net, train, whole, whole_gradients, wrap, wrapped_net
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState, allreduce_hook, reduce_scatter_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from lockstep.parallel.fsdp import FullyShardedDataParallel
from shard_models import gpt2, llama

CASES = Cases(__name__)


@CASES.add(2, 3)
def full_shard(side: Side) -> Any:
    return train(side, wrapped_net(side))


@CASES.add(2, 3)
def shard_grad_op(side: Side) -> Any:
    return train(side, wrapped_net(side, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP))


@CASES.add(2, 3)
def no_shard(side: Side) -> Any:
    return train(side, wrapped_net(side, sharding_strategy=ShardingStrategy.NO_SHARD))


@CASES.add()
def transformers_models(side: Side) -> Any:
    """Tied embeddings in the root, a unit for each layer; then text, with and without whole parameters."""
    ends = []
    for make, layer in ((gpt2, "GPT2Block"), (functools.partial(llama, tied=True), "LlamaDecoderLayer")):
        module = seeded(make)
        layers = {type(part) for part in module.modules() if type(part).__name__ == layer}
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=layers)
        model = wrap(side, module, auto_wrap_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(3):
            tokens = side.tokens(step, 32, 2, 8)
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
        state = whole(side, model)
        ends.append({name: state[name] for name in sorted(state)})
        if side.is_ours:
            check_text(model.eval(), make(), state)
    return ends


def check_text(model: Any, plain: Any, state: dict[str, Tensor]) -> None:
    """generate() calls the module inside: programs for torch's class do so with the root's parameters whole."""
    plain.load_state_dict(state)
    how = {"input_ids": torch.tensor([[3, 1, 4]]), "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = plain.eval().generate(**how)
    assert torch.equal(model.generate(**how), expected)
    with FullyShardedDataParallel.summon_full_params(model, recurse=False, writeback=False):
        assert torch.equal(model.generate(**how), expected)


@CASES.add()
def wrapped_by_hand(side: Side) -> Any:
    """Units in units, of other strategies, and one that holds nothing itself."""
    model = seeded(net)
    model[1].up = wrap(side, model[1].up, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    for number in range(4):
        model[number] = wrap(side, model[number])
    return train(side, wrap(side, model))


@CASES.add(4, tolerance=1e-6)
def hybrid_over_a_mesh(side: Side) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    strategies = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
    return [train(side, wrapped_net(side, sharding_strategy=each, device_mesh=mesh)) for each in strategies]


@CASES.add(4, tolerance=1e-6)
def hybrid_over_two_groups(side: Side) -> Any:
    shard, _ = dist.new_subgroups(2)
    replicate = [dist.new_group([0, 2]), dist.new_group([1, 3])][side.rank % 2]
    groups = (shard, replicate)
    return train(side, wrapped_net(side, sharding_strategy=ShardingStrategy.HYBRID_SHARD, process_group=groups))


@CASES.add(3)
def over_a_smaller_group(side: Side) -> Any:
    group = dist.new_group([0, 2])
    return train(side, wrapped_net(side, process_group=group)) if side.rank != 1 else None


@CASES.add()
def accumulated_without_sync(side: Side) -> Any:
    model = wrapped_net(side)
    optimizer = SGD(model.parameters())
    seen = []
    for step in range(2):
        optimizer.zero_grad()
        with model.no_sync():
            for micro in range(2):
                scalar(model(side.batch(10 * step + micro, 6, 5))).backward()
        scalar(model(side.batch(10 * step + 2, 6, 5))).backward()
        seen.append(whole_gradients(side, model))
        optimizer.step()
    return seen, whole(side, model)


@CASES.add()
def accumulated_with_sync(side: Side) -> Any:
    model = wrapped_net(side)
    for micro in range(3):
        scalar(model(side.batch(micro, 6, 5))).backward()
    return whole_gradients(side, model)


@CASES.add(2, 3, tolerance=1e-6)
def clipped(side: Side) -> Any:
    """torch adds the squares in fp32 in another order."""
    return train(side, wrapped_net(side), clip=0.05)


@CASES.add(tolerance=1e-6)
def clipped_by_the_largest(side: Side) -> Any:
    model = wrapped_net(side)
    scalar(model(side.batch(0, 6, 5))).backward()
    return model.clip_grad_norm_(0.01, float("inf")), whole_gradients(side, model)


@CASES.add()
def frozen_and_tied(side: Side) -> Any:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6, bias=False))
        model[2].weight = model[0].weight
        model[3].weight.requires_grad_(False)
        return model

    model = wrap(side, seeded(make))
    outcome = train(side, model, width=6)
    outcome["state"] = dict(sorted(outcome["state"].items()))  # torch puts a tied name last
    return outcome, [param.requires_grad for param in model.parameters()]


@CASES.add()
def ignored(side: Side) -> Any:
    """An ignored module's gradients stay each rank's own."""
    model = seeded(net)
    last = model[3]
    model = wrap(side, model, auto_wrap_policy=BLOCKS, ignored_states=list(last.parameters()))
    scalar(model(side.batch(0, 6, 5))).backward()
    return whole_gradients(side, model), last.weight.grad.clone(), whole(side, model)


@CASES.add()
def checkpointed(side: Side) -> Any:
    """Activation checkpoints around and inside of units add nothing to names."""
    model = seeded(net)
    model[1] = checkpoint_wrapper(wrap(side, model[1]))
    model[2] = wrap(side, checkpoint_wrapper(model[2]))
    model = wrap(side, model)
    return train(side, model)


@CASES.add()
def reduced_by_torch_hooks(side: Side) -> Any:
    ends = []
    for strategy, hook in (
        (ShardingStrategy.FULL_SHARD, reduce_scatter_hook),
        (ShardingStrategy.NO_SHARD, allreduce_hook),
    ):
        model = wrapped_net(side, sharding_strategy=strategy)
        model.register_comm_hook(DefaultState(model.process_group), hook)
        ends.append(train(side, model))
    return ends


class Watched(nn.Module):
    """Writes down in which dtypes it is run."""

    def __init__(self, inside: nn.Module, seen: list[Any]) -> None:
        super().__init__()
        self.inside = inside
        self.seen = seen
        self.register_buffer("mark", torch.ones(1))
        self.register_buffer("count", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        out = self.inside(x)
        self.seen.append([str(t.dtype) for t in (x, next(self.inside.parameters()), self.mark, self.count, out)])
        return out


def precise(side: Side, norm: nn.Module, precision: MixedPrecision) -> Any:
    seen: list[Any] = []
    model = seeded(lambda: nn.Sequential(Watched(nn.Linear(8, 8), seen), norm, Watched(nn.Linear(8, 3), seen)))
    model = wrap(
        side,
        model,
        auto_wrap_policy=lambda module, **_: isinstance(module, (Watched, nn.Sequential)),
        mixed_precision=precision,
    )
    losses = []
    for step in range(2):
        output = model(side.batch(step, 6, 8))
        seen.append(str(output.dtype))
        losses.append(scalar(output).detach())
        scalar(output).backward()
    gradients = whole_gradients(side, model)
    return seen, losses, gradients, whole(side, model), [str(param.dtype) for param in model.parameters()]


@CASES.add()
def in_bfloat16(side: Side) -> Any:
    """A batch norm computes in fp32, without being asked; buffers are cast, and saved as they were."""
    return precise(side, nn.BatchNorm1d(8), MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16))


@CASES.add()
def inputs_cast_by_units(side: Side) -> Any:
    kwargs = {"cast_forward_inputs": True, "cast_root_forward_inputs": False}
    return precise(side, nn.LayerNorm(8), MixedPrecision(torch.bfloat16, torch.float32, **kwargs))


@CASES.add()
def gradients_of_low_precision(side: Side) -> Any:
    precision = MixedPrecision(torch.bfloat16, torch.float32, keep_low_precision_grads=True)
    model = wrapped_net(side, mixed_precision=precision)
    for micro in range(2):
        scalar(model(side.batch(micro, 6, 5))).backward()
    dtypes = {str(param.grad.dtype) for param in model.parameters() if param.grad is not None}
    SGD(model.parameters()).step()
    return dtypes, train(side, model)


@CASES.add()
def only_the_root_casts(side: Side) -> Any:
    model = seeded(lambda: nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)))
    model[1] = wrap(side, model[1], mixed_precision=MixedPrecision(param_dtype=torch.float64, cast_forward_inputs=True))
    model = wrap(side, model, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    output = model(side.batch(0, 6, 5))
    scalar(output).backward()
    return str(output.dtype), output, whole_gradients(side, model)


@CASES.add()
def summoned(side: Side) -> Any:
    cls, model = fsdp_class(side), wrapped_net(side)
    with cls.summon_full_params(model):
        first = {name: param.detach().clone() for name, param in model.named_parameters()}
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
    with cls.summon_full_params(model, writeback=False), torch.no_grad():
        model[0].weight.zero_()
    with cls.summon_full_params(model, recurse=False):
        shapes = [tuple(param.shape) for param in model[0].parameters()]
    return first, shapes, train(side, model)


@CASES.add()
def applied(side: Side) -> Any:
    model = wrapped_net(side)

    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            torch.manual_seed(module.in_features)
            nn.init.normal_(module.weight)

    model.apply(fill)
    return whole(side, model)


@CASES.add()
def found(side: Side) -> Any:
    """Who is a unit, and whose root."""
    cls, model = fsdp_class(side), wrapped_net(side)
    outside = nn.ModuleDict({"a": model, "b": nn.Linear(1, 1)})
    names = {id(module): name.replace("_fsdp_wrapped_module.", "") for name, module in outside.named_modules()}
    found = [[names[id(each)] for each in cls.fsdp_modules(outside, root_only)] for root_only in (False, True)]
    inside = isinstance(model.module, nn.Sequential), isinstance(model[1].module, Block), model[1].up.out_features
    return found, inside, [isinstance(module, cls) for module in model.modules()]


@pytest.mark.parametrize(("name", "world_size"), CASES.parameters())
def test_equals_torch(name: str, world_size: int) -> None:
    CASES.check(name, world_size)
