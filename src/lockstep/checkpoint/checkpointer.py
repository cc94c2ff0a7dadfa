"""Checkpoints of a run: saved by all ranks together, in the background if asked, and loaded only when they are good."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import final

from torch import Tensor

from lockstep.checkpoint.generation import CommitMode, names_in, of_step
from lockstep.checkpoint.loading import Loaded, load_newest
from lockstep.checkpoint.plan import Job, Plan, agree
from lockstep.checkpoint.reader import open_checkpoint
from lockstep.checkpoint.saving import Directory, write
from lockstep.checkpoint.snapshot import Snapshot
from lockstep.checkpoint.state import State
from lockstep.comm.communicator import Communicator
from lockstep.comm.local_transport import LocalWorld
from lockstep.comm.meeting_point import say
from lockstep.comm.pulse import open_pulse
from lockstep.errors import CheckpointMissing, ConfigError, LockstepError
from lockstep.observe.process_guard import activity


@final
class PendingSave:
    """A save that goes on in the background."""

    def __init__(self, step: int, thread: threading.Thread) -> None:
        self.step = step
        self.path: Path | None = None  # of the checkpoint, once it is there
        self.error: BaseException | None = None
        self._thread = thread

    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Block until the checkpoint is durable and has its name. Raises: CheckpointError where that failed."""
        self._thread.join()
        _unreported.discard(self)
        if self.error is not None:
            raise self.error
        assert self.path is not None, "a save ends with a path or an error"
        return self.path


