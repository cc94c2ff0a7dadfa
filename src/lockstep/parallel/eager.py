"""What torch.compile must leave alone: a compiled wrapper compiles its module, not the bookkeeping around it."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def compile_only_the_module(wrapper: type) -> None:
    """Let torch.compile skip `wrapper.forward` itself, and what it does before and after it runs the module.

    Called when the first wrapper is made, not at import: it loads the compiler, which takes most of a second. Torch's
    DDP does the same.
    """
    methods: Any = wrapper
    methods.forward = torch.compiler.disable(methods.forward, recursive=False)
    methods._pre_forward = torch.compiler.disable(methods._pre_forward)
    methods._post_forward = torch.compiler.disable(methods._post_forward)
