"""Checks of one machine. Pure: each is a function of facts that `probes.py` found. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lockstep.comm.preflight import Interface, Knock, is_loopback
from lockstep.launch.doctor.asked import Asked
from lockstep.launch.doctor.check import Check, Status, size

_GIB = 2**30
_RANK_BYTES = _GIB // 2  # a process that has imported torch and does little
_SHM_BYTES = _GIB // 2  # of one rank: the gradients of GPT-2 small in float32
_FILES, _FILES_PER_RANK = 32, 4  # of a rank, or of who starts it; each other rank is a socket or two
_CLOCK_JUMP_S = 0.05
_ASKED = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # for an interface
_VIRTUAL = ("docker", "br-", "virbr", "veth", "cni", "flannel", "tun", "tap")


class Port(NamedTuple):
    """Whether a port of this machine can be opened."""

    number: int
    is_free: bool
    owners: tuple[str, ...] = ()  # `pid 7 (python train.py)`
    problem: str = ""  # why it cannot be opened, where nobody holds it


class Memory(NamedTuple):
    """Bytes."""

    available: float
    limit: float  # of this process's control group; infinite where there is none
    overcommit: int  # vm.overcommit_memory


class Limits(NamedTuple):
    """What `ulimit` shows; infinite where there is no limit."""

    files: float
    files_max: float  # to which a process may raise it
    processes: float
    threads_now: int  # that count against `processes`
    locked_bytes: float
    has_rdma: bool


# ---------------------------------------------------------------------- names and ways


def check_own_name(host: str, addresses: Sequence[str], own: Sequence[Interface], problem: str, asked: Asked) -> Check:
    """addresses: to which the machine's own name leads. own: what it has. problem: why the name leads nowhere."""
    several = asked.machines > 1
    bad: Status = "FAIL" if several else "warn"
    best = next((one for one in own if not is_loopback(one.address)), Interface("lo", "127.0.0.1"))
    export = f"export GLOO_SOCKET_IFNAME={best.name}"
    if problem:
        text = f"{host} cannot be found ({problem}): Gloo asks for it, unless an interface is given"
        return Check(bad, "own name", text, f"{export}, or: echo '{best.address} {host}' >> /etc/hosts")
    shown, here = ", ".join(addresses), [one.address for one in own]
    foreign = [address for address in addresses if address not in here and not is_loopback(address)]
    if foreign:
        text = f"{host} leads to {foreign[0]}, which is no address of this machine: Gloo would try to listen there"
        return Check(bad, "own name", text, f"{export}, or correct /etc/hosts: {best.address} {host}")
    if several and all(map(is_loopback, addresses)):
        return Check(
            "warn", "own name", f"{host} leads to {shown} only, so Gloo alone would listen where no other machine can "
            "reach it; lockstep chooses the interface itself", f"for stock torch: {export}",
        )  # fmt: skip
    return Check("ok", "own name", f"{host} leads to {shown}")


def check_interfaces(
    interfaces: Sequence[Interface], chosen: str, environ: Mapping[str, str], asked: Asked
) -> list[Check]:
    """chosen: the interface through which this machine talks to where the ranks meet; "" for several it cannot tell."""
    found = [_check_asked_interface(name, environ.get(name, ""), interfaces) for name in _ASKED]
    checks = [check for check in found if check is not None]
    listed = ", ".join(f"{interface.name} {interface.address}" for interface in interfaces) or "none with an address"
    gloo = environ.get("GLOO_SOCKET_IFNAME", "") or chosen
    if asked.machines > 1 and gloo.startswith(_VIRTUAL):
        fix = "export GLOO_SOCKET_IFNAME=<interface> NCCL_SOCKET_IFNAME=<interface> on every machine"
        checks.append(Check("warn", "interfaces", f"{gloo} is chosen, a virtual network ({listed})", fix))
    elif not checks:
        nccl = environ.get("NCCL_SOCKET_IFNAME", "") or _nccl_choice(interfaces)
        checks.append(
            Check("ok", "interfaces", f"{listed}; Gloo takes {gloo or 'what its name leads to'}, NCCL {nccl or 'none'}")
        )
    return checks


def _check_asked_interface(variable: str, value: str, interfaces: Sequence[Interface]) -> Check | None:
    names = [interface.name for interface in interfaces]
    if not value or value.startswith("^"):  # NCCL: all but these
        return None
    for word in value.lstrip("=").split(","):
        exact = variable.startswith("GLOO") or value.startswith("=")
        if not any(name == word if exact else name.startswith(word) for name in names):
            text = f"{variable}={value}, but there is no interface {word!r} with an address"
            return Check("FAIL", "interfaces", text, f"unset {variable}, or set it to one of {', '.join(names)}")
    return None


def _nccl_choice(interfaces: Sequence[Interface]) -> str:
    """NCCL's own order: InfiniBand, then anything but docker and loopback, then those."""
    names = [interface.name for interface in interfaces]
    plain = [name for name in names if not name.startswith(("docker", "lo", "virbr"))]
    return next((n for n in names if n.startswith("ib")), next(iter(plain), next(iter(names), "")))


