"""The same case on torch's DistributedDataParallel, on ours, and on neither: what the three give must be equal.

A case is a function of a `Side`. It builds a model, wraps it with `side.wrap`, trains, and returns tensors (nested in
dicts, lists and tuples). Many cases run in one job of real processes; a test asserts the outcome of one of them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDdp

import lockstep
from lockstep.comm.communicator import Communicator
from lockstep.testing.failures import RankFailed, RankTimeout
from lockstep.testing.worlds import run_processes

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
    if isinstance(left, dict) and isinstance(right, dict):
        if list(left) != list(right):
            return f"{path}: keys {list(left)} against {list(right)}"
        pairs = [(f"{path}.{key}", left[key], right[key]) for key in left]
    elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        if len(left) != len(right):
            return f"{path}: {len(left)} items against {len(right)}"
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(left, right, strict=True))]
    elif isinstance(left, Tensor) and isinstance(right, Tensor):
        return tensor_difference(left, right, tolerance, path)
    else:
        return None if left == right else f"{path}: {left!r} against {right!r}"
    return next((found for name, a, b in pairs if (found := difference(a, b, tolerance, name))), None)


def tensor_difference(left: Tensor, right: Tensor, tolerance: float | None, path: str) -> str | None:
    """The largest difference of two tensors, in words."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return f"{path}: {left.dtype} {list(left.shape)} against {right.dtype} {list(right.shape)}"
    if not torch.isfinite(left).all():
        return f"{path}: is not finite"
    if torch.equal(left, right) or (tolerance and torch.allclose(left, right, rtol=tolerance, atol=tolerance)):
        return None
    return f"{path}: differs by up to {(left - right).abs().max().item():.3g}"


class Case(NamedTuple):
    """`against`: what ours must equal. `tolerance`: world size -> rounding that is allowed; else bitwise."""

    body: Callable[[Side], Any]
    worlds: tuple[int, ...]
    against: str
    tolerance: dict[int, float]


class Cases:
    """The cases of one test module."""

    def __init__(self, module: str, timeout_s: float = 60.0) -> None:
        self.module = module
        self.timeout_s = timeout_s
        self.by_name: dict[str, Case] = {}
        self._outcomes: dict[int, dict[str, str | None]] = {}

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

    def parameters(self) -> list[tuple[str, int]]:
        """(name, world size) of every test."""
        return [(name, world) for name, case in self.by_name.items() for world in case.worlds]

    def check(self, name: str, world_size: int) -> None:
        """Fail the test with what went wrong in one case; the first question runs all cases of that world size."""
        outcome = self._outcome(name, world_size)
        if outcome is not None:
            pytest.fail(outcome, pytrace=False)

    def _outcome(self, name: str, world_size: int) -> str | None:
        if world_size not in self._outcomes:
            names = [name for name, case in self.by_name.items() if world_size in case.worlds]
            try:
                # Two operands have one sum, in whatever order; with more, torch's bits are those of Gloo's ring.
                env = {"LOCKSTEP_SHM": "on" if world_size == 2 else "off"}
                answers = run_processes(world_size, run_cases, self.module, names, timeout_s=self.timeout_s, env=env)
            except (RankFailed, RankTimeout) as error:
                self._outcomes[world_size] = dict.fromkeys(names, str(error))
            else:
                self._outcomes[world_size] = {name: _together(answers, name) for name in names}
        return self._outcomes[world_size][name]


def _together(answers: list[dict[str, str | None]], name: str) -> str | None:
    return "\n".join(f"rank {rank}: {answer[name]}" for rank, answer in enumerate(answers) if answer[name]) or None


def run_cases(comm: Communicator, module: str, names: list[str]) -> dict[str, str | None]:
    """On one rank: each case on its two sides, and what differs."""
    cases: Cases = importlib.import_module(module).CASES
    answers: dict[str, str | None] = dict.fromkeys(names, "was not run, because a case before it failed")
    for name in names:
        answers[name] = run_case(comm, cases.by_name[name])
        everyone: list[Any] = [None] * comm.world_size
        dist.all_gather_object(everyone, not (answers[name] or "").startswith("Traceback"))
        if not all(everyone):
            break  # ranks may stand at different collectives
    return answers


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
