"""Saves one after the other: what is agreed on once holds while the structure does, and never longer, on any rank."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.checkpoint.flatten import flatten
from lockstep.comm.communicator import Communicator
from lockstep.comm.tensor_parts import Part, TensorPieces
from lockstep.errors import CheckpointError, CheckpointMismatch
from lockstep.testing.worlds import run_threads
from sharded_tensors import cut, mesh_of

State = dict[str, Any]


def state_of(step: int) -> State:
    """New tensors at every call, of one structure, with other numbers for every step."""
    draw = torch.Generator().manual_seed(step)
    big = torch.randn(270, 1001, generator=draw)  # cut between rows
    return {
        "model": {"big": big, "tied": big, "odd": torch.randn(7, 3, generator=draw), "none": torch.empty(0, 4)},
        "opt": {0: {"step": torch.tensor(float(step)), "m": torch.randn(5, generator=draw)}, 3: {}},
        "lists": [[step, 2.5], (step,), [torch.randn(2, generator=draw), "x"]],
        "step": step,
    }


def shard_of(rank: int, step: int) -> State:
    return {"rng": torch.full((rank + 2,), 10 * step + rank), "seen": [step, rank], "deep": ([step], {})}


def same(found: Any, expected: Any) -> bool:
    """Equal values and kinds, equal tensors, equal ties."""
    one, other = flatten({"": found}), flatten({"": expected})
    if (one.values, one.kinds, one.tensors.keys() | one.aliases.keys()) != (
        other.values,
        other.kinds,
        other.tensors.keys() | other.aliases.keys(),
    ):
        return False
    one_target, other_target = ({**{p: p for p in flat.tensors}, **flat.aliases} for flat in (one, other))
    return all(
        one.tensors[one_target[path]].dtype == other.tensors[other_target[path]].dtype
        and torch.equal(one.tensors[one_target[path]], other.tensors[other_target[path]])
        and (path in one.aliases) == (path in other.aliases)
        for path in one_target
    )


def check(folder: Path, step: int, expected: State, shards: dict[int, State] | None = None) -> None:
    """The checkpoint of `step`, read by one process, is that state."""
    found = Checkpointer(folder).load(step=step, shards=shards or {})
    assert found is not None
    assert same(found.state, expected)
    assert found.shards.keys() == (shards or {}).keys()
    assert all(same(found.shards[number], shard) for number, shard in (shards or {}).items())


@pytest.mark.parametrize("world_size", [1, 3])
def test_one_plan_serves_new_tensors_and_new_values(tmp_path: Path, world_size: int) -> None:
    def save(comm: Communicator) -> None:
        with Checkpointer(tmp_path, comm, keep=None) as checkpointer:
            plans = []
            for step in range(1, 6):
                state = state_of(step)
                if comm.rank == step % comm.world_size:  # in memory that is not in order, and in another order of keys
                    state["model"]["odd"] = state["model"]["odd"].t().contiguous().t()
                    state["opt"] = OrderedDict(reversed(state["opt"].items()))
                shards = {comm.rank: shard_of(comm.rank, step)}
                if step % 2:
                    checkpointer.save(step, state, shards=shards)
                else:
                    checkpointer.save_async(step, state, shards=shards)
                    state["model"]["big"].zero_()
                plans.append(checkpointer._plan)
            assert all(plan is plans[0] for plan in plans)
            if comm.rank == 0:
                assert plans[0] is not None
                assert len(plans[0].pieces) > 3

    run_threads(world_size, save)
    for step in range(1, 6):
        check(tmp_path, step, state_of(step), {rank: shard_of(rank, step) for rank in range(world_size)})


# ------------------------------------------------------------------ a structure that changes


def _dtype(state: State) -> None:
    state["model"]["odd"] = state["model"]["odd"].double()


def _shape(state: State) -> None:
    state["model"]["odd"] = state["model"]["odd"].reshape(3, 7)


def _turned(state: State) -> None:
    state["model"]["big"] = state["model"]["tied"] = state["model"]["big"].t()


def _missing(state: State) -> None:
    del state["opt"][0]["m"]


def _extra(state: State) -> None:
    state["opt"][3]["m"] = torch.ones(3)


def _renamed(state: State) -> None:
    state["model"]["even"] = state["model"].pop("odd")


def _untied(state: State) -> None:
    state["model"]["tied"] = state["model"]["big"] + 1


def _tied(state: State) -> None:
    state["model"]["odd2"] = state["model"]["odd"]


def _tensor_for_value(state: State) -> None:
    state["step"] = torch.tensor(state["step"])


def _value_for_tensor(state: State) -> None:
    state["opt"][0]["step"] = float(state["opt"][0]["step"])


def _tuple_for_list(state: State) -> None:
    state["lists"][2] = tuple(state["lists"][2])


def _text_for_number(state: State) -> None:
    state["opt"] = {str(key): value for key, value in state["opt"].items()}


def _true_for_one(state: State) -> None:
    state["flag"] = True


CHANGES: dict[str, tuple[Callable[[State], None], str]] = {
    "dtype": (_dtype, "tensors than rank 0: model/odd"),
    "shape": (_shape, "tensors than rank 0: model/odd"),
    "turned": (_turned, "tensors than rank 0: model/big"),
    "missing": (_missing, "tensors than rank 0: opt/0/m"),
    "extra": (_extra, "tensors than rank 0: opt/3/m"),
    "renamed": (_renamed, "tensors than rank 0: model/even, model/odd"),
    "untied": (_untied, "model/tied: tied to another tensor on one rank and not on all"),
    "tied": (_tied, "tensors than rank 0: model/odd2"),
    "tensor for value": (_tensor_for_value, "tensors than rank 0: step"),
    "value for tensor": (_value_for_tensor, "tensors than rank 0: opt/0/step"),
    "tuple for list": (_tuple_for_list, "values than rank 0: lists/2"),
    "text for number": (_text_for_number, "values than rank 0: opt"),
    "true for one": (_true_for_one, "values than rank 0: flag"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_structure_that_changes_on_one_rank_is_named_on_all_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    change, says = CHANGES[name]

    def save(comm: Communicator) -> None:
        with Checkpointer(tmp_path, comm, keep=None) as checkpointer:
            checkpointer.save_async(1, state_of(1))
            for victim, put in ((1, checkpointer.save), (2, checkpointer.save_async)):
                state = state_of(2)
                if comm.rank == victim:
                    change(state)
                with pytest.raises(CheckpointError, match=says):
                    put(2, state)
            assert checkpointer.steps() == [1]
            checkpointer.save_async(3, state_of(3))
            state = state_of(4)
            change(state)
            checkpointer.save_async(4, state)
            checkpointer.save_async(5, state_of(5))

    run_threads(3, save)
    for step in (1, 3, 5):
        check(tmp_path, step, state_of(step))
    changed = state_of(4)
    change(changed)
    check(tmp_path, 4, changed)


def test_values_of_one_rank_that_differ_are_named_also_under_a_known_plan(tmp_path: Path) -> None:
    def save(comm: Communicator) -> None:
        with Checkpointer(tmp_path, comm) as checkpointer:
            checkpointer.save(1, state_of(1))
            for wrong in (state_of(2) | {"step": 7}, state_of(2) | {"step": 2.0}, state_of(2) | {"step": "2"}):
                state = wrong if comm.rank == 1 else state_of(2)
                with pytest.raises(CheckpointMismatch, match=r"ranks \[1\] have other values than rank 0: step\."):
                    checkpointer.save_async(2, state)
            checkpointer.save(2, state_of(2))

    run_threads(2, save)
    check(tmp_path, 2, state_of(2))


def test_failure_of_one_rank_between_two_saves_of_one_structure(tmp_path: Path) -> None:
    def save(comm: Communicator) -> None:
        with Checkpointer(tmp_path, comm, keep=None) as checkpointer:
            for step in (1, 2, 3):
                checkpointer.save_async(step, state_of(step))
                bad = state_of(step) | ({"f": print} if comm.rank == 1 else {})
                with pytest.raises(CheckpointError, match=r"rank 1: f is of type .*function"):
                    checkpointer.save_async(step, bad)
            if comm.rank == 0:
                checkpointer._plan = None  # as where a signal has ended the call before on this rank
            checkpointer.save_async(4, state_of(4))

    run_threads(2, save)
    for step in (1, 2, 3, 4):
        check(tmp_path, step, state_of(step))


def test_memory_is_looked_at_anew_in_every_save(tmp_path: Path) -> None:
    """Paths, dtypes and shapes stay: what is one tensor, and what has no memory any more, is found out each time."""
    checkpointer = Checkpointer(tmp_path, keep=None)
    base = torch.arange(12.0)
    states = [
        {"a": base[:6], "b": base[6:]},
        {"a": base[:6], "b": base[:6]},
        {"a": base[:6], "b": base[:12:2]},  # begin at the same place
        {"a": base[:6], "b": base[:6].view(torch.int32).view(torch.float32)},
        {"a": base[6:].clone(), "b": base[:6].clone()},
    ]
    for step, state in enumerate(states):
        checkpointer.save_async(step, state)
    for bad, says in (
        (torch.ones(6, device="meta"), "meta"),
        (torch.ones(6).to_sparse(), "sparse"),
        (nn.UninitializedParameter(), "no shape"),
    ):
        with pytest.raises(CheckpointError, match=f"b .*{says}"):
            checkpointer.save_async(9, {"a": base[:6], "b": bad})
    gone = torch.ones(6)
    gone.untyped_storage().resize_(0)
    with pytest.raises(CheckpointError, match="b has given its memory back"):
        checkpointer.save_async(9, {"a": base[:6], "b": gone})
    checkpointer.close()
    for step, state in enumerate(states):
        check(tmp_path, step, state)


# ------------------------------------------------------------------ tensors that are cut


def row_pieces(whole: Tensor, first: int, end: int) -> TensorPieces:
    part = Part((first, 0), (end - first, whole.shape[1]))
    return TensorPieces(whole.dtype, tuple(whole.shape), ((part, whole[first:end].clone()),) if first < end else ())


def test_tensors_that_are_cut_otherwise_from_save_to_save(tmp_path: Path) -> None:
    """Names, dtypes and shapes are the same on all ranks all the time."""

    def cut_in_turn(step: int, whole: Tensor, rank: int) -> Any:
        here = mesh_of((3,), rank)
        return [
            lambda: cut(whole, here, 0),
            lambda: cut(whole * 1, here, 0),  # as before: the plan holds
            lambda: cut(whole, here, 1),
            lambda: whole,
            lambda: cut(whole, mesh_of((1, 3), rank), 0),
            lambda: row_pieces(whole, *((0, 4), (4, 4), (4, 7))[rank]),
            lambda: row_pieces(whole, *((0, 2), (2, 3), (3, 7))[rank]),
            lambda: cut(whole, here, 0),
        ][step]()

    def whole_of(step: int) -> State:
        return {"x": torch.arange(35.0).view(7, 5) + 100 * step, "y": torch.arange(8.0).view(2, 4) - step, "step": step}

    def save(comm: Communicator) -> None:
        with Checkpointer(tmp_path, comm, keep=None) as checkpointer:
            plans = []
            for step in range(8):
                state = whole_of(step)
                state["x"] = cut_in_turn(step, state["x"], comm.rank)
                state["y"] = cut(state["y"], mesh_of((3,), comm.rank), 0)  # rank 2 has nothing of it
                checkpointer.save_async(step, state)
                plans.append(checkpointer._plan)
            assert plans[1] is plans[0]
            assert len({id(plan) for plan in plans}) == 7

    run_threads(3, save)
    for step in range(8):
        check(tmp_path, step, whole_of(step))


def test_shards_that_move_between_ranks(tmp_path: Path) -> None:
    def save(comm: Communicator) -> None:
        with Checkpointer(tmp_path, comm, keep=None) as checkpointer:
            checkpointer.save_async(1, {}, shards={comm.rank: shard_of(comm.rank, 1)})
            with pytest.raises(CheckpointMismatch, match="ranks 0 and 1 both have shard 0"):
                checkpointer.save_async(2, {}, shards={0: shard_of(0, 2)})
            other = 1 - comm.rank
            checkpointer.save_async(2, {}, shards={other: shard_of(other, 2)})
            checkpointer.save_async(3, {}, shards={0: shard_of(0, 3), 1: shard_of(1, 3)} if comm.rank else None)
            checkpointer.save_async(4, {}, shards={comm.rank: {"words": [0.5, "é", None], "tuple": (1,)}})

    run_threads(2, save)
    for step in (1, 2, 3):
        check(tmp_path, step, {}, {rank: shard_of(rank, step) for rank in range(2)})
    check(tmp_path, 4, {}, {rank: {"words": [0.5, "é", None], "tuple": (1,)} for rank in range(2)})


# ------------------------------------------------------------------ any history


@pytest.mark.parametrize("seed", range(5))
def test_any_history_of_structures_is_loaded_as_it_was_saved(tmp_path: Path, seed: int) -> None:
    """Steps with and without changes, on all ranks or on one, in the background or not."""

    def state_at(step: int, draw: random.Random) -> State:
        state = state_of(step)
        chosen = draw.sample(sorted(CHANGES), draw.choice((0, 0, 1, 2)))
        for name in sorted(chosen, key=lambda name: name == "text for number"):  # whose keys the others do not know
            CHANGES[name][0](state)
        return state

    def history() -> list[tuple[State, State, int, bool]]:
        draw = random.Random(seed)
        return [(state_at(s, draw), state_at(s, draw), draw.randrange(9), draw.random() < 0.7) for s in range(9)]

    def save(comm: Communicator) -> None:
        with Checkpointer(tmp_path, comm, keep=None) as checkpointer:
            for step, (state, odd, victim, is_async) in enumerate(history()):
                put = checkpointer.save_async if is_async else checkpointer.save
                if victim < comm.world_size and not same(odd, state):
                    with pytest.raises(CheckpointError, match=r"(tensors|values) than rank 0|tied to another"):
                        put(step, odd if comm.rank == victim else state)
                put(step, state)

    run_threads(3, save)
    for step, (state, *_) in enumerate(history()):
        check(tmp_path, step, state)
