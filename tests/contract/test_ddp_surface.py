"""What callers and libraries touch on torch's class is there on ours, or stands in a table with the reason."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_sides import Cases, Side, gradients, scalar, seeded, snapshot
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDdp

import lockstep

CASES = Cases(__name__)

# Names on a torch DDP instance that ours does not have.
LEFT_OUT = {
    **dict.fromkeys(
        [
            "_use_python_reducer",
            "_register_accum_grad_hook",
            "_accum_grad_hooks",
        ],
        "torch's reducer for compiled autograd",
    ),
    **dict.fromkeys(
        [
            "_fire_reducer_autograd_hook",
            "_root_copy_hook",
            "_module_wait_for_copy_hook",
        ],
        "the private mixed_precision prototype, which ours refuses",
    ),
    **dict.fromkeys(
        [
            "_clear_grad_buffer",
            "_delay_all_reduce_all_params",
            "_delay_all_reduce_params",
            "_delay_grad_buffer",
            "_delay_grad_views",
            "_delayed_all_reduce_hook",
            "_register_delay_all_reduce_hook",
        ],
        "delayed parameters are ordinary buckets that are launched last",
    ),
    **dict.fromkeys(
        [
            "_build_debug_param_to_name_mapping",
            "_build_params_for_reducer",
            "_bucket_config",
            "_ddp_init_helper",
            "_get_parameters",
            "_log_and_throw",
            "_passing_sync_batchnorm_handle",
            "_check_comm_hook",
            "_check_default_group",
            "_lazy_init",
            "logger",
        ],
        "steps of torch's own construction",
    ),
    **dict.fromkeys(
        [
            "_check_and_sync_module_buffers",
            "_match_all_reduce_for_bwd_pass",
            "_match_unused_params_allreduce",
            "_sync_final_model",
        ],
        "steps of torch's own join hook",
    ),
    **dict.fromkeys(
        [
            "_default_broadcast_coalesced",
            "_distributed_broadcast_coalesced",
            "broadcast_bucket_size",
        ],
        "how torch copies buffers",
    ),
    **dict.fromkeys(
        [
            "_assign_modules_buffers",
            "_check_sync_bufs_post_fwd",
            "_check_sync_bufs_pre_fwd",
            "_run_ddp_forward",
            "_sync_module_buffers",
        ],
        "steps of torch's own forward",
    ),
    **dict.fromkeys(
        ["_active_ddp_module", "_get_active_ddp_module", "_inside_ddp_forward"],
        "how torch.compile splits graphs at bucket boundaries; ours compiles the module as it is",
    ),
    **dict.fromkeys(
        ["_ddp_sink_clone", "_set_ddp_sink_clone"], "ours puts no function between the module and its output"
    ),
    "_set_sparse_metadata": "the size of sparse gradients is sent with them",
    **dict.fromkeys(["_check_reducer_finalized", "_distributed_rank"], "what torch's class asks itself"),
}


def test_signatures() -> None:
    ours, theirs = (inspect.signature(cls.__init__) for cls in (lockstep.DistributedDataParallel, TorchDdp))
    assert [(p.name, p.default, p.kind) for p in ours.parameters.values()] == [
        (p.name, p.default, p.kind) for p in theirs.parameters.values()
    ]
    different = []
    for name, method in inspect.getmembers(TorchDdp, callable):
        mine = getattr(lockstep.DistributedDataParallel, name, None)
        if name not in TorchDdp.__dict__ or mine is None or name in ("__init__", "__getstate__", "__setstate__"):
            continue
        a, b = inspect.signature(mine).parameters, inspect.signature(method).parameters
        if [(p.name, p.default) for p in a.values()] != [(p.name, p.default) for p in b.values()]:
            different.append((name, list(a), list(b)))
    # private ones may take fewer words, public ones may not
    assert [entry for entry in different if not entry[0].startswith("_")] == []


def names(ddp: object) -> set[str]:
    return {name for name in {*vars(ddp), *dir(type(ddp))} if not (name.startswith("__") and name.endswith("__"))}


def surface(comm: Any) -> dict[str, Any]:
    """What torch's instance has and ours has not, before and after training."""
    sides = {kind: Side(kind, comm) for kind in ("torch", "ours")}
    missing: set[str] = set()
    found: dict[str, Any] = {}
    for training in (False, True):
        made = {}
        for kind, side in sides.items():
            ddp = side.wrap(seeded(lambda: nn.Sequential(nn.Linear(8, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))))
            if training:
                for step in range(3):
                    scalar(ddp(side.batch(step, 6, 8))).backward()
            made[kind] = ddp
            found[f"logging {kind}"] = ddp._get_ddp_logging_data()
        missing |= names(made["torch"]) - names(made["ours"])
    found["missing"] = sorted(missing)
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    from lockstep.testing.worlds import run_processes

    return run_processes(2, surface)[1]


