"""The line that is named is the user's, whatever stands between it and the operation."""

from __future__ import annotations

import _thread
import collections
import functools
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import lockstep
from lockstep.launch.program import python_command
from lockstep.observe import call_site as module
from lockstep.observe.call_site import call_site, short_path


def line_of(function: Callable[..., object], after: int = 1) -> int:
    return function.__code__.co_firstlineno + after


def through(file: Path, code: str) -> Callable[[Callable[[], str]], str]:
    """A function that calls back what it is given, as if it stood in `file`."""
    namespace: dict[str, Callable[[Callable[[], str]], str]] = {}
    exec(compile(textwrap.dedent(code), str(file), "exec"), namespace)
    return namespace["through"]


CALLS_BACK = "def through(call):\n    return call()\n"
TORCH = Path(torch.__file__).parent
LOCKSTEP = Path(lockstep.__file__).parent
PACKAGES = TORCH.parent


def appending(found: list[str]) -> Callable[[object], object]:
    """A function of lockstep's own that appends the call site it sees."""
    code = """
        from lockstep.observe.call_site import call_site

        def append_to(found):
            return lambda ignored: found.append(call_site())
        """
    namespace: dict[str, Callable[[list[str]], Callable[[object], object]]] = {}
    exec(compile(textwrap.dedent(code), str(LOCKSTEP / "parallel" / "hooks.py"), "exec"), namespace)
    return namespace["append_to"](found)


def here() -> str:
    return call_site()


def test_the_line_of_the_caller() -> None:
    assert here() == f"tests/unit/test_call_site.py:{line_of(here)} here"


@pytest.mark.parametrize(
    "file",
    [
        LOCKSTEP / "comm" / "communicator.py",
        LOCKSTEP / "parallel" / "made_up.py",
        TORCH / "nn" / "modules" / "module.py",
        PACKAGES / "transformers" / "trainer.py",
        Path(os.__file__).parent / "contextlib.py",
        Path(sys.prefix) / "bin" / "lockstep",
        Path("<frozen runpy>"),
        Path("<eval_with_key>.7"),
    ],
    ids=str,
)
def test_what_is_not_the_users_is_passed_over(file: Path) -> None:
    inside = through(file, CALLS_BACK)

    def train_step() -> str:
        return inside(call_site)

    assert train_step() == f"tests/unit/test_call_site.py:{line_of(train_step)} train_step"


@pytest.mark.parametrize("file", ["<string>", "<stdin>", "<ipython-input-3-abc>"])
def test_typed_code_is_the_users(file: str) -> None:
    assert through(Path(file), CALLS_BACK)(call_site) == f"{file}:2 through"


def test_the_code_that_a_launcher_gives_to_python_is_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", python_command("fork_server"))
    monkeypatch.setattr(module, "_kind_of", module._kind_of.__wrapped__)
    assert not module.is_users("<string>")
    assert module.is_users("<stdin>")


def test_a_recipe_is_a_program_like_the_users() -> None:
    name = through(LOCKSTEP / "recipes" / "lm" / "train.py", CALLS_BACK)(call_site)
    assert name == "src/lockstep/recipes/lm/train.py:2 through"


def test_the_loop_of_ours_has_a_line_but_is_not_the_users() -> None:
    file = LOCKSTEP / "train" / "loop.py"
    for _ in range(2):
        assert through(file, CALLS_BACK)(call_site) == "src/lockstep/train/loop.py:2 through"
    assert not module.is_users(str(file))


def test_inside_of_functools_and_a_comprehension() -> None:
    def train_step() -> list[str]:
        return [functools.partial(call_site)() for _ in range(1)]

    (found,) = train_step()
    assert found.startswith(f"tests/unit/test_call_site.py:{line_of(train_step)} ")


def test_it_may_begin_to_look_further_out() -> None:
    def inner(depth: int) -> str:
        return call_site(depth)

    assert inner(1).endswith(" inner")
    assert inner(2).endswith(" test_it_may_begin_to_look_further_out")
    assert inner(1 << 20).endswith(" inner")  # no stack is so deep


def test_two_calls_of_one_function_are_two_sites() -> None:
    def train_step() -> tuple[str, str]:
        first = call_site()
        return first, call_site()

    first, second = train_step()
    assert [int(site.split(":")[1].split()[0]) for site in (first, second)] == [
        line_of(train_step, 1),
        line_of(train_step, 2),
    ]
    assert train_step() == (first, second)


def test_a_hook_of_autograd_is_called_from_backward() -> None:
    found: list[str] = []
    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(appending(found))

    def train_step() -> None:
        (weight * 2).sum().backward()

    train_step()
    assert found == [f"tests/unit/test_call_site.py:{line_of(train_step)} train_step"]


