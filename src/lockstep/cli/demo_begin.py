"""Runs a demo as `python script.py` would, and says MARK when what takes long is there: seconds count from then on."""

import os
import sys
import time
from pathlib import Path

import torch  # noqa: F401

from lockstep.observe.process_guard import FLIGHT


def main() -> None:
    """`demo_begin.py MARK SCRIPT`"""
    _, mark, path = sys.argv
    sys.argv, sys.path[0] = [path], str(Path(path).parent)
    source = Path(path).read_text()
    if "DistributedDataParallel" in source or "optim" in source:
        import torch._dynamo  # noqa: F401 (which they load, for seconds)
    print(f"{mark} {time.time()}\n", end="", flush=True)
    names = {"__name__": "__main__", "__file__": path}
    exec(compile(source, path, "exec"), names)
    # Whatever a demo is about, the end of the interpreter is not it: there, once in some hundred times, stock torch
    # stands still for good or aborts, as a thread of Gloo has a tensor to let go of.
    if FLIGHT in os.environ:  # what lockstep has to say it says there
        time.sleep(0.5)
    else:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
