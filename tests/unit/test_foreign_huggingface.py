"""Folders of weights written for other libraries and read from them, and checkpoints made of what they have saved."""

from __future__ import annotations

import errno
import json
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lockstep
from foreign_files import MemoryFile, difference
from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.checkpoint.foreign.export import export_checkpoint
from lockstep.checkpoint.foreign.huggingface import read_huggingface_folder, read_safetensors
from lockstep.checkpoint.foreign.reading import import_checkpoint, read_foreign
from lockstep.checkpoint.reader import open_checkpoint
from lockstep.errors import CheckpointDamaged, CheckpointError, CheckpointMissing, ConfigError

_ODD = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.int64, torch.bool, torch.complex64)


def saved(folder: Path, state: dict[str, Any]) -> Path:
    with Checkpointer(folder, keep=None) as checkpointer:
        return checkpointer.save(7, state)


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(1)
    made = {f"odd.{dtype}": torch.randint(0, 2, (3, 5)).to(dtype) for dtype in _ODD}
    return {**made, "empty": torch.empty(0, 4), "scalar": torch.tensor(2.5), "strided": torch.randn(4, 6).t()}


def state() -> dict[str, Any]:
    held = tensors()
    nested = {"block": [{"w": torch.ones(2)}, {"w": torch.zeros(2)}], "count": 3, "betas": (0.9, 0.99)}
    return {
        "model": {**held, "tied": held["strided"]},
        "ema": {"tied elsewhere": held["scalar"], "again": held["scalar"]},
        "nested": {"a/b": nested},
        "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "step": 7,
    }


def export(folder: Path, out: Path, **options: Any) -> Any:
    with open_checkpoint(folder) as reader:
        return export_checkpoint(reader, out, **options)


# ------------------------------------------------------------------ transformers


