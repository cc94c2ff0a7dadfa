"""`lockstep run`: start and supervise a script of the user's own, with torchrun's flags."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.launch.guess import guess_program, guess_threads, new_record
from lockstep.launch.preload import modules_to_preload
from lockstep.launch.private_folder import private_folder
from lockstep.launch.starter import loading_ahead
from lockstep.launch.stop_signals import leaving_at_once
from lockstep.launch.worker import AGENT_PID
from lockstep.observe.profile.window import RUN


def run(words: Sequence[str]) -> int:
    """`lockstep run [torchrun's flags] script.py ...`; return the exit code. Raises: ConfigError before the start."""
    if not words:
        raise ConfigError("run what? `lockstep run -n 2 train.py`; `lockstep run --help` lists the flags")
    if words[:1] == ["--watch"]:
        return _watched(words[1:])
    if AGENT_PID in os.environ:  # a rank of another run starts this one, which has a record of its own
        os.environ.pop(RUN, None)
    with leaving_at_once() as (settle, stack):
        program, server = guess_program(words), None
        if program is not None:
            modules = modules_to_preload(program, Path.cwd())
            server = stack.enter_context(loading_ahead(modules, **guess_threads(words, os.environ)))
        from lockstep.launch.launcher import launch
        from lockstep.launch.torchrun_flags import read_flags

        job = read_flags(words, stack.enter_context(private_folder()), server)
        code = launch(job, settle)
    from lockstep.cli.report import tell_record

    tell_record(job.supervision.variables, is_quiet=code != 0)
    return code


def _watched(words: Sequence[str]) -> int:
    """Raises: ConfigError where the run would leave no record to show."""
    from lockstep.cli.watched import watched

    program = guess_program(words)
    own = words if program is None else words[: words.index(program.name)]  # the script may have a --record too
    options = ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument("--record", default=os.environ.get(RUN, ""))
    given = options.parse_known_args(own)[0].record
    if given == "off":
        raise ConfigError("--watch shows the record of the run while it is written: leave out --record off")
    folder = given or new_record("run" if program is None else program.name)
    return watched(["run", "--record", folder, *words], Path(folder))
