"""What wraps a model otherwise than torch's DDP, under a guard: FSDP of both kinds, torch.compile, our own class."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded_programs import Case, is_left_alone, is_named, small, train
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import lockstep
from lockstep.observe import torch_training

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of FSDP on a CPU and of tracing


def flat(**options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        policy = ModuleWrapPolicy({nn.Linear})
        return FullyShardedDataParallel(small(), auto_wrap_policy=policy, device_id=torch.device("cpu"), **options)


def pieces() -> nn.Module:
    model = small()
    for part in [*model, model]:
        fully_shard(part)
    return model


def pieces_at_root() -> nn.Module:
    """The root has parameters of its own, which are whole from its forward to the end of backward."""
    model = small()
    for part in (model[0], model):
        fully_shard(part)
    return model


def flat_at_root(**options: Any) -> nn.Module:
    return FullyShardedDataParallel(small(), device_id=torch.device("cpu"), **options)


def compiled(backend: str, *, inside: bool = False) -> Any:
    if inside:
        return DistributedDataParallel(torch.compile(small(), backend=backend))  # type: ignore[arg-type]
    return torch.compile(DistributedDataParallel(small()), backend=backend)


def other_rate(model: nn.Module, rank: int) -> None:
    train(model, optimizer=torch.optim.SGD(model.parameters(), 0.1 + rank))


def bad_batch(model: nn.Module, rank: int) -> None:
    bad = torch.full((3, 4), float("nan"))
    train(model, data=lambda step: bad if (rank, step) == (1, 3) else torch.ones(3, 4))


def flip(model: nn.Module, weight: Tensor, rank: int) -> None:
    """One bit, on rank 1, before step 3."""

    def flip_one(step: int) -> None:
        if (step, rank) == (3, 1):
            weight.data.view(torch.int32).view(-1)[2] ^= 1

    train(model, before=flip_one)


# ------------------------------------------------------------------ what is wrong


def flat_other_rate(rank: int, _: Path) -> None:
    other_rate(flat(), rank)


def flat_bad_batch(rank: int, _: Path) -> None:
    bad_batch(flat(), rank)


def flat_originals_bad_batch(rank: int, _: Path) -> None:
    bad_batch(flat(use_orig_params=True), rank)


def flat_uncut_flipped_bit(rank: int, _: Path) -> None:
    model = flat(sharding_strategy=ShardingStrategy.NO_SHARD)
    flip(model, next(model.parameters()), rank)


def pieces_other_rate(rank: int, _: Path) -> None:
    other_rate(pieces(), rank)


def pieces_at_root_other_rate(rank: int, _: Path) -> None:
    other_rate(pieces_at_root(), rank)


def flat_at_root_other_rate(rank: int, _: Path) -> None:
    other_rate(flat_at_root(use_orig_params=True), rank)


def pieces_bad_batch(rank: int, _: Path) -> None:
    bad_batch(pieces(), rank)


def compiled_flipped_bit(rank: int, _: Path) -> None:
    model = compiled("eager")
    flip(model, model._orig_mod.module[2].weight, rank)


def compiled_inside_flipped_bit(rank: int, _: Path) -> None:
    model = compiled("aot_eager", inside=True)
    flip(model, model.module._orig_mod[2].weight, rank)


def compiled_bad_batch(rank: int, _: Path) -> None:
    bad_batch(compiled("aot_eager"), rank)


def compiled_past_the_wrapper(rank: int, _: Path) -> None:
    model = compiled("eager")
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, 2, optimizer)
    train(model._orig_mod.module, 5, optimizer)


def ours_past_the_wrapper(rank: int, _: Path) -> None:
    model = lockstep.DistributedDataParallel(small())
    torch.manual_seed(rank)
    train(model.module, optimizer=torch.optim.AdamW(model.parameters()))


def ours_flipped_bit(rank: int, _: Path) -> None:
    model: Any = lockstep.DistributedDataParallel(small())
    flip(model, model.module[2].weight, rank)


def loaded_on_one_rank(rank: int, _: Path) -> None:
    model = DistributedDataParallel(small())

    def load(step: int) -> None:
        if (step, rank) == (3, 1):
            model.module.load_state_dict({key: value * 2 for key, value in model.module.state_dict().items()})

    train(model, before=load)


def settings_of_one_rank(rank: int, _: Path) -> None:
    train(DistributedDataParallel(small(), find_unused_parameters=rank == 1))


RATE = (
    "REPLICAS differ",
    "lr of parameter group 0 is 0.1 on rank 0, 1.1 on rank 1",
    "optimizer made at tests/process/",
)
NAN = ("NOT FINITE gradients in step 4.  Culprit: rank 1", "the loss is not finite at", "'0.weight' (")
BIT = ("REPLICAS differ after step 4, equal after step 2", "'2.weight' is", "a bit flipped", "optimizer.step() at")
WRONG: dict[Case, tuple[str, ...]] = {
    flat_other_rate: RATE,
    flat_bad_batch: NAN,
    flat_originals_bad_batch: NAN,
    flat_uncut_flipped_bit: ("REPLICAS differ after step 4, equal after step 2", "optimizer.step() at"),
    pieces_other_rate: RATE,
    pieces_at_root_other_rate: RATE,
    flat_at_root_other_rate: RATE,
    pieces_bad_batch: NAN,
    compiled_flipped_bit: BIT,
    compiled_inside_flipped_bit: BIT,
    compiled_bad_batch: NAN,
    compiled_past_the_wrapper: ("REPLICAS differ after step 3, equal after step 2", "in step 3 a backward went past"),
    ours_past_the_wrapper: ("REPLICAS differ after step 1, equal when they were wrapped", ".module", "ReplicaDrift"),
    ours_flipped_bit: BIT,
    settings_of_one_rank: (
        "MODELS differ when DistributedDataParallel wraps them",
        "rank 1 has setting 'find_unused_parameters=True' where rank 0 has setting 'find_unused_parameters=False'",
    ),
    loaded_on_one_rank: ("REPLICAS differ after step 4", "rank 1: load_state_dict() at tests/process/", "in step 4"),
}


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.__name__)
def test_what_is_wrong_is_named(case: Case, tmp_path: Path) -> None:
    is_named(case, WRONG[case], tmp_path)


# ------------------------------------------------------------------ what is right


def flat_is_sound(rank: int, _: Path) -> Any:
    return train(flat())


def flat_whole_is_sound(rank: int, _: Path) -> Any:
    """The root has parameters of its own, as that of a model whose blocks are wrapped has."""
    return [*train(flat_at_root()), *train(flat_at_root(use_orig_params=True))]


def flat_originals_are_sound(rank: int, _: Path) -> Any:
    return train(flat(use_orig_params=True))


def flat_partly_cut_is_sound(rank: int, _: Path) -> Any:
    return train(flat(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP))


def flat_uncut_is_sound(rank: int, _: Path) -> Any:
    return train(flat(sharding_strategy=ShardingStrategy.NO_SHARD))


def pieces_are_sound(rank: int, _: Path) -> Any:
    params = [*train(pieces()), *train(pieces_at_root())]
    return [param.to_local() for param in params]  # type: ignore[attr-defined]


def compiled_is_sound(rank: int, _: Path) -> Any:
    return train(compiled("aot_eager"))


def compiled_inside_is_sound(rank: int, _: Path) -> Any:
    return train(compiled("eager", inside=True))


def ours_is_sound(rank: int, _: Path) -> Any:
    return train(lockstep.DistributedDataParallel(small(norm=True)))


def same_settings_are_sound(rank: int, _: Path) -> Any:
    """As one rank spells out what is so by itself, or what another setting makes of no account."""
    sends: Any = {"broadcast_buffers": True} if rank else {}
    still: Any = {"static_graph": True, "find_unused_parameters": rank == 0, "broadcast_buffers": rank == 0}
    for said in ("You passed find_unused_parameters", "`broadcast_buffers` is deprecated"):
        warnings.filterwarnings("ignore", said)  # for good: whoever puts filters back undoes those of other threads
    plain, static = DistributedDataParallel(small(norm=True), **sends), DistributedDataParallel(small(), **still)
    return [*train(plain), *train(static)]


RIGHT: tuple[Case, ...] = (
    flat_is_sound,
    flat_whole_is_sound,
    flat_originals_are_sound,
    flat_partly_cut_is_sound,
    flat_uncut_is_sound,
    pieces_are_sound,
    compiled_is_sound,
    compiled_inside_is_sound,
    ours_is_sound,
    same_settings_are_sound,
)


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: case.__name__)
def test_what_is_right_is_left_alone(case: Case, tmp_path: Path) -> None:
    is_left_alone(case, tmp_path)


def test_torch_compile_takes_what_watches_for_a_part_of_torch() -> None:
    from torch._dynamo import trace_rules

    torch_training._stay_out_of_graphs()

    assert trace_rules.check_file(torch_training.__file__).skipped
    assert not trace_rules.check_file(__file__).skipped