@final
class Checkpointer:
    """The checkpoints of one run in one directory.

        checkpointer = lockstep.Checkpointer("out/checkpoints", comm, keep=3)
        found = checkpointer.load(into={"train": train_state, "loader": loader})   # None at the first start
        ...
        checkpointer.save_async(step, {"train": train_state, "loader": loader, "step": step})

    state: a nested dict of tensors, JSON values, and objects with `state_dict` and `load_state_dict`. Tensors that are
        no DTensors are the same on every rank: each rank writes a share of them. Of DTensors each rank writes its part.
    shards: what only one rank has, as the random numbers of the virtual shards it runs, by the shard's number.
    keep: how many checkpoints stay; None keeps all. An older one goes when a newer one was read back and found good.
    commit: "rename", or "marker" for file systems where renaming a folder is not atomic.

    Collective: construction, `save`, `save_async`, `load` and `close`, on every rank of `comm` (None: this process
    alone). The directory is one that all ranks see.
    """

    def __init__(
        self,
        directory: Path | str,
        comm: Communicator | None = None,
        *,
        keep: int | None = 2,
        commit: CommitMode = "rename",
    ) -> None:
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ConfigError(f"keep={keep!r}: at least one checkpoint stays, or None for all")
        if commit not in ("rename", "marker"):
            raise ConfigError(f"commit={commit!r}: choose 'rename' or 'marker'")
        self.comm = Communicator(LocalWorld(1).transports[0]) if comm is None else comm
        self._control: Communicator | None = None  # the same ranks, for what happens in the background
        self._is_alone = comm is None
        self._directory = Directory(Path(directory).absolute(), keep, commit)
        self._plan: Plan | None = None  # of the save before
        self._snapshot = Snapshot()
        self._pending: PendingSave | None = None
        self._pulse = open_pulse(os.environ)

    @property
    def directory(self) -> Path:
        """Where the checkpoints are."""
        return self._directory.path

    # ------------------------------------------------------------------ saving

    def save(self, step: int, state: State, *, shards: Mapping[int, State] | None = None) -> Path:
        """Write the checkpoint of `step`; returns when it is durable. Memory: none but what has to come from a GPU.

        Collective: every rank; blocks.
        Raises: CheckpointError on every rank, also for an earlier save in the background that failed; the checkpoints
        that were there are then untouched. StaleGeneration where a later start of the run has taken the directory.
        """
        with activity("checkpoint"):
            job, control = self._begin(step, state, shards or {})
            path = write(control, self._what(step), job, job.source, self._directory)
        self._pulse.committed(step)
        return path

    def save_async(self, step: int, state: State, *, shards: Mapping[int, State] | None = None) -> PendingSave:
        """`save`, but return when this rank's share is copied; hashing, writing and the rest go on in a thread.

        An earlier one that is still going on is waited for: they never pile up. What went wrong in the background is
        raised by the next `save`, `save_async`, `wait` or `close`; at the latest it fails the process at its exit.
        Collective: every rank; blocks until all ranks have called it.
        Memory: this rank's share of the state, in a buffer that is used again.
        """
        with activity("checkpoint"):  # the one before may still be going on
            job, control = self._begin(step, state, shards or {})
            read = self._copied(job)
        what = self._what(step)

        def run() -> None:
            try:
                pending.path = write(control, what, job, read, self._directory)
                self._pulse.committed(step)
            except BaseException as error:  # noqa: BLE001 - raised in the thread that asks for it
                pending.error = error
                _unreported.add(pending)

        thread = threading.Thread(target=run, name=f"checkpoint of step {step}")
        pending = self._pending = PendingSave(step, thread)
        thread.start()
        return pending

    def wait(self) -> None:
        """Block until no save is going on in the background. Raises: CheckpointError where the last one failed."""
        pending = self._pending
        if pending is None:
            return
        try:
            if not pending.is_done() or pending in _unreported:
                with activity("checkpoint"):
                    pending.wait()
        finally:
            if pending.is_done():  # not where a signal has ended the waiting: it still reads the copy
                self._pending = None

    def _begin(self, step: int, state: State, shards: Mapping[int, State]) -> tuple[Job, Communicator]:
        what = self._what(step)
        job = agree(self.comm, what, step, state, shards, self._plan, self.wait)
        self._plan = job.plan
        if self._control is None:
            self._control = self.comm if self._is_alone else self.comm.split(0, name="checkpoint")
        assert self._control is not None, "every rank has the same color"
        return job, self._control

    def _copied(self, job: Job) -> Callable[[int], Tensor]:
        """What reads the pieces from a copy. Where there is no memory for one, that is raised when they are read, so
        that the other ranks hear of it.
        """
        try:
            pieces = job.plan.pieces
            return self._snapshot.take(pieces, [job.source(i) for i in range(len(pieces))]).__getitem__
        except Exception as error:  # noqa: BLE001 - raised below
            reason = error

            def fail(_: int) -> Tensor:
                raise reason

            return fail

    def _what(self, step: int) -> str:
        return f"cannot save step {step} in {self.directory}"

    # ------------------------------------------------------------------ loading

    def load(
        self,
        into: State | None = None,
        *,
        step: int | None = None,
        shards: Iterable[int] = (),
        allow: Collection[str] = (),
    ) -> Loaded | None:
        """The newest good checkpoint, or that of `step`; None where the directory has none at all.

        into: as `state` was at saving, for any number of ranks and any strategy. Its tensors are filled in place, its
            objects load what was theirs; values are returned. None: everything is returned, whole, on the CPU.
        shards: numbers of those that this rank needs now; any rank may ask for any.
        allow: differences that are no errors: "dtype" (converted), "shape" (the tensor stays as it is), "missing" (in
            the checkpoint) and "extra", each for all or for some: "missing:model/head.*".

        Every byte of the checkpoint is verified before the first tensor is changed. Without `step`, a damaged one is
        passed over with a warning, for the next older one.
        Collective: every rank, with equal `step`; blocks. Memory: none with `into`. While another process saves and
        prunes there, too.
        Raises: CheckpointDamaged where none is good, naming files and tensors; CheckpointMismatch, before anything is
        changed, for what does not fit; CheckpointMissing for a `step` that is not there.
        """
        with activity("checkpoint"):
            self.wait()
            loaded = load_newest(self.comm, self.directory, into, step, tuple(shards), allow)
        if loaded is not None:
            self._directory.parent = loaded.digest
            self._pulse.committed(loaded.step)  # what would be lost now is counted from there
        return loaded

    def steps(self) -> list[int]:
        """The steps of the checkpoints there are, the newest last; whether they are good is not looked at."""
        return list(dict.fromkeys(name.step for name in reversed(names_in(self.directory))))

    def latest(self) -> int | None:
        """The step of the newest checkpoint, None where there is none. Not collective."""
        return next((name.step for name in names_in(self.directory)), None)

    def path_of(self, step: int) -> Path:
        """The folder of the newest checkpoint of `step`. Not collective. Raises: CheckpointMissing."""
        return self.directory / str(of_step(names_in(self.directory), step, self.directory)[0])

    def verify(self, step: int | None = None) -> None:
        """Read every byte of the checkpoint of `step`, or of the newest one. Not collective.

        Raises: CheckpointDamaged, naming files and tensors; CheckpointMissing.
        """
        step = self.latest() if step is None else step
        if step is None:
            raise CheckpointMissing(f"{self.directory} has no checkpoint")
        with open_checkpoint(self.path_of(step)) as reader:
            reader.verify()

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Wait for a save in the background and give the memory back.

        Raises: CheckpointError where that save failed.
        """
        try:
            self.wait()
        finally:
            self._snapshot.release()
            self._plan = None
            if self._control is not None and not self._is_alone:
                self._control.close()
            self._control = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        try:
            self.close()
        except LockstepError as error:  # the exception that is on its way says more
            say(str(error))


_unreported: set[PendingSave] = set()  # that have failed, and nobody was told


@atexit.register
def _fail_for_lost_saves() -> None:
    """A process whose last save failed, and did not hear of it, does not end as if all were well."""
    if _unreported:
        for pending in _unreported:
            say(f"a save in the background has failed: {pending.error}")
        sys.stdout.flush()
        os._exit(1)
