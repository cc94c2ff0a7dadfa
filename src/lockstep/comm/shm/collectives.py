"""The collectives of one group of ranks on shared memory: which of them is done by whom, and what a failure means."""

from __future__ import annotations

from typing import final

import torch

from lockstep.comm.op import CommOp
from lockstep.comm.shm.moving import Moving
from lockstep.comm.shm.reducing import Reducing
from lockstep.comm.shm.staging import Staging
from lockstep.errors import CollectiveMismatch


@final
class Collectives:
    """Carries out the collectives of one rank of one group, one at a time."""

    def __init__(self, staging: Staging) -> None:
        self._control = staging.control
        reducing, moving = Reducing(staging), Moving(staging)
        self._run = {
            "broadcast": moving.broadcast,
            "reduce": reducing.reduce,
            "all_reduce": reducing.all_reduce,
            "gather": moving.gather,
            "all_gather": moving.all_gather,
            "scatter": moving.scatter,
            "reduce_scatter": reducing.reduce_scatter,
            "all_to_all": moving.all_to_all,
            "barrier": moving.barrier,
        }

    def execute(self, op: CommOp) -> None:
        """Do what `op` says; blocks.  Raises: CommError."""
        run = self._run[op.kind]
        try:
            if op.outputs and op.outputs[0].is_inference():  # only inference mode may write to its tensors
                with torch.inference_mode():
                    run(op)
            else:
                run(op)
        except CollectiveMismatch:  # raised where all ranks are in step: the group goes on
            raise
        except BaseException as error:
            self._control.fail(error, op)
            raise
