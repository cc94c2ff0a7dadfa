"""Tensors inside whatever a module returns."""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import pytest
import torch

from lockstep.parallel.outputs import find_tensors, move_tensors

A, B = torch.zeros(1), torch.ones(2)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    left: Any
    right: Any = dataclasses.field(default=None, init=False)


def record() -> Record:
    made = Record(A)
    made.right = {"b": B}
    return made


def endless() -> list[Any]:
    loop: list[Any] = [A]
    loop.append(loop)
    return [loop, B]


@pytest.mark.parametrize(
    "value",
    [
        (A, B),
        [A, [B]],
        {"a": A, "b": {"b": B}},
        collections.OrderedDict(a=A, b=B),
        Pair(A, (B, None)),
        record(),
        types.MappingProxyType({"a": A, "b": B}),
        [None, 1, "text", b"bytes", 2.5, A, {B}],
    ],
    ids=lambda value: type(value).__name__,
)
def test_finds_both(value: Any) -> None:
    found = [id(tensor) for tensor in find_tensors(value)]
    assert sorted(found) == sorted([id(A), id(B)])


def test_a_tensor_is_its_own_content() -> None:
    assert [id(tensor) for tensor in find_tensors(A)] == [id(A)]


@pytest.mark.parametrize(
    "value",
    [None, 3, "text", Record, torch.nn.Linear(2, 2), int, object(), types.SimpleNamespace(a=A), collections.deque([A])],
)
def test_looks_into_nothing_else(value: Any) -> None:
    assert list(find_tensors(value)) == []


def test_ends_where_an_output_holds_itself() -> None:
    found = {id(tensor) for tensor in find_tensors(endless())}
    assert found == {id(A), id(B)}


def test_a_dataclass_with_a_field_that_was_not_set() -> None:
    made = Record.__new__(Record)
    made.left = A
    assert [id(tensor) for tensor in find_tensors(made)] == [id(A)]


def test_move_keeps_the_shape_and_what_is_there_already() -> None:
    moved = move_tensors({"a": [A, 1], "p": Pair(B, "x")}, torch.device("cpu"))
    assert moved["a"][0] is A
    assert isinstance(moved["p"], Pair)
    assert moved["p"].left is B
    assert move_tensors((A,), torch.device("meta"))[0].device.type == "meta"
