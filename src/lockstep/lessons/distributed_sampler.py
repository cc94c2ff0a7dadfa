"""Who computes what, with and without a sampler."""

import torch

import lockstep
from lockstep.learn.stage import Stage, run

DATA = list(range(100, 110))


def distributed_sampler(stage: Stage) -> None:
    comm = stage.comm
    stage.screen(
        "Without a sampler",
        "Every rank reads the same ten samples. All the work is done W times, and the averaged gradient is the one "
        "that a single process would have had: more processors, no more progress.",
    )
    stage.show(samples=torch.tensor(DATA))

    stage.screen(
        "With one",
        "DistributedSampler deals the indices out like cards: rank r takes r, r + W, r + 2 W, ... So that all ranks "
        "have equally many, the last ones are given twice where the number does not divide.",
    )
    sampler = lockstep.DistributedSampler(DATA, comm.world_size, comm.rank, shuffle=False)
    stage.show(samples=torch.tensor([DATA[index] for index in sampler]))

    stage.screen(
        "A new order for each epoch",
        "Shuffled, every rank draws the same permutation from the seed and takes its own cards of it. set_epoch "
        "changes the permutation; whoever forgets it sees the same order for ever.",
    )
    sampler = lockstep.DistributedSampler(DATA, comm.world_size, comm.rank, shuffle=True, seed=1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        stage.show(**{f"epoch{epoch}": torch.tensor([DATA[index] for index in sampler])})

    stage.screen(
        "The proof: every sample exactly once",
        "Each rank counts what it has seen; the sum over ranks is the number of uses of each sample. pad='none' gives"
        " some ranks one more than others, so that no sample is used twice.",
    )
    sampler = lockstep.DistributedSampler(DATA, comm.world_size, comm.rank, shuffle=True, pad="none")
    uses = torch.zeros(len(DATA))
    for index in sampler:
        uses[index] += 1
    comm.all_reduce(uses, label="uses of each sample")


if __name__ == "__main__":
    run(distributed_sampler)
