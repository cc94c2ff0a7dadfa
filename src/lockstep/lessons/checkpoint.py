"""Saved, killed, and back where it was."""

import os
import signal

from safetensors.torch import load_file, save_file
from torch import nn

import lockstep
from lockstep.learn.stage import Stage, run


def checkpoint(stage: Stage) -> None:
    comm = stage.comm
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)  # [1, 2]; each step adds 1, so its value is the number of steps
    with lockstep.Checkpointer(stage.folder / "checkpoints", stage.quietly) as checkpointer:
        loaded = checkpointer.load({"model": model})
        if loaded is None:
            first_life(stage, model, checkpointer)
        stage.screen("Killed, and back", "The launcher starts all again: new processes, which find step 2.")
        stage.show(life=1 + int(os.environ["TORCHELASTIC_RESTART_COUNT"]), loaded_step=loaded.step, weight=model.weight)

        text = "One bit of the newest changes. It is found before a tensor is handed out; the older one is taken."
        stage.screen("A flipped bit", text)
        if comm.rank == 0:
            file = min((stage.folder / "checkpoints").glob("step-00000002*/*.safetensors"))
            content = file.read_bytes()
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        comm.barrier()
        stage.show(loaded_step=checkpointer.load({"model": model}).step, weight=model.weight)


def first_life(stage: Stage, model: nn.Module, checkpointer: lockstep.Checkpointer) -> None:
    comm, path = stage.comm, stage.folder / "model.safetensors"
    stage.screen("Rank 0 saves, all load", "Replicas are equal: one file is enough. The others wait until it is there.")
    if comm.rank == 0:
        save_file(model.state_dict(), path)
    comm.barrier(label="it is there")
    model.load_state_dict(load_file(path))
    stage.show(weight=model.weight)

    stage.screen(
        "What that does not survive",
        "Killed while it writes, the file is half old, half new. Checkpointer writes a new folder, proves every byte,"
        " and only then gives it its name. Each step adds 1; two are committed; in the third, the last rank is killed.",
    )
    for step in (1, 2, 3):
        model.weight.data += 1
        stage.show(**{f"step{step}": model.weight})
        stage.quietly.barrier()
        if step == 3 and comm.rank == comm.world_size - 1:
            stage.say("is killed now: SIGKILL, which no program can catch")
            os.kill(os.getpid(), signal.SIGKILL)
        checkpointer.save(step, {"model": model})


if __name__ == "__main__":
    run(checkpoint)
