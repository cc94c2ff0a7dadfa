"""Three microbatches, one message, and the gradient of one large batch."""

import torch

from lockstep.learn.stage import Stage, run

MICROBATCHES = 3


def accumulate(stage: Stage) -> None:
    comm = stage.comm
    stage.screen("Accumulate", "The loss is the mean over all samples of all ranks: 3 microbatches of one sample each.")
    weight = torch.zeros(1, requires_grad=True)
    samples = [10.0**comm.rank * (number + 1) for number in range(MICROBATCHES)]
    # your turn: call backward once for each sample, so that weight.grad ends as the mean over the samples of all ranks,
    # with one call of comm.all_reduce in all. What backward adds up is a sum: who divides it by what?
    for sample in samples:
        (weight * sample / MICROBATCHES).sum().backward()
    comm.all_reduce(weight.grad, "mean")
    # end of your turn
    stage.show(answer=weight.grad)


if __name__ == "__main__":
    run(accumulate)
