"""`lockstep run --watch`, `lockstep train --watch`: the run in a process of its own, and here what `watch` shows of it.

What the ranks print would be written across the rows, so it goes into a file beside the record; its end is shown here
once the run is over.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lockstep.cli.watch import show
from lockstep.errors import ConfigError
from lockstep.observe.profile.window import LAUNCH
from lockstep.observe.report.source import record_in
from lockstep.observe.report.terminal import ending_by_exception
from lockstep.observe.report.writing import shown

OUTPUT = "output.txt"
_PERIOD_S = 0.1
_LINES = 24  # of the output that are shown in the end


def watched(command: Sequence[str], folder: Path) -> int:
    """Do `lockstep COMMAND`, whose run is recorded in `folder`, and show it; its exit code.

    Ctrl-C and signals that end a process are for the run: this waits until it is over.
    """
    with tempfile.NamedTemporaryFile("w+", errors="replace", prefix="lockstep-output-") as output:
        since_s, words = time.time(), [sys.executable, "-m", "lockstep", *command]
        child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            with ending_by_exception():
                if _has_begun(child, folder, since_s):
                    show(folder, "Ctrl-C stops the run")
        except SystemExit:
            child.terminate()
        except KeyboardInterrupt:  # it has got this too
            pass
        except ConfigError as error:  # nothing to show: the run goes on
            print(f"lockstep: {error}", file=sys.stderr)
        code = _end_of(child)
        _tell(Path(output.name), folder)
    return code if code >= 0 else 128 - code


def _has_begun(child: subprocess.Popen[bytes], folder: Path, since_s: float) -> bool:
    """Wait for its record, not one of an older run; False where it ends before."""
    while child.poll() is None:
        place = record_in(folder)
        with suppress(FileNotFoundError):  # an older run is moved away
            if any(path.stat().st_mtime >= since_s for path in (*place.glob("rank-*.jsonl"), *place.glob(LAUNCH))):
                return True
        time.sleep(_PERIOD_S)
    return False


def _end_of(child: subprocess.Popen[bytes]) -> int:
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:  # a second one: the run ends at once, and takes a moment for that
            continue


def _tell(output: Path, folder: Path) -> None:
    """Keep what was printed, and show its end."""
    lines = output.read_text(errors="replace").splitlines(True)
    if folder.is_dir():
        shutil.copyfile(output, folder / OUTPUT)
        if len(lines) > _LINES:
            print(f"lockstep: all that was printed: {shown(folder / OUTPUT)}; its end:", flush=True)
            lines = lines[-_LINES:]
    sys.stdout.writelines(lines)
    sys.stdout.flush()
