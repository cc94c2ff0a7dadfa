"""A stock script on two machines that share nothing but a cable: what is wrong on one of them is said on both."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from command_runs import Run
from lockstep.observe.report.document import document_of
from lockstep.observe.report.run_rows import look
from lockstep.observe.report.source import RunReader
from machines_apart import ADDRESSES, NAMES, MachinesApart, skip_without_machines

pytestmark = pytest.mark.limit_s(120)

_PROGRAM = """
import os, signal, sys, time
import torch
import torch.distributed as dist

case, count = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
print(f"rank {rank} is up: pid {os.getpid()}", flush=True)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(count):
    is_culprit = (rank, step) == (0 if case == "first alone" else size - 1, 30)
    if is_culprit and case in ("raise", "alone", "first alone"):
        raise ValueError("a broken sample")  # raise
    if is_culprit and case == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if is_culprit and case == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if is_culprit and case == "exit":
        sys.exit()
    while is_culprit and case == "loop":
        pass
    if is_culprit and case == "c":
        sum(range(10**12))  # all in C: no other thread of this process runs
    while is_culprit and case == "hang":
        time.sleep(0.1)  # hang
    while step == 30 and case.endswith("alone"):
        time.sleep(0.1)  # for no other rank
    of = dist.ReduceOp.MAX if is_culprit and case == "reduction" else dist.ReduceOp.SUM
    values = torch.ones(5 if is_culprit and case == "shape" else 4)
    dist.all_reduce(values, op=of)  # all
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    if rank == 0 and step == 40:
        print("at step 40", flush=True)
    if rank == size - 1 and step == 60 and case == "right":
        time.sleep(1)  # longer than any step
    time.sleep(0.02)
dist.destroy_process_group()
"""
_LINES = {
    name: next(number for number, line in enumerate(_PROGRAM.splitlines(), 1) if line.endswith(f"# {name}"))
    for name in ("raise", "hang", "all")
}
Pair = tuple[Run, Run]
Start = Callable[..., Pair]


@pytest.fixture
def names() -> Sequence[str]:
    return NAMES


@pytest.fixture
def machines(names: Sequence[str]) -> Iterator[MachinesApart]:
    skip_without_machines()
    with closing(MachinesApart(ahead_s=1000, names=names)) as made:  # as one has that was started before the other
        yield made


@pytest.fixture
def start(machines: MachinesApart, tmp_path: Path) -> Iterator[Start]:
    """A launcher on each; the first has the store."""
    runs: list[Run] = []

    def both(case: str, *words: str, count: int = 300, ranks: int = 1, nnodes: int = 2) -> Pair:
        for machine, address in enumerate(ADDRESSES[: machines.count]):
            folder = tmp_path / f"machine{machine}"
            (folder / "tmp").mkdir(parents=True)
            (folder / "train.py").write_text(_PROGRAM)
            meeting = (f"--nnodes={nnodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:29500")
            variables = {"GLOO_SOCKET_IFNAME": "link0", "TMPDIR": str(folder / "tmp"), "LOCKSTEP_EVIDENCE": ""}
            command = ("run", *meeting, f"--local-addr={address}", f"-n={ranks}", *words, "train.py", case, str(count))
            inside = machines.inside(machine)
            runs.append(Run(folder, *command, warm=True, inside=inside, LOCKSTEP_HANG_S="2", **variables))
        return runs[0], runs[1]

    yield both
    for run in runs:
        run.close()


_AT = {name: rf"train\.py:{line}" for name, line in _LINES.items()}
_BOTH = rf"MISMATCH in step 31, .* Culprit: rank 1 .* rank 0: all_reduce float32 \[4\] sum at {_AT['all']} .* rank 1: "
_OF_RANK_1 = r"in step 31\.  Culprit: rank 1 \(host machine1, .*"
_SAID = {
    "raise": rf"RAISED {_OF_RANK_1} raised at {_AT['raise']}: ValueError: a broken sample",
    "kill": rf"GONE {_OF_RANK_1} was killed by SIGKILL .* rank 0 waits in ",
    "stop": rf"STOPPED {_OF_RANK_1} a signal, as SIGSTOP .*was ended by its launcher: stopped \(SIGSTOP\) for 3 s",
    "exit": rf"FINISHED too early, {_OF_RANK_1} rank 0 wanted a \d+\w\w \(all_reduce, {_AT['all']} ",
    "hang": rf"HANG: nothing has moved for \d\.\d s {_OF_RANK_1} rank 1 is not there: at {_AT['hang']} ",
    "shape": rf"{_BOTH}all_reduce float32 \[5\] sum at {_AT['all']} ",
    "reduction": rf"{_BOTH}all_reduce float32 \[4\] max at {_AT['all']} ",
}


@pytest.mark.parametrize("case", _SAID)
def test_a_culprit_on_the_other_machine_is_named(start: Start, case: str) -> None:
    """On both, where anybody is left to say it: of what ends or stops the culprit its own launcher tells by itself."""
    first, second = start(case, "--record=off", "--hang-limit-s=3", "--stopped-limit-s=3")
    text = _in_one_line(first.end(1))
    its = _in_one_line(second.end(0 if case == "exit" else 1))
    assert re.search(_SAID[case], text), text
    if case in ("hang", "shape", "reduction"):
        assert re.search(_SAID[case], its), its


@pytest.mark.parametrize("case", ["alone", "first alone"])
def test_a_failure_ends_also_the_machine_whose_ranks_wait_for_nobody(start: Start, case: str) -> None:
    """No connection tells them: they would sleep for ever. Also where the store goes with the machine that fails."""
    runs = start(case)
    failing, other = runs if case == "first alone" else runs[::-1]
    culprit = 0 if case == "first alone" else 1
    said = rf"rank {culprit} \(pid \d+, machine{culprit}\) failed at {_AT['raise']}: ValueError: a broken sample"
    first, second = failing.end(1), other.end(1)
    assert re.search(said, first)
    assert len(re.findall(rf"lockstep: {said}; rank {1 - culprit} was ended by the launcher here\n", second)) == 1
    assert "DistNetworkError" not in first + second
    (record,) = (other.output.parent / "runs").iterdir()
    source, status = look(RunReader(record))
    assert re.search(said, str(document_of(source, status, 0)["cards"]))


@pytest.mark.parametrize(("case", "is_at"), [("c", "C code that holds Python's lock"), ("loop", r"in one loop for .*")])
def test_who_is_at_work_and_cannot_say_so_is_not_cut_off(start: Start, case: str, is_at: str) -> None:
    """The only rank of its machine: its launcher speaks for it, or it says the same again and again."""
    first, _ = start(case, "--record=off", "--hang-limit-s=9")
    first.await_text(rf"  rank 1 is at work \({is_at}\)")
    (said,) = first.said()
    assert said.startswith("waiting for rank 1 for ")
    assert said.endswith("no fault so far" if case == "c" else "is that a loop without an end?")
    assert first.process.poll() is None


def _in_one_line(text: str) -> str:
    return re.sub(r"\n(?:\[rank\d\]:)? *", " ", text)


@pytest.mark.parametrize("case", ["kill", "raise", "shape"])
def test_what_was_found_is_in_the_report_of_each_machine(start: Start, case: str) -> None:
    """Also of the one whose only rank is the culprit, which says nothing any more."""
    runs, titles = start(case), list[str]()
    for run in runs:
        run.end(1)
        (record,) = (run.output.parent / "runs").iterdir()
        source, status = look(RunReader(record))
        titles.append(document_of(source, status, 0)["cards"][0]["title"])
    assert titles[0] == titles[1]
    assert titles[0].startswith({"kill": "GONE", "raise": "RAISED", "shape": "MISMATCH"}[case])


def test_a_cable_that_is_cut_and_mended(start: Start, machines: MachinesApart) -> None:
    """Each machine says that it cannot reach the other, and both come to their end."""
    runs = start("cut", "--record=off", count=120)
    runs[0].await_text("at step 40")
    machines.plug(is_in=False)
    for other, run in enumerate(reversed(runs)):
        run.await_text(rf"UNREACHABLE in step \d+\.  Culprit: rank {other} \(host machine{other}, pid \d+\)\n")
        run.await_text(rf"nothing has come from machine{other} \(rank {other}\) for \d\.\d s")
    machines.plug(is_in=True)
    for run in runs:
        run.end(0)


def test_a_cable_that_stays_cut_ends_the_run(start: Start, machines: MachinesApart) -> None:
    runs = start("cut", "--record=off", "--hang-limit-s=4")
    runs[0].await_text("at step 40")
    machines.plug(is_in=False)
    for other, run in enumerate(reversed(runs)):
        text = run.end(1)
        assert f"Culprit: rank {other} (host machine{other}, pid" in text
        assert "was ended by its launcher: no progress for 4 s" in text


def test_a_cable_that_is_cut_before_all_machines_have_come(start: Start, machines: MachinesApart) -> None:
    """Torch's calls to the store have no limit there."""
    runs = start("cut", "--record=off", nnodes=3)
    for run in runs:
        run.await_text("lockstep: waiting for 1 more machine at")
    machines.plug(is_in=False)
    runs[1].await_text("lockstep: nothing comes back from 10.99.0.1:29500: up to 30 s more")
    runs[1].end(1)
    assert runs[1].said()[-1].startswith("nothing has come back from 10.99.0.1:29500: the network is cut")


