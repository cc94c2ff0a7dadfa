"""Several backward passes, one averaging."""

import torch
from torch import nn

import lockstep
from lockstep.learn.stage import Stage, run


def no_sync(stage: Stage) -> None:
    comm = stage.comm
    weight = torch.zeros(1, requires_grad=True)

    def backward(microbatch: int) -> None:
        (weight * 10.0**comm.rank * (microbatch + 1)).backward()

    stage.screen(
        "By hand: add up at home",
        "A batch too large for the memory is computed in microbatches. Their gradients add up in .grad without any "
        "message: 1 + 2 times the rank's power of ten.",
    )
    for microbatch in range(2):
        backward(microbatch)
    stage.show(grad=weight.grad)

    stage.screen(
        "Average once",
        "One message for the whole batch. Averaging after each microbatch gives the same mean, and costs twice as "
        "much.",
    )
    comm.all_reduce(weight.grad, "mean", label="grad")

    stage.screen(
        "With DistributedDataParallel",
        "Inside no_sync, backward sends nothing; the first backward outside it sends the sum. Forward and backward "
        "both belong inside. A rank that forgets no_sync where others have it waits for messages that nobody sends.",
    )
    torch.manual_seed(0)
    model = lockstep.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    x = torch.tensor([[10.0**comm.rank]])
    with model.no_sync():
        model(x).sum().backward()
    stage.show(inside=model.module.weight.grad)
    model(2 * x).sum().backward()
    stage.show(after=model.module.weight.grad)


if __name__ == "__main__":
    run(no_sync)
