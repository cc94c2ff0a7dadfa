"""Nested state to flat tables and back: nothing is changed, and what cannot come back is refused by name."""

from __future__ import annotations

import enum
import math
import pathlib
import random
import struct
from collections import Counter, OrderedDict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import lr_scheduler

from lockstep.checkpoint.flatten import flatten
from lockstep.checkpoint.manifest import Manifest, from_text, to_text
from lockstep.checkpoint.plan import tied_as
from lockstep.checkpoint.state import (
    DEPTH_MAX,
    FlatState,
    State,
    check_paths,
    join,
    keys_of,
    unflatten,
)
from lockstep.checkpoint.tensor_file import FileRecord
from lockstep.errors import CheckpointError
from sharded_tensors import mesh_of

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    TEXT,
    st.sampled_from([10**30, -(2**63), 2**63 - 1, 2**63, -0.0, 5e-324, math.inf, -math.inf]),
)
KEYS = st.one_of(TEXT, st.sampled_from(["a/b", "~", "~1", "", "0", "-1", "__metadata__", "\0"])).filter(
    lambda key: key != "__metadata__"
)
NUMBERS = st.integers(-(10**18) + 1, 10**18 - 1)


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.dictionaries(KEYS, children, max_size=4),
        st.dictionaries(NUMBERS, children, max_size=4),
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter),
        st.dictionaries(NUMBERS, st.integers(), max_size=3).map(Counter),
    )


LEAVES = st.one_of(SCALARS, st.integers(0, 3).map(lambda n: torch.arange(float(n))))
STATES = st.dictionaries(KEYS, st.recursive(LEAVES, _containers, max_leaves=12), max_size=5)


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, and of the same types all through; tensors by identity."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            same(sorted(map(repr, one)), sorted(map(repr, other))) and same(one[key], other[key]) for key in one
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    return one is other if isinstance(one, torch.Tensor) else one == other


def through_text(state: Any) -> State:
    """`state` flat, through a manifest's text, and back."""
    flat = flatten(state)
    tensors = dict.fromkeys(flat.tensors, ("F32", ()))
    values = from_text(to_text(manifest_of(tensors, flat)), "here")
    return unflatten(FlatState(flat.tensors, values.values, values.kinds, values.aliases))


def manifest_of(tensors: dict[str, Any], flat: FlatState) -> Manifest:
    files = {"rank-00000.safetensors": FileRecord(10 + 4 * len(tensors), "0" * 64, (0,) * len(tensors))}
    return Manifest(0, 0, "", 1, files, tensors, flat.aliases, flat.kinds, flat.values)


@settings(max_examples=400)
@given(STATES)
@example({"nan": struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0], "zero": -0.0})
@example({"a": {True: 1} and {1: {"x": [(), [], {}, ((),)]}}, "": {"": ""}, "~2": {"~": {"/": None}}})
@example({"digits": {"0": 1, "1": 2}, "numbers": {0: 1, 1: 2}, "list": [[1], [2]], "counter": Counter()})
def test_any_state_comes_back_the_same_through_the_manifests_text(state: State) -> None:
    assert same(through_text(state), state)


def test_integers_of_any_size_come_back() -> None:
    state = {"large": [sign * (10**digits + 1) for sign in (1, -1) for digits in (18, 19, 300, 5000)]}
    assert through_text(state)["large"] == state["large"]  # of 5000 digits: more than Python makes text of


def _schedulers() -> dict[str, lr_scheduler.LRScheduler]:
    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]

    def opt() -> torch.optim.Optimizer:
        return torch.optim.SGD(weights, lr=0.1, momentum=0.9)

    one = opt()
    made: list[Any] = [
        lr_scheduler.LambdaLR(opt(), lambda epoch: 0.9**epoch),
        lr_scheduler.MultiplicativeLR(opt(), lambda epoch: 0.9),
        lr_scheduler.StepLR(opt(), 3),
        lr_scheduler.MultiStepLR(opt(), [2, 2, 5]),
        lr_scheduler.ConstantLR(opt()),
        lr_scheduler.LinearLR(opt()),
        lr_scheduler.ExponentialLR(opt(), 0.9),
        lr_scheduler.PolynomialLR(opt()),
        lr_scheduler.CosineAnnealingLR(opt(), 5),
        lr_scheduler.CosineAnnealingWarmRestarts(opt(), 5),
        lr_scheduler.ReduceLROnPlateau(opt()),
        lr_scheduler.CyclicLR(opt(), 0.1, 0.2),
        lr_scheduler.CyclicLR(opt(), 0.1, 0.2, mode="exp_range"),
        lr_scheduler.OneCycleLR(opt(), 0.1, total_steps=9),
        lr_scheduler.SequentialLR(one, [lr_scheduler.ConstantLR(one), lr_scheduler.MultiStepLR(one, [1])], [2]),
        lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(one), lr_scheduler.LinearLR(one)], one),
        torch.optim.swa_utils.SWALR(opt(), 0.05),
    ]
    return {f"{index}.{type(scheduler).__name__}": scheduler for index, scheduler in enumerate(made)}


