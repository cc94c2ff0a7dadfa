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
import os
import re
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Mapping
from typing import Any, final

from lockstep.observe.call_site import call_site
from lockstep.observe.guard import Guard, error_of
from lockstep.observe.patches import Patches
from lockstep.observe.status import RUNNING
from lockstep.observe.torch_data import DataWatch
from lockstep.observe.torch_gradients import GradientFacts
from lockstep.observe.torch_import import when_imported
from lockstep.observe.torch_replicas import Model, ReplicaFacts

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
        when_imported("lockstep.parallel.ddp", watch.watch_our_models),
        when_imported("torch.distributed.distributed_c10d", watch.watch_end),
        when_imported("torch.distributed.algorithms.join", watch.watch_join),
        when_imported("torch.optim.optimizer", watch.watch_steps),
        when_imported("torch.optim.optimizer", watch.replicas.watch_steps),
        when_imported("torch.nn.modules.module", watch.replicas.watch_modules),
        when_imported("torch.autograd", watch.gradients.watch_backward),
        when_imported("torch.utils.data.dataloader", watch.data.watch_loaders),
        when_imported("torch.utils.data.distributed", watch.data.watch_samplers),
        when_imported("torch.serialization", watch.data.watch_saves),
        when_imported("safetensors.torch", watch.data.watch_safetensors),
        when_imported("torch._dynamo.trace_rules", _stay_out_of_graphs),
    ]
    guard.at_end.append(watch.finish)
    atexit.register(watch.end)

    def detach() -> None:
        for call in undo:
            call()
        guard.at_end.remove(watch.finish)
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


def _stay_out_of_graphs() -> None:
    """torch.compile is there: it shall take what watches for part of torch, and compile the model only."""
    rules = sys.modules["torch._dynamo.trace_rules"]
    getattr(rules, "add", lambda _: None)("lockstep.observe")


@final
class TrainingWatch:
    """Of one rank."""

    def __init__(self, guard: Guard, environ: Mapping[str, str]) -> None:
        self._guard = guard
        self._models: dict[int, Model] = {}  # by id of DDP's reducer, or of the optimizer
        self._wrapped = 0
        self._step = 0
        self._is_over = False
        self._patches = Patches()
        self.replicas = ReplicaFacts(guard, self._models, environ)
        self.data = DataWatch(guard, self._team)
        self.gradients = GradientFacts(guard, self._named)

    def close(self) -> None:
        """Put back what was replaced."""
        self._patches.undo()
        self.replicas.close()
        self.data.close()
        self.gradients.close()

    # ------------------------------------------------------------------ what is replaced

    def watch_models(self) -> None:
        """DistributedDataParallel is there."""
        from torch._C._distributed_c10d import Reducer
        from torch.nn.parallel.distributed import DistributedDataParallel

        self._patches.replace(DistributedDataParallel, "__init__", self._wrapping)
        self._patches.replace(Reducer, "_rebuild_buckets", self._forwarding)

    def watch_our_models(self) -> None:
        """Our own DistributedDataParallel is there, whose forwards do not go through torch's Reducer."""
        self._patches.replace(sys.modules["lockstep.parallel.ddp"].DistributedDataParallel, "__init__", self._wrapping)

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
        ranks = list(getattr(group, "global_ranks", ())) or dist.get_process_group_ranks(group)
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
        self._models[id(ddp.reducer)] = Model(ddp, team, "ddp", call_site(), named)
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

    def _begin_forward(self, model: Model) -> None:
        step = self._guard.recorder.step
        ddp: Any = model.module()
        if ddp.require_backward_grad_sync:
            model.synced += 1
            if model.synced & (model.synced - 1) == 0 and model.synced >= _MANY and not model.joins:
                model.told = [model.synced, model.unsynced, call_site()]
                self._guard.facts.tell(f"sync {model.team}", step, model.told)
        else:
            model.unsynced += 1
            model.unsynced_site = call_site()
        if model.synced + model.unsynced == 1 and (step < _FEW or step % _FEW == 0):
            frozen = model.frozen()
            value = [frozen[:_NAMED], not ddp.find_unused_parameters, call_site() if frozen else ""]
            self._guard.facts.tell(f"trained {model.team}", step, value)

    def _tell_unused(self, model: Model, text: str, *, is_alone: bool = False) -> None:
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
            self.replicas.lead(optimizer)
            self._end_step(before, step)

    def _end_step(self, before: int, step: int) -> None:
        for key, model in list(self._models.items()):
            if model.module() is None:
                del self._models[key]
            elif model.synced or model.unsynced:
                value = [model.synced, model.unsynced, model.unsynced_site]
                if value != model.told and not model.joins:
                    model.told = value
                    self._guard.facts.tell(f"sync {model.team}", before, value)
                model.synced, model.unsynced, model.unsynced_site = 0, 0, ""
                model.is_forwarded = True
            elif model.is_forwarded and not model.past and self.replicas.is_trained_by_leader(model):
                model.past = f"in step {before} a backward went past DistributedDataParallel, at {self.gradients.site}"
        if before == 0:
            for model in self._models.values():
                self._guard.facts.hide(f"model {model.team}")
        self.gradients.before_backward = self.replicas.plan(step) if self.replicas.is_due(step) else None

    def _named(self, optimizer: Any) -> list[tuple[str, Any]]:
        """The parameters of `optimizer`, by the names that models have for them."""
        from lockstep.observe.replica import plain_name

        names: dict[int, str] = {}
        for model in self._models.values():
            module = model.module()
            if module is not None:
                inside = module.module if model.kind == "ddp" else module
                names.update((id(param), plain_name(name)) for name, param in inside.named_parameters())
        params = [param for group in optimizer.param_groups for param in group["params"]]
        return [(names.get(id(param), f"parameter {index}"), param) for index, param in enumerate(params)]

    def _team(self) -> tuple[str, bool]:
        """The ranks that share a model with this one, and whether they may have other numbers of batches."""
        for model in self._models.values():
            if model.module() is not None:
                team = "hand" if model.kind == "hand" else model.team
                return team.rpartition("/")[0] or f"hand/{self._guard.world_size}", model.joins
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
        if not self._models and not self._guard.recorder.started:
            return
        pending, self.gradients.before_backward = self.gradients.before_backward, None
        if pending is None and self._step and self.replicas.is_on and self.replicas.checked != self._step:
            pending = self.replicas.plan(self._step, is_last=True)
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


def _failure() -> BaseException | None:
    """What is being raised, or has ended the program."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return None if isinstance(error, SystemExit) else error
