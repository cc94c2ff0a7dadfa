"""The run's record: what is refused, how a batch is cut, what may change on resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import ConfigError
from lockstep.recipes import gpt2, llama32
from lockstep.train.config import (
    ModelConfig,
    RunConfig,
    TrainConfig,
    changes_on_resume,
    check,
    flatten,
    microbatches_per_rank,
    read_resume,
    to_json,
)


def with_option(name: str, value: Any) -> RunConfig:
    section, _, field = name.rpartition(".")
    config = RunConfig()
    if not section:
        return replace(config, **{field: value})
    return replace(config, **{section: replace(getattr(config, section), **{field: value})})


@pytest.mark.parametrize("recipe", [gpt2.tiny, gpt2.gpt2_124m, llama32.tiny, llama32.llama32_1b])
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_recipes_can_be_trained(recipe: Any, world_size: int) -> None:
    check(recipe(), world_size)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("model.layers", 0, "at least 1"),
        ("model.heads", 3, "does not divide --model.width 64"),
        ("model.kv_heads", 0, "at least 1"),
        ("model.kv_heads", 1, "GPT-2 has as many as --model.heads 2"),
        ("model.kv_heads", 4, "--model.kv_heads 4 does not divide --model.heads 2"),
        ("model.mlp_width", 0, "at least 1"),
        ("model.dropout", 1.0, "below 1"),
        ("model.dropout", -0.1, "below 1"),
        ("data.val_fraction", 0.0, "nothing to validate"),
        ("data.path", Path("no/such/file"), "does not exist"),
        ("train.steps", 0, "at least 1"),
        ("train.batch", 7, "--train.batch 8"),
        ("train.microbatch", 5, "--train.microbatch 4"),
        ("train.microbatch", 0, "at least 1"),
        ("train.log_every", 0, "at least 1"),
        ("optim.lr", float("nan"), "finite"),
        ("optim.clip_norm", -1.0, "at least 0"),
        ("checkpoint.keep", 0, "at least 1"),
        ("seed", -1, "at least 0"),
    ],
)
def test_impossible_value_is_refused_by_name(name: str, value: Any, words: str) -> None:
    check(RunConfig(), 2)
    with pytest.raises(ConfigError, match=f"--{name}") as caught:
        check(with_option(name, value), 2)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_heads_of_llama_are_shared_evenly_and_have_pairs() -> None:
    model = ModelConfig("llama32", heads=4, kv_heads=2, width=24)
    check(replace(RunConfig(), model=model), 1)
    with pytest.raises(ConfigError, match=r"--model\.kv_heads 3 does not divide --model\.heads 4"):
        check(replace(RunConfig(), model=replace(model, kv_heads=3)), 1)
    with pytest.raises(ConfigError, match=r"--model\.heads 4 gives each 5 of --model\.width: .* an even number"):
        check(replace(RunConfig(), model=replace(model, width=20)), 1)


@given(batch=st.integers(1, 200), microbatch=st.none() | st.integers(1, 50), world_size=st.integers(1, 16))
def test_batch_is_cut_evenly_or_refused(batch: int, microbatch: int | None, world_size: int) -> None:
    train = TrainConfig(batch=batch, microbatch=microbatch)
    fits = batch % world_size == 0 and (batch // world_size) % (microbatch or 1) == 0
    if not fits:
        with pytest.raises(ConfigError, match="try --train"):
            microbatches_per_rank(train, world_size)
        return
    count = microbatches_per_rank(train, world_size)
    assert count * world_size * (microbatch or batch // world_size) == batch


@given(batch=st.integers(1, 200), world_size=st.integers(1, 16))
def test_suggested_batch_fits(batch: int, world_size: int) -> None:
    try:
        microbatches_per_rank(TrainConfig(batch=batch), world_size)
    except ConfigError as error:
        suggested = int(str(error).split()[-1])
        assert microbatches_per_rank(TrainConfig(batch=suggested), world_size) == 1


def test_json_has_every_option_once_and_only_json_values() -> None:
    config = with_option("data.path", Path("text"))
    values = to_json(config)
    assert list(values) == [name for name, _ in flatten(config)]
    assert values["data.path"] == "text"
    assert all(isinstance(value, str | int | float | None) for value in values.values())


@pytest.mark.parametrize(
    ("name", "value"),
    [("model.width", 128), ("seed", 1), ("data.tokens", "bpe"), ("data.val_fraction", 0.1)],
)
def test_resume_refuses_another_model_or_other_tokens(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"--{name}"):
        changes_on_resume(to_json(RunConfig()), with_option(name, value))


def test_resume_names_what_may_change() -> None:
    saved = to_json(RunConfig())
    assert changes_on_resume(saved, RunConfig()) == []
    assert changes_on_resume(saved, with_option("optim.lr", 0.5)) == ["optim.lr: 0.003 -> 0.5"]
    assert changes_on_resume(saved, with_option("train.batch", 96)) == ["train.batch: 48 -> 96"]
    assert changes_on_resume(saved, with_option("train.microbatch", 4)) == ["train.microbatch: None -> 4"]
    assert changes_on_resume(saved, with_option("out", Path("elsewhere"))) == []
    del saved["train.sharding"]  # made before there was such an option
    assert changes_on_resume(saved, RunConfig()) == []


def test_where_a_run_goes_on_from_is_a_path_that_is_there_with_or_without_a_step(tmp_path: Path) -> None:
    (tmp_path / "a:7").mkdir()
    assert read_resume(str(tmp_path)) == (tmp_path, None)
    assert read_resume(f"{tmp_path}:12") == (tmp_path, 12)
    assert read_resume(str(tmp_path / "a:7")) == (tmp_path / "a:7", None)
    for missing in ("foo", "foo:3", f"{tmp_path}:x"):
        with pytest.raises(ConfigError, match=r"does not exist; `--resume auto` finds the newest"):
            read_resume(missing)
