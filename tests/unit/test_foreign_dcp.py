"""Folders of torch.distributed.checkpoint read without pickle: as torch loads them, and nothing but errors else."""

from __future__ import annotations

import datetime
import os
import pickle
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from foreign_files import BOOM, HARMFUL_PICKLES, difference, torch_file_of, zip_of
from lockstep.checkpoint.foreign.dcp import read_dcp_folder
from lockstep.comm.communicator import Communicator
from lockstep.errors import CheckpointError, CheckpointMissing
from lockstep.testing.worlds import run_processes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process saves, as meant


def state() -> dict[str, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    moments = {
        index: {"step": torch.tensor(2.0), "exp_avg": torch.randn_like(p)} for index, p in enumerate(model.parameters())
    }
    return {
        "model": model.state_dict(),
        "optimizer": {"state": moments, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.99), "params": [0, 1, 2, 3]}]},
        "list": [torch.ones(2), 7, {"a": torch.zeros(3, dtype=torch.bfloat16)}, [[torch.eye(2)]]],
        "list of numbers": [1, [2, 3]],
        "empty dict, which torch drops": {},
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(5, dtype=torch.int64),
        "strided": torch.arange(12.0).reshape(3, 4).t(),
        "step": 12,
        "text": "é.b",
        "none": None,
        "rng": torch.get_rng_state(),
        "dotted.key": {"x.y": torch.ones(1)},
    }


