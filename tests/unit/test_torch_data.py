"""What a rank tells of the passes over its loaders: what they are for, where they began, what is in some samples."""

from __future__ import annotations

import io
import itertools
import tempfile
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from watched_loaders import Rows, Watched, stock


@pytest.fixture
def watched(request: pytest.FixtureRequest) -> Watched:
    return Watched(request)


def test_what_samples_hold_is_told_as_far_as_it_is_known_once_a_pass_is_trained_on(watched: Watched) -> None:
    loader = DataLoader(Rows(), 2, shuffle=True)
    for _ in itertools.islice(loader, 2):  # to look at the data
        assert not watched.marks
    watched.train(loader, 3)
    (told,) = watched.marks
    assert (len(told["marks"]) >= 6, told["drawn"], told["has_all"]) == (True, 0, True)
    watched.train(loader)
    (told,) = watched.marks
    assert (len(told["marks"]), told["drawn"], told["length"]) == (20, 20, 20)
    assert len({*told["marks"].values()}) == 20
    before = dict(told)
    watched.train(loader)
    assert watched.marks == [before]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_samples_that_workers_load_ahead_are_those_that_were_drawn(watched: Watched) -> None:
    batches = [[*order] for order in torch.randperm(20).reshape(5, 4).tolist()]
    found = []
    for workers in (0, 2):
        watched.train(DataLoader(Rows(), batch_sampler=batches, num_workers=workers))
        found.append(watched.marks[-1]["marks"])
    assert found[0] == found[1]
    assert len(found[0]) == 20


def test_nothing_is_looked_into_where_samples_are_dealt_by_a_rule_to_one_rank_or_computed_on_by_several(
    watched: Watched,
) -> None:
    watched.train(DataLoader(Rows(), 2, sampler=stock(shuffle=True)))
    for watched.may_share, watched.watch.ranks in ((True, 2), (False, 1)):
        watched.train(DataLoader(Rows(), 2, shuffle=True))
    assert not watched.marks


def test_batches_drawn_without_gradients_are_none_to_train_on(watched: Watched) -> None:
    """A loader to evaluate on, of which each step takes one more batch."""
    tested = iter(DataLoader(Rows(), 2, shuffle=True))
    for batch in DataLoader(Rows(), 3, sampler=stock(shuffle=True)):
        watched.step(batch)
        with torch.no_grad():
            next(tested)
    assert [value["rule"] != "" for _, _, value in watched.told] == [True]
    assert not watched.marks
    for _ in tested:  # now it is trained on
        watched.step(None)
    assert [value["batches"] for _, _, value in watched.told] == [4, 10]


@pytest.mark.parametrize("epochs", [1, 2])
def test_of_a_second_loader_in_each_step_nobody_knows_what_it_is_for(watched: Watched, epochs: int) -> None:
    """Unless its samples are dealt to the ranks: they are not, to evaluate."""
    dealt = DataLoader(Rows(), 3, sampler=stock(shuffle=True, seed=3))
    for _ in range(epochs):
        tested, more = iter(DataLoader(Rows(), 2)), iter(dealt)
        for batch in DataLoader(Rows(), 3, sampler=stock(shuffle=True)):
            watched.step(batch)
            next(tested)
            next(more)
    told = [(value["batches"], value["first"] != "") for _, _, value in watched.told]
    assert told == [(4, True), (10, False), (4, True)] * epochs
    assert not watched.marks


@pytest.mark.parametrize(("skipped", "together"), [(0, 1), (4, 1), (0, 3)])
def test_which_batch_the_first_step_came_with_is_told(watched: Watched, skipped: int, together: int) -> None:
    for number, batch in enumerate(DataLoader(Rows(), 2, sampler=stock())):
        if number >= skipped and (number + 1) % together == 0:
            watched.step(batch)
    ((_, _, value),) = watched.told
    assert value["begun"] == skipped + together


@pytest.mark.parametrize("is_paired", [False, True])
def test_of_two_loaders_that_each_step_asks_the_last_one_counts(watched: Watched, is_paired: bool) -> None:
    """What comes before it may be there to evaluate; or both are to train on, and what goes for one goes for both."""
    sampler = None if is_paired else stock(shuffle=True)
    batches = iter(DataLoader(Rows(), 3, sampler=sampler, shuffle=is_paired))
    for _ in zip(DataLoader(Rows(), 4, shuffle=True), range(4), strict=False):
        next(batches)
        watched.step(None)
    assert [(value["batches"], value["first"] != "") for _, _, value in watched.told] == [
        (5, False),
        (7 if is_paired else 4, True),
    ]
    assert len(watched.marks) == is_paired


def test_a_file_that_is_saved_to_is_told_also_where_the_program_has_opened_it(watched: Watched, tmp_path: Path) -> None:
    """What is in memory or has no name in a folder is not, whatever it is called."""
    watched.watch.watch_saves()
    with (tmp_path / "open").open("wb") as file, (tmp_path / "raw").open("wb", buffering=0) as raw:
        torch.save([1], file)
        torch.save([1], raw)
    torch.save([1], tmp_path / "named")
    called = io.BytesIO()
    called.name = str(tmp_path / "called")  # type: ignore[misc]
    torch.save([1], called)
    with tempfile.TemporaryFile() as nameless:
        torch.save([1], nameless)
    assert watched.saved == [str((tmp_path / name).resolve()) for name in ("open", "raw", "named")]
