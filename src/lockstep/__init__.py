"""lockstep: many PyTorch processes that behave like one training system.

Public names are resolved on first use, so `import lockstep` and `lockstep --help` do not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.comm.communicator import Communicator
    from lockstep.comm.init import init
    from lockstep.comm.mesh import Mesh
    from lockstep.comm.process_group import register_backend
    from lockstep.data.sampler import DistributedSampler
    from lockstep.parallel.ddp import DistributedDataParallel
    from lockstep.parallel.naive import average_gradients

__version__ = "0.1.0"

_HOME = {
    "Communicator": "lockstep.comm.communicator",
    "DistributedDataParallel": "lockstep.parallel.ddp",
    "DistributedSampler": "lockstep.data.sampler",
    "Mesh": "lockstep.comm.mesh",
    "average_gradients": "lockstep.parallel.naive",
    "init": "lockstep.comm.init",
    "register_backend": "lockstep.comm.process_group",
}

__all__ = [
    "Communicator",
    "DistributedDataParallel",
    "DistributedSampler",
    "Mesh",
    "average_gradients",
    "init",
    "register_backend",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(home), name)
    except AttributeError as error:  # Python would take it for "no such name" and hide what is wrong inside
        raise ImportError(f"{home} cannot be loaded: {error}") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
