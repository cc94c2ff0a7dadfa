"""Stock torch DDP over Gloo: drift, bad gradients and shared paths are told from what each rank says of itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from lockstep.comm.communicator import Communicator
from lockstep.observe.gradients import nonfinite_gradients
from lockstep.observe.model_match import describe_model, first_difference
from lockstep.observe.replica import replica_entries
from lockstep.observe.replica_diff import Entry, agree, differences, drift_in_words, fold
from lockstep.testing.worlds import run_processes


def net(order: str) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in order})
    layers["norm"] = nn.BatchNorm1d(4)
    return layers


class Whole(nn.Module):
    def __init__(self, order: str) -> None:
        super().__init__()
        self.layers = net(order)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers: Any = self.layers
        return layers["norm"](layers["a"](x) + layers["b"](x)).pow(3).mean()


def train(comm: Communicator) -> tuple[list[list[Entry]], list[list[Any]], list[str]]:
    """Entries of this rank after each step, its description of another model, its faulty gradients."""
    ddp = TorchDDP(Whole("ab"))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    said = []
    for step in range(3):
        optimizer.zero_grad()
        model: Any = ddp.module if step == 2 else ddp  # row 20: past the wrapper
        model(torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + comm.rank))).backward()
        optimizer.step()
        said.append([entry for entry in replica_entries(ddp, optimizer) if "running" not in entry.what])
    parameter = ddp.module.get_parameter("layers.a.bias")
    assert parameter.grad is not None
    parameter.grad[comm.rank] = float("nan")
    faults = [str(fault) for fault in nonfinite_gradients((n, p.grad) for n, p in ddp.module.named_parameters())]
    return said, describe_model(Whole("ab" if comm.rank == 0 else "ba")), faults


def test_what_two_ranks_say_of_themselves() -> None:
    results = run_processes(2, train)
    for step in range(2):
        by_rank = {rank: said[step] for rank, (said, _, _) in enumerate(results)}
        assert agree(fold(entries) for entries in by_rank.values())
        assert differences(by_rank) == []
    by_rank = {rank: said[2] for rank, (said, _, _) in enumerate(results)}
    assert not agree(fold(entries) for entries in by_rank.values())
    text = drift_in_words(differences(by_rank), 3, 2)
    assert "parameter 'layers.a.weight'" in text
    assert "call the wrapped model and not its .module" in text
    mismatch = first_difference(results[1][1], results[0][1])
    assert mismatch is not None
    assert "has parameter 'layers.b.weight' where rank 0 has parameter 'layers.a.weight'" in mismatch
    assert [faults for _, _, faults in results] == [["'layers.a.bias' (1 NaN of 4 elements)"]] * 2
