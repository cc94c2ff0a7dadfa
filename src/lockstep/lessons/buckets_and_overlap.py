"""Why gradients travel in buckets, and during backward: fewer messages, and waiting hidden behind work."""

import time
from collections.abc import Callable

import torch
from torch import nn

import lockstep
from lockstep.learn.stage import Stage, run

TIMES = 5


def median_ms(stage: Stage, work: Callable[[], object]) -> float:
    took = []
    for _ in range(TIMES):
        stage.quietly.barrier()
        began = time.perf_counter()
        work()
        took.append(1e3 * (time.perf_counter() - began))
    return sorted(took)[TIMES // 2]


def buckets_and_overlap(stage: Stage) -> None:
    stage.screen(
        "One message each, or all in one",
        "A hundred small gradients, all-reduced one by one, then as one flat buffer of the same bytes. A message "
        "has a fixed cost, whatever its size: that is what a bucket saves.",
    )
    grads, bucket = [torch.ones(100) for _ in range(100)], torch.ones(100 * 100)
    stage.show(one_by_one_ms=median_ms(stage, lambda: [stage.quietly.all_reduce(grad) for grad in grads]))
    stage.show(one_bucket_ms=median_ms(stage, lambda: stage.quietly.all_reduce(bucket)))

    stage.screen(
        "After backward, or while it goes on",
        "Gradients are ready from the last layer to the first. By hand, each is sent when backward has ended. "
        "DistributedDataParallel starts a bucket as soon as it is full, while backward computes the rest. How much "
        "that hides depends on the machine: with as many ranks as cores, somebody has to do the sending too.",
    )
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    x = torch.randn(64, 256)
    stage.show(backward_alone_ms=median_ms(stage, lambda: model(x).sum().backward()))

    def by_hand() -> None:
        model(x).sum().backward()
        lockstep.average_gradients(model, stage.quietly)

    stage.show(by_hand_ms=median_ms(stage, by_hand))
    for cap_mb in (1.0, 100.0):
        ddp = lockstep.DistributedDataParallel(model, bucket_cap_mb=cap_mb)
        stage.show(**{f"buckets_of_{cap_mb:g}_mib_ms": median_ms(stage, lambda ddp=ddp: ddp(x).sum().backward())})


if __name__ == "__main__":
    run(buckets_and_overlap)
