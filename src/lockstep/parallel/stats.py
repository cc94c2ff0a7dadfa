"""What a reducer knows about itself: sizes and times, under the names of torch's DDP logging data."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

_ENV_FIELDS = {
    "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
    "gloo_device_transport": "GLOO_DEVICE_TRANSPORT",
    "gloo_socket_ifname": "GLOO_SOCKET_IFNAME",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
}


@dataclass
class ReducerStats:
    """Times of the last synchronised step and their means, in nanoseconds."""

    steps: int = 0
    order: list[int] = field(default_factory=list)  # order in which gradients became ready, agreed between ranks
    forward_start_ns: int = 0
    backward_start_ns: int = 0
    backward_end_ns: int = 0
    comm_start_ns: int = 0
    comm_end_ns: int = 0
    num_unused: int = 0
    _totals: dict[str, int] = field(default_factory=dict)

    def forward_began(self) -> None:
        """A forward starts now."""
        self.forward_start_ns = time.time_ns()

    def backward_began(self) -> None:
        """Autograd starts now."""
        self.backward_start_ns = time.time_ns()
        self.comm_start_ns = 0

    def communication_began(self) -> None:
        """The first bucket is launched now."""
        self.comm_start_ns = time.time_ns()

    def backward_computed(self) -> None:
        """Autograd is done now; what follows is waiting."""
        self.backward_end_ns = time.time_ns()

    def step_ended(self, num_absent: int) -> None:
        """All gradients are handed out now; `num_absent` parameters had none on this rank."""
        self.comm_end_ns = time.time_ns()
        self.num_unused = num_absent
        self.steps += 1
        for name, value in self.times().items():
            self._totals[name] = self._totals.get(name, 0) + value

    def times(self) -> dict[str, int]:
        """The last step: forward, backward, communication, and how much of the last two was at the same time."""
        return {
            "forward_compute_time": max(self.backward_start_ns - self.forward_start_ns, 0)
            if self.forward_start_ns
            else 0,
            "backward_compute_time": max(self.backward_end_ns - self.backward_start_ns, 0),
            "backward_comm_time": max(self.comm_end_ns - self.comm_start_ns, 0) if self.comm_start_ns else 0,
            "backward_compute_comm_overlap_time": max(self.backward_end_ns - self.comm_start_ns, 0)
            if self.comm_start_ns
            else 0,
        }

    def logging_data(self, environ: Mapping[str, str]) -> dict[str, int | str]:
        """The part of torch's DDP logging data that concerns time and environment."""
        data: dict[str, int | str] = {name: environ.get(variable, "N/A") for name, variable in _ENV_FIELDS.items()}
        data.update(self.times())
        means = {f"avg_{name}": total // max(self.steps, 1) for name, total in self._totals.items()}
        data.update({f"avg_{name}": 0 for name in self.times()} | means)
        data.update(
            iteration=self.steps,
            unused_parameter_size=self.num_unused,
            forward_compute_time_start=self.forward_start_ns,
            backward_compute_time_start=self.backward_start_ns,
            backward_compute_time_end=self.backward_end_ns,
            backward_comm_time_start=self.comm_start_ns,
            backward_comm_time_end=self.comm_end_ns,
            prev_iteration_grad_ready_order_indices=", ".join(str(i) for i in self.order),
        )
        return data


def bucket_data(
    plan: Sequence[Sequence[int]], nbytes: Sequence[int], dtypes: Iterable[str], rebuilt: bool
) -> dict[str, int | str]:
    """The part of torch's DDP logging data that concerns buckets; `nbytes` are those of the parameters."""
    sizes = ", ".join(str(sum(nbytes[i] for i in members)) for members in plan)
    return {
        "bucket_sizes": sizes,
        "rebuilt_bucket_sizes": sizes,
        "rebuilt_per_bucket_param_indices": ", ".join(" ".join(str(i) for i in members) for members in plan),
        "dtypes": ", ".join(sorted(dtypes)),
        "has_rebuilt_buckets": int(rebuilt),
        "num_buckets_reduced": len(plan),
        "num_parameter_tensors": len(nbytes),
        "total_parameter_size_bytes": sum(nbytes),
    }
