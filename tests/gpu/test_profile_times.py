"""Where the time of two NCCL ranks goes is told by what their GPU does, not by the threads that queue.

The GPU takes turns between processes: with other tests beside them, each of these times is longer, small ones most.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_runs import ended, line_of, start

from lockstep.observe.profile.run_record import Run
from lockstep.observe.profile.verdict import Share, Verdict, judge
from whole_records import read_run

pytestmark = [pytest.mark.gpu, pytest.mark.limit_s(120)]

_FORWARD, _BACKWARD, _DATA, _LATE = 10, 20, 5, 15  # milliseconds
_TRAIN = f"""
class Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        keep_busy({_FORWARD} + {{late}} * RANK)
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        keep_busy({_BACKWARD})
        return gradient.clone()

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = layers(), layers()

    def forward(self, tensor):
        return self.last(Work.apply(self.first(tensor)))

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 16 * 2 * 100

    def __getitem__(self, number):
        time.sleep({_DATA / 16e3})
        return torch.full((256,), number / 1e4)

dist.init_process_group("nccl")
model = {{model}}
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
data = Slow()
for batch in torch.utils.data.DataLoader(data, 16, sampler=torch.utils.data.DistributedSampler(data)):
    model(batch.to(GPU)).square().mean().backward()
    {{average}}
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
dist.destroy_process_group()
"""
_AVERAGE = """gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    {all_reduce}
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
        gradient.copy_(part.view_as(gradient) / 2)"""
_UNDER_WAY = """work = dist.all_reduce(flat, async_op=True)  # all
    keep_busy(2)
    work.wait()"""
_WAYS = {
    "DDP": ("DDP(Model().to(GPU))", "pass"),
    "a collective": ("Model().to(GPU)", _AVERAGE.format(all_reduce="dist.all_reduce(flat)  # all")),
    "one under way": ("Model().to(GPU)", _AVERAGE.format(all_reduce=_UNDER_WAY)),
}


def recorded(folder: Path, program: str) -> Run:
    """What the ranks have left, once they have come to their end with nothing said of them."""
    said = ended(start(folder, program, "--record=kept"), 0)
    assert "GUARD of rank" not in said, said
    return read_run(folder / "kept")


def shares_of(run: Run) -> tuple[Verdict, Share, Share]:
    """Judged by steps of which all are the GPU's."""
    for record in run.ranks.values():
        on_gpu = [line.on_gpu == line.count for line in record.steady]
        assert sum(on_gpu) > 0.9 * len(on_gpu), on_gpu
    verdict = judge(run)
    first, second = verdict.shares
    return verdict, first, second


@pytest.mark.parametrize("way", _WAYS)
def test_phases_are_those_of_the_gpu(way: str, tmp_path: Path) -> None:
    model, average = _WAYS[way]
    _, *shares = shares_of(recorded(tmp_path, _TRAIN.format(late=0, model=model, average=average)))
    for share in shares:
        spent = share.phases_ms
        print(way, share)
        assert 0.7 * _FORWARD < spent["forward"] < 2.5 * _FORWARD, share
        assert 1.1 < spent["backward"] / spent["forward"] < 3, share
        assert spent["data"] < 0.4 * _DATA, ("the GPU's queue hides it", share)
        assert spent["optimizer"] < spent["backward"], share


@pytest.mark.parametrize("way", _WAYS)
def test_who_is_late_on_its_gpu_is_waited_for(way: str, tmp_path: Path) -> None:
    model, average = _WAYS[way]
    verdict, first, second = shares_of(recorded(tmp_path, _TRAIN.format(late=_LATE, model=model, average=average)))
    print(way, first, second, verdict.advice, verdict.unseen, sep="\n")
    assert not verdict.unseen
    assert 0.6 * _LATE < first.waited_ms < 2 * _LATE, first
    assert second.waited_ms < 0.4 * _LATE, second
    assert 0.5 * _LATE < second.phases_ms["forward"] - first.phases_ms["forward"] < 1.7 * _LATE, (first, second)
    assert any((advice.kind, advice.rank) == ("straggler", 1) for advice in verdict.advice), verdict.advice
    if way != "DDP":
        assert verdict.waits.pairs[0].site.startswith(line_of(tmp_path, "all")), verdict.waits.pairs


_CAPTURE = """
dist.init_process_group("nccl")
model = DDP(layers())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(24):
    keep_busy(20)
    model(torch.randn(8, 256, device=GPU)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 6 == 5:
        static = torch.ones(8, device=GPU)
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            for _ in range(30):  # in which the guard's thread looks a few times
                static += 1
                time.sleep(0.02)
        graph.replay()
        assert static.tolist() == [31.0] * 8
del graph
dist.destroy_process_group()
"""


def test_a_graph_that_is_captured_meanwhile_is_whole(tmp_path: Path) -> None:
    shares_of(recorded(tmp_path, _CAPTURE))


_ASSERT = """
dist.init_process_group("nccl")
model = DDP(layers())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
batch = torch.randn(16, 256, device=GPU)
for step in range(1, 31):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 20 and RANK == 1:
        batch[torch.tensor([99], device=GPU)].sum().item()  # fault
"""


def test_the_last_word_of_a_program_whose_cuda_fails_is_its_own(tmp_path: Path) -> None:
    said = ended(start(tmp_path, _ASSERT), 1)
    assert "device-side assert triggered" in said
    assert "observe/profile" not in said, said
    assert said.count("~CUDAEvent") < 20, said
