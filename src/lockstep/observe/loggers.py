"""TensorBoard, Weights & Biases and trackio, each where it is installed and asked for by name; rank 0 speaks to them.

Nothing is uploaded unless the user's environment says so: wandb is offline without WANDB_MODE, trackio keeps its own
local files.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, final

from lockstep.errors import ConfigError

LOG = "LOCKSTEP_LOG"  # names of loggers for `lockstep.log`, with commas between them
_PROJECT, _ID = "lockstep", "logged-as.txt"
LOGGED = ("tensorboard", "wandb", _ID)  # what loggers leave in the folder of a run
_FLUSH_S = 10


class Logger(Protocol):
    """One that numbers can be given to, in the order of steps."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


def logger_names(text: str) -> tuple[str, ...]:
    """The names in "tensorboard,wandb", each once.

    Raises: ConfigError for a name that is none, and for one that is not installed.
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in _LOGGERS:
            raise ConfigError(f"--log {text}: there is no logger {name!r}, but {', '.join(_LOGGERS)}")
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"--log {text}: {name} is not installed: pip install {name}")
    return names


@final
class Loggers:
    """All that were asked for. One that fails is said once and left out: training goes on."""

    def __init__(self, loggers: Mapping[str, Logger]) -> None:
        self._loggers = dict(loggers)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Give numbers of a step to each."""
        for name, logger in tuple(self._loggers.items()):
            try:
                logger.log(step, values)
            except Exception as error:  # noqa: BLE001 (whatever a library raises: a full disk, a network that is gone)
                del self._loggers[name]
                _say(f"nothing is logged to {name} any more, from step {step} on", error)

    def close(self) -> None:
        """Write what is left. A second call does nothing."""
        while self._loggers:
            name, logger = self._loggers.popitem()
            try:
                logger.close()
            except Exception as error:  # noqa: BLE001 (as above: the run is done, and does not fail for it)
                _say(f"what was logged last may be missing in {name}", error)


def _say(what: str, error: Exception) -> None:
    sys.stderr.write(f"lockstep: {what}: {type(error).__name__}: {error}\n")


def open_loggers(names: Sequence[str], folder: Path, config: Mapping[str, Any], step: int = 0) -> Loggers:
    """The loggers of `names`, which `logger_names` has taken. To be called on rank 0 only.

    folder: of the run, which has its name; what they write lies there, where they let one say so. config: the run's
    options. step: the run goes on after it.
    Raises: ConfigError where one cannot begin.
    """
    opened: dict[str, Logger] = {}
    run_id = _id_of(folder, step) if names else ""
    for name in names:
        try:
            opened[name] = _LOGGERS[name](folder, run_id, config, step)
        except Exception as error:
            Loggers(opened).close()
            raise ConfigError(f"{name} cannot log: {type(error).__name__}: {error}") from error
    return Loggers(opened)


@final
class _TensorBoard:
    """Event files in the run's folder: `tensorboard --logdir FOLDER`."""

    def __init__(self, folder: Path, run_id: str, config: Mapping[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = step + 1 if step else None  # an earlier start may have logged steps that are done again
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge, flush_secs=_FLUSH_S)
        self._writer.add_text("config", f"```\n{json.dumps(dict(config), indent=2, default=str)}\n```")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


@final
class _WandB:
    """A run of Weights & Biases, offline unless WANDB_MODE says otherwise: `wandb sync` uploads it later."""

    def __init__(self, folder: Path, run_id: str, config: Mapping[str, Any], step: int) -> None:
        self._run = importlib.import_module("wandb").init(
            project=os.environ.get("WANDB_PROJECT") or _PROJECT,
            name=folder.name,
            id=run_id,
            resume="allow",
            config=dict(config),
            dir=str(folder),
            mode=os.environ.get("WANDB_MODE") or "offline",
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


@final
class _Trackio:
    """A run of trackio, in its own local files: `trackio show`."""

    def __init__(self, folder: Path, run_id: str, config: Mapping[str, Any], step: int) -> None:
        name = f"{folder.name}-{run_id}"  # another run of that name would be gone on with
        self._run = importlib.import_module("trackio").init(
            project=_PROJECT, name=name, config=dict(config), resume="allow"
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _id_of(folder: Path, step: int) -> str:
    """Equal for all starts of one run: those that go on after a step."""
    path = folder / _ID
    if not (step and path.exists()):
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:8] + "\n")
    return path.read_text().strip()


_LOGGERS = {"tensorboard": _TensorBoard, "wandb": _WandB, "trackio": _Trackio}
