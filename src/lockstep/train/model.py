"""Config -> a Hugging Face model, still without values."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

from lockstep.data.tokenizer import Tokenizer
from lockstep.train.config import ModelConfig

_SHORT = 8192  # Llama 3 learns to write in this context; a longer one stretches the slow turns of its positions
_STRETCHED = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def build_model(config: ModelConfig, tokenizer: Tokenizer) -> nn.Module:
    """The model on the meta device, in training mode. No rank has it whole before it is cut: `materialize` fills it.

    Shapes: of `input_ids` [B, T] int64, T <= context, it makes an output with `logits` [B, T, V].
    Memory: none; weights will be fp32.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, shape = ("gpt2", _gpt2(config)) if config.family == "gpt2" else ("llama", _llama32(config))
    end = tokenizer.end_of_text
    of_text = {"vocab_size": tokenizer.vocab_size, "bos_token_id": end, "eos_token_id": end}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape, **of_text, use_cache=False))
    model.config.architectures = [type(model).__name__]
    return model.train()


def config_text(model: Any) -> str:
    """The config.json from which transformers builds `model` again, for those who let it write."""
    return json.dumps({**model.config.to_diff_dict(), "use_cache": True}, indent=2) + "\n"


def _gpt2(config: ModelConfig) -> dict[str, Any]:
    dropped = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout)
    size = {"n_positions": config.context, "n_embd": config.width, "n_inner": config.mlp_width}
    return {**size, "n_layer": config.layers, "n_head": config.heads, **dropped}


def _llama32(config: ModelConfig) -> dict[str, Any]:
    """Source: Llama 3.2's own config.json; Grattafiori et al. 2024 (arXiv 2407.21783), section 3.2 and table 3."""
    stretched = {"rope_type": "llama3", "original_max_position_embeddings": _SHORT, **_STRETCHED}
    turns = stretched if config.context > _SHORT else {"rope_type": "default"}
    return {
        "max_position_embeddings": config.context,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width or 4 * config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "attention_dropout": config.dropout,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 500_000.0, **turns},
    }
