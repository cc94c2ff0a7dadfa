"""Looks at this machine for the checks of `machine.py`. Every probe has a limit. No torch."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import lockstep
from lockstep.comm import kernel, preflight
from lockstep.comm.control_groups import core_quota, memory_limit
from lockstep.launch.doctor import machine
from lockstep.launch.doctor.asked import Asked
from lockstep.launch.doctor.check import Check
from lockstep.launch.doctor.machine import Limits, Memory, Port
from lockstep.launch.doctor.variables import check_variables
from lockstep.observe.native import IS_IN_C
from lockstep.observe.settings import NATIVE

PACKAGES = ("torch", "numpy", "transformers", "safetensors", "tokenizers")
_LISTEN = "0A"  # state of a socket in /proc/net/tcp
_SHM = Path("/dev/shm")


def examine_machine(asked: Asked, environ: Mapping[str, str]) -> Iterator[Check]:
    """All that can be seen without another process."""
    cores = kernel.core_mask().bit_count()
    processes = asked.processes
    yield from machine.check_versions(installed(), tuple(sys.version_info[:3]))
    yield machine.check_native(IS_IN_C, environ.get(NATIVE, ""))
    yield from check_variables(environ, asked, cores)
    yield machine.check_cores(cores, core_quota(), processes)
    yield from machine.check_memory(memory(), processes)
    directory = _SHM if _SHM.is_dir() else Path("/tmp")
    space = os.statvfs(directory)
    total, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    is_open = os.access(directory, os.W_OK)
    yield machine.check_shared_memory(str(directory), total, free, processes, is_open)
    yield from machine.check_limits(limits(), processes, processes * asked.machines)
    devices = [path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()]
    yield machine.check_gpus(len(devices), _driver(), environ.get("CUDA_VISIBLE_DEVICES"), processes)
    addresses, problem = _own_name()
    found = preflight.interfaces()
    if not environ.get("GLOO_SOCKET_IFNAME"):  # else nobody asks for it
        yield machine.check_own_name(socket.gethostname(), addresses, found, problem, asked)
    chosen = _chosen(asked, addresses)
    yield from machine.check_interfaces(found, chosen, environ, asked)


def installed() -> dict[str, str]:
    """Package -> version, "" where there is none."""
    found = {"lockstep": lockstep.__version__}
    for name in PACKAGES:
        found[name] = ""
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def memory() -> Memory:
    """Of the machine, and of the control group of this process."""
    overcommit = int(kernel.read_proc("/proc/sys/vm/overcommit_memory") or 0)
    return Memory(kernel.free_memory(), memory_limit(), overcommit)


def limits() -> Limits:
    """What `ulimit` shows, and what counts against it."""
    files, files_max = map(_limit, resource.getrlimit(resource.RLIMIT_NOFILE))
    processes = _limit(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    locked = _limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    is_root = os.geteuid() == 0  # for whom the kernel does not count
    has_rdma = os.path.isdir("/sys/class/infiniband") and bool(os.listdir("/sys/class/infiniband"))
    return Limits(files, files_max, float("inf") if is_root else processes, _threads_of_user(), locked, has_rdma)


def _limit(value: int) -> float:
    return float("inf") if value == resource.RLIM_INFINITY else float(value)


def _threads_of_user() -> int:
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, StopIteration, ValueError):  # it has ended
            if folder.stat().st_uid == os.getuid():
                lines = (folder / "status").read_text().splitlines()
                count += int(next(line.split()[1] for line in lines if line.startswith("Threads:")))
    return count


def _driver() -> str:
    text = kernel.read_proc("/proc/driver/nvidia/version").decode()
    found = re.search(r"\b(\d{3}\.\d+(\.\d+)?)\b", text)
    return found.group(1) if found else "unknown" * bool(text)


# ---------------------------------------------------------------------- names, interfaces, ports


def _own_name() -> tuple[list[str], str]:
    try:
        return preflight.resolve(socket.gethostname(), 0), ""
    except (OSError, UnicodeError) as error:
        return [], getattr(error, "strerror", None) or str(error)
    except preflight.Deadline:
        return [], f"no answer in {preflight.RESOLVE_S:g} s"


def _chosen(asked: Asked, own_name: Sequence[str]) -> str:
    """The interface that Gloo would be given, or would take by itself."""
    if asked.machines == 1:
        return preflight.loopback_interface()
    chosen = preflight.gloo_interface(preflight.addresses_of(asked.host), one_machine=False)
    return chosen or next((name for name in map(preflight.interface_of, own_name) if name), "")


def port_of(asked: Asked) -> Port:
    """Try to open the port at all addresses, as torch does, and see who has it where that fails."""
    tried = preflight.listen(asked.place, [], everywhere=True)
    if tried.listener is not None:
        tried.listener.close()
        return Port(asked.port, True)
    return Port(asked.port, False, owners(asked.port) if tried.taken else (), "" if tried.taken else tried.problem)


def owners(port: int, proc: Path = Path("/proc")) -> tuple[str, ...]:
    """The processes that listen at `port`, as far as this user may see: `pid 7 (python train.py)`."""
    wanted: set[str] = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            wanted |= {f"socket:[{inode}]" for inode in listeners((proc / "net" / name).read_text(), port)}
    found = []
    for folder in sorted(proc.glob("[0-9]*")) if wanted else ():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if any(os.readlink(link) in wanted for link in (folder / "fd").iterdir()):
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split()
                found.append(f"pid {folder.name} ({' '.join([*map(os.path.basename, words[:1]), *words[1:]])[:60]})")
    return tuple(found)


def listeners(table: str, port: int) -> list[str]:
    """The inodes of the sockets that listen at `port`. table: the text of /proc/net/tcp or tcp6."""
    rows = [line.split() for line in table.splitlines()[1:]]
    return [row[9] for row in rows if len(row) > 9 and row[3] == _LISTEN and int(row[1].rpartition(":")[2], 16) == port]


def clock_offset() -> float:
    """Wall clock minus a clock that never jumps, in seconds."""
    return time.time() - time.monotonic()