def check_port(port: Port, asked: Asked) -> Check:
    """The port at which this machine lets the ranks meet."""
    name = f"{asked.source or 'the default port'} {port.number}" if not asked.host else f"port {port.number}"
    if port.is_free:
        return Check("ok", "port", f"{name} is free")
    by = ", ".join(port.owners) or "a process that this user may not see"
    alone = asked.machines == 1
    if port.problem:
        return Check("FAIL", "port", f"{name} cannot be opened: {port.problem}", "choose one from 1024 to 65535")
    holder = port.owners[0].split()[1] if port.owners else "<pid>"
    fix = f"end it (kill {holder}), or choose another port: --master-port {port.number + 1}"
    if asked.source == "MASTER_PORT":
        fix = f"end it (kill {holder}), or: export MASTER_PORT={port.number + 1}"
    elif alone and not asked.source:
        return Check("warn", "port", f"{name} is taken by {by}: `lockstep run` takes a free one, torchrun fails", fix)
    return Check("FAIL", "port", f"{name} is taken by {by}: rank 0 cannot open it, and the others would wait", fix)


def check_way(asked: Asked, found: Knock, waited_s: float) -> Check:
    """What a machine that does not open the port itself finds at the meeting point."""
    where, source = asked.place.meeting_point, asked.source
    if found.result == "open":
        return Check("ok", "way", f"{where} ({source}) answers from {found.address}")
    if found.result == "stranger":
        fix = "end that program there (ss -ltnp shows it), or choose another port on every machine"
        return Check("FAIL", "way", f"{where} answers, but is not this job: {found.detail}", fix)
    if found.result == "refused":
        what = f"{found.address} refuses connections for {waited_s:.0f} s: that machine lives, but nobody listens there"
        return Check("FAIL", "way", f"{where}: {what}", f"run the same command on {asked.host}, with the same port")
    what = f"{found.address} does not answer" if found.result == "silent" else found.detail
    why = "The address is wrong, the machine is down, or a firewall drops the packets"
    fix = f"ping {asked.host}; allow TCP ports 1024-65535 between the machines"
    return Check("FAIL", "way", f"{where}: {what} for {waited_s:.0f} s. {why}", fix)


def check_hosting(asked: Asked, is_here: bool) -> Check | None:
    """What keeps the port closed: this machine is not `host`."""
    if asked.is_host and not is_here:
        text = f"this machine has to open port {asked.port}, but {asked.host} is no address of it"
        return Check("FAIL", "way", text, f"start node rank 0 on {asked.host}, or give an address of this machine")
    return None


# ---------------------------------------------------------------------- software


def check_versions(versions: Mapping[str, str], python: tuple[int, ...]) -> list[Check]:
    """versions: package -> what is installed, "" for none."""
    checks: list[Check] = []
    if python < (3, 10):
        checks.append(Check("FAIL", "versions", f"Python {'.'.join(map(str, python))}: 3.10 is needed"))
    missing = [name for name, version in versions.items() if not version]
    if missing:
        text, fix = f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}"
        checks.append(Check("FAIL", "versions", text, fix))
    torch = versions.get("torch", "")
    if torch and _number(torch) < (2, 11):
        checks.append(Check("FAIL", "versions", f"torch {torch}: 2.11 is needed", "pip install --upgrade torch"))
    there = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return checks or [Check("ok", "versions", f"python {'.'.join(map(str, python[:3]))}, {there}")]


def check_native(is_in_c: bool, word: str) -> Check:
    """word: of LOCKSTEP_NATIVE."""
    if is_in_c or word == "off":
        return Check("ok", "native", "the guard's calls are in C" if is_in_c else "LOCKSTEP_NATIVE=off: all is Python")
    text = "the guard's calls are Python, at two to three times the cost: C was not built, or of other sources"
    return Check("warn", "native", text, "install a C compiler and the headers of this Python, then lockstep once more")


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in version.split("+")[0].split(".")[:2])


def check_gpus(devices: int, driver: str, visible: str | None, processes: int) -> Check:
    """devices: files /dev/nvidiaN. driver: its version, "" for none. visible: CUDA_VISIBLE_DEVICES, None: not set."""
    if not devices:
        if driver:
            fix = "docker run --gpus all, or modprobe"
            return Check("FAIL", "gpus", f"driver {driver}, but no /dev/nvidia* here", fix)
        return Check("ok", "gpus", "none: ranks use the CPU")
    shown = devices if visible is None else len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    text = f"{devices}, driver {driver or 'unknown'}"
    if visible is not None:
        text += f", CUDA_VISIBLE_DEVICES={visible or '(empty)'} shows {shown}"
    if shown > devices:
        return Check("FAIL", "gpus", f"{text}: there are not so many", "unset CUDA_VISIBLE_DEVICES")
    if not shown:
        return Check("warn", "gpus", f"{text}: ranks would use the CPU", "unset CUDA_VISIBLE_DEVICES")
    if shown < processes:
        return Check("FAIL", "gpus", f"{text}: {processes} ranks need one each", f"--nproc-per-node {shown}")
    return Check("ok", "gpus", text)


