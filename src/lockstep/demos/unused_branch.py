"""Rank 1 alone does not use a branch of the model."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) if rank == 1 else self.b(self.a(x))


ddp = torch.nn.parallel.DistributedDataParallel(Model())
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for _ in range(40):
    ddp(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
