"""Scripts of ranks, run as Python runs them, but in forks of a process that has torch: seconds less for each."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path


def start(folder: Path, words: Sequence[str], environ: Mapping[str, str], stderr: Path) -> BaseProcess:
    """`python *words` in `folder`, with this environment alone."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lockstep.testing.preload", "pytest"])
    process = context.Process(target=_run, args=(str(folder), list(words), dict(environ), str(stderr)), daemon=True)
    process.start()
    return process


def _run(folder: str, words: list[str], environ: dict[str, str], stderr: str) -> None:
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    file = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(file, 2)
    os.close(file)
    sys.argv, sys.path[:] = words, [folder, *sys.path]
    code = 0
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - told as the interpreter would tell it
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