def as_torch_loads(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    reader, planner = dcp.FileSystemReader(folder), _EmptyStateDictLoadPlanner()
    _load_state_dict(found, storage_reader=reader, planner=planner, no_dist=True)
    return found


def saved(folder: Path, value: dict[str, Any]) -> Path:
    dcp.save(value, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("threads", [1, 3])
def test_reads_what_torch_reads(tmp_path: Path, threads: int) -> None:
    writer = dcp.FileSystemWriter(tmp_path / "c", thread_count=threads, single_file_per_rank=threads == 1)
    dcp.save(state(), storage_writer=writer, no_dist=True)
    found, expected = read_dcp_folder(tmp_path / "c"), as_torch_loads(tmp_path / "c")
    assert difference(found, expected) == ""
    assert found["optimizer"]["state"].keys() == {"0", "1", "2", "3"}
    assert difference(found["model"], dict(state()["model"])) == ""


def save_sharded(comm: Communicator, folder: str) -> dict[str, Any]:
    """Write a checkpoint from all ranks; what its tensors are as a whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(4)
    mesh = init_device_mesh("cpu", (comm.world_size,))
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 1))  # 5 rows and 1: uneven, and none on the last rank
    whole = {f"model.{name}": tensor.detach().clone() for name, tensor in model.state_dict().items()}
    fully_shard(model, mesh=mesh)
    others = {
        "columns": torch.randn(4, 7),
        "rows": torch.randn(7, 3, 2),
        "same": torch.randn(3),
        "plain": torch.randn(5),
    }
    placed = {
        name: distribute_tensor(others[name], mesh, [place])
        for name, place in {"columns": Shard(1), "rows": Shard(0), "same": Replicate()}.items()
    }
    dcp.save({"model": model.state_dict(), **placed, "plain": others["plain"], "step": 9}, checkpoint_id=folder)
    return {**whole, **others}


def test_tensors_of_several_ranks_are_put_together(tmp_path: Path) -> None:
    whole = run_processes(2, save_sharded, str(tmp_path / "c"))[0]
    names = {path.name for path in (tmp_path / "c").iterdir()}
    assert names == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    found = read_dcp_folder(tmp_path / "c")
    assert found["step"] == 9
    flat = {**{f"model.{name}": tensor for name, tensor in found["model"].items()}, **found}
    for name, tensor in whole.items():
        assert torch.equal(flat[name], tensor), name
    assert difference(found, as_torch_loads(tmp_path / "c")) == ""
    (tmp_path / "c" / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointMissing, match="__1_0"):
        read_dcp_folder(tmp_path / "c")


def test_a_checkpoint_without_nesting_keeps_its_flat_names(tmp_path: Path) -> None:
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({"a.b": torch.ones(2), "c": {"d": 1}}, checkpoint_id=tmp_path / "c", planner=planner, no_dist=True)
    found = read_dcp_folder(tmp_path / "c")
    assert torch.equal(found["a.b"], torch.ones(2))
    assert found["c"] == {"d": 1}


def test_folders_of_more_files_than_may_be_open(tmp_path: Path) -> None:
    value = {f"w{number}": torch.full((3,), number) for number in range(40)}
    writer = dcp.FileSystemWriter(tmp_path / "c", single_file_per_rank=False)
    dcp.save(value, storage_writer=writer, no_dist=True)
    assert len(list((tmp_path / "c").iterdir())) > 40
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 10, hard))
    try:
        found = read_dcp_folder(tmp_path / "c")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert difference(found, value) == ""


# ------------------------------------------------------------------ what is refused


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    value = {"a": {"w": torch.arange(6.0).reshape(3, 2)}, "l": [torch.ones(1), torch.zeros(1)], "n": 5}
    return saved(tmp_path_factory.mktemp("dcp") / "c", value)


def changed(sample: Path, folder: Path, change: Callable[[Metadata], Any]) -> Path:
    """A copy of the sample, with other metadata."""
    shutil.copytree(sample, folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 (torch has just written it)
    other = change(metadata)
    (folder / ".metadata").write_bytes(other if isinstance(other, bytes) else pickle.dumps(metadata))
    return folder


def _place(metadata: Metadata, **fields: Any) -> None:
    """Another place for the first chunk of a.w."""
    index = next(index for index in metadata.storage_data if index.fqn == "a.w")
    metadata.storage_data[index] = replace(metadata.storage_data[index], **fields)


def _chunks(metadata: Metadata, *chunks: tuple[Any, Any]) -> None:
    """Other chunks of a.w, all in the place of the first one."""
    index = next(index for index in metadata.storage_data if index.fqn == "a.w")
    place = metadata.storage_data.pop(index)
    found = []
    for offsets, sizes in chunks:
        found.append(ChunkStorageMetadata(torch.Size([0]), torch.Size([0])))
        found[-1].offsets, found[-1].sizes = offsets, sizes
        entry = MetadataIndex("a.w")
        object.__setattr__(entry, "offset", offsets)
        metadata.storage_data[entry] = place
    metadata.state_dict_metadata["a.w"].chunks = found


def _box(metadata: Metadata, shape: tuple[int, ...]) -> None:
    """a.w gets this shape, in one chunk."""
    _chunks(metadata, ((0, 0), shape))
    _set(metadata.state_dict_metadata["a.w"], "size", torch.Size(shape))


def _set(target: Any, name: str, value: Any) -> None:
    setattr(target, name, value)


def _path(metadata: Metadata, name: str, path: Any) -> None:
    metadata.planner_data[name] = path


REFUSED: dict[str, Callable[[Metadata], Any]] = {
    **{
        f"file {name!r}": lambda m, name=name: _place(m, relative_path=name)
        for name in ("../c/__0_0.distcp", "/etc/passwd", "a/b", "", ".", "..", "x\0y", "a\\b", None, 5, ".metadata")
    },
    "file that is not there": lambda m: _place(m, relative_path="__9_0.distcp"),
    "offset of a later one": lambda m: _place(m, offset=1),
    "negative offset": lambda m: _place(m, offset=-1),
    "offset of text": lambda m: _place(m, offset="0"),
    "offset 2^60": lambda m: _place(m, offset=2**60),
    "length 2^60": lambda m: _place(m, length=2**60),
    "negative length": lambda m: _place(m, length=-5),
    "length 0": lambda m: _place(m, length=0),
    "one byte less": lambda m: _place(m, length=m.storage_data[MetadataIndex("a.w", [0, 0])].length - 1),
    "transformed": lambda m: _place(m, transform_descriptors=["zstd"]),
    "no chunk": lambda m: _chunks(m),
    "two rows of three": lambda m: _chunks(m, (torch.Size([0, 0]), torch.Size([2, 2]))),
    "rows twice": lambda m: _chunks(m, *[(torch.Size([0, 0]), torch.Size([3, 2]))] * 2),
    "overlapping rows": lambda m: _chunks(m, ((0, 0), (2, 2)), ((1, 0), (2, 2))),
    "chunk outside": lambda m: _chunks(m, ((1, 0), (3, 2))),
    "chunk of 2^60": lambda m: _chunks(m, ((0, 0), (2**60, 2))),
    "chunk of fewer dims": lambda m: _chunks(m, ((0,), (6,))),
    "negative start": lambda m: _chunks(m, ((-1, 0), (4, 2))),
    "sizes of text": lambda m: _chunks(m, ((0, 0), "32")),
    "larger than its files": lambda m: _box(m, (2**24, 2)),
    "another shape": lambda m: _box(m, (2, 3)),
    "another dtype": lambda m: _set(m.state_dict_metadata["a.w"].properties, "dtype", torch.int32),
    "a dtype that is none": lambda m: _set(m.state_dict_metadata["a.w"].properties, "dtype", torch.Tensor),
    "size is a list": lambda m: _set(m.state_dict_metadata["a.w"], "size", [3, 2]),
    "chunks is a tuple": lambda m: _set(m.state_dict_metadata["a.w"], "chunks", ()),
    "item of another class": lambda m: m.state_dict_metadata.update({"a.w": m.storage_meta}),
    "item without fields": lambda m: m.state_dict_metadata.update({"a.w": 5}),
    "bytes where a tensor is": lambda m: m.state_dict_metadata.update({"a.w": m.state_dict_metadata["n"]}),
    "name of an item is a number": lambda m: m.state_dict_metadata.update({5: m.state_dict_metadata["n"]}),
    "item without a place": lambda m: m.state_dict_metadata.update({"b": m.state_dict_metadata["n"]}),
    "place without an item": lambda m: m.storage_data.update({MetadataIndex("b"): m.storage_data[MetadataIndex("n")]}),
    "place of a list": lambda m: object.__setattr__(next(iter(m.storage_data)), "fqn", ["n"]),
    "place of something else": lambda m: m.storage_data.update({"b": m.storage_data[MetadataIndex("n")]}),
    "no items": lambda m: _set(m, "state_dict_metadata", None),
    "no places": lambda m: _set(m, "storage_data", None),
    "path of an unknown item": lambda m: _path(m, "b", ("b",)),
    "path is text": lambda m: _path(m, "n", "n"),
    "path is empty": lambda m: _path(m, "n", ()),
    "path of floats": lambda m: _path(m, "n", (1.5,)),
    "path of 100 keys": lambda m: _path(m, "n", ("n",) * 100),
    "index 2^40": lambda m: _path(m, "l.0", ("l", 2**40)),
    "negative index": lambda m: _path(m, "l.0", ("l", -1)),
    "index and name": lambda m: _path(m, "l.0", ("l", "a")),
    "path twice": lambda m: _path(m, "l.0", ("l", 1)),
    "within a leaf": lambda m: _path(m, "l.0", ("n", "x")),
    "around a leaf": lambda m: _path(m, "l.0", ("a",)),
    "another class": lambda m: pickle.dumps({"state_dict_metadata": {}}),
    "no pickle": lambda m: b"{}",
    "nothing": lambda m: b"",
    **{f"harm: {name}": lambda m, name=name: HARMFUL_PICKLES[name] for name in HARMFUL_PICKLES},
}


@pytest.mark.parametrize("name", REFUSED)
def test_metadata_that_torch_does_not_write(sample: Path, tmp_path: Path, name: str) -> None:
    folder = changed(sample, tmp_path / "c", REFUSED[name])
    with pytest.raises(CheckpointError, match=str(folder)):
        read_dcp_folder(folder)


def test_sample_is_good_without_the_fault(sample: Path, tmp_path: Path) -> None:
    found = read_dcp_folder(changed(sample, tmp_path / "c", lambda metadata: None))
    assert torch.equal(found["a"]["w"], torch.arange(6.0).reshape(3, 2))
    two = read_dcp_folder(changed(sample, tmp_path / "d", lambda m: _path(m, "l.0", ("l", 3))))
    assert two["l"][:3:2] == [None, None], "as torch fills lists"


def test_objects_in_items_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp, a holds an object of class datetime\.timedelta"):
        read_dcp_folder(saved(tmp_path / "c", {"a": datetime.timedelta(1)}))


def test_links_and_what_is_no_file_are_refused(sample: Path, tmp_path: Path) -> None:
    for name in (".metadata", "__0_0.distcp"):
        folder = tmp_path / name.strip("._")
        shutil.copytree(sample, folder)
        (folder / name).rename(tmp_path / f"moved {name}")
        (folder / name).symlink_to(tmp_path / f"moved {name}")
        with pytest.raises(CheckpointError, match="is a link, which is not followed"):
            read_dcp_folder(folder)
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(CheckpointError, match="no ordinary file"):
            read_dcp_folder(folder)
        (folder / name).unlink()
        with pytest.raises(CheckpointMissing, match="does not exist"):
            read_dcp_folder(folder)
    with pytest.raises(CheckpointMissing, match="cannot open the folder"):
        read_dcp_folder(tmp_path / "absent")


def test_every_truncation_is_an_error(sample: Path, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    shutil.copytree(sample, folder)
    for name in (".metadata", "__0_0.distcp"):
        data = (folder / name).read_bytes()
        for length in reversed(range(0, len(data), 1 if name == ".metadata" else 7)):
            os.truncate(folder / name, length)
            with pytest.raises(CheckpointError):
                read_dcp_folder(folder)
        (folder / name).write_bytes(data)
    assert read_dcp_folder(folder)["n"] == 5


def test_random_damage_is_an_error_or_a_state(sample: Path, tmp_path: Path) -> None:
    """Of the metadata nothing tells whether it is what was written: only harm is excluded here, and wrong elements."""
    folder, chance = tmp_path / "c", random.Random(7)
    shutil.copytree(sample, folder)
    expected = torch.arange(6.0)
    errors = 0
    for name in (".metadata", "__0_0.distcp"):
        data = (folder / name).read_bytes()
        with (folder / name).open("r+b", buffering=0) as file:
            for _ in range(500):
                for _ in range(chance.choice((1, 2, 5))):
                    os.pwrite(file.fileno(), bytes([chance.randrange(256)]), chance.randrange(len(data)))
                try:
                    found = read_dcp_folder(folder).get("a")
                    tensors = [value for value in (found or {}).values() if isinstance(value, Tensor)]
                    assert all(torch.equal(tensor.flatten(), expected) or tensor.numel() == 1 for tensor in tensors)
                except CheckpointError:
                    errors += 1
                os.pwrite(file.fileno(), data, 0)
    assert 200 < errors < 1000


# ------------------------------------------------------------------ nothing is run

_WATCHED = """
import os, sys
from pathlib import Path
from lockstep.checkpoint.foreign.reading import read_foreign
from lockstep.errors import CheckpointError
root = Path(sys.argv[1])
seen, watching = [], False
QUIET = {"object.__getattr__", "object.__setattr__", "object.__delattr__", "sys._getframe", "os.scandir", "os.listdir"}

def watch(event, args):
    if not watching or event in QUIET:
        return
    if event == "open":
        name = os.fsdecode(args[0]) if isinstance(args[0], (str, bytes)) else str(args[0])
        if "/" not in name or Path(os.path.normpath(name)).is_relative_to(root):
            return
    seen.append((event, repr(args)[:200]))

def read(path):
    try:
        read_foreign(path)
        return True
    except CheckpointError as error:
        return False

for path in sorted((root / "good").iterdir()):
    assert read(path), path  # also loads what is loaded at the first use
assert not read(root / "absent")
sys.addaudithook(watch)
watching = True
results = {path.name: read(path) for path in sorted((root / "bad").iterdir())}
again = [read(path) for path in sorted((root / "good").iterdir())]
watching = False
print("results", sum(results.values()), "of", len(results), "good", all(again), "seen", seen)
watching = True
try:
    import not_there_at_all
except ImportError:
    watching = False
print("and it sees", seen[:1])
"""


def test_nothing_is_imported_run_or_opened_outside(sample: Path, tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.mkdir()
    bad.mkdir()
    shutil.copytree(sample, good / "dcp")
    torch.save(state(), good / "state.pt")
    (good / "hf").mkdir()
    from safetensors.torch import save_file

    save_file({"a": torch.ones(3)}, good / "hf" / "model.safetensors")
    for number, (_, pickled) in enumerate(HARMFUL_PICKLES.items()):
        (bad / f"{number}.pt").write_bytes(torch_file_of(pickled, {"0": b"1234"}))
    for number, change in enumerate(REFUSED.values()):
        changed(sample, bad / f"dcp {number}", change)
    (bad / "zip.pt").write_bytes(zip_of({"a/data.pkl": b"N.", "../../x": b""}))
    (bad / "hf").mkdir()
    (bad / "hf" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../good/hf/model.safetensors"}}')
    (bad / "link").mkdir()
    (bad / "link" / "model.safetensors").symlink_to(good / "hf" / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", _WATCHED, str(tmp_path)], capture_output=True, text=True, timeout=55, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"results 0 of {len(list(bad.iterdir()))} good True" in done.stdout
    assert "seen []" in done.stdout
    assert "and it sees [('import'" in done.stdout, "the watch is blind"
    assert BOOM[5:9].decode() not in done.stdout + done.stderr
