"""`torchrun torchrun_lessons.py NAME ...`: these lessons one after the other, each as `torchrun NAME.py` runs it."""

import os
import runpy
import sys
from pathlib import Path

import lockstep.lessons

for name in sys.argv[1:]:
    if os.environ["RANK"] == "0":
        print(f"=== {name}", flush=True)
    runpy.run_path(str(Path(lockstep.lessons.__file__).with_name(f"{name}.py")), run_name="__main__")
