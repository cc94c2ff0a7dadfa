"""The random number generators of this process as a state that a checkpoint can hold."""

from __future__ import annotations

import random
import sys

import torch

from lockstep.checkpoint.state import State
from lockstep.errors import CheckpointMismatch


def rng_state() -> State:
    """The position of Python's, NumPy's (where it is loaded) and torch's generators, on the CPU and the current GPU.

    Each rank, or virtual shard, has its own: `checkpointer.save(step, state, shards={comm.rank: rng_state()})`.
    """
    version, words, gauss = random.getstate()
    state: State = {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = {
            "name": name,
            "keys": keys.tolist(),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached_gauss": float(cached),
        }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: State) -> None:
    """Go on where `rng_state` was called. Raises: CheckpointMismatch where a generator is missing here."""
    if "cuda" in state and not torch.cuda.is_available():
        raise CheckpointMismatch("the state holds the random numbers of a GPU, and this process sees none")
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy as np

        saved = state["numpy"]
        keys = np.array(saved["keys"], dtype=np.uint32)
        np.random.set_state((saved["name"], keys, saved["position"], saved["has_gauss"], saved["cached_gauss"]))
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
