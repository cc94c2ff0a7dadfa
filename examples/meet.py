"""Four processes that share no memory agree on one number. Then one of them stays away.

python examples/meet.py
"""

from __future__ import annotations

import torch

import lockstep
from lockstep.testing.failures import RankFailed
from lockstep.testing.worlds import run_processes, run_threads


def meet(comm: lockstep.Communicator) -> tuple[int, int]:
    """Rank r brings 10**r: in the sum, every digit tells whether its rank was there."""
    tensor = torch.tensor([10**comm.rank])
    brought = int(tensor.item())
    comm.all_reduce(tensor)
    return brought, int(tensor.item())


def stay_away(comm: lockstep.Communicator) -> None:
    """The same, but rank 2 goes home."""
    if comm.rank != 2:
        comm.all_reduce(torch.tensor([10**comm.rank]), label="the meeting")


def main() -> None:
    """Show both."""
    for rank, (brought, agreed) in enumerate(run_processes(4, meet)):
        print(f"rank {rank} brought {brought:4d} and holds {agreed}")
    try:
        run_threads(4, stay_away, timeout_s=2)
    except RankFailed as failure:
        print(f"rank 0 waited: {failure.errors[0].message}")


if __name__ == "__main__":
    main()
