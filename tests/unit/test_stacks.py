"""Where a thread is, and whether it gets on."""

from __future__ import annotations

import gc
import itertools
import os
import pdb
import re
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.observe import account, motion, stacks, waiting_loop
from lockstep.observe.account import LEAVING, Account
from lockstep.observe.flight import FlightRecorder, pack_words
from lockstep.observe.motion import Motion, is_traced, transferred_bytes
from lockstep.observe.profile.phases import DATA
from lockstep.observe.stacks import activity_of, stack_of
from lockstep.observe.waiting_loop import Loop

TASK = str(threading.get_native_id())


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

    monkeypatch.setattr(motion.time, "clock_gettime", lambda clock: cpu_s)
    monkeypatch.setattr(motion, "transferred_bytes", lambda: moved)
    monkeypatch.setattr(motion, "frame_of", look_at)
    monkeypatch.setattr(motion, "stack_of", lambda frame: (frame.f_code.co_filename,))
    thread = Motion(threading.get_ident())
    assert thread.look(now_s).unmoved_s == 0.0
    for expected_s in (1.0, 2.0, 3.0):
        now_s += 1
        stand = thread.look(now_s)
        assert (stand.unmoved_s, stand.stack) == (expected_s, ("/x/load.py",))
    now_s, cpu_s = now_s + 0.5, cpu_s + 0.5
    assert thread.look(now_s).unmoved_s == 0.0  # it used a core
    assert len(asked) == 4  # and was not asked where it is
    now_s += 1
    assert thread.look(now_s).unmoved_s == 1.0
    place = frame_of("/x/other.py")
    now_s += 1
    assert thread.look(now_s).unmoved_s == 0.0  # it is elsewhere
    now_s, moved = now_s + 1, moved + (1 << 20)
    assert thread.look(now_s).unmoved_s == 0.0  # it reads or writes
    now_s, cpu_s = now_s + 1, cpu_s + 0.01
    assert thread.look(now_s).unmoved_s == 1.0  # next to nothing is nothing


