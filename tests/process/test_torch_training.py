"""Stock DDP and plain torch.distributed under a guard: what is wrong with the training is named, and only that."""

from __future__ import annotations

import contextlib
import pickle
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from guarded_programs import Case, guarded, is_left_alone, is_named, small, train
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lockstep.comm.waiting import wait_until
from lockstep.observe.board import Board
from lockstep.observe.flight import FlightRecorder
from lockstep.observe.guard import Guard
from lockstep.observe.settings import REPLICA_EVERY, GuardSettings
from lockstep.observe.sights import FlightRecord, flight_path
from lockstep.observe.torch_training import TrainingWatch, attach_training
from lockstep.testing.worlds import run_processes


class Branches(nn.Module):
    def __init__(self, order: str = "ab") -> None:
        super().__init__()
        for name in order:
            self.add_module(name, nn.Linear(4, 4))
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.get_submodule("a")(x)
        return x if self.skips else self.get_submodule("b")(x)


_alive: list[nn.Module] = []  # still there when the ranks leave, as the model of a script is


def kept(model: nn.Module) -> DistributedDataParallel:
    _alive[:] = [DistributedDataParallel(model)]
    return _alive[0]  # type: ignore[return-value]


# ------------------------------------------------------------------ what is wrong


def frozen_before(rank: int, _: Path) -> None:
    model = small()
    model[0].weight.requires_grad_(rank != 1)  # type: ignore[union-attr]
    train(DistributedDataParallel(model))


def frozen_after(rank: int, _: Path) -> None:
    model = DistributedDataParallel(small())
    model.module[0].weight.requires_grad_(rank != 1)
    train(model)


def frozen_elsewhere(rank: int, _: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[rank].weight.requires_grad_(False)  # type: ignore[union-attr]
    train(DistributedDataParallel(model))


def other_size(rank: int, _: Path) -> None:
    train(DistributedDataParallel(nn.Linear(4, 8 + rank)))


def other_order(rank: int, _: Path) -> None:
    train(DistributedDataParallel(Branches("ab" if rank == 0 else "ba")), 3)


def other_seed_by_hand(rank: int, _: Path) -> None:
    torch.manual_seed(rank)
    by_hand(small())


def by_hand(model: nn.Module, steps: int = 7) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).sum().backward()
        for param in model.parameters():
            assert param.grad is not None
            dist.all_reduce(param.grad)
        optimizer.step()


def past_the_wrapper(rank: int, _: Path) -> None:
    model = DistributedDataParallel(small())
    torch.manual_seed(rank)
    train(model.module, optimizer=torch.optim.AdamW(model.parameters()))


def other_rate(rank: int, _: Path) -> None:
    model = DistributedDataParallel(small())
    train(model, optimizer=torch.optim.SGD(model.parameters(), 0.1 + rank))


def flipped_bit(rank: int, _: Path) -> None:
    model = DistributedDataParallel(small())

    def flip(step: int) -> None:
        if (step, rank) == (3, 1):
            with torch.no_grad():
                model.module[2].weight.view(torch.int32).view(-1)[5] ^= 1

    train(model, before=flip)


def flipped_bit_then_tested(rank: int, _: Path) -> None:
    """After the last regular look; then rank 0 tests an older state."""
    model = kept(small())
    older = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    train(model)
    if rank == 1:
        model.module[2].weight.data.view(torch.int32).view(-1)[5] ^= 1
    if rank == 0:
        model.module.load_state_dict(older)


def never_steps(rank: int, _: Path) -> None:
    model = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(20):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).sum().backward()
        if rank == 0 or step < 4:
            optimizer.step()


def leaves_out_a_step(rank: int, _: Path) -> None:
    """After the last regular look, so that at the end the ranks are not at the same step."""
    model = kept(small())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(8):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).sum().backward()
        if (rank, step) != (1, 6):
            optimizer.step()


def out_of_sync(rank: int, _: Path) -> None:
    model = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(12):
        optimizer.zero_grad()
        with model.no_sync() if (rank, step) == (1, 4) else contextlib.nullcontext():
            model(torch.randn(3, 4)).sum().backward()
        optimizer.step()


