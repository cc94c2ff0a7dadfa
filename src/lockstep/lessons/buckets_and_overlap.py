"""Why gradients travel in buckets, and during backward."""

import torch
from torch import nn

import lockstep
from lockstep.learn.stage import Stage, run


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])


def buckets_and_overlap(stage: Stage) -> None:
    comm = stage.quietly
    stage.screen(
        "One message each, or all in one",
        "A hundred small gradients, all-reduced one by one, then as one flat buffer of the same bytes. A message "
        "has a fixed cost, whatever its size: that is what a bucket saves.",
    )
    grads, bucket = [torch.ones(100) for _ in range(100)], torch.ones(100 * 100)
    stage.show(one_by_one_ms=stage.median_ms(lambda: [comm.all_reduce(grad) for grad in grads]))
    stage.show(one_bucket_ms=stage.median_ms(lambda: comm.all_reduce(bucket)))

    stage.screen(
        "After backward, or while it goes on",
        "Gradients are ready from the last layer to the first. By hand, each is sent when backward has ended. "
        "DistributedDataParallel starts a bucket as soon as it is full, while backward computes the rest: small "
        "buckets start early, one of 100 MiB only at the end. How much that hides depends on the machine: with as "
        "many ranks as cores, the sending takes time from backward.",
    )
    model, x = network(), torch.randn(64, 256)  # [batch, features]
    stage.show(backward_alone_ms=stage.median_ms(lambda: model(x).sum().backward()))

    def by_hand() -> None:
        model(x).sum().backward()
        lockstep.average_gradients(model, comm)

    stage.show(by_hand_ms=stage.median_ms(by_hand))
    for cap_mb in (1.0, 100.0):
        ddp = lockstep.DistributedDataParallel(network(), bucket_cap_mb=cap_mb)
        stage.show(**{f"buckets_of_{cap_mb:g}_mib_ms": stage.median_ms(lambda ddp=ddp: ddp(x).sum().backward())})


if __name__ == "__main__":
    run(buckets_and_overlap)