def test_transformers_reads_what_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # else a thread stays
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(2)
    sizes = {"vocab_size": 61, "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 3}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).eval()
    assert model.lm_head.weight is model.transformer.wte.weight
    config.to_json_file(tmp_path / "gpt2.json")
    folder = saved(tmp_path / "checkpoints", {"model": model.state_dict(), "step": 7})
    words = torch.arange(10).view(2, 5)
    for shard_bytes in (10**9, 5_000):
        out = tmp_path / f"hf {shard_bytes}"
        done = export(folder, out, shard_bytes=shard_bytes, config=tmp_path / "gpt2.json")
        assert sorted(done.files) == sorted(path.name for path in out.iterdir())
        assert ("model.safetensors" in done.files) == (shard_bytes == 10**9)
        again, report = GPT2LMHeadModel.from_pretrained(out, output_loading_info=True)
        assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert torch.equal(again.eval()(words).logits, model(words).logits)
        assert again.lm_head.weight is again.transformer.wte.weight
        assert difference(read_foreign(out), read_huggingface_folder(out)) == ""
        ours = GPT2LMHeadModel(config)
        lockstep.load_safetensors(ours, out)
        assert difference(dict(ours.state_dict()), dict(model.state_dict())) == ""
    model.save_pretrained(tmp_path / "theirs", max_shard_size="5KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    held = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    found = read_huggingface_folder(tmp_path / "theirs")
    assert difference({name: found[name] for name in held}, held) == ""


# ------------------------------------------------------------------ writing


def test_export_is_read_by_plain_safetensors(tmp_path: Path) -> None:
    folder = saved(tmp_path / "c", state())
    assert export(folder, tmp_path / "hf").tensors == len(tensors())
    with safe_open(tmp_path / "hf" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    expected = {name: tensor.contiguous() for name, tensor in tensors().items()}
    assert difference({name: found[name] for name in expected}, expected) == ""
    assert found.keys() == expected.keys(), "tied tensors are written once, under their first name"
    assert export(folder, tmp_path / "one.safetensors", form="safetensors").files == ["one.safetensors"]
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "hf" / "model.safetensors").read_bytes()
    assert not list(tmp_path.glob(".*")), "nothing unfinished is left"


def test_files_have_at_most_the_asked_size(tmp_path: Path) -> None:
    weights = {f"w{number:02}": torch.randn(number, 10) for number in range(20)}
    folder = saved(tmp_path / "c", {"model": weights})
    done = export(folder, tmp_path / "hf", shard_bytes=1000)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())
    held = {name: load_file(tmp_path / "hf" / name) for name in done.files if name.endswith(".safetensors")}
    for found in held.values():
        assert sum(tensor.nbytes for tensor in found.values()) <= 1000 or len(found) == 1
    assert difference({name: held[index["weight_map"][name]][name] for name in weights}, weights) == ""
    assert sorted(held) == [f"model-{n:05}-of-{len(held):05}.safetensors" for n in range(1, len(held) + 1)]


def test_names_of_nested_tensors_and_what_is_left_out(tmp_path: Path) -> None:
    folder = saved(tmp_path / "c", state())
    done = export(folder, tmp_path / "n.safetensors", key="nested", form="safetensors")
    assert load_file(done.path).keys() == {"a/b.block.0.w", "a/b.block.1.w"}
    assert done.left_out == ["nested/a~1b/betas", "nested/a~1b/count"]
    done = export(folder, tmp_path / "b.safetensors", key="nested/a~1b/block/1/", form="safetensors")
    assert load_file(done.path).keys() == {"w"}
    done = export(folder, tmp_path / "b.pt", key="nested/a~1b/block", form="torch")
    assert torch.load(done.path, weights_only=True)[1]["w"].tolist() == [0, 0]
    done = export(folder, tmp_path / "e.safetensors", key="ema", form="safetensors")
    assert torch.equal(load_file(done.path)["tied elsewhere"], torch.tensor(2.5)), "tied to what is not exported"
    assert done.tensors == 1


def test_config_of_the_model_is_exported_with_it_unless_another_is_named(tmp_path: Path) -> None:
    text = '{"model_type": "gpt2"}\n'
    folder = saved(tmp_path / "c", {"model": {"w": torch.ones(2)}, "other": {"w": torch.ones(3)}, "model_config": text})
    (tmp_path / "named.json").write_text('{"model_type": "llama"}')
    assert export(folder, tmp_path / "own").files == ["model.safetensors", "config.json"]
    assert (tmp_path / "own" / "config.json").read_text() == text
    export(folder, tmp_path / "named", config=tmp_path / "named.json")
    assert (tmp_path / "named" / "config.json").read_text() == '{"model_type": "llama"}'
    assert export(folder, tmp_path / "other", key="other").files == ["model.safetensors"]
    nested = saved(tmp_path / "n", {"model": {"w": torch.ones(2)}, "model_config": {"model_type": "gpt2"}})
    assert export(nested, tmp_path / "nested").files == ["model.safetensors"]  # it is no text of a file


def test_torch_reads_what_is_exported_for_it(tmp_path: Path) -> None:
    whole = state()
    folder = saved(tmp_path / "c", whole)
    for key, expected in (("model", whole["model"]), ("optimizer", whole["optimizer"]), ("", whole), ("step", 7)):
        out = tmp_path / f"{key}.pt"
        assert export(folder, out, key=key, form="torch").left_out == []
        found = torch.load(out, weights_only=True)
        if isinstance(expected, dict):
            assert found.keys() == expected.keys()
            found = {name: found[name] for name in expected}
        if key in ("model", "optimizer"):
            plain = {n: t.contiguous() if isinstance(t, Tensor) else t for n, t in expected.items()}
            assert difference(found, plain) == ""
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert found["tied"].data_ptr() == found["strided"].data_ptr()
    assert torch.load(tmp_path / ".pt", weights_only=True)["nested"]["a/b"]["betas"] == (0.9, 0.99)
    assert export(folder, tmp_path / "ema.pt", key="ema", form="torch").tensors == 1


def test_what_cannot_be_exported_leaves_nothing_behind(tmp_path: Path) -> None:
    own = {"own": {"__metadata__": torch.ones(1)}}
    folder = saved(tmp_path / "c", {**state(), "twice": {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, **own})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "bad.json").write_text("{")
    before = sorted(tmp_path.iterdir())
    for error, words, out, options in (
        (CheckpointError, r"under 'modle'.*'ema', 'model'", "o", {"key": "modle"}),
        (CheckpointError, "under 'step'", "o", {"key": "step"}),
        (CheckpointError, "would both be", "o", {"key": "twice"}),
        (CheckpointError, "cannot be called __metadata__", "o", {"key": "own"}),
        (CheckpointError, "there already", "full", {}),
        (CheckpointError, "there already", "file", {}),
        (CheckpointError, "there already", "file", {"form": "torch"}),
        (CheckpointError, "cannot write", "file/o", {}),
        (ConfigError, r"bad\.json cannot be copied", "o", {"config": tmp_path / "bad.json"}),
        (ConfigError, r"no\.json cannot be copied", "o", {"config": tmp_path / "no.json"}),
        (ConfigError, "belongs into a folder", "o", {"config": tmp_path / "bad.json", "form": "torch"}),
    ):
        with pytest.raises(error, match=words):
            export(folder, tmp_path / out, **options)
        assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "file").read_text() == "mine"
    data = folder / "rank-00000.safetensors"
    data.write_bytes(data.read_bytes()[:-1] + b"\x07")
    with pytest.raises(CheckpointDamaged, match=r"rank-00000\.safetensors"):
        export(folder, tmp_path / "o")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("form", ["hf", "safetensors", "torch"])
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Any) -> None:
    folder = saved(tmp_path / "c", {"model": {f"w{number}": torch.ones(3) for number in range(9)}})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*o: .*no space left"):
        export(folder, tmp_path / "o", form=form, shard_bytes=40)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    folder = saved(tmp_path / "c", {"model": {"w": torch.ones(3)}})
    (tmp_path / "out").mkdir()
    assert export(folder, tmp_path / "out").files == ["model.safetensors"]
    assert export(folder, tmp_path / "a" / "b" / "new").path.is_dir()


