"""Safetensors files into plain, sharded and meta models; export and Hugging Face's own loading agree with it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from lockstep.checkpoint import weights
from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.checkpoint.foreign.export import export_checkpoint
from lockstep.checkpoint.reader import open_checkpoint
from lockstep.checkpoint.weights import load_safetensors
from lockstep.comm.communicator import Communicator
from lockstep.errors import CheckpointError
from lockstep.parallel.materialize import materialize
from lockstep.testing.worlds import run_threads
from sharded_tensors import cut_model, expected_part, local_parts, mesh_of


@pytest.fixture(autouse=True)
def _no_progress_bars() -> Iterator[None]:
    """Each starts a thread that stays."""
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def gpt2() -> Any:
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=61, n_positions=8, n_embd=16, n_layer=1, n_head=2, **tokens))


def llama() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, num_hidden_layers=1, **sizes))


class Small(nn.Module):
    """With a tie, a buffer, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(3)


def on_meta(make: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return make()


def small_file(path: Path, **changes: Tensor | None) -> Path:
    torch.manual_seed(0)
    tensors = {name: t.clone() for name, t in Small().state_dict().items() if name != "head.weight"}
    tensors["norm.running_mean"] = torch.tensor([1.0, 2.0, 3.0])
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, path)
    return path


def fill_and_compare(
    comm: Communicator, make: Callable[[], Any], source: Path, expected: Any, shape: tuple[int, ...], dim: int
) -> None:
    mesh = mesh_of(shape, comm.rank)
    model = cut_model(on_meta(make), mesh, dim)
    materialize(model, parameters=False)
    assert load_safetensors(model, source) == ([], [])
    wholes = dict(expected.named_parameters(remove_duplicate=False))
    for name, local in local_parts(dict(model.named_parameters(remove_duplicate=False))).items():
        assert torch.equal(local, expected_part(wholes[name], mesh, dim)), name
    for (name, ours), (_, theirs) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("make", [gpt2, llama], ids=lambda make: make.__name__)
def test_a_hugging_face_folder(make: Callable[[], Any], tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = make()
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="8KB")
    assert (tmp_path / "many" / "model.safetensors.index.json").exists()
    for folder, shape, dim in (("one", (1,), 0), ("many", (3,), 0), ("many", (2, 2), 1)):
        expected = make().from_pretrained(tmp_path / folder)  # not in the ranks: it patches its own classes meanwhile
        run_threads(math.prod(shape), fill_and_compare, make, tmp_path / folder, expected, shape, dim)


def save_model(comm: Communicator, make: Callable[[], Any], directory: Path) -> Path:
    model = cut_model(on_meta(make), mesh_of((3,), comm.rank))
    materialize(model, seed=4)
    return Checkpointer(directory, comm).save(1, {"model": model})


@pytest.mark.parametrize("make", [gpt2, llama], ids=lambda make: make.__name__)
def test_an_export_is_read_by_transformers_and_by_us(make: Callable[[], Any], tmp_path: Path) -> None:
    expected = materialize(on_meta(make), seed=4)
    path = run_threads(3, save_model, make, tmp_path / "checkpoints")[0]
    folder = tmp_path / "exported"
    expected.config.save_pretrained(folder)
    with open_checkpoint(path) as reader:
        export_checkpoint(reader, folder / "model.safetensors", form="safetensors")
    theirs, ours = make().from_pretrained(folder), make()
    load_safetensors(ours, folder)
    for name, param in expected.named_parameters(remove_duplicate=False):
        assert torch.equal(theirs.get_parameter(name), param), name
        assert torch.equal(ours.get_parameter(name), param), name


# ------------------------------------------------------------------ what reads how much, and where


def test_only_the_rows_of_this_rank_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: dict[str, int] = {}

    class Slice:
        def __init__(self, name: str, inner: Any) -> None:
            self.name, self.inner = name, inner

        def __getitem__(self, index: Any) -> Tensor:
            found = self.inner[index]
            read[self.name] = read.get(self.name, 0) + found.numel()
            return found

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    class File:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __enter__(self) -> File:
            self.inner.__enter__()
            return self

        def __exit__(self, *exc_info: object) -> None:
            self.inner.__exit__(*exc_info)

        def keys(self) -> list[str]:
            return self.inner.keys()

        def get_slice(self, name: str) -> Slice:
            return Slice(name, self.inner.get_slice(name))

    inner = weights.open_tensors
    monkeypatch.setattr(weights, "open_tensors", lambda path: File(inner(path)))
    model = cut_model(Small(), mesh_of((2,), 1))
    load_safetensors(model, small_file(tmp_path / "w.safetensors"))
    assert read["embedding.weight"] == 2 * 3
    assert read["norm.weight"] == 1
    assert read["norm.running_mean"] == 3


