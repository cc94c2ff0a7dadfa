"""Units chosen by a policy: the same as torch's FSDP1 would wrap, in the same order, for the same policies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import wrap
from torch.nn import Module

from lockstep.errors import ConfigError
from lockstep.parallel.wrap_policies import unit_overrides


def gpt2(tied: bool = False) -> Module:
    from transformers.models.gpt2.configuration_gpt2 import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

    config = GPT2Config(
        n_embd=8, n_layer=2, n_head=2, vocab_size=40, n_positions=16, bos_token_id=0, eos_token_id=0,
        tie_word_embeddings=tied,
    )  # fmt: skip
    with torch.device("meta"):
        return GPT2LMHeadModel(config)


def llama() -> Module:
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=40, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def handmade() -> Module:
    """Containers of all kinds, a module that is a forced leaf, parameters beside children, modules without any."""
    tower = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Sequential(nn.Linear(20, 4), nn.LayerNorm(4)))
    tower.register_parameter("scale", nn.Parameter(torch.ones(7)))
    return nn.ModuleDict(
        {
            "tower": tower,
            "list": nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Bilinear(2, 3, 4)]),
            "attention": nn.Sequential(nn.MultiheadAttention(8, 2), nn.Dropout()),
            "encoder": nn.TransformerEncoderLayer(8, 2, 16),
            "rest": nn.ParameterList([nn.Parameter(torch.ones(5))]),
        }
    )


MODELS = [gpt2, llama, handmade]


def torch_units(root: Module, policy: Any, ignored: set[Module]) -> list[Module]:
    """What FSDP1 would wrap, bottom up: its own functions, with a wrapper that only takes notes."""
    wrapped: list[Module] = []

    def note(module: Module, **_: Any) -> Module:
        wrapped.append(module)
        return module

    if isinstance(policy, wrap._Policy):
        targets = policy._run_policy(root, ignored, {})
        wrap._post_order_apply(root, wrap._construct_wrap_fn(root, targets, note))
    else:
        params = {param for module in ignored for param in module.parameters()}
        wrap._recursive_wrap(root, policy, note, ignored, params, only_wrap_children=True)
    return wrapped


def with_something_left(root: Module, chosen: list[Module], ignored: set[Module]) -> list[Module]:
    """Of modules from the bottom up those that have a parameter which no earlier one has."""
    taken = {param for module in ignored for param in module.parameters()}
    left = []
    for module in chosen:
        if any(param not in taken for param in module.parameters()):
            left.append(module)
        taken.update(module.parameters())
    return left


def units(root: Module, policy: Any, ignored: Iterable[Module] = ()) -> list[Module]:
    return list(unit_overrides(root, policy, ignored))


def names(root: Module, chosen: list[Module]) -> list[str]:
    of = {module: name for name, module in root.named_modules()}
    return [of[module] for module in chosen]


def is_block(module: Module) -> bool:
    return type(module).__name__ in ("GPT2Block", "LlamaDecoderLayer", "Sequential")


BLOCKS = {nn.Linear, nn.LayerNorm, nn.Sequential, nn.Embedding, nn.MultiheadAttention}
POLICIES: dict[str, Any] = {
    "always": wrap.always_wrap_policy,
    "classes": wrap.ModuleWrapPolicy(BLOCKS),
    "transformer": partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls=BLOCKS),
    "lambda": partial(wrap.lambda_auto_wrap_policy, lambda_fn=is_block),
    "custom": wrap.CustomPolicy(is_block),
    **{f"size {n}": partial(wrap.size_based_auto_wrap_policy, min_num_params=n) for n in (0, 20, 100, 300, 700)},
    "size, default": wrap.size_based_auto_wrap_policy,
    "size, sets": partial(
        wrap.size_based_auto_wrap_policy, min_num_params=9, force_leaf_modules={nn.Sequential},
        exclude_wrap_modules={nn.LayerNorm, nn.ModuleList},
    ),
}  # fmt: skip


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("name", POLICIES)
def test_the_units_are_those_of_torch(build: Callable[[], Module], name: str) -> None:
    root, policy = build(), POLICIES[name]
    expected = with_something_left(root, torch_units(root, policy, set()), set())
    assert names(root, units(root, policy)) == names(root, expected)


def test_the_policies_choose_different_units() -> None:
    """Else the comparison above would prove little."""
    root = gpt2()
    chosen = {tuple(names(root, units(root, policy))) for policy in POLICIES.values()}
    assert len(chosen) >= 8
    assert () in chosen


@pytest.mark.parametrize("name", ["always", "classes", "custom", "size 20", "size 300"])
def test_ignored_modules_and_their_parameters_do_not_count(name: str) -> None:
    root = handmade()
    ignored = set(root["tower"].modules())
    policy = POLICIES[name]
    expected = names(root, with_something_left(root, torch_units(root, policy, ignored), ignored))
    assert names(root, units(root, policy, ignored)) == expected
    assert names(root, units(root, policy, [root["tower"]])) == expected


def test_tied_parameters_stay_with_a_unit_that_has_all_their_users() -> None:
    policy = wrap.ModuleWrapPolicy({nn.Embedding, nn.Linear})
    loose, tied = gpt2(), gpt2(tied=True)
    apart, together = names(loose, units(loose, policy)), names(tied, units(tied, policy))
    assert {"transformer.wte", "lm_head"} < set(apart)
    assert set(apart) - set(together) == {"transformer.wte", "lm_head"}

    outer = nn.Sequential(tied, nn.Linear(2, 2))
    both_users = wrap.CustomPolicy(lambda module: isinstance(module, nn.Embedding | nn.Linear) or module is tied)
    assert outer[0] in units(outer, both_users), "it has all users of the tied parameter"


def test_a_tied_parameter_is_counted_once() -> None:
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    root = nn.Sequential(tied)
    size = partial(wrap.size_based_auto_wrap_policy, min_num_params=16)
    assert units(root, size) == [tied]
    assert units(root, partial(size, min_num_params=17)) == []


def test_a_module_in_several_places_is_one_unit() -> None:
    block = nn.Linear(3, 3)
    root = nn.Sequential(nn.Sequential(block, nn.ReLU()), nn.Sequential(block, nn.Linear(2, 2)))
    assert units(root, wrap.ModuleWrapPolicy({nn.Linear})) == [block, root[1][1]]
    asked: list[Module] = []
    units(root, wrap.CustomPolicy(lambda module: bool(asked.append(module))))
    assert asked.count(block) == 1


def test_never_the_root_and_nothing_without_a_policy() -> None:
    root = nn.Linear(2, 2)
    assert units(root, wrap.always_wrap_policy) == []
    assert units(handmade(), None) == []


def test_a_custom_policy_can_give_arguments() -> None:
    root = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Bilinear(2, 2, 2))
    answers = {root[0]: {"sharding_strategy": "other"}, root[1]: True, root[2]: {}}
    policy = wrap.CustomPolicy(lambda module: answers.get(module, False))
    assert unit_overrides(root, policy) == {root[0]: {"sharding_strategy": "other"}, root[1]: {}}


def test_any_function_of_the_three_arguments_is_a_policy() -> None:
    asked: list[tuple[str, bool, int]] = []
    root = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)))

    def policy(module: Module, recurse: bool, nonwrapped_numel: int) -> bool:
        asked.append((type(module).__name__, recurse, nonwrapped_numel))
        return recurse or nonwrapped_numel == 9

    assert units(root, policy) == [root[0][1]]
    assert asked == [
        ("Sequential", True, 15),
        ("Linear", True, 6),
        ("Linear", False, 6),
        ("Linear", True, 9),
        ("Linear", False, 9),
        ("Sequential", False, 6),
    ]


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="auto_wrap_policy=3 is no policy"):
        units(handmade(), 3)
