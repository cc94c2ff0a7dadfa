"""How the backend "lockstep" becomes known to torch, and how its groups end: in order, by accident, at the exit."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backend_groups import default_group
from torch.distributed._functional_collectives import all_reduce
from torch.nn.parallel import DistributedDataParallel

from lockstep.comm.process_group import autoload, register_backend
from lockstep.comm.waiting import wait_until
from lockstep.errors import CollectiveTimeout, CommError, PeerLost
from lockstep.testing.failures import RankFailed
from lockstep.testing.worlds import run_processes

ROOT = Path(__file__).resolve().parents[2]

# ------------------------------------------------------------------ known to torch


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """An environment in which lockstep is installed with the entry point that pyproject.toml has now."""
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(r'\[project\.entry-points\."torch\.backends"\].*\nlockstep = "(.+)"', text)
    assert found
    folder = tmp_path / "lockstep_train-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: lockstep-train\nVersion: 0\n")
    (folder / "entry_points.txt").write_text(f"[torch.backends]\nlockstep = {found[1]}\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src")])}


def python(code: str, env: dict[str, str]) -> str:
    """What a fresh Python prints, on both streams."""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


GROUP_OF_ONE = """
import torch, torch.distributed as dist
dist.init_process_group("lockstep", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
dist.destroy_process_group()
print(dist.group.WORLD, tensor.tolist())
"""


def test_import_torch_is_enough(installed: dict[str, str]) -> None:
    assert python(GROUP_OF_ONE, installed) == "None [1.0, 1.0, 1.0]\n"


def test_without_the_entry_point_one_call_is(installed: dict[str, str]) -> None:
    code = "from lockstep.comm.process_group import register_backend; register_backend(); register_backend()"
    assert python(code + GROUP_OF_ONE, {**installed, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}).startswith("None [1.0")


def test_import_torch_loads_little_of_lockstep(installed: dict[str, str]) -> None:
    code = "import sys, torch; print(*sorted(name for name in sys.modules if name.startswith('lockstep')))"
    assert python(code, installed).split() == ["lockstep", "lockstep.comm", "lockstep.comm.process_group"]


@pytest.mark.parametrize("module", ["op", "process_group", "process_group_calls", "torch_transport"])
def test_modules_that_import_torch_may_be_imported_first(module: str, installed: dict[str, str]) -> None:
    code = f"import lockstep.comm.{module}, torch.distributed as dist; print('LOCKSTEP' in dist.Backend._plugins)"
    assert python(code, installed) == "True\n"


def test_autoload_breaks_no_import_of_torch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(dist.Backend, "_plugins", {})
    monkeypatch.setattr(dist.Backend, "register_backend", lambda *args: 1 / 0)
    autoload()
    assert "torch does not take the backend" in caplog.text
    monkeypatch.setattr(dist, "is_available", lambda: False)
    autoload()
    with pytest.raises(RuntimeError, match="this build of torch does not have"):
        register_backend()


# ------------------------------------------------------------------ the end of a group


def threads() -> dict[str, str]:
    """Name by number."""
    found: dict[str, str] = {}
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found[task] = Path(f"/proc/self/task/{task}/comm").read_text().strip()
    return found


def make_use_destroy(rank: int, world_size: int, folder: str) -> None:
    """Again and again on one store, with a part of the group, with a future, with what Gloo does."""
    register_backend()
    store = dist.FileStore(f"{folder}/store", world_size)
    files: list[int] = []
    gc.collect()
    before = threads()  # an earlier job of this process may have left some, which may end meanwhile

    def left() -> list[str]:
        new = [name for task, name in threads().items() if task not in before]
        return [name for name in new if turn == 2 or "gloo" in name or "lockstep" in name]

    for turn in range(3):
        dist.init_process_group("lockstep", store=store, rank=rank, world_size=world_size)
        groups = [weakref.ref(dist.group.WORLD), weakref.ref(dist.new_group([0, 1]))]
        model = DistributedDataParallel(torch.nn.Linear(3, 3))
        model(torch.ones(2, 3)).sum().backward()
        bits = torch.tensor([1 << rank])
        dist.all_reduce(bits, dist.ReduceOp.BOR)
        assert int(bits) == 0b11
        del model
        if turn == 1:
            dist.destroy_process_group(groups[1]())
        dist.destroy_process_group()
        assert [group() for group in groups] == [None, None]
        assert wait_until(lambda: not left(), 20), left()  # who has joined a thread may still see it for a moment
        files.append(len(os.listdir("/proc/self/fd")))
        before.update(threads() if turn == 1 else {})  # torch has some of its own since its first use
    assert files[2] <= files[1]


def test_destroy_leaves_nothing_behind(tmp_path: Path) -> None:
    run_processes(2, make_use_destroy, 2, str(tmp_path), connect=False)


TALE = """
import sys, torch, torch.distributed as dist
from lockstep.comm.process_group import register_backend
register_backend()
what, file, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("lockstep", init_method=f"file://{file}", rank=rank, world_size=2)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
model(torch.ones(2, 64)).sum().backward()
if what == "pending":   # works, futures and a receive that nobody waits for; nobody sends either
    works = [dist.all_reduce(torch.ones(9), async_op=True) for _ in range(3)]
    futures = [work.get_future() for work in works]
    receive = dist.irecv(torch.ones(1), 1 - rank)
if what == "raises" and rank == 1:
    raise KeyError("the user's own")
if what == "raises":
    model(torch.ones(2, 64)).sum().backward()
print("end")
"""


def tell(what: str, folder: Path) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of two processes."""
    command = [sys.executable, "-c", TALE, what, str(folder / what)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, str(rank)], **pipes) for rank in range(2)]
    outputs = [process.communicate(timeout=100) for process in processes]
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


