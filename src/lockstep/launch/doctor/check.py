"""What one check has found, and how it is written for a person. No torch."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Literal, NamedTuple

Status = Literal["ok", "warn", "FAIL"]

WIDTH = 79
_INDENT = " " * 16


class Check(NamedTuple):
    """One line of the report. `fix` is what to type or to change; "" where nothing is to be done."""

    status: Status
    name: str
    found: str
    fix: str = ""

    def text(self) -> str:
        """As lines of at most 79 columns, where no single word is longer: status, name, what was found, the fix."""
        head = f"{self.status:<4} {self.name:<10} "
        lines = _wrapped(self.found, head)
        return "\n".join(lines + (_wrapped(self.fix, f"{_INDENT}-> ") if self.fix else []))


def _wrapped(text: str, head: str) -> list[str]:
    indent = _INDENT if len(head) <= len(_INDENT) else " " * len(head)
    return textwrap.wrap(
        " ".join(text.split()),
        WIDTH,
        initial_indent=head,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def summary(checks: Sequence[Check]) -> str:
    """`12 ok, 1 warn, 0 FAIL`"""
    return ", ".join(f"{sum(check.status == status for check in checks)} {status}" for status in ("ok", "warn", "FAIL"))


def has_failed(checks: Sequence[Check]) -> bool:
    """True where a run could not work."""
    return any(check.status == "FAIL" for check in checks)


def size(nbytes: float) -> str:
    """`24 GiB`, `63 MiB`; "unlimited" for infinity."""
    if nbytes == float("inf"):
        return "unlimited"
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**power:
            return f"{nbytes / 1024**power:.3g} {unit}"
    return f"{nbytes:.0f} B"
