"""One training program on four sides: torch's fully_shard, ours, whole copies on every rank, and one process alone.

A program is a function of a `Side`. It builds a model, cuts it with `side.shard`, trains, and returns tensors (nested
in dicts, lists and tuples), the same on every rank. What the sides return must be equal.

- `torch`, `ours`: each rank keeps its pieces
- `plain`: each rank has the whole model and its own batch; gradients are added in the order of the ranks' tree
- `one`: each rank has the whole model and the batches of all ranks at once, and talks to no other
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import lockstep
from case_table import first_difference
from lockstep.comm.communicator import Communicator
from lockstep.comm.reduction import tree_reduce

Made = TypeVar("Made", bound=nn.Module)
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
_GENERATOR = threading.Lock()


class Side:
    """One of the four. `mesh`: what ours is given where a program names none; None is torch's default group."""

    def __init__(self, kind: str, comm: Communicator, mesh: Any = None) -> None:
        self.kind = kind
        self.comm = comm
        self.mesh = mesh
        self.rank = comm.rank
        self.world_size = comm.world_size
        self._syncs = True
        self._unreduced: dict[nn.Parameter, Tensor] = {}  # the plain side's gradients of backwards without a reduction

    @property
    def is_ours(self) -> bool:
        return self.kind == "ours"

    @property
    def shards(self) -> bool:
        """Whether this side cuts parameters at all."""
        return self.kind in ("torch", "ours")

    def shard(self, module: Any, **kwargs: Any) -> Any:
        """The module, or list of modules, as one unit."""
        if self.kind == "torch":
            return torch_fully_shard(module, **kwargs)
        if self.kind == "ours":
            return lockstep.fully_shard(module, **{"mesh": self.mesh, **kwargs})
        return module

    def shard_units(self, model: nn.Module, units: Sequence[str] = (), **kwargs: Any) -> Any:
        """Each of the named modules as a unit, in this order, then the model itself."""
        for name in units:
            self.shard(model.get_submodule(name), **kwargs)
        return self.shard(model, **kwargs)

    # ------------------------------------------------------------------ backward

    def backward(self, loss: Tensor, model: nn.Module) -> None:
        """`loss.backward()`. On the plain side, the ranks' mean of what it found is added to the gradients."""
        if self.kind != "plain":
            loss.backward()
            return
        params = [param for param in model.parameters() if param.requires_grad]
        before = [param.grad for param in params]
        for param in params:
            param.grad = self._unreduced.pop(param, None)
        loss.backward()
        if not self._syncs:
            self._unreduced.update({param: param.grad for param in params if param.grad is not None})
            found: list[Tensor | None] = [None] * len(params)
        else:
            found = self._means(params)
        for param, old, new in zip(params, before, found, strict=True):
            param.grad = old if new is None else new if old is None else old + new

    def _means(self, params: Sequence[nn.Parameter]) -> list[Tensor | None]:
        """The gradients' means over the ranks; None where no rank has one."""
        pieces = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
        has = torch.tensor([param.grad is not None for param in params], dtype=torch.float32)
        flat = torch.cat([has, *(piece.detach().reshape(-1) for piece in pieces)])
        parts = [torch.empty_like(flat) for _ in range(self.world_size)]
        self.comm.all_gather(parts, flat)
        mean = tree_reduce(parts, "mean")
        sizes = [len(params), *(piece.numel() for piece in pieces)]
        flags, *means = mean.split(sizes)
        return [
            mean.view_as(piece).clone() if flag > 0 else None
            for flag, mean, piece in zip(flags.tolist(), means, pieces, strict=True)
        ]

    def set_sync(self, model: Any, syncs: bool, **kwargs: Any) -> None:
        """`model.set_requires_gradient_sync(syncs)`."""
        self._syncs = syncs
        if self.shards:
            model.set_requires_gradient_sync(syncs, **kwargs)

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        self.set_sync(model, False)
        try:
            yield
        finally:
            self.set_sync(model, True)

    # ------------------------------------------------------------------ inputs

    def per_rank(self, make: Callable[[torch.Generator], Tensor], step: int) -> Tensor:
        """`make` of this rank's randomness at this step; on the side of one process the ranks' one below the other."""
        ranks = range(self.world_size) if self.kind == "one" else [self.rank]
        return torch.cat([make(torch.Generator().manual_seed(7919 * step + 31 * rank + 1)) for rank in ranks])

    def batch(self, step: int, *shape: int) -> Tensor:
        """Inputs that differ between ranks and steps."""
        return self.per_rank(lambda generator: torch.randn(*shape, generator=generator), step)

    def tokens(self, step: int, vocabulary: int, *shape: int) -> Tensor:
        """Token numbers that differ between ranks and steps."""
        return self.per_rank(lambda generator: torch.randint(0, vocabulary, shape, generator=generator), step)

    # ------------------------------------------------------------------ results

    def snapshot(self, model: nn.Module) -> dict[str, Any]:
        """Parameters, buffers that are floats and gradients: whole, and copied."""
        state = {f"state {name}": tensor for name, tensor in model.state_dict().items()}
        return self.whole({**state, **gradients(model)})

    def whole(self, tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """DTensors put together from all ranks' pieces; the others as they are on this rank."""
        pieces = {
            name: to_local(tensor).contiguous() for name, tensor in tensors.items() if isinstance(tensor, DTensor)
        }
        shapes = self.comm.all_gather_object({name: list(piece.shape) for name, piece in pieces.items()})
        mine = torch.cat([torch.zeros(1, dtype=torch.uint8), *(as_bytes(piece) for piece in pieces.values())])
        sizes = self.comm.all_gather_object(mine.numel())
        everyone = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        self.comm.all_gather(everyone, mine)
        places = [1] * self.world_size
        by_rank: dict[str, list[Tensor]] = {}
        for name, piece in pieces.items():
            for rank in range(self.world_size):
                shape = torch.Size(shapes[rank][name])
                end = places[rank] + shape.numel() * piece.element_size()
                data = everyone[rank][places[rank] : end].clone()
                by_rank.setdefault(name, []).append(data.view(piece.dtype).view(shape))
                places[rank] = end
        return {
            name: joined(tensor, by_rank[name]) if isinstance(tensor, DTensor) else copied(tensor)
            for name, tensor in tensors.items()
        }


def joined(tensor: DTensor, pieces: Sequence[Tensor]) -> Tensor:
    """The whole of a DTensor, from the pieces of all ranks; its replicas must be equal."""
    *_, placement = tensor.placements
    rows = tensor.device_mesh.mesh.view(-1, tensor.device_mesh.mesh.shape[-1]).tolist()
    replicas = [torch.cat([pieces[rank] for rank in row], dim=placement.dim) for row in rows]  # type: ignore[union-attr]
    assert all(torch.equal(replicas[0], other) for other in replicas[1:]), "the replicas of a sharded tensor differ"
    assert replicas[0].shape == tensor.shape, f"pieces of {list(replicas[0].shape)} make a {list(tensor.shape)}"
    return replicas[0]


def to_local(tensor: DTensor) -> Tensor:
    return tensor.detach().to_local()


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {f"grad {name}": param.grad for name, param in model.named_parameters()}


def layout(model: nn.Module) -> dict[str, Any]:
    """How each parameter and gradient lies on this rank, in plain values."""
    return {name: [placed(param), placed(param.grad), param.requires_grad] for name, param in model.named_parameters()}


def placed(tensor: Tensor | None) -> Any:
    if not isinstance(tensor, DTensor):
        return None if tensor is None else [type(tensor).__name__, list(tensor.shape), str(tensor.dtype)]
    local = to_local(tensor)
    names = tensor.device_mesh.mesh_dim_names
    mesh = [tensor.device_mesh.mesh.tolist(), None if names is None else list(names), tensor.device_mesh.device_type]
    placements = [str(placement) for placement in tensor.placements]
    return [placements, mesh, list(tensor.shape), tensor.stride(), list(local.shape), local.stride(), str(local.dtype)]


# ------------------------------------------------------------------ training


def seeded(make: Callable[[], Made], seed: int = 0) -> Made:
    """The same module on every rank and side. Ranks that are threads share torch's generator: one at a time."""
    with _GENERATOR, torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def scalar(output: Any) -> Tensor:
    """One number that depends on every floating point tensor of an output: a mean over the batch."""
    if dataclasses.is_dataclass(output) and not isinstance(output, (type, dict)):
        output = vars(output)
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.stack([leaf.float().pow(2).mean() for leaf in leaves]).sum()


def train(
    side: Side,
    make: Callable[[], nn.Module],
    units: Sequence[str] = (),
    *,
    steps: int = 3,
    optimizer: Callable[[Any], torch.optim.Optimizer] = ADAMW,
    inputs: Callable[[int], Any] | None = None,
    loss_of: Callable[[Any], Tensor] = scalar,
    **kwargs: Any,
) -> dict[str, Any]:
    """The usual loop; returns the end state."""
    model = seeded(make)
    side.shard_units(model, units, **kwargs)
    stepper = optimizer([param for param in model.parameters() if param.requires_grad])
    for step in range(steps):
        stepper.zero_grad()
        side.backward(loss_of(model(side.batch(step, 6, 8) if inputs is None else inputs(step))), model)
        stepper.step()
    return side.snapshot(model)


# ------------------------------------------------------------------ comparing


def difference(left: Any, right: Any, tolerance: float | None = None, path: str = "") -> str | None:
    """Where two results differ first, in words; bitwise unless there is a tolerance, relative to a tensor's norm."""

    def compare(a: Tensor, b: Tensor) -> str | None:
        apart, whole = a.double() - b.double(), b.double()
        if tolerance is not None and apart.norm() <= tolerance * whole.norm():
            return None
        return (
            f"differs by up to {apart.abs().max().item():.3g}, its largest value is "
            f"{whole.abs().max().item():.3g}; the norms' ratio is {(apart.norm() / whole.norm()).item():.3g}"
        )

    return first_difference(left, right, compare, path)
