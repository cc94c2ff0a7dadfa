"""What a rank tells of its models in time, and no longer than it has to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lockstep.observe.facts import Facts
from lockstep.observe.followed_model import Model
from lockstep.observe.patches import Patches
from lockstep.observe.torch_models import ModelFacts

TEAM = "world/2/7"


@pytest.mark.parametrize("step", [0, 41])
@pytest.mark.parametrize("way", ["forward", "none", "gone"])
def test_what_a_model_is_made_of_is_shown_until_its_first_step_has_ended(step: int, way: str) -> None:
    """Who shows something is taken for one that disputes it, and waits for the others at the end of the program."""
    module, facts = torch.nn.Linear(4, 2), Facts()
    named = [*module.named_parameters()]
    models = {1: Model(module, TEAM, "ddp", named=named)}
    watch = ModelFacts(cast("Any", SimpleNamespace(facts=facts, world_size=2)), models, Patches())
    facts.tell(f"model {TEAM}", "wrapped", ["digest"], lambda: [["weight"]])
    facts.show(f"model {TEAM}", "wrapped")
    if way == "forward":
        models[1].forwards[0] = 1
    if way == "gone":
        del module, named
    assert not watch.end_step(step, models[1])
    assert facts.is_disputed == (way == "none" and step > 0)
    assert (1 in models) == (way != "gone")
