"""Which device this rank computes on, and with how many CPU threads."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import torch

from lockstep.comm.control_groups import core_quota
from lockstep.comm.handshake import Record
from lockstep.comm.place import Place


def choose_device(
    wanted: torch.device | str | None, backend: str | None, place: Place, problems: list[str]
) -> torch.device:
    """The kind of device, with an index only where the user gave one; touches no GPU. Adds to `problems`."""
    try:
        device = None if wanted is None else torch.device(wanted)
    except RuntimeError as error:
        problems.append(f"device={wanted!r}: {str(error).splitlines()[0]}")
        device = None
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() and backend != "gloo" else "cpu")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        one_each = count == 1 and "," not in os.environ.get("CUDA_VISIBLE_DEVICES", ",")
        if count == 0 or (device.index or 0) >= count:
            problems.append(f"device={str(device)!r}: torch sees {count} GPU(s) on {socket.gethostname()}")
        elif device.index is None and count < place.local_world_size and not one_each:
            short = f"{socket.gethostname()} has {count} GPU(s) for {place.local_world_size} ranks"
            problems.append(f"{short}: start fewer, or device='cpu'")
    elif "nccl" in (backend or "") and "gloo" not in (backend or ""):
        problems.append(f"backend={backend!r} moves GPU tensors only: use backend='gloo' for device {str(device)!r}")
    return device


def use_gpu(device: torch.device, local_rank: int) -> torch.device:
    """Make this rank's GPU the current one, before anything else touches a GPU."""
    if device.type != "cuda":
        return device
    if device.index is None:  # where a launcher shows each rank only its own, that is number 0
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def set_threads(threads: int | None, mine: Record, records: Sequence[Record]) -> None:
    """Give torch `threads`, or this rank's share of the machine's cores where the user has not set OMP_NUM_THREADS.

    A 1 under torchrun counts as not set: torchrun puts it there itself, whatever the machine has.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if threads is not None:
        torch.set_num_threads(threads)
    elif not asked or (asked == "1" and "TORCHELASTIC_RUN_ID" in os.environ):
        neighbours = [int(record["cores"], 16) for record in records if record["machine"] == mine["machine"]]
        torch.set_num_threads(fair_threads(int(mine["cores"], 16), neighbours, core_quota()))


def fair_threads(mask: int, neighbours: Sequence[int], quota: float) -> int:
    """Threads for one rank so that the ranks of its machine together have one per core; at least 1.

    mask: this rank's cores. neighbours: the masks of all ranks of the machine, this one's too. A core that n ranks may
    use counts 1/n, so ranks that share all cores and ranks pinned to their own both come out right.
    """
    share = 0.0
    for core in range(mask.bit_length()):
        if mask >> core & 1:
            share += 1 / max(1, sum(other >> core & 1 for other in neighbours))
    return max(1, int(min(share, quota / max(1, len(neighbours))) + 1e-9))
