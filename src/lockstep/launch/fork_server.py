"""A process that has imported what the workers need, and becomes a worker whenever its launcher asks.

    launcher --- socket: one JSON message, and the read end of a pipe ---> fork server
    fork server -> a child -> the worker: the child ends at once, so the worker becomes a child of the launcher

The launcher has declared itself the one that adopts orphans. So it waits for a forked worker and kills it like one that
it started itself, and the death of the fork server harms nobody. A worker begins when the launcher says so through the
pipe: then it knows the worker's pid, and none can run that it does not know.

The fork server has one thread, and no CUDA: otherwise it says so, and the launcher starts fresh interpreters. No torch
is imported by this file itself.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.launch.preload import WITH_TORCH, is_installed
from lockstep.launch.program import Program, read_program, run_program
from lockstep.launch.worker import die_with_launcher
from lockstep.observe.last_words import DEBUG

_REBORN = ("jemalloc_bg_thd",)  # of pyarrow's allocator, which knows of forks: each process starts its own again
_HEADER = struct.Struct("!I")


class Start(NamedTuple):
    """One worker to start."""

    program: Program
    environ: dict[str, str]  # all of it
    folder: str  # to run in
    stdout: str  # path, "" for the launcher's own
    stderr: str


def main() -> None:
    """The fork server: its one argument is the number of the socket to its launcher."""
    die_with_launcher(os.environ)
    link = socket.socket(fileno=int(sys.argv[1]))
    run_program(_serve(link))


def _serve(link: socket.socket) -> Program:
    """Answer the launcher until it goes; return only in workers, with what they have to run."""
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # one that is meant for all: for workers alone
    hello, _ = receive(link)
    if hello is None:
        os._exit(0)
    _preload(hello["modules"])
    problem = why_not_fork()
    gc.collect()
    gc.freeze()  # the workers share these pages: their collectors shall not write to them
    send(link, {"problem": problem})
    while True:
        message, go = receive(link)
        if message is None:
            os._exit(0)
        assert go is not None
        start = Start(read_program(message["program"]), *(message[name] for name in Start._fields[1:]))
        pid = _fork_orphan()
        if pid == 0:
            link.close()
            signal.signal(signal.SIGINT, interrupt)
            return _become_worker(start, go)
        os.close(go)
        send(link, {"pid": pid})


def _preload(modules: Sequence[str]) -> None:
    """What cannot be imported here is left to the program, which may expect just that."""
    for name in modules:
        _try_import(name)
    if "torch" in sys.modules:
        for name in WITH_TORCH:
            _try_import(name)


def _try_import(name: str) -> None:
    try:
        package, _, last = name.rpartition(".")
        if is_installed(name) and not (package in sys.modules and hasattr(sys.modules[package], last)):
            importlib.import_module(name)
    except BaseException as error:  # noqa: BLE001 (also SystemExit: the program shall meet it, not we)
        if DEBUG in os.environ:
            sys.stderr.write(f"lockstep: {name} was not preloaded: {type(error).__name__}: {error}\n")


def why_not_fork() -> str:
    """Why this process cannot be forked safely; "" if it can.

    Threads that end at a fork, as those of OpenBLAS do, are gone after one fork on trial.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    others = [_name_of(task) for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    threads = [name for name in others if name not in _REBORN]
    if threads:
        return f"an import has started {len(threads)} thread(s) ({', '.join(threads)})"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "an import has initialised CUDA"
    return ""


def _name_of(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except OSError:  # it has just ended
        return "?"


def _fork_orphan() -> int:
    """The pid of a new process whose parent has ended already; 0 in it, -1 where the machine has no room for it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        between = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            os._exit(1)
        if pid:
            os.write(writing, str(pid).encode())  # not the worker itself, which may be killed before it has said a word
            os._exit(0)
        while os.getppid() == between:  # it is ending: microseconds
            time.sleep(0.0005)
        os.setsid()  # Ctrl-C at the terminal is for the launcher, which passes it on
        os.close(writing)
        return 0
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as file:
        return int(file.read() or b"-1")  # its end comes when the worker is ready for signals, or has ended


def _become_worker(start: Start, go: int) -> Program:
    os.environ.clear()
    os.environ.update(start.environ)
    die_with_launcher(os.environ)
    os.chdir(start.folder)
    for path, number in ((start.stdout, 1), (start.stderr, 2)):
        if path:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(file, number)
            os.close(file)
    if not os.read(go, 1):
        os._exit(1)
    os.close(go)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # of its own, as in a fresh process; Python's generator does so by itself
    return start.program


def send(link: socket.socket, message: dict[str, Any], descriptor: int | None = None) -> None:
    """One message, and a file descriptor for the other side."""
    text = json.dumps(message).encode()
    data = _HEADER.pack(len(text)) + text  # in one go: who sees its beginning need not wait for the rest
    sent = 0 if descriptor is None else socket.send_fds(link, [data], [descriptor])
    link.sendall(data[sent:])


def receive(link: socket.socket) -> tuple[dict[str, Any] | None, int | None]:
    """One message and the descriptor that came with it; None where the other side has gone."""
    try:
        header, descriptors, _, _ = socket.recv_fds(link, _HEADER.size, 1)
        header += _exactly(link, _HEADER.size - len(header)) if header else b""
        text = _exactly(link, _HEADER.unpack(header)[0]) if header else b""
    except ConnectionError:
        return None, None
    return (json.loads(text) if text else None), (descriptors[0] if descriptors else None)


def _exactly(link: socket.socket, count: int) -> bytes:
    parts: list[bytes] = []
    while count:
        part = link.recv(min(count, 1 << 20))
        if not part:
            raise ConnectionError("the other side has gone")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