# ------------------------------------------------------------------ reading


def test_reads_what_safetensors_has_written(tmp_path: Path) -> None:
    expected = {name: tensor.contiguous() for name, tensor in tensors().items()}
    save_file(expected, tmp_path / "x.safetensors", metadata={"any": "words"})
    found = read_foreign(tmp_path / "x.safetensors")
    assert difference({name: found[name] for name in expected}, expected) == ""


def test_reads_folders_of_pytorch_model_bin(tmp_path: Path) -> None:
    weights = {"a": torch.randn(3), "b": torch.ones(2, 2)}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    assert difference(read_foreign(tmp_path), weights) == ""
    (tmp_path / "pytorch_model.bin").unlink()
    for name in weights:
        torch.save({name: weights[name], "other": torch.ones(1)}, tmp_path / f"{name}.bin")
    index = {"metadata": {"total_size": 28.0}, "weight_map": {"b": "b.bin", "a": "a.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert difference(read_foreign(tmp_path), {"b": weights["b"], "a": weights["a"]}) == ""
    torch.save({"a": 5}, tmp_path / "a.bin")
    with pytest.raises(CheckpointError, match=r"a\.bin holds something else than tensors"):
        read_foreign(tmp_path)


def _file(header: Any, data: bytes = bytes(8)) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def _one(**fields: Any) -> bytes:
    return _file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **fields}})


