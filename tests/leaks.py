"""What a test may leave behind by mistake: threads, processes, open files, variables, settings."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from operator import attrgetter
from pathlib import Path
from typing import Any

from lockstep.comm.waiting import wait_until
from lockstep.launch.processes import children
from process_tree import words_of
from shared_segments import pool_segments

_PATIENCE_S = 2.0  # for a thread or process that is just ending
_OWN_FILES = (".pytest_cache", "__pycache__", ".hypothesis", ".ruff_cache", ".coverage")
_REPLACED = (  # some of what a guard, or the start of a rank, puts something of its own in the place of
    ("multiprocessing.context", "ForkServerProcess._Popen"),
    ("torch", "Tensor.backward"),
    ("torch.distributed.distributed_c10d", "ProcessGroup.allreduce"),
    ("torch.distributed.distributed_c10d", "init_process_group"),
    ("torch.distributed.distributed_c10d", "rendezvous"),
)
_OWN_VARIABLES = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")  # the second is set by torch, when it likes


class Snapshot:
    """What exists now. `leaks()` later tells what is new, after giving it a moment to go away."""

    def __init__(self) -> None:
        self._before = {name: look() for name, look in _LOOKS.items()}

    def leaks(self) -> list[str]:
        """One line for each thing that is new or has changed, after a moment for what is just ending."""
        if not self._differences():
            return []
        gc.collect()  # a cycle may hold a socket
        wait_until(lambda: not self._differences(), _PATIENCE_S)
        return self._differences()

    def _differences(self) -> list[str]:
        lines: list[str] = []
        for name, look in _LOOKS.items():
            before, now = self._before[name], look()
            for key in now.keys() - before.keys() if name != "setting" else ():  # torch's come with its import
                lines.append(f"new {name}: {key} {now[key]}".rstrip())
            if name in _MUST_STAY:
                for key in before.keys() - now.keys():
                    lines.append(f"{name} gone: {key}")
                for key in before.keys() & now.keys():
                    if before[key] != now[key]:
                        lines.append(f"{name} changed: {key} from {before[key]!r} to {now[key]!r}")
        return sorted(lines)


def process_stacks() -> str:
    """The stacks of all ranks that `run_processes` has started."""
    return "\n".join(f"world of {pool.world_size}:\n{pool.stacks()}" for pool in _pools())


def open_files() -> set[int]:
    """This process's file descriptors."""
    folder = Path("/proc/self/fd")
    return {int(name) for name in os.listdir(folder) if (folder / name).is_symlink()}  # the listing's own is closed


def _pools() -> list[Any]:
    """Those that `run_processes` keeps."""
    worlds = sys.modules.get("lockstep.testing.worlds")
    return [] if worlds is None else list(worlds._pools.values())


def child_processes() -> dict[str, str]:
    """This process's children, without those that the pools of `run_processes` keep."""
    helpers = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}  # pyright: ignore
    return {str(pid): words_of(pid).strip() for pid in children() if pid not in helpers}


def _threads() -> dict[str, str]:
    return {f"{thread.name} ({thread.ident})": "" for thread in threading.enumerate()}


def _files() -> dict[str, str]:
    """Open files, pipes and sockets, without those of the pools."""
    helpers = {forkserver._forkserver._forkserver_alive_fd, resource_tracker._resource_tracker._fd}  # pyright: ignore
    for pool in _pools():  # a pipe to each process, and what tells of its end and of ours
        helpers |= {pipe.fileno() for pipe in pool._pipes}
        helpers |= {file for process in pool._processes for file in process._popen.finalizer._args}
    files: dict[str, str] = {}
    for link in Path("/proc/self/fd").iterdir():
        if int(link.name) not in helpers:
            try:
                files[f"{link.name} -> {os.readlink(link)}"] = ""
            except FileNotFoundError:  # the listing's own
                continue
    return files


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _OWN_VARIABLES}


def _settings() -> dict[str, Any]:
    settings: dict[str, Any] = {"directory": os.getcwd()}
    torch = sys.modules.get("torch")
    if torch is not None:
        settings["default dtype"] = torch.get_default_dtype()
        settings["threads of torch"] = torch.get_num_threads()
        settings["grad mode"] = torch.is_grad_enabled()
        settings["deterministic algorithms"] = torch.are_deterministic_algorithms_enabled()
    dist = sys.modules.get("torch.distributed")
    settings["default process group"] = dist is not None and dist.is_initialized()
    for module, name in _REPLACED:  # a process that is started after would be given that, too
        if module in sys.modules:
            settings[f"{module}.{name}"] = attrgetter(name)(sys.modules[module])
    return settings


def _files_here() -> dict[str, str]:
    return {name: "" for name in os.listdir() if name not in _OWN_FILES}


_LOOKS: dict[str, Callable[[], dict[str, Any]]] = {
    "thread": _threads,
    "child process": child_processes,
    "open file": _files,
    "segment of shared memory": pool_segments,  # kept after its job: something refers to the job's group or tensors
    "environment variable": _variables,
    "setting": _settings,
    "file in the working directory": _files_here,
}
_MUST_STAY = ("environment variable", "setting")
