"""What DistributedDataParallel wraps and how its forward is called, told as facts: see `torch_training`.

Its parameters before torch looks at them; then, of each step, what was averaged, what is frozen, and what had no part
in the loss. And, where it is made, how a mesh lays out its ranks.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, final

from lockstep.observe.call_site import call_site
from lockstep.observe.followed_model import Model
from lockstep.observe.guard import Guard
from lockstep.observe.pace import PACE
from lockstep.observe.patches import Patches, around
from lockstep.observe.torch_backward import BACKWARDS
from lockstep.observe.torch_data import may_share_samples
from lockstep.observe.torch_groups import is_the_job
from lockstep.observe.torch_optimizers import params_of

_FEW = 10  # steps: all looked at, and then every tenth
_EXPLAIN_S = 1.0
_UNUSED = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")
_MANY = 4  # synchronised forwards of one step: that many are told before it ends, for it may not end
_NAMED = 20  # parameters, or ranks of a mesh, that a fact names


@final
class ModelFacts:
    """Of one rank: of its `models`, by id of DDP's reducer; others put theirs there by id of the optimizer."""

    def __init__(self, guard: Guard, models: dict[int, Model], patches: Patches) -> None:
        self._guard, self._models, self._patches = guard, models, patches
        self._wrapped = 0
        self._meshes = Counter[str]()  # made, by their ranks in any order

    def watch(self) -> None:
        """What is wrapped and called, from torch's import on; forwards of our own class go through no Reducer."""
        replace_in = self._patches.replace_in
        for module, is_torchs in (("torch.nn.parallel.distributed", True), ("lockstep.parallel.ddp", False)):
            replace_in(module, "DistributedDataParallel", "__init__", around(partial(self._wrap, is_torchs)))
        replace_in("torch.distributed", "Reducer", "_rebuild_buckets", self._forwarding)
        replace_in("torch.distributed.device_mesh", "DeviceMesh", "__init__", around(self._lay_out))

    # ------------------------------------------------------------------ when they are wrapped

    def _wrap(self, is_sent_by_cpp: bool, old: Callable[..., None], /, ddp: Any, *args: Any, **kwargs: Any) -> None:
        try:
            given = inspect.signature(old).bind(ddp, *args, **kwargs).arguments
        except TypeError:
            old(ddp, *args, **kwargs)  # raises it, with the name of the class
            raise
        team = self._team_of(given.get("process_group"), given.get("device_mesh"))
        if not team:
            old(ddp, *args, **kwargs)
            return
        self._describe(given["module"], team, _settings_in(given) if is_sent_by_cpp else ())
        try:
            old(ddp, *args, **kwargs)
        except Exception as error:
            self._explain(error)
            raise
        ignored = set(ddp.parameters_to_ignore)
        named = [(n, p) for n, p in ddp.module.named_parameters() if p.requires_grad and n not in ignored]
        self._models[id(ddp.reducer)] = Model(ddp, team, "ddp", call_site(), named)
        self._guard.recorder.clock.tail_team = team.rpartition("/")[0] * (f"/{self._guard.world_size}/" not in team)
        BACKWARDS.follow(ddp.module.parameters(), is_sent_by_cpp=is_sent_by_cpp)

    def _team_of(self, group: Any, mesh: Any) -> str:
        """A name for the ranks that average, in which the number of this model is; "" where they are not the job's."""
        import torch.distributed as dist

        if not is_the_job(self._guard):
            return ""
        if group is None and mesh is not None:
            if mesh.ndim != 1:
                return ""
            group = mesh.get_group(0)
        ranks = list(getattr(group, "global_ranks", ())) or dist.get_process_group_ranks(group)
        self._wrapped += 1
        return f"{zlib.crc32(repr(ranks).encode()):08x}/{len(ranks)}/{self._wrapped}"

    def _describe(self, module: Any, team: str, settings: Sequence[Sequence[Any]]) -> None:
        """Tell which parameters there are, and what else is sent, before torch looks at them in its own way."""
        from torch.nn.parameter import is_lazy

        from lockstep.observe.model_match import describe_model

        if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
            return
        rows = [*settings, *describe_model(module, getattr(module, "_ddp_params_and_buffers_to_ignore", ()))]
        digest = hashlib.blake2b(json.dumps(rows).encode(), digest_size=8).hexdigest()
        self._guard.facts.tell(f"model {team}", "wrapped", [digest, call_site()], lambda: rows)
        self._guard.facts.show(f"model {team}", "wrapped")
        self._guard.look_now()  # so it is known before torch sends anything: Gloo aborts a rank that gets too much

    def _explain(self, error: Exception) -> None:
        """Raise what the guards make of it, if they find something soon.  Raises: CommError, ReplicaError."""
        deadline = time.monotonic() + _EXPLAIN_S
        while (found := self._guard.look_now()) is None or not found.is_certain:
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
        raise found.error() from error

    def _lay_out(self, old: Callable[..., None], /, mesh: Any, *args: Any, **kwargs: Any) -> None:
        """DeviceMesh.__init__, which all ranks call in one order, as it makes groups. Not so of one dimension."""
        old(mesh, *args, **kwargs)
        is_cut = not kwargs.get("_init_backend", True) or kwargs.get("_root_mesh") is not None  # from another
        if is_cut or mesh.ndim < 2 or mesh.get_coordinate() is None or not is_the_job(self._guard):
            return
        ranks = mesh.mesh.flatten().tolist()
        team, digest = (f"{zlib.crc32(repr(them).encode()):08x}" for them in (sorted(ranks), ranks))
        order = ranks if len(ranks) <= _NAMED else f"{ranks[0]}, {ranks[1]} .. {ranks[-1]} (their order: {digest})"
        names = mesh.mesh_dim_names or map("dim {}".format, range(mesh.ndim))
        dims = ", ".join(f"{name}={size}" for name, size in zip(names, mesh.mesh.shape, strict=True))
        value = [f"({dims}) of ranks {order}", call_site()]
        self._guard.facts.tell(f"mesh {team}/{len(ranks)}", self._meshes[team], value)
        self._meshes[team] += 1

    # ------------------------------------------------------------------ when they are called

    def _forwarding(self, old: Callable[..., bool]) -> Callable[..., bool]:
        """Reducer._rebuild_buckets, which every forward calls that will have a backward."""
        models, recorder, pace = self._models, self._guard.recorder, PACE

        @functools.wraps(old)
        def _rebuild_buckets(reducer: Any) -> bool:
            model = models.get(id(reducer))
            ddp: Any = None if model is None else model.module()
            if model is not None and ddp is not None:
                step = recorder.step
                if pace.is_brief and ddp.require_backward_grad_sync and model.brief_after != step:
                    model.brief_after = step  # as a rule the only one of this step
                else:
                    self._forwarded(model, ddp, step)
            try:
                return old(reducer)
            except RuntimeError as error:
                if model is not None:
                    for is_alone in (False, True):
                        self._tell_unused(model, str(error), is_alone)
                        self._explain(error)
                raise

        return _rebuild_buckets

    def _forwarded(self, model: Model, ddp: Any, step: int) -> None:
        forwards, self._guard.motion.has_begun = model.forwards, True
        if PACE.is_brief:
            PACE.leave()
            forwards[0] += model.brief_after == step
        if ddp.require_backward_grad_sync:
            forwards[0] += 1
            if forwards[0] >= _MANY and forwards[0] & (forwards[0] - 1) == 0:
                self._tell_synced(model, step, call_site())
        else:
            forwards[1:] = forwards[1] + 1, call_site()
        if (step < _FEW or step % _FEW == 0 or PACE.until) and sum(forwards[:2]) == 1:
            self._tell_trained(model, step, not ddp.find_unused_parameters)

    def _tell_trained(self, model: Model, step: int, uses_all: bool) -> None:
        frozen = model.frozen()
        value = [frozen[:_NAMED], uses_all, call_site() if frozen else ""]
        self._guard.facts.tell(f"trained {model.team}", step, value)

    def _tell_synced(self, model: Model, step: int, site: str) -> None:
        value = [*model.forwards[:2], site]
        if not model.joins and value != model.told:
            model.told = value
            self._guard.facts.tell(f"sync {model.team}", step, value)

    def _tell_unused(self, model: Model, text: str, is_alone: bool) -> None:
        found = _UNUSED.search(text)
        if found is not None:
            indices = [int(word) for word in found[1].split()]
            frozen = model.frozen()
            names = [model.names[index] for index in indices if index < len(model.names)]
            names = [f"{name} (frozen since it was wrapped)" if name in frozen else name for name in names]
            value = [names[:_NAMED], is_alone, call_site()]
            self._guard.facts.tell(f"unused {model.team}", self._guard.recorder.step, value)

    # ------------------------------------------------------------------ when a step ends

    def end_step(self, step: int, model: Model) -> bool:
        """It was another one than the last for `model`: whether no forward was seen in it, unlike in others before."""
        is_gone, has_forward = model.module() is None, sum(model.forwards[:2]) > 0
        if step == 0 or is_gone or (has_forward and not model.is_forwarded):
            self._guard.facts.hide(f"model {model.team}")
        if is_gone:
            for key in [key for key, one in self._models.items() if one is model]:
                del self._models[key]
        elif has_forward:
            self._tell_synced(model, step, model.forwards[2])
            model.is_forwarded = True
        return model.is_forwarded and not (is_gone or has_forward)

    # ------------------------------------------------------------------ whom they are of

    def named(self, optimizer: Any) -> list[tuple[str, Any]]:
        """The parameters of `optimizer`, by the names that models have for them."""
        from lockstep.observe.layout import modules_training
        from lockstep.observe.replica import plain_name

        def names_in(modules: Iterable[Any]) -> dict[int, str]:
            return {id(param): plain_name(name) for inside in modules for name, param in inside.named_parameters()}

        pairs = [(model, model.module()) for model in tuple(self._models.values())]
        followed = [module.module if model.kind == "ddp" else module for model, module in pairs if module is not None]
        names = names_in(followed)
        params = params_of(optimizer)
        if not any(id(param) in names for param in params):  # no model has been followed so far
            names |= names_in(modules_training(optimizer)[:1])
        return [(names.get(id(param), f"parameter {index}"), param) for index, param in enumerate(params)]

    def team(self) -> tuple[str, bool, bool]:
        """The ranks that share a model with this one; may they have other numbers of batches, and the same samples?"""
        size = self._guard.world_size
        for model in tuple(self._models.values()):
            if (module := model.module()) is not None:
                team = "hand" if model.kind == "hand" else model.team
                return team.rpartition("/")[0] or f"hand/{size}", model.joins, may_share_samples(module, size)
        return f"hand/{size}", False, False


def _settings_in(given: Mapping[str, Any]) -> list[list[Any]]:
    """What torch's DDP sends in a step besides gradients, as rows of `describe_model`; nobody else compares it."""
    is_static, has_buffers = bool(given.get("static_graph")), next(given["module"].buffers(), None) is not None
    ways = [given.get(name) for name in ("forward_sync_buffers", "broadcast_buffers")] if has_buffers else []
    settings = {
        "static_graph": is_static,
        "find_unused_parameters": bool(given.get("find_unused_parameters")) and not is_static,
        "broadcast_buffers": bool(next((way for way in ways if way is not None), True)),
    }
    return [["setting", f"{name}={value}", [], "", False] for name, value in settings.items()]
