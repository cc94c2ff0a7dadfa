"""`lockstep.log`: numbers of a script's own, in the record of its run and in the loggers it was started with."""

from __future__ import annotations

import operator
from typing import Any

from lockstep.errors import ConfigError
from lockstep.observe.profile.notes import log_values


def log(step: int | None = None, **values: Any) -> None:
    """Write down numbers of a step, for the curves of its report: `lockstep.log(step, loss=loss, accuracy=0.93)`.

    step: optimizer steps done; None is as many as this rank has been seen to do. A second number of the same name and
    step replaces the first. values: numbers, or tensors with one element; of those on a GPU a copy is taken, and read
    once it is there. Many steps are thinned out, like the steps of the record.

    Any rank may call it, with its own numbers; loggers get rank 0's. It costs a few microseconds, and does nothing in a
    program that neither `lockstep run` nor `lockstep train` has started.
    Raises: ConfigError for what is no number.
    """
    try:
        step = None if step is None else operator.index(step)
    except TypeError as error:
        usage = "its numbers have names: lockstep.log(step, loss=loss); of a dict: lockstep.log(step, **numbers)"
        raise ConfigError(f"lockstep.log({type(step).__name__}): that is no step; {usage}") from error
    numbers: dict[str, Any] = {}
    for name, value in values.items():
        if getattr(value, "is_cuda", False) and value.numel() == 1:
            numbers[name] = value  # a copy is taken with the note, see `read_later`
            continue
        try:
            numbers[name] = float(value.item() if hasattr(value, "item") else value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"lockstep.log({name}=...): {type(value).__name__} is no number: {error}") from error
    if "at_us" in numbers:
        raise ConfigError("lockstep.log(at_us=...): the record has this name for the time; choose another")
    log_values(step, numbers)
