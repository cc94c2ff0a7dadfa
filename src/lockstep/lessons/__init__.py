"""The way from one message to a whole training system, one short program after the other.

Each runs on real processes: with `lockstep learn NAME`, with torchrun, or with `python -m lockstep.lessons.NAME`.
"""

LESSONS = (  # in this order each builds on those before it
    "send_receive",
    "broadcast",
    "all_reduce",
    "distributed_sampler",
    "naive_ddp",
    "buckets_and_overlap",
    "ddp_training",
    "no_sync",
    "sharding",
    "checkpoint",
    "stragglers",
    "pitfalls",
    "parameter_server",
    "data_parallel",
)
KILLED = ("checkpoint",)  # ranks of these are killed, and started again
