"""Nested state to flat tables and back."""

from __future__ import annotations

import pytest
import torch

from lockstep.checkpoint.state import flatten_state, unflatten_state
from lockstep.errors import CheckpointError


def test_round_trip_keeps_nesting_values_and_empty_dicts() -> None:
    state = {
        "step": 3,
        "nothing": None,
        "empty": {},
        "config": {"model.width": 64, "list": [1, {"a": 2}]},
        "model": {"h.0.weight": torch.arange(6.0).view(2, 3), "scalar": torch.tensor(1.5)},
        "optimizer": {"h.0.weight": {"step": torch.tensor(2.0)}},
    }
    flat = flatten_state(state)
    assert set(flat.tensors) == {"model/h.0.weight", "model/scalar", "optimizer/h.0.weight/step"}
    back = unflatten_state(flat)
    assert back["config"] == state["config"]
    assert (back["step"], back["nothing"], back["empty"]) == (3, None, {})
    assert torch.equal(back["model"]["h.0.weight"], state["model"]["h.0.weight"])
    assert back["optimizer"]["h.0.weight"]["step"] == 2.0


def test_tied_tensors_are_stored_once_and_come_back_tied() -> None:
    shared = torch.ones(3)
    flat = flatten_state({"a": shared, "b": {"c": shared}})
    assert set(flat.tensors) == {"a"}
    assert flat.aliases == {"b/c": "a"}
    back = unflatten_state(flat)
    assert back["b"]["c"] is back["a"]


def test_views_strides_and_empty_tensors_are_stored_alone() -> None:
    base = torch.arange(12.0).view(3, 4)
    state = {"column": base[:, 1], "turned": base.t(), "first": base[0], "none": torch.empty(0), "nil": torch.empty(0)}
    flat = flatten_state(state)
    assert not flat.aliases
    for path, tensor in flat.tensors.items():
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert torch.equal(tensor, state[path])


@pytest.mark.parametrize("key", ["a/b", "", 3])
def test_key_that_is_no_path_component_is_refused(key: object) -> None:
    with pytest.raises(CheckpointError, match="cannot be a key"):
        flatten_state({"outer": {key: 1}})
