"""A transformer that no rank holds whole: cut over the ranks as the first word says, trained, saved for one process.

torchrun --nproc-per-node=2 examples/sharded.py full      (or none, optimizer, gradients, hybrid)
python examples/sharded.py                                the same on one rank
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

import lockstep


class Counter(nn.Module):
    """Sees the beginning of a sequence of numbers below 64, and says how it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(32, 2, 128, 0.0, batch_first=True) for _ in range(3))
        self.head = nn.Linear(32, 64)

    def forward(self, numbers: Tensor) -> Tensor:
        """[B, T] int64 -> [B, T, 64]."""
        x = self.embed(numbers)
        mask = nn.Transformer.generate_square_subsequent_mask(numbers.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return self.head(x)


def counts(step: int) -> Tensor:
    """64 sequences [64, 16]: somewhere they begin, and each number is the one before plus 1, 2 or 3."""
    first, by = torch.randint(64, (2, 64, 1), generator=torch.Generator().manual_seed(step))
    return (first + (by % 3 + 1) * torch.arange(16)) % 64


def main(sharding: Any = "full") -> None:
    """Train it on all ranks."""
    with lockstep.init(verbose=False) as comm:
        with torch.device("meta"):
            model: nn.Module = Counter()  # takes no memory: each rank fills its own pieces
        model = lockstep.parallelize(model, sharding, mesh=comm, fill=lockstep.materialize)
        optimizer = lockstep.optimizer_for(model, torch.optim.AdamW, lr=3e-3)
        for step in range(61):
            mine = counts(step)[comm.rank :: comm.world_size]
            logits = model(mine[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
            loss.backward()
            lockstep.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            comm.all_reduce(mean := loss.detach() / comm.world_size)
            if step % 20 == 0 and comm.rank == 0:
                print(f"step {step}: loss {mean:.4f}\n", end="")
        whole = lockstep.whole_state_dict(model)  # on rank 0, as one process would save it
        if comm.rank == 0:
            alone = Counter()
            alone.load_state_dict(whole)
            print(f"40, 43, 46, 49 -> {alone(torch.tensor([[40, 43, 46, 49]]))[0, -1].argmax()}\n", end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