@pytest.mark.parametrize("names", [["one", "one"]], ids=[""])
def test_machines_of_one_name_are_two(start: Start, machines: MachinesApart) -> None:
    runs = start("cut", "--record=off", "--hang-limit-s=4")
    runs[0].await_text("at step 40")
    machines.plug(is_in=False)
    for other, run in enumerate(reversed(runs)):
        assert f"Culprit: rank {other} (host one, pid" in run.end(1)
        assert "UNREACHABLE" in run.text()


def test_containers_with_memory_of_their_own_are_not_one_machine(machines: MachinesApart) -> None:
    """Though they share the kernel and its network, as with `docker run --network=host`."""
    say = [sys.executable, "-c", "from lockstep.comm.preflight import machine_id; print(machine_id())"]
    here = [*machines.inside(0), *say]
    alone = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"]
    own = [*machines.inside(0), *alone, *say]
    first, again, other = (subprocess.run(one, capture_output=True, check=True).stdout for one in (here, here, own))
    assert first == again != other


@pytest.mark.parametrize("victim", [0, 1], ids=["with the store", "the other"])
def test_a_machine_that_is_gone(start: Start, victim: int) -> None:
    """With its launcher, so that nobody there can tell how its ranks ended."""
    runs = start("gone", "--record=off")
    runs[0].await_text("at step 40")
    runs[victim].signal(signal.SIGKILL)
    text = runs[1 - victim].end(1)
    assert re.search(rf"PeerFailed: in step \d+ rank {victim} on machine{victim} fell silent, and the launcher", text)


def test_nothing_is_said_of_a_right_program(start: Start) -> None:
    for machine, run in enumerate(start("right", count=150, ranks=2)):
        run.end(0)
        assert run.said() == []
        assert len(run.pids()) == 2
        (record,) = (run.output.parent / "runs").iterdir()
        assert {path.name for path in record.glob("rank-*")} == {f"rank-{2 * machine + n}.jsonl" for n in range(2)}