BAD_FILES = {
    "nothing": b"",
    "no header": b"12345",
    "header of 2^60": struct.pack("<Q", 1 << 60) + b"{}",
    "header of 100 MB": struct.pack("<Q", 100_000_000) + b"{}",
    "no JSON": _file(b"{]"),
    "no text": _file(b'{"\xff": 1}'),
    "a list": _file([]),
    "key twice": _file(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},' * 2 + b'"b":1}'),
    "nested": _file(b"[" * 100_000),
    "NaN": _file(b'{"a": NaN}'),
    "entry is a number": _file({"a": 1}),
    "no dtype": _file({"a": {"shape": [2], "data_offsets": [0, 8]}}),
    "more fields": _one(code="x"),
    "unknown dtype": _one(dtype="F4"),
    "dtype is a list": _one(dtype=["F32"]),
    "negative dim": _one(shape=[-2]),
    "dim 2^62": _one(shape=[1 << 62]),
    "dim is a float": _one(shape=[2.0]),
    "dim is true": _one(shape=[True]),
    "shape is text": _one(shape="2"),
    "other shape": _one(shape=[3]),
    "offsets beyond": _one(data_offsets=[8, 16]),
    "offsets the wrong way": _one(data_offsets=[8, 0]),
    "one offset": _one(data_offsets=[8]),
    "offsets of text": _one(data_offsets=["0", "8"]),
    "more data": _one() + b"x",
    "less data": _one()[:-1],
    "overlapping": _file({n: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for n in "ab"}),
    "gap": _file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_are_not_whole(name: str) -> None:
    with MemoryFile() as file:
        assert file.outcome(read_safetensors, BAD_FILES[name]) is None
        assert file.outcome(read_safetensors, _one())["a"].shape == (2,)


def test_every_truncation_and_random_damage(tmp_path: Path) -> None:
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.int8)}, tmp_path / "x.safetensors")
    data, chance = (tmp_path / "x.safetensors").read_bytes(), random.Random(8)
    with MemoryFile() as file:
        assert file.outcome(read_safetensors, data) is not None
        for length in range(len(data)):
            assert file.outcome(read_safetensors, data[:length]) is None
        for _ in range(1500):
            changed = bytearray(data)
            for _ in range(chance.choice((1, 2, 5))):
                changed[chance.randrange(len(changed))] = chance.randrange(256)
            file.outcome(read_safetensors, bytes(changed))  # nothing but our errors


