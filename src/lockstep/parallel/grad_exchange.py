"""The ranks' side of a backward: gradients go into buckets, full buckets go out, all ranks get the means.

One backward, in order:
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
from collections.abc import Collection, Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep.comm.communicator import Communicator
from lockstep.comm.op import DONE
from lockstep.errors import CommError, ReplicaError
from lockstep.observe.gradients import GradientWatch
from lockstep.parallel.backward import BackwardPass
from lockstep.parallel.bucket import Bucket, no_entries
from lockstep.parallel.buckets import GradPlans, LayOut, Plan, starts_of
from lockstep.parallel.comm_hooks import CommHook, Mean
from lockstep.parallel.control import ControlMessage, LocalSteps, Report
from lockstep.parallel.stats import ReducerStats


@final
class GradExchange:
    """The buckets of `params`, and what is said about them between the ranks of `comm`.

    Collective: equal ones on every rank, then equally many backward passes, each with one `finish` or `give_up`.
    Memory: one element of a bucket per parameter element, for as long as this lives.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        names: Sequence[str],
        comm: Communicator,
        caps_bytes: Sequence[int],
        sparse: Iterable[int],
        delayed: Iterable[int],
        skip_unused: bool,
    ) -> None:
        self.params = list(params)
        self.names = list(names)
        self.comm = comm
        self.hook: CommHook = Mean()
        self.divide_by = comm.world_size
        self.futures: list[torch.futures.Future[Any]] = []  # further work to end before backward returns
        self.stats = ReducerStats()
        self.watch = GradientWatch()
        self.local = LocalSteps(self.params)
        self.used = bytearray(len(self.params))  # parameters that got a gradient since the last synchronisation
        # How many gradients to wait for, learned from the first synchronised backward, which therefore launches nothing
        # before its end; None before it. More than one comes from re-entrant checkpoints that share a parameter.
        self.expected: list[int] | None = None
        self.rebuilt = False
        self.plan_stays = False  # somebody has laid out parameters by it
        self._sparse = frozenset(sparse)
        self._skip_unused = skip_unused
        self._unsettled = False  # a backward raised and left its buckets in flight; nobody reads their results
        self._told: ControlMessage | None = None  # what the other ranks were told about it
        self._lay_out: LayOut = starts_of
        self.plans = GradPlans(self.params, caps_bytes, self._sparse, frozenset(delayed))
        self._new_plan: Plan | None = None
        self._build(self.plans.first())

    # ------------------------------------------------------------------ place

    def leave_to_other(self, current: BackwardPass, index: int) -> None:
        """Another wrapper averages this gradient in the same backward; `.grad` is its bucket by now, and stays that."""
        self._fill(index, shadow=True)  # zeros stand for it here
        current.elsewhere.add(index)
        self._count_in(current, index)

    def place(self, current: BackwardPass, index: int) -> None:
        """Put a gradient that is final into its bucket.  Raises: ReplicaError where it is sparse, or is not."""
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
        if self._skip_unused and not any(self.used[member] for member in bucket.members):
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

    def finish(self, current: BackwardPass, shadow: bool = False) -> None:
        """Reduce what is left and hand the means out.

        shadow: this rank has no gradients of its own, and takes none (uneven inputs).
        Raises: PeerFailed, ReplicaDrift, ModelMismatch, NonFiniteGradient, CommError; then there are no gradients.
        """
        self.stats.mark("backward ended")
        with torch.no_grad():
            try:
                untouched = self._launch_rest(current, shadow)
            except BaseException:
                with contextlib.suppress(CommError):  # nobody can be told, and what raised first says why
                    self.give_up(current)
                raise
            try:
                self._take_means(current, untouched, shadow)
            except BaseException:
                self._forget_gradients()
                raise
            finally:
                self.reset()
        self.stats.step_ended(current.arrivals.count(0))

    def _launch_rest(self, current: BackwardPass, shadow: bool) -> dict[int, Tensor | None]:
        """Returns the parameters that got no gradient, each with the values to restore, see `_fill`."""
        for i, arrived in enumerate(current.arrivals):
            if arrived and not current.placed[i]:  # the first backward waits until here with everything
                self.place(current, i)
        untouched = {i: self._fill(i, shadow) for i, is_placed in enumerate(current.placed) if not is_placed}
        while current.launched < len(self.buckets):
            self._launch_next(current)
        return untouched

    def _take_means(self, current: BackwardPass, untouched: dict[int, Tensor | None], shadow: bool) -> None:
        absent = list(untouched)
        report = Report()
        if not shadow:
            frozen = [i for i in absent if not self.params[i].requires_grad]
            report = Report(frozen=frozen, is_faulty=bool(self.watch.settle()), local_steps=self.local.count)
        early = None if self.hook.chains else ControlMessage(self.comm, self.used, report)
        for bucket in self.buckets:
            bucket.finish()
        control = early or ControlMessage(self.comm, self.used, report)
        control.work.wait()
        self.local.synchronised()
        control.verify(self.names, self.watch)
        for future in self.futures:
            future.wait()
        used_by = control.used_by() if absent or self.expected is None else []
        lacking = {i for i in absent if used_by[i] == 0}
        if not shadow:
            self._hand_out(current, untouched, lacking)
        self.hook.finished(self.buckets, lacking)
        before = self.expected or [1] * len(self.params)
        self.expected = [max(known, new) for known, new in zip(before, current.arrivals, strict=True)]
        if not self.stats.order and not self.plan_stays:  # plan buckets by what was ready when
            self.stats.order = agreed_order(self.comm, current.order, used_by)
            self._new_plan = self.plans.by_readiness(self.stats.order)

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

    # ------------------------------------------------------------------ a backward that raised

    def give_up(self, current: BackwardPass) -> None:
        """This rank's step died of an exception. The others wait in it: launch what they wait for, and tell them."""
        self._forget_gradients()
        while current.launched < len(self.buckets) and not current.hook_raised:
            bucket = self.buckets[current.launched]
            if bucket.sparse:
                self._fill(bucket.members[0], shadow=True)
            self._launch_next(current)
        self._told = None if self.hook.chains else ControlMessage(self.comm, self.used, Report(gave_up=True))
        self._unsettled = True

    def settle(self) -> None:
        """Wait for what a step that died has left in flight."""
        if self._unsettled:
            self._unsettled = False
            for bucket in self.buckets:
                if bucket.work is not None:  # None where a hook raised
                    bucket.finish()
            (self._told or ControlMessage(self.comm, self.used, Report(gave_up=True))).work.wait()
            self._told = None
            self.reset()

    def _forget_gradients(self) -> None:
        self.hook.abandoned()
        for param in self.params:
            param.grad = None

    def reset(self) -> None:
        """Nothing of a backward is left."""
        for bucket in self.buckets:
            bucket.reset()
        self.futures = []
        self.used[:] = bytes(len(self.used))

    # ------------------------------------------------------------------ plans

    def next_plan(self) -> None:
        """Use the plan that was agreed on, if there is a new one. Not collective, but on all ranks."""
        if self._new_plan is not None:
            plan, self._new_plan = self._new_plan, None
            self.rebuilt = True
            self._build(plan)

    def hand_over(self, hook: CommHook, lay_out: LayOut) -> None:
        """Let `hook` reduce from now on; buckets stay as they are planned now, and are laid out by `lay_out`.

        Every rank, between two steps. Not collective.
        """
        self.hook, self._lay_out, self.plan_stays = hook, lay_out, True
        self._build(self.plan)

    def start_again(self, comm: Communicator) -> None:
        """From the first plan, over another group, in step with those that are new there."""
        self.comm = comm
        self.divide_by = comm.world_size
        self.expected, self.stats.order, self.rebuilt, self._new_plan = None, [], False, None
        self._build(self.plans.first())

    def _build(self, plan: Plan) -> None:
        self.plan = plan
        last = len(plan) - 1
        self.buckets: list[Bucket] = []
        for k, group in enumerate(plan):
            empty = self.comm.empty if self.params[group[0]].device == self.comm.device else None
            is_sparse = group[0] in self._sparse
            self.buckets.append(Bucket(k, group, self.params, is_sparse, k == last, empty, self._lay_out))
        self._home = {i: (bucket, slot) for bucket in self.buckets for slot, i in enumerate(bucket.members)}


def agreed_order(comm: Communicator, order: Collection[int], used_by: Sequence[int]) -> list[int]:
    """Rank 0's order of readiness, on every rank. used_by: for each parameter, how many ranks used it.

    What some ranks did not use comes last: their buckets have to wait for the end of backward. Collective.
    """
    late = [i for i in range(len(used_by) - 1, -1, -1) if i not in order]
    seen = sorted([*order, *late], key=lambda i: -used_by[i])
    agreed = torch.tensor(seen, dtype=torch.int64, device=comm.device)
    if comm.world_size > 1:
        comm.broadcast(agreed, 0, label="ddp.order")
    return agreed.tolist()
