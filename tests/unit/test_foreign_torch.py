"""Files of torch.save read without pickle: as torch.load gives them, and nothing but errors for all else."""

from __future__ import annotations

import collections
import datetime
import io
import pathlib
import pickle
import random
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from foreign_files import HARMFUL_PICKLES, MemoryFile, difference, outcome, read_torch_file, torch_file_of, zip_of
from lockstep.checkpoint.foreign.torch_files import read_torch_window
from lockstep.checkpoint.foreign.window import open_window
from lockstep.checkpoint.foreign.zip_records import ZipRecords
from lockstep.errors import CheckpointDamaged, CheckpointError, CheckpointMissing

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    torch.float8_e8m0fnu,
)


def saved(path: Path, value: Any, **options: Any) -> Path:
    torch.save(value, path, **options)
    return path


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def training_state() -> dict[str, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3, dtype=torch.float32))
    model[2].bias = nn.Parameter(torch.randn(3))
    moments = [
        {"step": torch.tensor(1.0), "exp_avg": torch.randn_like(p), "exp_avg_sq": torch.rand_like(p)}
        for p in model.parameters()
    ]
    group = {
        "lr": torch.tensor(1e-3),
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "foreach": None,
        "params": [0, 1, 2, 3, 4, 5],
    }
    return {
        "model": model.state_dict(),
        "optimizer": {"state": dict(enumerate(moments)), "param_groups": [group]},  # as that of torch.optim.AdamW is
        "schedule": {"T_max": 10, "eta_min": 0.0, "base_lrs": [1e-3], "last_epoch": 1, "_last_lr": [9e-4]},
        "rng": torch.get_rng_state(),
        "step": 3,
    }


def views() -> dict[str, Tensor]:
    base = torch.arange(60.0)
    matrix = base.reshape(5, 12)
    return {
        "base": base,
        "matrix": matrix,
        "transposed": matrix.t(),
        "row": matrix[3],
        "strided": matrix[1::2, ::5],
        "offset": base[7:11],
        "scalar": base[59],
        "empty": base[60:],
        "empty in the middle": base[5:5].view(0, 3),
        "expanded": base[2].expand(4, 5),
        "overlapping": base.as_strided((4, 4), (3, 2), 1),
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "negative": torch.randn(4, dtype=torch.complex64).conj().imag,
        "parameter": nn.Parameter(torch.ones(2)),
        "last": torch.ones(2, 3).to(memory_format=torch.contiguous_format),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }


def with_attribute(tensor: Tensor) -> Tensor:
    tensor.note = "kept by torch, not a part of the state"  # pyright: ignore
    return tensor


def plain_values() -> dict[Any, Any]:
    return {
        "none": None,
        "flags": [True, False],
        "numbers": (0, -1, 255, 256, 65_536, -(2**31), 2**31, 2**80, -(2**80), 1.5, float("inf")),
        "text": ["", "a\n\"'\\", "é\u4e2d", "x" * 70_000],
        "bytes": b"\x00\xff" * 300,
        "nested": {1: {2: [{"a": ({},)}]}, -5: ()},
        "ordered": collections.OrderedDict(b=1, a=2),
        "default": collections.defaultdict(list, {1: [2]}),
        "counter": collections.Counter("aab"),
        "size": torch.Size([2, 0, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 3),
        "device without index": torch.device("cpu"),
        "numpy": [np.float64(1.1), np.float32(1.1), np.float16(1.1), np.int64(-7), np.uint8(200), np.bool_(True)],
        "numpy makes it native": np.array([1.5], dtype=">f8")[0],
        "attribute": [with_attribute(torch.ones(2)), with_attribute(nn.Parameter(torch.ones(2)))],
    }


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("make", [training_state, views, plain_values], ids=lambda make: make.__name__)
def test_reads_what_torch_reads(tmp_path: Path, protocol: int, make: Any) -> None:
    path = saved(tmp_path / "state.pt", make(), pickle_protocol=protocol)
    assert difference(read_torch_file(path), loaded(path)) == ""


def test_difference_is_not_blind() -> None:
    state = training_state()
    state["model"]["0.weight"] = state["model"]["0.weight"].clone()
    other = {**state, "model": {**state["model"], "0.weight": state["model"]["0.weight"] + 1e-7}}
    assert difference(other, state) == "/model/0.weight: other elements"
    assert difference({**state, "step": 3.0}, state).startswith("/step")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_bitwise(tmp_path: Path, dtype: torch.dtype) -> None:
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (7 * dtype.itemsize,), dtype=torch.uint8)
    whole = data.view(dtype)
    value = {"all": whole, "some": whole[2:5], "none": whole[:0].view(0, 3), "dtype": dtype}
    path = saved(tmp_path / "x.pt", value)
    assert difference(read_torch_file(path), loaded(path)) == ""


