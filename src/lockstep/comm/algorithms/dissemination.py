"""A barrier in log2 W steps, rounded up, for every W.

In step k rank r tells rank r + 2**k, and hears from r - 2**k. Whoever has heard in steps 0 to k knows of the 2**(k + 1)
ranks before it, itself included, that they have come; so after the last step every rank knows of all.

Source: Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", IJPP 17 (1988).
"""

from __future__ import annotations

import torch

from lockstep.comm.algorithms.wire import Wire


def barrier(wire: Wire) -> None:
    """Return when every rank has called it."""
    W, rank = wire.world_size, wire.rank
    said, heard = torch.zeros(2, dtype=torch.uint8, device=wire.device).split(1)  # a byte: it says all by coming
    distance = 1
    while distance < W:
        wire.step(wire.send(said, (rank + distance) % W), wire.recv(heard, (rank - distance) % W))
        distance *= 2
    heard.item()  # on a GPU a step only orders the stream: this waits for it
