"""Machines made of this one: namespaces that share nothing but a network, for launchers and their ranks.

Each has its own network, host name, /dev/shm and message queues, and where that is asked for its own clock.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

import pytest

ADDRESSES = ("10.99.0.1", "10.99.0.2", "10.99.0.3")  # nobody else sees them, nor their ports
NAMES = ("machine0", "machine1", "machine2")
_SPACES = {"net": "net", "mount": "mnt", "uts": "uts", "ipc": "ipc"}  # options of unshare and nsenter; names in /proc
_CLOCK = {"time": "time_for_children"}


class MachinesApart:
    """Each on a cable to a switch. One process keeps each alive; so nothing can stay when this process is gone."""

    def __init__(self, count: int = 2, *, ahead_s: int = 0, names: Sequence[str] = NAMES) -> None:
        """ahead_s: of the clock that counts from the start of the machine, by how much each is ahead of the one before.

        names: of the machines, which lead to no address; none: all have that of this one.
        """
        self.count = count
        self._spaces = _SPACES | (_CLOCK if ahead_s else {})
        self._keepers: list[subprocess.Popen[bytes]] = []
        try:
            for machine in range(count):
                clock = ["--time", f"--monotonic={ahead_s * machine}", "--fork"] if ahead_s else []
                self._keep(*(f"--{option}" for option in _SPACES), *clock)
                self.execute(machine, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
                if names:
                    self.execute(machine, "hostname", names[machine])
            self._join()
        except BaseException:
            self.close()
            raise

    def _keep(self, *options: str) -> None:
        command = ["unshare", *options, "sh", "-c", "echo; exec cat"]
        self._keepers.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        said = self._keepers[-1].stdout
        assert said is not None
        assert said.read(1) == b"\n"

    def _join(self) -> None:
        self._keep("--net")  # the switch
        self._switch("ip", "link", "add", "switch", "type", "bridge")
        self._switch("ip", "link", "set", "switch", "up")
        *machines, switch = (str(keeper.pid) for keeper in self._keepers)
        for machine, pid in enumerate(machines):
            _run("ip", "link", "add", "link0", "netns", pid, "type", "veth", "peer", f"port{machine}", "netns", switch)
            self._switch("ip", "link", "set", f"port{machine}", "master", "switch", "up")
            self.execute(machine, "ip", "address", "add", f"{ADDRESSES[machine]}/24", "dev", "link0")
            for name in ("lo", "link0"):
                self.execute(machine, "ip", "link", "set", name, "up")

    def _switch(self, *command: str) -> None:
        _run("nsenter", f"--net=/proc/{self._keepers[-1].pid}/ns/net", *command)

    def inside(self, machine: int) -> list[str]:
        """What stands before a command that runs on `machine`."""
        folder = f"/proc/{self._keepers[machine].pid}/ns"
        return ["nsenter", *(f"--{option}={folder}/{name}" for option, name in self._spaces.items())]

    def execute(self, machine: int, *command: str) -> None:
        """Run `command` on `machine`, to its end."""
        _run(*self.inside(machine), *command)

    def plug(self, *, is_in: bool, machine: int = 1) -> None:
        """Pull the cable of `machine` out, or put it back in."""
        self._switch("ip", "link", "set", f"port{machine}", "up" if is_in else "down")

    def deafen(self, machine: int) -> None:
        """What `machine` sends arrives, and nothing that is sent to it."""
        for other in set(range(self.count)) - {machine}:
            nobody = ("lladdr", "02:00:00:00:00:01", "dev", "link0", "nud", "permanent")
            self.execute(other, "ip", "neighbour", "replace", ADDRESSES[machine], *nobody)

    def close(self) -> None:
        """What still runs there loses its network."""
        for keeper in self._keepers:
            assert keeper.stdin is not None
            keeper.stdin.close()
            keeper.wait(10)
            assert keeper.stdout is not None
            keeper.stdout.close()


def skip_without_machines() -> None:
    """Skip the test that asks for them where the tools (iproute2, util-linux) or the privilege are missing."""
    for tool, package in (("ip", "iproute2"), ("unshare", "util-linux"), ("nsenter", "util-linux")):
        if shutil.which(tool) is None:
            pytest.skip(f"needs the command {tool} (package {package}) to make two machines of one")
    allowed = subprocess.run(["unshare", "--net", "ip", "link", "add", "type", "veth"], capture_output=True, text=True)
    if allowed.returncode:
        pytest.skip(f"needs the right to make network namespaces and veth: {allowed.stderr.strip()}")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
