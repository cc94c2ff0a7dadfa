"""What the fork server imports once, so that every rank process starts with it."""

import gc
import os

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read by torch's import: Gloo warns of each closed socket

import torch._dynamo  # noqa: F401 - an optimizer imports it when it is first used, and FSDP2 with it

import lockstep.comm.communicator
import lockstep.comm.torch_transport
import lockstep.testing.worker

lockstep.comm.torch_transport.import_optimizers()
gc.collect()
gc.freeze()  # what the ranks share: their collectors shall neither look through it nor write to it
