"""What a rank of `lockstep doctor` reports of its all-reduce."""

from __future__ import annotations

import warnings

from lockstep.launch.doctor import rank
from lockstep.testing.worlds import run_threads


def test_what_is_warned_of_while_it_works_is_said_in_the_report_and_not_between_its_lines() -> None:
    said = [
        warnings.WarningMessage("of another kind", FutureWarning, "a.py", 1),
        warnings.WarningMessage("all of /dev/shm is given out", RuntimeWarning, "a.py", 2),
    ]
    for reduced in run_threads(2, lambda comm: rank._all_reduce(comm, said)):
        assert reduced["is_right"]
        assert reduced["warning"] == "all of /dev/shm is given out"
