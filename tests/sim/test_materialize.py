"""Models built on the meta device: the same numbers for every way of cutting, little memory, no garbage."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lockstep.comm.communicator import Communicator
from lockstep.errors import ConfigError
from lockstep.parallel.fully_shard import fully_shard
from lockstep.parallel.materialize import materialize
from lockstep.testing.worlds import run_threads
from sharded_tensors import Alive, cut_model, expected_part, local_parts, mesh_of

MESHES = ((1,), (2,), (3,), (2, 2))


def gpt2() -> nn.Module:
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=61, n_positions=16, n_embd=32, n_layer=2, n_head=2, **tokens))


def llama() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, num_hidden_layers=2, **sizes))


class Torch(nn.Module):
    """Modules of torch whose initialisers reach into their children, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.TransformerDecoderLayer(16, 2, 20)
        self.attention = nn.MultiheadAttention(16, 2)
        self.norm = nn.BatchNorm1d(5)
        self.embedding = nn.Embedding(7, 16, padding_idx=3)
        self.scalars = nn.PReLU()
        self.half = nn.Linear(3, 5, dtype=torch.bfloat16)
        self.frozen = nn.Linear(5, 3).requires_grad_(False)


MODELS: tuple[Callable[[], nn.Module], ...] = (gpt2, llama, Torch)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def same(ours: Tensor, theirs: Tensor) -> bool:
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)


# ------------------------------------------------------------------ values


