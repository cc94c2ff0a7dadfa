"""What gives a module its first values, on which random numbers, and how one sees what was written."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.observe.replica import plain_name

_RESETS = ("reset_parameters", "_reset_parameters")  # the second: MultiheadAttention, Transformer
_GENERATOR_IN_USE = threading.Lock()  # torch has one default generator per process: ranks that are threads take turns


class Initialiser(NamedTuple):
    """What may write into the tensors of the module `fqn` and of those below it."""

    fqn: str
    module: Module
    what: str
    run: Callable[[], object]


def initialisers_of(root: Module, init: Callable[[Module], object] | None) -> list[Initialiser]:
    """In the order in which they run, children first: the modules' own, then `init`."""
    found: list[Initialiser] = []
    modules = list(_children_first(root))
    for fqn, module, family in modules:
        what = next((name for name in _RESETS if callable(getattr(module, name, None))), None)
        # For torch's modules `_init_weights` is enough: transformers fills the weights that a file lacks with it alone.
        if what is not None and (family is None or not type(module).__module__.startswith("torch.nn")):
            found.append(Initialiser(fqn, module, what, getattr(module, what)))
        if family is not None:
            found.append(Initialiser(fqn, module, "_init_weights", partial(family._init_weights, module)))
    if init is not None:
        found += [Initialiser(fqn, module, "init", partial(init, module)) for fqn, module, _ in modules]
    return found


def _children_first(root: Module) -> Iterator[tuple[str, Module, Any]]:
    """(fqn, module, the Hugging Face model it is part of or None), every module once."""
    seen: set[int] = set()

    def walk(fqn: str, module: Module, family: Any) -> Iterator[tuple[str, Module, Any]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        if any(kind.__name__ == "PreTrainedModel" for kind in type(module).__mro__):
            family = module
        for name, child in module.named_children():
            yield from walk(f"{fqn}.{name}" if fqn else name, child, family)
        yield fqn, module, family

    return walk("", root, None)


def seed_of(seed: int, initialiser: Initialiser, owner: str) -> int:
    """Where the random numbers of `initialiser` begin when it fills the tensors of the module `owner`."""
    text = "/".join((str(seed), initialiser.what, plain_name(initialiser.fqn), plain_name(owner)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def drawn_seed() -> int:
    """A new one each time, of the default generator."""
    with _GENERATOR_IN_USE:  # else another rank's thread may put back what it was before
        return int(torch.randint(1 << 62, ()))


@contextlib.contextmanager
def random_from(number: int, device: torch.device) -> Iterator[None]:
    """Random numbers on the CPU and on `device` follow from `number`; afterwards the generators are as they were."""
    cuda = [device] if device.type == "cuda" else []
    with _GENERATOR_IN_USE, torch.random.fork_rng(cuda):
        torch.default_generator.manual_seed(number)
        for each in cuda:
            with torch.cuda.device(each):
                torch.cuda.manual_seed(number)
        yield


def storage_of(tensor: Tensor) -> int:
    """Which storage `tensor` has."""
    return tensor.untyped_storage()._cdata


@final
class Writes(TorchDispatchMode):
    """Notes the storages that operations write into. A version counter would miss writes through `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                for tensor in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(tensor, Tensor):
                        self.storages.add(storage_of(tensor))
        return func(*args, **kwargs)
