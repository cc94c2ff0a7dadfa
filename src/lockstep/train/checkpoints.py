"""What a checkpoint of a run holds, and which one a run begins from.

model, optimizer      by the names of the parameters, cut in any way
data                  the position in the text, and what was trained on so far
step, tokens, config, world_size
model_config          the config.json of an export, from which transformers builds the model again
tokenizer             sha256 of the run's tokenizer.json, which an export takes along

There are no random numbers in it: weights, order of the data and dropout follow from the seed, the step and the number
of the microbatch. The learning rate follows from the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.checkpoint.generation import Name, names_in
from lockstep.checkpoint.loading import Loaded
from lockstep.checkpoint.reader import open_checkpoint
from lockstep.checkpoint.state import FlatState, State, unflatten
from lockstep.comm.communicator import Communicator
from lockstep.data.loader import TokenLoader
from lockstep.errors import CheckpointError, CheckpointMissing, ConfigError
from lockstep.parallel.train_state import ModelState, OptimizerState
from lockstep.train.config import read_resume

_MODEL, _OPTIMIZER, _DATA = "model", "optimizer", "data"


@dataclass(frozen=True)
class Origin:
    """Where to look for the checkpoint that a run begins from."""

    directory: Path
    step: int | None = None  # None: the newest one that is good


def state_of(model: nn.Module, optimizer: Optimizer, loader: TokenLoader) -> State:
    """What has a state of its own, to be saved and to be loaded into."""
    return {_MODEL: ModelState(model), _OPTIMIZER: OptimizerState(model, optimizer), _DATA: loader}


def find_origin(resume: str, own: Path) -> Origin | None:
    """Where `resume` says to begin: "", "auto", a checkpoint, or a directory that holds some, also as `directory:step`.

    own: the run's own checkpoints. None: from random weights. Not collective.
    Raises: ConfigError, CheckpointMissing for what is not there.
    """
    if not resume:
        return None
    if resume == "auto":
        return Origin(own) if names_in(own) else None
    path, step = read_resume(resume)
    name = Name.parse(path.absolute().name)
    if step is None and name is not None:
        directory = path.absolute().parent
        newest = max(other for other in names_in(directory) if other.step == name.step)
        if newest != name:
            raise ConfigError(f"--resume {path.absolute()}: a later start of the run has saved that step as {newest}")
        return Origin(directory, name.step)
    for directory in (path / "checkpoints", path):
        names = names_in(directory) if directory.is_dir() else []
        if step is None and names:
            return Origin(directory)
        if any(name.step == step for name in names):
            return Origin(directory, step)
    raise ConfigError(f"--resume {resume} holds no checkpoint" + ("" if step is None else f" of step {step}"))


def peek(origin: Origin) -> State:
    """What the checkpoint holds beside the model and the optimizer. Its tensors are not read. Not collective.

    Raises: CheckpointError where none is readable.
    """
    faults = []
    for name in names_in(origin.directory):
        if origin.step in (None, name.step):
            try:
                with open_checkpoint(origin.directory / str(name)) as reader:
                    return _values(reader.manifest.values, reader.manifest.kinds)
            except CheckpointError as error:  # loading says so again, and takes the next older one
                faults.append(error)
    raise faults[0] if faults else CheckpointMissing(f"{origin.directory} has no checkpoint")


def _values(values: Mapping[str, Any], kinds: Mapping[str, str]) -> State:
    kept = {path: value for path, value in values.items() if path.split("/")[0] not in (_MODEL, _OPTIMIZER)}
    within = {path: kind for path, kind in kinds.items() if path in kept}
    return unflatten(FlatState({}, kept, within, {}))


def load(comm: Communicator, origin: Origin, checkpointer: Checkpointer, into: State) -> Loaded:
    """Let `into`, from `state_of`, go on from the checkpoint of `origin`, every byte of which is verified first.

    checkpointer: the run's own.
    Collective: every rank of `comm`; blocks. Memory: each rank's own pieces.
    Raises: CheckpointError where none is good, or it is of another model.
    """
    is_own = origin.directory.absolute() == checkpointer.directory
    loaded = (checkpointer if is_own else Checkpointer(origin.directory, comm)).load(into, step=origin.step)
    if loaded is None:
        raise CheckpointMissing(f"{origin.directory} had a checkpoint a moment ago, and has none now")
    return loaded
