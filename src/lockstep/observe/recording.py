"""Every operation of a communicator, written into the flight record on its way."""

from __future__ import annotations

import itertools
import sys
import zlib
from collections.abc import Sequence
from sys import _getframe
from types import FrameType
from typing import Any, NoReturn, final

from lockstep.comm.op import COLLECTIVE_TAG, CommOp, Work, signature
from lockstep.comm.operands import pieces
from lockstep.comm.transport import Transport, TransportLayer
from lockstep.errors import CommError
from lockstep.observe.call_site import call_site
from lockstep.observe.flight import MessageNumbers, Words
from lockstep.observe.guard import Guard
from lockstep.observe.line_words import Line, LineWords
from lockstep.observe.native import in_c, read_in_c
from lockstep.observe.scene import message_text

_SIZES_MAX = 8  # of uneven parts that are written out
_NAME_CHARS = 24  # that a record has for the name of a group


@final
@read_in_c
class GuardLayer(TransportLayer):
    """Records of every operation what it is, where in the user's code it was asked for, and when it began and ended.

    A work nobody waits for any more counts as ended: nothing on this rank hangs on it.
    """

    __slots__ = ("_collectives", "_of_lines", "inner", "is_queued", "recorder")

    def __init__(
        self, inner: Transport, guard: Guard, *, name: str = "world", is_world: bool = False, owns_guard: bool = False
    ) -> None:
        """is_world: of all ranks, as `lockstep.init` makes it. owns_guard: so it is, and closed with this layer."""
        super().__init__(inner)
        self.guard = guard
        self.recorder = guard.recorder
        self.is_queued = inner.device.type != "cpu"  # a wait returns before the operation has ended
        self._is_world, self._owns_guard = is_world or owns_guard, owns_guard
        self._words = LineWords(name)
        self._of_lines = self._words.of_lines
        self._collectives = itertools.count()  # the number that the next one has
        self._messages = MessageNumbers()
        guard.group(name, inner.global_ranks)

    @in_c
    def submit(self, op: CommOp) -> Work:
        # In caches that a step has left cold each call of Python's costs half a microsecond: so few are made.
        _, kind, inputs, _, _, reduce, _, label, parts, async_op, algorithm = op
        if kind == "all_reduce":
            try:
                frame = _getframe(3)  # who has asked the communicator
            except ValueError:  # the stack is not so deep
                frame = _getframe()
            tensor, way = inputs[0], algorithm and algorithm.name
            line = (id(frame.f_code), frame.f_lasti, tensor.shape, tensor.dtype, reduce, label, way)
            words = self._of_lines.get(line) or self._learn(op, frame, line)
        elif parts:
            return self._submit_parts(op, call_site(2))
        else:
            words = self._words_of(op, call_site(2))
        recorder, began_ns = self.recorder, self.recorder.clock.time()
        is_message = kind == "send" or kind == "recv"
        seqs = self._messages[kind, op.peer, op.tag] if is_message else self._collectives
        number = recorder.enter(next(seqs), words, is_message, began_ns)
        try:
            work = self.inner.submit(op)
            if async_op:
                return RecordedWork(work, self, number)
            try:
                work.wait()  # as who asks will, at once
            except CommError:
                work = RecordedWork(work, self, -1)  # raises it, with its cause
        except BaseException:
            recorder.leave(number)
            raise
        if self.is_queued:
            self.has_waited((number,), began_ns)
        else:
            recorder.stood(number, began_ns)
        return work

    def has_waited(self, numbers: Sequence[int], began_ns: int) -> None:
        """This thread has had its stream wait for the operation that has these numbers."""
        self.recorder.clock.stream_waited(numbers[0], began_ns)
        self.guard.stream_ends.waited(numbers)

    def _submit_parts(self, op: CommOp, site: str) -> Work:
        """Messages that are started together."""
        if op.parts[0].tag == COLLECTIVE_TAG:  # of a collective that is recorded as such
            return self.inner.submit(op)
        enter, words = self.recorder.enter, [(part, self._words_of(part, site)) for part in op.parts]
        numbers = [enter(next(self._messages[one.kind, one.peer, one.tag]), said, True) for one, said in words]
        try:
            return RecordedWork(self.inner.submit(op), self, numbers[0], tuple(numbers[1:]))
        except BaseException:
            for number in numbers:
                self.recorder.leave(number)
            raise

    def _learn(self, op: CommOp, frame: FrameType, line: Line) -> Words:
        """What `op` says, to be found by its line the next time; with the user's line, where that is another one."""
        site = call_site(3)
        words = self._said(op, (site, *line[2:]))
        self._words.learn(line, frame, site, words)
        return words

    def _words_of(self, op: CommOp, site: str) -> Words:
        shapes = tuple([(tensor.shape, tensor.dtype) for tensor in (*op.inputs, *op.outputs)])
        way = op.algorithm and op.algorithm.name
        return self._said(op, (site, op.kind, len(op.inputs), shapes, op.reduce, op.peer, op.tag, op.label, way))

    def _said(self, op: CommOp, key: tuple[Any, ...]) -> Words:
        return self._words.of(key, lambda: text_of(op, self.global_ranks), op.label)

    def over(self, inner: Transport) -> GuardLayer:
        """Named by its ranks, and by how many groups of just these have been made: equal on all of them."""
        ranks = inner.global_ranks
        self.guard.parts[ranks] += 1
        return GuardLayer(inner, self.guard, name=name_of_part(ranks, self.guard.parts[ranks]))

    def close(self) -> None:
        """The other ranks hear how this one left before they lose it.

        Raises: as `Guard.finish`, once all is closed, where nothing of this rank has failed before.
        """
        seen = sys.exc_info()[1]
        error = self.guard.cause_of(seen) if seen is not None and self._owns_guard else seen
        try:
            if self._is_world and seen is None and not self.guard.causes.has_failed:
                self.guard.finish()  # a model that lives within `with` is gone when the program ends
        finally:
            if self._owns_guard:
                self.guard.end(error or sys.exc_info()[1])
            self.inner.close()
            if self._owns_guard:
                self.guard.close()
        if error is not None and error is not seen:  # of stock torch's, which does not say who has gone
            raise error


