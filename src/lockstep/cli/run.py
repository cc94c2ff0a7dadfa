"""`lockstep run`: start and supervise a script of the user's own, with torchrun's flags."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from lockstep.launch.guess import FLAGS, guess_program, guess_threads
from lockstep.launch.preload import modules_to_preload
from lockstep.launch.private_folder import private_folder
from lockstep.launch.starter import loading_ahead
from lockstep.launch.stop_signals import leaving_at_once


def run(words: Sequence[str]) -> int:
    """`lockstep run [torchrun's flags] script.py ...`; return the exit code. Raises: ConfigError before the start."""
    with leaving_at_once() as settle, ExitStack() as stack:
        program, server = guess_program(words), None
        if program is not None:
            modules = modules_to_preload(program, Path.cwd())
            server = stack.enter_context(loading_ahead(modules, FLAGS, **guess_threads(words, os.environ)))
        from lockstep.launch.launcher import launch
        from lockstep.launch.torchrun_flags import read_flags

        folder = stack.enter_context(private_folder())
        job = read_flags(words, folder, server)
        code = launch(job, settle)
    from lockstep.cli.report import tell_record

    tell_record(job.supervision.variables, is_quiet=code != 0)
    return code
