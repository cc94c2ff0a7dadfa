"""One demo, started with stock torch or with lockstep: its processes, and what they say when."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, final

from lockstep.comm.preflight import keep_port
from lockstep.demos.catalog import Demo
from lockstep.launch.processes import adopting_orphans, children
from lockstep.launch.worker import hear_of_end

Who = Literal["torch", "lockstep"]

_BEGIN = str(Path(__file__).with_name("demo_begin.py"))
_MARK = "lockstep demo began at"
_PLACES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_END_S = 5.0  # for a launcher to end its ranks


class Line(NamedTuple):
    """What somebody said."""

    at_s: float  # since all ranks have begun; 0 before
    text: str


@final
class Side:
    """`with Side(demo, "torch", folder) as side: for line in side.lines(8.0)`. What it started is ended after it."""

    def __init__(self, demo: Demo, who: Who, folder: Path, variables: Mapping[str, str] | None = None) -> None:
        self.demo, self.who = demo, who
        self._folder, self._variables = folder, dict(variables or {})
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stack = ExitStack()
        self.limit_s = float("inf")  # how long it is listened to after all ranks have begun; may be changed meanwhile
        self._output = -1

    def __enter__(self) -> Side:
        self._own = set(children())
        self._stack.enter_context(adopting_orphans())
        self._output, end = os.pipe()
        self._stack.callback(os.close, self._output)
        self._stack.callback(self._end)
        with ExitStack() as stack:
            stack.callback(os.close, end)
            for words, environ in self._commands():
                process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=end, stderr=end, env=environ, cwd=self._folder,
                    start_new_session=True, preexec_fn=partial(hear_of_end, os.getpid(), signal.SIGKILL),
                )  # fmt: skip
                self._processes.append(process)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @property
    def exit_code(self) -> int | None:
        """The first that is not 0, None while one runs."""
        codes = [process.poll() for process in self._processes]
        return None if None in codes else next((code for code in codes if code), 0)

    def lines(self, seconds: float) -> Iterator[Line]:
        """What is said until `seconds` (then `limit_s`) after all ranks have begun, or until all have ended."""
        self.limit_s, rest, begun_s = seconds, b"", 0.0
        starting = len(self.demo.places) or self.demo.ranks  # on a busy machine one loads for long, and is not silent
        while starting or time.time() < begun_s + self.limit_s or not self._has_ranks():
            if not select.select([self._output], [], [], 0.05)[0]:
                continue
            data = os.read(self._output, 1 << 16)
            if not data:  # all have closed it
                for process in self._processes:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(_END_S)
                return
            *whole, rest = (rest + data).split(b"\n")
            for text in (one.decode(errors="replace").rstrip() for one in whole):
                if _MARK in text:
                    begun_s, starting = float(text.rpartition(" ")[2]), starting - 1
                else:
                    yield Line(0.0 if starting else max(0.0, time.time() - begun_s), text)

    # ------------------------------------------------------------------ what is started

    def _commands(self) -> list[tuple[list[str], dict[str, str]]]:
        script = self.demo.script if self.who == "lockstep" else self.demo.stock_script
        program = [_BEGIN, _MARK, str(script)]
        common = {name: value for name, value in os.environ.items() if name not in _PLACES}
        common |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **self.demo.variables, **self._variables}
        if self.who == "torch":  # which would load lockstep's backend into every process
            common["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        if self.demo.places:
            ports = self._ports()
            return [([sys.executable, *program], common | place.variables(ports)) for place in self.demo.places]
        module = ["lockstep", "run"] if self.who == "lockstep" else ["torch.distributed.run", "--standalone"]
        flags = ["--nproc-per-node", str(self.demo.ranks), "--log-dir", str(self._folder / f"logs-{self.who}")]
        return [([sys.executable, "-m", *module, *flags, *program], common)]

    def _has_ranks(self) -> bool:
        """False while a launcher has yet to end, whose ranks have ended."""
        return bool(self.demo.places) or any(children(process.pid) for process in self._processes)

    def _ports(self) -> dict[str, str]:
        """Nobody else gets them before the demo is over."""
        foreign, own, other = socket.create_server(("127.0.0.1", 0)), keep_port(), keep_port()
        ports = {"own": own, "other": other, "foreign": foreign}
        return {name: str(self._stack.enter_context(port).getsockname()[1]) for name, port in ports.items()}

    # ------------------------------------------------------------------ the end

    def _end(self) -> None:
        """First as a user would, so that launchers tidy up; then whatever is left."""
        if self.who == "lockstep" and not self.demo.places:
            for limit_s in (0.3, _END_S):  # asked a second time, it waits for nobody
                for process in self._processes:
                    process.send_signal(signal.SIGTERM)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(limit_s)
        for process in self._processes:
            process.kill()
            process.wait()
        while left := set(children()) - self._own:  # ranks whose launcher has ended are children of this process
            for pid in sorted(left):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(pid, 0)
