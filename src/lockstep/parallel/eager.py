"""What torch.compile must leave alone: a compiled wrapper compiles its module, not the bookkeeping around it."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def compile_only_the_module(wrapper: type, through: tuple[str, ...], around: tuple[str, ...]) -> None:
    """Let torch.compile skip some methods of `wrapper`.

    through: methods that run the module: skipped themselves, what they call is compiled.
    around: methods that run before and after it: skipped with all they call.
    Called when the first wrapper is made, not at import: it loads the compiler, which takes most of a second. Torch's
    DDP does the same.
    """
    methods: Any = wrapper
    for name in through:
        setattr(methods, name, torch.compiler.disable(getattr(methods, name), recursive=False))
    for name in around:
        setattr(methods, name, torch.compiler.disable(getattr(methods, name)))
