"""What a lesson talks to: it opens screens, shows values, and its communicator tells of every operation."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from shutil import rmtree
from statistics import median
from tempfile import gettempdir
from textwrap import dedent
from time import monotonic_ns
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Module  # what attributes of a module are typed as

import lockstep
from lockstep.comm.communicator import Communicator
from lockstep.comm.op import CommOp, ThenWork, Work
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
        self._moved = {"send": 0, "recv": 0}  # bytes, in messages of `comm`
        self.comm = Communicator(EventLayer(comm.transport, self._told))
        self.quietly = comm  # the same ranks; what goes through this is not shown

    def _told(self, event: Event) -> None:
        if event.is_message:
            self._moved[event.kind] += event.bytes
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

    def moved_bytes(self, work: Callable[[], object]) -> tuple[int, int]:
        """What this rank sends and receives in the messages of `comm` while it does `work`, counted."""
        before = tuple(self._moved.values())
        work()
        sent, received = (now - then for now, then in zip(self._moved.values(), before, strict=True))
        return sent, received

    def median_ms(self, work: Callable[[], object], times: int = 5) -> float:
        """How long `work` takes this rank, when all begin together."""
        took: list[float] = []
        for _ in range(times):
            self.quietly.barrier()
            began_ns = monotonic_ns()
            work()
            took.append(1e-6 * (monotonic_ns() - began_ns))
        return median(took)


@final
class EventLayer(TransportLayer):
    """Tells of every operation with its values, when it has been waited for: only then they are there.

    It waits for nothing itself and changes nothing.
    """

    def __init__(self, inner: Transport, tell: Tell) -> None:
        super().__init__(inner)
        self._tell = tell

    def submit(self, op: CommOp) -> Work:
        began_ns = monotonic_ns()
        before = [first_values(part.inputs[0]) if part.inputs else () for part in op.parts or (op,)]
        return ThenWork(self.inner.submit(op), partial(self.ended, op, before, began_ns))

    def ended(self, op: CommOp, before: Sequence[Values], began_ns: int) -> None:
        """All of `op` is done on this rank."""
        ended_ns = monotonic_ns()
        for part, values in zip(op.parts or (op,), before, strict=True):
            tensors = part.outputs or part.inputs
            event = Event(
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
            self._tell(event)

    def over(self, inner: Transport) -> EventLayer:
        return EventLayer(inner, self._tell)


def first_values(tensor: Tensor) -> Values:
    """The first `VALUES_MAX` numbers of `tensor`."""
    return tuple(tensor.detach().flatten()[:VALUES_MAX].double().tolist())


def _about(tensor: Tensor, size: int | None = None) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": tuple(tensor.shape), "bytes": tensor.nbytes if size is None else size}


def _write(path: Path, event: Event) -> None:
    """A line, which is there as soon as the event has happened: a rank may be killed."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event.to_json()) + "\n")
    except OSError as error:
        raise SystemExit(f"lockstep: cannot write {path}: {error.strerror}") from error


def _print(event: Event) -> None:
    if event.kind != "screen":
        sys.stdout.write(f"rank {event.rank}  {words(event)}\n")
    elif event.rank == 0:
        sys.stdout.write(f"\n{event.name}\n{event.text}\n")


def run(lesson: Callable[[Stage], None]) -> None:
    """Run `lesson` as this rank of the job: of `lockstep learn`, of torchrun, or alone.

    Collective: every rank of the job; blocks.
    """
    given = os.environ.get(FOLDER, "")
    with ExitStack() as stack:
        comm = stack.enter_context(lockstep.init(verbose=False))
        if given:
            stage = Stage(comm, partial(_write, file_of(Path(given), comm.rank)), Path(given))
        else:
            made = str(_folder()) if comm.rank == 0 else ""
            if made:
                stack.push(partial(_remove, made))
            stage = Stage(comm, _print, Path(comm.broadcast_object(made)))
        lesson(stage)
        comm.barrier()  # nobody uses the folder any more


def _remove(folder: str, error: type[BaseException] | None, *_: object) -> None:
    """At the end, unless torchrun starts the ranks again, which go on with what is there."""
    most, count = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("MAX_RESTARTS", "RESTART_COUNT"))
    if error is None or count >= most:
        rmtree(folder)


def _folder() -> Path:
    """One of our own, which ranks that torchrun has started again find as they left it."""
    folder = Path(gettempdir()) / f"lockstep-lesson-{os.getppid()}"
    is_again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if not is_again:
        rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, exist_ok=is_again)
    return folder