@pytest.mark.limit_s(120)  # two that each load torch: 20 s where two tests run side by side
@pytest.mark.parametrize("what", ["forgotten", "pending"])
def test_an_exit_without_destroy(what: str, tmp_path: Path) -> None:
    assert tell(what, tmp_path) == [(0, "end\n", "")] * 2


@pytest.mark.limit_s(120)
def test_a_rank_that_raises_ends_the_other_one(tmp_path: Path) -> None:
    (code, output, errors), (their_code, _, their_errors) = tell("raises", tmp_path)
    assert (code, output, their_code) == (1, "", 1)
    assert "PeerLost" in errors
    assert "KeyError" in their_errors


# ------------------------------------------------------------------ ranks that die or do not come


def error_of(call: Callable[[], object]) -> BaseException:
    with pytest.raises(RuntimeError) as raised:
        call()
    return raised.value


def with_a_killed_peer(rank: int, world_size: int, folder: str) -> list[str]:
    with default_group("lockstep", folder, rank, world_size):
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        work = dist.all_reduce(torch.ones(9), async_op=True)
        assert work is not None
        future = work.get_future()
        told = error_of(future.wait)
        waited = error_of(work.wait)
        assert isinstance(waited, PeerLost)
        assert error_of(work.wait) is waited
        assert f"PeerLost: {waited}" in str(told)
        assert (work.is_completed(), work.is_success(), work.exception()) == (True, False, waited)
        group = dist.group.WORLD
        for call in (
            dist.barrier,
            lambda: dist.recv(torch.ones(1), 1),
            lambda: dist.all_gather_object([None, None], 1),
            lambda: torch.ops._c10d_functional.wait_tensor(all_reduce(torch.ones(3), "sum", group)),  # through C++
        ):
            assert isinstance(error_of(call), CommError)
        in_backward = error_of(model(torch.ones(1, 2)).sum().backward)
        return [type(waited).__name__, str(in_backward)]


def test_a_killed_peer_is_told_everywhere(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as raised:
        run_processes(2, with_a_killed_peer, 2, str(tmp_path), connect=False)
    assert raised.value.errors.keys() == {1}, str(raised.value)
    assert raised.value.errors[1].message == "killed by SIGKILL"
    kind, in_backward = raised.value.results[0]
    assert kind == "PeerLost"
    assert "CommError: all_reduce float32 [6] sum" in in_backward


def with_limits(rank: int, world_size: int, folder: str) -> tuple[str, list[int]]:
    """Rank 2 comes to the first group and to nothing else."""
    with default_group("lockstep", folder, rank, world_size):
        limit = timedelta(seconds=0.3)
        if rank == 2:
            assert wait_until(lambda: len(list(Path(folder).glob("done*"))) == 2, timeout_s=20)
            return "", []
        absent = error_of(lambda: dist.new_group([0, 1, 2], timeout=limit))
        if rank == 0:
            late = error_of(lambda: dist.barrier(timeout=limit))
        else:
            dist.distributed_c10d._set_pg_timeout(limit)
            late = error_of(dist.barrier)
        (Path(folder) / f"done{rank}").touch()
        assert isinstance(absent, CollectiveTimeout), repr(absent)
        assert isinstance(late, CommError)
        return str(absent), list(absent.missing)


def test_limits_of_a_group_and_of_a_call(tmp_path: Path) -> None:
    texts = run_processes(3, with_limits, 3, str(tmp_path), connect=False)
    for rank, (text, missing) in enumerate(texts[:2]):
        assert f"on rank {rank} of 3: rank(s) 2 of it did not come within 0.3 s" in text
        assert missing == [2]
