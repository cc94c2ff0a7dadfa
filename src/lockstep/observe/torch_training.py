"""The training checks for a program that is not ours: what stock DDP wraps, trains and averages, told as facts.

No collective of ours is sent: each rank tells digests in its status, and the guards compare them. Nothing is computed
that the program could notice. Everything here runs in the program's own thread, at the points where it calls torch.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import inspect
import json
import math
import os
import re
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from lockstep.errors import ConfigError
from lockstep.observe.call_site import call_site
from lockstep.observe.guard import Guard, error_of
from lockstep.observe.patches import Patches
from lockstep.observe.status import RUNNING
from lockstep.observe.torch_data import DataWatch
from lockstep.observe.torch_gradients import GradientFacts
from lockstep.observe.torch_import import when_imported

REPLICA_EVERY = "LOCKSTEP_REPLICA_EVERY"
_EVERY = 100  # steps
_SHARE = 0.003  # of the time may go into comparing replicas
_FEW = 10  # steps: all looked at, and then every tenth
_EXPLAIN_S, _MEET_S, _DISPUTE_S = 1.0, 0.5, 2.0
_UNUSED = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")
_MANY = 4  # synchronised forwards of one step: that many are told before it ends, for it may not end
_NAMED = 20  # parameters that a fact names
_END = "end"


def attach_training(guard: Guard) -> Callable[[], None]:
    """Let `guard` compare what the ranks train, from torch's import on; after `torch_watch.attach`. The result ends it.

    Raises: ConfigError where LOCKSTEP_REPLICA_EVERY is no number.
    """
    watch = TrainingWatch(guard, os.environ)
    undo = [
        when_imported("torch.nn.parallel.distributed", watch.watch_models),
        when_imported("torch.distributed.distributed_c10d", watch.watch_end),
        when_imported("torch.distributed.algorithms.join", watch.watch_join),
        when_imported("torch.optim.optimizer", watch.watch_steps),
        when_imported("torch.autograd", watch.gradients.watch_backward),
        when_imported("torch.utils.data.dataloader", watch.data.watch_loaders),
        when_imported("torch.utils.data.distributed", watch.data.watch_samplers),
        when_imported("torch.serialization", watch.data.watch_saves),
        when_imported("safetensors.torch", watch.data.watch_safetensors),
    ]
    atexit.register(watch.end)

    def detach() -> None:
        for call in undo:
            call()
        atexit.unregister(watch.end)
        watch.close()

    here = weakref.ref(watch)

    def forked() -> None:
        mine = here()
        if mine is not None:
            atexit.unregister(mine.end)
            mine.close()  # the facts are the parent's

    os.register_at_fork(after_in_child=forked)
    return detach


@final
class _Model:
    """One that DistributedDataParallel has wrapped, or that a program keeps equal by itself."""

    def __init__(self, module: Any, team: str, kind: str, named: Sequence[tuple[str, Any]] = ()) -> None:
        self.module = weakref.ref(module)
        self.team = team
        self.kind = kind  # "ddp", or "hand" without DDP
        self.names = [name for name, _ in named]  # of the parameters that DDP averages, in its order
        self._params = [weakref.ref(param) for _, param in named]
        self.synced = self.unsynced = 0  # forwards of this step
        self.site = ""  # of the last one in no_sync
        self.told: list[Any] = []  # these three, as they were told last
        self.buffers: dict[str, str] = {}  # as they were at the last check
        self.moving: set[str] = set()  # those that have changed
        self.gradients = ""  # digest, as the optimizer applied them; "" where DDP has averaged them

    @property
    def is_averaged(self) -> bool:
        """Whether DDP itself averages all gradients, so that the ranks cannot be meant to differ."""
        return self.kind == "ddp" and not getattr(self.module(), "_comm_hooks", ())

    def frozen(self) -> list[str]:
        """Names of the parameters that DDP averages and that are not trained any more."""
        params = [known() for known in self._params]
        return [n for n, p in zip(self.names, params, strict=True) if p is not None and not p.requires_grad]


@final
class TrainingWatch:
    """Of one rank."""

    def __init__(self, guard: Guard, environ: Mapping[str, str]) -> None:
        self._guard = guard
        self._every, self._is_fixed = _every(environ)
        self._models: dict[int, _Model] = {}  # by id of DDP's reducer, or of the optimizer
        self._leader: weakref.ref[Any] | None = None  # the optimizer that counts the steps, on all ranks
        self._wrapped = 0
        self._step = self._checked = 0
        self._stride = self._every
        self._began_s = 0.0
        self._is_over = False
        self._patches = Patches()
        self.data = DataWatch(guard, self._team)
        self.gradients = GradientFacts(guard, self._named)

    def close(self) -> None:
        """Put back what was replaced."""
        self._patches.undo()
        self.data.close()
        self.gradients.close()

    # ------------------------------------------------------------------ what is replaced

    def watch_models(self) -> None:
        """DistributedDataParallel is there."""
        from torch._C._distributed_c10d import Reducer
        from torch.nn.parallel.distributed import DistributedDataParallel

        self._patches.replace(DistributedDataParallel, "__init__", self._wrapping)
        self._patches.replace(Reducer, "_rebuild_buckets", self._forwarding)

    def watch_steps(self) -> None:
        """torch.optim is there."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._patches.add(register_optimizer_step_post_hook(lambda optimizer, *_: self._stepped(optimizer)).remove)
        self.gradients.watch_steps()

    def watch_end(self) -> None:
        """torch.distributed is there, and its groups will end."""
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        self._patches.replace(distributed_c10d, "destroy_process_group", self._ending)
        if hasattr(dist, "destroy_process_group"):  # else it takes it from there
            self._patches.replace(dist, "destroy_process_group", lambda _: distributed_c10d.destroy_process_group)

    def watch_join(self) -> None:
        """torch's Join is there: within it, ranks may have different numbers of steps."""
        from torch.distributed.algorithms.join import Join

        stack = contextlib.ExitStack()

        def entering(old: Callable[..., Any]) -> Callable[..., Any]:
            def enter(join: Any) -> Any:
                stack.enter_context(self._guard.activity("join"))
                return old(join)

            return enter

        def leaving(old: Callable[..., Any]) -> Callable[..., Any]:
            def leave(join: Any, *error: Any) -> Any:
                try:
                    return old(join, *error)
                finally:
                    stack.close()

            return leave

        self._patches.replace(Join, "__enter__", entering)
        self._patches.replace(Join, "__exit__", leaving)

    # ------------------------------------------------------------------ models

    def _wrapping(self, old: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(old)

        @functools.wraps(old)
        def init(ddp: Any, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(ddp, *args, **kwargs).arguments
            team = self._team_of(given.get("process_group"), given.get("device_mesh"))
            if team:
                self._describe(given["module"], team)
            try:
                old(ddp, *args, **kwargs)
            except Exception as error:
                if team:
                    self._explain(error)
                raise
            if team:
                self._follow(ddp, team)

        return init

    def _team_of(self, group: Any, mesh: Any) -> str:
        """A name for the ranks that average, in which the number of this model is; "" where they are not the job's."""
        import torch.distributed as dist

        mine = (self._guard.rank, self._guard.world_size)
        if not dist.is_initialized() or (dist.get_rank(), dist.get_world_size()) != mine:
            return ""
        if group is None and mesh is not None:
            if mesh.ndim != 1:
                return ""
            group = mesh.get_group(0)
        ranks = dist.get_process_group_ranks(group)
        self._wrapped += 1
        return f"{zlib.crc32(repr(ranks).encode()):08x}/{len(ranks)}/{self._wrapped}"

    def _describe(self, module: Any, team: str) -> None:
        """Tell which parameters there are, before torch looks at them in its own way."""
        from torch.nn.parameter import is_lazy

        from lockstep.observe.model_match import describe_model

        tensors = [*module.parameters(), *module.buffers()]
        if any(is_lazy(tensor) for tensor in tensors):
            return
        rows = describe_model(module, getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        digest = hashlib.blake2b(json.dumps(rows).encode(), digest_size=8).hexdigest()
        topic = f"model {team}"
        self._guard.facts.tell(topic, "wrapped", [digest, call_site()], lambda: rows)
        self._guard.facts.show(topic, "wrapped")

    def _follow(self, ddp: Any, team: str) -> None:
        ignored = set(ddp.parameters_to_ignore)
        named = [(n, param) for n, param in ddp.module.named_parameters() if param.requires_grad and n not in ignored]
        self._models[id(ddp.reducer)] = _Model(ddp, team, "ddp", named)
        self.gradients.follow(ddp.module.parameters())

    def _explain(self, error: Exception) -> None:
        """Raise what the guards make of it, if they find something soon.  Raises: CommError, ReplicaError."""
        deadline = time.monotonic() + _EXPLAIN_S
        while (found := self._guard.look_now()) is None or not found.is_certain:
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
        raise error_of(found) from error

    # ------------------------------------------------------------------ forwards

    def _forwarding(self, old: Callable[..., bool]) -> Callable[..., bool]:
        """Reducer._rebuild_buckets, which every forward calls that will have a backward."""

        @functools.wraps(old)
        def _rebuild_buckets(reducer: Any) -> bool:
            model = self._models.get(id(reducer))
            if model is None or model.module() is None:
                return old(reducer)
            self._begin_forward(model)
            try:
                return old(reducer)
            except RuntimeError as error:
                self._tell_unused(model, str(error))
                self._explain(error)
                self._tell_unused(model, str(error), is_alone=True)
                self._explain(error)
                raise

        return _rebuild_buckets

    def _begin_forward(self, model: _Model) -> None:
        step = self._guard.recorder.step
        ddp: Any = model.module()
        if ddp.require_backward_grad_sync:
            model.synced += 1
            if model.synced & (model.synced - 1) == 0 and model.synced >= _MANY and not _joins(model):
                model.told = [model.synced, model.unsynced, call_site()]
                self._guard.facts.tell(f"sync {model.team}", step, model.told)
        else:
            model.unsynced += 1
            model.site = call_site()
        if model.synced + model.unsynced == 1 and (step < _FEW or step % _FEW == 0):
            frozen = model.frozen()
            value = [frozen[:_NAMED], not ddp.find_unused_parameters, call_site() if frozen else ""]
            self._guard.facts.tell(f"trained {model.team}", step, value)

    def _tell_unused(self, model: _Model, text: str, *, is_alone: bool = False) -> None:
        found = _UNUSED.search(text)
        if found is not None:
            indices = [int(word) for word in found[1].split()]
            names = [model.names[index] for index in indices if index < len(model.names)]
            value = [names[:_NAMED], is_alone, call_site()]
            self._guard.facts.tell(f"unused {model.team}", self._guard.recorder.step, value)

    # ------------------------------------------------------------------ steps

    def _stepped(self, optimizer: Any) -> None:
        step = self._guard.recorder.step
        if step != self._step:
            before, self._step = self._step, step
            self._leader = weakref.ref(optimizer)
            self._end_step(before, step)

    def _end_step(self, before: int, step: int) -> None:
        for key, model in list(self._models.items()):
            if model.module() is None:
                del self._models[key]
            elif model.synced or model.unsynced:
                value = [model.synced, model.unsynced, model.site]
                if value != model.told and not _joins(model):
                    model.told = value
                    self._guard.facts.tell(f"sync {model.team}", before, value)
                model.synced, model.unsynced, model.site = 0, 0, ""
        if not self._began_s:
            for model in self._models.values():
                self._guard.facts.hide(f"model {model.team}")
            self._began_s = time.perf_counter()
        is_due = self._every and (self._checked == 0 or step % self._stride == 0)
        self.gradients.before_backward = self._plan_check(step) if is_due else None

    def _plan_check(self, step: int) -> Callable[[], None]:
        """The check after `step`. It is done when the next backward begins, or at the end: then whatever a program does
        to the parameters after its optimizer, as a sharded one does, has been done. The gradients are there only now.
        """
        began_s = time.perf_counter()
        if not self._models:
            self._follow_by_hand()
        for model in self._models.values():
            model.gradients = "" if model.is_averaged else _gradient_digest(model.module())
        spent_s = time.perf_counter() - began_s
        return lambda: self._check(step, spent_s)

    def _check(self, step: int, spent_s: float) -> None:
        """Tell what the replicas hold after `step`, and how seldom that may be done to stay cheap."""
        began_s = time.perf_counter()
        for model in self._models.values():
            if model.module() is not None and not _joins(model):
                self._tell_replica(model, step)
        spent_s += time.perf_counter() - began_s
        steps = step - max(self._checked, 1)
        if steps > 0 and not self._is_fixed:
            step_s = max(began_s - self._began_s, 1e-6) / steps
            self._stride = self._every << max(0, math.ceil(math.log2(spent_s / (_SHARE * self._every * step_s))))
        self._checked, self._began_s = step, time.perf_counter()

    def _tell_replica(self, model: _Model, step: int) -> None:
        from lockstep.observe.replica import BUFFER
        from lockstep.observe.replica_diff import fold

        module: Any = model.module()
        entries = self._entries(module)
        keeps_own = model.kind == "ddp" and not getattr(module, "broadcast_buffers", True)
        if not keeps_own:  # DDP takes rank 0's in the next forward
            entries = [entry for entry in entries if not entry.what.startswith(BUFFER)]
        before, model.buffers = model.buffers, {e.what: e.value for e in entries if e.what.startswith(BUFFER)}
        model.moving |= {what for what, value in model.buffers.items() if before.get(what, value) != value}
        named = [entry for entry in entries if before or not entry.what.startswith(BUFFER)]
        compared = [entry._replace(is_moving=entry.what in model.moving) for entry in named]
        kind = "ddp" if model.is_averaged else "hook" if model.kind == "ddp" else "hand"
        words = fold(compared)
        while words and not any(words[-2:]):
            del words[-2:]
        team = f"{model.kind} {model.team}" if model.kind == "hand" else model.team
        self._guard.facts.tell(f"replica {team}", step, [words, kind, model.gradients, keeps_own], lambda: compared)

    def _entries(self, module: Any) -> list[Any]:
        """With the state of the optimizer that trains all of `module`: where several do, each rank may have a part."""
        from lockstep.observe.replica import replica_entries

        optimizer = None if self._leader is None else self._leader()
        wanted = {id(param) for param in module.parameters() if param.requires_grad}
        has_all = optimizer is not None and wanted <= _trained_by(optimizer)
        return replica_entries(module, optimizer if has_all else None)

    def _follow_by_hand(self) -> None:
        """A program without DDP whose ranks have an optimizer each: the model that it trains."""
        optimizer = None if self._leader is None else self._leader()
        module = None if optimizer is None else _module_of(optimizer)
        if module is not None:
            self._models[id(optimizer)] = _Model(module, f"0/{self._guard.world_size}/0", "hand")

    def _named(self, optimizer: Any) -> list[tuple[str, Any]]:
        """The parameters of `optimizer`, by the names that models have for them."""
        names: dict[int, str] = {}
        for model in self._models.values():
            module = model.module()
            if module is not None:
                inside = module.module if model.kind == "ddp" else module
                names.update((id(param), name) for name, param in inside.named_parameters())
        params = [param for group in optimizer.param_groups for param in group["params"]]
        return [(names.get(id(param), f"parameter {index}"), param) for index, param in enumerate(params)]

    def _team(self) -> tuple[str, bool]:
        """The ranks that share a model with this one, and whether they may have other numbers of batches."""
        for model in self._models.values():
            if model.module() is not None:
                team = "hand" if model.kind == "hand" else model.team
                return team.rpartition("/")[0] or f"hand/{self._guard.world_size}", _joins(model)
        return f"hand/{self._guard.world_size}", False

    # ------------------------------------------------------------------ the end

    def end(self) -> None:
        """The program has come to its end, with its groups or without."""
        self.finish()
        self._give_up_if_failed()

    def _ending(self, old: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(old)
        def destroy_process_group(group: Any = None) -> None:
            if group is None:
                self.finish()
            self._give_up_if_failed()
            old(group)
            self._guard.raise_if_found()

        return destroy_process_group

    def _give_up_if_failed(self) -> None:
        """The end of a group waits for what is under way in it, to which the other ranks may never come."""
        found = self._guard.finding
        error = _failure() or (error_of(found) if found is not None and found.is_certain else None)
        if error is not None:
            self._guard.give_up(error)

    def finish(self) -> None:
        """Compare once more, when the program is done. Waits for the other ranks a little, where they are as far."""
        if self._is_over or _failure() is not None:
            return
        self._is_over = True
        self.data.finish()
        if not self._wrapped and not self._guard.recorder.started:
            return
        pending, self.gradients.before_backward = self.gradients.before_backward, None
        if pending is None and self._every and self._step and self._checked != self._step:
            pending = self._plan_check(self._step)
        if pending is not None:
            pending()
        facts = self._guard.facts
        facts.tell(_END, _END, self._step)
        deadline = time.monotonic() + _MEET_S
        latest = time.monotonic() + _DISPUTE_S
        while (found := self._guard.look_now()) is None or not found.is_certain:
            others = [sight.status for sight in facts.sights.values() if sight.status.state == RUNNING]
            have_met = len(facts.sights) == self._guard.world_size and all(_END in one.facts for one in others)
            if (have_met and not facts.is_disputed) or time.monotonic() > (latest if facts.is_disputed else deadline):
                return
            time.sleep(0.01)


def _every(environ: Mapping[str, str]) -> tuple[int, bool]:
    """After how many steps replicas are compared, and whether that was asked for."""
    text = environ.get(REPLICA_EVERY, "")
    if text and not text.isdecimal():
        raise ConfigError(f"{REPLICA_EVERY}={text!r}: give a number of steps, or 0 for never")
    return (int(text), True) if text else (_EVERY, False)


def _failure() -> BaseException | None:
    """What is being raised, or has ended the program."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return None if isinstance(error, SystemExit) else error


def _joins(model: _Model) -> bool:
    """Whether ranks may run out of batches at different times: then their steps do not belong together."""
    config = getattr(model.module(), "_join_config", None)
    return config is not None and config.enable


def _gradient_digest(module: Any) -> str:
    from lockstep.observe.tensor_digest import digests

    found = digests([] if module is None else [param.grad for param in module.parameters() if param.grad is not None])
    return f"{zlib.crc32(repr(found).encode()):08x}" if found else ""


def _trained_by(optimizer: Any) -> set[int]:
    """The ids of its parameters."""
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


def _module_of(optimizer: Any) -> Any:
    """The smallest module that holds all that `optimizer` trains, whoever keeps it; None where there is none."""
    from lockstep.observe.layout import modules_training

    return next(iter(modules_training(optimizer)), None)
