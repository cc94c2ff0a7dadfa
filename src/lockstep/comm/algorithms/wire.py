"""What an algorithm is given: its place among the ranks, and messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from torch import Tensor

from lockstep.comm.op import COLLECTIVE_TAG, CommOp

if TYPE_CHECKING:
    from lockstep.comm.communicator import Communicator


@final
class Wire:
    """The ranks of a communicator, for one collective that is made of messages.

    An algorithm is a row of steps. A step starts all its messages, then waits for all of them:

        wire.step(wire.send(mine, right), wire.recv(arrived, left))

    Started one after the other, a send that waits for its receive (NCCL; Gloo and shared memory where they run out of
    buffers) would wait for a neighbour that is itself in its send, round the whole ring: a deadlock. So even a message
    that is alone in its step travels as a batch of one.
    The messages are `CommOp`s of the communicator, with a tag no other message has: every layer sees them, and `label`
    says in which step of what they are.
    """

    def __init__(self, comm: Communicator, title: str) -> None:
        """title: what the messages are for, "all_reduce by ring"."""
        self.rank = comm.rank
        self.world_size = comm.world_size
        self.device = comm.device
        self._comm = comm
        self._title = title
        self._steps = 0

    def send(self, tensor: Tensor, to: int, what: str = "") -> CommOp:
        """A message for `step`: `tensor` goes to rank `to`. `what` it is, "part 3", stands in its label."""
        return self._comm.send_op(tensor, to, label=self._label(what))._replace(tag=COLLECTIVE_TAG)

    def recv(self, tensor: Tensor, source: int, what: str = "") -> CommOp:
        """A message for `step`: `tensor` is filled by rank `source`."""
        return self._comm.recv_op(tensor, source, label=self._label(what))._replace(tag=COLLECTIVE_TAG)

    def step(self, *messages: CommOp) -> None:
        """Start all `messages`, wait for all of them."""
        self._comm.batch_send_recv(messages)
        self._steps += 1

    def _label(self, what: str) -> str:
        return f"{self._title}, step {self._steps}" + f": {what}" * bool(what)
