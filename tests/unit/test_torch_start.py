"""A program that has changed what its launcher gave it is told so before it waits."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.observe.torch_start import misfits, own_port

_GIVEN = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
_NOW = {**_GIVEN, "RANK": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}


@pytest.mark.parametrize(
    ("changed", "call", "expected"),
    [
        ({}, {}, []),
        ({}, {"rank": 1, "world_size": 2}, []),
        ({}, {"rank": -1, "init_method": None}, []),
        ({"RANK": "0"}, {}, ["RANK=0, but the launcher gave 1"]),
        ({"RANK": "0"}, {"rank": 1}, []),
        ({}, {"rank": 0}, ["rank=0, but the launcher gave 1"]),
        ({"MASTER_ADDR": "x"}, {"init_method": "tcp://node0:12355"}, []),
        ({"MASTER_ADDR": "x"}, {"store": object()}, []),
        ({"MASTER_ADDR": "x", "TORCHELASTIC_USE_AGENT_STORE": "False"}, {}, []),
        ({"MASTER_ADDR": "x", "RANK": "5"}, {}, ["RANK=5, but the launcher gave 1",
                                                "MASTER_ADDR=x, but the launcher waits at node0"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(changed: dict[str, str], call: dict[str, Any], expected: list[str]) -> None:
    assert misfits(_GIVEN, {**_NOW, **changed}, call, 1) == expected


def test_another_name_of_this_machine_is_no_other_place() -> None:
    assert misfits({"MASTER_ADDR": "127.0.0.1"}, {**_NOW, "MASTER_ADDR": "localhost", "MASTER_PORT": ""}, {}, 1) == []


def test_variable_that_was_removed_is_named() -> None:
    now = {name: value for name, value in _NOW.items() if name != "MASTER_ADDR"}
    assert misfits(_GIVEN, now, {}, 1) == ["MASTER_ADDR=(unset), but the launcher waits at node0"]


@pytest.mark.parametrize(
    ("changed", "call", "expected"),
    [
        ({}, {}, ""),
        ({}, {"init_method": "tcp://node0:29500"}, ""),
        ({}, {"init_method": "tcp://node0:12355"}, "12355"),
        ({}, {"init_method": "file:///shared/meet"}, ""),
        ({"MASTER_PORT": "12355"}, {}, "12355"),
        ({"MASTER_PORT": "12355"}, {"init_method": "env://"}, "12355"),
        ({"MASTER_PORT": "12355"}, {"store": object()}, ""),
        ({"MASTER_PORT": ""}, {}, ""),
    ],
)
def test_port_of_the_programs_own(changed: dict[str, str], call: dict[str, Any], expected: str) -> None:
    assert own_port(_GIVEN, {**_NOW, **changed}, call) == expected