def test_who_asks_a_device_on_a_core_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """As cudaStreamSynchronize does, within one call: the core that it uses is no sign that the thread gets on."""
    now_s, cpu_s, queued, place = 100.0, 0.0, True, frame_of("/x/train.py")
    monkeypatch.setattr(motion.time, "clock_gettime", lambda clock: cpu_s)
    monkeypatch.setattr(motion, "transferred_bytes", lambda: 0)
    monkeypatch.setattr(motion, "frame_of", lambda thread: place)
    thread = Motion(threading.get_ident())
    thread.queues.append(lambda: queued)

    def unmoved_s(looks: int = 8) -> list[float]:
        nonlocal now_s, cpu_s
        found = []
        for _ in range(looks):
            now_s, cpu_s = now_s + 0.5, cpu_s + 0.5
            found.append(thread.look(now_s).unmoved_s)
        return found

    assert unmoved_s() == [0.0, 0.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
    thread.has_begun = True
    assert unmoved_s(5) == [0.0, 0.0, 0.0, 0.0, 1.0], "it has begun something meanwhile"
    place = frame_of("/x/other.py")
    assert unmoved_s(5)[-3:] == [0.0, 1.0, 1.5], "it was elsewhere"
    queued = False
    assert not any(unmoved_s(6)[2:]), "no device has anything to do for it: it works"


@pytest.mark.parametrize("is_in_loop", [False, True])
def test_of_a_busy_thread_no_more_is_asked_than_needed(monkeypatch: pytest.MonkeyPatch, is_in_loop: bool) -> None:
    """Four looks in a second: one asks where it is. Once it may wait in a loop, what it moves counts with each look."""
    cpu_s, asked, read, frame = 0.0, list[float](), list[float](), frame_of("/x/load.py")
    monkeypatch.setattr(motion.time, "clock_gettime", lambda clock: cpu_s)
    monkeypatch.setattr(motion, "transferred_bytes", lambda: read.append(cpu_s) or 0)
    monkeypatch.setattr(motion, "frame_of", lambda thread: asked.append(cpu_s) or frame)
    monkeypatch.setattr(waiting_loop, "_waiting_loop", lambda frame: ("a loop",) if is_in_loop else ())
    thread = Motion(threading.get_ident())
    stands = []
    for _ in range(40):
        cpu_s += 0.25
        stands.append(thread.look(100.0 + cpu_s))
    assert not any(stand.unmoved_s for stand in stands)
    assert (stands[-1].looping_s > 0) == is_in_loop
    assert len(asked) == 10
    assert len(read) == (40 if is_in_loop else 10)


def test_a_thread_that_waits_for_a_disk_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in fsync(): nothing is counted until it returns."""
    monkeypatch.setattr(motion.time, "clock_gettime", lambda clock: 0.0)
    monkeypatch.setattr(motion, "transferred_bytes", lambda: 0)
    for state, unmoved_s in (("D", [0.0, 0.0, 0.0]), ("S", [0.0, 1.0, 2.0])):
        monkeypatch.setattr(motion, "state_and_cpu_s", lambda path, state=state: (state, 0.0))
        thread = Motion(threading.get_ident())
        assert [thread.look(now_s).unmoved_s for now_s in (1.0, 2.0, 3.0)] == unmoved_s


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_who_waits_for_processes_of_its_own_that_work_is_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    used_s = {"task": 0.0}
    monkeypatch.setattr(motion.time, "clock_gettime", lambda clock: 0.0)
    monkeypatch.setattr(motion, "transferred_bytes", lambda: 0)
    monkeypatch.setattr(motion, "frame_of", lambda thread: frame_of("/x/load.py"))
    child = subprocess.Popen(["sleep", "60"])
    try:
        used_s[str(child.pid)] = 3.0

        def state_and_cpu_s(path: str) -> tuple[str, float]:
            return "S", used_s.get(path.split("/")[-2].replace(TASK, "task"), 0.0)  # this process may have others

        monkeypatch.setattr(motion, "state_and_cpu_s", state_and_cpu_s)
        thread = Motion(threading.get_ident())
        activities = []
        for look in range(60):
            used_s[str(child.pid)] += 0.025 if 8 <= look < 24 else 0.001
            activities.append(thread.look(100 + look / 4).activity)
    finally:
        child.kill()
        child.wait()
    assert activities == [*[""] * 17, *[motion.CHILDREN] * 20, *[""] * 23]


def test_a_thread_that_moves_much_does_not_wait_in_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_s, moved = 0.0, 0
    monkeypatch.setattr(motion.time, "clock_gettime", lambda clock: cpu_s)
    monkeypatch.setattr(motion, "transferred_bytes", lambda: moved)
    monkeypatch.setattr(waiting_loop, "_waiting_loop", lambda frame: ("a loop",))
    thread = Motion(threading.get_ident())
    looping = []
    for look in range(24):
        cpu_s, moved = cpu_s + 1, moved + (look == 12) * (1 << 20)
        looping.append(thread.look(100.0 + look).looping_s)
    assert looping == [*[0] * 7, 7, 8, 9, 10, 11, *[0] * 8, 7, 8, 9, 10]


def test_a_busy_thread_is_asked_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_s = 0.0
    asked: list[int] = []
    monkeypatch.setattr(motion.time, "clock_gettime", lambda clock: cpu_s)
    monkeypatch.setattr(motion, "frame_of", asked.append)
    thread = Motion(threading.get_ident())
    for look in range(17):
        cpu_s += 1.0
        thread.look(100.0 + look / 4)
    assert len(asked) == 5  # a second apart


WAITING = f"""
def user():                             # {(USER := "/x/train.py")}
    for step in range(2):
        while waits(): pass
def several_lines():                    # {USER}
    while True:
        if not waits():
            break
def by_a_helper():                      # {USER}
    def has_come():
        return not waits()
    while not has_come(): pass
def of_all():                           # {USER}
    while not all(not waits() for _ in range(3)): pass
def asks_python():                      # {USER}
    while is_set(): pass
def in_a_library():                     # {os.path.dirname(torch.__file__)}/x.py
    while is_set(): pass
def counts_on():                        # {USER}
    for _ in itertools.count(1):
        if not waits(): break
def until_something_comes():            # {USER}
    for _ in iter(waits, False): pass
def again_and_again():                  # {USER}
    for pause in cycle([1, 2, 4]):
        if not is_set(): return
"""
WORKING = f"""
def counts():                           # {USER}
    while True:
        for _ in range(50):
            if not waits(): return
def over_data():                        # {USER}
    for part in sorted(iter(range(50))):
        if not waits(): return
def with_a_long_body():                 # {USER}
    for part in range(50):
        if not waits(): return
        {"part += part ** 2 % 7; " * 60}
def after_counting():                   # {USER}
    numbers = itertools.count()
    for part in [next(numbers) for _ in range(50)]:
        if not waits(): return
def of_a_generator():                   # {USER}
    def batches():
        while True: yield waits()
    for batch in batches():
        if not batch: return
def one_long_call():                    # {USER}
    long_call()
def evaluates():                        # {USER}
    while forward(): pass
def reads():                            # {USER}
    while parse(): pass
"""
LIBRARIES = f"""
def is_set():                           # {threading.__file__}
    return waits()
def exists():                           # <frozen genericpath>
    return waits()
def forward():                          # {os.path.dirname(torch.__file__)}/nn/modules/linear.py
    return waits()
def parse():                            # {os.path.dirname(os.__file__)}/json/decoder.py
    return waits()
"""


def programs(text: str, names: dict[str, Any]) -> list[str]:
    """Defines each function of `text` in `names` as if it came from the file that its first line tells."""
    found = re.findall(r"^def (\w+)\(\): +# (.*)\n((?: .*\n)+)", text, re.MULTILINE)
    for name, file, body in found:
        exec(compile(f"def {name}():\n{body}", file, "exec"), names)
    return [name for name, *_ in found]


def seen_in(call: str, looks: int = 20) -> list[float]:
    """What a loop is said to have lasted, for a thread that is in `call`, looked at once a second."""
    loop, seen = Loop(), list[float]()
    names: dict[str, Any] = {}

    def waits() -> bool:
        seen.append(loop.see(sys._getframe(1), len(seen)))
        return len(seen) < looks

    names.update(waits=waits, itertools=itertools, cycle=itertools.cycle)
    names["long_call"] = lambda: [waits() for _ in range(looks)]
    for text in (LIBRARIES, WAITING, WORKING):
        programs(text, names)
    names[call]()
    return seen[:looks]


@pytest.mark.parametrize("call", programs(WAITING, {}))
def test_waiting_in_a_loop_is_seen(call: str) -> None:
    """Where the first question stands before the loop, as the compiler puts it, one look later."""
    seen = seen_in(call)
    first = seen.index(7)
    assert first in (7, 8)
    assert seen == [*[0] * first, *range(7, 27 - first)]


@pytest.mark.parametrize("call", programs(WORKING, {}))
def test_work_is_not_taken_for_waiting(call: str) -> None:
    assert set(seen_in(call)) == {0}


def test_a_loop_begins_anew_after_work_and_elsewhere() -> None:
    """There is work at look 9, and the 20th is the last that one call makes."""
    loop, seen = Loop(), list[float]()
    names: dict[str, Any] = {}

    def waits() -> bool:
        frame = sys._getframe(1) if len(seen) != 9 else frame_of(f"{os.path.dirname(os.__file__)}/json/decoder.py")
        seen.append(loop.see(frame, len(seen)))
        return len(seen) % 20 != 0

    names["waits"] = waits
    programs(WAITING, names)
    names["several_lines"]()
    names["several_lines"]()
    assert seen == [*[0] * 7, 7, 8, *[0] * 8, 7, 8, 9, *[0] * 7, *range(7, 20)]


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
        before = Motion(thread.ident)._clock
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
    from lockstep.observe.motion import is_traced
    os._exit(10 + is_traced())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_debugger_is_seen() -> None:
    assert not is_traced()
    said = subprocess.run([sys.executable, "-c", _TRACED], capture_output=True, text=True, check=True).stdout
    assert said == "11\n"


@pytest.mark.parametrize("is_on", [True, False])
def test_no_garbage_is_collected_while_threads_are_asked_where_they_are(
    is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python before 3.11.9 would hold two locks in two orders: the whole process would stand still."""
    seen: list[bool] = []
    monkeypatch.setattr(sys, "_current_frames", lambda: seen.append(gc.isenabled()) or {})
    try:
        gc.enable() if is_on else gc.disable()
        assert stacks.frame_of(0) is None
        assert (seen, gc.isenabled()) == ([False], is_on)
    finally:
        gc.enable()


def test_a_debugger_is_looked_for_also_while_the_thread_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may stop the process at any moment, and what its guard said before counts then."""
    recorder = FlightRecorder(tmp_path / "flight", 0, 2)
    mine, seen = Account(recorder), [True, True, False]
    monkeypatch.setattr(account, "is_traced", lambda: seen.pop(0))
    monkeypatch.setattr(mine.motion, "look", lambda now_s: motion.Stand((), "", 0.0))
    said = [mine.status(100 + look / 4).activity for look in range(12)]
    assert said == [*["debugger"] * 8, *[""] * 4]
    mine.close()
    recorder.close()


def test_a_thread_that_is_seen_at_one_place_each_time_has_moved_with_its_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = FlightRecorder(tmp_path / "flight", 0, 2)
    mine, stood_s = Account(recorder), 1000.0
    monkeypatch.setattr(mine.motion, "look", lambda now_s: motion.Stand((), "", stood_s))
    recorder.clock.switch(DATA)
    now_s = time.monotonic()
    assert mine.status(now_s).unmoved_s < 500
    stood_s = 0.0
    assert mine.status(now_s + 1).unmoved_s == 0.0
    stood_s, recorder.clock.marks[:] = 1000.0, [(DATA, time.monotonic_ns() - 2000 * 10**9)]
    assert mine.status(now_s + 2).unmoved_s == 1000.0
    mine.close()
    recorder.close()


@pytest.mark.parametrize("stands", ["in an operation", "elsewhere"])
def test_a_rank_tells_the_error_whose_finally_it_stands_in(
    stands: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = FlightRecorder(tmp_path / "flight", 0, 2)
    mine, stood_s = Account(recorder), 0.0
    monkeypatch.setattr(mine.motion, "look", lambda now_s: motion.Stand((), "", stood_s))

    def told() -> str:
        """As the guard's thread sees it."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(mine.status, time.monotonic()).result().handling

    try:
        raise KeyError("x")
    except KeyError:
        assert told() == ""
        if stands == "elsewhere":
            stood_s = 40.0
        else:
            recorder.enter(0, pack_words("world", "barrier", "train.py:3", ""), False)
            mine.catch_up()
        assert re.fullmatch(r"KeyError: 'x', at .*test_stacks\.py:\d+", told())
        mine.activities.append(LEAVING)
        assert told() == ""
        mine.activities.clear()
        mine.end(ValueError("y"))
        assert told() == ""
    mine.close()
    recorder.close()


def test_a_look_at_its_own_thread_keeps_nothing_of_its_callers_alive() -> None:
    """Of the frames that it sees its own is one: kept there, each would live until garbage is collected."""

    def caller() -> weakref.ref[Motion]:
        held = Motion(threading.get_ident())
        assert held.look(10.0).stack[-1].endswith(" caller")
        return weakref.ref(held)

    gc.disable()
    try:
        assert caller()() is None
    finally:
        gc.enable()
