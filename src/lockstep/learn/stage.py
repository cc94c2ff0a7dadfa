"""What a lesson talks to: it opens screens, shows values, and its communicator tells of every operation."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent
from time import monotonic_ns
from types import TracebackType
from typing import Any, TextIO, final

import torch
from torch import Tensor
from torch.nn import Module  # what attributes of a module are typed as

import lockstep
from lockstep.comm.communicator import Communicator
from lockstep.comm.op import CommOp, Work
from lockstep.comm.transport import Transport, TransportLayer
from lockstep.learn.events import VALUES_MAX, Event, Values, file_of, words
from lockstep.learn.program import FOLDER

Tell = Callable[[Event], None]


@final
class Stage:
    """One rank of a lesson: `comm` to work with, and what is shown to the learner.

    All ranks open the same screens in the same order; the words of rank 0 are shown.
    """

    def __init__(self, comm: Communicator, tell: Tell, folder: Path) -> None:
        """folder: for files of the lesson; it is there again when the launcher starts the ranks once more."""
        self._tell = tell
        self._rank = comm.rank
        self.folder = folder
        self.sent_bytes = 0  # in messages of `comm`
        self.comm = Communicator(EventLayer(comm.transport, self._told))
        self.quietly = comm  # the same ranks; what goes through this is not shown

    def _told(self, event: Event) -> None:
        self.sent_bytes += event.bytes if event.kind == "send" else 0
        self._tell(event)

    def screen(self, title: str, text: str = "") -> None:
        """A new screen: one idea. Nothing that follows happens on any rank before all have come here."""
        self.quietly.barrier()
        now = monotonic_ns()
        self._tell(Event(self._rank, "screen", now, now, title, " ".join(dedent(text).split())))

    def show(self, **values: Tensor | Module | float | None) -> None:
        """What this rank has in its memory now, by name. None: it has nothing of that name."""
        for name, value in values.items():
            tensor = torch.as_tensor(() if value is None else value)
            now = monotonic_ns()
            about = _about(tensor)
            self._tell(Event(self._rank, "show", now, now, name, after=first_values(tensor), **about))

    def curve(self, **values: Tensor) -> None:
        """A value as it went from step to step. Shapes: [steps]."""
        for name, tensor in values.items():
            now = monotonic_ns()
            kept = tuple(tensor.detach().double().tolist())
            self._tell(Event(self._rank, "curve", now, now, name, after=kept, **_about(tensor)))

    def say(self, text: str) -> None:
        """What this rank has to say."""
        now = monotonic_ns()
        self._tell(Event(self._rank, "say", now, now, text=" ".join(text.split())))


@final
class EventLayer(TransportLayer):
    """Tells of every operation with its values. It waits for nothing and changes nothing."""

    def __init__(self, inner: Transport, tell: Tell) -> None:
        super().__init__(inner)
        self._tell = tell

    def submit(self, op: CommOp) -> Work:
        began_ns = monotonic_ns()
        before = [first_values(part.inputs[0]) if part.inputs else () for part in op.parts or (op,)]
        return EventWork(self.inner.submit(op), self, op, before, began_ns)

    def ended(self, op: CommOp, before: Sequence[Values], began_ns: int) -> None:
        """All of `op` is done on this rank."""
        ended_ns = monotonic_ns()
        for part, values in zip(op.parts or (op,), before, strict=True):
            tensors = part.outputs or part.inputs
            self._tell(
                Event(
                    self.global_ranks[self.rank],
                    part.kind,
                    began_ns,
                    ended_ns,
                    name=part.label,
                    peer=None if part.peer is None else self.global_ranks[part.peer],
                    reduce=part.reduce or "",
                    before=values,
                    after=first_values(part.outputs[0]) if part.outputs else (),
                    **(_about(tensors[0], part.nbytes) if tensors else {}),
                )
            )

    def over(self, inner: Transport) -> EventLayer:
        return EventLayer(inner, self._tell)


@final
class EventWork(Work):
    """Tells of its operation when it has been waited for: only then the values are there."""

    def __init__(self, work: Work, layer: EventLayer, op: CommOp, before: Sequence[Values], began_ns: int) -> None:
        self._work = work
        self._layer = layer
        self._op: CommOp | None = op
        self._before = before
        self._began_ns = began_ns

    def wait(self, timeout_s: float | None = None) -> None:
        self._work.wait(timeout_s)
        op, self._op = self._op, None
        if op is not None:
            self._layer.ended(op, self._before, self._began_ns)

    def is_done(self) -> bool:
        return self._work.is_done()

    def source_rank(self) -> int | None:
        return self._work.source_rank()


def first_values(tensor: Tensor) -> Values:
    """The first `VALUES_MAX` numbers of `tensor`."""
    return tuple(tensor.detach().flatten()[:VALUES_MAX].double().tolist())


def _about(tensor: Tensor, size: int | None = None) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": tuple(tensor.shape), "bytes": tensor.nbytes if size is None else size}


@final
class _File:
    """Events as lines of a file, each there as soon as it has happened: a rank may be killed."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)

    def __call__(self, event: Event) -> None:
        self._file.write(json.dumps(event.to_json()) + "\n")

    def __enter__(self) -> _File:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


def _print(event: Event) -> None:
    if event.kind != "screen":
        sys.stdout.write(f"rank {event.rank}  {words(event)}\n")
    elif event.rank == 0:
        sys.stdout.write(f"\n{event.name}\n{event.text}\n")


def run(lesson: Callable[[Stage], None]) -> None:
    """Run `lesson` as this rank of the job: of `lockstep learn`, of torchrun, or alone.

    Collective: every rank of the job; blocks.
    """
    folder = os.environ.get(FOLDER, "")
    with ExitStack() as stack:
        comm = stack.enter_context(lockstep.init(verbose=False))
        if folder:
            stage = Stage(comm, stack.enter_context(_File(file_of(Path(folder), comm.rank))), Path(folder))
        else:
            made = stack.enter_context(TemporaryDirectory(prefix="lesson-")) if comm.rank == 0 else ""
            stage = Stage(comm, _print, Path(comm.broadcast_object(made)))
        lesson(stage)
        comm.barrier()  # nobody uses the folder any more
