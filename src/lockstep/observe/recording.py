"""Every operation of a communicator, written into the flight record on its way."""

from __future__ import annotations

import sys
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import NoReturn, Protocol, final

from lockstep.comm.communicator import Communicator
from lockstep.comm.op import COLLECTIVE_TAG, CommOp, Work, signature
from lockstep.comm.operands import pieces
from lockstep.comm.transport import Transport, TransportLayer
from lockstep.errors import CommError
from lockstep.observe.call_site import call_site
from lockstep.observe.flight import Words, pack_words
from lockstep.observe.profile.step_clock import StepClock
from lockstep.observe.scene import message_text

_REMEMBERED = 4096  # operations whose words are kept; those of a program whose shapes never repeat are packed anew
_SIZES_MAX = 8  # of uneven parts that are written out
_NAME_CHARS = 24  # that a record has for the name of a group
_DOOR = (
    Communicator._collective.__code__
)  # called by a method that was called by who asks: no need to look at those two


class Recorder(Protocol):
    """What is used of a `FlightRecorder`."""

    step: int
    clock: StepClock

    def enter(self, seq: int, words: Words, is_message: bool = False) -> int: ...

    def leave(self, number: int) -> None: ...


class Watch(Protocol):
    """What is used of a `Guard`."""

    @property
    def recorder(self) -> Recorder: ...

    def group(self, name: str, ranks: Sequence[int]) -> None: ...

    def lost(self, error: CommError) -> CommError: ...

    @property
    def has_failed(self) -> bool: ...

    def finish(self) -> None: ...

    def end(self, error: BaseException | None = None) -> None: ...

    def close(self) -> None: ...


@final
class GuardLayer(TransportLayer):
    """Records of every operation what it is, where in the user's code it was asked for, and when it began and ended.

    A work nobody waits for any more counts as ended: nothing on this rank hangs on it.
    """

    def __init__(
        self,
        inner: Transport,
        guard: Watch,
        *,
        name: str = "world",
        owns_guard: bool = False,
        made: Counter[tuple[int, ...]] | None = None,
    ) -> None:
        """owns_guard: it is closed with this layer. made: how many groups of which ranks there are: see `over`."""
        super().__init__(inner)
        self._guard = guard
        self._recorder = guard.recorder
        self._group = name
        self._owns_guard = owns_guard
        self._made: Counter[tuple[int, ...]] = Counter() if made is None else made
        self._known: dict[tuple[object, ...], Words] = {}
        self._collectives = 0
        self._messages = 0
        guard.group(name, inner.global_ranks)

    def submit(self, op: CommOp) -> Work:
        site = call_site(4 if sys._getframe(1).f_code is _DOOR else 2)
        if op.parts:
            if op.parts[0].tag == COLLECTIVE_TAG:  # of a collective that is recorded as such
                return self.inner.submit(op)
            return self._start(op, tuple([self._enter(part, site) for part in op.parts]))
        number = self._enter(op, site)
        if op.async_op:
            return self._start(op, (number,))
        recorder = self._recorder
        begun = recorder.clock.wait_begins()
        try:
            work = self.inner.submit(op)
            try:
                work.wait()  # as who asks will, at once
            except CommError:
                work = RecordedWork(work, self._guard, ())  # raises it, with its cause
        finally:
            recorder.leave(number)
            recorder.clock.wait_ends(begun, number)
        return work

    def _start(self, op: CommOp, numbers: tuple[int, ...]) -> Work:
        try:
            return RecordedWork(self.inner.submit(op), self._guard, numbers)
        except BaseException:
            for number in numbers:
                self._recorder.leave(number)
            raise

    def _enter(self, op: CommOp, site: str) -> int:
        _, kind, inputs, outputs, peer, reduce, tag, label, _, _, algorithm = op
        way = algorithm and algorithm.name
        if kind == "all_reduce":
            tensor = inputs[0]
            key = (site, tensor.shape, tensor.dtype, reduce, label, way)
        else:
            shapes = tuple([(tensor.shape, tensor.dtype) for tensor in (*inputs, *outputs)])
            key = (site, kind, len(inputs), shapes, reduce, peer, tag, label, way)
        words = self._known.get(key)
        if words is None:
            words = self._pack(op, site, key)
        if kind in ("send", "recv"):
            seq, self._messages = self._messages, self._messages + 1
            return self._recorder.enter(seq, words, True)
        seq, self._collectives = self._collectives, self._collectives + 1
        return self._recorder.enter(seq, words)

    def _pack(self, op: CommOp, site: str, key: tuple[object, ...]) -> Words:
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        words = self._known[key] = pack_words(self._group, text_of(op, self.global_ranks), site, op.label)
        return words

    def over(self, inner: Transport) -> GuardLayer:
        """Named by its ranks, and by how many groups of just these have been made: equal on all of them."""
        ranks = inner.global_ranks
        self._made[ranks] += 1
        name = name_of_part(ranks, self._made[ranks])
        return GuardLayer(inner, self._guard, name=name, made=self._made)

    def close(self) -> None:
        """The other ranks hear how this one left before they lose it.

        Raises: as `Guard.finish`, once all is closed, where nothing of this rank has failed before.
        """
        if not self._owns_guard:
            return self.inner.close()
        try:
            if sys.exc_info()[1] is None and not self._guard.has_failed:
                self._guard.finish()
        finally:
            self._guard.end(sys.exc_info()[1])
            self.inner.close()
            self._guard.close()


