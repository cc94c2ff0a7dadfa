"""`lockstep doctor`: is this machine, are these machines fit for a run; if not, which hop fails and what to type."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from lockstep.launch.doctor.asked import read_asked
from lockstep.launch.doctor.check import Check, has_failed, summary
from lockstep.launch.doctor.examination import examine
from lockstep.launch.worker import INTERRUPTED


def doctor(words: Sequence[str]) -> int:
    """`lockstep doctor [torchrun's flags]`; 0 where nothing stands in the way of a run, 1 where something does.

    Raises: ConfigError for flags that contradict each other.
    """
    asked = read_asked(words, os.environ)
    checks: list[Check] = []

    def say(check: Check) -> None:
        checks.append(check)
        if not asked.is_json:
            print(check.text(), flush=True)

    environ = dict(os.environ)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # what torch would warn of is said in plain words
    exit_code = examine(asked, environ, say)
    failed = has_failed(checks)
    if asked.is_json:
        print(json.dumps({"ok": not failed, "checks": [check._asdict() for check in checks]}, indent=2))
    else:
        print(f"lockstep doctor: {summary(checks)}")
    return INTERRUPTED if exit_code == INTERRUPTED else int(failed)
