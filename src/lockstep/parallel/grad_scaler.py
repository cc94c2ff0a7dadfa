"""torch.amp.GradScaler for gradients of which each rank has its own pieces."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, final

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.optim import Optimizer

from lockstep.comm.communicator import Communicator
from lockstep.parallel.grad_pieces import held_gradients, in_runs, is_plain


@final
class GradScaler(TorchGradScaler):
    """`torch.amp.GradScaler` whose ranks skip the same steps, so that scale and parameters stay those of one model.

    Only the rank that has a number which is not finite sees it; `unscale_`, or `step` without it, tells the ranks that
    have the other pieces. Takes every layout that `clip_grad_norm_` takes; where all gradients are plain it is torch's
    own. fp16 gradients are accepted where some are sharded, as torch's ShardedGradScaler accepts them.

    Collective: `unscale_` (or `step`), every rank that has pieces, also one without any gradient; it blocks.
    """

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale this rank's pieces in place; by device, 1.0 where any rank found a number that is not finite."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        held = held_gradients([param for param in params if not is_plain(param)])
        comms = dict.fromkeys(comm for lines in held for comm in lines)
        pieces = in_runs([piece for pieces in held.values() for piece in pieces])
        here = {"params": [*filter(is_plain, params), *map(_with_gradient, pieces)]}
        stand_in: Any = SimpleNamespace(param_groups=[here])  # what torch's scaler reads of an optimizer
        found = super()._unscale_grads_(stand_in, inv_scale, found_inf, allow_fp16 or bool(comms))
        if comms:
            found = found or {found_inf.device: found_inf.clone()}
            _agree(found.values(), comms)
        return found


def _with_gradient(piece: Tensor) -> Tensor:
    """A stand-in for a parameter whose gradient is `piece`."""
    stand_in = piece.detach()
    stand_in.grad = piece
    return stand_in


def _agree(found: Iterable[Tensor], comms: Iterable[Communicator]) -> None:
    """Let each of `found`, [] and 0 or 1, be the largest of all of them on all ranks of `comms`.

    One after the other spreads it over a grid of lines, and over a group together with groups inside of it.
    """
    flags = list(found)
    flag = torch.stack([one.to(flags[0].device) for one in flags]).amax(0)
    for comm in comms:
        flag = flag.to(comm.device)
        comm.all_reduce(flag, "max", label="scaler.found")
    for one in flags:
        one.copy_(flag)
