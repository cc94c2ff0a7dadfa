"""`lockstep run`: start and supervise a script of the user's own, with torchrun's flags."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from lockstep.launch.guess import FLAGS, guess_program, guess_threads
from lockstep.launch.preload import modules_to_preload
from lockstep.launch.starter import loading_ahead
from lockstep.launch.stop_signals import leaving_at_once


def run(words: Sequence[str]) -> int:
    """`lockstep run [torchrun's flags] script.py ...`; return the exit code. Raises: ConfigError before the start."""
    with ExitStack() as stack:
        program, server = guess_program(words), None
        if program is not None:
            modules = modules_to_preload(program, Path.cwd())
            server = stack.enter_context(loading_ahead(modules, FLAGS, **guess_threads(words, os.environ)))
        with leaving_at_once():
            from lockstep.launch.launcher import launch
            from lockstep.launch.torchrun_flags import read_flags

        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-"))
        return launch(read_flags(words, Path(folder), server))