@final
@read_in_c
class RecordedWork(Work):
    """The completion of what stands in the record under `number` and the numbers of `others`."""

    __slots__ = ("_errors", "_layer", "_number", "_others", "_work")

    def __init__(self, work: Work, layer: GuardLayer, number: int, others: tuple[int, ...] = ()) -> None:
        self._work = work
        self._layer = layer
        self._number = number  # -1 once it has ended
        self._others = others
        self._errors: tuple[CommError, CommError] | None = None  # what the transport raised, and what is raised for it

    @in_c
    def wait(self, timeout_s: float | None = None) -> None:
        began_ns = self._layer.recorder.clock.time()
        try:
            self._work.wait(timeout_s)
        except CommError as error:
            self._leave()  # what is raised may take long to be known
            self._fail(error)
        finally:
            if self._number >= 0:
                if self._layer.is_queued:
                    self._layer.has_waited((self._number, *self._others), began_ns)
                    self._others = ()
                else:
                    self._layer.recorder.stood(self._number, began_ns, self._work.ended_ns)
                self._number = -1
                if self._others:
                    self._leave()

    def _fail(self, error: CommError) -> NoReturn:
        """The same again, where it is waited for again: what it comes from may take a second to be known."""
        if self._errors is None or self._errors[0] is not error:
            self._errors = error, self._layer.guard.lost(error)
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
        for number in (self._number, *self._others):
            if number >= 0:
                self._layer.recorder.leave(number)
        self._number, self._others = -1, ()

    @in_c
    def __del__(self) -> None:
        for number in (self._number, *self._others) if self._number >= 0 else ():
            self._layer.recorder.let_go(number)


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
