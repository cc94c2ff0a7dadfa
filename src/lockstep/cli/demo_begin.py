"""Runs a demo as `python script.py` would, and says MARK when torch is there: seconds are counted from then on."""

import os
import sys
import time

import torch  # noqa: F401 (what takes long)


def main() -> None:
    """`demo_begin.py MARK SCRIPT`"""
    _, mark, path = sys.argv
    sys.stdout.write(f"{mark} {time.time()}\n")
    sys.stdout.flush()
    sys.argv, sys.path[0] = [path], os.path.dirname(path)
    with open(path) as file:
        source = file.read()
    exec(compile(source, path, "exec"), {"__name__": "__main__", "__file__": path})


if __name__ == "__main__":
    main()
