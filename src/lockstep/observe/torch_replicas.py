"""What a rank of a stock torch program holds of its models, told as facts every so many steps, and who wrote it where.

Nothing is computed that the program could notice. What was looked at is digests: which line made two of them differ
nobody has seen; so the lines are told from which the model was wrapped, loaded and stepped, by each rank its own.
"""

from __future__ import annotations

import math
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from lockstep.observe.call_site import call_site
from lockstep.observe.followed_model import Model, Signs
from lockstep.observe.guard import Guard
from lockstep.observe.patches import Patches, around
from lockstep.observe.replica_diff import SIGNS, fold
from lockstep.observe.settings import REPLICA_EVERY, GuardSettings
from lockstep.observe.torch_optimizers import params_of
from lockstep.observe.wording import step_after

_SOON, _EVERY = 8, 128  # steps: from the first comparison to the second, and from one to the next
_SHARE = 0.003  # of the time may go into comparing replicas
_NAMED = 2  # buffers in a fact
_FEW_ELEMENTS = 256  # stand for all of a parameter: another seed changes any of them


@final
class ReplicaFacts:
    """Of one rank: of its `models`, by id of what averages or trains them."""

    def __init__(self, guard: Guard, models: dict[int, Model], environ: Mapping[str, str], patches: Patches) -> None:
        self._guard, self._models, self._patches = guard, models, patches
        GuardSettings.of(environ)  # refuses what the variable cannot be
        text = environ.get(REPLICA_EVERY, "")
        self._is_fixed = bool(text)  # it was asked for
        self.is_on = text != "0"
        self.stride = int(text or _SOON)  # steps from one comparison to the next
        self.checked = 0  # the last step that was
        self._began_s = 0.0
        self.leader: Callable[[], Any] = lambda: None  # the optimizer that counts the steps, on all ranks
        self._led_from = ""  # where that was made: it may be gone at the end
        self.before_load: Callable[[], None] = lambda: None  # called before a model that is followed is overwritten
        self._stepped_at = ""
        self._made: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # where, by optimizer
        self._loaded: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # by module or optimizer
        # by optimizer: digests of its parameters when it was made; a module of those that no other module has
        self._starts: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()
        self._loose: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._followed = 0  # models without DDP so far

    def watch(self) -> None:
        """What is made and loaded, from torch's import on."""
        self._patches.replace_in("torch.optim.optimizer", "Optimizer", "__init__", around(self._make))
        self._patches.replace_in("torch.optim.optimizer", "Optimizer", "load_state_dict", around(self._load))
        self._patches.replace_in("torch.nn.modules.module", "Module", "load_state_dict", around(self._load))

    def _make(self, old: Callable[..., None], /, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        old(optimizer, *args, **kwargs)
        self._made[optimizer] = call_site()
        if self._guard.world_size > 1:
            self._starts[optimizer] = _starts(optimizer)

    def _load(self, old: Callable[..., Any], /, owner: Any, *args: Any, **kwargs: Any) -> Any:
        if any(owner in self._parts(model) for model in self._models.values()):
            self.before_load()
        self._loaded.pop(owner, None)  # the last one is the last of all
        self._loaded[owner] = f"load_state_dict() at {call_site()}, in {step_after(self._guard.recorder.step)}"
        return old(owner, *args, **kwargs)

    # ------------------------------------------------------------------ when

    def lead(self, optimizer: Any) -> None:
        """From now on this is the optimizer that counts the steps."""
        self.leader = weakref.ref(optimizer)
        self._led_from = self._made.get(optimizer, "")

    def trainer(self, model: Model) -> Any:
        """The optimizer that has all of it; None where several have a part each."""
        found = self.trainers(model)
        return found[0] if len(found) == 1 else None

    def trainers(self, model: Model) -> list[Any]:
        """The optimizer that has all of it, or the newest of those that have it together; none where some is missing:

        then each rank may have another part.
        """
        module, made = model.module(), [*self._made]
        wanted = set() if module is None else {id(param) for param in module.parameters() if param.requires_grad}
        within, found = {id(getattr(one, "optim", None)) for one in made}, []
        for optimizer in (self.leader(), *reversed(made)) if wanted else ():
            if optimizer is not None and wanted <= set(map(id, params_of(optimizer))):
                return [optimizer]
        for optimizer in reversed(made):
            if id(optimizer) not in within and wanted & (trained := set(map(id, params_of(optimizer)))):
                found.append(optimizer)
                wanted -= trained
        return [] if wanted else found

    def is_trained_by_leader(self, model: Model) -> bool:
        """Whether the leading optimizer has all of it, or is the part of another that has."""
        leader, trainer = self.leader(), self.trainer(model)
        return leader is not None and (trainer is leader or getattr(trainer, "optim", None) is leader)

    def due_after(self, step: int) -> float:
        """The first step after `step` that is to be compared."""
        return (step // self.stride + 1) * self.stride if self.is_on else math.inf

    def plan(self, step: int, *, is_last: bool = False) -> Callable[[], None]:
        """The check after `step`, to be done when the next backward begins, or at the end: then what a program does to
        parameters after its optimizer, as a sharded one does, has been done. Now or never there are the gradients, and
        FSDP's pieces: its forward puts whole parameters in their place.
        """
        began_s = time.perf_counter()
        self._began_s = self._began_s or began_s
        self._follow_by_hand()
        if not is_last:  # else the program is at its end
            self._stepped_at = call_site()
        for model in self._models.values():
            starts = {} if (trainer := self.trainer(model)) is None else self._starts.get(trainer, {})
            model.signs = {} if model.is_averaged else _signs(model.module(), starts, self._guard.rank)
        spent_s = time.perf_counter() - began_s
        if any(model.kind == "pieces" for model in self._models.values()):
            self._check(step, spent_s)
            return lambda: None
        return lambda: self._check(step, spent_s)

    def _check(self, step: int, spent_s: float) -> None:
        """Tell what the replicas hold after `step`, and how seldom that may be done to stay cheap."""
        began_s = time.perf_counter()
        for model in self._models.values():
            if model.module() is not None and not model.joins and not model.is_another:
                self._tell_lines(model)
                self._tell(model, step + model.is_later)
        spent_s += time.perf_counter() - began_s
        steps = step - max(self.checked, 1)
        if steps > 0 and not self._is_fixed:
            step_s = max(began_s - self._began_s, 1e-6) / steps
            times = max(0, math.ceil(math.log2(spent_s / (_SHARE * _EVERY * step_s)))) if step >= _EVERY else 0
            self.stride = _EVERY << times  # until then all ranks compare after the same steps, later after some
        self.checked, self._began_s = step, time.perf_counter()

    # ------------------------------------------------------------------ what

    def _parts(self, model: Model) -> set[Any]:
        module = model.module()
        return set() if module is None else {self.leader(), *self.trainers(model), *module.modules()}

    def _tell_lines(self, model: Model) -> None:
        parts = self._parts(model)
        loaded = [text for owner, text in self._loaded.items() if owner in parts]
        lines = {
            "wrapped": model.site and f"wrapped at {model.site}",
            "made": self._led_from and f"optimizer made at {self._led_from}",
            "loaded": loaded[-1] if loaded else "",
            "past": model.past,
            "step": self._stepped_at and f"optimizer.step() at {self._stepped_at}",
        }
        if trainers := self.trainers(model):
            sites = dict.fromkeys(filter(None, map(self._made.get, reversed(trainers))))
            lines["made"] = f"optimizer made at {' and '.join(sites)}" if sites else ""
            lines["step"] = lines["step"] if self.is_trained_by_leader(model) or len(trainers) > 1 else ""
        self._guard.facts.tell(f"lines {model.place}", "now", {key: text for key, text in lines.items() if text})

    def _tell(self, model: Model, step: int) -> None:
        from lockstep.observe.replica import BUFFER, replica_entries

        module: Any = model.module()
        # once the leader has gone, as one may later on another rank, no optimizer there is need be that of the others
        entries = replica_entries(module, self.trainers(model) if self.leader() is not None else None)
        keeps_own = model.kind == "ddp" and not getattr(module, "broadcast_buffers", True)
        if not keeps_own:  # DDP takes rank 0's in the next forward
            entries = [entry for entry in entries if not entry.what.startswith(BUFFER)]
        before, model.buffers = model.buffers, {e.what: e.value for e in entries if e.what.startswith(BUFFER)}
        model.moving |= {what for what, value in model.buffers.items() if before.get(what, value) != value}
        named = [entry for entry in entries if before or not entry.what.startswith(BUFFER)]
        compared = [entry._replace(is_moving=entry.what in model.moving) for entry in named]
        kind = "hook" if model.kind == "ddp" and not model.is_averaged else model.kind
        words = fold(compared)
        while words and not any(words[-2:]):
            del words[-2:]
        moving = [what.removeprefix(BUFFER) for what in sorted(model.moving, reverse=True)]  # BatchNorm's counter last
        gradients = [sign[0] for sign in model.signs.values()]
        digest = f"{zlib.crc32(repr(gradients).encode()):08x}" if gradients else ""
        value, signs = [words, kind, digest, moving[:_NAMED] if keeps_own else []], [SIGNS, model.signs, [], False]
        self._guard.facts.tell(f"replica {model.place}", step, value, lambda: [*compared, signs], can_wait=True)

    def _follow_by_hand(self) -> None:
        """What the leading optimizer trains without DDP: a model, or what is in none, or not in the one that is."""
        import torch

        from lockstep.observe.layout import modules_training
        from lockstep.observe.replica import is_flat

        optimizer, everybody = self.leader(), range(self._guard.world_size)
        if optimizer is None or id(optimizer) in self._models:
            return
        known = {id(p) for one in self._models.values() for p in getattr(one.module(), "parameters", tuple)()}
        groups = enumerate(optimizer.param_groups)
        listed = [(f"{at} of group {n}", p) for n, group in groups for at, p in enumerate(group["params"])]
        loose = {name: param for name, param in listed if id(param) not in known}
        if not loose:
            return
        is_beside = any(one.kind == "ddp" and f"/{len(everybody)}/" in one.team for one in self._models.values())
        holding = [] if is_beside else modules_training(optimizer)
        module = next(filter(is_flat, holding), holding[0] if holding else None)  # what it has cut only FSDP can tell
        if module is None:
            module = self._loose[optimizer] = torch.nn.Module()
            module._parameters.update(loose)
        is_cut = is_flat(module) and not getattr(module, "_ignored_params", ())
        ranks = everybody if is_cut else _cut_over([*module.parameters()], everybody)
        is_beside |= any(len(_cut_over([param], ())) == len(everybody) for param in loose.values())
        kind = "pieces" if ranks else "loose" if is_beside else "hand"
        named = () if ranks else [*module.named_parameters()]  # FSDP moves its pieces about
        place = f"{zlib.crc32(repr(ranks).encode()):08x}" if 0 < len(ranks) < len(everybody) else "0"
        team, self._followed = f"{place}/{len(ranks or everybody)}/{self._followed}", self._followed + 1
        self._models[id(optimizer)] = Model(module, team, kind, named=named)


def _cut_over(params: Sequence[Any], everybody: Sequence[int]) -> Sequence[int]:
    """The ranks that hold a piece of each of `params`, and average its gradient: as FSDP, of either kind, has it."""
    cut = [param for param in params if not getattr(param, "_is_flat_param", False)]
    if any(getattr(param, "device_mesh", None) is None for param in cut):
        return ()
    first, *others = {tuple(sorted(param.device_mesh.mesh.flatten().tolist())) for param in cut} or {tuple(everybody)}
    return () if others else first


def _starts(optimizer: Any) -> dict[int, int]:
    """Digests of the first elements of what `optimizer` trains, by id, where it is whole and there."""
    from torch.nn import Parameter

    from lockstep.observe.tensor_digest import digests

    params = [param for param in params_of(optimizer) if type(param) is Parameter and not param.is_meta]
    found = digests([param.detach().reshape(-1)[:_FEW_ELEMENTS] for param in params])
    return {id(param): digest & 0xFFFF for param, digest in zip(params, found, strict=True)}


def _signs(module: Any, starts: Mapping[int, int], rank: int) -> Signs:
    from lockstep.observe.replica import plain_name, unwrapped
    from lockstep.observe.tensor_digest import digests

    named: list[Any] = [] if module is None else [*unwrapped(module).named_parameters()]
    held = [(n, p) for n, p in named if p.grad is not None and not hasattr(p.grad, "device_mesh")]  # each has its own
    found = zip(held, digests([param.grad for _, param in held]), strict=True)
    rows = ((name, [digest & 0xFFFFFFFF, starts.get(id(p), -rank), [*p.shape]]) for (name, p), digest in found)
    return {f"parameter {plain_name(name)!r}": row for name, row in rows}
