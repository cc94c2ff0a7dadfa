"""Saving: rank 0 by hand, then all ranks with a commit; a rank is killed, and the run goes on from the last commit."""

import os
import signal
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import lockstep
from lockstep.learn.stage import Stage, run


def checkpoint(stage: Stage) -> None:
    comm = stage.comm
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False)
    with lockstep.Checkpointer(stage.folder / "checkpoints", stage.quietly) as checkpointer:
        loaded = checkpointer.load({"model": model})
        if loaded is None:
            first_life(stage, model, checkpointer)
        stage.screen(
            "Killed, and back",
            "The launcher saw the rank die, ended the others and started all of them again. This is their second "
            "life: new processes that found two commits. Step 3 was never committed, so it is done again.",
        )
        stage.show(life=1 + int(os.environ["TORCHELASTIC_RESTART_COUNT"]), loaded_step=loaded.step, weight=model.weight)

        stage.screen(
            "A flipped bit",
            "One bit of the newest checkpoint changes on disk. It is found before any tensor is handed out, and the "
            "one before it is taken. torch.load would have returned a wrong weight, or an error that names no file.",
        )
        if comm.rank == 0:
            file = next((stage.folder / "checkpoints").glob("step-00000002*/*.safetensors"))
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
        comm.barrier()
        stage.show(loaded_step=checkpointer.load({"model": model}).step, weight=model.weight)


def first_life(stage: Stage, model: nn.Module, checkpointer: lockstep.Checkpointer) -> None:
    comm, path = stage.comm, Path(stage.folder) / "model.safetensors"
    stage.screen(
        "Rank 0 saves, all load",
        "The replicas are equal, so one file is enough. All others have to wait until it is there: that is the "
        "barrier. Were all to write this one path, nobody could read it.",
    )
    if comm.rank == 0:
        save_file(model.state_dict(), path)
    comm.barrier(label="it is there")
    model.load_state_dict(load_file(path))
    stage.show(weight=model.weight)

    stage.screen(
        "What that does not survive",
        "Killed while it writes, the file is half old, half new. Checkpointer writes a new folder, proves every byte,"
        " and only then gives it its name. Each step adds 1; two are committed; in the third, rank 1 is killed.",
    )
    for step in (1, 2, 3):
        with torch.no_grad():
            model.weight += 1
        stage.show(**{f"step{step}": model.weight})
        if step == 3 and comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        checkpointer.save(step, {"model": model})


if __name__ == "__main__":
    run(checkpoint)
