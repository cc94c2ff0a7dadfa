"""A model built on the meta device gets its memory and its first values: the same for every world size.

    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    for block in model.transformer.h:
        lockstep.fully_shard(block, mesh=comm)
    lockstep.fully_shard(model, mesh=comm)
    lockstep.materialize(model, seed=1)

One module's tensors are made whole at a time: its initialisers run on them, this rank keeps its part. Initialisers may
write into modules below them (GPT-2's attention scales its c_proj, MultiheadAttention clears its out_proj's bias), the
root's into the whole model. So which writes what is tried on meta tensors first, and an initialiser then runs once for
each module it writes to, with that module's tensors real and all others on the meta device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lockstep.comm.tensor_parts import give_memory, local_of, part_of
from lockstep.errors import ConfigError
from lockstep.parallel.initialisers import Initialiser, Writes, initialisers_of, random_from, seed_of, storage_of

_M = TypeVar("_M", bound=Module)


def materialize(
    module: _M,
    init: Callable[[Module], object] | None = None,
    *,
    seed: int = 0,
    device: torch.device | str | None = None,
    parameters: bool = True,
) -> _M:
    """Fill all parameters and buffers of `module` that are on the meta device; returns `module`.

    Values come from each module's own initialiser (`reset_parameters`, in a Hugging Face model its `_init_weights`),
    then from `init(module)`, for every module, children first, as by `Module.apply`: of tied parameters the last module
    decides. It is called once more, on meta tensors, to see what it writes, and once for each module it writes to.
    Random numbers are keyed by `seed` and the modules' names. What has values keeps them.
    `device`: None for that of the mesh, else the CPU. `parameters=False`: only buffers get values, and parameters NaN,
    for those who load them next. Not collective.
    Memory: beside the shards, at most one module's own tensors whole.
    Raises: ConfigError, which names the tensors that no initialiser writes, before anything is allocated where a run on
    the meta device can tell.
    """
    if torch.get_default_device().type == "meta":
        raise ConfigError('call materialize() after the block `with torch.device("meta")`, not in it')
    model = _MetaModel(module)
    if not model.owners:
        return module
    initialisers = initialisers_of(module, init)
    written = {each: model.written_by(each) for each in initialisers}
    required = model.required(parameters)
    _check_written(required, set().union(*written.values()))
    give_memory(module, device)
    if not parameters:
        model.fill_with_nan()
    for keys in model.owners.values():
        owned = [key for key in keys if parameters or key.is_buffer]
        if owned:
            done = model.fill(owned, [each for each in initialisers if not written[each].isdisjoint(owned)], seed)
            _check_written(required.intersection(owned), done)
    return module


class _Key(NamedTuple):
    """A tensor, by the first module that has it."""

    owner: str
    name: str
    is_buffer: bool

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}" if self.owner else self.name


@final
class _MetaModel:
    """The tensors of a model that were on the meta device, and what stands in their places while initialisers run."""

    def __init__(self, root: Module) -> None:
        self._modules = dict(root.named_modules())
        self.owners: dict[str, list[_Key]] = {}
        keys: dict[int, _Key] = {}
        for fqn, module in self._modules.items():
            _check_attributes(fqn, module)
            for name, tensor, is_buffer in _own_tensors(module):
                if tensor.is_meta and id(tensor) not in keys:
                    keys[id(tensor)] = _Key(fqn, name, is_buffer)
                    self.owners.setdefault(fqn, []).append(keys[id(tensor)])
        self._places = {
            module: [(name, is_buffer, keys.get(id(tensor))) for name, tensor, is_buffer in _own_tensors(module)]
            for module in self._modules.values()
        }

    def required(self, parameters: bool) -> set[_Key]:
        """What must get a value here; without parameters, the buffers that no file holds."""
        keys = {key for owned in self.owners.values() for key in owned}
        if parameters:
            return keys
        return {k for k in keys if k.is_buffer and k.name in self._modules[k.owner]._non_persistent_buffers_set}

    def fill_with_nan(self) -> None:
        """Make it seen where nothing is loaded later."""
        for key in (key for owned in self.owners.values() for key in owned):
            local = local_of(self._tensor(key))
            local.fill_(float("nan") if local.is_floating_point() else 0)

    def written_by(self, initialiser: Initialiser) -> set[_Key]:
        """What `initialiser` writes, tried on meta tensors. One that needs values counts for its own module's."""
        stand_ins: dict[_Key, Tensor] = {}
        try:
            with self._standing_in(initialiser.module, stand_ins), random_from(0, torch.device("cpu")):
                return self._run(initialiser, stand_ins)
        except RuntimeError:  # what torch raises where the value of a meta tensor is needed
            return set(self.owners.get(initialiser.fqn, ()))

    def fill(self, owned: Sequence[_Key], writers: Sequence[Initialiser], seed: int) -> set[_Key]:
        """Run `writers` on whole tensors in the places of `owned`, keep this rank's parts; returns what they wrote."""
        targets = {key: self._tensor(key) for key in owned}
        device = local_of(targets[owned[0]]).device
        whole = {key: _like(target, device) for key, target in targets.items()}
        done: set[_Key] = set()
        for writer in writers:
            stand_ins = dict(whole)
            number = seed_of(seed, writer, owned[0].owner)
            with self._standing_in(writer.module, stand_ins), random_from(number, device):
                done |= self._run(writer, stand_ins).intersection(owned)
            whole = {key: stand_ins[key] for key in owned}
        for key in done:
            if whole[key].shape != targets[key].shape:
                shapes = f"{tuple(whole[key].shape)}; before, it was {tuple(targets[key].shape)}"
                raise ConfigError(f"the initialiser of {key} gave it the shape {shapes}")
            local_of(targets[key]).copy_(whole[key].detach()[part_of(targets[key]).slices])
        return done

    def _tensor(self, key: _Key) -> Any:
        module = self._modules[key.owner]
        return (module._buffers if key.is_buffer else module._parameters)[key.name]

    @contextlib.contextmanager
    def _standing_in(self, top: Module, stand_ins: dict[_Key, Tensor]) -> Iterator[None]:
        """For a while `top` and the modules below it have `stand_ins`, and meta tensors for the rest, which join them.

        What already had a value is a meta tensor too: nothing writes into it.
        """
        before: list[tuple[dict[str, Any], str, Tensor]] = []
        others: dict[int, Tensor] = {}
        try:
            for module in top.modules():
                for name, is_buffer, key in self._places[module]:
                    table: dict[str, Any] = module._buffers if is_buffer else module._parameters
                    tensor = table[name]
                    before.append((table, name, tensor))
                    if key is None:
                        table[name] = others.setdefault(id(tensor), _like(tensor, "meta"))
                    else:
                        table[name] = stand_ins.setdefault(key, _like(tensor, "meta"))
            yield
        finally:
            for table, name, tensor in before:
                table[name] = tensor

    def _run(self, initialiser: Initialiser, stand_ins: dict[_Key, Tensor]) -> set[_Key]:
        """Run it; which of `stand_ins` it wrote into or replaced by others, which then are there in their stead."""
        before = {key: storage_of(tensor) for key, tensor in stand_ins.items()}
        with torch.no_grad(), Writes() as writes:
            initialiser.run()
        done: set[_Key] = set()
        for module in initialiser.module.modules():
            for name, is_buffer, key in self._places[module]:
                now = (module._buffers if is_buffer else module._parameters).get(name)
                if key is None or now is None:
                    continue
                if storage_of(now) != before[key] or before[key] in writes.storages:
                    done.add(key)
                    stand_ins[key] = now
        return done


def _check_attributes(fqn: str, module: Module) -> None:
    lost = [name for name, value in vars(module).items() if isinstance(value, Tensor) and value.is_meta]
    if lost:
        raise ConfigError(
            f"{fqn or type(module).__name__} has tensors on the meta device that are neither parameters nor buffers, "
            f"{', '.join(lost)}: nothing can give them memory; use register_buffer"
        )


def _own_tensors(module: Module) -> list[tuple[str, Tensor, bool]]:
    """(name, tensor, whether it is a buffer) of what the module itself has."""
    tables: tuple[tuple[dict[str, Any], bool], ...] = ((module._parameters, False), (module._buffers, True))
    return [(name, t, is_buffer) for table, is_buffer in tables for name, t in table.items() if t is not None]


def _like(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A whole plain tensor of the same kind."""
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return Parameter(whole, requires_grad=tensor.requires_grad) if isinstance(tensor, Parameter) else whole


def _check_written(required: set[_Key], written: set[_Key]) -> None:
    lost = sorted(str(key) for key in required - written)
    if lost:
        raise ConfigError(
            f"nothing initialises {', '.join(lost)}: give their modules a reset_parameters(), write them in "
            "init(module), or make a buffer with fixed values outside of the meta device"
        )
