"""Every error lockstep raises.

    LockstepError
    ├── ConfigError (ValueError)              a value given by the user is wrong; nothing was started or sent
    │   ├── UnsupportedArgument               an argument of a torch signature that has no meaning here
    │   └── EnvironmentProblems               rank, world size or address cannot be what the environment says
    ├── CommError (RuntimeError)              an operation between ranks failed
    │   ├── CollectiveTimeout                 a rank did not arrive in time
    │   ├── CollectiveMismatch                ranks called different things at the same point
    │   ├── PeerLost                          another rank's process or connection is gone
    │   ├── SharedMemoryUnavailable           the ranks of this host cannot share memory
    │   └── TransportClosed                   this communicator was closed
    ├── ReplicaError (RuntimeError)           the ranks of a data-parallel group do not form one model
    │   ├── ModelMismatch                     parameters or buffers differ between ranks at construction
    │   ├── ReplicaDrift                      ranks that were equal have parameters or optimizer state that differ now
    │   ├── PeerFailed (PeerLost)             another rank raised, ended or was killed; quotes its last words
    │   └── ShardingError                     a sharded parameter was changed, shared or used in a way that breaks it
    ├── DataError (ValueError)                a dataset, sampler or corpus cannot be used as asked
    │   └── UnsizedDataset (TypeError)        a dataset without a length, where one is needed
    ├── CheckpointError (RuntimeError)        a checkpoint cannot be written, read or used
    │   ├── CheckpointDamaged                 its bytes are not the ones that were written
    │   ├── CheckpointMismatch                it is whole, but of another state than the one it is loaded into
    │   ├── CheckpointMissing                 there is none, or not the one that was asked for
    │   └── StaleGeneration                   this process was left over: a later run has taken the directory
    ├── TrainingError (RuntimeError)          training itself cannot go on
    │   ├── NonFiniteLoss                     the loss is NaN or infinite
    │   └── NonFiniteGradient                 a gradient is NaN or infinite on some rank, before it is averaged
    └── LaunchError (RuntimeError)            processes could not be started or ended

A message says what happened, on which rank, what was expected and what to do next. `assert` is for our own bugs.
This module imports nothing, so that the command line can report an error without loading torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class LockstepError(Exception):
    """Whatever lockstep raises on purpose."""


class ConfigError(LockstepError, ValueError):
    """A value given by the user is wrong; nothing was started or sent."""


class UnsupportedArgument(ConfigError):
    """An argument of a torch signature that has no meaning here."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name} is not supported: {why}")
        self.name = name
        self.why = why

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.why)


class EnvironmentProblems(ConfigError):
    """All problems of the launch environment, reported at once."""

    def __init__(self, problems: Sequence[str], hint: str = "") -> None:
        lines = [f"cannot find this process's place among the ranks ({len(problems)} problem(s)):"]
        lines += [f"  {number}. {problem}" for number, problem in enumerate(problems, 1)]
        if hint:
            lines.append(hint)
        super().__init__("\n".join(lines))
        self.problems = tuple(problems)
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems, self.hint)


class CommError(LockstepError, RuntimeError):
    """An operation between ranks failed."""


class CollectiveTimeout(CommError):
    """A rank did not arrive in time. `missing` holds the ranks known to be late (empty where unknown)."""

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class CollectiveMismatch(CommError):
    """Ranks called different operations, shapes, dtypes, reductions or roots at the same point."""


class PeerLost(CommError):
    """Another rank's process or connection is gone. `rank` is None where the transport cannot tell which."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class SharedMemoryUnavailable(CommError):
    """The ranks of this host cannot share memory: too little of it, no right to it, or not one host after all."""


class TransportClosed(CommError):
    """This communicator was closed and cannot be used any more."""


class ReplicaError(LockstepError, RuntimeError):
    """The ranks of a data-parallel group do not form one model."""


class ModelMismatch(ReplicaError):
    """Parameters or buffers differ between ranks at construction."""


class ReplicaDrift(ReplicaError):
    """Ranks that should hold the same model do not any more. `ranks` are the odd ones (empty where nobody can tell)."""

    def __init__(self, message: str, ranks: Sequence[int] = (), what: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.what = tuple(what)  # "parameter '0.weight'", "lr of parameter group 0"


class PeerFailed(ReplicaError, PeerLost):
    """Another rank raised, ended early or was killed; the message quotes its last words. `rank` is that rank."""


class ShardingError(ReplicaError):
    """A sharded parameter was changed, shared or used in a way that its ranks cannot follow."""


class DataError(LockstepError, ValueError):
    """A dataset, sampler or corpus cannot be used as asked."""


class UnsizedDataset(DataError, TypeError):
    """A dataset without a length, where one is needed."""


class CheckpointError(LockstepError, RuntimeError):
    """A checkpoint cannot be written, read or used."""


class CheckpointDamaged(CheckpointError):
    """The bytes of a checkpoint are not the ones that were written; names the file and the tensors."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint is whole, but holds another state than the one it is loaded into."""


class CheckpointMissing(CheckpointError):
    """There is no checkpoint, or not the one that was asked for."""


class StaleGeneration(CheckpointError):
    """This process was left over from an earlier start of the run: a later one has taken the directory over."""


class TrainingError(LockstepError, RuntimeError):
    """Training itself cannot go on."""


class NonFiniteLoss(TrainingError):
    """The loss is NaN or infinite; says the step and the rank where it first appeared."""


class NonFiniteGradient(TrainingError):
    """A gradient is NaN or infinite; says the step, the rank and the parameter where it first appeared."""


class LaunchError(LockstepError, RuntimeError):
    """Processes could not be started or ended."""
