"""One argument says what is cut over the ranks, and the training stays the same."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shard_models
from lockstep.comm.communicator import Communicator
from lockstep.comm.tensor_parts import held, local_of
from lockstep.errors import ConfigError
from lockstep.parallel.clip import clip_grad_norm_
from lockstep.parallel.fsdp import FullyShardedDataParallel
from lockstep.parallel.materialize import materialize
from lockstep.parallel.named_state import is_cut, whole_state_dict, whole_tensors
from lockstep.parallel.shard_context import unit_of
from lockstep.parallel.shard_group import ShardState
from lockstep.parallel.strategy import chosen_units, in_step, microbatch, optimizer_for, parallelize
from lockstep.parallel.torch_fsdp import MixedPrecisionPolicy, ModuleWrapPolicy
from lockstep.parallel.train_state import OptimizerState
from lockstep.testing.failures import RankFailed
from lockstep.testing.worlds import run_threads

pytestmark = pytest.mark.usefixtures("ranks_share_a_process")

CUT = ("gradients", "full", "hybrid")
ALL: Any = ("none", "optimizer", *CUT)
BATCH, LENGTH, VOCAB = 12, 8, 61


class Result(NamedTuple):
    weights: dict[str, Tensor]
    norms: list[float]


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return shard_models.gpt2()


def llama() -> nn.Module:
    """Widths that leave each of four ranks whole vectors of eight: fused kernels round what is left over otherwise."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config)


