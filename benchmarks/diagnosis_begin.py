"""Begins a program of the gallery as `lockstep demo` does, and writes down the moment of its fault.

`$DIAGNOSIS_FAULT` is "LINE CONDITION": before that line of the program, whoever meets the condition appends the time
to `$DIAGNOSIS_MARKS`. The lines of the program stay what they are.
"""

from __future__ import annotations

import ast
import builtins
import os
import time
from typing import Any

from lockstep.cli import demo_begin


def mark() -> None:
    """Now."""
    with open(os.environ["DIAGNOSIS_MARKS"], "a") as file:
        file.write(f"{time.monotonic()}\n")


def marked(source: str, path: str, mode: str) -> Any:
    """The code of the program, with `if CONDITION: mark()` before the statement of that line."""
    line, condition = os.environ["DIAGNOSIS_FAULT"].split(" ", 1)
    tree = ast.parse(source, path)
    bodies = [getattr(node, name, None) for node in ast.walk(tree) for name in ("body", "orelse")]
    lists = [body for body in bodies if isinstance(body, list)]  # that of an expression is none
    found = [(body, at) for body in lists for at, one in enumerate(body) if one.lineno == int(line)]
    if not found:
        raise ValueError(f"{path}:{line} begins no statement")
    body, at = found[0]
    call = ast.parse("\n" * (int(line) - 1) + f"if {condition}: mark()").body[0]
    body.insert(at, call)
    return compile(tree, path, mode)


builtins.mark = mark  # type: ignore[attr-defined]
demo_begin.compile = marked  # type: ignore[attr-defined]
demo_begin.main()
