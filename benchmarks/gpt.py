"""The models of the benchmarks: GPT-2 in sizes that a CPU trains, their batches, and the groups that train them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from comm_variants import over_gloo, over_shared_memory
from lockstep.comm.communicator import Communicator
from lockstep.comm.process_group import register_backend

Shape = dict[str, int]
GPT_30M: Shape = {"n_layer": 9, "n_embd": 512, "n_head": 8, "vocab_size": 4096, "B": 1, "T": 32}
GPT_124M: Shape = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "B": 1, "T": 32}  # GPT-2 small


def model_of(shape: Shape) -> nn.Module:
    """The same weights on every rank and in every variant."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=shape["vocab_size"],
        n_positions=shape["T"],
        n_embd=shape["n_embd"],
        n_layer=shape["n_layer"],
        n_head=shape["n_head"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    config.loss_type = "ForCausalLMLoss"
    return GPT2LMHeadModel(config)


def batch_of(shape: Shape, rank: int, number: int) -> Tensor:
    """This rank's tokens [B, T] of one round, equal for all variants."""
    generator = torch.Generator().manual_seed(number * 1000 + rank + 1_000_000)
    return torch.randint(shape["vocab_size"], (shape["B"], shape["T"]), generator=generator)


class Groups:
    """The same ranks as groups of several kinds, each made when a variant first asks. Collective: in equal order."""

    @cached_property
    def gloo(self) -> Communicator:
        """torch's default group."""
        return over_gloo()

    @cached_property
    def shared(self) -> Communicator:
        """Shared memory, met over Gloo."""
        return over_shared_memory(self.gloo)

    @cached_property
    def backend(self) -> Any:
        """A torch group of the backend "lockstep"."""
        register_backend()
        return dist.new_group(backend="lockstep")
