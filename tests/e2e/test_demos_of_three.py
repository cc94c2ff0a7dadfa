"""The gallery's programs with three ranks: who is named is the one that did it, and not whoever is rank 1."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from command_runs import Run
from lockstep.demos.catalog import DEMOS, Demo

pytestmark = pytest.mark.limit_s(90)

_ONE = re.compile(r"Culprits: ranks 0,1|Culprit: rank 1")
_OF_ALL = ("own_roots", "other_seed", "past_ddp")  # of these programs every rank is guilty
# torch lets a rank go on that has met the others, while one of these may have another still to meet
_INIT = 'dist.init_process_group("gloo")'
_ALL = "c10d = dist.distributed_c10d; c10d._store_based_barrier(rank, c10d._get_default_store(), 'all', 3, None)"
_NAMES = [name for name, demo in DEMOS.items() if name not in _OF_ALL and demo.says and _ONE.search(demo.says[0])]


def _with_culprit(source: str, guilty: int) -> str:
    """The program, in which `guilty` does what rank 1 does, and all others do what rank 0 does."""
    source = source.replace("rank == 0", f"rank != {guilty}").replace("model[rank]", f"model[int(rank == {guilty})]")
    source = source.replace(_INIT, f"{_INIT}; rank = dist.get_rank(); {_ALL}")
    source = re.sub(r"rank == 1\b", f"rank == {guilty}", source)
    source = re.sub(r"(\d [+-]) rank\b", rf"\1 (rank == {guilty})", source)
    return source.replace("new_group([0, 1])", "new_group([0, 1, 2])")


def _says(demo: Demo, guilty: int) -> list[str]:
    """What has to be said then: of three, the odd one is to blame also where of two either may be right."""
    one, other = (rank for rank in range(3) if rank != guilty)
    words = {  # in this order; G is the guilty one
        r"Culprits: ranks 0,1|Culprit: rank 1": r"Culprit: rank G ",
        r"rank 1": "rank G",
        r"rank 0 waits": f"ranks {one},{other} wait",
        r"rank 0:": f"ranks {one},{other}:",
        r"rank 0 wanted": f"rank [{one}{other}] wanted",
        r"on rank 0,": f"on ranks {one}, {other},",
        r"rank 0": f"rank {one}",
        "rank G": f"rank {guilty}",
    }
    says = list(demo.says)
    for pattern, word in words.items():
        says = [re.sub(pattern, word, each) for each in says]
    return says


@pytest.mark.parametrize("guilty", [0, 2])
@pytest.mark.parametrize("name", _NAMES)
def test_the_odd_one_of_three_is_named(name: str, guilty: int, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(_with_culprit(DEMOS[name].script.read_text(), guilty))
    words = ("run", "--record=off", "--nproc-per-node=3", f"{name}.py")
    with contextlib.closing(Run(tmp_path, *words, warm=True, LOCKSTEP_HANG_S="2", LOCKSTEP_EVIDENCE="")) as run:
        for pattern in _says(DEMOS[name], guilty):
            run.await_text(pattern)
        blamed = set(re.findall(r"\blockstep: .*Culprits?: (ranks? [\d,-]+)", run.text()))
        assert blamed == {f"rank {guilty}"}, run.text()