@final
class RecordedWork(Work):
    """The completion of what stands in the record under `numbers`."""

    __slots__ = ("_errors", "_guard", "_numbers", "_work")

    def __init__(self, work: Work, guard: Watch, numbers: tuple[int, ...]) -> None:
        self._work = work
        self._guard = guard
        self._numbers = numbers
        self._errors: tuple[CommError, CommError] | None = None  # what the transport raised, and what is raised for it

    def wait(self, timeout_s: float | None = None) -> None:
        numbers, recorder = self._numbers, self._guard.recorder
        begun = recorder.clock.wait_begins()
        try:
            self._work.wait(timeout_s)
        except CommError as error:
            self._leave()
            self._fail(error)
        finally:
            for number in self._numbers:
                recorder.leave(number)
            self._numbers = ()
            recorder.clock.wait_ends(begun, numbers[0] if numbers else None)

    def _fail(self, error: CommError) -> NoReturn:
        """The same again, where it is waited for again: what it comes from may take a second to be known."""
        if self._errors is None or self._errors[0] is not error:
            self._errors = error, self._guard.lost(error)
        told = self._errors[1]
        if told is error:
            raise error
        raise told from error

    def is_done(self) -> bool:
        is_done = self._work.is_done()
        if is_done:
            self._leave()
        return is_done

    def source_rank(self) -> int | None:
        return self._work.source_rank()

    def _leave(self) -> None:
        numbers, self._numbers = self._numbers, ()
        for number in numbers:
            self._guard.recorder.leave(number)

    def __del__(self) -> None:
        if self._numbers:
            self._leave()


def text_of(op: CommOp, global_ranks: Sequence[int]) -> str:
    """What `op` is: for a collective, what all ranks must have in common.

    The signature, and the sizes of all parts where every rank has them all. The peer of a message is a rank of the job.
    """
    if op.kind in ("send", "recv"):
        tensor = (op.inputs or op.outputs)[0]
        what = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        return message_text(op.kind, what, None if op.peer is None else global_ranks[op.peer], op.tag)
    if op.kind == "all_gather":
        return f"{signature(op)} {_sizes(op.outputs, len(global_ranks))}"
    if op.kind == "reduce_scatter":
        return f"{signature(op)} {_sizes(op.inputs, len(global_ranks))}"
    return signature(op)


def _sizes(tensors: Sequence, world_size: int) -> str:
    """The elements of each rank's part, whether it is a tensor of its own or a piece of one."""
    sizes = [part.numel() for part in pieces(tensors, world_size)]
    if len(set(sizes)) == 1:
        return f"{world_size} x [{sizes[0]}]"
    if len(sizes) <= _SIZES_MAX:
        return f"{sizes}"
    return f"{sizes[:_SIZES_MAX]}.. {zlib.crc32(repr(sizes).encode()):08x}"


def name_of_part(ranks: Sequence[int], count: int) -> str:
    """A short name for the group number `count` of these ranks: "0-3", "0,2,5", "0-6:2 #2"."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 0
    if len(ranks) > 2 and step > 0 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step)):
        name = f"{ranks[0]}-{ranks[-1]}" + f":{step}" * (step > 1)
    else:
        name = ",".join(map(str, ranks))
    name = f"ranks {name}" + f" #{count}" * (count > 1)
    return name if len(name) <= _NAME_CHARS else f"{len(ranks)} ranks {zlib.crc32(name.encode()):08x}"
