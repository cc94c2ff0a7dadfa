"""Which gradients share a bucket, and in which order the buckets go: by definition first, then by readiness."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import final

import torch
from torch.nn import Parameter

from lockstep.comm.communicator import Communicator
from lockstep.errors import ConfigError
from lockstep.parallel.buckets import GradSpec, first_plan, plan_buckets

Plan = list[tuple[int, ...]]  # for each bucket, in the order of their launch: places of its parameters


@final
class GradPlans:
    """The plans for one list of parameters: equal on all ranks that have equal parameters and are told equal orders."""

    def __init__(
        self, params: Sequence[Parameter], caps_bytes: Sequence[int], sparse: frozenset[int], delayed: frozenset[int]
    ) -> None:
        """sparse: each alone in its bucket. delayed: in buckets that come after all others."""
        self._caps_bytes = tuple(caps_bytes)
        self._delayed = delayed
        self._specs = [
            GradSpec(p.nbytes, (p.dtype, p.device, i in delayed), alone=i in sparse) for i, p in enumerate(params)
        ]

    def first(self) -> Plan:
        """The plan before anything is known of the backward."""
        return self._delayed_last(first_plan(self._specs, self._caps_bytes))

    def by_readiness(self, order: Sequence[int]) -> Plan:
        """The plan for gradients that become ready in this order."""
        return self._delayed_last(plan_buckets(self._specs, order, self._caps_bytes))

    def _delayed_last(self, plan: Plan) -> Plan:
        return sorted(plan, key=lambda members: members[0] in self._delayed)

    def refuse_moved(self, params: Sequence[Parameter], names: Sequence[str], rank: int) -> None:
        """Raises: ConfigError where parameters are not of the kind that was planned for."""
        if params and (params[0].dtype, params[0].device) != self._specs[0].kind[:2]:
            raise ConfigError(
                f"rank {rank}: parameter {names[0]!r} is now {params[0].dtype} on {params[0].device}; it was "
                f"{self._specs[0].kind[0]} on {self._specs[0].kind[1]} when the module was wrapped. Move or convert "
                "the module first, then wrap it."
            )


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
