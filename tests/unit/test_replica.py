"""The first difference between two models, in words."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.observe.model_match import describe_model, first_difference

MODEL = [
    ["parameter", "weight", [3, 2], "float32", True],
    ["parameter", "bias", [3], "float32", True],
    ["buffer", "count", [], "int64", False],
]


def changed(row: int, column: int, value: object) -> list[list[object]]:
    return [
        [value if (i, j) == (row, column) else fact for j, fact in enumerate(facts)] for i, facts in enumerate(MODEL)
    ]


def test_describes_parameters_and_buffers_in_order() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model[0].bias.requires_grad_(False)
    rows = describe_model(model, ignore=["1.weight", "1.running_var"])
    assert rows == [
        ["parameter", "0.weight", [3, 2], "float32", True],
        ["parameter", "0.bias", [3], "float32", False],
        ["parameter", "1.bias", [3], "float32", True],
        ["buffer", "1.running_mean", [3], "float32", False],
        ["buffer", "1.num_batches_tracked", [], "int64", False],
    ]


def test_no_difference() -> None:
    assert first_difference(MODEL, [list(row) for row in MODEL]) is None
    assert first_difference([], []) is None


def test_names_each_kind_of_difference() -> None:
    for row, column, value, words in (
        (1, 1, "offset", ("parameter 'bias'", "rank 0 has parameter 'offset'")),
        (1, 2, [4], ("'bias'", "shape [3]", "[4]")),
        (0, 3, "float64", ("'weight'", "dtype float32", "float64")),
        (0, 4, False, ("'weight'", "requires_grad True", "False")),
        (2, 0, "parameter", ("buffer 'count'", "parameter 'count'")),
    ):
        text = first_difference(MODEL, changed(row, column, value))
        assert text is not None
        assert all(word in text for word in words), text


def test_names_what_is_too_much_and_what_is_missing() -> None:
    more, less = first_difference(MODEL, MODEL[:2]), first_difference(MODEL[:2], MODEL)
    assert more is not None
    assert "has buffer 'count'" in more
    assert less is not None
    assert "lacks buffer 'count'" in less


def test_the_first_of_several() -> None:
    theirs = changed(1, 2, [9])
    theirs[2] = ["buffer", "other", [], "int64", False]
    text = first_difference(MODEL, theirs)
    assert text is not None
    assert "'bias'" in text


def test_tied_parameters_count_once() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[1].weight = model[0].weight
    assert [row[1] for row in describe_model(model)] == ["0.weight", "0.bias", "1.bias"]
    assert torch.equal(model[1].weight, model[0].weight)


def test_the_same_in_another_order_is_said_so() -> None:
    text = first_difference(MODEL, [MODEL[1], MODEL[0], MODEL[2]])
    assert text is not None
    assert "'weight'" in text
    assert "'bias'" in text
    assert "another order" in text
