"""Where a thread is, and whether it gets on."""

from __future__ import annotations

import itertools
import os
import pdb
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lockstep.observe import stacks
from lockstep.observe.stacks import Loop, Motion, activity_of, is_traced, stack_of, transferred_bytes


def here() -> tuple[str, ...]:
    return stack_of(sys._getframe())


def test_a_stack_is_read_from_the_outside_in() -> None:
    *_, caller, innermost = here()
    assert innermost.startswith("tests/unit/test_stacks.py:")
    assert innermost.endswith(" here")
    assert caller.endswith(" test_a_stack_is_read_from_the_outside_in")
    assert stack_of(None) == ()


def test_a_deep_stack_keeps_its_inner_end() -> None:
    def down(levels: int) -> tuple[str, ...]:
        return here() if levels == 0 else down(levels - 1)

    stack = down(100)
    assert len(stack) == 40
    assert stack[-1].endswith(" here")


def frame_of(filename: str) -> types.FrameType:
    namespace: dict[str, object] = {"sys": sys}
    exec(compile("def run():\n    return sys._getframe()\nframe = run()", filename, "exec"), namespace)
    frame = namespace["frame"]
    assert isinstance(frame, types.FrameType)
    return frame


@pytest.mark.parametrize(
    ("filename", "activity"),
    [
        (f"{os.sep}x{os.sep}torch{os.sep}_dynamo{os.sep}convert_frame.py", "compile"),
        (f"{os.sep}x{os.sep}torch{os.sep}_inductor{os.sep}compile_fx.py", "compile"),
        (pdb.__file__, "debugger"),
        (f"{os.sep}x{os.sep}debugpy{os.sep}server{os.sep}api.py", "debugger"),
        (f"{os.sep}x{os.sep}torch{os.sep}_dynamo{os.sep}eval_frame.py", ""),
        (f"{os.sep}home{os.sep}train.py", ""),
        (f"{os.sep}x{os.sep}torch{os.sep}nn{os.sep}modules{os.sep}module.py", ""),
    ],
)
def test_what_may_take_long_is_known_by_its_files(filename: str, activity: str) -> None:
    assert activity_of(frame_of(filename)) == activity


def test_torch_compiles_where_it_compiles_and_nowhere_else() -> None:
    """An optimizer that is not compiled, and the first and second call of a function that is."""
    seen: list[str] = []

    def see(*_: object) -> None:
        seen.append(activity_of(sys._getframe()))

    def backend(module: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        see()
        return lambda *args: (see(), module(*args))[1]

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1)
    optimizer.register_step_pre_hook(see)
    optimizer.step()
    double = torch.compile(lambda x: x * 2, backend=backend)  # pyright: ignore[reportArgumentType]
    for _ in range(2):
        double(torch.ones(3))
    assert seen == ["", "compile", "", ""]


def test_a_thread_that_stands_still_is_told_from_one_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, cpu_s, moved = 100.0, 0.0, 0
    asked: list[int] = []
    place = frame_of("/x/load.py")

    def look_at(thread: int) -> types.FrameType:
        asked.append(thread)
        return place

    monkeypatch.setattr(stacks.time, "clock_gettime", lambda clock: cpu_s)
    monkeypatch.setattr(stacks, "transferred_bytes", lambda: moved)
    monkeypatch.setattr(stacks, "frame_of", look_at)
    monkeypatch.setattr(stacks, "stack_of", lambda frame: (frame.f_code.co_filename,))
    motion = Motion(threading.get_ident())
    assert motion.look(now_s).unmoved_s == 0.0
    for expected_s in (1.0, 2.0, 3.0):
        now_s += 1
        stand = motion.look(now_s)
        assert (stand.unmoved_s, stand.stack) == (expected_s, ("/x/load.py",))
    now_s, cpu_s = now_s + 0.5, cpu_s + 0.5
    assert motion.look(now_s).unmoved_s == 0.0  # it used a core
    assert len(asked) == 4  # and was not asked where it is
    now_s += 1
    assert motion.look(now_s).unmoved_s == 1.0
    place = frame_of("/x/other.py")
    now_s += 1
    assert motion.look(now_s).unmoved_s == 0.0  # it is elsewhere
    now_s, moved = now_s + 1, moved + (1 << 20)
    assert motion.look(now_s).unmoved_s == 0.0  # it reads or writes
    now_s, cpu_s = now_s + 1, cpu_s + 0.01
    assert motion.look(now_s).unmoved_s == 1.0  # next to nothing is nothing


