"""Gradients averaged while backward runs: autograd's hooks fill buckets, full buckets go out, the end waits.

One backward, in order:
  begin    the first gradient of an output of the module arrives, or, where no output could be found, the first
           gradient of a parameter. A callback is left with autograd for the end.
  place    a parameter's gradient is final: it is scaled into its bucket and the bucket's view becomes `.grad`. Full
           buckets are launched, always in the order of the plan, so that every rank issues the same collectives.
  finish   autograd is done: buckets that lack gradients get what there is (zeros, or what earlier micro-steps left),
           the rest is launched, a small control message goes round, everything is waited for in launch order.

The control message says for each parameter how many ranks used it, and for each rank whether it gave up. So a
parameter that no rank used keeps its `.grad`, one that some rank used gets the mean everywhere, with no flag and no
walk of the graph; and a rank that raised in the middle of its backward makes the others raise PeerFailed instead of
handing out half a step.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Parameter

from lockstep.comm.communicator import Communicator
from lockstep.comm.op import DONE
from lockstep.errors import ConfigError, ReplicaError, TransportClosed
from lockstep.observe.gradients import GradientWatch
from lockstep.observe.torch_steps import mark_averaged
from lockstep.parallel.backward import BackwardPass, Runs
from lockstep.parallel.bucket import Bucket, Dense, Layout, no_entries
from lockstep.parallel.buckets import BUCKET_CAP_BYTES, FIRST_BUCKET_CAP_BYTES
from lockstep.parallel.comm_hooks import CommHook, Mean
from lockstep.parallel.control import ControlMessage, LocalSteps, Report
from lockstep.parallel.grad_plans import GradPlans, Plan, agreed_order
from lockstep.parallel.outputs import accumulates_gradients
from lockstep.parallel.stats import ReducerStats, bucket_data


class GradReducer:
    """Averages the gradients of `params` over the ranks of `comm`, during backward.

    Collective: construction of equal reducers on every rank, then equally many synchronised backward passes.
    Memory: one element of a bucket per parameter element, for as long as the reducer lives.
    Source: Li et al. 2020, arXiv 2006.15704.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        names: Sequence[str],
        comm: Communicator,
        *,
        caps_bytes: Sequence[int] = (FIRST_BUCKET_CAP_BYTES, BUCKET_CAP_BYTES),
        sparse: Iterable[int] = (),
        delayed: Iterable[int] = (),
        skip_unused: bool = False,
    ) -> None:
        self.comm = comm
        self.params = list(params)
        mark_averaged(self.params)
        self.names = list(names)
        self.hook: CommHook = Mean()
        self.sync = True  # what `no_sync` switches off
        # `sync` as the last forward saw it; None: no forward since the last backward
        self.forward_sync: bool | None = None
        self.divide_by = comm.world_size
        self.futures: list[torch.futures.Future[Any]] = []  # further work to end before backward returns
        self.stats = ReducerStats()
        self.watch = GradientWatch()
        self._local = LocalSteps(self.params)
        self.rebuilt = False
        self._sparse = frozenset(sparse)
        self._skip_unused = skip_unused
        self._plans = GradPlans(self.params, caps_bytes, self._sparse, frozenset(delayed))
        self._used = bytearray(len(self.params))  # parameters that got a gradient since the last synchronisation
        # How many gradients to wait for, learned from the first synchronised backward, which therefore launches nothing
        # before its end; None before it. More than one comes from re-entrant checkpoints that share a parameter.
        self._expected: list[int] | None = None
        self._unsettled = False  # a backward raised and left its buckets in flight; nobody reads their results
        self._told: ControlMessage | None = None  # what the other ranks were told about it
        self._new_plan: Plan | None = None
        self.plan_stays = False  # somebody has laid out parameters by it
        self._lay_out: Callable[[Sequence[int]], Layout] = Dense
        self._leaf_handles: list[Any] = []
        self._runs = Runs(self.params)
        self._warned = False
        self._build(self._plans.first())
        # Hooks on the accumulating nodes, not on the parameters: they run after every hook that the user has put on a
        # parameter, so what such a hook does to the gradient is averaged too. The nodes live as long as we hold them.
        self._nodes = [torch.autograd.graph.get_gradient_edge(param).node for param in self.params]
        reducer: weakref.ref[GradReducer] = weakref.ref(self)
        self._handles = [
            node.register_hook(functools.partial(_grad_ready, reducer, i)) for i, node in enumerate(self._nodes)
        ]
        weakref.finalize(self, _remove, self._handles)

    # ------------------------------------------------------------------ what a module calls

    def remove(self) -> None:
        """Take the hooks off the parameters; gradients stay local from now on."""
        _remove(self._handles)

    def hand_over(self, hook: CommHook, lay_out: Callable[[Sequence[int]], Layout]) -> None:
        """Let `hook` reduce from now on; buckets stay as they are planned now, and are laid out by `lay_out`.

        Every rank, between two steps. Not collective.
        """
        self.before_forward()
        self.hook, self._lay_out, self.plan_stays = hook, lay_out, True
        self._build(self.plan)

    def before_forward(self) -> None:
        """Clear what a backward that raised has left, and use the plan that was agreed on. Not collective."""
        _remove(self._leaf_handles)
        self._drop_dead_backward()
        self._settle()
        if self._new_plan is not None and self._runs.current is None:
            plan, self._new_plan = self._new_plan, None
            self.rebuilt = True
            self._build(plan)

    def after_forward(self, outputs: Iterable[Tensor]) -> None:
        """Let the first gradient of any of `outputs`, which require one, begin the backward pass."""
        self._plans.refuse_moved(self.params, self.names, self.comm.rank)
        self._local.forward_begins()
        forward_sync = self.forward_sync = self.sync
        if not any(param.requires_grad for param in self.params):
            return

        def begin(reducer: Callable[[], GradReducer | None], _: Tensor) -> None:
            # Synchronise if the forward or the backward was under `sync`: torch looks at the forward only, and a flag
            # that is switched between the two then leaves gradients local without a word.
            if (target := reducer()) is not None:
                target._begin(forward_sync or target.sync, torch._C._current_autograd_node())

        for output in outputs:
            if output.grad_fn is None:
                # A parameter, whose node this reducer holds: a hook there that held the reducer would be a cycle that
                # goes through C++, where the garbage collector cannot see it. It outlives the step, its hook must not.
                self._leaf_handles.append(output.register_hook(functools.partial(begin, weakref.ref(self))))
            else:
                output.register_hook(functools.partial(begin, lambda: self))

    def shadow_backward(self) -> None:
        """Take part in one backward of the other ranks without a gradient of one's own (uneven inputs)."""
        self.before_forward()
        for bucket in self.buckets:
            if not bucket.sparse:
                bucket.renew()  # this rank's last gradients stay what they are
        shadow = BackwardPass(sync=True, num_params=len(self.params))
        self._runs.current = shadow
        self._finish(shadow, shadow=True)

    def reset_plan(self, comm: Communicator) -> None:
        """Start again from the first plan, over another group, in step with reducers that are new there."""
        if self.plan_stays:
            raise ConfigError("a ShardedOptimizer has shared out the parameters among the ranks of the old group")
        self.before_forward()
        self._expected = None
        self.stats.order = []
        self.comm = comm
        self.divide_by = comm.world_size
        self.rebuilt = False
        self._new_plan = None
        self._build(self._plans.first())

    def logging_data(self, environ: Mapping[str, str]) -> dict[str, int | str]:
        """Sizes and times of buckets under the names of torch's DDP logging data."""
        sizes = [param.nbytes for param in self.params]
        dtypes = {str(param.dtype).removeprefix("torch.") for param in self.params}
        return self.stats.logging_data(environ) | bucket_data(self.plan, sizes, dtypes, self.rebuilt)

    def _run_allreduce_hook(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        """The sum of a bucket as a future, for torch's hook that runs optimizers during backward."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self.comm.all_reduce(bucket.buffer(), label=f"bucket{bucket.index()}")
        future.set_result(bucket.buffer())
        return future

    # ------------------------------------------------------------------ begin

    def _begin(self, sync: bool, root: Any = None) -> None:
        current = self._runs.current
        if current is not None and current.is_running():
            current.sync = current.sync or sync
            return
        self._drop_dead_backward()
        self._settle()
        current = BackwardPass(sync, len(self.params))
        current.is_backward = root is not None and accumulates_gradients(root)

        def finish() -> None:
            self._finish(current)

        reducer: weakref.ref[GradReducer] = weakref.ref(self)
        current.callback = weakref.ref(finish, lambda _: _run_died(reducer, current))
        self._runs.current = current
        self.stats.backward_began()
        if sync:
            self.watch.begin()
        Variable._execution_engine.queue_callback(finish)  # type: ignore[attr-defined]

    # ------------------------------------------------------------------ place

    def _on_grad(self, index: int) -> None:
        current = self._runs.current
        if current is None or not current.is_running():
            if self.forward_sync is None:
                self._warn_local()
            self._begin(self.forward_sync is not None and (self.forward_sync or self.sync))
            current = self._runs.current
            assert current is not None
        self._used[index] = 1
        current.is_backward = True
        if not current.sync:
            return
        arrived = current.count_arrival(index)
        if self._expected is None or arrived < self._expected[index]:
            return
        if self._runs.is_placed_elsewhere(index):
            self._leave_to_other(current, index)
            return
        if current.placed[index]:
            self._expected = None
            raise ReplicaError(
                f"rank {self.comm.rank}: parameter {self.names[index]!r} got another gradient after its bucket was "
                "reduced: re-entrant checkpoints use it more often than in earlier steps. Use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or skip this step: the next one learns "
                "anew."
            )
        with torch.no_grad():
            self._place(current, index)

    def _leave_to_other(self, current: BackwardPass, index: int) -> None:
        """Another wrapper averages this gradient in the same backward; `.grad` is its bucket by now, and stays that."""
        bucket, slot = self._home[index]
        bucket.leave_out(slot)
        current.elsewhere.add(index)
        self._count_in(current, index)

    def _place(self, current: BackwardPass, index: int) -> None:
        bucket, slot = self._home[index]
        grad = self.params[index].grad
        if grad is None:
            return  # a hook of the user's took it away, an optimizer that steps during backward say
        if grad.is_sparse != bucket.sparse:
            expected, found = ("sparse", "dense") if bucket.sparse else ("dense", "sparse")
            raise ReplicaError(
                f"rank {self.comm.rank}: expected a {expected} gradient for parameter {self.names[index]!r}, got a "
                f"{found} one: set Embedding(sparse=True) before the model is wrapped, and use its weight nowhere else"
            )
        bucket.place(slot, grad, self._scale())
        self._count_in(current, index)

    def _count_in(self, current: BackwardPass, index: int) -> None:
        current.placed[index] = 1
        self._home[index][0].missing -= 1
        while current.launched < len(self.buckets) and self.buckets[current.launched].missing == 0:
            self._launch_next(current)

    def _launch_next(self, current: BackwardPass) -> None:
        bucket = self.buckets[current.launched]
        current.launched += 1
        if current.launched == 1:
            self.stats.mark("first bucket")
        if self._skip_unused and not any(self._used[member] for member in bucket.members):
            bucket.work = DONE
            return
        self.watch.look(bucket.buffer(), (self.names[i] for i in bucket.members), bucket.gradients)
        try:
            bucket.work = self.hook.launch(self.comm, bucket)
        except BaseException:
            current.hook_raised = True
            raise

    def _scale(self) -> float:
        return 1.0 if self.hook.divides else 1.0 / self.divide_by

    # ------------------------------------------------------------------ finish

    def _finish(self, current: BackwardPass, shadow: bool = False) -> None:
        if self._runs.current is not current:
            return
        self.forward_sync = None
        if not shadow and not (current.sync and current.is_backward):
            self._runs.current = None  # a backward that reached no parameter of ours still owes the others zeros
            if current.is_backward:
                self._local.backward_ended()
            return
        self.stats.mark("backward ended")
        try:
            with torch.no_grad():
                self._reduce(current, shadow)
        except BaseException:
            self._forget_gradients()
            raise
        finally:
            self._runs.current = None
            self._reset()
        self.stats.step_ended(current.arrivals.count(0))

    def _reduce(self, current: BackwardPass, shadow: bool) -> None:
        for i, arrived in enumerate(current.arrivals):
            if arrived and not current.placed[i]:  # the first backward waits until here with everything
                self._place(current, i)
        absent = [i for i in range(len(self.params)) if not current.placed[i]]
        untouched = {i: self._fill(i, shadow) for i in absent}
        while current.launched < len(self.buckets):
            self._launch_next(current)
        report = Report() if shadow else self._report(absent)
        early = None if self.hook.chains else ControlMessage(self.comm, self._used, report)
        for bucket in self.buckets:
            bucket.finish()
        control = early or ControlMessage(self.comm, self._used, report)
        control.work.wait()
        self._local.synchronised()
        control.verify(self.names, self.watch)
        for future in self.futures:
            future.wait()
        used_by = control.used_by() if absent or self._expected is None else []
        lacking = {i for i in absent if used_by[i] == 0}
        if not shadow:
            self._hand_out(current, untouched, lacking)
        self.hook.finished(self.buckets, lacking)
        self._learn_arrivals(current)
        if not self.stats.order and not self.plan_stays:
            self._learn_order(current, used_by)

    def _fill(self, index: int, shadow: bool) -> Tensor | None:
        """Put what a parameter without a new gradient has into its bucket: zeros, or what earlier micro-steps left.

        Returns the values to restore where the bucket's own memory is the parameter's `.grad`.
        """
        bucket, slot = self._home[index]
        grad = None if shadow else self.params[index].grad
        if bucket.sparse:
            bucket.place(slot, no_entries(self.params[index]) if grad is None else grad, self._scale())
            return None
        return bucket.fill(slot, grad, self._scale())

    def _hand_out(self, current: BackwardPass, untouched: dict[int, Tensor | None], lacking: set[int]) -> None:
        """A parameter used on some rank gets the mean as `.grad`; one used nowhere (`lacking`) keeps what it had.

        A dense gradient that was placed lies in its `.grad` already; a sparse mean is always a new tensor.
        """
        placed_sparse = [i for i in self._sparse if current.placed[i] and i not in current.elsewhere]
        for i in [*untouched, *placed_sparse]:
            bucket, slot = self._home[i]
            kept = untouched.get(i)
            if i not in lacking:
                bucket.hand_out(slot)
            elif kept is not None:
                bucket.views[slot].copy_(kept)

    def _report(self, absent: Sequence[int]) -> Report:
        frozen = [i for i in absent if not self.params[i].requires_grad]
        return Report(frozen=frozen, is_faulty=bool(self.watch.faults), local_steps=self._local.count)

    # ------------------------------------------------------------------ a backward that raised

    def _drop_dead_backward(self) -> None:
        current = self._runs.current
        if current is not None and not current.is_running():
            self._give_up(current)

    def abandon_step(self) -> None:
        """Tell the other ranks that this one has no backward for the step it has begun, because its forward raised."""
        if self.sync and self._runs.current is None and any(param.requires_grad for param in self.params):
            current = BackwardPass(sync=True, num_params=len(self.params))
            current.is_backward = True
            with torch.no_grad():
                self._give_up(current)

    def _give_up(self, current: BackwardPass) -> None:
        """This rank's step died of an exception. The others wait in it: launch what they wait for, and tell them."""
        self._runs.current = None
        self.forward_sync = None
        if not (current.sync and current.is_backward):
            self._reset()
            return
        self._forget_gradients()
        while current.launched < len(self.buckets) and not current.hook_raised:
            bucket = self.buckets[current.launched]
            if bucket.sparse:
                self._fill(bucket.members[0], shadow=True)
            self._launch_next(current)
        self._told = None if self.hook.chains else ControlMessage(self.comm, self._used, Report(gave_up=True))
        self._unsettled = True

    def _settle(self) -> None:
        """Wait for what a step that died has left in flight."""
        if self._unsettled:
            self._unsettled = False
            for bucket in self.buckets:
                if bucket.work is not None:  # None where a hook raised
                    bucket.finish()
            (self._told or ControlMessage(self.comm, self._used, Report(gave_up=True))).work.wait()
            self._told = None
            self._reset()

    def _forget_gradients(self) -> None:
        self.hook.abandoned()
        for param in self.params:
            param.grad = None

    def _reset(self) -> None:
        for bucket in self.buckets:
            bucket.reset()
        self.futures = []
        self._used[:] = bytes(len(self._used))

    # ------------------------------------------------------------------ plans

    def _build(self, plan: Plan) -> None:
        self.plan = plan
        last = len(plan) - 1
        self.buckets = [
            Bucket(
                k, group, self.params, group[0] in self._sparse, k == last, self._memory_for(group[0]), self._lay_out
            )
            for k, group in enumerate(plan)
        ]
        self._home = {i: (bucket, slot) for bucket in self.buckets for slot, i in enumerate(bucket.members)}

    def _memory_for(self, member: int) -> Callable[[int, torch.dtype], Tensor] | None:
        return self.comm.empty if self.params[member].device == self.comm.device else None

    def _learn_arrivals(self, current: BackwardPass) -> None:
        before = self._expected or [1] * len(self.params)
        self._expected = [max(known, new) for known, new in zip(before, current.arrivals, strict=True)]

    def _learn_order(self, current: BackwardPass, used_by: list[int]) -> None:
        """After the first synchronised backward: plan buckets by what was ready when."""
        self.stats.order = agreed_order(self.comm, current.order, used_by)
        self._new_plan = self._plans.by_readiness(self.stats.order)

    def _warn_local(self) -> None:
        if not self._warned and not self._runs.are_shared():
            self._warned = True
            warnings.warn(
                "a backward pass reached parameters of a DistributedDataParallel module without a forward through it: "
                "these gradients stay local to this rank. Call the wrapper, not its .module.",
                RuntimeWarning,
                stacklevel=2,
            )


def _grad_ready(reducer: weakref.ref[GradReducer], index: int, _inputs: Any, _outputs: Any) -> None:
    target = reducer()
    if target is not None:
        target._on_grad(index)


def _run_died(reducer: weakref.ref[GradReducer], current: BackwardPass) -> None:
    """Autograd let go of the end callback: it has run (then nothing is left to do), or an exception ended the run."""
    target = reducer()
    if target is not None and target._runs.current is current:
        with torch.no_grad(), contextlib.suppress(TransportClosed):  # closed: nobody is left to be told
            target._give_up(current)


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()
