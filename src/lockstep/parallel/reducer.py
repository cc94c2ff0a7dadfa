"""Gradients averaged while backward runs: which run of autograd that is, where it begins, ends, or dies.

One backward, in order:
  begin    the first gradient of an output of the module arrives, or, where no output could be found, the first
           gradient of a parameter. A callback is left with autograd for the end.
  arrive   a parameter's last gradient of this run is accumulated: `GradExchange.place`.
  end      autograd is done: `GradExchange.finish`; or it let go of the callback, for something has raised: `give_up`.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.communicator import Communicator
from lockstep.errors import ConfigError, ReplicaError
from lockstep.observe.torch_steps import mark_averaged
from lockstep.parallel.backward import BackwardPass, Runs, when_autograd_ends
from lockstep.parallel.bucket import Bucket
from lockstep.parallel.grad_exchange import GradExchange
from lockstep.parallel.outputs import accumulates_gradients


class GradReducer:
    """Averages the gradients of the exchange's parameters over its ranks, during backward.

    Collective: construction of equal reducers on every rank, then equally many synchronised backward passes.
    Memory: one element of a bucket per parameter element, for as long as the reducer lives.
    Source: Li et al. 2020, arXiv 2006.15704.
    """

    def __init__(self, exchange: GradExchange) -> None:
        self.exchange = exchange
        self.params = exchange.params
        mark_averaged(self.params)
        self.sync = True  # what `no_sync` switches off
        # `sync` as the last forward saw it; None: no forward since the last backward
        self.forward_sync: bool | None = None
        self._leaf_handles: list[Any] = []
        self._runs = Runs(self.params)
        self._warned = False
        # Hooks on the accumulating nodes, not on the parameters: they run after every hook that the user has put on a
        # parameter, so what such a hook does to the gradient is averaged too. The nodes live as long as we hold them.
        self._nodes = [torch.autograd.graph.get_gradient_edge(param).node for param in self.params]
        reducer: weakref.ref[GradReducer] = weakref.ref(self)
        self._handles = [
            node.register_hook(functools.partial(_grad_ready, reducer, i)) for i, node in enumerate(self._nodes)
        ]
        weakref.finalize(self, _remove, self._handles)

    @property
    def comm(self) -> Communicator:
        """Over whose ranks the mean is."""
        return self.exchange.comm

    # ------------------------------------------------------------------ what a module calls

    def remove(self) -> None:
        """Take the hooks off the parameters; gradients stay local from now on."""
        _remove(self._handles)

    def before_forward(self) -> None:
        """Clear what a backward that raised has left, and use the plan that was agreed on. Not collective."""
        _remove(self._leaf_handles)
        self._drop_dead_backward()
        self.exchange.settle()
        if self._runs.current is None:
            self.exchange.next_plan()

    def after_forward(self, outputs: Iterable[Tensor]) -> None:
        """Let the first gradient of any of `outputs`, which require one, begin the backward pass."""
        self.exchange.plans.refuse_moved(self.params, self.exchange.names, self.comm.rank)
        self.exchange.local.forward_begins()
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
        for bucket in self.exchange.buckets:
            if not bucket.sparse:
                bucket.renew()  # this rank's last gradients stay what they are
        self._runs.current = BackwardPass(sync=True, num_params=len(self.params))
        self._finish(self._runs.current, shadow=True)

    def reset_plan(self, comm: Communicator) -> None:
        """Start again from the first plan, over another group, in step with reducers that are new there."""
        if self.exchange.plan_stays:
            raise ConfigError("a ShardedOptimizer has shared out the parameters among the ranks of the old group")
        self.before_forward()
        self.exchange.start_again(comm)

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
        self.exchange.settle()
        current = BackwardPass(sync, len(self.params))
        current.is_backward = root is not None and accumulates_gradients(root)
        self._runs.current = current
        self.exchange.stats.backward_began()
        if sync:
            self.exchange.watch.begin()
        current.callback = when_autograd_ends(current, self._finish, self._died)

    # ------------------------------------------------------------------ arrive

    def _on_grad(self, index: int) -> None:
        current, exchange = self._runs.current, self.exchange
        if current is None or not current.is_running():
            if self.forward_sync is None:
                self._warn_local()
            self._begin(self.forward_sync is not None and (self.forward_sync or self.sync))
            current = self._runs.current
            assert current is not None
        exchange.used[index] = 1
        current.is_backward = True
        if not current.sync:
            return
        arrived = current.count_arrival(index)
        if exchange.expected is None or arrived < exchange.expected[index]:
            return
        if self._runs.is_placed_elsewhere(index):
            exchange.leave_to_other(current, index)
            return
        if current.placed[index]:
            exchange.expected = None
            raise ReplicaError(
                f"rank {self.comm.rank}: parameter {exchange.names[index]!r} got another gradient after its bucket was "
                "reduced: re-entrant checkpoints use it more often than in earlier steps. Use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or skip this step: the next one learns "
                "anew."
            )
        with torch.no_grad():
            exchange.place(current, index)

    # ------------------------------------------------------------------ end

    def _finish(self, current: BackwardPass, shadow: bool = False) -> None:
        if self._runs.current is not current:
            return
        self.forward_sync = None
        try:
            if shadow or (current.sync and current.is_backward):  # also where no parameter was reached: others wait
                self.exchange.finish(current, shadow)
            elif current.is_backward:
                self.exchange.local.backward_ended()
        finally:
            self._runs.current = None

    def _died(self, current: BackwardPass) -> None:
        if self._runs.current is current:
            self._give_up(current)

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
        self._runs.current = None
        self.forward_sync = None
        if current.sync and current.is_backward:
            self.exchange.give_up(current)
        else:
            self.exchange.reset()

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


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()
