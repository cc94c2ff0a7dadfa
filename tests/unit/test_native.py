"""The methods that are in C where there is a compiler: built, alike with those in Python, leaving nothing behind."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import weakref
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from native_stories import Story

from lockstep.comm.communicator import Communicator
from lockstep.errors import ConfigError, PeerFailed, PeerLost
from lockstep.observe.flight import FlightRecorder
from lockstep.observe.followed_model import Model
from lockstep.observe.profile.phases import PHASES, outermost, sums_of
from lockstep.observe.profile.step_clock import StepClock
from lockstep.observe.recording import GuardLayer, RecordedWork
from lockstep.observe.settings import NATIVE, GuardSettings
from lockstep.observe.step_ends import Passing
from lockstep.observe.torch_optimizers import Optimizers
from lockstep.observe.torch_training import TrainingWatch
from recorded_ranks import Silent, Watcher

ROOT = Path(__file__).resolve().parents[2]
STORIES = 40
IN_C = [FlightRecorder.enter, FlightRecorder.stood, StepClock.switch]
IN_C += [GuardLayer.submit, RecordedWork.wait, RecordedWork.__del__, Passing.passed, outermost, sums_of]
IN_C += [TrainingWatch.stepped, Optimizers.step_done]
CAN_BUILD = (
    sys.platform == "linux" and bool(shutil.which("cc")) and Path(sysconfig.get_path("include"), "Python.h").exists()
)
needs_compiler = pytest.mark.skipif(not CAN_BUILD, reason="needs Linux, a C compiler and the headers of this Python")


def stories(folder: Path, word: str, name: str = "native_stories.py") -> list[str]:
    folder.mkdir()
    program = [sys.executable, str(Path(__file__).with_name(name)), str(folder), str(STORIES)]
    paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "src")])
    environ = {**os.environ, NATIVE: word, "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(program, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for mistake in ("NameError", "AttributeError"):  # of the story's own, and alike in both
        assert mistake not in done.stdout
    return done.stdout.splitlines()


@needs_compiler
@pytest.mark.skipif(os.environ.get(NATIVE) == "off", reason=f"{NATIVE}=off")
def test_they_are_built_of_these_sources() -> None:
    """Else: make install."""
    assert all(hasattr(method, "__wrapped__") for method in IN_C)


@needs_compiler
def test_a_program_is_recorded_alike_in_c_and_in_python(tmp_path: Path) -> None:
    """Failures, threads, steps that are only counted, tensors of another shape: all that one of them has, both have."""
    (is_c, *ours), (is_c_too, *theirs) = stories(tmp_path / "c", "on"), stories(tmp_path / "python", "off")
    assert (is_c, is_c_too) == ("True", "False")
    assert len(ours) == len(theirs) == STORIES
    for one, other in zip(ours, theirs, strict=True):
        assert json.loads(one) == json.loads(other)
    assert len(set(ours)) == STORIES
    for word in ("rank 1 failed", "Ctrl-C", "refused"):
        assert word in "".join(ours)


@needs_compiler
def test_calls_of_torch_are_recorded_alike_in_c_and_in_python(tmp_path: Path) -> None:
    """From lines of the user's and of torch's, in groups, threads and steps, and backwards; also what fails of them."""
    told = [stories(tmp_path / word, word, "torch_stories.py") for word in ("on", "off")]
    (is_c, *ours, blocks, calls), (is_c_too, *theirs, _, calls_too) = told
    assert (is_c, is_c_too) == ("True", "False")
    assert len(ours) == len(theirs) == STORIES
    for one, other in zip(ours, theirs, strict=True):
        assert json.loads(one) == json.loads(other)
    assert len(set(ours)) == STORIES
    for word in ("saw RuntimeError", "started by torch's C++", "reduce_scatter", "root=0"):
        assert word in "".join(ours)
    assert int(blocks) < 500  # of 9000 calls, of which 1000 have failed
    assert calls.split() == ["0"] * 4
    assert "0" not in calls_too.split()


def blocks_of(comm: Communicator, watcher: Watcher, transport: Silent, times: int) -> int:
    """How many blocks Python holds after so many rounds of operations that end well, and of such that fail."""
    tensors = [torch.ones(size) for size in (1, 2, 3)]
    for number in range(times):
        comm.all_reduce(tensors[number % len(tensors)])
        work = comm.all_reduce(tensors[0], async_op=True)
        work.wait()
        work.wait()
        comm.all_reduce(tensors[0], async_op=True)
        transport.error = PeerLost("rank 1 is gone", 1)
        failing = comm.all_reduce(tensors[0], async_op=True)
        for call in (failing.wait, partial(comm.all_reduce, tensors[0])):
            with pytest.raises(PeerFailed, match="rank 1 failed"):
                call()
        transport.error = None
        watcher.asked.clear()
        transport.works.clear()
    gc.collect()
    return sys.getallocatedblocks()


def blocks_more(step: Callable[[], None], told: list[object]) -> int:
    """How many blocks Python holds more after 5000 steps than after 300. told: emptied before they are counted."""

    def blocks_after(steps: int) -> int:
        for _ in range(steps):
            step()
        told.clear()
        gc.collect()
        return sys.getallocatedblocks()

    blocks_after(300)
    before, after = blocks_after(300), blocks_after(5000)
    return after - before


@needs_compiler
@pytest.mark.skipif(os.environ.get(NATIVE) == "off", reason=f"{NATIVE}=off")
def test_steps_are_added_up_alike_in_c_and_in_python() -> None:
    """Waits within others, marks at one moment; and what is no mark is refused as ever."""
    random, plain_outermost, plain_sums = Random(3), outermost.__wrapped__, sums_of.__wrapped__
    for _ in range(2000):
        times = sorted(random.randrange(60) for _ in range(random.randrange(1, 12)))
        marks = [(random.randrange(len(PHASES)), at) for at in times]
        ends = sorted(random.randrange(80) for _ in range(random.randrange(9)))
        waits = [(number, random.randrange(ended + 1), ended) for number, ended in enumerate(ends)]
        kept = outermost(waits, times[0])
        assert kept == plain_outermost(waits, times[0])
        assert sums_of(marks, kept, 80) == plain_sums(marks, kept, 80)
    with pytest.raises(ValueError):
        outermost([(1, 2)], 0)
    with pytest.raises(IndexError):
        sums_of([(len(PHASES), 0)], [], 9)
    assert outermost([], 0) == []
    assert sums_of([(1, 2**62)], [], 2**70) == plain_sums([(1, 2**62)], [], 2**70)


class Trained:
    """What `TrainingWatch.stepped` works on: models with forwards or without, one that goes, replicas that are due."""

    def __init__(self, recorder: FlightRecorder, random: Random) -> None:
        self.told: list[object] = []
        self.modules = [torch.nn.Linear(2, 2, bias=bool(number)) for number in range(random.randrange(3))]
        self._models = {
            number: Model(module, f"{number}", "ddp", named=[*module.named_parameters()])
            for number, module in enumerate(self.modules)
        }
        self.optimizers = [torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1) for _ in range(2)]
        self.replicas = SimpleNamespace(is_on=random.random() < 0.8, stride=random.choice([1, 4, 100]), checked=0)
        self.replicas.leader, self.replicas.lead = weakref.ref(self.optimizers[0]), self.lead
        self.models = SimpleNamespace(end_step=self.end_step)
        recorder.set_step(random.choice([0, 7]))  # the program may go on from a checkpoint
        self._guard, self._step, self._stamped, self._pending = SimpleNamespace(recorder=recorder), 0, set[int](), None

    def lead(self, optimizer: torch.optim.Optimizer) -> None:
        self.told.append("another one leads")
        self.replicas.leader = weakref.ref(optimizer)

    def end_step(self, step: int, model: Model) -> bool:
        """As `ModelFacts.end_step`; it is told where that does something."""
        has_forward = sum(model.forwards[:2]) > 0
        if step == 0 or model.module() is None or has_forward:
            self.told.append(("ended", step, model.team, *model.forwards))
        if has_forward:
            model.told, model.is_forwarded = [*model.forwards], True
        return model.is_forwarded and not has_forward

    def _plan(self, unseen: list[Model], before: int, step: int) -> None:
        self.told.append(("planned", [model.team for model in unseen], before, step))
        self.replicas.checked, self._pending = step, len(unseen)

    def _count_on(self) -> None:
        self.told.append("counted on")

    def seen(self) -> list[object]:
        """All that a step has left."""
        firsts = [module.weight.data_ptr() for module in self.modules]
        stamps = [
            [(step, len(version), [number for number in version if number < 1000]) for step, version in model.stamps]
            for model in self._models.values()
        ]
        forwards = [(model.forwards, model.told, model.is_forwarded) for model in self._models.values()]
        are_at = [model.stamps[1][1][:1] == [at] for model, at in zip(self._models.values(), firsts, strict=True)]
        stamped = [id(one) in self._stamped for one in self.optimizers]
        led = self.replicas.leader() is self.optimizers[0]
        return [stamps, forwards, are_at, stamped, led, self._step, self._pending, self.told]

    def act(self, random: Random, stepped: Callable[..., None]) -> None:
        """A step: forwards, what the optimizer changes, and that it has ended, or has not."""
        for model in self._models.values():
            if random.random() < 0.3:
                model.forwards[random.randrange(2)] += 1
            if random.random() < 0.03:
                model.module = cast("weakref.ref[Any]", lambda: None)
        for module in self.modules:
            with torch.no_grad():
                module.weight.add_(1)
        if random.random() < 0.8:
            self._guard.recorder.set_step(self._guard.recorder.step + 1)
        stepped(self, self.optimizers[random.random() < 0.1], random.random() < 0.9)


@needs_compiler
@pytest.mark.skipif(os.environ.get(NATIVE) == "off", reason=f"{NATIVE}=off")
def test_a_step_leaves_the_models_alike_in_c_and_in_python(tmp_path: Path) -> None:
    for seed in range(60):
        seen: list[list[object]] = []
        for stepped in (TrainingWatch.stepped, TrainingWatch.stepped.__wrapped__):
            random, recorder = Random(seed), FlightRecorder(tmp_path / f"{seed}-{len(seen)}", 0, 1)
            trained = Trained(recorder, random)
            for _ in range(20):
                trained.act(random, stepped)
            seen.append(trained.seen())
            recorder.close()
        assert seen[0] == seen[1]


@needs_compiler
@pytest.mark.skipif(os.environ.get(NATIVE) == "off", reason=f"{NATIVE}=off")
def test_a_step_leaves_nothing_of_its_models_behind(tmp_path: Path) -> None:
    """The usual one, without Python; and one whose tensor cannot say where it lies, which Python raises then."""
    called: list[str] = []
    recorder = FlightRecorder(tmp_path / "flight", 0, 1)
    trained = Trained(recorder, Random(7))
    trained.replicas.is_on, stepped = False, partial(TrainingWatch.stepped, cast("Any", trained))
    assert trained.modules

    def step() -> None:
        recorder.set_step(recorder.step + 1)
        stepped(trained.optimizers[0], True)

    assert blocks_more(step, trained.told) < 100
    sys.setprofile(lambda frame, event, _: called.append(f"{event} {frame.f_code.co_name}"))
    recorder.step += 1
    stepped(trained.optimizers[0], True)
    sys.setprofile(None)
    assert [one for one in called if one.startswith("call ")] == []
    assert trained._step == recorder.step
    recorder.set_step(recorder.step + 1)
    trained._models[0].sample = [lambda: torch.sparse_coo_tensor(torch.zeros(1, 1), torch.ones(1), (2,))]
    with pytest.raises((NotImplementedError, RuntimeError)):
        stepped(trained.optimizers[0], True)
    recorder.close()


def test_they_leave_nothing_behind(tmp_path: Path) -> None:
    """Nor does what has failed."""
    watcher, transport = Watcher(tmp_path, 0, 2), Silent(2)
    comm = Communicator(GuardLayer(transport, watcher))
    blocks_of(comm, watcher, transport, 100)
    before = blocks_of(comm, watcher, transport, 100)
    after = blocks_of(comm, watcher, transport, 1000)
    assert after - before < 500  # of 5000 operations
    watcher.give_back()


def test_steps_leave_nothing_behind(tmp_path: Path) -> None:
    story = Story(tmp_path, 1)
    story.recorder.left.clear()

    def step() -> None:
        story.pass_step()
        story.recorder.take_up()

    assert blocks_more(step, story.told) < 500
    story.give_back()


def test_who_gives_the_layers_up_gives_all_up(tmp_path: Path) -> None:
    watcher = Watcher(tmp_path, 0, 2)
    layer = GuardLayer(Silent(2), watcher)
    comm = Communicator(layer)
    for _ in range(3):
        comm.all_reduce(torch.ones(3), async_op=True).wait()
    counts = sys.getrefcount(layer), sys.getrefcount(watcher.recorder)
    for _ in range(100):
        comm.all_reduce(torch.ones(3), async_op=True).wait()
        comm.all_reduce(torch.ones(3))
    assert (sys.getrefcount(layer), sys.getrefcount(watcher.recorder)) == counts
    is_there = weakref.ref(layer)
    del layer, comm
    assert is_there() is None
    watcher.give_back()


def test_no_other_word_is_taken() -> None:
    assert GuardSettings.of({NATIVE: "off"}) == GuardSettings.of({NATIVE: "on"}) == GuardSettings.of({})
    with pytest.raises(ConfigError, match="LOCKSTEP_NATIVE='no': it is on or off"):
        GuardSettings.of({NATIVE: "no"})


@needs_compiler
@pytest.mark.parametrize(("compiler", "name"), [("cc", "linux"), ("false", "py3-none-any")])
def test_a_wheel_has_them_or_is_for_every_machine(tmp_path: Path, compiler: str, name: str) -> None:
    """Without a compiler that works the library is Python, whole."""
    copied = tmp_path / "copy"
    shutil.copytree(ROOT / "src", copied / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for each in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / each, copied)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q"]
    environ = {**os.environ, "CC": compiler, NATIVE: "on"}
    done = subprocess.run([*build, "-w", str(tmp_path), str(copied)], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert name in wheel.name
    names = [Path(each).name for each in zipfile.ZipFile(wheel).namelist()]
    assert any(each.startswith("_methods.") for each in names) == (compiler == "cc")
    assert {"held.h", "record.c"} <= {*names}
