"""Begins a demo as `lockstep demo` does, and has its guard say after each finding how often it has looked for it.

Looks are the guard's own clock: there are four a second, and fewer on a machine that has no time for them.
"""

from __future__ import annotations

import re
import sys
import threading
import time

from lockstep.cli import demo_begin
from lockstep.observe.process_guard import current_guard
from lockstep.observe.wording import Finding

guard = current_guard()
looks: list[int] = []


def look() -> None:
    """The rank's own thread looks more often, once an operation of its has failed."""
    if threading.current_thread() is not threading.main_thread():
        looks.append(time.monotonic_ns())


def tell(finding: Finding) -> None:
    """Since the collective that differs, or else the newest operation of this rank, has begun."""
    assert guard is not None
    records = guard.records(0, sys.maxsize)
    seq = re.search(r"collective #(\d+)", finding.text)
    group = re.search(r"group (.+?)\.  ", finding.text)
    if seq and group:
        records = [one for one in records if (one.group, one.seq) == (group[1], int(seq[1]))] or records
    began_ns = records[-1].entered_ns if records else 0
    sys.stderr.write(f"looked {sum(at > began_ns for at in looks)} times for it\n")
    sys.stderr.flush()


if guard is not None:
    guard.before_look.append(look)
    guard.on_finding.append(tell)
demo_begin.main()