def unused(rank: int, _: Path) -> None:
    model = Branches()
    model.skips = True
    train(DistributedDataParallel(model))


def unused_on_one(rank: int, _: Path) -> None:
    model = Branches()

    def skip(step: int) -> None:
        model.skips = (rank, step) == (1, 2)

    train(DistributedDataParallel(model), before=skip)


def own_buffers(rank: int, _: Path) -> None:
    model = DistributedDataParallel(small(norm=True), broadcast_buffers=False)
    torch.manual_seed(rank)
    train(model)


def epochs(rank: int, sampler: bool, counts: bool, size: int = 96) -> None:
    data = TensorDataset(torch.randn(96, 4)[:size])
    chosen = DistributedSampler(data) if sampler else None
    loader, again = DataLoader(data, 8, sampler=chosen), DataLoader(data, 8)
    model = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(3):
        if chosen is not None and counts:
            chosen.set_epoch(epoch)
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        for (x,) in again:
            model.module(x)


def other_reduction_last(rank: int, _: Path) -> None:
    dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)


def no_sampler(rank: int, _: Path) -> None:
    epochs(rank, False, False)


def no_set_epoch(rank: int, _: Path) -> None:
    epochs(rank, True, False)


def one_file(rank: int, folder: Path) -> None:
    model = DistributedDataParallel(small())
    train(model, 2)
    torch.save(model.state_dict(), f"{folder}/{'./' * rank}same.pt")  # one file by two names


def one_file_of_arrays(rank: int, folder: Path) -> None:
    model = DistributedDataParallel(small())
    train(model, 2)
    np.savez(folder / "same.npz", **{name: tensor.numpy() for name, tensor in model.state_dict().items()})


def one_pickle(rank: int, folder: Path) -> None:
    model = DistributedDataParallel(small())
    train(model, 2)
    with (folder / "same.pkl").open("wb") as file:
        pickle.dump(model.state_dict(), file)


WRONG: dict[Case, tuple[str, ...]] = {
    frozen_before: ("MODELS differ", "rank 1 has parameter '0.weight' with requires_grad False", "ModelMismatch"),
    frozen_after: ("FROZEN on some ranks only, in step 1", "rank 1 froze 0.weight"),
    frozen_elsewhere: ("MODELS differ", "rank 1 has parameter '0.weight' with requires_grad True, rank 0"),
    other_size: ("MODELS differ", "'weight' with shape [9, 4], rank 0 with shape [8, 4]", "test_torch_training.py:"),
    other_order: ("rank 1 has parameter 'b.weight' where rank 0 has parameter 'a.weight'", "ModelMismatch"),
    other_seed_by_hand: ("REPLICAS differ after step 1", "'0.weight' is", "Start all ranks alike", "optimizer made at"),
    past_the_wrapper: ("REPLICAS differ after step 1, equal when they were wrapped", ".module", "ReplicaDrift"),
    other_rate: ("REPLICAS differ", "lr of parameter group 0 is 0.1 on rank 0, 1.1 on rank 1"),
    flipped_bit: ("REPLICAS differ after step 4, equal after step 2", "parameter '2.weight' is", "a bit flipped"),
    flipped_bit_then_tested: ("REPLICAS differ after step 7, equal after step 6", "parameter '2.weight' is"),
    never_steps: ("NO STEP of the optimizer on some ranks since step 5.  Culprit: rank 1", "raised ReplicaDrift"),
    leaves_out_a_step: ("REPLICAS differ at the end", "Culprit: rank 1", "7 times on rank 1", "raised ReplicaDrift"),
    out_of_sync: ("NO_SYNC on some ranks only, in step 5", "Culprit: rank 1", "rank 1 ran 1 backward in no_sync()"),
    unused: ("UNUSED parameters seen in step 2, on every rank", "b.weight, b.bias", "find_unused_parameters"),
    unused_on_one: ("UNUSED parameters", "not on every rank.  Culprit: rank 1", "rank 1 did not use b.weight, b.bias"),
    own_buffers: ("BUFFERS differ on ranks 0,1", "its own '1.running_var', '1.running_mean', and", "wrapped at tests/"),
    other_reduction_last: ("MISMATCH in step 1", "they differ in reduction", "raised CollectiveMismatch"),
    no_sampler: ("DATA: ranks train on the same samples", "anks 0, 1 got the very same first batch"),
    no_set_epoch: (
        "DATA: the samples come in the order of the last pass",
        "in pass 2",
        "call sampler.set_epoch(epoch)",
    ),
    one_file: ("SAVE: ranks 0,1 wrote one file after step 2", "same.pt"),
    one_file_of_arrays: ("SAVE: ranks 0,1 wrote one file after step 2", "same.npz", "test_torch_training.py:"),
    one_pickle: ("SAVE: ranks 0,1 wrote one file after step 2", "same.pkl", "test_torch_training.py:"),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.__name__)
