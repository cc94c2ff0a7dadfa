"""For the first steps of a run: every collective is compared before it is sent, and its tensors while it is under way.

Costs an exchange for each collective, a copy of every tensor that is used asynchronously, and all overlap.
"""

from __future__ import annotations

import json
import weakref
import zlib
from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from lockstep.comm.op import CommOp, DoneWork, Work
from lockstep.comm.operands import writing_to
from lockstep.comm.transport import Transport, TransportLayer
from lockstep.errors import CollectiveMismatch, CommError
from lockstep.observe.call_site import call_site
from lockstep.observe.guard import Guard
from lockstep.observe.in_flight import changed_in_flight
from lockstep.observe.recording import text_of
from lockstep.observe.replica_diff import alike
from lockstep.observe.settings import CHECKED_STEPS
from lockstep.observe.tensor_digest import digests
from lockstep.observe.wording import step_after

_SAID_BYTES = 512  # of what a rank says of its collective
_TEXT_MAX = 300
_SHOWN_MAX = 8  # different collectives that a message lists


class Said(NamedTuple):
    """What a rank says of the collective it is about to begin."""

    step: int
    text: str
    site: str  # not compared: the root of a broadcast often stands in another line

    def __str__(self) -> str:
        return f"{self.text} at {self.site}, {step_after(self.step)}"


@final
class CheckLayer(TransportLayer):
    """Compares collectives until the group has begun one after `steps` steps of this start of the program.

    All ranks end it at the same collective, also where their steps differ, because each sees the others' in the
    exchange. After a difference nothing of the group is sent any more.
    """

    def __init__(self, inner: Transport, guard: Guard, steps: int = CHECKED_STEPS) -> None:
        super().__init__(inner)
        self._guard = guard
        self._steps = steps
        self._is_over = False
        self._failure: CommError | None = None
        self._flights: list[tuple[weakref.ref[CheckedWork], Flight]] = []

    def submit(self, op: CommOp) -> Work:
        if self._failure is None:
            self._land_the_dropped()
        if self._is_over or op.kind in ("send", "recv", "batch_send_recv"):
            return self.inner.submit(op)
        said = Said(self._guard.recorder.step, text_of(op, self.global_ranks), call_site())
        if self._failure is None and self.world_size > 1:
            try:
                self._compare(op, said)
            except CommError as error:
                self._failure = error
        if self._failure is not None:
            return DoneWork(self._failure)
        return self._start(op, said) if op.async_op else self.inner.submit(op)

    def over(self, inner: Transport) -> CheckLayer:
        return CheckLayer(inner, self._guard, self._steps)

    # ------------------------------------------------------------------ before it is sent

    def _compare(self, op: CommOp, said: Said) -> None:
        """Raises: CollectiveMismatch, on every rank alike."""
        mine = torch.frombuffer(bytearray(_packed(said)), dtype=torch.uint8).to(self.device)
        whole = mine.new_empty(self.world_size * _SAID_BYTES)
        exchange = CommOp(op.seq, "all_gather", (mine,), (whole,), label="check", async_op=False)
        self.inner.submit(exchange).wait()
        voices = [Said(*json.loads(bytes(row.tolist()))) for row in whole.cpu().view(self.world_size, -1)]
        if any(voice[:2] != voices[0][:2] for voice in voices):
            raise CollectiveMismatch(_difference(voices, self.rank, self.global_ranks))
        self._is_over = max(voice.step for voice in voices) >= self._guard.step_before + self._steps

    # ------------------------------------------------------------------ while it is under way

    def _start(self, op: CommOp, said: Said) -> Work:
        """The transport gets copies, so that whatever happens to the user's tensors meanwhile is the user's doing."""
        with torch.no_grad():
            copies = {id(tensor): tensor.clone() for tensor in (*op.inputs, *op.outputs)}
        inputs, outputs = (tuple([copies[id(tensor)] for tensor in tensors]) for tensors in (op.inputs, op.outputs))
        flight = Flight(op, said, self.global_ranks[self.rank], outputs)
        flight.work = self.inner.submit(op._replace(inputs=inputs, outputs=outputs))
        work = CheckedWork(flight)
        self._flights.append((weakref.ref(work), flight))
        return work

    def _land_the_dropped(self) -> None:
        """Nobody waits for these any more, but their results are read: after a barrier, say."""
        self._flights = [(ref, flight) for ref, flight in self._flights if not flight.has_landed]
        for ref, flight in self._flights:
            if ref() is None and flight.work.is_done():
                flight.land(None)


