"""Runs a demo as `python script.py` would, and says MARK when what takes long is there: seconds count from then on."""

import ctypes
import io
import os
import signal
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_HAS_GUARD = "lockstep" in sys.modules  # `lockstep run` has begun this process; nothing else here knows of lockstep

if not _HAS_GUARD and sys.platform == "linux":  # torchrun, which ends with the demo, takes it along
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

import torch  # noqa: E402, F401 (takes seconds: after the line above)


def main() -> None:
    """`demo_begin.py MARK SCRIPT`"""
    _, mark, path = sys.argv
    if isinstance(sys.stdout, io.TextIOWrapper):  # lines of two ranks stay two
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    sys.argv, sys.path[0] = [path], str(Path(path).parent)
    source = Path(path).read_text()
    if "DistributedDataParallel" in source or "optim" in source:
        import torch._dynamo  # noqa: F401 (which they load, for seconds)
    print(f"{mark} {time.time()}")
    names = {"__name__": "__main__", "__file__": path}
    exec(compile(source, path, "exec"), names)
    # Whatever a demo is about, the end of the interpreter is not it: there, once in some hundred times, stock torch
    # stands still for good or aborts, as a thread of Gloo has a tensor to let go of.
    if _HAS_GUARD:  # what lockstep has to say it says there
        time.sleep(0.5)
    else:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
