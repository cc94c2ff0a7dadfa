"""A GPU that never was: streams that do one thing after the other, on a clock of the test's. Times in microseconds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from lockstep.observe.profile import device_values, step_clock, stream_event, stream_times
from lockstep.observe.profile.step_clock import StepClock

NEVER = 1 << 60


class Stream:
    """Is through with all that is queued at `free_us`."""

    def __init__(self, raw: int = 0) -> None:
        self.raw, self.free_us = raw, 0.0
        self.is_capturing = False


class ScriptedGpu:
    """Stands for the thread's clock, and for what is asked of CUDA's driver."""

    def __init__(self) -> None:
        self.now_us = 1_000_000.0
        self.rate = 1.0  # of the GPU's clock
        self.main = self.current = Stream()
        self.streams = {0: self.main}
        self.fires_us: list[float] = []  # of each event
        self.is_broken = False
        self.is_used = True
        self.is_beside = False  # what is asked breaks no graph
        self.devices: list[int] = []

    def monotonic_ns(self) -> int:
        """Each look takes a moment."""
        self.now_us += 0.05
        return round(1e3 * self.now_us)

    # ------------------------------------------------------------------ what a program does

    def queue(self, us: float) -> None:
        """The thread queues work."""
        self.now_us += 10
        self.current.free_us = max(self.now_us, self.current.free_us) + us

    def synchronize(self) -> None:
        self.now_us = max(self.now_us, self.current.free_us)

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self.streams[stream.raw] = stream
        self.current, before = stream, self.current
        yield
        self.current = before

    # ------------------------------------------------------------------ a Device

    def check(self) -> None:
        if self.is_broken:
            raise RuntimeError("CUDA error: device-side assert triggered")

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        before, self.is_beside = self.is_beside, True
        yield
        self.is_beside = before

    def event(self) -> int:
        assert self.is_beside
        self.fires_us.append(NEVER)
        return len(self.fires_us) - 1

    def stream(self) -> int:
        self.streams[77] = Stream(77)
        return 77

    def record(self, event: int, stream: int) -> bool:
        self.check()
        if self.streams[stream].is_capturing:
            return False
        self.fires_us[event] = max(self.now_us, self.streams[stream].free_us)
        return True

    def has_fired(self, event: int) -> bool:
        assert self.is_beside
        self.check()
        self.now_us += 1
        return self.fires_us[event] <= self.now_us

    def copy_to_host(self, to: int, source: int, nbytes: int, stream: int) -> None:
        assert self.is_beside
        assert (nbytes, stream) == (4, self.current.raw)
        self.check()
        assert Number.made[to].is_pinned
        assert not Number.made[source].is_pinned
        Number.made[to].value = Number.made[source].value

    def apart_ns(self, first: int, second: int) -> int:
        assert self.is_beside
        assert max(self.fires_us[first], self.fires_us[second]) <= self.now_us, "the driver would fail"
        return round(1e3 * (self.fires_us[second] - self.fires_us[first]) * self.rate)


class Number:
    """A tensor of one element, on the device or where that writes to."""

    made: ClassVar[list[Number]] = []  # at its place is its address

    def __init__(self, value: float, dtype: str = "float32", *, pin_memory: bool = False) -> None:
        self.value, self.dtype, self.is_pinned = value, dtype, pin_memory
        self.device = torch.device("cpu" if pin_memory else "cuda:0")
        self.made.append(self)

    def data_ptr(self) -> int:
        return self.made.index(self)

    def element_size(self) -> int:
        return 4

    def item(self) -> float:
        assert self.is_pinned, "whoever reads would wait for the device"
        return self.value


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ScriptedGpu:
    """The CUDA of this process."""
    made = ScriptedGpu()
    cuda = SimpleNamespace(
        is_initialized=lambda: made.is_used,
        current_device=lambda: 0,
        max_memory_allocated=lambda device: (64 + (device or 0)) << 20,
        is_current_stream_capturing=lambda: made.current.is_capturing,
        current_stream=lambda device: made.current,
        stream=made.on,
        Stream=lambda device: Stream(78),
    )
    raw = SimpleNamespace(_cuda_getCurrentRawStream=lambda device: made.current.raw)
    stand_in = SimpleNamespace(cuda=cuda, _C=raw, get_num_threads=int, empty=Number)
    monkeypatch.setitem(device_values.sys.modules, "torch", stand_in)
    for module in (step_clock, stream_times):
        monkeypatch.setattr(module, "monotonic_ns", made.monotonic_ns)

    def slept(seconds: float) -> None:
        made.now_us += 1e6 * seconds

    def device_of(number: int) -> ScriptedGpu:
        made.devices.append(number)
        return made

    monkeypatch.setattr(stream_times.time, "sleep", slept)
    for module in (stream_times, stream_event):
        monkeypatch.setattr(module, "driver", lambda: made)
        monkeypatch.setattr(module, "Device", device_of)
    monkeypatch.setattr(device_values, "beside_captures", made.asked)
    monkeypatch.setattr(stream_event, "_gpus", {})
    monkeypatch.setattr(device_values, "_free", {})
    monkeypatch.setattr(device_values, "_made", [])
    monkeypatch.setattr(Number, "made", [])
    return made


@pytest.fixture
def clock(gpu: ScriptedGpu) -> StepClock:
    """Of a thread that has ended one step, before which nobody knew of its GPU."""
    made = StepClock()
    made.close_reader = lambda: None
    made.step_done(1, 0)
    assert [step.times for step in made.steps] == [None]
    made.steps.clear()
    return made
