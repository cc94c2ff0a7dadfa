"""A layer of the model is never used."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.forgotten = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


ddp = torch.nn.parallel.DistributedDataParallel(Model())
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for _ in range(3):
    ddp(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
