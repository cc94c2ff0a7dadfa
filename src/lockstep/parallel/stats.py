"""What a wrapper knows about itself: settings, sizes and times, under the names of torch's DDP logging data."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from lockstep.comm import torch_names

if TYPE_CHECKING:
    from lockstep.parallel.ddp import DistributedDataParallel

_VARIABLES = (
    "CUDA_VISIBLE_DEVICES GLOO_DEVICE_TRANSPORT GLOO_SOCKET_IFNAME MASTER_ADDR MASTER_PORT TORCH_DISTRIBUTED_DEBUG"
)
_MOMENTS = {
    "forward": "forward_compute_time_start",
    "backward": "backward_compute_time_start",
    "first bucket": "backward_comm_time_start",
    "backward ended": "backward_compute_time_end",
    "step ended": "backward_comm_time_end",
}
_SPANS = {  # the last: how much of the two before it was at the same time
    "forward_compute_time": ("forward", "backward"),
    "backward_compute_time": ("backward", "backward ended"),
    "backward_comm_time": ("first bucket", "step ended"),
    "backward_compute_comm_overlap_time": ("first bucket", "backward ended"),
}


class ReducerStats:
    """Times of the last synchronised step and their means, in nanoseconds."""

    def __init__(self) -> None:
        self.order: list[int] = []  # order in which gradients became ready, agreed between ranks
        self._at_ns = dict.fromkeys(_MOMENTS, 0)
        self._totals_ns = dict.fromkeys(_SPANS, 0)
        self._steps = self._num_unused = 0

    def mark(self, moment: str) -> None:
        """One of `_MOMENTS` is now."""
        self._at_ns[moment] = time.time_ns()

    def backward_began(self) -> None:
        """Autograd starts now; no bucket has gone out yet."""
        self.mark("backward")
        self._at_ns["first bucket"] = 0

    def step_ended(self, num_absent: int) -> None:
        """All gradients are handed out now; `num_absent` parameters had none on this rank."""
        self.mark("step ended")
        self._num_unused = num_absent
        self._steps += 1
        for name, value in self._times().items():
            self._totals_ns[name] += value

    def _times(self) -> dict[str, int]:
        """The spans of the last step; 0 for one that did not begin."""
        at = self._at_ns
        return {name: max(at[end] - at[begin], 0) if at[begin] else 0 for name, (begin, end) in _SPANS.items()}

    def logging_data(self) -> dict[str, int | str]:
        """What is known of the last steps."""
        return {
            **self._times(),
            **{f"avg_{name}": total // max(self._steps, 1) for name, total in self._totals_ns.items()},
            **{name: self._at_ns[moment] for moment, name in _MOMENTS.items()},
            "iteration": self._steps,
            "unused_parameter_size": self._num_unused,
            "prev_iteration_grad_ready_order_indices": ", ".join(map(str, self.order)),
        }


def logging_data(ddp: DistributedDataParallel, environ: Mapping[str, str]) -> dict[str, int | str]:
    """Torch's DDP logging data: what was asked for, sizes and times of buckets, the environment."""
    exchange, comm = ddp.reducer.exchange, ddp.reducer.comm
    nbytes = [param.nbytes for param in exchange.params]
    sizes = ", ".join(str(sum(nbytes[i] for i in members)) for members in exchange.plan)
    hook = "" if ddp._builtin_hook is None else str(ddp._builtin_hook)
    if ddp._comm_hooks:
        hook = getattr(ddp._comm_hooks[0][0], "__qualname__", repr(ddp._comm_hooks[0][0]))
    return {
        **{name.lower(): environ.get(name, "N/A") for name in _VARIABLES.split()},
        **exchange.stats.logging_data(),
        "bucket_sizes": sizes,
        "rebuilt_bucket_sizes": sizes,
        "rebuilt_per_bucket_param_indices": ", ".join(" ".join(str(i) for i in members) for members in exchange.plan),
        "dtypes": ", ".join(sorted({str(param.dtype).removeprefix("torch.") for param in exchange.params})),
        "has_rebuilt_buckets": int(exchange.rebuilt),
        "num_buckets_reduced": len(exchange.plan),
        "num_parameter_tensors": len(nbytes),
        "total_parameter_size_bytes": sum(nbytes),
        "module_name": type(ddp.module).__name__,
        "backend_name": comm.transport.name,
        "gloo_num_threads": torch_names.gloo_threads(ddp.process_group),
        "rank": comm.rank,
        "world_size": comm.world_size,
        "device_ids": ", ".join(str(index) for index in ddp.device_ids or ()),
        "output_device": -1 if ddp.output_device is None else ddp.output_device,
        "broadcast_buffers": int(ddp.forward_sync_buffers),
        "bucket_cap_bytes": ddp.bucket_bytes_cap,
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        "static_graph": int(ddp.static_graph),
        "has_sync_bn": int(any(isinstance(m, torch.nn.SyncBatchNorm) for m in ddp.module.modules())),
        "is_multi_device_module": int(ddp.is_multi_device_module),
        "comm_hook": hook,
    }
