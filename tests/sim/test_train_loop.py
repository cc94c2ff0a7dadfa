"""The whole loop on ranks that are threads: what starts, what is refused before anything is touched, what resumes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.checkpoint.foreign.export import Exported, export_checkpoint
from lockstep.checkpoint.generation import names_in
from lockstep.checkpoint.reader import open_checkpoint
from lockstep.comm.communicator import Communicator
from lockstep.comm.local_transport import LocalWorld
from lockstep.data.coverage import whole_tally
from lockstep.data.sample_log import sample_ids, samples_by_epoch
from lockstep.data.tokenizer import ByteTokenizer, load_tokenizer
from lockstep.errors import CollectiveMismatch
from lockstep.observe.profile.session import Profile
from lockstep.parallel.materialize import materialize
from lockstep.parallel.named_state import rank_of
from lockstep.testing.failures import RankFailed
from lockstep.testing.worlds import run_threads
from lockstep.train import loop
from lockstep.train.config import CheckpointConfig, DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from lockstep.train.console import Console
from lockstep.train.evaluate import parameter_digest
from lockstep.train.loop import TrainResult, prepare, train
from lockstep.train.metrics import StepLog
from lockstep.train.model import build_model
from lockstep.train.run_dir import Launch
from sharded_tensors import Alive

pytestmark = pytest.mark.usefixtures("ranks_share_a_process")


class StopAt:
    """Asks to stop when it is looked at for the `look`-th time."""

    def __init__(self, look: int) -> None:
        self.looks = 0
        self.look = look

    def arm(self) -> None:
        pass

    def is_set(self) -> bool:
        self.looks += 1
        return self.looks == self.look


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i}: {i * i % 97} bottles\n" for i in range(300)))
    return RunConfig(
        out=tmp_path / "out",
        model=ModelConfig(layers=1, heads=1, width=8, context=8),
        data=DataConfig(path=text, val_fraction=0.1),
        train=TrainConfig(steps=6, batch=12, microbatch=1, log_every=2, eval_every=4, sample_tokens=5),
        optim=OptimConfig(lr=0.01, min_lr=0.01, warmup_steps=0),
        checkpoint=CheckpointConfig(every=2, keep=9),
    )


def go(run: RunConfig, world_size: int, resume: str = "", stop_at: int = 0, stopper: int = 0) -> list[TrainResult]:
    def one(comm: Communicator) -> TrainResult:
        return train(run, comm, StopAt(stop_at if comm.rank == stopper else 0), resume)

    return run_threads(world_size, one, timeout_s=60)


def weights(path: Path) -> dict[str, torch.Tensor]:
    with open_checkpoint(path) as reader:
        return {name: reader.read(name) for name in reader.manifest.tensors if name.startswith("model/")}


def lines_of(run: RunConfig, log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.out / f"{log}.jsonl").read_text().splitlines()]


def steps_in(directory: Path) -> list[int]:
    """Of its checkpoints, the newest last."""
    return Checkpointer(directory).steps()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_world_trains_the_model_that_one_process_trains(run: RunConfig, world_size: int) -> None:
    alone = go(run, 1)[0]
    results = go(replace(run, out=run.out / "many"), world_size)
    assert len(set(results)) == 1
    assert results[0].val_loss == pytest.approx(alone.val_loss, rel=1e-5)
    expected, actual = weights(alone.checkpoint), weights(results[0].checkpoint)
    for fqn in expected:
        torch.testing.assert_close(actual[fqn], expected[fqn], rtol=1e-4, atol=1e-5)


def test_run_directory_holds_what_happened(run: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    result = go(run, 2)[0]
    said = capsys.readouterr().out
    assert {path.name for path in run.out.iterdir()} == {
        "checkpoints", "config.json", "tokenizer.json", "metrics.jsonl", "samples.jsonl", "sample.txt", "profile"
    }  # fmt: skip
    assert steps_in(run.out / "checkpoints") == [2, 4, 6]
    records = lines_of(run, "metrics")
    assert [(r["step"], "val_loss" in r) for r in records] == [
        (1, False), (2, False), (4, False), (4, True), (6, False), (6, True),
    ]  # fmt: skip
    assert [r["tokens"] for r in records if "tokens" in r] == [12 * 8 * step for step in (1, 2, 4, 6)]
    assert json.loads((run.out / "config.json").read_text())["model.width"] == 8
    assert f"proof  2 of 2 ranks hold the same weights: sha256 {result.digest}" in said
    assert said.count("validation after step") == 2
    assert "sample of what the model writes" in said


@pytest.mark.parametrize("stopper", [0, 1])
def test_stopped_run_goes_on_bit_for_bit(run: RunConfig, stopper: int, capsys: pytest.CaptureFixture[str]) -> None:
    whole = go(replace(run, out=run.out / "whole"), 2)[0]
    stopped = go(run, 2, stop_at=4, stopper=stopper)
    assert {(result.step, result.was_stopped, result.val_loss) for result in stopped} == {(3, True, None)}
    assert "--resume auto" in capsys.readouterr().out
    resumed = go(run, 2, resume="auto")[0]
    assert (resumed.step, resumed.was_stopped) == (6, False)
    assert resumed.digest == whole.digest
    assert resumed.val_loss == whole.val_loss
    other_world = go(replace(run, out=run.out / "three"), 3, resume=str(stopped[0].checkpoint))[0]
    assert other_world.val_loss == pytest.approx(whole.val_loss, rel=1e-5)


def test_resume_auto_without_a_checkpoint_starts_anew_and_says_so(
    run: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert go(run, 1, resume="auto")[0].step == 6
    assert "nothing to resume" in capsys.readouterr().out


def test_new_run_moves_the_older_one_aside_and_so_does_one_from_an_older_checkpoint(run: RunConfig) -> None:
    first = go(run, 1)[0]
    go(run, 1)
    assert (run.out / "older-1" / "checkpoints" / first.checkpoint.name).exists()
    again = go(run, 1, resume=str(run.out / "checkpoints" / "step-00000002-g1"))[0]
    assert again.digest == first.digest
    assert (run.out / "older-2" / "metrics.jsonl").exists()
    assert lines_of(run, "metrics")[0]["step"] == 4, "as in the first run"
    assert lines_of(run, "samples")[0]["step"] == 3


# ------------------------------------------------------------------ histories


def history_of(run: RunConfig) -> dict[str, list[dict[str, Any]]]:
    """Both logs, without what depends on the clock."""
    timed = ("tokens_per_s", "eta_s")
    return {
        log: [{key: value for key, value in line.items() if key not in timed} for line in lines_of(run, log)]
        for log in ("metrics", "samples")
    }


def short_epochs(run: RunConfig) -> RunConfig:
    """Six steps are three epochs and some."""
    text = run.out.parent / "short.txt"
    text.write_text("".join(f"{i}: {i * i % 97}\n" for i in range(30)))
    return with_option(run, "data", path=text)


def test_any_number_of_ranks_trains_on_the_same_samples_each_once(
    run: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    run = short_epochs(run)
    alone = replace(run, out=run.out.parent / "alone")
    go(alone, 1)
    capsys.readouterr()
    for world_size, stop_at in ((2, 3), (1, 2), (3, 0)):
        result = go(run, world_size, resume="auto", stop_at=stop_at)[0]
    assert result.step == 6
    samples = history_of(run)["samples"]
    assert samples == history_of(alone)["samples"]
    assert [line["step"] for line in samples] == [1, 2, 3, 4, 5, 6]
    epochs: dict[int, list[int]] = {}
    for line in samples:
        assert len(sample_ids(line)) == 12
        for epoch, ids in samples_by_epoch(line):
            epochs.setdefault(epoch, []).extend(ids)
    length = samples[0]["length"]
    assert length < 24
    assert all(sorted(ids) == list(range(length)) for epoch, ids in epochs.items() if epoch < max(epochs))
    verdicts = [line for line in history_of(run)["metrics"] if "epoch" in line]
    assert verdicts == [line for line in history_of(alone)["metrics"] if "epoch" in line]
    assert [line["epoch"] for line in verdicts] == sorted(epochs)[:-1]
    assert {line["digest"] for line in verdicts} == {whole_tally(length).digest().hex()}
    said = capsys.readouterr().out
    assert said.count(f"coverage of epoch 0: each of {length} samples exactly once") == 1
    assert f"coverage of epoch {max(epochs)}: each of {len(epochs[max(epochs)])} samples exactly once" in said


class Killed(BaseException):
    """Rank 0 ends here."""


def killed_at(number: int, patch: pytest.MonkeyPatch) -> None:
    """Before the write, flush or save of this number."""
    left = itertools.count(number, -1)

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(left) <= 0:
                raise Killed
            return original(*args, **kwargs)

        return call

    names = [(StepLog, "write"), (StepLog, "sync"), (Checkpointer, "save"), (Checkpointer, "save_async")]
    for owner, name in (*names, (loop, "write_sample"), (loop, "conclude")):
        patch.setattr(owner, name, counted(getattr(owner, name)))


@pytest.mark.parametrize("by_launcher", [True, False])
def test_killed_and_resumed_again_and_again_the_logs_are_those_of_one_run(run: RunConfig, by_launcher: bool) -> None:
    run = with_option(short_epochs(run), "checkpoint", background=by_launcher)
    alone = replace(run, out=run.out.parent / "alone")
    expected = go(alone, 1)[0]
    (run.out / "checkpoints").mkdir(parents=True)
    (run.out / "metrics.jsonl").write_text("of an older run")
    ended = 0
    for number in itertools.count():
        environ = {"TORCHELASTIC_RUN_ID": "one", "TORCHELASTIC_RESTART_COUNT": str(number)} if by_launcher else {}
        resume = "" if by_launcher or number == 0 else "auto"
        with pytest.MonkeyPatch.context() as patch:
            killed_at(3 + 5 * number, patch)  # comes further each time, and over the same step again
            try:
                result = train(run, alone_comm(), StopAt(0), resume, environ)
                break
            except Killed:
                ended += 1
    assert ended > 2
    assert result.digest == expected.digest
    assert history_of(run) == history_of(alone)
    older = (run.out / "older-1" / "metrics.jsonl").read_text()
    assert older == "of an older run"
    assert not (run.out / "older-2").exists()


def alone_comm() -> Communicator:
    return Communicator(LocalWorld(1).transports[0])


def with_option(run: RunConfig, section: str, **fields: Any) -> RunConfig:
    return replace(run, **{section: replace(getattr(run, section), **fields)})


def test_what_does_not_fit_is_refused_on_every_rank_and_nothing_is_touched(run: RunConfig, tmp_path: Path) -> None:
    go(run, 1)
    before = {path: path.stat().st_mtime_ns for path in run.out.rglob("*")}
    short, other, empty = (tmp_path / name for name in ("short.txt", "other.txt", "empty.txt"))
    short.write_text("short\n" * 15)
    other.write_text("other text\n" * 500)
    empty.write_text("")
    cases = [
        (with_option(run, "model", width=16), "auto", "ConfigError", "--model.width"),
        (with_option(run, "data", path=other), "auto", "ConfigError", "other text"),
        (with_option(run, "data", path=short), "", "DataError", "too short: .* one step trains on 12"),
        (with_option(run, "data", path=empty), "", "DataError", "empty"),
        (with_option(run, "data", val_fraction=0.0005), "", "DataError", "too short to validate on"),
        (run, str(tmp_path / "nowhere"), "ConfigError", "does not exist"),
        (run, str(tmp_path / "cache"), "ConfigError", "holds no checkpoint"),
        (run, str(short), "ConfigError", "holds no checkpoint"),
        (run, f"{run.out}:5", "ConfigError", "holds no checkpoint of step 5"),
        (with_option(run, "train", batch=7), "", "ConfigError", "cannot be divided|not divide"),
    ]
    for changed, resume, kind, words in cases:
        with pytest.raises(RankFailed, match=words) as caught:
            go(changed, 2, resume=resume)
        assert set(caught.value.errors) == {0, 1}
        assert kind in {error.kind for error in caught.value.errors.values()}
    assert {path: path.stat().st_mtime_ns for path in run.out.rglob("*")} == before
    with pytest.raises(RankFailed, match="choose another with --out") as caught:
        go(replace(run, out=short), 2)
    assert {error.kind for error in caught.value.errors.values()} == {"ConfigError"}


# ------------------------------------------------------------------ the same run, cut over the ranks


def cut(run: RunConfig, sharding: str, **fields: Any) -> RunConfig:
    """One microbatch, and widths that leave every rank whole vectors: then the order of all sums is that of `none`."""
    run = with_option(with_option(run, "model", width=32), "train", sharding=sharding, microbatch=None)
    return replace(run, **fields)


LLAMA = {"family": "llama32", "layers": 2, "heads": 4, "kv_heads": 2, "mlp_width": 64}


@pytest.mark.parametrize("sharding", ["optimizer", "gradients", "full", "hybrid"])
@pytest.mark.parametrize("model", [{}, LLAMA], ids=["gpt2", "llama32"])
def test_every_sharding_ends_with_the_same_weights(run: RunConfig, model: dict[str, Any], sharding: str) -> None:
    run = with_option(run, "model", **model)
    whole = go(cut(run, "none", out=run.out / "whole"), 2)[0]
    results = go(cut(run, sharding), 2)
    assert len(set(results)) == 1
    assert (results[0].digest, results[0].val_loss) == (whole.digest, whole.val_loss)
    assert (run.out / "sample.txt").read_text() == (run.out / "whole" / "sample.txt").read_text()


@pytest.mark.parametrize(("sharding", "resume"), [("gradients", False), ("full", False), ("full", True)])
def test_no_rank_ever_holds_more_than_its_pieces_and_one_module(run: RunConfig, sharding: str, resume: bool) -> None:
    """Also not where it goes on from a checkpoint that ranks with whole parameters made."""
    wide = with_option(cut(run, sharding), "model", layers=6)
    if resume:
        go(with_option(wide, "train", sharding="none"), 2, stop_at=2)

    def one(comm: Communicator) -> None:
        with Alive() as alive:
            job = prepare(wide, comm, Console(1, 0), "auto" if resume else "", Launch())
        job.profile.close()
        if job.logs:
            job.logs.close()
        whole = sum(param.numel() * param.itemsize for param in job.model.parameters())
        kept = (1 + 2 * resume) * whole / 4  # parameters, and AdamW's two moments
        assert 0.99 * kept < alive.most < kept + whole / 4

    run_threads(4, one)


@pytest.mark.parametrize("world_size", [3, 4])
def test_cut_model_of_any_world_is_that_of_one_process(run: RunConfig, world_size: int) -> None:
    """The last ranks have fewer batches to validate on than the others; microbatches add up where they are cut."""
    alone = go(run, 1)[0]
    result = go(with_option(replace(run, out=run.out / "many"), "train", sharding="full"), world_size)[0]
    assert result.val_loss == pytest.approx(alone.val_loss, rel=1e-5)


def test_run_goes_on_with_any_other_sharding_bit_for_bit(run: RunConfig) -> None:
    whole = go(cut(run, "none", out=run.out / "whole"), 2)[0]
    for step, sharding in enumerate(("none", "full", "optimizer", "gradients", "hybrid"), 1):
        stopped = go(cut(run, sharding), 2, resume="auto", stop_at=2)[0]
        assert (stopped.step, stopped.was_stopped) == (step, True)
    assert go(cut(run, "none"), 2, resume="auto")[0].digest == whole.digest


def test_run_goes_on_with_another_sharding_on_other_ranks(run: RunConfig) -> None:
    whole = go(cut(run, "none", out=run.out / "whole"), 1)[0]
    for sharding, world_size in (("full", 2), ("optimizer", 3), ("hybrid", 4), ("none", 2), ("gradients", 3)):
        stopped = go(cut(run, sharding), world_size, resume="auto", stop_at=2)[0]
    assert stopped.step == 5
    resumed = go(cut(run, "full", out=run.out / "other"), 1, resume=str(stopped.checkpoint))[0]
    assert resumed.val_loss == pytest.approx(whole.val_loss, rel=1e-5)


@pytest.mark.parametrize("sharding", ["none", "full"])
@pytest.mark.parametrize("model", [{"dropout": 0.1}, LLAMA], ids=["gpt2", "llama32"])
def test_transformers_builds_the_model_from_an_export_alone(
    run: RunConfig, model: dict[str, Any], sharding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # transformers' bar: a thread of its own
    run = with_option(with_option(run, "model", width=16, **model), "train", sharding=sharding)
    result = go(run, 3)[0]
    with open_checkpoint(result.checkpoint) as reader:
        exported = export_checkpoint(reader, tmp_path / "exported")
    assert exported.files == ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"]
    theirs, report = AutoModelForCausalLM.from_pretrained(exported.path, output_loading_info=True)
    assert not any(report.values()), report
    assert parameter_digest(theirs) == result.digest  # every bit of parameters and buffers, by name
    ours: Any = materialize(build_model(run.model, ByteTokenizer()), seed=0).eval()
    trained = {name.removeprefix("model/"): tensor for name, tensor in weights(result.checkpoint).items()}
    ours.load_state_dict({**trained, "lm_head.weight": ours.get_input_embeddings().weight}, strict=True)
    tokens = torch.arange(8).view(1, 8)
    assert torch.equal(theirs(input_ids=tokens).logits, ours(input_ids=tokens).logits)
    written = theirs.generate(tokens[:, :3], max_new_tokens=4, do_sample=False)  # with a cache of keys and values
    assert torch.equal(written, ours.generate(tokens[:, :3], max_new_tokens=4, do_sample=False))


@pytest.mark.parametrize(("tokens", "model"), [("bytes", {}), ("bpe", {}), ("bpe", LLAMA)], ids=str)
def test_transformers_makes_the_tokens_of_the_training_from_an_export_alone(
    run: RunConfig, tokens: Literal["bytes", "bpe"], model: dict[str, Any], tmp_path: Path
) -> None:
    run = replace(with_option(run, "model", width=16, **model), data=replace(run.data, tokens=tokens, vocab_size=300))
    result = go(run, 2)[0]
    ours = load_tokenizer(tokens, (run.out / "tokenizer.json").read_text())

    def exported(name: str) -> Exported:
        with open_checkpoint(result.checkpoint) as reader:
            return export_checkpoint(reader, tmp_path / name)

    theirs = AutoTokenizer.from_pretrained(exported("whole").path)
    text = (
        bytes(range(256)).decode("latin-1")
        + " 13 bottles , don't\r\n\t h\N{LATIN SMALL LETTER E WITH ACUTE} \N{SNOWMAN}"
    )
    ids = ours.encode([text.encode()])[0].tolist()
    assert theirs(text)["input_ids"] == ids
    assert theirs.decode(ids) == text
    assert (len(theirs), theirs.eos_token_id, theirs.bos_token_id) == (ours.vocab_size, *[ours.end_of_text] * 2)
    assert theirs("a<|endoftext|>")["input_ids"][-1] == ours.end_of_text
    (run.out / "tokenizer.json").write_text("{}")
    assert exported("another").files == ["model.safetensors", "config.json"]
    (run.out / "tokenizer.json").unlink()
    assert exported("none").files == ["model.safetensors", "config.json"]


def test_only_the_newest_checkpoints_are_kept(run: RunConfig) -> None:
    kept = replace(run, checkpoint=CheckpointConfig(every=1, keep=3))
    go(kept, 2, stop_at=4)
    go(with_option(kept, "train", sharding="full"), 2, resume="auto", stop_at=3)
    assert [str(name) for name in names_in(run.out / "checkpoints")] == [
        "step-00000005-g2", "step-00000004-g2", "step-00000003-g1"
    ]  # fmt: skip


def test_folder_of_another_model_or_a_damaged_one_is_refused(run: RunConfig) -> None:
    """Files are covered above."""
    stopped = go(cut(run, "full"), 2, stop_at=2)[0]
    with pytest.raises(RankFailed, match=r"--model\.width") as caught:
        go(with_option(cut(run, "full"), "model", width=16), 2, resume="auto")
    assert {error.kind for error in caught.value.errors.values()} == {"ConfigError"}
    piece = stopped.checkpoint / "rank-00001.safetensors"
    piece.write_bytes(piece.read_bytes()[:-1])
    for sharding in ("none", "full"):
        with pytest.raises(RankFailed, match=r"rank-00001\.safetensors is damaged") as caught:
            go(cut(run, sharding), 2, resume=str(stopped.checkpoint))
        assert {error.kind for error in caught.value.errors.values()} == {"CheckpointDamaged"}


def test_replicas_that_drifted_are_not_saved(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = loop.clip_gradient

    def flip_on_rank_1(replica: torch.nn.Module, limit: float, step: int) -> float:
        if step == 2 and rank_of(replica) == 1:
            next(replica.parameters()).detach().view(-1)[0].neg_()
        return honest(replica, limit, step)

    monkeypatch.setattr(loop, "clip_gradient", flip_on_rank_1)
    monkeypatch.setattr(loop.gc, "freeze", lambda: None)  # so that what the error refers to is collected
    with pytest.raises(RankFailed, match=r"rank 1 no longer holds the same model as ranks 0, 2: at step 4, .* step 2"):
        go(run, 3)
    assert steps_in(run.out / "checkpoints") == [2]


def test_nothing_is_saved_once_a_guard_has_found_what_is_wrong(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the step is not over, at whose end that is raised."""

    def found(profile: Profile) -> None:
        if profile.clock.step == 3:
            raise CollectiveMismatch("MISMATCH in step 4.  Culprit: rank 1")

    monkeypatch.setattr(Profile, "raise_if_found", found)
    monkeypatch.setattr(loop.gc, "freeze", lambda: None)  # so that what the error refers to is collected
    with pytest.raises(RankFailed, match="MISMATCH in step 4"):
        go(run, 2)
    assert steps_in(run.out / "checkpoints") == [2]
