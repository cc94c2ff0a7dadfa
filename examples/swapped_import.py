"""A training script as torch's documentation writes it. Two imports are lockstep's; nothing else was changed.

torchrun --nproc-per-node=2 examples/swapped_import.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import DistributedDataParallel, DistributedSampler


def main() -> None:
    """Fit a plane: y = x . (1, 2, ..., 8)."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # every rank starts elsewhere; rank 0's weights count
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1000, 8, generator=generator)
    targets = inputs @ torch.arange(1.0, 9.0)
    dataset = TensorDataset(inputs, targets)
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=50, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x).squeeze(1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.5f}\n", end="")
    weights = [round(weight, 3) for weight in model.module.weight[0].tolist()]
    # torchrun runs Python unbuffered: without `end` another rank's text may come between a line and its end
    print(f"rank {dist.get_rank()}: {weights}\n", end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