@final
class Flight:
    """An asynchronous collective from its start to its end, on copies of the user's tensors."""

    work: Work

    def __init__(self, op: CommOp, said: Said, rank: int, results: Sequence[Tensor]) -> None:
        """rank: of the job. results: the copies of `op.outputs`."""
        self.has_landed = False
        self.error: CommError | None = None
        self._said = said
        self._rank = rank
        self._results = tuple(results)
        self._outputs = op.outputs
        self._names = [f"input {n}" for n in range(len(op.inputs))] + [f"output {n}" for n in range(len(op.outputs))]
        self._tensors = (*op.inputs, *op.outputs)
        self._before = digests(self._tensors)

    def land(self, timeout_s: float | None) -> None:
        """Wait, and give the user's tensors the results.  Raises: what the wait does."""
        if self.has_landed:
            return
        changed = self._changed()
        self.work.wait(timeout_s)
        with writing_to(self._outputs):
            for output, result in zip(self._outputs, self._results, strict=True):
                output.copy_(result)
        self.has_landed = True
        self._results = self._outputs = self._tensors = ()
        if changed:
            said = self._said
            self.error = changed_in_flight(f"{said}, rank {self._rank}", changed)

    def _changed(self) -> str:
        """Which of the user's tensors is not as it was; "" where all are."""
        for name, tensor, before, now in zip(
            self._names, self._tensors, self._before, digests(self._tensors), strict=True
        ):
            if now != before:
                return f"its {name}, {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        return ""


@final
class CheckedWork(Work):
    """The completion of a `Flight`. Without a wait, `is_done` gives the results too."""

    def __init__(self, flight: Flight) -> None:
        self._flight = flight

    def wait(self, timeout_s: float | None = None) -> None:
        self._flight.land(timeout_s)
        if self._flight.error is not None:
            raise self._flight.error

    def is_done(self) -> bool:
        flight = self._flight
        if not flight.has_landed and flight.work.is_done():
            try:
                flight.land(None)
            except CommError:  # `wait` raises it again
                return True
        return flight.has_landed


def _packed(said: Said) -> bytes:
    """JSON of `_SAID_BYTES`. What is too long is cut, and compared by its checksum."""
    text, site = said.text, said.site
    if len(text) > _TEXT_MAX:
        text = f"{text[:_TEXT_MAX]}.. {zlib.crc32(text.encode()):08x}"
    while len(packed := json.dumps([said.step, text, site]).encode()) > _SAID_BYTES:
        site = site[: len(site) // 2]
    return packed.ljust(_SAID_BYTES)


def _difference(voices: Sequence[Said], rank: int, global_ranks: Sequence[int]) -> str:
    """What every rank is about to do; ranks that are about to do the same stand together."""
    together = alike(dict(zip(global_ranks, voices, strict=True)))
    lines = [f"  rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {said}" for said, ranks in together.items()]
    if len(lines) > _SHOWN_MAX:
        lines[_SHOWN_MAX:] = [f"  and {len(lines) - _SHOWN_MAX} more"]
    head = f"rank {global_ranks[rank]}: the ranks are about to call different operations at the same point:"
    fix = (
        "Nothing was sent. Next: find the branch or loop that runs differently on these ranks; every rank must "
        "call the same operations, on tensors of the same shape and dtype, in the same order"
    )
    return "\n".join([head, *lines, fix])
