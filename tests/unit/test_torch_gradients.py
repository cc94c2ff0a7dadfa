"""What is hung onto a stock torch program's parameters, to see their gradients."""

from __future__ import annotations

import warnings
from typing import Any, cast

import torch
from torch.utils.hooks import warn_if_has_hooks

from lockstep.observe.guard import Guard
from lockstep.observe.patches import Patches
from lockstep.observe.torch_gradients import GradientFacts


def test_a_parameter_that_is_followed_goes_to_another_process_without_a_warning() -> None:
    patches = Patches()
    facts = GradientFacts(cast(Guard, None), lambda optimizer: [], patches)
    param = torch.nn.Parameter(torch.ones(3))
    facts.follow([param])
    param.sum().backward()
    assert len(facts._own) == 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_has_hooks(cast(Any, param))  # as torch does where it sends a tensor on
    patches.undo()
    assert not param._backward_hooks
