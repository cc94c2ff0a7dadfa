"""One training step, and the ways to shard it: what bench_sharded times and counts against each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP1
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

import lockstep
from gpt import Groups, Shape, batch_of
from lockstep.comm.communicator import Communicator
from sharded_formula import Unit

Engine = Literal["alone", "FSDP2", "FSDP1", "fully_shard", "torch DDP", "our DDP"]
Over = Literal["gloo", "shared memory"]
Steps = Literal[
    "AdamW",
    "fused AdamW",
    "ShardedOptimizer",
    "plain ShardedOptimizer",
    "ZeRO",
    "fused ZeRO",
    "joined",
    "plain joined",
]
OVER: tuple[Over, ...] = ("gloo", "shared memory")
LR = 1e-4


class Kind(NamedTuple):
    """One way to train: what shards the model, what carries its tensors, what updates the weights."""

    engine: Engine
    over: Over
    steps: Steps

    @property
    def label(self) -> str:
        """What it is called in the results, beside others on the same transport."""
        return f"{self.engine}, {self.steps}"

    @property
    def is_fused(self) -> bool:
        """Whether torch's fused AdamW does the arithmetic, which rounds differently."""
        return self.steps.startswith(("fused", "ShardedOptimizer", "joined"))

    @property
    def shards_optimizer_only(self) -> bool:
        """Whether every rank keeps all parameters and a part of the optimizer's state."""
        return self.engine in ("torch DDP", "our DDP") and self.steps not in ("AdamW", "fused AdamW")


# ------------------------------------------------------------------ making one


def torch_group(over: Over, groups: Groups) -> Any:
    """torch's classes take groups of torch: Gloo's default one, or one of the backend "lockstep"."""
    return dist.group.WORLD if over == "gloo" else groups.backend


def our_group(over: Over, groups: Groups) -> Communicator:
    """Ours take communicators."""
    return groups.gloo if over == "gloo" else groups.shared


def by_unit(shard: Callable[[nn.Module], object], module: nn.Module) -> nn.Module:
    """Every block a unit, and the root with what is left: embeddings, the head tied to them, the last norm."""
    for block in module.modules():
        if isinstance(block, GPT2Block):
            shard(block)
    shard(module)
    return module


def wrap(kind: Kind, module: nn.Module, groups: Groups) -> nn.Module:
    """`module` as this kind trains it; it is changed or held by what is returned. Collective."""
    if kind.engine == "alone":
        return module
    if kind.engine == "fully_shard":
        comm = our_group(kind.over, groups)
        return by_unit(lambda unit: lockstep.fully_shard(unit, mesh=comm), module)
    if kind.engine == "our DDP":
        return lockstep.DistributedDataParallel(module, process_group=our_group(kind.over, groups))
    group = torch_group(kind.over, groups)
    if kind.engine == "FSDP2":
        mesh = DeviceMesh.from_group(group, "cpu")
        return by_unit(lambda unit: torch_fully_shard(unit, mesh=mesh), module)
    if kind.engine == "FSDP1":
        policy = ModuleWrapPolicy({GPT2Block})
        device = torch.device("cpu")
        return TorchFSDP1(module, group, auto_wrap_policy=policy, device_id=device, use_orig_params=True)
    return TorchDDP(module, process_group=group)


def optimizer_of(kind: Kind, model: nn.Module, groups: Groups) -> Any:
    """What updates the weights. Collective."""
    adamw: dict[str, Any] = {"lr": LR}
    if kind.steps.startswith("fused"):
        adamw["fused"] = True
    if kind.steps.endswith("AdamW"):
        return torch.optim.AdamW(model.parameters(), **adamw)
    if kind.steps.endswith("ZeRO"):
        group = torch_group(kind.over, groups)
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=group, **adamw)
    if kind.steps.startswith("plain"):
        adamw["fused"] = False  # ours takes the fused one where nothing is said
    if "joined" in kind.steps:
        assert isinstance(model, lockstep.DistributedDataParallel)
        return lockstep.ShardedOptimizer(model.parameters(), torch.optim.AdamW, ddp=model, **adamw)
    comm = our_group(kind.over, groups)
    return lockstep.ShardedOptimizer(model.parameters(), torch.optim.AdamW, process_group=comm, **adamw)


class Variant:
    """One model, sharded in its own way, with its optimizer. Collective: construction and every step."""

    def __init__(self, kind: Kind, module: nn.Module, shape: Shape, rank: int, groups: Groups) -> None:
        self.kind, self.shape, self.rank = kind, shape, rank
        self.model: Any = wrap(kind, module, groups)
        self.optimizer = optimizer_of(kind, self.model, groups)

    def backward(self, number: int) -> None:
        """Forward and backward, until the gradients are averaged."""
        tokens = batch_of(self.shape, self.rank, number)
        self.model(input_ids=tokens, labels=tokens).loss.backward()

    def update(self) -> None:
        """The optimizer's step; the gradients are gone after it."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, number: int) -> dict[str, float]:
        """Seconds of one training step until the gradients are averaged, and until the weights are updated.

        Of two in a row the mean, and everything has ended after them: what the first leaves to the second counts too.
        """
        start = time.perf_counter()
        averaged = 0.0
        for each in (2 * number, 2 * number + 1):
            begun = time.perf_counter()
            self.backward(each)
            averaged += time.perf_counter() - begun
            self.update()
        return {"forward+backward": averaged / 2, "whole step": (time.perf_counter() - start) / 2}

    def shards(self, world_size: int) -> Iterator[Tensor]:
        """This rank's rows of every parameter, as `fully_shard` cuts them. Collective."""
        if self.kind.engine == "FSDP1":
            with TorchFSDP1.summon_full_params(self.model, writeback=False):
                yield from [rows(param, self.rank, world_size).clone() for param in self.model.parameters()]
            return
        for param in self.model.parameters():
            yield rows(param, self.rank, world_size) if type(param.data) is Tensor else param.to_local().detach()


def rows(param: Tensor, rank: int, world_size: int) -> Tensor:
    """Rank `rank`'s rows of a whole parameter; none where there are fewer rows than ranks."""
    chunks = param.detach().chunk(world_size)
    return chunks[rank] if rank < len(chunks) else param.detach()[:0]


def distance(variant: Variant, reference: Variant, world_size: int) -> float:
    """Largest difference of any weight that this rank holds; 0.0 says the same work was done, bit for bit."""
    pairs = zip(variant.shards(world_size), reference.shards(world_size), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs if a.numel())


# ------------------------------------------------------------------ what the formula needs to know of a model


def units_of(module: nn.Module) -> list[Unit]:
    """The units that `by_unit` makes of a model, the root first, then in the order of forward."""
    blocks = [part for part in module.modules() if isinstance(part, GPT2Block)]
    names = [id(param) for _, param in module.named_parameters(remove_duplicate=False)]
    tied = {id(param): param.numel() for param in module.parameters() if names.count(id(param)) > 1}
    in_blocks = [sum(param.numel() for param in block.parameters()) for block in blocks]
    root = sum(param.numel() for param in module.parameters()) - sum(in_blocks)
    return [Unit(root, sum(tied.values())), *(Unit(numel) for numel in in_blocks)]


def activation_bytes(module: nn.Module, shape: Shape) -> int:
    """Bytes that forward saves for backward, parameters not among them; each storage once."""
    own = {param.untyped_storage().data_ptr() for param in module.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> None:  # what it returns would be the graph's, a tensor that holds the graph for ever
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())

    tokens = batch_of(shape, 0, 0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(input_ids=tokens, labels=tokens)
    return sum(storage.nbytes() for place, storage in saved.items() if place not in own)
