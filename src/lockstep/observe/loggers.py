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
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, final

from lockstep.errors import ConfigError
from lockstep.observe.profile.notes import Later

LOG = "LOCKSTEP_LOG"  # names of loggers for `lockstep.log`, with commas between them
_PROJECT, _ID = "lockstep", "logged-as.txt"
LOGGED = ("tensorboard", "wandb", _ID)  # what loggers leave in the folder of a run
_FLUSH_S = 10
_PATIENCE_S = 15.0  # at the end of a run, with a logger that cannot write what is left
_PERIOD_S = 0.02  # of looking whether a device has come to a value


class Logger(NamedTuple):
    """One that numbers can be given to, in the order of steps."""

    log: Callable[[int, Mapping[str, float]], object]  # numbers of a step
    close: Callable[[bool], object]  # write what is left; given whether the program has failed


def logger_names(text: str, said_by: str = "--log") -> tuple[str, ...]:
    """The names in "tensorboard,wandb", each once.

    Raises: ConfigError for a name that is none, and for one that is not installed.
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in _LOGGERS:
            raise ConfigError(f"{said_by} {text}: there is no logger {name!r}, but {', '.join(_LOGGERS)}")
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"{said_by} {text}: {name} is not installed: pip install {name}")
    return names


@final
class Loggers:
    """All that were asked for, on a thread of their own: an import takes seconds, a network that is gone minutes.

    One that fails is said once and left out: training goes on.
    """

    def __init__(self, beginnings: Mapping[str, Callable[[], Logger]]) -> None:
        """beginnings: of each logger by its name."""
        self._logged: SimpleQueue[tuple[int, Mapping[str, float], Later | None] | None] = SimpleQueue()
        self._busy = ""  # the logger that the thread is in
        self._is_closed, self._has_failed = not beginnings, False
        self._thread = threading.Thread(target=self._follow, args=(beginnings,), name="lockstep-log", daemon=True)
        if beginnings:
            self._thread.start()
            # What these libraries register with atexit ends what is logged, and may do so while the next one begins.
            # Python calls this before all of that, as it does for concurrent.futures.
            vars(threading)["_register_atexit"](self.close)

    def log(self, step: int, values: Mapping[str, float], later: Later | None = None) -> None:
        """Give numbers of a step to each, and those of `later` once they are known."""
        if not self._is_closed:
            self._logged.put((step, values, later))

    def close(self) -> None:
        """Write what is left, as far as that can be done in seconds. A second call does nothing."""
        if self._is_closed or not self._thread.is_alive():  # a process that was forked has no such thread
            return
        self._is_closed = True
        self._has_failed = sys.exc_info()[0] is not None or hasattr(sys, "last_type")
        self._logged.put(None)
        self._thread.join(_PATIENCE_S)
        if self._thread.is_alive():
            sys.stderr.write(f"lockstep: {self._busy} does not end: what was logged last may be missing there\n")

    def _follow(self, beginnings: Mapping[str, Callable[[], Logger]]) -> None:
        loggers: dict[str, Logger] = {}
        for name, begin in beginnings.items():
            self._try(name, f"nothing is logged to {name}", lambda n=name, b=begin: loggers.update({n: b()}))
        while (logged := self._logged.get()) is not None:
            step, values, later = logged
            while (more := {} if later is None else later()) is None:
                time.sleep(_PERIOD_S)
            values = {**values, **more}
            for name, logger in tuple(loggers.items()):
                what = f"nothing is logged to {name} any more, from step {step} on"
                if not self._try(name, what, partial(logger.log, step, values)):
                    del loggers[name]
        for name, logger in loggers.items():
            self._try(name, f"what was logged last may be missing in {name}", partial(logger.close, self._has_failed))

    def _try(self, name: str, failed: str, call: Callable[[], object]) -> bool:
        """Whether `call` did not raise."""
        self._busy = name
        try:
            call()
        except BaseException as error:  # noqa: BLE001 (a full disk, no login; exit() too, which would end this thread)
            sys.stderr.write(f"lockstep: {failed}: {type(error).__name__}: {error}\n")
            return False
        return True


def open_loggers(names: Sequence[str], folder: Path, config: Mapping[str, Any], step: int = 0) -> Loggers:
    """The loggers of `names`, which `logger_names` has taken. To be called on rank 0 only.

    folder: of the run, which has its name; what they write lies there, where they let one say so. config: the run's
    options. step: the run goes on after it.
    """
    run_id = cache(partial(_id_of, folder, step))
    kinds = {name: _LOGGERS[name] for name in names}
    return Loggers({name: lambda kind=kind: kind(folder, run_id(), config, step) for name, kind in kinds.items()})


def _tensorboard(folder: Path, run_id: str, config: Mapping[str, Any], step: int) -> Logger:
    """Event files in the run's folder: `tensorboard --logdir FOLDER`."""
    from torch.utils.tensorboard import SummaryWriter

    purge = step + 1 if step else None  # an earlier start may have logged steps that are done again
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge, flush_secs=_FLUSH_S)
    writer.add_text("config", f"```\n{json.dumps(dict(config), indent=2, default=str)}\n```")

    def log(at: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, at)

    return Logger(log, lambda has_failed: writer.close())


def _wandb(folder: Path, run_id: str, config: Mapping[str, Any], step: int) -> Logger:
    """Weights & Biases, offline unless WANDB_MODE says otherwise: `wandb sync` uploads it later."""
    wandb, mode = importlib.import_module("wandb"), os.environ.get("WANDB_MODE") or "offline"
    if mode == "online" and sys.stdin.isatty() and not wandb.login(prompt=False):  # it would ask the terminal
        raise ConfigError("no API key is configured: `wandb login`, or set WANDB_API_KEY")
    project = os.environ.get("WANDB_PROJECT") or _PROJECT
    about = {"name": folder.name, "id": run_id, "resume": "allow", "config": dict(config), "dir": str(folder)}
    run = wandb.init(project=project, **about, mode=mode)
    return _logger_of(run, lambda has_failed: run.finish(exit_code=1 if has_failed else None))  # None: what wandb knows


def _trackio(folder: Path, run_id: str, config: Mapping[str, Any], step: int) -> Logger:
    """trackio, in its own local files: `trackio show`."""
    name = f"{folder.name}-{run_id}"  # another run of that name would be gone on with
    run = importlib.import_module("trackio").init(project=_PROJECT, name=name, config=dict(config), resume="allow")
    return _logger_of(run, lambda has_failed: run.finish())


def _logger_of(run: Any, finish: Callable[[bool], object]) -> Logger:
    return Logger(lambda step, values: run.log(dict(values), step=step), finish)


def _id_of(folder: Path, step: int) -> str:
    """Equal for all starts of one run: those that go on after a step."""
    path = folder / _ID
    if not (step and path.exists()):
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:8] + "\n")
    return path.read_text().strip()


_LOGGERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
