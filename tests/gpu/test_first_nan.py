"""The first NaN of programs that train on a GPU: its step, its rank and its line, while they go on."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from gpu_runs import line_of, start

pytestmark = [pytest.mark.gpu, pytest.mark.limit_s(120)]

# It goes on until the finding has been read, and all ranks end in one step.
_GOES_WRONG = """
from torch.distributed.fsdp import fully_shard

class Spoilt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * float("nan")

dist.init_process_group("nccl")
model = layers()[:-1]
model = fully_shard(model) or model if {is_sharded} else DDP(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
batch, is_read = torch.randn(16, 256, device=GPU), torch.zeros(1, device=GPU)
for step in range(1, 100_000):
    is_here = step == {bad_step} and RANK == 1
    loss = model(batch * float("nan") if is_here and {is_in_loss} else batch).square().mean()
    if is_here and not {is_in_loss}:
        loss = Spoilt.apply(loss)
    loss.backward()  # backward
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01 if {bad_step} < 100 else 0.0)
    if step > {bad_step} and step % 10 == 0:
        is_read.fill_(os.path.exists("read"))
        dist.all_reduce(is_read)
        if is_read.item():
            break
dist.destroy_process_group()
"""
_IS_RIGHT = """
dist.init_process_group("nccl")
model = DDP(layers()[:-1])
batch, is_fine = torch.randn(16, 256, device=GPU), torch.ones(1, device=GPU)
for is_fused in (False, True):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=is_fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40, growth_interval=4, enabled={is_scaled})
    for step in range(1, 61):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled={is_scaled}):
            is_bad = not {is_scaled} and step == 20 and RANK == 1
            loss = model(batch * float("nan") if is_bad else batch).float().square().mean()
        scaler.scale(loss).backward()
        is_fine.copy_(loss.detach().isfinite())
        dist.all_reduce(is_fine, op=dist.ReduceOp.MIN)
        if {is_scaled} or is_fine.item():
            scaler.step(optimizer)
            scaler.update()
        time.sleep(0.01)
assert all(param.isfinite().all() for param in model.parameters())
dist.destroy_process_group()
"""
_LOSS, _OWN = "the loss is not finite at", "gradients are not finite before averaging at"
_CASES = {
    "in a loss": (20, _LOSS, False),
    "behind a loss": (20, _OWN, False),
    "in a loss, sharded": (20, _LOSS, True),
    "in a step that is only counted": (1200, _LOSS, False),
}


@pytest.mark.parametrize("case", _CASES)
def test_the_rank_that_began_is_named_with_its_step_while_the_program_goes_on(case: str, tmp_path: Path) -> None:
    bad_step, origin, is_sharded = _CASES[case]
    program = _GOES_WRONG.format(bad_step=bad_step, is_in_loss=origin == _LOSS, is_sharded=is_sharded)
    with contextlib.closing(start(tmp_path, program)) as run:
        run.await_text("Likely fix: ")
        (tmp_path / "read").touch()
        said = " ".join(run.end(0).split())
    assert f"NOT FINITE gradients in step {bad_step}. Culprit: rank 1 " in said, said
    assert f"rank 1: {origin} {line_of(tmp_path, 'backward')}" in said, said
    assert "rank 0: " not in said, said
    assert said.count("NOT FINITE") == 1, said


@pytest.mark.parametrize("is_scaled", [True, False], ids=["by GradScaler", "by a test of its own"])
def test_a_step_that_a_program_leaves_out_is_no_fault(is_scaled: bool, tmp_path: Path) -> None:
    with contextlib.closing(start(tmp_path, _IS_RIGHT.format(is_scaled=is_scaled))) as run:
        run.end(0)
        assert run.said() == []