def mesh_for(comm: Communicator, sharding: str) -> Any:
    return comm.mesh(replica=2, shard=2) if sharding == "hybrid" and comm.world_size == 4 else comm


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator, step: int, count: int) -> float:
    """One step on tokens that depend on `step` alone, in `count` microbatches; the gradient's norm."""
    tokens = torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
    for number, mine in enumerate(tokens.view(comm.world_size, count, -1, LENGTH)[comm.rank], 1):
        with microbatch(model, is_last=number == count):
            (model(input_ids=mine, labels=mine).loss / count).backward()
    norm = float(clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()
    optimizer.zero_grad()
    return norm


def trained(comm: Communicator, original: nn.Module, sharding: Any, steps: int = 20, count: int = 1) -> Result:
    model = parallelize(copy.deepcopy(original), sharding, mesh=mesh_for(comm, sharding))
    # eps: gradients that are nothing but rounding, as those of GPT-2's key biases, stay small steps
    optimizer = optimizer_for(model, torch.optim.AdamW, lr=1e-3, eps=1e-5)
    norms = [step_once(model, optimizer, comm, step, count) for step in range(steps)]
    return Result({fqn: whole.clone() for fqn, whole in whole_tensors(model)}, norms)


def same(results: list[Result]) -> Result:
    """What all ranks have."""
    first = results[0]
    for other in results[1:]:
        assert other.norms == first.norms
        assert difference(other, first) == 0
    return first


def difference(left: Result, right: Result) -> float:
    """Norm of the difference of all weights together, against that of the weights."""
    assert left.weights.keys() == right.weights.keys()
    distance, size = (
        torch.cat([value.double().flatten() for value in values]).norm()
        for values in ((left.weights[fqn] - right.weights[fqn] for fqn in left.weights), right.weights.values())
    )
    return float(distance / size)


@functools.cache
def on_one_rank(build: Callable[[], nn.Module], steps: int = 20) -> Result:
    return run_threads(1, trained, build(), "none", steps)[0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("build", [gpt2, llama])
def test_every_sharding_trains_the_same_model(build: Callable[[], nn.Module], world_size: int) -> None:
    original, alone = build(), on_one_rank(build)
    whole = same(run_threads(world_size, trained, original, "none"))
    for sharding in ALL[1:]:
        cut = same(run_threads(world_size, trained, original, sharding))
        if world_size != 3 or sharding == "optimizer":  # a third is rounded before the sum, or after it
            assert cut.norms == whole.norms, sharding
            assert difference(cut, whole) == 0, sharding
        assert cut.norms == pytest.approx(alone.norms, rel=1e-5), sharding
        assert difference(cut, alone) < 1e-6, sharding


@pytest.mark.parametrize("sharding", ALL)
def test_microbatches_add_up_to_the_batch(sharding: Any) -> None:
    added = same(run_threads(2, trained, llama(), sharding, 5, count=3))
    assert added.norms == pytest.approx(on_one_rank(llama, 5).norms, rel=1e-5)
    assert difference(added, on_one_rank(llama, 5)) < 1e-6


# ------------------------------------------------------------------ the whole model


@pytest.mark.parametrize("sharding", ALL)
def test_whole_state_dict_is_that_of_the_module_on_rank_0(sharding: Any) -> None:
    original = gpt2()
    expected = original.state_dict()

    def one(comm: Communicator) -> dict[str, Tensor]:
        return whole_state_dict(parallelize(copy.deepcopy(original), sharding, mesh=comm))

    first, second = run_threads(2, one)
    assert second == {}
    assert list(first) == list(expected)
    assert all(torch.equal(first[fqn], expected[fqn]) for fqn in expected)
    assert first["lm_head.weight"] is first["transformer.wte.weight"]


# ------------------------------------------------------------------ what parallelize makes


@pytest.mark.parametrize("sharding", ALL)
def test_rank_0_decides_the_values(sharding: Any) -> None:
    originals = [nn.Linear(8, 3) for _ in range(3)]

    def one(comm: Communicator) -> dict[str, Tensor]:
        model = parallelize(copy.deepcopy(originals[comm.rank]), sharding, mesh=comm)
        assert is_cut(model) == (sharding in CUT)
        return {fqn: whole.clone() for fqn, whole in whole_tensors(model)}

    for found in run_threads(3, one):
        assert all(torch.equal(found[fqn], param) for fqn, param in originals[0].named_parameters())


@pytest.mark.parametrize("sharding", ALL)
def test_each_rank_keeps_its_part_of_the_optimizer(sharding: Any) -> None:
    original = nn.Linear(64, 8, bias=False)

    def one(comm: Communicator) -> tuple[int, int]:
        model = parallelize(copy.deepcopy(original), sharding, mesh=comm)
        optimizer = optimizer_for(model, torch.optim.AdamW)
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        kept = sum(local_of(state["exp_avg"]).numel() for state in optimizer.state.values())
        whole = {"exp_avg": torch.empty(8, 64, device="meta"), "step": torch.empty((), device="meta")}
        room = OptimizerState(model, optimizer).room_for({"state": {"weight": whole}})["state"]["weight"]
        assert room["step"].shape == ()
        return kept, sum(tensor.numel() for _, tensor in held(room["exp_avg"]))

    kept = 512 if sharding == "none" else 256
    assert run_threads(2, one) == [(kept, kept)] * 2


@pytest.mark.parametrize("sharding", ALL)
def test_any_sharding_takes_a_mesh_of_two_axes(sharding: Any) -> None:
    def one(comm: Communicator) -> int:
        model = parallelize(nn.Linear(8, 8, bias=False), sharding, mesh=comm.mesh(replica=2, shard=2))
        return sum(local_of(param).numel() for param in model.parameters())

    kept = {"none": 64, "optimizer": 64, "hybrid": 32}.get(sharding, 16)
    assert run_threads(4, one) == [kept] * 4


def test_parameters_are_whole_from_forward_to_backward_where_only_gradients_are_cut() -> None:
    original = gpt2()

    def one(comm: Communicator, sharding: Any) -> list[bool]:
        model: Any = parallelize(copy.deepcopy(original), sharding, mesh=comm)
        loss = model(input_ids=torch.zeros(1, 4, dtype=torch.int64)).logits.sum()
        units = [unit_of(module) for module in (*model.transformer.h, model)]
        groups = [group for unit in units if unit is not None for group in unit.groups]
        after_forward = [group.state is ShardState.UNSHARDED for group in groups]
        loss.backward()
        assert all(group.state is ShardState.SHARDED for group in groups)
        return after_forward

    assert run_threads(2, one, "gradients") == [[True, True, True]] * 2
    assert run_threads(2, one, "full") == [[False, False, True]] * 2  # the last is needed at once


def test_precision_and_the_meta_device() -> None:
    meta = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to("meta")
    metas = [copy.deepcopy(meta) for _ in range(2)]

    def one(comm: Communicator) -> tuple[torch.dtype, list[Tensor]]:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model = parallelize(metas[comm.rank], "full", mesh=comm, mp_policy=policy, units=[metas[comm.rank][0]])
        materialize(model)
        return model(torch.ones(1, 2)).dtype, [whole.clone() for _, whole in whole_tensors(model)]

    (dtype, first), (_, second) = run_threads(2, one)
    assert dtype == torch.bfloat16
    assert all(torch.equal(a, b) and a.abs().sum() > 0 for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_seed_gives_every_sharding_and_world_the_same_values(world_size: int) -> None:
    with torch.device("meta"):
        original = gpt2()
    expected = dict(materialize(copy.deepcopy(original), seed=5).named_parameters())

    def one(comm: Communicator, sharding: Any) -> None:
        fill = functools.partial(materialize, seed=5)
        model = parallelize(copy.deepcopy(original), sharding, mesh=mesh_for(comm, sharding), fill=fill)
        found = dict(whole_tensors(model))
        assert all(torch.equal(found[fqn], param) for fqn, param in expected.items())

    for sharding in ALL:
        run_threads(world_size, one, sharding)


class Lists(nn.Module):
    """Lists of blocks, of a block with another list in it, and of what is no module to run."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList([nn.Linear(2, 2), nn.Identity()])
        self.second = nn.ModuleList([shard_models.Checkpointed(reentrant=False)])
        self.grid = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)])])
        self.scales = nn.ModuleList([nn.ParameterList([nn.Parameter(torch.ones(2))])])
        self.tied = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.head = nn.Linear(2, 2)
        self.head.weight = self.tied[0].weight


def test_units_are_the_elements_of_every_list_that_have_parameters_of_their_own() -> None:
    model = Lists()
    assert names(model, chosen_units(model)) == [
        "first.0",
        "second.0.blocks.0",
        "second.0.blocks.1",
        "second.0",
        "grid.0.0",
        "tied.1",
    ]
    assert names(gpt2(), chosen_units) == list(shard_models.GPT2_UNITS)
    assert names(llama(), chosen_units) == list(shard_models.LLAMA_UNITS)


def test_units_may_be_chosen() -> None:
    model = shard_models.Nested()
    given = [model.first, model.second.up, model.first.down]
    assert names(model, chosen_units(model, given)) == ["first.down", "first", "second.up"]
    assert names(model, chosen_units(model, ModuleWrapPolicy({shard_models.Block}))) == ["first", "second"]
    assert chosen_units(model, []) == []
    with pytest.raises(ConfigError, match="not in the Nested: Linear"):
        chosen_units(model, [nn.Linear(2, 2)])


def names(model: nn.Module, units: Any) -> list[str]:
    named = {module: name for name, module in model.named_modules()}
    return [named[unit] for unit in (units(model) if callable(units) else units)]


def test_what_cannot_be_done_is_refused_on_every_rank() -> None:
    meta, policy = nn.Linear(2, 2, device="meta"), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    cases: list[tuple[Callable[[Communicator], Any], str]] = [
        (lambda comm: parallelize(nn.Linear(2, 2), "zero3", mesh=comm), "one of none, optimizer"),  # type: ignore[arg-type]
        (lambda comm: parallelize(nn.Linear(2, 2), "none", mesh=comm, mp_policy=policy), "mp_policy is not supported"),
        (lambda comm: parallelize(meta, "optimizer", mesh=comm), r"'optimizer', fill=lockstep\.materialize\)"),
        (lambda comm: parallelize(nn.Linear(2, 2 + comm.rank), "full", mesh=comm), r"rank 1 has parameter 'weight'"),
        (lambda comm: parallelize(nn.Linear(2, 2), "hybrid", mesh=3), "pass a torch DeviceMesh"),
    ]
    for case, words in cases:
        with pytest.raises(RankFailed, match=words) as caught:
            run_threads(2, case)
        assert set(caught.value.errors) == {0, 1}


# ------------------------------------------------------------------ differently many batches


@pytest.mark.parametrize("sharding", [*ALL, "FullyShardedDataParallel"])
def test_gradients_of_ranks_that_have_run_out_are_zeros(sharding: Any) -> None:
    """The first of three ranks has no batch at all."""
    original = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
    batches = [[torch.randn(3, 4) for _ in range(count)] for count in (0, 1, 3)]

    def one(comm: Communicator) -> tuple[dict[str, Tensor], list[bool]]:
        model: nn.Module = copy.deepcopy(original)
        if sharding == "FullyShardedDataParallel":
            model = FullyShardedDataParallel(model, process_group=comm, use_orig_params=True)
        else:
            model = parallelize(model, sharding, mesh=comm)
        optimizer = optimizer_for(model, torch.optim.AdamW, lr=0.1)
        said = []
        for _ in range(2):
            for batch, is_own in in_step(model, batches[comm.rank]):
                model(batch).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                said.append(is_own)
        return {fqn.removeprefix("_fsdp_wrapped_module."): whole.clone() for fqn, whole in whole_tensors(model)}, said

    expected = copy.deepcopy(original)
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.1, fused=True)
    for step in (0, 1, 2, 0, 1, 2):
        for mine in batches:
            for batch in mine[step : step + 1]:
                (expected(batch).pow(2).mean() / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    results = run_threads(3, one)
    assert [said for _, said in results] == [[False] * 6, [True, False, False] * 2, [True] * 6]
    for found, _ in results:
        for fqn, param in expected.named_parameters():
            torch.testing.assert_close(found[fqn], param.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_ranks_with_fewer_batches_stay_in_step(sharding: Any) -> None:
    original = nn.Linear(2, 2)

    def one(comm: Communicator) -> list[float]:
        model = parallelize(copy.deepcopy(original), sharding, mesh=comm)
        batches = [torch.full((1, 2), float(number)) for number in range(2 * comm.rank)]
        with torch.no_grad():
            sums = [(float(model(batch).sum()), is_own) for batch, is_own in in_step(model, batches)]
        assert len(sums) == (len(batches) if sharding == "none" else 4)
        return [value for value, is_own in sums if is_own]

    with torch.no_grad():
        expected = [float(original(torch.full((1, 2), float(number))).sum()) for number in range(4)]
    assert run_threads(3, one) == [expected[: 2 * rank] for rank in range(3)]
