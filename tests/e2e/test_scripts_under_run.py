"""Scripts of other habits under `lockstep run`: what is wrong in them is found, and what is right left alone."""

import re
from pathlib import Path

import pytest

from command_runs import Run

_INIT_IN_MAIN = """
import torch
import lockstep


def main():
    with lockstep.init(verbose=False) as comm:
        model = lockstep.DistributedDataParallel(torch.nn.Linear(4, 2), process_group=comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(20):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 10 and comm.rank == 1:
                model.module.weight.data += 1


main()
"""


@pytest.mark.limit_s(90)
def test_drift_is_found_where_init_is_left(tmp_path: Path) -> None:
    """While its model is there: it is gone when the program ends."""
    (tmp_path / "script.py").write_text(_INIT_IN_MAIN)
    said = Run(tmp_path, "run", "--nproc-per-node", "2", "script.py", LOCKSTEP_EVIDENCE="").end(1)
    assert "REPLICAS differ after step 20, equal after step 8." in said


_HANGS_ONCE = """
import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
if dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(600)
dist.all_reduce(torch.ones(4))
print("done", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.limit_s(90)
def test_hang_of_stock_torch_that_does_not_pass_is_ended_and_all_start_again(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_HANGS_ONCE)
    flags = "--nproc-per-node", "2", "--hang-limit-s", "3", "--max-restarts", "1"
    said = Run(tmp_path, "run", *flags, "script.py", LOCKSTEP_HANG_S="1").end(0)
    assert "lockstep: HANG: nothing has moved for" in said
    assert re.search(r"lockstep: rank 1 \(pid \d+\) was ended by its launcher: no progress for 3 s; rank 0", said)
    assert "restart 1 of 1 after no progress for 3 s" in said
    assert said.count("done") == 2


_TORCH_IN_MAIN = """
def main():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    number = torch.ones(4)
    dist.all_reduce(number)
    print("sum", number.tolist())
    dist.destroy_process_group()


main()
"""


@pytest.mark.limit_s(90)
def test_torch_may_be_imported_within_a_function_in_the_mode_check(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_TORCH_IN_MAIN)
    said = Run(tmp_path, "run", "--nproc-per-node", "2", "script.py", LOCKSTEP_GUARD="check").end(0)
    assert said.count("sum [2.0, 2.0, 2.0, 2.0]") == 2


_STEP_OF_PARENT = """
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Slow(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep(0.05)
        return super().step(closure)


dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # from now on torch tells of the steps of this class
if dist.get_rank():
    optimizer = Slow(model.parameters(), lr=0.1)
for _ in range(20):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.limit_s(90)
def test_an_optimizer_of_one_rank_that_calls_its_parents_step_has_as_many_steps(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_STEP_OF_PARENT)
    said = Run(tmp_path, "run", "--nproc-per-node", "2", "script.py", LOCKSTEP_GUARD="strict").end(0)
    assert "MISMATCH" not in said
    assert "STEPS" not in said


_TWO_MODELS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep.observe.torch_replicas as replicas

dist.init_process_group("gloo")
if dist.get_rank():
    replicas._SHARE = 1e-9  # a rank whose comparisons were slow by chance, and are seldom from now on
makes, judges = DistributedDataParallel(nn.Linear(4, 4)), DistributedDataParallel(nn.Linear(4, 1))
first, second = torch.optim.SGD(judges.parameters(), 0.1), torch.optim.SGD(makes.parameters(), 0.1)
torch.manual_seed(dist.get_rank())
for _ in range(200):
    noise = torch.randn(8, 4)
    first.zero_grad()
    judges(makes.module(noise).detach()).square().mean().backward()
    first.step()
    second.zero_grad()
    judges.module(makes(noise)).square().mean().backward()
    second.step()
dist.destroy_process_group()
"""


@pytest.mark.limit_s(90)
def test_two_models_are_compared_alike_where_ranks_compare_at_different_steps(tmp_path: Path) -> None:
    """One at the next backward, before the second optimizer steps, the other at the end, after it has."""
    (tmp_path / "script.py").write_text(_TWO_MODELS)
    Run(tmp_path, "run", "--nproc-per-node", "2", "script.py").end(0)
