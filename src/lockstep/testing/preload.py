"""What the fork server imports once, so that every rank process starts with it."""

import os

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read by torch's import: Gloo warns of each closed socket

import lockstep.comm.communicator
import lockstep.comm.torch_transport
import lockstep.testing.worker  # noqa: F401