def test_what_is_wrong_is_named(case: Case, tmp_path: Path) -> None:
    is_named(case, WRONG[case], tmp_path)


@pytest.mark.parametrize("case", [frozen_before, flipped_bit, unused_on_one], ids=lambda case: case.__name__)
def test_of_three_ranks_the_odd_one_is_named(case: Case, tmp_path: Path) -> None:
    is_named(case, (*WRONG[case], "Culprit: rank 1"), tmp_path, ranks=3)


@pytest.mark.parametrize("case", [other_rate, other_reduction_last], ids=lambda case: case.__name__)
def test_strict_names_the_same(case: Case, tmp_path: Path) -> None:
    results = run_processes(2, guarded, 2, str(tmp_path), case, True, "strict", connect=False)
    said = " ".join(" ".join(text for text, _ in results).split())
    assert all(" ".join(words.split()) in said for words in WRONG[case]), said
    assert all("raised " in text for text, _ in results), said


def calls_seldom(rank: int, folder: Path) -> None:
    """Each call is over before a guard looks, which has found by then what was wrong before."""
    other_reduction_last(rank, folder)
    assert wait_until(FlightRecord(flight_path(folder, 0)).notice, 20)
    for _ in range(10):
        threading.Event().wait(0.5)
        dist.barrier()
    (folder / "went on").touch()


def test_strict_raises_in_the_next_call(tmp_path: Path) -> None:
    results = run_processes(2, guarded, 2, str(tmp_path), calls_seldom, True, "strict", connect=False)
    assert all("raised CollectiveMismatch" in text for text, _ in results), results
    assert not (tmp_path / "went on").exists()


# ------------------------------------------------------------------ what is right


def plain(rank: int, _: Path) -> Any:
    return train(DistributedDataParallel(small(norm=True)), 9)


def other_seeds(rank: int, _: Path) -> Any:
    torch.manual_seed(rank)
    return train(DistributedDataParallel(small(norm=True)))


def hand_made(rank: int, _: Path) -> None:
    by_hand(small())


def accumulated(rank: int, _: Path) -> Any:
    model = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _step in range(6):
        optimizer.zero_grad()
        with model.no_sync():
            for _micro in range(2 + rank):
                model(torch.randn(3, 4)).sum().backward()
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    return list(model.state_dict().values())


def sometimes_unused(rank: int, _: Path) -> Any:
    model = Branches()

    def skip(step: int) -> None:
        model.skips = rank == 1 and step % 2 == 0

    return train(DistributedDataParallel(model, find_unused_parameters=True), before=skip)


def frozen_in_time(rank: int, _: Path) -> Any:
    model = DistributedDataParallel(small(), find_unused_parameters=True)
    train(model, 5)
    model.module[0].weight.requires_grad_(False)
    return train(model, 16)


def split_state(rank: int, _: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch, about itself
        from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(small())
    return train(model, optimizer=ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01))


def uneven(rank: int, _: Path) -> Any:
    model = DistributedDataParallel(small())
    with model.join():
        return train(model, 12 - 4 * rank)


def two_models(rank: int, _: Path) -> Any:
    made, judged = DistributedDataParallel(small()), DistributedDataParallel(nn.Linear(3, 1))
    both = [torch.optim.AdamW(made.parameters()), torch.optim.SGD(judged.parameters(), 0.1)]
    for step in range(9):
        for optimizer in both[step % 2 :]:
            optimizer.zero_grad()
            judged(made(torch.randn(3, 4))).sum().backward()
            optimizer.step()
    return [*made.state_dict().values(), *judged.state_dict().values()]


