"""Two machines made of this one: namespaces that share nothing but a cable, for launchers and their ranks.

Each has its own network, host name, /dev/shm and message queues, and where that is asked for its own clock.
"""

from __future__ import annotations

import shutil
import subprocess

import pytest

ADDRESSES = ("10.99.0.1", "10.99.0.2")  # nobody else sees them, nor their ports
_SPACES = {"net": "net", "mount": "mnt", "uts": "uts", "ipc": "ipc"}  # options of unshare and nsenter; names in /proc
_CLOCK = {"time": "time_for_children"}


class TwoMachines:
    """Joined by a pair of veth. One process keeps each alive; so nothing can stay when this process is gone."""

    def __init__(self, *, ahead_s: int = 0, have_names: bool = True) -> None:
        """ahead_s: of the clock that counts from the start of the machine, by how much the second's is ahead.

        have_names: of their own, which lead to no address.
        """
        self._spaces = _SPACES | (_CLOCK if ahead_s else {})
        self._keepers: list[subprocess.Popen[bytes]] = []
        try:
            for machine in range(len(ADDRESSES)):
                clock = ["--time", f"--monotonic={ahead_s * machine}", "--fork"] if ahead_s else []
                command = ["unshare", *(f"--{option}" for option in _SPACES), *clock, "sh", "-c", "echo; exec cat"]
                self._keepers.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
                self._prepare(machine, have_names)
            self._join()
        except BaseException:
            self.close()
            raise

    def _prepare(self, machine: int, has_name: bool) -> None:
        said = self._keepers[machine].stdout
        assert said is not None
        assert said.read(1) == b"\n"
        self.execute(machine, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
        if has_name:
            self.execute(machine, "hostname", f"machine{machine}")

    def _join(self) -> None:
        first, second = (str(keeper.pid) for keeper in self._keepers)
        _run("ip", "link", "add", "link0", "netns", first, "type", "veth", "peer", "name", "link0", "netns", second)
        for machine, address in enumerate(ADDRESSES):
            self.execute(machine, "ip", "address", "add", f"{address}/24", "dev", "link0")
            for name in ("lo", "link0"):
                self.execute(machine, "ip", "link", "set", name, "up")

    def inside(self, machine: int) -> list[str]:
        """What stands before a command that runs on `machine`."""
        folder = f"/proc/{self._keepers[machine].pid}/ns"
        return ["nsenter", *(f"--{option}={folder}/{name}" for option, name in self._spaces.items())]

    def execute(self, machine: int, *command: str) -> None:
        """Run `command` on `machine`, to its end."""
        _run(*self.inside(machine), *command)

    def plug(self, *, is_in: bool) -> None:
        """Pull the cable out, or put it back in."""
        self.execute(1, "ip", "link", "set", "link0", "up" if is_in else "down")

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
