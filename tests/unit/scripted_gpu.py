"""A GPU that never was: streams that do one thing after the other, on a clock of the test's. Times in microseconds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.observe.profile import device_values, step_clock, stream_times
from lockstep.observe.profile.step_clock import StepClock

NEVER = 1 << 60


class FakeStream:
    """Is through with all that is queued at `free_us`."""

    def __init__(self, raw: int = 0) -> None:
        self.raw, self.free_us = raw, 0.0
        self.is_capturing = False


class FakeEvent:
    """Fires when its stream comes to it."""

    def __init__(self, gpu: ScriptedGpu) -> None:
        self._gpu, self.fires_us = gpu, 0.0
        gpu.made += 1

    def record(self, stream: FakeStream | None = None) -> None:
        gpu = self._gpu
        gpu.check()
        stream = stream or gpu.current
        assert not stream.is_capturing, "it could never be asked for"
        gpu.now_us += gpu.record_us
        self.fires_us = max(gpu.now_us, stream.free_us)

    def query(self) -> bool:
        gpu = self._gpu
        gpu.check()
        gpu.asked_in.add(gpu.mode)
        gpu.now_us += 1
        return self.fires_us <= gpu.now_us

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.query(), "torch raises"
        assert other.query(), "torch raises"
        return (other.fires_us - self.fires_us) * self._gpu.rate / 1e3


class ScriptedGpu:
    """Stands for torch.cuda, and for the thread's clock."""

    def __init__(self) -> None:
        self.now_us, self.record_us = 1_000_000.0, 0.0
        self.rate = 1.0  # of its clock
        self.main = self.current = FakeStream()
        self.made = 0  # events
        self.is_broken = False
        self.is_used = True
        self.mode = "global"
        self.asked_in: set[str] = set()
        self.devices = 0

    def check(self) -> None:
        if self.is_broken:
            raise RuntimeError("CUDA error: device-side assert triggered")

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
    def on(self, stream: FakeStream) -> Iterator[None]:
        self.current, before = stream, self.current
        yield
        self.current = before

    # ------------------------------------------------------------------ torch.cuda

    def is_initialized(self) -> bool:
        return self.is_used

    def max_memory_allocated(self) -> int:
        return 64 << 20

    def current_device(self) -> int:
        return 0

    def is_current_stream_capturing(self) -> bool:
        return self.current.is_capturing

    def current_stream(self, device: Any) -> FakeStream:
        return self.current

    def Event(self, *, enable_timing: bool) -> FakeEvent:
        assert enable_timing
        return FakeEvent(self)

    def Stream(self, device: Any) -> FakeStream:
        return FakeStream(raw=77)

    stream = on


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedGpu]:
    """The CUDA of this process."""
    made = ScriptedGpu()
    torch = SimpleNamespace(
        cuda=made, get_num_threads=lambda: 1, _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda _: made.current.raw)
    )
    monkeypatch.setitem(device_values.sys.modules, "torch", torch)
    for module in (step_clock, stream_times):
        monkeypatch.setattr(module, "monotonic_ns", made.monotonic_ns)

    def slept(seconds: float) -> None:
        made.now_us += 1e6 * seconds

    def exchanged(mode: Any) -> None:
        made.mode = "global" if made.mode == "relaxed" else "relaxed"

    monkeypatch.setattr(stream_times.time, "sleep", slept)
    monkeypatch.setattr(device_values, "_exchange_capture_mode", lambda: exchanged)
    device_values.side_stream.cache_clear()
    yield made
    device_values.side_stream.cache_clear()


@pytest.fixture
def clock(gpu: ScriptedGpu) -> StepClock:
    """Of a thread that has ended one step, before which nobody knew of its GPU."""
    made = StepClock()
    made.close_reader = lambda: None
    made.step_done(1, 0)
    assert [step.times for step in made.steps] == [None]
    made.steps.clear()
    return made