# ---------------------------------------------------------------------- what ranks take


def check_shared_memory(where: str, total: float, free: float, processes: int, is_open: bool = True) -> Check:
    """where: the file system through which ranks of one machine exchange tensors. is_open: files can be made there."""
    text = f"{where}: {size(free)} of {size(total)} free"
    wanted = max(1, processes * _SHM_BYTES // _GIB)
    fix = f"mount -o remount,size={wanted}G {where}; in a container: --shm-size={wanted}g, or --ipc=host"
    if processes > 1 and not is_open:
        fix = f"mount -o remount,rw {where}; chmod 1777 {where}; in a container: --ipc=host, or without --read-only"
        return Check("warn", "shared mem", f"no file can be made in {where}: ranks of this machine use sockets", fix)
    if processes > 1 and free < processes * _SHM_BYTES:
        need = "Gradients lie there: float32 ones of 124 M parameters (GPT-2) take 0.5 GiB per rank"
        return Check("warn", "shared mem", f"{text}: {size(free / processes)} for each rank. {need}", fix)
    return Check("ok", "shared mem", text)


def check_memory(memory: Memory, processes: int) -> list[Check]:
    """Memory that the ranks of this machine can have."""
    room = min(memory.available, memory.limit)
    text = f"{size(memory.available)} available"
    if memory.limit < float("inf"):
        text += f", control group allows {size(memory.limit)}"
    need = processes * _RANK_BYTES
    checks = [Check("ok", "memory", text)]
    if room < need:
        status: Status = "FAIL" if room < need / 2 else "warn"
        found = f"{text}: {processes} ranks take {size(need)} before they hold a model"
        checks = [Check(status, "memory", found, "--nproc-per-node with fewer, or a container with more (--memory)")]
    if memory.overcommit == 2:
        found = "vm.overcommit_memory=2: large maps that are never touched count in full, and processes fail"
        checks.append(Check("warn", "memory", found, "sysctl vm.overcommit_memory=0"))
    return checks


def check_limits(limits: Limits, processes: int, world_size: int) -> list[Check]:
    """`ulimit`, where it would end a run."""
    checks: list[Check] = []
    files = 256 + 8 * world_size  # with data files and loaders
    if limits.files < files:
        fix = f"ulimit -n {int(min(limits.files_max, 65536))}"
        if limits.files_max < files:
            fix = "raise the hard limit: nofile in /etc/security/limits.conf; in a container: --ulimit nofile=65536"
        bad: Status = "FAIL" if limits.files < _FILES + _FILES_PER_RANK * world_size else "warn"
        checks.append(Check(bad, "limits", f"{limits.files:.0f} open files: {files} are needed (ulimit -n)", fix))
    free = limits.processes - limits.threads_now
    if free < 64 * processes:
        text = f"{limits.processes:.0f} processes and threads (ulimit -u), {limits.threads_now} in use: a rank has 64"
        checks.append(Check("FAIL" if free < 16 * processes else "warn", "limits", text, "ulimit -u unlimited"))
    if limits.has_rdma and limits.locked_bytes < float("inf"):
        text = f"{size(limits.locked_bytes)} of locked memory (ulimit -l): NCCL cannot register InfiniBand's buffers"
        checks.append(Check("FAIL", "limits", text, "ulimit -l unlimited; in a container: --ulimit memlock=-1"))
    counts = {"files": limits.files, "processes": limits.processes}
    shown = [f"{name} {count:.0f}".replace("inf", "unlimited") for name, count in counts.items()]
    return checks or [Check("ok", "limits", f"{', '.join(shown)}, locked memory {size(limits.locked_bytes)}")]


def check_cores(cores: int, quota: float, processes: int) -> Check:
    """cores: that this process may run on. quota: CPU time limit of its control group, in cores."""
    text = f"{cores} cores" + (f", control group allows {quota:g}" if quota < cores else "")
    have = min(cores, quota)
    if have < processes:
        fix = f"--nproc-per-node {max(1, int(have))}, or a container with more (--cpus)"
        return Check("warn", "cores", f"{text}: {processes} ranks take turns", fix)
    return Check("ok", "cores", text)


def check_clock_jump(offsets_s: Sequence[float]) -> Check:
    """offsets_s: wall clock minus a clock that never jumps, at moments of the examination."""
    jump_s = max(offsets_s) - min(offsets_s) if offsets_s else 0.0
    if jump_s > _CLOCK_JUMP_S:
        late = statistics.median(offsets_s) - offsets_s[0]
        text = f"the wall clock jumped by {jump_s:.3g} s ({'forwards' if late >= 0 else 'back'}) while this ran"
        return Check("warn", "clock", f"{text}: times of the report cannot be trusted", "timedatectl set-ntp true")
    return Check("ok", "clock", f"no jump (largest difference {jump_s * 1e3:.1f} ms)")