def materialize_cut(comm: Communicator, make: Callable[[], nn.Module], shape: tuple[int, ...], dim: int) -> None:
    whole = materialize(on_meta(make), seed=5)
    mesh = mesh_of(shape, comm.rank)
    model = cut_model(on_meta(make), mesh, dim)
    before = {name: (id(p), p.requires_grad) for name, p in model.named_parameters(remove_duplicate=False)}
    materialize(model, seed=5)
    params = dict(model.named_parameters(remove_duplicate=False))
    assert {name: (id(p), p.requires_grad) for name, p in params.items()} == before
    wholes = dict(whole.named_parameters(remove_duplicate=False))
    for name, local in local_parts(params).items():
        assert same(local, expected_part(wholes[name], mesh, dim)), name
    for (name, ours), (_, theirs) in zip(model.named_buffers(), whole.named_buffers(), strict=True):
        assert same(ours, theirs), name


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
@pytest.mark.parametrize(("shape", "dim"), [*((shape, 0) for shape in MESHES), ((3,), 1)], ids=str)
def test_same_numbers_for_every_world_size(make: Callable[[], nn.Module], shape: tuple[int, ...], dim: int) -> None:
    run_threads(math.prod(shape), materialize_cut, make, shape, dim)


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_values_are_distributed_as_those_of_a_model_built_at_once(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    expected, model = make(), materialize(on_meta(make))
    found = dict(model.named_parameters(remove_duplicate=False))
    for name, param in expected.named_parameters(remove_duplicate=False):
        if param.numel() < 50:  # says nothing
            continue
        std = param.float().std(correction=0).item()
        assert found[name].float().std(correction=0).item() == pytest.approx(std, rel=0.3), name
        assert found[name].float().mean().item() == pytest.approx(param.float().mean().item(), abs=0.6 * std + 1e-9)
    buffers = dict(model.named_buffers())
    for name, buffer in expected.named_buffers():
        assert same(buffers[name], buffer), name


def test_initialisers_reach_into_modules_below() -> None:
    model = materialize(on_meta(gpt2))
    attention = model.get_submodule("transformer.h.1.attn")
    plain, scaled = (attention.get_parameter(f"{name}.weight").std().item() for name in ("c_attn", "c_proj"))
    assert scaled == pytest.approx(plain / math.sqrt(2 * 2), rel=0.15)
    assert not materialize(on_meta(Torch)).get_parameter("attention.out_proj.bias").any()
    assert not materialize(on_meta(Torch)).get_parameter("embedding.weight")[3].any()


def test_numbers_are_keyed_by_seed_and_name_and_the_generator_is_left_alone() -> None:
    def twins() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    before = torch.get_rng_state()
    first, again, other = (materialize(on_meta(twins), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    for name, param in first.named_parameters():
        assert torch.equal(param, again.get_parameter(name))
        assert not torch.equal(param, other.get_parameter(name))
    assert not torch.equal(first.get_parameter("0.weight"), first.get_parameter("1.weight"))


def test_wrapping_a_module_changes_no_number() -> None:
    def blocks() -> list[nn.Module]:
        return [nn.Linear(4, 4), nn.Linear(4, 4)]

    plain = materialize(on_meta(lambda: nn.Sequential(*blocks())))
    wrapped = materialize(on_meta(lambda: nn.Sequential(*map(checkpoint_wrapper, blocks()))))
    for ours, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


class Adapted(nn.Module):
    """A low-rank adapter beside a layer."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = nn.Linear(layer.in_features, 2, bias=False), nn.Linear(2, layer.out_features, bias=False)
        self.scale = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.up.weight)
        nn.init.ones_(self.scale)


def test_adapters_inside_a_hugging_face_model_begin_at_zero() -> None:
    def adapted() -> nn.Module:
        model = llama()
        for block in model.get_submodule("model.layers").children():
            block.mlp.up_proj = Adapted(block.mlp.up_proj)
        return model

    model = materialize(on_meta(adapted))
    adapter = model.get_submodule("model.layers.1.mlp.up_proj")
    assert not adapter.get_parameter("up.weight").any()
    assert adapter.get_parameter("down.weight").std().item() == pytest.approx(0.02, rel=0.5)
    assert adapter.get_parameter("scale").item() == 1.0
    assert not adapter.get_parameter("layer.weight").requires_grad


# ------------------------------------------------------------------ what is kept


def test_ties_stay_and_what_has_values_keeps_them() -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False))
        model[2].weight = model[0].weight
        return model

    model = on_meta(tied)
    kept = nn.Parameter(torch.full((4, 4), 7.0))
    model.get_submodule("1").register_parameter("weight", kept)
    materialize(model)
    assert model.get_parameter("0.weight") is model.get_parameter("2.weight")
    assert model.get_parameter("1.weight") is kept
    assert torch.equal(kept, torch.full((4, 4), 7.0))
    assert model.get_parameter("1.bias").any()


def test_init_runs_after_the_modules_own_initialisers() -> None:
    seen: list[nn.Module] = []

    def init(module: nn.Module) -> None:
        seen.append(module)
        if isinstance(module, nn.Embedding):
            module.weight.data[0].zero_()  # the other rows stay as they are
        if isinstance(module, nn.Linear):
            module.weight.data = torch.full_like(module.weight, 3.0)
            module.bias = nn.Parameter(torch.ones(2))

    def small() -> nn.Module:
        return nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2))

    model, plain = materialize(on_meta(small), init), materialize(on_meta(small))
    assert not model.get_parameter("0.weight")[0].any()
    assert torch.equal(model.get_parameter("0.weight")[1:], plain.get_parameter("0.weight")[1:])
    assert torch.equal(model.get_parameter("1.weight"), torch.full((2, 2), 3.0))
    assert torch.equal(model.get_parameter("1.bias"), torch.ones(2))
    assert set(seen) == set(model.modules())


def test_an_initialiser_that_reads_values_and_one_at_the_root() -> None:
    class Norm(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.built = True

        def reset_parameters(self) -> None:
            super().reset_parameters()
            if hasattr(self, "built"):
                self.weight.div_(self.weight.norm().item())

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(Norm(), nn.Linear(3, 3))

        def reset_parameters(self) -> None:
            for name, param in self.named_parameters():
                if name.endswith("bias"):
                    nn.init.constant_(param, 4.0)

    model = materialize(on_meta(Root))
    assert model.get_parameter("inner.0.weight").norm().item() == pytest.approx(1.0)
    assert model.get_parameter("inner.1.bias").tolist() == model.get_parameter("inner.0.bias").tolist() == [4.0] * 3


@pytest.mark.parametrize("make", [llama, Torch], ids=lambda make: make.__name__)
def test_without_parameters_only_buffers_get_values(make: Callable[[], nn.Module]) -> None:
    model = materialize(on_meta(make), parameters=False)
    expected = make()
    for name, buffer in expected.named_buffers():
        assert same(model.get_buffer(name), buffer), name
    assert all(param.isnan().all() for param in model.parameters())


# ------------------------------------------------------------------ refusals


class Masked(nn.Module):
    def __init__(self, persistent: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mask", torch.ones(2, 2).tril(), persistent=persistent)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.scale = nn.Parameter(torch.ones(2))


class Lost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.angles = torch.arange(3)


class Forgetful(nn.Linear):
    """Needs a value, so that what it writes is not known before it has run."""

    def reset_parameters(self) -> None:
        if hasattr(self, "built"):
            self.weight.fill_(1.0).sum().item()
        self.built = True


class Reshaped(nn.Linear):
    def reset_parameters(self) -> None:
        self.weight = nn.Parameter(torch.ones(self.weight.numel() + 1))
        nn.init.zeros_(self.bias)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Forgetful(2, 2), "initialises bias"),
        (Bare, r"inner\.scale"),
        (Masked, "mask"),
        (Lost, "angles"),
        (lambda: Reshaped(2, 2), r"weight.*\(6,\).*\(5,\)"),
    ],
)
def test_what_nothing_initialises_is_named(make: Callable[[], nn.Module], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        materialize(on_meta(make))


def test_a_refusal_allocates_nothing_and_a_buffer_made_elsewhere_is_fine() -> None:
    model = on_meta(Masked)
    with pytest.raises(ConfigError, match="mask"):
        materialize(model)
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    with pytest.raises(ConfigError, match="mask"):
        materialize(model, parameters=False)
    materialize(on_meta(lambda: Masked(persistent=True)), parameters=False)  # a file may hold it
    model.register_buffer("mask", torch.ones(2, 2).tril())
    assert torch.equal(materialize(model).get_buffer("mask"), torch.ones(2, 2).tril())


def test_not_inside_the_block_that_builds_on_meta() -> None:
    model = on_meta(gpt2)
    with torch.device("meta"), pytest.raises(ConfigError, match="after the block"):
        materialize(model)


# ------------------------------------------------------------------ memory


def cut_by_hand(comm: Communicator, make: Callable[[], nn.Module]) -> nn.Module:
    return cut_model(on_meta(make), mesh_of((comm.world_size,), comm.rank))


def cut_by_fully_shard(comm: Communicator, make: Callable[[], nn.Module]) -> nn.Module:
    model = on_meta(make)
    for name, module in model.named_modules():
        if name.endswith((".h.0", ".h.1", ".layers.0", ".layers.1")):
            fully_shard(module, mesh=comm)
    return fully_shard(model, mesh=comm)


def count_memory(comm: Communicator, make: Callable[[], nn.Module], cut: Callable[..., nn.Module]) -> None:
    model = cut(comm, make)
    bytes_of = {
        name: sum(tensor.nbytes for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
        for name, module in on_meta(make).named_modules()
    }
    with Alive() as alive:
        materialize(model)
    shards = sum(t.nbytes for t in local_parts(dict(model.named_parameters())).values())
    shards += sum(buffer.nbytes for buffer in model.buffers())
    largest = max(bytes_of.values())
    scratch = 4096  # the angles of a rotary embedding, and numbers on their way
    assert shards + largest <= alive.most + scratch, "the count is blind"
    assert alive.most <= shards + largest + scratch
    assert shards + largest + scratch < sum(bytes_of.values())


@pytest.mark.parametrize("cut", [cut_by_hand, cut_by_fully_shard], ids=lambda cut: cut.__name__)
@pytest.mark.parametrize("make", [gpt2, llama], ids=lambda make: make.__name__)
def test_no_more_than_one_module_is_whole_at_a_time(
    make: Callable[[], nn.Module], cut: Callable[..., nn.Module]
) -> None:
    run_threads(4, count_memory, make, cut)
