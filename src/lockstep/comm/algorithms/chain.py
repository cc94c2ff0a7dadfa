"""Broadcast along a chain, root, root + 1, ..., in segments: while one arrives, the one before goes on.

The last rank has everything after W - 2 + k steps for k segments: for a large tensor about the time of one message,
however many ranks there are. A tree needs that time log2 W times.

Source: van de Geijn and Watts, "SUMMA: scalable universal matrix multiplication algorithm", 1997 (pipelined broadcast).
"""

from __future__ import annotations

from torch import Tensor

from lockstep.comm.algorithms.wire import Wire

SEGMENT_BYTES = 256 * 1024


def broadcast(wire: Wire, tensor: Tensor, root: int, segment_bytes: int = SEGMENT_BYTES) -> None:
    """Every rank's `tensor` [n] becomes rank `root`'s."""
    W = wire.world_size
    place = (wire.rank - root) % W
    segments = tensor.split(max(1, segment_bytes // tensor.element_size()))  # an empty tensor is one empty segment
    for step in range(len(segments) + 1):
        messages = []
        if place > 0 and step < len(segments):
            messages.append(wire.recv(segments[step], (wire.rank - 1) % W, f"segment {step}"))
        if place < W - 1 and step > 0:
            messages.append(wire.send(segments[step - 1], (wire.rank + 1) % W, f"segment {step - 1}"))
        if messages:
            wire.step(*messages)