def test_a_meta_model_gets_its_memory_and_ties_stay(tmp_path: Path) -> None:
    path = small_file(tmp_path / "w.safetensors")
    model = on_meta(Small)
    assert load_safetensors(model, path) == ([], [])
    assert model.head.weight is model.embedding.weight
    for name, tensor in load_file(path).items():
        assert torch.equal(model.state_dict()[name], tensor)


# ------------------------------------------------------------------ keys and dtypes


def test_everything_that_does_not_fit_is_named(tmp_path: Path) -> None:
    path = small_file(
        tmp_path / "w.safetensors",
        norm__weight=None,
        extra=torch.ones(1),
        norm__bias=torch.ones(4),
        norm__running_var=torch.ones(3, dtype=torch.float16),
    )
    model = Small()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_safetensors(model, path)
    for words in ("missing: norm.weight", "unexpected: extra", "norm.bias is [3], the file has [4]", "torch.float16"):
        assert words in str(caught.value)
    assert "embedding" not in str(caught.value)
    assert "head" not in str(caught.value)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), "nothing was written"


def test_not_strict_and_cast(tmp_path: Path) -> None:
    path = small_file(
        tmp_path / "w.safetensors", norm__weight=None, extra=torch.ones(1), norm__bias=torch.ones(3).bfloat16() / 3
    )
    model = Small()
    with pytest.raises(CheckpointError, match=r"norm\.bias is torch\.float32.*bfloat16.*cast=True"):
        load_safetensors(model, path, strict=False)
    assert load_safetensors(model, path, strict=False, cast=True) == (["norm.weight"], ["extra"])
    assert torch.equal(model.norm.bias, (torch.ones(3).bfloat16() / 3).float())
    assert model.norm.bias.dtype == torch.float32


def test_key_map(tmp_path: Path) -> None:
    path = small_file(tmp_path / "w.safetensors", norm__weight=None, ln_f=torch.full((3,), 9.0), junk=torch.ones(1))
    model = Small()
    load_safetensors(model, path, key_map={"ln_f": "norm.weight", "junk": None})
    assert model.norm.weight.tolist() == [9.0] * 3
    model = Small()
    load_safetensors(model, path, key_map=lambda key: {"ln_f": "norm.weight", "junk": None}.get(key, key))
    assert model.norm.weight.tolist() == [9.0] * 3
    with pytest.raises(CheckpointError, match=r"'norm\.bias' and 'norm\.running_var' the same name"):
        load_safetensors(model, path, key_map=lambda key: "x" if key in ("norm.bias", "norm.running_var") else key)


def test_nothing_is_left_without_a_value(tmp_path: Path) -> None:
    path = small_file(tmp_path / "w.safetensors", norm__weight=None)
    model = on_meta(Small)
    with pytest.raises(CheckpointError, match=r"norm\.weight, which are on the meta device.*materialize"):
        load_safetensors(model, path, strict=False)
    assert model.norm.weight.is_meta
    llama().save_pretrained(tmp_path / "llama")
    with pytest.raises(CheckpointError, match=r"rotary_emb\.inv_freq.*parameters=False"):
        load_safetensors(on_meta(llama), tmp_path / "llama")


# ------------------------------------------------------------------ files that are not what they should be


@pytest.mark.parametrize("content", [None, b"", b"hello" * 10, b"\xff" * 64])
def test_files_that_are_no_weights(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"w\.safetensors"):
        load_safetensors(Small(), path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_safetensors(Small(), tmp_path)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": {"a": "../secret.safetensors"}}, "only names of files in its own folder"),
        ({"weight_map": {"a": "/etc/secret.safetensors"}}, "only names of files in its own folder"),
        ({"weight_map": {"a": "link.safetensors"}}, "link out of its folder"),
        ({"weight_map": {"a": "absent.safetensors"}}, "cannot read"),
        ({"weight_map": {"a": 3}}, "3"),
        ({"weight_map": {"a": "here.safetensors"}}, "places a in files that do not have them"),
        ({"weight_map": ["a"]}, "cannot read"),
        ({}, "cannot read"),
        ("text", "cannot read"),
    ],
)
def test_an_index_cannot_lead_out_of_its_folder_nor_lie(index: Any, words: str, tmp_path: Path) -> None:
    small_file(tmp_path / "secret.safetensors")
    folder = tmp_path / "folder"
    folder.mkdir()
    small_file(folder / "here.safetensors")
    (folder / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=words):
        load_safetensors(Small(), folder)


def test_links_inside_the_folder_are_followed(tmp_path: Path) -> None:
    small_file(tmp_path / "blob")
    (tmp_path / "model.safetensors").symlink_to("blob")
    assert load_safetensors(Small(), tmp_path) == ([], [])
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "model.safetensors").symlink_to(tmp_path / "blob")
    with pytest.raises(CheckpointError, match="link out of its folder"):
        load_safetensors(Small(), tmp_path / "outside")
