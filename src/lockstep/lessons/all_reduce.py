"""Every rank has a part, and all want the whole."""

import torch

from lockstep.learn.stage import Stage, run


def all_reduce(stage: Stage) -> None:
    comm, world_size = stage.comm, stage.comm.world_size
    stage.screen(
        "All to one, and back",
        "Rank r starts with 10 to the power of r, so the digits of a sum say who is in it. Everybody sends to rank 0,"
        " which adds and sends the sum back. Right, but rank 0 moves 2 (W - 1) tensors while all others wait.",
    )
    x = torch.tensor([10.0**comm.rank])
    comm.all_reduce(x, algorithm="naive")
    stage.show(x=x)

    stage.screen(
        "The ring, first half: reduce-scatter",
        "Cut the tensor into W chunks; the first has ones, the second twos. In each step every rank sends one chunk"
        " to its right neighbour and adds what comes from the left. All links work at the same time. After W - 1 steps "
        "every rank has one chunk of the sum.",
    )
    x = 10**comm.rank * torch.arange(1, world_size + 1)  # [W]
    chunk = torch.zeros(1, dtype=x.dtype)
    comm.reduce_scatter_tensor(chunk, x, algorithm="ring")
    stage.show(chunk=chunk)

    stage.screen(
        "The ring, second half: all-gather",
        "The finished chunks go round once more; nothing is added. Both halves together are the ring all-reduce.",
    )
    comm.all_gather_into_tensor(x, chunk, algorithm="ring")
    stage.show(x=x)

    stage.screen(
        "What a rank sends",
        "The ring sends 2 (W - 1) / W of the tensor per rank, hardly more with more ranks: the well-known tutorial "
        "that passes the whole tensor W - 1 times sends W / 2 times as much.",
    )
    x = torch.ones(1200)
    sent_bytes, _ = stage.moved_bytes(lambda: comm.all_reduce(x, algorithm="ring", label="1200 floats"))
    stage.show(tensor_bytes=x.nbytes, sent_bytes=sent_bytes)

    stage.screen(
        "Gradients: the mean",
        "Each rank has the gradient of its own samples. The mean over ranks is the gradient of all samples together, "
        "so all take the same step. This is what DistributedDataParallel does, for each bucket of gradients.",
    )
    grad = torch.tensor([1.0 + comm.rank, 10.0 * comm.rank])
    comm.all_reduce(grad, "mean", label="grad")


if __name__ == "__main__":
    run(all_reduce)
