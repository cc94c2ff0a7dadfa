"""Six mistakes, stock torch beside lockstep (a minute)."""

import os
import re
import subprocess
import sys

from lockstep.demos.catalog import DEMOS
from lockstep.learn.stage import Stage, run
from lockstep.observe.process_guard import activity

MISTAKES = {
    "skipped_collective": "A collective in an if: one rank does not come, and the others wait for it.",
    "forgotten_set_epoch": "set_epoch is never called: every epoch has the order of the first.",
    "frozen_before": "A parameter is frozen on one rank only: the ranks do not mean the same model.",
    "absent_rank": "WORLD_SIZE says more than were started: everybody waits for who does not exist.",
    "same_path": "All ranks save to one path, at the same time.",
    "step_on_one_rank": "A step of the optimizer on one rank only: the replicas part, and nothing ever fails.",
}
HANG = ("absent_rank",)  # where stock torch waits for half an hour, and we do not
OURS = ("LOCKSTEP_", "TORCHELASTIC_", "GROUP_", "ROLE_")  # said by the launcher to the ranks of this lesson


def said_by(name: str) -> list[str]:
    """What stock torch said to the program `name`, and the sentences of lockstep that name the fault."""
    seconds = "4" if name in HANG else "60"
    environ = {key: value for key, value in os.environ.items() if not key.startswith(OURS)} | {"COLUMNS": "9999"}
    command = [sys.executable, "-m", "lockstep", "demo", name, "--seconds", seconds]
    with activity(f"demo {name}"):  # the other ranks wait for us, and that is right
        output = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    torch, ours = output.splitlines()[-2:]
    lines = re.findall(r"(?m)^ *[\d.]+ s +(?:lockstep: |lockstep\.errors\.)?(.*)$", output.partition("--- lockstep")[2])
    named = [next(filter(re.compile(pattern).search, lines), "") for pattern in DEMOS[name].says]
    torch = torch.removesuffix(f" ({DEMOS[name].stock})")  # which the screen has told
    return [torch, ours, *(line for line in dict.fromkeys(named) if line[:80] not in ours)]


def pitfalls(stage: Stage) -> None:
    comm = stage.comm
    mine = {name: said_by(name) for name in list(MISTAKES)[comm.rank :: comm.world_size]}
    said = {name: lines for part in stage.quietly.all_gather_object(mine) for name, lines in part.items()}
    for name, text in MISTAKES.items():
        text += f" What stock torch does: {DEMOS[name].stock}. The program: `lockstep demo {name} --source`."
        stage.screen(name.replace("_", " "), text)
        for sentence in said[name] if comm.rank == 0 else ():
            stage.say(sentence)


if __name__ == "__main__":
    run(pitfalls)
