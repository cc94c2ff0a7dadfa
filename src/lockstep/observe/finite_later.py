"""Whether numbers on a CUDA device are finite, known a moment later: neither the program nor its stream waits for it.

The device works it out behind what the program has queued, and writes the answer into memory of the host. Looking there
calls nothing of CUDA: a query of an event would break the graph that another thread captures at that moment. A device
that hangs or has failed leaves the answer open.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import final

import torch
from torch import Tensor

from lockstep.observe.gradients import values_of
from lockstep.observe.torch_optimizers import Seen

_OPEN = 2  # neither False nor True


@final
class FiniteLater:
    """One question at a time. Whose stream computes the numbers asks; any thread may look at the answer."""

    def __init__(self) -> None:
        self._answer = host_number()

    def ask(self, numbers: Sequence[Tensor]) -> None:
        """Whether all of `numbers`, which are on one device, are finite."""
        self._answer.fill_(_OPEN)
        answer = torch.cat([number.reshape(-1) for number in numbers]).isfinite().all()
        self._answer.copy_(answer.to(torch.uint8), non_blocking=True)

    def answer(self) -> bool | None:
        """None until the device has come so far."""
        value = self._answer.item()
        return None if value == _OPEN else bool(value)


def is_capturing() -> bool:
    """Whether what this thread computes goes into a CUDA graph, instead of being computed."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def host_number() -> Tensor:
    """One that a device writes to by itself."""
    return torch.full((), _OPEN, dtype=torch.uint8, pin_memory=True)


@torch.no_grad()
def numbers_of(seen: Seen, means: Sequence[Tensor]) -> Seen:
    """`seen` as copies of single numbers, all on one device, which is not waited for; so nothing large is kept.

    A gradient's is finite if all of it is. means: the probes' gradients as they are applied.
    """
    step, losses, own, _ = seen
    device = (losses[0][0] if losses else own[0]).device
    losses = [loss for loss in losses if loss[0].device == device]
    own, means = ([values_of(one) for one in some if one.device == device] for some in (own, means))
    means = [mean for mean in means if mean.numel()]  # of a shard, which may have none of it
    norms = torch._foreach_norm([*own, *means], inf) if own or means else ()  # in one kernel
    numbers = [*torch.cat([one.reshape(1) for one in (*[loss for loss, _ in losses], *norms)]).unbind()]
    after, to = len(losses), len(losses) + len(own)
    sites = [site for _, site in losses]
    return step, [*zip(numbers, sites, strict=False)], numbers[after:to], numbers[to:]
