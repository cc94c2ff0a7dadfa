"""Functional collectives are entered as what they are, each once, also those of compiled code."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from backend_groups import default_group

from lockstep.observe.first_uses import FirstUses
from lockstep.observe.flight import FlightRecorder
from lockstep.observe.scene import FROM_CPP
from lockstep.observe.sights import FlightRecord
from lockstep.observe.torch_functional import watch_functional
from lockstep.observe.torch_groups import WatchedGroup
from lockstep.testing.worlds import run_processes


def every_collective(rank: int) -> list[torch.Tensor]:
    import torch.distributed._functional_collectives as functional

    world, two = dist.group.WORLD, torch.full((2, 4), float(rank))
    found = [
        functional.all_reduce(two, "max", world),
        functional.all_gather_tensor(two, 0, world),
        functional.reduce_scatter_tensor(two, "sum", 0, world),
        functional.broadcast(two, 1, world),
        functional.all_to_all_single(two, None, None, world),
        *functional.all_reduce_coalesced([two, two[0]], "sum", world),
        *functional.all_gather_into_tensor_coalesced([two, two[0]], world),
    ]
    return [one + 0 for one in found]


def compiled(rank: int) -> list[torch.Tensor]:
    import torch.distributed._functional_collectives as functional

    twice = torch.compile(
        lambda x: functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1, backend="aot_eager", fullgraph=True
    )
    return [twice(torch.ones(3)) for _ in range(2)]


def texts_of(rank: int, folder: str) -> tuple[list[str], list[str], list[int], bool]:
    """Of the collectives, of those within compiled code, torch's numbers, and whether values are as without."""
    warnings.simplefilter("ignore", FutureWarning)
    recorder = FlightRecorder(Path(folder, str(rank)), rank, 2)
    record = FlightRecord(recorder.path)
    with default_group("gloo", folder, rank, 2):
        group = dist.group.WORLD
        assert group is not None
        before = every_collective(rank)
        began = group._get_sequence_number_for_group()
        watched = WatchedGroup(group, "WORLD", (0, 1), recorder, "cpu:gloo", began)
        undo = watch_functional(lambda one: watched if one is group else None, FirstUses())
        after = every_collective(rank)
        seen = watched.seen, group._get_sequence_number_for_group()
        found = [one.text for one in record.records()]
        compiled(rank)
        within = [one.text for one in record.records(len(found))]
        undo()
        every_collective(rank)
        assert len(record.records()) == len(found) + len(within)
    record.close()
    recorder.close()
    return found, within, list(seen), all(map(torch.equal, before, after))


def of_symbols(rank: int, folder: str) -> list[str]:
    """What is recorded of compiled code whose sizes are symbols while it is traced."""
    import torch.distributed._functional_collectives as functional

    warnings.simplefilter("ignore", FutureWarning)
    recorder = FlightRecorder(Path(folder, str(rank)), rank, 2)
    record = FlightRecord(recorder.path)
    with default_group("gloo", folder, rank, 2):
        group = dist.group.WORLD
        assert group is not None
        watched = WatchedGroup(group, "WORLD", (0, 1), recorder, "cpu:gloo", group._get_sequence_number_for_group())
        undo = watch_functional(lambda one: watched if one is group else None, FirstUses())
        twice = torch.compile(lambda x: functional.all_reduce(x * 2, "sum", group), backend="aot_eager", dynamic=True)
        for size in (3, 5, 7):
            assert torch.equal(twice(torch.ones(size)), torch.full((size,), 4.0))
        undo()
    found = [one.text for one in record.records()]
    record.close()
    recorder.close()
    return found


def stood_in(rank: int, folder: str) -> tuple[list[tuple[str, bool, bool]], int]:
    """What the thread was seen to stand in: text, whether for long, whether it had ended then. Rank 1 is late."""
    import torch.distributed._functional_collectives as functional

    warnings.simplefilter("ignore", FutureWarning)
    recorder = FlightRecorder(Path(folder, str(rank)), rank, 2)
    record = FlightRecord(recorder.path)
    recorder.clock.close_reader = lambda: None
    late = threading.Event()
    twice = torch.compile(
        lambda x: functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1, backend="aot_eager", fullgraph=True
    )
    with default_group("gloo", folder, rank, 2):
        group = dist.group.WORLD
        assert group is not None
        twice(torch.ones(3))
        watched = WatchedGroup(group, "WORLD", (0, 1), recorder, "cpu:gloo", group._get_sequence_number_for_group())
        undo = watch_functional(lambda one: watched if one is group else None, FirstUses())
        for _ in range(2):
            late.wait(0.3 * rank)
            twice(torch.ones(3))
        late.wait(0.3 * rank)
        started = functional.all_reduce(torch.ones(5), "sum", group)
        assert torch.equal(started, torch.full((5,), 2.0))
        left = len(watched.pending)
        undo()
        functional.all_reduce(torch.ones(5), "sum", group).sum()
    records = {one.number: one for one in record.records()}
    waits = [(number, ended - began) for number, began, ended in recorder.clock.waits]
    record.close()
    recorder.close()
    return [(records[n].text, took_ns > 10**8, records[n].left_ns > 0) for n, took_ns in waits], left


def test_thread_is_seen_to_stand_until_the_last_has_come_also_in_compiled_code(tmp_path: Path) -> None:
    ranks = run_processes(2, stood_in, str(tmp_path), connect=False)
    texts = ["all_reduce float32 [3] sum"] * 2 + ["all_reduce float32 [5] sum"]
    for rank, (waits, left) in enumerate(ranks):
        assert waits == [(text, rank == 0, True) for text in texts]
        assert left == 0


def test_each_is_entered_once_as_what_it_is(tmp_path: Path) -> None:
    ranks = run_processes(2, texts_of, str(tmp_path), connect=False)
    assert ranks[0] == ranks[1]
    found, within, (ours, torchs), is_equal = ranks[0]
    assert is_equal
    assert ours == torchs
    assert found == [
        "all_reduce float32 [2, 4] max",
        "all_gather float32 [2, 4]",
        "reduce_scatter float32 [2, 4] sum",
        "broadcast float32 [2, 4] root=1",
        "all_to_all float32",
        "all_reduce_coalesced float32 [2, 4] of 2 tensors sum",
        "all_gather_coalesced float32 [2, 4] of 2 tensors",
    ]
    assert within == ["all_reduce float32 [3] sum"] * 2
    assert FROM_CPP not in (*found, *within)


def test_what_is_traced_may_have_symbols_for_sizes(tmp_path: Path) -> None:
    texts = [f"all_reduce float32 [{size}] sum" for size in (3, 5, 7)]
    assert run_processes(2, of_symbols, str(tmp_path), connect=False) == [texts] * 2
