"""Commands whose words are the fields of a dataclass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import tyro

from lockstep.launch.words import refuse

Command = TypeVar("Command")
_WITHOUT_NAME = ("run", "steps")
RunFolder = Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")]


def read_command(kind: type[Command], name: str, words: Sequence[str]) -> Command:
    """`words` as the command `lockstep NAME`. A wrong value and --help end the process. Raises: ConfigError."""
    prog, fields = f"lockstep {name}", dataclasses.fields(cast(Any, kind))
    options = [f"--{field.name.replace('_', '-')}" for field in fields if field.name not in _WITHOUT_NAME]
    options += [f"--no-{field.name}" for field in fields if field.default is True]
    for word in words:  # tyro takes an unknown option for the folder
        if word.startswith("--") and word.partition("=")[0].replace("_", "-") not in (*options, "--help"):
            refuse(word, options, prog)
    command, unknown = tyro.cli(kind, args=list(words), prog=prog, return_unknown_args=True)
    if unknown:
        refuse(unknown[0], options, prog)
    return command