def test_every_name_is_there(found: dict[str, Any]) -> None:
    assert sorted(set(found["missing"]) - set(LEFT_OUT)) == []
    assert sorted(set(LEFT_OUT) - set(found["missing"])) == []


def test_logging_data_has_torchs_names(found: dict[str, Any]) -> None:
    ours, theirs = found["logging ours"], found["logging torch"]
    assert sorted(set(theirs) - set(ours)) == []
    assert {name: type(value) for name, value in theirs.items()} == {name: type(ours[name]) for name in theirs}
    equal = [
        "world_size",
        "rank",
        "module_name",
        "num_parameter_tensors",
        "total_parameter_size_bytes",
        "bucket_cap_bytes",
        "broadcast_buffers",
        "has_rebuilt_buckets",
        "rebuilt_bucket_sizes",
        "rebuilt_per_bucket_param_indices",
        "prev_iteration_grad_ready_order_indices",
        "num_buckets_reduced",
        "output_device",
        "device_ids",
    ]
    assert {name: ours[name] for name in equal if name in theirs} == {
        name: theirs[name] for name in equal if name in theirs
    }


# ------------------------------------------------------------------ the same buckets


class InTurn(nn.Module):
    """Layers in another order than they are registered."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(8, 8, dtype=torch.float64 if i % 3 == 2 else torch.float32) for i in range(8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in (3, 1, 4, 2, 7, 0, 6, 5):
            layer = self.layers[i]
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x


@CASES.add(2)
def plans_of_buckets(side: Side) -> Any:
    """After the first step both have the same buckets, with the same members in the same order.

    Of buckets that are not full torch launches those of one dtype before those of another; ours what is ready first.
    """
    found = []
    for cap in (None, 1e-6, 0.0003, 0.0007, 0.002):
        ddp = side.wrap(seeded(InTurn), bucket_cap_mb=cap)
        for step in range(3):
            scalar(ddp(side.batch(step, 6, 8))).backward()
        data = ddp._get_ddp_logging_data()
        plan = str(data["rebuilt_per_bucket_param_indices"]).split(", ")
        found.append([cap, sorted(zip(plan, str(data["rebuilt_bucket_sizes"]).split(", "), strict=True))])
    return found


# ------------------------------------------------------------------ groups


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 3))


def three_steps(side: Side, ddp: Any) -> Any:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        scalar(ddp(side.batch(step, 6, 8))).backward()
        optimizer.step()
    return snapshot(ddp)


@CASES.add(3, 4, tolerance={4: None})
def part_of_the_world(side: Side) -> Any:
    """A group of two ranks; the others train alone, each on a group of itself."""
    groups = [dist.new_group([0, 1]), *[dist.new_group([rank]) for rank in range(2, side.world_size)]]
    group = groups[max(0, side.rank - 1)]
    return three_steps(side, side.wrap(seeded(mlp), process_group=group))


@CASES.add(2)
def device_mesh(side: Side) -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("replica",))
    ddp = side.wrap(seeded(mlp), device_mesh=mesh)
    return [ddp.device_mesh is mesh, ddp.process_group is mesh.get_group(), three_steps(side, ddp)]


@CASES.add(4)
def axis_of_a_device_mesh(side: Side) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "other"))
    return three_steps(side, side.wrap(seeded(mlp), device_mesh=mesh["replica"]))


@CASES.add(2)
def communicator_of_ours(side: Side) -> Any:
    """Torch's class takes a group of torch; ours also a Communicator, whole or split."""
    if not side.is_ours:
        return [three_steps(side, side.wrap(seeded(mlp))), three_steps(side, side.wrap(seeded(mlp)))]
    half = side.comm.split(0)
    assert half is not None
    found = [three_steps(side, side.wrap(seeded(mlp), process_group=comm)) for comm in (side.comm, half)]
    half.close()
    return found


@CASES.add(3)
def group_replaced(side: Side) -> Any:
    """_update_process_group: go on without the last rank."""
    ddp = side.wrap(seeded(mlp))
    whole = three_steps(side, ddp)
    rest = dist.new_group([0, 1])
    if side.rank == 2:
        return whole
    ddp._update_process_group(rest)
    return [whole, three_steps(side, ddp)]


