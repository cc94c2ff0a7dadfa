"""The models of `lockstep train` are Hugging Face's own: shape, first values, what they compute."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lockstep.data.tokenizer import ByteTokenizer
from lockstep.parallel.materialize import materialize
from lockstep.recipes import gpt2, llama32
from lockstep.train.config import ModelConfig
from lockstep.train.model import build_model, config_text


def test_the_shape_of_llama_is_that_of_metas_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held against meta-llama/Llama-3.2-1B/config.json, whose context is the long one."""
    monkeypatch.setattr(ByteTokenizer, "vocab_size", 128_256)
    monkeypatch.setattr(ByteTokenizer, "end_of_text", 128_001)
    model: Any = build_model(replace(llama32.llama32_1b().model, context=131_072), ByteTokenizer())
    theirs = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        bos_token_id=128_001,  # 128_000 there: a text of ours has one token at both ends
        eos_token_id=128_001,
        head_dim=64,
        hidden_size=2048,
        intermediate_size=8192,
        max_position_embeddings=131_072,
        num_attention_heads=32,
        num_hidden_layers=16,
        num_key_value_heads=8,
        rms_norm_eps=1e-05,
        rope_parameters={
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_theta": 500_000.0,
            "rope_type": "llama3",
        },
        tie_word_embeddings=True,
        vocab_size=128_256,
    )
    written = LlamaConfig(**json.loads(config_text(model)))
    assert written.to_dict() == {**theirs.to_dict(), "transformers_version": written.transformers_version}
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_235_814_400
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_short_context_is_not_stretched(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for recipe in (llama32.tiny, llama32.llama32_1b):
        model: Any = build_model(recipe().model, ByteTokenizer())
        assert model.config.rope_parameters == {"rope_theta": 500_000.0, "rope_type": "default"}
    assert not caplog.records


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (ModelConfig(layers=2, heads=3, width=24, mlp_width=40, context=11), GPT2LMHeadModel),
        (ModelConfig("llama32", layers=3, heads=6, kv_heads=2, width=24, mlp_width=40, context=11), LlamaForCausalLM),
        (ModelConfig("llama32", layers=1, heads=2, width=12, context=9000), LlamaForCausalLM),
    ],
)
def test_logits_and_gradients_are_those_of_the_model_built_by_transformers(
    config: ModelConfig, kind: type[Any]
) -> None:
    built: Any = materialize(build_model(config, ByteTokenizer()), seed=3)
    theirs = kind(built.config)
    assert type(built) is kind
    theirs.load_state_dict(built.state_dict())
    tokens = torch.randint(257, (3, 11), generator=torch.Generator().manual_seed(0))

    def of(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
        logits = model(input_ids=tokens).logits
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        return logits.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}

    (logits, gradients), (their_logits, their_gradients) = of(built), of(theirs.train())
    assert torch.equal(logits, their_logits)
    assert gradients.keys() == their_gradients.keys()
    for name, gradient in gradients.items():
        expected = their_gradients[name]
        assert gradient is not None
        assert expected is not None
        assert torch.equal(gradient, expected), name
        assert gradient.any(), name


@pytest.mark.parametrize("recipe", [gpt2.tiny, llama32.tiny])
def test_dropout_reaches_the_model(recipe: Any) -> None:
    model = materialize(build_model(replace(recipe().model, dropout=0.5), ByteTokenizer()), seed=1)
    tokens = torch.arange(12).view(1, 12)
    assert not torch.equal(model(input_ids=tokens).logits, model(input_ids=tokens).logits)
    model.eval()
    assert torch.equal(model(input_ids=tokens).logits, model(input_ids=tokens).logits)
