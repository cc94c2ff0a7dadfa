"""Data parallel training by hand."""

import torch
from torch import nn

from lockstep.learn.stage import Stage, run

TRUTH = torch.tensor([[3.0], [-2.0]])  # [2, 1]


def naive_ddp(stage: Stage) -> None:
    comm = stage.comm
    stage.screen("Equal starts", "Rank 0's weights are everybody's. From here on only equal steps keep them equal.")
    torch.manual_seed(comm.rank)
    model = nn.Linear(2, 1, bias=False)
    comm.broadcast(model.weight.data, src=0, label="weight")

    stage.screen(
        "Own samples, own gradients",
        "Each rank computes the loss of its own four samples. The gradients differ: with them the replicas would part.",
    )
    x = torch.randn(4, 2)  # [samples, features], others on each rank
    loss = (model(x) - x @ TRUTH).square().mean()
    loss.backward()
    stage.show(loss=loss, grad=model.weight.grad)

    stage.screen(
        "Average, then step",
        "The mean of the gradients is the gradient of all samples together, the same bits on every rank. So is the "
        "step.",
    )
    comm.all_reduce(model.weight.grad, "mean", label="grad")
    with torch.no_grad():
        model.weight -= 0.1 * model.weight.grad
    stage.show(weight=model.weight)

    stage.screen(
        "Fifty times",
        "The replicas never exchange weights again, and are equal still; the truth was 3, -2.",
    )
    for _ in range(50):
        model.weight.grad.zero_()
        x = torch.randn(4, 2)
        (model(x) - x @ TRUTH).square().mean().backward()
        stage.quietly.all_reduce(model.weight.grad, "mean")
        with torch.no_grad():
            model.weight -= 0.1 * model.weight.grad
    stage.show(weight=model.weight)


if __name__ == "__main__":
    run(naive_ddp)