def test_shared_memory_is_shared_again(tmp_path: Path) -> None:
    weight = torch.randn(6, 4)
    value = {
        "a": weight,
        "b": weight.detach(),
        "t": weight.t(),
        "row": weight[2],
        "other": weight.clone(),
        "same": weight,
    }
    found = read_torch_file(saved(tmp_path / "x.pt", value))
    places = {name: tensor.untyped_storage().data_ptr() for name, tensor in found.items()}
    assert len(set(places.values())) == 2
    assert found["a"].data_ptr() == found["b"].data_ptr()
    found["t"][1, 2] = 9
    assert found["a"][2, 1] == found["row"][1] == 9


def test_files_of_buffers_paths_and_earlier_torch_versions(tmp_path: Path) -> None:
    out = io.BytesIO()
    torch.save({"x": torch.arange(5)}, out)
    with zipfile.ZipFile(out) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    kept = ("data.pkl", "version", "data/0")  # torch 1.6 to 1.13 wrote no more
    early = {f"any name/{name}": records[f"archive/{name}"] for name in kept}
    for data in (out.getvalue(), zip_of(early), zip_of(early, large=True)):
        assert torch.equal(outcome(read_torch_file, tmp_path / "x.pt", data)["x"], torch.arange(5))
    assert torch.load(io.BytesIO(zip_of(early)), weights_only=True)["x"][4] == 4, "torch does not read the sample"


def test_archives_of_more_than_4_gib(tmp_path: Path) -> None:
    size = (1 << 32) + 4096
    with torch.serialization.skip_data():  # a file with holes, in no time
        torch.save({"a": torch.empty(size, dtype=torch.uint8), "b": torch.ones(3)}, tmp_path / "big.pt")
    with open_window(tmp_path / "big.pt") as file:
        records = ZipRecords(file)
        assert records.size("big/data/0") == size
        assert records.size("big/data/1") == 12
        assert records.read("big/version", 9) == b"3\n", "it lies behind them"


# ------------------------------------------------------------------ what is refused


class Custom:
    """A class of a program."""


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (Custom(), "test_foreign_torch.Custom"),
        (Custom, "test_foreign_torch.Custom"),
        (pathlib.PurePosixPath("x"), "pathlib.PurePosixPath"),
        (datetime.timedelta(1), "datetime.timedelta"),
        (np.arange(3), "numpy.ndarray"),
        (np.datetime64("2020-01-01"), "numpy._core.multiarray.scalar"),
        (print, "builtins.print"),
        ({1, 2}, "builtins.set"),
        (1j, "builtins.complex"),
        (range(3), "builtins.xrange"),
        (torch.ones(2).untyped_storage(), "torch.storage.TypedStorage"),
        (torch.eye(2).to_sparse(), "_rebuild_sparse_tensor"),
        (torch.empty(2, device="meta"), "_rebuild_meta_tensor_no_storage"),
        (torch.strided, "torch.serialization._get_layout"),
        ({(1, 2): 3}, "tuple as key"),
        ({1.5: 3}, "float as key"),
        ({None: 3}, "neither text nor a small integer"),
    ],
)
def test_objects_are_refused_by_name(tmp_path: Path, value: Any, named: str) -> None:
    path = saved(tmp_path / "x.pt", {"a": [value]})
    with pytest.raises(CheckpointError, match=named) as caught:
        read_torch_file(path)
    assert not isinstance(caught.value, CheckpointDamaged)
    assert str(path) in str(caught.value)


