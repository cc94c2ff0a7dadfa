"""FullyShardedDataParallel on ranks that are threads: its face, whole parameters, its construction, its refusals."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy, enable_wrap, wrap

from fsdp_models import Block, adamw, batch, build, equal, train, wrapped
from lockstep.comm.communicator import Communicator
from lockstep.errors import ConfigError, UnsupportedArgument
from lockstep.parallel.dtensors import DTensor, local_tensor
from lockstep.parallel.fsdp import FullyShardedDataParallel as Fsdp
from lockstep.parallel.fsdp1.tensors import full_tensor
from lockstep.parallel.initialisers import drawn_seed, random_from
from lockstep.parallel.shard_slot import slot_of
from lockstep.parallel.torch_fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    StateDictType,
)
from lockstep.testing.failures import RankFailed
from lockstep.testing.worlds import run_threads

FULL, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.LOCAL_STATE_DICT

# ------------------------------------------------------------------ its face


def test_wrapper_looks_like_the_module() -> None:
    def body(comm: Communicator) -> None:
        plain, model = build(), wrapped(comm)
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
        assert [name for name, _ in model.named_buffers()] == ["1.scale", "2.scale"]
        inside = nn.ModuleDict({"a": model})
        assert [name for name, _ in inside.named_parameters()] == [f"a.{name}" for name, _ in plain.named_parameters()]
        with torch.no_grad():
            model(batch(0, comm.rank))  # the engine learns who is the root
        slot = slot_of(model[1].up.weight)
        assert slot is not None
        assert slot.group.fqns[slot.index] == "1.up.weight"
        assert dict(model.named_modules())["1.up"] is model[1].up
        assert all(isinstance(param, DTensor) for param in model.parameters())
        assert isinstance(model[1], Fsdp)
        assert model[1].width == 7
        assert model[1].module is model[1]._fsdp_wrapped_module
        assert isinstance(model.module, nn.Sequential)
        with pytest.raises(AttributeError, match="nonsense"):
            _ = model.nonsense
        assert model.sharding_strategy is ShardingStrategy.FULL_SHARD
        assert (model.rank, model.world_size, model.compute_device) == (comm.rank, 2, comm.device)
        assert model.check_is_root()
        assert not model[1].check_is_root()
        assert Fsdp.fsdp_modules(model) == [model, model[1], model[2]]
        assert Fsdp.fsdp_modules(nn.ModuleList([model]), root_only=True) == [model]
        assert Fsdp.fsdp_modules(model.module, root_only=True) == [model[1], model[2]]

    run_threads(2, body)


def test_every_strategy_keeps_what_it_says() -> None:
    def body(comm: Communicator) -> list[int]:
        kept = []
        for strategy in ShardingStrategy:
            mesh = comm.mesh(replica=2, shard=-1) if "HYBRID" in strategy.name else None
            model = Fsdp(build(), None if mesh else comm, strategy, device_mesh=mesh)
            kept.append(sum(local_tensor(param).numel() for param in model.parameters()))
        return kept

    whole = sum(param.numel() for param in build().parameters())
    kept = [sum(each) for each in zip(*run_threads(4, body), strict=True)]
    assert kept == [whole, whole, 4 * whole, 2 * whole, 2 * whole]


@pytest.mark.parametrize(
    ("strategy", "whole"),
    [(ShardingStrategy.FULL_SHARD, (True, False)), (ShardingStrategy.SHARD_GRAD_OP, (True, True))],
)
def test_what_stays_whole_between_forward_and_backward(strategy: ShardingStrategy, whole: tuple[bool, bool]) -> None:
    def body(comm: Communicator) -> None:
        model = wrapped(comm, sharding_strategy=strategy)
        loss = model(batch(0, comm.rank)).sum()
        assert tuple(not isinstance(part.weight, DTensor) for part in (model[0], model[1].up)) == whole
        loss.backward()
        assert all(isinstance(param, DTensor) for param in model.parameters())

    run_threads(2, body)


# ------------------------------------------------------------------ whole parameters for a while


def test_summoned_parameters_are_whole_and_written_back() -> None:
    def body(comm: Communicator) -> None:
        model, plain = wrapped(comm), build()
        optimizer = adamw(model)
        train(model, optimizer, comm.rank, steps=1)
        model(batch(9, comm.rank)).sum().backward()
        before = {name: full_tensor(param) for name, param in model.named_parameters()}
        with Fsdp.summon_full_params(model, with_grads=True):
            for name, param in model.named_parameters():
                assert torch.equal(param, before[name])
                assert param.grad is not None
                assert param.grad.shape == param.shape == dict(plain.named_parameters())[name].shape
                param.data.mul_(2)
                param.grad.fill_(3)
            assert torch.equal(model.state_dict()["1.up.weight"], 2 * before["1.up.weight"])
            assert torch.equal(model.module.state_dict()["0.weight"], 2 * before["0.weight"])
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor)
            assert torch.equal(full_tensor(param), 2 * before[name])
            assert param.grad is not None
            assert bool((local_tensor(param.grad) == 3).all())
        with Fsdp.summon_full_params(model, writeback=False):
            nn.init.zeros_(model[0].weight)
        assert torch.equal(full_tensor(model[0].weight), 2 * before["0.weight"])
        train(model, optimizer, comm.rank, steps=1)

    run_threads(2, body)


def test_summon_one_unit_or_one_rank() -> None:
    def body(comm: Communicator) -> None:
        model = wrapped(comm)
        with Fsdp.summon_full_params(model, recurse=False):
            assert model[0].weight.shape == (4, 3)
            assert not isinstance(model[0].weight, DTensor)
            assert isinstance(model[1].up.weight, DTensor)
        with Fsdp.summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True):
            assert isinstance(model[0].weight, DTensor) is (comm.rank != 0)
            state = model.state_dict()
        assert [name for name in state if "scale" not in name] == (
            [name for name, _ in build().named_parameters()] if comm.rank == 0 else []
        )
        with pytest.raises(UnsupportedArgument, match="writeback"), Fsdp.summon_full_params(model, rank0_only=True):
            pass
        with (
            Fsdp.summon_full_params(model),
            pytest.raises(RuntimeError, match="summoned already"),
            Fsdp.summon_full_params(model[1]),
        ):
            pass

    run_threads(2, body)


@pytest.mark.parametrize("recurse", [True, False])
def test_forward_inside_summon_sees_what_was_written(recurse: bool) -> None:
    """As generate() under summon_full_params, which calls the module inside."""

    def body(comm: Communicator) -> None:
        model, plain = wrapped(comm), build()
        x = batch(0, 0)
        nn.init.ones_(plain[0].weight)
        with torch.no_grad(), Fsdp.summon_full_params(model, recurse=recurse):
            nn.init.ones_(model[0].weight)
            for _ in range(2):
                torch.testing.assert_close(model.module(x), plain(x))
            assert not isinstance(model[0].weight, DTensor)
        with Fsdp.summon_full_params(model), pytest.raises(RuntimeError, match=r"torch\.no_grad"):
            model(x)
        torch.testing.assert_close(model(x), plain(x))

    run_threads(2, body)


# ------------------------------------------------------------------ construction


def test_states_of_rank_0() -> None:
    def body(comm: Communicator) -> None:
        built = build(seed=comm.rank)
        built[1].scale += comm.rank
        model = Fsdp(built, comm, auto_wrap_policy=ModuleWrapPolicy({Block}), sync_module_states=True)
        assert equal(dict(model.state_dict()), dict(build().state_dict()))

    run_threads(3, body)


def test_meta_modules_are_filled() -> None:
    def body(comm: Communicator) -> None:
        with torch.device("meta"):
            mine, theirs, neither = nn.Linear(2, 3), nn.Linear(2, 3), nn.ParameterList([torch.zeros(2)])

        def fill(module: nn.Module) -> None:
            module.to_empty(device="cpu", recurse=False)
            for param in module.parameters(recurse=False):
                nn.init.constant_(param, 7)

        state = Fsdp(nn.Sequential(mine), comm, param_init_fn=fill).state_dict()
        assert bool((state["0.weight"] == 7).all())
        alike = nn.Sequential(theirs, nn.Linear(2, 3, device="meta"))
        model = Fsdp(alike, comm, sync_module_states=True, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        state = model.state_dict()
        assert 0 < state["0.weight"].abs().max() <= 2**-0.5
        assert not torch.equal(state["0.weight"], state["1.weight"])  # units of equal shape, with the same names inside
        with pytest.raises(ConfigError, match=r"nothing initialises 0\.0: give .* a reset_parameters"):
            Fsdp(nn.Sequential(neither), comm)
        with torch.device("meta"):
            left = nn.Linear(2, 3)
        with pytest.raises(ConfigError, match=r"0\.weight, 0\.bias are still on the meta device"):
            Fsdp(nn.Sequential(left), comm, param_init_fn=lambda module: None)

    run_threads(2, body)


def test_no_two_units_have_the_same_seed_where_ranks_are_threads() -> None:
    """One that is drawn while another thread has the generator would be forgotten, and come again."""
    has_it, is_over = threading.Event(), threading.Event()

    def initialise() -> None:
        with random_from(7, torch.device("cpu")):
            has_it.set()
            is_over.wait(10)

    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(initialise)
        assert has_it.wait(10)
        first = pool.submit(drawn_seed)
        assert not wait([first], 0.2).done
        is_over.set()
        other.result(10)
        assert first.result(10) != drawn_seed()


def test_rank_0_alone_has_the_values() -> None:
    """The others are on the meta device and get memory only, as programs that load a large file do."""

    def body(comm: Communicator) -> None:
        with torch.device("cpu" if comm.rank == 0 else "meta"):
            built = nn.Sequential(Block(), nn.BatchNorm1d(4))
        if comm.rank == 0:
            for tensor in built.state_dict().values():
                tensor.fill_(3)
        empty = None if comm.rank == 0 else lambda module: module.to_empty(device="cpu", recurse=False)
        policy = ModuleWrapPolicy({Block})
        model = Fsdp(built, comm, auto_wrap_policy=policy, param_init_fn=empty, sync_module_states=True)
        assert all(bool((value == 3).all()) for value in model.state_dict().values())

    run_threads(2, body)


def test_ignored_parameters_stay_whole_and_unsynchronised() -> None:
    def body(comm: Communicator) -> None:
        model = build()
        ignored = [model[1], model[3]] if comm.world_size == 2 else []
        model = Fsdp(model, comm, auto_wrap_policy=ModuleWrapPolicy({Block}), ignored_modules=ignored)
        assert Fsdp.fsdp_modules(model) == [model, model[2]]
        model(batch(0, comm.rank)).sum().backward()
        weight = model[3].weight
        assert not isinstance(weight, DTensor)
        with Fsdp.state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True)):
            names = list(model.state_dict())
        assert comm.rank == 0 or names == ["1.up.weight", "1.up.bias", "1.down.weight", "3.weight", "3.bias"]
        gradients = [torch.zeros_like(weight) for _ in range(2)]
        comm.all_gather(gradients, weight.grad)
        assert not torch.equal(*gradients)

    run_threads(2, body)


def test_units_with_arguments_of_their_own() -> None:
    def body(comm: Communicator) -> None:
        own = {"mixed_precision": None}
        policy = CustomPolicy(lambda m: own if isinstance(m, Block) else getattr(m, "in_features", 0) == 3)
        model = Fsdp(build(), comm, auto_wrap_policy=policy, mixed_precision=MixedPrecision(torch.bfloat16))
        assert [unit.mixed_precision.param_dtype for unit in (model[0], model[1], model)] == [
            torch.bfloat16,
            None,
            torch.bfloat16,
        ]

    run_threads(2, body)


def test_offloaded_parameters_train_the_same() -> None:
    def body(comm: Communicator) -> None:
        ends = []
        for offload in (False, True):
            model = wrapped(comm, cpu_offload=CPUOffload(offload_params=offload))
            assert {group.pieces.offloads for group in model._fsdp_unit.engine.groups} == {offload}
            train(model, adamw(model), comm.rank)
            ends.append(dict(model.state_dict()))
        assert equal(*ends)

    run_threads(2, body)


def test_wrapped_by_annotation() -> None:
    def body(comm: Communicator) -> None:
        with enable_wrap(wrapper_cls=Fsdp, process_group=comm):
            model = wrap(nn.Sequential(wrap(nn.Linear(3, 4)), nn.Linear(4, 1)))
        assert Fsdp.fsdp_modules(model) == [model, model[0]]

    run_threads(1, body)  # torch has one such context for all threads


def test_ranks_with_fewer_batches_join() -> None:
    """The engine's join, through the wrapper."""

    def body(comm: Communicator) -> dict[str, torch.Tensor]:
        model = wrapped(comm)
        optimizer = adamw(model)
        for inputs in model.join([batch(step, comm.rank) for step in range(1 + comm.rank)]):
            optimizer.zero_grad()
            model(inputs).pow(2).mean().backward()
            optimizer.step()
        return dict(model.state_dict())

    assert equal(*run_threads(2, body))


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"sharding_strategy": "FULL_SHARD"}, ConfigError, "sharding_strategy='FULL_SHARD': pass a ShardingStrategy"),
        ({"sharding_strategy": BackwardPrefetch.BACKWARD_PRE}, ConfigError, "pass a ShardingStrategy"),
        ({"backward_prefetch": True}, ConfigError, "backward_prefetch=True: pass a BackwardPrefetch"),
        ({"mixed_precision": torch.bfloat16}, ConfigError, "mixed_precision=torch.bfloat16: pass a MixedPrecision"),
        ({"cpu_offload": True}, ConfigError, "cpu_offload=True: pass a CPUOffload"),
        ({"auto_wrap_policy": 5}, ConfigError, "auto_wrap_policy=5 is no policy"),
        ({"ignored_modules": [], "ignored_states": []}, ValueError, "both ignored_modules and ignored_states"),
        ({"ignored_modules": [torch.zeros(1)]}, ConfigError, "ignored_modules takes modules"),
        ({"ignored_states": [nn.Linear(1, 1), nn.Parameter(torch.zeros(1))]}, ConfigError, "all of one kind"),
        ({"device_mesh": 3}, ConfigError, "mesh=3"),
        ({"device_id": torch.device("cuda", 0)}, ConfigError, "is a cuda device.*communicate on cpu"),
    ],
)
def test_wrong_arguments_are_named(kwargs: dict[str, Any], error: type[Exception], words: str) -> None:
    def body(comm: Communicator) -> None:
        group = None if "device_mesh" in kwargs else comm
        with pytest.raises(error, match=words):
            Fsdp(build(), group, **kwargs)

    run_threads(1, body)


