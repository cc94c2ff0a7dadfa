"""`lockstep run --watch`, `lockstep train --watch`: the run in a process of its own, and here what `watch` shows of it.

What the ranks print would be written across the rows, so it goes into a file beside the record; its end is shown here
once the run is over.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from lockstep.cli import ends_with_me
from lockstep.cli.watch import show
from lockstep.errors import ConfigError
from lockstep.launch.private_folder import private_folder
from lockstep.observe.report.source import files_in, record_in
from lockstep.observe.report.terminal import ending_by_exception
from lockstep.observe.report.writing import shown

OUTPUT = "output.txt"
_PERIOD_S = 0.1
_LINES = 24  # of the output that are shown in the end


def watched(command: Sequence[str], folder: Path) -> int:
    """Do `lockstep COMMAND`, whose run is recorded in `folder`, and show it; its exit code.

    Ctrl-C and signals that end a process are for the run: this waits until it is over. Where this one is killed, the
    run is asked to stop.
    """
    with private_folder() as private, (private / OUTPUT).open("w") as output:
        since_s, words = time.time(), [sys.executable, "-m", "lockstep", *command]
        child = subprocess.Popen(
            words, env=os.environ | ends_with_me(), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,  # or a Ctrl-C at the terminal would come twice, and end it at once
        )  # fmt: skip
        with _passing_on_interrupts(child):
            try:
                with ending_by_exception(), suppress(KeyboardInterrupt):
                    if _has_begun(child, folder, since_s):
                        show(folder, "Ctrl-C stops the run")
            except SystemExit:
                child.terminate()
            except (ConfigError, OSError) as error:  # it cannot be shown here: the run goes on
                print(f"lockstep: {error}", file=sys.stderr)
            code = _end_of(child)
        _tell(private / OUTPUT, folder)
    return code if code >= 0 else 128 - code


@contextmanager
def _passing_on_interrupts(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Within, each SIGINT goes to `child` too, and raises KeyboardInterrupt as ever."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _has_begun(child: subprocess.Popen[bytes], folder: Path, since_s: float) -> bool:
    """Wait for its record, not one of an older run; False where it ends before."""
    while child.poll() is None:
        with suppress(FileNotFoundError):  # an older run is moved away
            if any(path.stat().st_mtime >= since_s for path in files_in(record_in(folder))):
                return True
        time.sleep(_PERIOD_S)
    return False


def _end_of(child: subprocess.Popen[bytes]) -> int:
    while True:
        with suppress(KeyboardInterrupt):  # a second one: the run ends at once, and takes a moment for that
            return child.wait()


def _tell(output: Path, folder: Path) -> None:
    """Keep what was printed, and show its end."""
    lines = output.read_text(errors="replace").splitlines(True)
    if folder.is_dir():
        try:
            shutil.copyfile(output, folder / OUTPUT)
        except OSError as error:
            print(f"lockstep: what was printed is not kept in {shown(folder)}: {error.strerror}", file=sys.stderr)
        else:
            if len(lines) > _LINES:
                print(f"lockstep: all that was printed: {shown(folder / OUTPUT)}; its end:", flush=True)
                lines = lines[-_LINES:]
    sys.stdout.writelines(lines)
    sys.stdout.flush()
