"""What every transport must refuse: ConfigError on the rank that asked for it, before anything is sent."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch

from lockstep.comm.communicator import Communicator
from lockstep.errors import ConfigError


def wrong_arguments(comm: Communicator) -> None:
    W, rank = comm.world_size, comm.rank
    one, wrong = torch.ones(1), [torch.ones(1)] * (W + 1)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: comm.broadcast(one, W), f"src={W}: 'world' has ranks 0 to {W - 1}"),
        (lambda: comm.reduce(one, -1), "dst=-1"),
        (lambda: comm.send(one, rank), "rank itself"),
        (lambda: comm.recv(one, W), f"src={W}"),
        (lambda: comm.send(one, (rank + 1) % W, tag=-1), "tag=-1" if W > 1 else "rank itself"),
        (lambda: comm.all_reduce(one, "average"), "choose one of sum, mean"),  # type: ignore[arg-type]
        (lambda: comm.all_reduce(torch.ones(1, dtype=torch.int64), "mean"), "sum and divide"),
        (lambda: comm.all_reduce(torch.ones(1, dtype=torch.complex64), "max"), "no meaning"),
        (lambda: comm.all_reduce(torch.ones(2).to_sparse()), "layout"),
        (lambda: comm.all_gather(wrong, one), "one per rank"),
        (lambda: comm.all_gather([torch.ones(2)] * W, one), "has 2 elements"),
        (lambda: comm.all_gather([torch.ones(1, dtype=torch.int64)] * W, one), "one dtype"),
        (lambda: comm.all_gather_into_tensor(torch.ones(W + 1), one), "use the list form"),
        (lambda: comm.reduce_scatter(one, wrong), "one per rank"),
        (lambda: comm.reduce_scatter(torch.ones(2), [one] * W), "output has 2 elements"),
        (lambda: comm.reduce_scatter_tensor(one, torch.ones(W, dtype=torch.float64)), "dtypes differ"),
        (lambda: comm.all_to_all([one] * W, wrong), "one per rank"),
        (lambda: comm.all_to_all([torch.ones(2)] * W, [one] * W), rf"its output_list\[{rank}\] has 2 elements"),
        (lambda: comm.recv_op(torch.ones(2, dtype=torch.complex64).conj(), (rank + 1) % W), "not conjugated"),
        (lambda: comm.empty(-1), "empty of -1 elements"),
        (lambda: comm.shared(-1), "shared of -1 elements"),
        (lambda: comm.gather(one, None if rank == 0 else [one] * W), "rank 0"),
        (lambda: comm.scatter(one, [torch.ones(2)] * W if rank == 0 else [one] * W), "rank 0"),
        (lambda: comm.batch_send_recv([]), "at least one"),
    ]
    for call, words in calls:
        with pytest.raises(ConfigError, match=words):
            call()


def arguments_of_other_types(comm: Communicator) -> None:
    """What is no rank, no tag, no number and no tensor is refused on the rank that gives it, and keeps none waiting."""
    W, rank = comm.world_size, comm.rank
    one, meta, word, half = torch.ones(1), torch.ones(1, device="meta"), cast(Any, "0"), cast(Any, 0.5)
    none, numbers, after = cast(Any, None), cast(Any, [1.0] * W), (rank + 1) % W
    no_tensor = "only tensors are sent and filled, not "
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: comm.broadcast(one, none), f"src=None: 'world' has ranks 0 to {W - 1}"),
        (lambda: comm.reduce(one, half), "dst=0.5: "),
        (lambda: comm.gather(one, None, none), "dst=None: "),
        (lambda: comm.scatter(one, None, word), "src='0': "),
        (lambda: comm.broadcast_object(1, none), "src=None: "),
        (lambda: comm.gather_object(1, torch.tensor([0.0, 1.0])), "dst=tensor"),  # type: ignore[arg-type]
        (lambda: comm.send(one, none), "dst=None: "),
        (lambda: comm.recv(one, word), "src='0': "),
        (lambda: comm.send(one, after, none), "tag=None: a tag is an int" if W > 1 else "rank itself"),
        (lambda: comm.irecv(one, None, half), "tag=0.5: a tag is an int" if W > 1 else "has one rank"),
        (lambda: comm.all_reduce(numbers), f"{no_tensor}list"),
        (lambda: comm.all_reduce(numbers, "max"), f"{no_tensor}list"),
        (lambda: comm.all_gather(numbers, one), f"{no_tensor}float"),
        (lambda: comm.all_gather_into_tensor(torch.ones(W), half), f"{no_tensor}float"),
        (lambda: comm.all_to_all([one] * W, numbers), f"{no_tensor}float"),
        (lambda: comm.recv_op(numbers, after), f"{no_tensor}list"),
        (lambda: comm.batch_send_recv(numbers), "what send_op and recv_op return, not 1.0"),
        (lambda: comm.all_reduce(meta), "on the meta device has no values"),
        (lambda: comm.recv(meta, after), "on the meta device has no values" if W > 1 else "rank itself"),
        (lambda: comm.empty(half), "empty of 0.5 elements"),
        (lambda: comm.shared(word), "shared of '0' elements"),
    ]
    for call, words in calls:
        with pytest.raises(ConfigError, match=re.escape(words)):
            call()
    last = torch.full((2,), float(rank))
    for source in (np.int64(W - 1), torch.tensor(W - 1)):  # whole numbers of any type are ranks
        comm.broadcast(last.fill_(rank), cast(Any, source))
        assert last.tolist() == [W - 1.0] * 2