def test_where_the_object_is_stands_in_the_error(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt", {"a": {"b/c": [0, Custom()]}})
    with pytest.raises(CheckpointError, match=r"\(at a/b/c/1\)"):
        read_torch_file(path)


def test_older_and_other_files_are_refused_with_a_hint(tmp_path: Path) -> None:
    path = saved(tmp_path / "old.pt", {"x": torch.ones(2)}, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"before 1\.6.*convert it"):
        read_torch_file(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(nn.Linear(2, 2)).save(str(tmp_path / "script.pt"))
    with pytest.raises(CheckpointError, match="TorchScript archive, which is code"):
        read_torch_file(tmp_path / "script.pt")
    (tmp_path / "text.pt").write_text("no checkpoint")
    with pytest.raises(CheckpointDamaged, match=r"no file of torch\.save"):
        read_torch_file(tmp_path / "text.pt")
    with pytest.raises(CheckpointMissing):
        read_torch_file(tmp_path / "absent.pt")
    with pytest.raises(CheckpointError, match="no ordinary file"):
        read_torch_file(tmp_path)


_OK = b"\x80\x02K\x07."
BAD_ARCHIVES = {
    "big-endian": torch_file_of(_OK, byteorder=b"big"),
    "version 11": torch_file_of(_OK, version=b"11"),
    "version of words": torch_file_of(_OK, version=b"three"),
    "no data.pkl": zip_of({"archive/version": b"3"}),
    "two data.pkl": zip_of({"a/data.pkl": _OK, "b/data.pkl": _OK}),
    "data.pkl deeper": zip_of({"a/b/data.pkl": _OK}),
    "absolute name": zip_of({"a/data.pkl": _OK, "/etc/passwd": b""}),
    "name that leaves": zip_of({"a/data.pkl": _OK, "a/../../x": b""}),
    "backslash": zip_of({"a/data.pkl": _OK, "a\\x": b""}),
    "zero in a name": zip_of({"a/data.pkl": _OK, "a/x\0y": b""}),
    "compressed": zip_of({"a/data.pkl": _OK}, method=8),
    "encrypted": zip_of({"a/data.pkl": _OK}, flags=1),
    "on another disk": zip_of({"a/data.pkl": _OK}, disk=1),
    "other crc in the directory": zip_of({"a/data.pkl": _OK}, crc=1),
    "larger than told": zip_of({"a/data.pkl": _OK}, size=4),
    "as large as the archive": zip_of({"a/data.pkl": _OK}, size=5000, packed=5000),
    "4 GiB": zip_of({"a/data.pkl": _OK}, size=0xFFFFFFFE, packed=0xFFFFFFFE),
    "64-bit size that is missing": zip_of({"a/data.pkl": _OK}, size=0xFFFFFFFF, packed=0xFFFFFFFF),
    "elsewhere": zip_of({"a/data.pkl": _OK}, header=3),
    "within another": zip_of({"a/data.pkl": _OK, "a/x": b"y" * 60}, header=45),
    "more records than there are": zip_of({"a/data.pkl": _OK}, count=2),
    "fewer records than there are": zip_of({"a/data.pkl": _OK, "a/x": b""}, count=1),
    "65535 records": zip_of({"a/data.pkl": _OK}, count=0xFFFF),
    "comment": zip_of({"a/data.pkl": _OK}, comment=b"PK"),
    "something before": b"x" + zip_of({"a/data.pkl": _OK}),
    "something after": zip_of({"a/data.pkl": _OK}) + b"x",
    "name twice": zip_of({"a/data.pkl": _OK, "a/data.pk_": b""}).replace(b"data.pk_", b"data.pkl"),
    "only an end": zip_of({}),
    "zip of python, compressed": b"",
}


@pytest.mark.parametrize("name", BAD_ARCHIVES)
def test_archives_that_torch_does_not_write(tmp_path: Path, name: str) -> None:
    data = BAD_ARCHIVES[name]
    if not data:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", b"\x80\x02" + b"N0" * 10_000_000 + b"N.")  # 20 MB in 20 kB
        data = out.getvalue()
    assert outcome(read_torch_file, tmp_path / "x.pt", data) is None


def test_sample_archive_is_good_without_the_fault(tmp_path: Path) -> None:
    for data in (
        torch_file_of(_OK),
        zip_of({"a/data.pkl": _OK}),
        zip_of({"a/data.pkl": _OK, "a/x": b"y" * 60}, large=True),
    ):
        assert outcome(read_torch_file, tmp_path / "x.pt", data) == 7


@pytest.mark.parametrize("name", HARMFUL_PICKLES)
def test_harm_is_refused(tmp_path: Path, name: str) -> None:
    assert outcome(read_torch_file, tmp_path / "x.pt", torch_file_of(HARMFUL_PICKLES[name], {"0": b"1234"})) is None


def _tensor(
    numel: Any = 4, offset: Any = 0, size: Any = (2, 2), stride: Any = (2, 1), key: Any = "0", **other: Any
) -> bytes:
    """The pickle of a dict with one float tensor of these numbers."""
    kind, hooks = other.get("kind", "FloatStorage"), other.get("hooks", b")R")
    parts = [b"\x80\x02}X\x01\x00\x00\x00actorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storage"]
    parts += [f"ctorch\n{kind}\n".encode(), _dumped(key), _dumped("cpu"), _dumped(numel), b"tQ"]
    parts += [_dumped(offset), _dumped(size), _dumped(stride), b"\x89ccollections\nOrderedDict\n", hooks]
    return b"".join([*parts, _dumped(other["marks"]) if "marks" in other else b"", b"tRs."])


def _dumped(value: Any) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


BAD_TENSORS = {
    "more elements than the storage": _tensor(numel=5),
    "fewer elements than the storage": _tensor(numel=3),
    "negative numel": _tensor(numel=-4),
    "numel of 2^60": _tensor(numel=2**60),
    "numel of text": _tensor(numel="4"),
    "numel True": _tensor(numel=True),
    "offset too far": _tensor(offset=1),
    "negative offset": _tensor(offset=-1),
    "offset of an empty one": _tensor(offset=5, size=(0,), stride=(1,)),
    "shape too large": _tensor(size=(3, 2)),
    "2^60 rows": _tensor(size=(2**60, 2), stride=(0, 1)),
    "2^45 rows of one": _tensor(size=(2**45, 2), stride=(0, 1)),
    "empty, but overflowing": _tensor(size=(0, 2**40, 2**40), stride=(1, 1, 1)),
    "negative size": _tensor(size=(-2, 2)),
    "negative stride": _tensor(size=(2, 2), stride=(-2, 1)),
    "float stride": _tensor(stride=(2.0, 1)),
    "stride too large": _tensor(stride=(2**40, 1)),
    "fewer strides": _tensor(stride=(1,)),
    "size is a list": _tensor(size=[2, 2]),
    "100 dims": _tensor(size=(1,) * 100, stride=(1,) * 100),
    "storage that is not there": _tensor(key="1"),
    "storage with a path": _tensor(key="../data.pkl"),
    "key is a number": _tensor(key=0),
    "storage of another width": _tensor(kind="DoubleStorage"),
    "quantized storage": _tensor(kind="QInt8Storage"),
    "a class as storage": _tensor(kind="Tensor"),
    "hooks": _tensor(hooks=b")RK\x01K\x02s"),
    "hooks of a class": _tensor(hooks=b")\x81cos\nsystem\nb"),
    "unknown mark": _tensor(marks={"sparse": True}),
    "marks of text": _tensor(marks="conj"),
    "negative bools": _tensor(kind="BoolStorage", numel=16, marks={"neg": True}),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensors_that_do_not_fit_their_storage(tmp_path: Path, name: str) -> None:
    data = torch_file_of(BAD_TENSORS[name], {"0": bytes(16)})
    assert outcome(read_torch_file, tmp_path / "x.pt", data) is None


def test_sample_tensor_is_good_without_the_fault(tmp_path: Path) -> None:
    for pickled in (_tensor(), _tensor(marks={}), _tensor(marks={"neg": True}), _tensor(offset=3, size=(), stride=())):
        found = outcome(read_torch_file, tmp_path / "x.pt", torch_file_of(pickled, {"0": bytes(16)}))
        assert not found["a"].any()


def test_tensors_far_larger_than_the_file_are_refused_before_memory_is_taken(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt", {"a": torch.ones(1).expand(2**40)})
    assert loaded(path)["a"].numel() == 2**40
    with pytest.raises(CheckpointError, match="far larger than the file"):
        read_torch_file(path)
    many = torch.ones(1000)
    with pytest.raises(CheckpointError, match="far larger than the file"):
        read_torch_file(saved(path, {str(i): many.as_strided((20_000, 990), (0, 1), i) for i in range(5)}))


def test_what_is_conjugate_in_many_places_takes_memory_once(tmp_path: Path) -> None:
    weight = torch.randn(1000, dtype=torch.complex64)
    found = read_torch_file(saved(tmp_path / "x.pt", {str(i): weight.conj() for i in range(50)}))
    assert torch.equal(found["0"], weight.conj())
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == 1


def test_mappings_that_python_does_not_write(tmp_path: Path) -> None:
    ordered = b"\x80\x02ccollections\nOrderedDict\n"
    same_hash = b"".join(_dumped((2**61 - 1) * n) + b"K\x00" for n in range(2, 5))
    for pickled, words in (
        (ordered + b"]]K\x01K\x02\x86aa\x85R.", "of class collections.OrderedDict"),  # as Python 2 gave its items
        (ordered + b")R(" + same_hash + b"u.", "neither text nor a small integer"),
    ):
        (tmp_path / "x.pt").write_bytes(torch_file_of(pickled))
        with pytest.raises(CheckpointError, match=words):
            read_torch_file(tmp_path / "x.pt")


def test_containers_in_themselves_and_long_trees_are_refused(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    leaf: Any = 0
    for _ in range(60):
        leaf = [leaf] * 10
    deep: Any = 0
    for _ in range(100):
        deep = (deep,)
    for value in (loop, leaf, deep):
        with pytest.raises(CheckpointError, match="nested deeper"):
            read_torch_file(saved(tmp_path / "x.pt", {"a": value}))


# ------------------------------------------------------------------ damage


def _small() -> bytes:
    out = io.BytesIO()
    weight = torch.arange(6.0).reshape(2, 3)
    torch.save({"a": weight, "b": weight.t(), "step": 5, "name": "x"}, out)
    return out.getvalue()


def test_every_truncation_is_an_error() -> None:
    data = _small()
    with MemoryFile() as file:
        assert file.outcome(read_torch_window, data) is not None
        for length in range(len(data)):
            assert file.outcome(read_torch_window, data[:length]) is None, length


def test_every_changed_byte_is_an_error_or_changes_nothing() -> None:
    """torch.load itself does not compare CRCs. The changes that pass here are all in fields that say nothing."""
    data, chance = _small(), random.Random(5)
    passed = []
    with MemoryFile() as file:
        expected = file.outcome(read_torch_window, data)
        for index in range(len(data)):
            changed = bytearray(data)
            changed[index] ^= 1 << chance.randrange(8)
            found = file.outcome(read_torch_window, bytes(changed))
            if found is not None:
                passed.append(index)
                assert difference(found, expected) == "", index
    assert 100 < len(passed) < len(data) * 0.7, "padding, dates and the like"


def test_random_damage_is_an_error_or_changes_nothing() -> None:
    data, chance = _small(), random.Random(6)
    with MemoryFile() as file:
        expected = file.outcome(read_torch_window, data)
        for _ in range(3000):
            changed = bytearray(data)
            for _ in range(chance.choice((2, 3, 8))):
                changed[chance.randrange(len(changed))] = chance.randrange(256)
            start, stop = sorted(chance.sample(range(len(changed)), 2))
            if chance.random() < 0.3:
                del changed[start : min(stop, start + 20)]
            found = file.outcome(read_torch_window, bytes(changed))
            assert found is None or difference(found, expected) == ""