def test_a_thread_without_any_user_code() -> None:
    found: list[str] = []
    thread = threading.Thread(target=appending(found), args=(None,))
    thread.start()
    thread.join()
    assert found[0].startswith("python3")  # the standard library's threading: not lockstep's, but nothing better
    assert "threading.py:" in found[0]
    assert found[0].endswith(" run")


def test_ranks_that_are_threads_see_their_own_line() -> None:
    def even() -> str:
        return call_site()

    def odd() -> str:
        return call_site()

    with ThreadPoolExecutor(4) as pool:
        sites = list(pool.map(lambda rank: (even, odd)[rank % 2](), range(400)))
    assert collections.Counter(site.split()[-1] for site in sites) == {"even": 200, "odd": 200}


def test_paths_are_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert short_path(str(tmp_path / "train.py")) == "train.py"
    assert short_path("train.py") == "train.py"
    assert short_path(str(tmp_path / "src" / "model" / "layers.py")) == "src/model/layers.py"
    assert short_path("/far/away/model/layers.py") == "model/layers.py"
    assert short_path(str(tmp_path / "a_long_folder" / "layers.py"), room=12) == "layers.py"
    assert short_path("<string>") == "<string>"
    deep = tmp_path / Path("x" * 40) / "y" / "train_everything.py"
    found = through(deep, CALLS_BACK)(call_site)
    assert found == "y/train_everything.py:2 through"


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module._kind_of.cache_info().maxsize == module._REMEMBERED
    monkeypatch.setattr(module, "_REMEMBERED", 8)
    monkeypatch.setattr(module, "SITES", {})
    for number in range(50):
        assert through(Path(f"made_{number}.py"), CALLS_BACK)(call_site) == f"made_{number}.py:2 through"
        assert len(module.SITES) <= 8


def test_a_script_in_another_folder(tmp_path: Path) -> None:
    """As it is started: by its path, from elsewhere, with torch's autograd in between."""
    script = tmp_path / "jobs" / "train.py"
    script.parent.mkdir()
    script.write_text(
        "from lockstep.observe.call_site import call_site\n\ndef main():\n    print(call_site())\n\nmain()\n"
    )
    started = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=30, cwd=tmp_path, check=True
    )
    assert started.stdout == "jobs/train.py:4 main\n"


SEES = """
    from lockstep.observe.call_site import call_site

    def through(ignored):
        return call_site()
    """


def test_the_way_up_from_a_line_of_torchs_is_remembered_and_no_other_line_is_taken_for_it() -> None:
    """The same lines of torch's, reached from lines of the user's over as many frames."""
    a, b, c, d, e = (through(TORCH / f"{name}.py", CALLS_BACK) for name in "abcde")
    sees = functools.partial(through(LOCKSTEP / "observe" / "seeing.py", SEES), None)
    inner = functools.partial(c, functools.partial(d, functools.partial(e, sees)))

    def users(call: Callable[[], str]) -> str:
        return call()

    def one_of(first: Callable[..., str], second: Callable[..., str]) -> str:
        return first(functools.partial(second, inner))

    for _ in range(3):
        here = f"tests/unit/test_call_site.py:{line_of(one_of)} one_of"
        assert one_of(a, b) == here
        assert one_of(users, b).endswith(" users")  # as deep, from the same line
        assert one_of(a, users).endswith(" users")
        assert [one_of(a, b) for _ in range(6)] == [here] * 6
    assert len(module.WAYS) < module._REMEMBERED


def test_a_way_that_is_remembered_is_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame of Python's for each step of it would cost ten times as much."""
    a, b, c, d, e = (through(TORCH / f"way_{name}.py", CALLS_BACK) for name in "abcde")
    sees = functools.partial(through(LOCKSTEP / "observe" / "seeing.py", SEES), None)
    for call in (b, c, d, e):
        sees = functools.partial(call, sees)
    found = []
    for _ in range(2):
        found.append(a(sees))
        monkeypatch.setattr(module, "_up_from", None)
    assert found[0] == found[1]
    assert "test_call_site.py:" in found[0]


def test_autograd_works_for_the_line_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs hooks run in one: no frame there is the user's, nor made by Python."""
    found: list[str] = []
    hook = appending(found)
    in_thread = through(LOCKSTEP / "parallel" / "hooks.py", "def through(hook, done):\n    hook(0)\n    done()\n")

    def as_autograd() -> None:
        done = threading.Event()
        _thread.start_new_thread(in_thread, (hook, done.set))
        assert done.wait(10)

    as_autograd()
    monkeypatch.setattr(module, "backward_site", ["train.py:7 step"])
    as_autograd()
    in_pool = threading.Thread(target=hook, args=(0,))
    in_pool.start()
    in_pool.join()
    hook(0)
    assert found[0].startswith("src/lockstep/parallel/hooks.py:"), "no backward is known"
    assert found[1] == "train.py:7 step"
    assert "threading.py:" in found[2], "another thread is not autograd's"
    assert "test_call_site.py:" in found[3], "nor is that of a user"