def test_a_busy_thread_is_asked_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_s = 0.0
    asked: list[int] = []
    monkeypatch.setattr(stacks.time, "clock_gettime", lambda clock: cpu_s)
    monkeypatch.setattr(stacks, "frame_of", asked.append)
    motion = Motion(threading.get_ident())
    for look in range(17):
        cpu_s += 1.0
        motion.look(100.0 + look / 4)
    assert len(asked) == 5  # a second apart


BUSY_PROGRAM = """
import sys, posixpath
def see():
    seen.append(loop.see(sys._getframe({depth}), next(clock)))
def user():
    see()
def spin():
    for _ in range(12):
        see()
        see()
def spin_beneath():
    for _ in range(6):
        user(); see()
        user(); user()
def change():
    spin()
    see()
def evaluate():
    for _ in range(24):
        library(see)
def start(what):
    what()
"""


@pytest.mark.parametrize(
    ("call", "seen_s"),
    [
        ("spin", list(range(7, 24))),
        ("spin_beneath", list(range(7, 24))),
        ("evaluate", []),
        ("change", list(range(7, 25))),  # all of it is within one call of `change`: it could be its loop
    ],
)
def test_a_loop_is_told_from_work(call: str, seen_s: list[int]) -> None:
    """At one time a second. An evaluation is seen in a library's code."""
    loop, seen = Loop(), []
    library: dict[str, object] = {}
    exec(compile("def run(call): call()", os.__file__, "exec"), library)
    names: dict[str, Any] = {
        "loop": loop,
        "seen": seen,
        "clock": itertools.count(),
        "library": library["run"],
    }
    exec(compile(BUSY_PROGRAM.format(depth=1), "/x/train.py", "exec"), names)
    names["start"](names[call])
    assert [when for when in seen if when] == seen_s


def test_another_call_is_another_loop() -> None:
    loop = Loop()
    frames = [frame_of(f"/x/{name}.py") for name in ("first", "second")]
    assert [loop.see(frames[second // 10], second) for second in range(20)] == [*[0] * 7, 7, 8, 9, *[0] * 7, 7, 8, 9]
    loop = Loop()
    assert {loop.see(frame_of(os.__file__), second) for second in range(20)} == {0}


def test_the_clock_is_that_of_the_thread() -> None:
    released, stop = threading.Event(), threading.Event()

    def work() -> None:
        released.set()
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        released.wait()
        assert thread.ident is not None
        motion = Motion(thread.ident)
        before = motion._clock
        assert before is None or before != Motion(threading.get_ident())._clock
    finally:
        stop.set()
        thread.join()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_process_writes_is_counted(tmp_path: object) -> None:
    before = transferred_bytes()
    with open(f"{tmp_path}/file", "wb") as file:
        file.write(b"x" * (1 << 20))
    assert transferred_bytes() - before >= 1 << 20


_TRACED = """
import ctypes, os, sys
child = os.fork()
if child == 0:
    ctypes.CDLL(None).ptrace(0, 0, 0, 0)  # PTRACE_TRACEME
    from lockstep.observe.stacks import is_traced
    os._exit(10 + is_traced())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_debugger_is_seen() -> None:
    assert not is_traced()
    said = subprocess.run([sys.executable, "-c", _TRACED], capture_output=True, text=True, check=True).stdout
    assert said == "11\n"
