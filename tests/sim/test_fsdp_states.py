"""State dicts of a FullyShardedDataParallel and its optimizer, on ranks that are threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from fsdp_models import adamw, batch, build, copied, equal, train, wrapped
from lockstep.comm.communicator import Communicator
from lockstep.errors import ConfigError
from lockstep.parallel.dtensors import DTensor, local_tensor
from lockstep.parallel.fsdp import FullyShardedDataParallel as Fsdp
from lockstep.parallel.torch_fsdp import (
    FullStateDictConfig,
    LocalStateDictConfig,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
)
from lockstep.testing.worlds import run_threads

FULL, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.LOCAL_STATE_DICT


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_full_state_dict_is_that_of_the_module(world_size: int) -> None:
    def body(comm: Communicator) -> None:
        model = wrapped(comm)
        assert equal(dict(model.state_dict()), dict(build().state_dict()))
        assert equal(dict(nn.ModuleDict({"a": model}).state_dict()), dict(nn.ModuleDict({"a": build()}).state_dict()))
        model.load_state_dict(build(1).state_dict())
        assert equal(dict(model.state_dict()), dict(build(1).state_dict()))
        build(2).load_state_dict(model.state_dict())

    run_threads(world_size, body)


def test_full_state_dict_on_rank_0_only() -> None:
    def body(comm: Communicator) -> list[str]:
        model = wrapped(comm, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
        assert [param.device_mesh.shape for param in model.parameters()] == [(1, 3)] * 10  # one host
        with Fsdp.state_dict_type(model, FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
            state = model.state_dict()
        assert Fsdp.get_state_dict_type(model).state_dict_config == FullStateDictConfig()
        if comm.rank == 0:
            assert equal(dict(state), dict(build().state_dict()))
        return list(state)

    assert run_threads(3, body)[1:] == [[], []]


def test_local_state_dict_holds_this_rank_s_pieces() -> None:
    def body(comm: Communicator) -> int:
        model, other = wrapped(comm), wrapped(comm, seed=1)
        Fsdp.set_state_dict_type(model, LOCAL)
        Fsdp.set_state_dict_type(other, LOCAL, LocalStateDictConfig())
        state = copied(model.state_dict())
        other.load_state_dict(state)
        assert equal(copied(other.state_dict()), state)
        with pytest.raises(ConfigError, match=r"'0\.weight' is \(4, 3\), and this rank's piece is \(2, 3\)"):
            other.load_state_dict({**state, "0.weight": torch.zeros(4, 3)})
        return sum(value.numel() for name, value in state.items() if "scale" not in name)

    assert sum(run_threads(2, body)) == sum(param.numel() for param in build().parameters())


def test_state_dict_between_forward_and_backward() -> None:
    """The modules have whole parameters then."""

    def body(comm: Communicator) -> None:
        model = wrapped(comm, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
        model(batch(0, comm.rank)).sum()
        model.load_state_dict(build(1).state_dict())
        assert equal(dict(model.state_dict()), dict(build(1).state_dict()))
        assert all(isinstance(param, DTensor) for param in model.parameters())

    run_threads(2, body)


def test_load_names_what_does_not_fit() -> None:
    def body(comm: Communicator) -> None:
        model = wrapped(comm)
        state = build().state_dict()
        state["1.upp.weight"] = state.pop("1.up.weight")
        found = model.load_state_dict(state, strict=False)
        assert (found.missing_keys, found.unexpected_keys) == (["1.up.weight"], ["1.upp.weight"])
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict({**build().state_dict(), "0.bias": torch.zeros(5)})

    run_threads(2, body)


# ------------------------------------------------------------------ the optimizer's state


@pytest.mark.parametrize("kind", list(StateDictType))
def test_training_goes_on_from_a_saved_state(kind: StateDictType) -> None:
    def body(comm: Communicator) -> None:
        model = wrapped(comm)
        optimizer = adamw(model)
        Fsdp.set_state_dict_type(model, kind)
        train(model, optimizer, comm.rank)
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        state = _pytree.tree_map_only(Tensor, torch.clone, Fsdp.optim_state_dict(model, optimizer))
        train(model, optimizer, comm.rank, first=2)

        again = wrapped(comm, seed=1)
        stepper = adamw(again)
        Fsdp.set_state_dict_type(again, kind)
        again.load_state_dict(saved)
        Fsdp.optim_state_dict_to_load(again, stepper, state, load_directly=True)
        train(again, stepper, comm.rank, first=2)
        assert equal(copied(again.state_dict()), copied(model.state_dict()))

    run_threads(2, body)


def test_state_of_one_world_size_goes_on_at_another() -> None:
    """What rank 0 alone has is given to all."""

    def save(comm: Communicator) -> Any:
        model = wrapped(comm)
        optimizer = adamw(model)
        train(model, optimizer, 0)
        full = Fsdp.full_optim_state_dict(model, optimizer)
        assert comm.rank == 0 or full == {}
        state = dict(model.state_dict())
        train(model, optimizer, 0, first=2)
        return state, full, dict(model.state_dict())

    def load(comm: Communicator, state: Any, full: Any, end: Any) -> None:
        model = wrapped(comm, seed=1)
        optimizer = adamw(model)
        model.load_state_dict(state)
        mine = full if comm.rank == 0 else None
        optimizer.load_state_dict(Fsdp.scatter_full_optim_state_dict(mine, model, optim=optimizer))
        for param, entry in optimizer.state.items():  # a view would keep the whole alive
            kept = local_tensor(entry["exp_avg"])
            assert kept.untyped_storage().nbytes() == local_tensor(param).nbytes
        train(model, optimizer, 0, first=2)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, end[name], rtol=1e-6, atol=1e-6)

    state, full, end = run_threads(2, save)[0]
    run_threads(3, load, state, full, end)


def test_optimizer_state_of_one_process() -> None:
    """To numbers and back: what a plain model's optimizer takes and gives."""

    def body(comm: Communicator) -> None:
        model, plain = wrapped(comm), build()
        optimizer, single = adamw(model), adamw(plain)
        train(model, optimizer, 0)
        train(plain, single, 0)
        full = Fsdp.full_optim_state_dict(model, optimizer, rank0_only=False)
        numbered = Fsdp.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, plain, optim=single)
        for number, entry in single.state_dict()["state"].items():
            for name, value in entry.items():
                torch.testing.assert_close(numbered["state"][number][name], value, rtol=1e-6, atol=1e-7)
        single.load_state_dict(numbered)
        named = Fsdp.rekey_optim_state_dict(numbered, OptimStateKeyType.PARAM_NAME, plain, optim=single)
        assert named["param_groups"] == full["param_groups"]
        again = Fsdp.shard_full_optim_state_dict(named, model, optim=optimizer)
        assert again["param_groups"] == optimizer.state_dict()["param_groups"]

    run_threads(2, body)


def test_optimizer_of_another_model_is_named() -> None:
    def body(comm: Communicator) -> None:
        model = wrapped(comm)
        optimizer = adamw(build())
        with pytest.raises(ConfigError, match=r"10 parameter.* not in the model"):
            Fsdp.optim_state_dict(model, optimizer)
        state = {"state": {}, "param_groups": [{"params": ["1.upp.weight"]}]}
        with pytest.raises(ConfigError, match=r"1\.upp\.weight"):
            Fsdp.optim_state_dict_to_load(model, adamw(model), state)

    run_threads(1, body)