def test_of_several_files_the_one_that_transformers_takes_is_read(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x.safetensors"}}')
    assert read_foreign(tmp_path)["a"] == 1
    save_file({"a": torch.full((1,), 2.0)}, tmp_path / "model.safetensors")
    assert read_foreign(tmp_path)["a"] == 2


def test_no_length_of_a_header_looks_like_another_format(tmp_path: Path) -> None:
    for length in (128, 0x80 + 256):
        header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
        (tmp_path / "x").write_bytes(_file(header.ljust(length), torch.ones(2).numpy().tobytes()))
        assert read_foreign(tmp_path / "x")["a"].tolist() == [1, 1]


BAD_INDICES = {
    "no JSON": "{",
    "a list": "[]",
    "no map": "{}",
    "map is a list": '{"weight_map": ["a"]}',
    "file is a number": '{"weight_map": {"a": 1}}',
    "file above": '{"weight_map": {"a": "../x.safetensors"}}',
    "file of the root": '{"weight_map": {"a": "/x.safetensors"}}',
    "file that is a link": '{"weight_map": {"a": "link.safetensors"}}',
    "file that is not there": '{"weight_map": {"a": "y.safetensors"}}',
    "tensor that is not there": '{"weight_map": {"b": "x.safetensors"}}',
    "key twice": '{"weight_map": {"a": "x.safetensors", "a": "x.safetensors"}}',
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("name", BAD_INDICES)
def test_indices_that_nobody_writes(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    for place in (folder / "x.safetensors", tmp_path / "x.safetensors"):
        save_file({"a": torch.ones(1)}, place)
    (folder / "link.safetensors").symlink_to(tmp_path / "x.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "x.safetensors"}}')
    assert read_huggingface_folder(folder).keys() == {"a"}
    index.write_text(BAD_INDICES[name])
    with pytest.raises(CheckpointError):
        read_huggingface_folder(folder)


def test_what_is_not_understood_says_what_is(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"GGUF" * 10)
    (tmp_path / "empty").mkdir()
    (tmp_path / "per rank").mkdir()
    (tmp_path / "per rank" / "__0.metadata").touch()
    for name in ("x.bin", "empty", "per rank"):
        with pytest.raises(CheckpointError, match=r"torch\.save.*\.safetensors.*Hugging Face.*\.metadata"):
            read_foreign(tmp_path / name)
    with pytest.raises(CheckpointError, match="checkpoint of lockstep itself"):
        read_foreign(saved(tmp_path / "c", {"a": 1}))
    with pytest.raises(CheckpointMissing):
        read_foreign(tmp_path / "absent")


# ------------------------------------------------------------------ checkpoints of what others have saved


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_is_made_of_each_format(tmp_path: Path) -> None:
    weights = {"w": torch.randn(3, 2), "b": nn.Parameter(torch.ones(2)).detach()}
    whole = {"model": weights, "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}}, "step": 40, "betas": (0.9, 1)}
    torch.save(whole, tmp_path / "x.pt")
    dcp.save(whole, checkpoint_id=tmp_path / "dcp", no_dist=True)
    save_file(weights, tmp_path / "x.safetensors")
    (tmp_path / "hf").mkdir()
    shutil.copy(tmp_path / "x.safetensors", tmp_path / "hf" / "model.safetensors")
    textual = {**whole, "optimizer": {"state": {"0": {"step": torch.tensor(1.0)}}}}  # DCP has made text of the keys
    for source, options, step, expected in (
        ("x.pt", {}, 40, whole),
        ("dcp", {"step": 3}, 3, textual),
        ("x.safetensors", {"key": "model"}, 0, {"model": weights}),
        ("hf", {"key": "model"}, 0, {"model": weights}),
    ):
        directory = tmp_path / f"from {source}"
        path = import_checkpoint(tmp_path / source, directory, **options)
        assert path.parent == directory
        with Checkpointer(directory) as checkpointer:
            found = checkpointer.load()
        assert found is not None
        assert found.step == step
        assert difference(_sorted(found.state), _sorted(expected)) == ""
        with pytest.raises(CheckpointError, match="has checkpoints of a run"):
            import_checkpoint(tmp_path / source, directory)


def _sorted(state: dict[Any, Any]) -> dict[Any, Any]:
    """A checkpoint does not keep the order of keys."""
    return {key: _sorted(state[key]) if isinstance(state[key], dict) else state[key] for key in sorted(state)}


def test_shards_are_those_with_numbers_of_their_own(tmp_path: Path) -> None:
    for keys, known in ((["0", "12"], [0, 12]), (["1", "01"], []), (["1", "x"], []), (["9" * 5000], [])):
        torch.save({"a": 1, "shards": {key: {"rng": index} for index, key in enumerate(keys)}}, tmp_path / "x.pt")
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        if not known:
            with pytest.raises(CheckpointError, match="'shards' cannot be a key"):
                import_checkpoint(tmp_path / "x.pt", directory)
            continue
        import_checkpoint(tmp_path / "x.pt", directory)
        found = Checkpointer(directory).load(shards=known)
        assert found is not None
        assert found.shards == {number: {"rng": index} for index, number in enumerate(known)}


def test_what_a_checkpoint_cannot_hold_is_named(tmp_path: Path) -> None:
    for value, words in (({"a": {"b": b"x"}}, "a/b"), ([1], "a dict"), ({1: 2}, "keys of text")):
        torch.save(value, tmp_path / "x.pt")
        with pytest.raises(CheckpointError, match=words):
            import_checkpoint(tmp_path / "x.pt", tmp_path / "c")
    path = import_checkpoint(tmp_path / "x.pt", tmp_path / "c", key="all/of it")
    assert path.name.startswith("step-00000000")
    with open_checkpoint(path) as reader:
        assert reader.manifest.values == {"all/of it/1": 2}