def test_every_scheduler_of_torch_comes_back() -> None:
    known = {type(s).__name__ for s in _schedulers().values()}
    there = {name for name in dir(lr_scheduler) if isinstance(getattr(lr_scheduler, name), type)}
    there = {name for name in there if issubclass(getattr(lr_scheduler, name), lr_scheduler.LRScheduler)}
    assert there - known <= {"LRScheduler", "_LRScheduler", "_enable_get_lr_call"}
    for name, scheduler in _schedulers().items():
        for _ in range(3):
            scheduler.optimizer.step() if hasattr(scheduler, "optimizer") else None
            scheduler.step(*[1.0] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
        state = scheduler.state_dict()
        back = through_text({"s": scheduler})["s"]
        assert same(back, state), name
        scheduler.load_state_dict(back)


@pytest.mark.parametrize(
    "make",
    [
        lambda w: torch.optim.AdamW(w, amsgrad=True),
        lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.9),
        lambda w: torch.optim.LBFGS(w),
        lambda w: torch.optim.Adam([{"params": w[:1], "lr": 0.5}, {"params": w[1:]}]),
    ],
)
def test_optimizers_come_back_tensor_for_tensor(make: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = make(list(model.parameters()))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.arange(12.0).view(4, 3)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    back = through_text({"model": model, "opt": optimizer})
    assert same(back["opt"], optimizer.state_dict())
    weights = model.state_dict()
    assert list(back["model"]) == list(weights)
    assert all(back["model"][name].data_ptr() == weights[name].data_ptr() for name in weights)
    optimizer.load_state_dict(back["opt"])


def test_random_states_scalers_and_positions_come_back() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    state = {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "numpy": np.random.default_rng(3).bit_generator.state,  # integers of 128 bits
        "scaler": scaler.state_dict(),
        "position": {"epoch": 2, "shards": {0: [1, 2], 7: []}, "done": (True, None)},
    }
    back = through_text(state)
    assert same(back, state)
    random.setstate(back["python"])
    np.random.default_rng().bit_generator.state = back["numpy"]


def test_paths_and_kinds_are_these() -> None:
    state = {
        "a/b": 1,
        "opt": {"state": {0: {"m": torch.ones(1)}}, "groups": [{"betas": (0.9, 0.99), "params": [0, 1]}]},
        "empty": {"dict": {}, "list": [], "tuple": ()},
        "": OrderedDict(x=1),
    }
    flat = flatten(state)
    assert list(flat.tensors) == ["opt/state/0/m"]
    assert flat.values == {
        "a~1b": 1,
        "opt/groups/0/betas": [0.9, 0.99],
        "opt/groups/0/params": [0, 1],
        "empty/dict": {},
        "empty/list": [],
        "empty/tuple": [],
        "~2/x": 1,
    }
    assert flat.kinds == {
        "opt/state": "int_dict",
        "opt/groups": "list",
        "opt/groups/0/betas": "tuple",
        "empty/tuple": "tuple",
    }
    assert join("x", "a/b~") == "x/a~1b~0"
    assert keys_of(join(join("", ""), "a/b~")) == ["", "a/b~"]


# ------------------------------------------------------------------ tied tensors


def test_tied_tensors_are_aliases_and_come_back_as_one() -> None:
    shared = torch.ones(3)
    flat = flatten({"a": shared, "b": {"c": shared.detach(), "d": [shared.view(3)]}})
    assert list(flat.tensors) == ["a"]
    assert flat.aliases == {"b/c": "a", "b/d/0": "a"}
    back = unflatten(flat)
    assert back["b"]["c"] is back["a"] is back["b"]["d"][0]


def test_views_of_one_memory_that_are_not_the_same_elements_are_apart() -> None:
    base = torch.arange(12.0).view(3, 4)
    state = {"base": base, "turned": base.t(), "first": base[0], "bits": base.view(torch.int32)}
    empty = {"none": torch.empty(0), "nil": torch.empty(0), "conj": torch.ones(1, dtype=torch.complex64)}
    flat = flatten({**state, **empty, "conj2": empty["conj"].conj(), "square": base[:3, :3], "flip": base[:3, :3].t()})
    assert not flat.aliases


def test_a_rank_with_an_empty_piece_learns_of_ties_from_the_others() -> None:
    def seen_by(rank: int) -> FlatState:
        local = torch.ones(2 if rank == 0 else 0, 3)
        made = [
            DTensor.from_local(part, mesh_of((2,), rank), [Shard(0)], run_check=False, shape=(2, 3), stride=(3, 1))
            for part in (local, local, torch.ones_like(local))
        ]
        return flatten(dict(zip("abc", made, strict=True)))

    first, second = seen_by(0), seen_by(1)
    assert (first.aliases, second.aliases) == ({"b": "a"}, {})
    assert list(tied_as(second, first.aliases).tensors) == ["a", "c"]
    assert tied_as(first, first.aliases) == first
    with pytest.raises(CheckpointError, match=r"^b: tied"):
        tied_as(first, {})
    with pytest.raises(CheckpointError, match=r"^c: tied"):
        tied_as(first, {"b": "a", "c": "a"})


# ------------------------------------------------------------------ what is refused


class _Colour(enum.Enum):
    RED = 1


class _Level(enum.IntEnum):
    LOW = 1


_Pair = namedtuple("_Pair", "x y")

REFUSED = {
    "a set": ({1, 2}, r"sorted\(x\)"),
    "bytes": (b"ab", "frombuffer"),
    "an array": (np.zeros(2), "from_numpy"),
    "a float of numpy": (np.float64(1.0), r"x\.item\(\)"),
    "an int of numpy": (np.int64(1), r"x\.item\(\)"),
    "a text of numpy": (np.str_("a"), r"str\(x\)"),
    "a complex number": (1j, "real"),
    "a lambda": (lambda x: x, "code is not saved"),
    "a method": ([].append, "code is not saved"),
    "a class": (nn.Linear, "name"),
    "a dtype": (torch.float32, r"str\(x\)"),
    "a device": (torch.device("cpu"), r"str\(x\)"),
    "a size": (torch.Size([1]), r"tuple\(x\)"),
    "a named tuple": (_Pair(1, 2), r"tuple\(x\)"),
    "an enum": (_Colour.RED, r"x\.value"),
    "an int enum": (_Level.LOW, r"int\(x\)|x\.value"),
    "a path": (pathlib.Path("x"), r"str\(x\)"),
    "a queue": (deque([1]), r"list\(x\)"),
    "an object": (object(), "pass tensors"),
    "a module class's state of numpy": (np.random.get_state(), "from_numpy"),
    "a lone surrogate": ("\ud800", "no text"),
    "on the meta device": (torch.ones(1, device="meta"), "materialize"),
    "sparse": (torch.eye(2).to_sparse(), "dense"),
    "of 128 bits": (torch.ones(1, dtype=torch.complex128), "complex128"),
    "without a shape": (nn.LazyLinear(2).weight, "batch"),
    "bool keys": ({True: 1}, "bool"),
    "float keys": ({1.5: 1}, "float"),
    "mixed keys": ({1: 1, "1": 2}, "int, str"),
    "a long key": ({10**18: 1}, "18 digits"),
    "a key that is no text": ({"\udfff": 1}, "no text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_come_back_the_same_is_refused_by_path(name: str) -> None:
    value, hint = REFUSED[name]
    with pytest.raises(CheckpointError, match=rf"outer/0.*{hint}"):
        flatten({"outer": [{"at": value}] if not isinstance(value, dict) else [value]})


def test_memory_that_was_given_back_is_refused() -> None:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(CheckpointError, match="model/w has given its memory back"):
        flatten({"model": {"w": tensor}})


@pytest.mark.parametrize("state", [None, [1], {0: 1}, Counter(a=1), {"__metadata__": torch.ones(1)}, {"a": 1, 2: 3}])
def test_only_a_dict_with_keys_of_text_is_a_state(state: Any) -> None:
    with pytest.raises(CheckpointError, match="a state"):
        flatten(state)


def test_depth_has_a_limit_and_cycles_end() -> None:
    deep: dict[str, Any] = {"x": 1}
    for _ in range(DEPTH_MAX - 1):
        deep = {"x": deep}
    assert same(through_text(deep), deep)
    with pytest.raises(CheckpointError, match="64 deep"):
        flatten({"x": deep})
    deep["x"]["x"] = deep
    with pytest.raises(CheckpointError, match="contain itself"):
        flatten(deep)


# ------------------------------------------------------------------ tables that no state has


@pytest.mark.parametrize(
    ("paths", "kinds"),
    [
        (["a", "a/b"], {}),
        (["a/b", "a"], {}),
        (["a//b"], {}),
        ([""], {}),
        (["/a"], {}),
        (["a/"], {}),
        (["a~3"], {}),
        (["~"], {}),
        (["~2a"], {}),
        (["__metadata__"], {}),
        (["x/" * 64 + "x"], {}),
        (["a"], {"a": "list"}),
        (["a/b"], {"a": "list"}),
        (["a/1"], {"a": "list"}),
        (["a/0", "a/00"], {"a": "tuple"}),
        (["a/0", "a/2"], {"a": "tuple"}),
        (["a/01"], {"a": "int_dict"}),
        (["a/-0"], {"a": "int_dict"}),
        (["a/1e3"], {"a": "int_counter"}),
        (["a/٣"], {"a": "int_dict"}),
        (["a/0"], {"a": "set"}),
        (["a/0"], {"": "list"}),
        (["a/0"], {"b": "list"}),
        (["a/0"], {"a/0/0": "list"}),
    ],
)
def test_tables_that_contradict_themselves_are_found(paths: list[str], kinds: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"'.*'"):
        check_paths(paths, {}, kinds)
    with pytest.raises(CheckpointError, match="not the parts of a state"):
        unflatten(FlatState(dict.fromkeys(paths, torch.ones(1)), {}, kinds, {}))
    with pytest.raises(CheckpointError, match="cannot be saved"):
        to_text(manifest_of(dict.fromkeys(paths, ("F32", ())), FlatState({}, {}, kinds, {})))
