"""All-to-all in W - 1 steps: in step d every rank sends to the rank d after it and receives from the one d before.

So in each step every rank has one message on its way out and one on its way in, and no two senders meet at a receiver;
all W - 1 messages at once would all meet at the same rank first.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005), 4.3.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lockstep.comm.algorithms.wire import Wire


def all_to_all(wire: Wire, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """`outputs[r]` becomes what rank r has in `inputs[rank]`.

    Shapes: both W x [n_r], any sizes; `inputs[r]` is as long as `outputs[rank]` of rank r.
    """
    W, rank = wire.world_size, wire.rank
    outputs[rank].copy_(inputs[rank])
    for distance in range(1, W):
        to, source = (rank + distance) % W, (rank - distance) % W
        wire.step(wire.send(inputs[to], to), wire.recv(outputs[source], source))