def test_wrong_meshes_are_named() -> None:
    def body(comm: Communicator) -> None:
        mesh = comm.mesh(replica=2, shard=1)
        with pytest.raises(ConfigError, match=r"FULL_SHARD cuts .* along one axis and the mesh has two"):
            Fsdp(build(), device_mesh=mesh)
        with pytest.raises(ValueError, match="both process_group and device_mesh"):
            Fsdp(build(), comm, device_mesh=mesh)
        with pytest.raises(ConfigError, match=r"comm\.mesh\(replica"):
            Fsdp(build(), (comm, comm), ShardingStrategy.HYBRID_SHARD)
        with pytest.raises(ConfigError, match="1 is a FullyShardedDataParallel already"):
            Fsdp(wrapped(comm).module, comm, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))

    run_threads(2, body)


def test_methods_say_what_they_refuse() -> None:
    def body(comm: Communicator) -> None:
        model = wrapped(comm, cpu_offload=CPUOffload())
        with pytest.raises(RuntimeError, match=r"clip_grad_norm_\(\) on a wrapper inside another"):
            model[1].clip_grad_norm_(1.0)
        with pytest.raises(RuntimeError, match=r"no_sync\(\) on a wrapper inside another"), model[1].no_sync():
            pass
        with pytest.raises(ConfigError, match="pass a LocalStateDictConfig"):
            Fsdp.set_state_dict_type(model, LOCAL, FullStateDictConfig())
        with pytest.raises(ConfigError, match="state_dict_type=None"):
            Fsdp.set_state_dict_type(model, None)
        with pytest.raises(ConfigError, match="no FullyShardedDataParallel in this Linear"):
            Fsdp.get_state_dict_type(nn.Linear(1, 1))
        Fsdp.set_state_dict_type(model[1], FULL, None, FullOptimStateDictConfig(rank0_only=True))
        with pytest.raises(ConfigError, match="set differently"):
            Fsdp.get_state_dict_type(model)

    run_threads(1, body)


def test_a_failed_rank_is_told() -> None:
    """The wrapper lets the engine's word through."""

    def body(comm: Communicator) -> None:
        model = wrapped(comm)
        if comm.rank == 1:
            model[2].module.down.register_forward_hook(lambda *_: 1 / 0)
        model(batch(0, comm.rank))

    with pytest.raises(RankFailed, match="ZeroDivisionError"):
        run_threads(2, body)
