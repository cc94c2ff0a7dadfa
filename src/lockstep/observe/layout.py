"""What one rank holds of a model and its optimizer: which part of each parameter, and how many bytes of each kind.

Whoever cuts them: DTensors, flat parameters, optimizers with a share of the state; told by their shape, not by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lockstep.observe.instances import instances
from lockstep.observe.torch_optimizers import params_of

UNITS_MAX = 200
_STRATEGIES = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
_WORDS = {"FSDPModule": "fully_shard"}
_SPLIT_STATE = ("ShardedOptimizer", "ZeroRedundancyOptimizer")

Row = list[Any]  # name, elements of the whole, dtype, bytes of the whole, bytes here


def layout_of(module: Module | None, optimizer: Optimizer | None, wrappers: Iterable[Module] = ()) -> dict[str, Any]:
    """As a note of a run has it; to be called between two steps, when nothing is gathered. Not collective.

    module: None where only the optimizer is known. wrappers: other modules that hold its parameters.
    """
    trained, state = ([], {}) if optimizer is None else (params_of(optimizer), optimizer.state)
    named = [(f"parameter {n}", param) for n, param in enumerate(trained)]
    params = named if module is None else [*module.named_parameters()]
    device = next((str(param.device) for _, param in params), "")
    return {
        "strategy": strategy_of([*wrappers, *([] if module is None else [module])], optimizer),
        "device": device,
        "units": folded([_row(name, param) for name, param in params]),
        "memory": {
            "parameters": sum(held_bytes(param) for _, param in params),
            "gradients": sum(held_bytes(param.grad) for _, param in params if param.grad is not None),
            "optimizer": sum(held_bytes(state[param]) for _, param in params if param in state),
            "buffers": 0 if module is None else sum(held_bytes(buffer) for buffer in module.buffers()),
        },
    }


def strategy_of(modules: Sequence[Module], optimizer: Optimizer | None) -> str:
    """The classes that spread the training over ranks; "" where none does."""
    kinds = {kind.__name__ for module in modules for kind in type(module).__mro__}
    named = [_WORDS.get(name, name) for name in _STRATEGIES if name in kinds][:1]
    named += [kind.__name__ for kind in type(optimizer).__mro__ if kind.__name__ in _SPLIT_STATE]
    return " + ".join(named)


def modules_training(optimizer: Any) -> list[Module]:
    """The modules that hold all that `optimizer` trains, whoever keeps them; those with the fewest parts first."""
    wanted = set(map(id, params_of(optimizer)))
    modules = [module for module in instances(Module) if "_parameters" in vars(module)]  # others are half made
    holding = [module for module in modules if wanted <= {id(param) for param in module.parameters()}]
    return sorted(holding, key=lambda module: sum(1 for _ in module.modules()))


def _row(name: str, param: Any) -> Row:
    whole = getattr(param, "_unpadded_unsharded_size", None)  # torch's flat parameter does not say so by its shape
    numel = param.numel() if whole is None else whole.numel()
    return [name, numel, str(param.dtype).removeprefix("torch."), numel * param.element_size(), held_bytes(param)]


def held_bytes(value: Any) -> int:
    """Bytes of a tensor, or of nested ones, that are here."""
    if isinstance(value, Mapping):
        return sum(held_bytes(part) for part in value.values())
    if isinstance(value, list | tuple):
        return sum(held_bytes(part) for part in value)
    if hasattr(value, "pieces"):  # TensorPieces
        return sum(held_bytes(tensor) for _, tensor in value.pieces)
    local = getattr(value, "_local_tensor", value)  # of a DTensor
    return local.numel() * local.element_size() if isinstance(local, Tensor) else 0


def folded(rows: Sequence[Row]) -> list[Row]:
    """`rows`; of more than UNITS_MAX, those of one module together, and of one further up, as far as needed."""
    parts = max((row[0].count(".") for row in rows), default=0)
    while len(rows) > UNITS_MAX and parts > 0:
        rows = list(_together(rows, parts))
        parts -= 1
    return [*rows[: UNITS_MAX - 1], _sum("others", rows[UNITS_MAX - 1 :])] if len(rows) > UNITS_MAX else [*rows]


def _together(rows: Iterable[Row], parts: int) -> Iterator[Row]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(".".join(row[0].split(".")[:parts]), []).append(row)
    return (_sum(name, same) for name, same in groups.items())


def _sum(name: str, rows: Sequence[Row]) -> Row:
    dtypes = ", ".join(dict.fromkeys(row[2] for row in rows))
    return [name, sum(row[1] for row in rows), dtypes, sum(row[3] for row in rows), sum(row[4] for row in rows)]