def scaled(rank: int, _: Path) -> Any:
    model = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(3, 4)).sum() * (float("inf") if step == 2 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
    return list(model.state_dict().values())


def apart(rank: int, _: Path) -> Any:
    torch.manual_seed(rank)
    return train(small(), before=lambda _: dist.all_reduce(torch.ones(2)))


def sampled(rank: int, folder: Path) -> None:
    epochs(rank, True, True)
    torch.save([1], folder / f"{rank}.pt")
    if rank == 0:
        torch.save([1], folder / "all.pt")


def padded(rank: int, _: Path) -> None:
    epochs(rank, True, True, 95)


def loaded_by_one(rank: int, _: Path) -> Any:
    """Rank 0 loads an older state when the training is over."""
    model = kept(small())
    older = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    result = train(model)
    if rank == 0:
        model.module.load_state_dict(older)
    dist.barrier()
    return result


def exported_by_one(rank: int, _: Path) -> Any:
    model = kept(small())
    result = train(model)
    if rank == 0:
        model.module.to(torch.bfloat16)
    return result


def trained_on_by_one(rank: int, _: Path) -> Any:
    """Rank 0 fits the model further for itself, with an optimizer of its own."""
    model = kept(small())
    result = train(model)
    if rank == 0:
        train(model.module)
    dist.barrier()
    return result


def by_hand_then_tested(rank: int, _: Path) -> None:
    model = small()
    _alive[:] = [model]
    by_hand(model)
    if rank == 0:
        model.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()})


RIGHT = (
    plain,
    other_seeds,
    hand_made,
    accumulated,
    sometimes_unused,
    frozen_in_time,
    split_state,
    uneven,
    two_models,
    scaled,
    apart,
    sampled,
    padded,
    loaded_by_one,
    exported_by_one,
    trained_on_by_one,
    by_hand_then_tested,
)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("case", RIGHT, ids=lambda case: case.__name__)
def test_what_is_right_is_left_alone(case: Case, tmp_path: Path) -> None:
    is_left_alone(case, tmp_path)


def fail_with_an_operation_under_way(rank: int, folder: Path) -> None:
    if rank == 1:
        assert wait_until((folder / "connected").exists, 20)  # else rank 0 may lose it while it still makes the group
        dist.all_reduce(torch.ones(3), async_op=True)
        raise RuntimeError("label 7")
    (folder / "connected").touch()
    assert wait_until((folder / "left").exists, 20)  # sooner than the limit of the operation


def leave_first(rank: int, folder: str) -> str:
    said, _ = guarded(rank, 2, folder, fail_with_an_operation_under_way, patience_s=0.0)  # rank 1 never says its end
    (Path(folder) / "left").touch()
    return said


def test_a_rank_that_fails_waits_for_nobody(tmp_path: Path) -> None:
    said = run_processes(2, leave_first, str(tmp_path), connect=False)
    assert said == ["", "raised RuntimeError: label 7"]


def test_all_is_put_back(tmp_path: Path) -> None:
    import torch.optim.optimizer as optimizer
    from torch.utils.data import dataloader

    iterators = dataloader._BaseDataLoaderIter
    owners = (DistributedDataParallel, dist, torch, torch.autograd, torch.serialization, iterators)
    before = [dict(vars(owner)) for owner in owners]
    hooks = len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks)
    recorder = FlightRecorder(flight_path(tmp_path, 0), 0, 1)
    guard = Guard(recorder, Board(tmp_path, recorder, [0]), GuardSettings(evidence=""))
    detach = attach_training(guard)
    assert vars(torch.autograd)["backward"] is not before[3]["backward"]
    detach()
    guard.close()
    assert [dict(vars(owner)) for owner in owners] == before
    assert (len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks)) == hooks


def test_a_number_of_steps_is_one(tmp_path: Path) -> None:
    recorder = FlightRecorder(flight_path(tmp_path, 0), 0, 1)
    guard = Guard(recorder, Board(tmp_path, recorder, [0]), GuardSettings(evidence=""))
    with pytest.raises(ValueError, match="LOCKSTEP_REPLICA_EVERY"):
        TrainingWatch(guard, {REPLICA_EVERY: "often"})
    guard.close()
