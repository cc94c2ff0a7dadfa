"""Six classic mistakes, each as a program that makes it: what stock torch says to it, and what lockstep says."""

import subprocess
import sys

from lockstep.learn.stage import Stage, run
from lockstep.observe.process_guard import activity

MISTAKES = {
    "skipped_collective": "A collective in an if: one rank does not come, the others wait for it.",
    "forgotten_set_epoch": "set_epoch is never called: every epoch has the order of the first.",
    "frozen_before": "A parameter is frozen on one rank only: the ranks do not mean the same model.",
    "absent_rank": "WORLD_SIZE says more than were started: everybody waits for who does not exist.",
    "same_path": "All ranks save to one path, at the same time.",
    "step_on_one_rank": "Only rank 0 makes the optimizer's step: the replicas part, and nothing ever fails.",
}


def said_by(name: str) -> list[str]:
    """The last line of the demo: one sentence of each."""
    command = [sys.executable, "-m", "lockstep", "demo", name, "--seconds", "4"]
    with activity(f"demo {name}"):  # the other ranks wait for us, and that is right
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return output.strip().splitlines()[-1].split("; ")


def pitfalls(stage: Stage) -> None:
    comm = stage.comm
    mine = {name: said_by(name) for name in list(MISTAKES)[comm.rank :: comm.world_size]}
    said = {name: lines for part in stage.quietly.all_gather_object(mine) for name, lines in part.items()}
    for name, text in MISTAKES.items():
        stage.screen(name.replace("_", " "), f"{text} The program: `lockstep demo {name} --source`.")
        for sentence in said[name] if comm.rank == 0 else ():
            stage.say(sentence)


if __name__ == "__main__":
    run(pitfalls)
