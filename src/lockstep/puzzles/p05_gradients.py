"""Train together: the replicas take one step, that of all samples."""

import torch

from lockstep.learn.stage import Stage, run


def gradients(stage: Stage) -> None:
    comm = stage.comm
    stage.screen("One step together", "The weight is 1 on every rank; rank r's sample is 10 to the power of r.")
    weight = torch.ones(1, requires_grad=True)
    (weight * 10.0**comm.rank).sum().backward()
    stage.show(own_gradient=weight.grad)
    # your turn: make weight.grad the mean over the ranks, with one call of comm.all_reduce.
    comm.all_reduce(weight.grad, "mean")
    # end of your turn
    with torch.no_grad():
        weight -= weight.grad
    stage.show(answer=weight)


if __name__ == "__main__":
    run(gradients)
