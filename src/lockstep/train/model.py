"""Config -> a Hugging Face model, still without values."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.data.tokenizer import Tokenizer
from lockstep.train.config import ModelConfig


def build_model(config: ModelConfig, tokenizer: Tokenizer) -> nn.Module:
    """The model on the meta device, in training mode. No rank has it whole before it is cut: `materialize` fills it.

    Shapes: of `input_ids` [B, T] int64, T <= context, it makes an output with `logits` [B, T, V].
    Memory: none; weights will be fp32.
    """
    from transformers.models.gpt2.configuration_gpt2 import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=tokenizer.vocab_size,
                n_positions=config.context,
                n_embd=config.width,
                n_layer=config.layers,
                n_head=config.heads,
                resid_pdrop=config.dropout,
                embd_pdrop=config.dropout,
                attn_pdrop=config.dropout,
                bos_token_id=tokenizer.end_of_text,
                eos_token_id=tokenizer.end_of_text,
                use_cache=False,
            )
        )
    return model.train()
