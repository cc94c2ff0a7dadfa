"""Chaos: `lockstep train` is killed at random moments, over and over, and must end in the same bits.

    python tests/chaos.py --kills 1000 [--seed S] [--processes 2] [--stops N] [--terms N] [--out DIR]

SIGKILL hits any rank, the fork server or the supervisor, while it starts, steps, saves or comes back. Only a killed
supervisor is started again from here, by the same command; all else is up to the run itself. In the end its model,
optimizer, loader, coverage and log are compared with those of a run that nothing happened to. A run that ends before
all strikes are dealt is followed by another one. The seed stands for the whole plan: who, and when, as random numbers.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from chaos_plan import draw_plan, recoveries, table
from chaos_run import ChaosFailed, Command, Pace, Run, end_all
from chaos_verdict import differences_between, faults_of, read_result, size_of
from lockstep.errors import LockstepError
from lockstep.launch.processes import adopting_orphans

_STEPS_PER_KILL = 15  # about what is done between two strikes
_STEPS_LEAST = 60
_RESTARTS = 1000  # without progress: strikes are at random, so many may come before the next checkpoint
# options of `lockstep train` for a run so small that starting it is all it costs
TINY = (
    "--model.layers=1",
    "--model.heads=1",
    "--model.width=16",
    "--model.context=16",
    "--model.dropout=0.1",
    "--data.val_fraction=0.1",
    "--train.batch=8",
    "--train.microbatch=2",
)
_RUN = (
    *TINY,
    "--train.log_every=1",
    "--train.eval_every=0",
    "--train.sample_tokens=0",
    "--optim.lr=0.003",
    "--optim.warmup_steps=5",
    "--checkpoint.every=5",
    "--checkpoint.keep=2",
    "--resume=auto",
)


def main(words: Sequence[str] | None = None) -> int:
    """Run it; 0 where not a bit has changed."""
    options = parse(words)
    seed = random.randrange(2**32) if options.seed is None else options.seed
    more = f' ARGS="--stops {options.stops} --terms {options.terms}"' if options.stops or options.terms else ""
    _say(f"seed {seed}; to see the same plan again: make chaos KILLS={options.kills} SEED={seed}{more}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)  # not without ending what was started
    folder = Path(tempfile.mkdtemp(prefix="lockstep-chaos-")) if options.out is None else options.out.absolute()
    with adopting_orphans():  # none can slip away
        try:
            code = chaos(options, seed, folder)
        except (ChaosFailed, LockstepError) as error:
            _say(f"FAILED with seed {seed}: {error}")
            code = 1
        finally:
            end_all()
    if code:
        _say(f"its files are in {folder}")
    elif options.out is None:
        shutil.rmtree(folder)
    return code


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python tests/chaos.py", description="kill a run over and over, and compare")
    parser.add_argument("--kills", type=int, default=100, help="SIGKILLs to deal")
    parser.add_argument("--stops", type=int, default=0, help="SIGSTOPs of ranks, which the supervisor has to notice")
    parser.add_argument("--terms", type=int, default=0, help="SIGTERMs: it saves, ends, and is started again")
    parser.add_argument("--seed", type=int, help="of the plan and of nothing else; default: a random one")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, help=f"of the run; default: {_STEPS_PER_KILL} for each strike")
    parser.add_argument("--patience", type=float, default=60.0, metavar="S", help="without progress: it hangs")
    parser.add_argument("--out", type=Path, help="keep all files here; default: a folder that is deleted")
    return parser.parse_args(words)


def chaos(options: argparse.Namespace, seed: int, folder: Path) -> int:
    """The run that nothing happens to, those that are struck, and the comparison."""
    plan = draw_plan(seed, options.kills, options.stops, options.terms)
    steps = options.steps or max(_STEPS_LEAST, _STEPS_PER_KILL * len(plan))
    write_corpus(folder / "corpus.txt")
    calm = Run(_command(options, folder, "calm", steps), Pace(1.0), [], options.patience, _say)
    began_s = time.monotonic()
    calm.go()
    wanted = read_result(folder / "calm" / "out")
    assert calm.first_step_s is not None
    _say(f"undisturbed: first step after {calm.first_step_s:.1f} s, all after {time.monotonic() - began_s:.1f} s")
    pace = Pace(calm.first_step_s)
    said = [f"undisturbed: {fault}" for fault in faults_of(wanted)]
    runs: list[Run] = []
    plan.reverse()
    began_s = time.monotonic()
    while plan or not runs:
        name = f"struck-{len(runs) + 1}"
        runs.append(Run(_command(options, folder, name, steps), pace, plan, options.patience, _say))
        runs[-1].go()
        found = read_result(folder / name / "out")
        said += [f"{name}: {fault}" for fault in (*faults_of(found), *differences_between(wanted, found))]
    seconds = time.monotonic() - began_s
    _say(f"{sum(len(run.blows) for run in runs)} strikes in {seconds:.0f} s")
    return conclude(runs, said, size_of(wanted))


def conclude(runs: Sequence[Run], said: Sequence[str], size: str) -> int:
    """Print the tables and the verdict; the exit code."""
    blows = [blow for run in runs for blow in run.blows]
    redone = [blow.steps_redone for blow in blows if blow.steps_redone is not None]
    starts = sum(run.starts for run in runs)
    _say("\n".join(table(blows)))
    _say(
        f"runs {len(runs)}, starts of the command {starts}, steps done twice {sum(redone)}, "
        f"at most {max(redone, default=0)} at once"
    )
    for line in recoveries(blows):
        _say(line)
    _say(f"compared with the undisturbed run: {size}")
    for one in said:
        _say(f"DIFFERENT: {one}")
    _say(f"differences: {len(said)}" if said else "bits changed: 0")
    return 1 if said else 0


def write_corpus(path: Path) -> None:
    """A text of which the tiny model makes an epoch in a few hundred steps."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"line {i}: {i * i % 97} bottles and {i * 7 % 13} glasses\n" for i in range(400)))


def _command(options: argparse.Namespace, folder: Path, name: str, steps: int) -> Command:
    words = ["train", "-n", str(options.processes), f"--data.path={folder / 'corpus.txt'}", "--out=out", *_RUN]
    words += [f"--train.steps={steps}", f"--restarts={_RESTARTS}"]
    return Command(words, folder / name, options.processes)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