@CASES.add(2)
def parameters_left_out(side: Side) -> Any:
    """Ignored parameters and buffers stay as each rank has them."""

    def make() -> nn.Module:
        torch.manual_seed(side.rank)
        return nn.Sequential(nn.Linear(8, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))

    model = make()
    names = ["2.weight", "1.running_mean", "1.bias"]
    type(side.wrap(mlp()))._set_params_and_buffers_to_ignore_for_model(model, names)
    ddp = side.wrap(model)
    marked = [hasattr(param, "_ddp_ignored") for param in model.parameters()]
    return [sorted(ddp.parameters_to_ignore), marked, three_steps(side, ddp)]


@CASES.add(2)
def first_weights(side: Side) -> Any:
    """Construction makes weights and buffers rank 0's, or leaves them alone."""

    def make() -> nn.Module:
        torch.manual_seed(side.rank)
        model = nn.Sequential(nn.Linear(8, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))
        model[1].running_mean.fill_(side.rank)
        model[2].requires_grad_(False)
        model.register_buffer("flag", torch.tensor(side.rank == 0))
        model.register_buffer("text", torch.full((3,), side.rank, dtype=torch.uint8), persistent=False)
        return model

    found = []
    for kwargs in ({}, {"init_sync": False}, {"broadcast_buffers": False}, {"forward_sync_buffers": False}):
        model = make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            side.wrap(model, **kwargs)
        found.append([snapshot(model)["state"], model.get_buffer("text").clone()])
    return found


@CASES.add(2)
def buffers_of_every_kind(side: Side) -> Any:
    """Bool, integer, non-contiguous and replaced buffers follow rank 0 at each forward."""

    class Buffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 3)
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
            self.register_buffer("turned", torch.zeros(2, 3).t())
            self.register_buffer("wide", torch.zeros(2, dtype=torch.float64))
            self.register_buffer("missing", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1 + side.rank
            self.flags = ~self.flags if side.rank == 0 else self.flags.clone()
            self.turned.add_(side.rank + 1.0)
            self.wide.mul_(0.5).add_(side.rank)
            return self.layer(x) * self.turned.sum()

    model = seeded(Buffers)
    ddp = side.wrap(model)
    seen = []
    for step in range(3):
        scalar(ddp(side.batch(step, 6, 8))).backward()
        seen.append(snapshot(model))
    return seen


@CASES.add(2, against="plain", tolerance=1e-6)
def delayed_parameters(side: Side) -> Any:
    """The mean all the same. (Torch's own leaves them different between ranks in this model.)"""
    model = seeded(lambda: nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 3)))
    delayed = [("0.weight", model[0].weight), ("1.bias", model[1].bias)]
    ddp = side.wrap(model, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=model[2].bias)
    seen = []
    for step in range(3):
        model.zero_grad()
        scalar(ddp(side.tokens(step, 11, 4))).backward()
        side.end_backward(model)
        seen.append(gradients(model))
    return seen


# ------------------------------------------------------------------ how libraries unwrap it


@CASES.add(2)
def unwrapping(side: Side) -> Any:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model = seeded(mlp)
    ddp = side.wrap(model)
    state = get_model_state_dict(ddp)
    set_model_state_dict(ddp, {name: value + 1 for name, value in state.items()})
    nn.modules.utils.consume_prefix_in_state_dict_if_present(prefixed := dict(ddp.state_dict()), "module.")
    return [
        list(state),
        list(prefixed),
        isinstance(ddp, TorchDdp),
        isinstance(ddp, nn.parallel.DistributedDataParallel),
        isinstance(ddp, nn.Module),
        ddp.module is model,
        sum(param.numel() for param in ddp.parameters()),
        [name for name, _ in ddp.named_buffers()],
        snapshot(ddp)["state"],
    ]


@CASES.add(2)
def a_subclass(side: Side) -> Any:
    """A class of the user's that inherits the wrapper and forwards attributes."""
    parent: Any = lockstep.DistributedDataParallel if side.is_ours else TorchDdp

    class Forwarding(parent):
        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.module, name)

    model = seeded(mlp)
    model.colour = "red"
    ddp = Forwarding(model)
    return [ddp.colour, isinstance(ddp, TorchDdp), isinstance(ddp, Forwarding), three_steps(side, ddp)]


@pytest.mark.parametrize(("name", "world_size"), CASES.parameters())
def test_equals_torch(name: str, world_size: int) -> None:
    CASES.check(name, world_size)
