"""The same case on torch's DistributedDataParallel, on ours, and on neither: what the three give must be equal.

A case is a function of a `Side`. It builds a model, wraps it with `side.wrap`, trains, and returns tensors (nested in
dicts, lists and tuples). Many cases run in one job of real processes; a test asserts the outcome of one of them.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDdp

import lockstep
from case_table import CaseTable, first_difference
from lockstep.comm.communicator import Communicator

Made = TypeVar("Made", bound=nn.Module)
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


class Side:
    """One of the three: `torch`, `ours`, or `plain`, where the caller's `end_backward` averages what each rank has."""

    def __init__(self, kind: str, comm: Communicator) -> None:
        self.kind = kind
        self.comm = comm
        self.rank = comm.rank
        self.world_size = comm.world_size

    @property
    def is_ours(self) -> bool:
        return self.kind == "ours"

    def wrap(self, module: nn.Module, *, torch_only: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        """The wrapped module. `torch_only`: flags that torch needs for what works here without."""
        if self.kind == "torch":
            return TorchDdp(module, **kwargs, **(torch_only or {}))
        if self.kind == "ours":
            return lockstep.DistributedDataParallel(module, **kwargs)
        return Plain(module)

    def end_backward(self, model: nn.Module) -> None:
        """After a backward that synchronises: on the plain side the mean is made here, with no bucket and no hook."""
        if self.kind != "plain" or self.world_size == 1:
            return
        for param in model.parameters():
            if not param.requires_grad:
                continue
            has = torch.tensor([0 if param.grad is None else 1])
            dist.all_reduce(has)
            if has.item() == 0:
                continue
            dense = torch.zeros_like(param) if param.grad is None else param.grad.to_dense().contiguous()
            total = torch.view_as_real(dense) if dense.is_complex() else dense
            dist.all_reduce(total)
            param.grad = dense / self.world_size

    def generator(self, step: int, rank: int | None = None) -> torch.Generator:
        """Randomness of one rank at one step."""
        rank = self.rank if rank is None else rank
        return torch.Generator().manual_seed(7919 * step + 31 * rank + 1)

    def batch(self, step: int, *shape: int, rank: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Inputs that differ between ranks and steps."""
        return torch.randn(*shape, generator=self.generator(step, rank), dtype=torch.float64).to(dtype)

    def tokens(self, step: int, vocabulary: int, *shape: int) -> Tensor:
        """Token numbers that differ between ranks and steps."""
        return torch.randint(0, vocabulary, shape, generator=self.generator(step))


class Plain(nn.Module):
    """A wrapper that does nothing."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.require_backward_grad_sync = True

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        yield


def seeded(make: Callable[[], Made], seed: int = 0) -> Made:
    """The same module on every rank and side."""
    torch.manual_seed(seed)
    return make()


def scalar(output: Any) -> Tensor:
    """One number that depends on every tensor of an output."""
    if isinstance(output, Tensor):
        real = torch.view_as_real(output) if output.is_complex() else output
        return real.float().pow(2).mean() if real.dtype in (torch.float16, torch.bfloat16) else real.pow(2).mean()
    values = output.values() if isinstance(output, dict) else output
    return sum((scalar(value) for value in values), torch.zeros(()))


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Parameters, buffers and gradients, copied."""
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return {"state": state, "grad": gradients(model)}


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """The gradients, dense and copied."""
    return {n: None if p.grad is None else p.grad.detach().clone().to_dense() for n, p in model.named_parameters()}


def train(
    side: Side,
    make: Callable[[], nn.Module],
    *,
    steps: int = 5,
    optimizer: Callable[[Any], Any] = SGD,
    inputs: Callable[[int], Any] | None = None,
    loss_of: Callable[[Any], Tensor] = scalar,
    torch_only: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """The usual loop; returns the end state."""
    model = seeded(make)
    ddp = side.wrap(model, torch_only=torch_only, **kwargs)
    stepper = optimizer([p for p in model.parameters() if p.requires_grad])
    for step in range(steps):
        stepper.zero_grad()
        loss_of(ddp(side.batch(step, 6, 8) if inputs is None else inputs(step))).backward()
        side.end_backward(model)
        stepper.step()
    return snapshot(model)


def difference(left: Any, right: Any, tolerance: float | None, path: str = "") -> str | None:
    """Where two results differ first, in words; bitwise unless there is a tolerance."""

    def compare(a: Tensor, b: Tensor) -> str | None:
        if tolerance and torch.allclose(a, b, rtol=tolerance, atol=tolerance):
            return None
        return f"differs by up to {(a - b).abs().max().item():.3g}"

    return first_difference(left, right, compare, path)


class Case(NamedTuple):
    """`against`: what ours must equal. `tolerance`: world size -> rounding that is allowed; else bitwise."""

    body: Callable[[Side], Any]
    worlds: tuple[int, ...]
    against: str
    tolerance: dict[int, float]


@final
class Cases(CaseTable):
    """The cases of one test module, on our class and on another side."""

    def add(
        self, *worlds: int, against: str = "torch", tolerance: float | dict[int, float] | None = None
    ) -> Callable[[Callable[[Side], Any]], Callable[[Side], Any]]:
        """Register a case. At three ranks a mean is rounded by its order of summation: never bitwise."""

        def register(body: Callable[[Side], Any]) -> Callable[[Side], Any]:
            given = (
                tolerance
                if isinstance(tolerance, dict)
                else {}
                if tolerance is None
                else dict.fromkeys(worlds, tolerance)
            )
            self.by_name[body.__name__] = Case(body, worlds or (2,), against, {3: 1e-5, **given})
            return body

        return register

    def shared_memory(self, world_size: int) -> str:
        """Two operands have one sum, in whatever order; with more, torch's bits are those of Gloo's ring."""
        return "on" if world_size == 2 else "off"

    def run(self, comm: Communicator, name: str) -> str | None:
        return run_case(comm, self.by_name[name])


def run_case(comm: Communicator, case: Case) -> str | None:
    """One case on both sides. A warning about the wrapper that the other side does not give is a difference too."""
    try:
        with warnings.catch_warnings(record=True) as ours_warned:
            warnings.simplefilter("always")
            ours = case.body(Side("ours", comm))
        with warnings.catch_warnings(record=True) as theirs_warned:
            warnings.simplefilter("always")
            theirs = case.body(Side(case.against, comm))
    except Exception:  # noqa: BLE001 - told to the test
        return traceback.format_exc()
    told = {str(warned.message) for warned in theirs_warned}
    extra = [text for w in ours_warned if (text := str(w.message)) not in told and "DistributedDataParallel" in text]
    return f"warned: {extra[0]}" if extra else difference(ours, theirs, case.tolerance.get(comm.world_size))
