"""The order of an examination: this machine, the way to the others, then all ranks together."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.comm import preflight
from lockstep.errors import ConfigError, LaunchError
from lockstep.launch.doctor import group, machine, probes
from lockstep.launch.doctor.asked import Asked
from lockstep.launch.doctor.check import Check
from lockstep.launch.processes import refuse_few_files
from lockstep.launch.words import say as tell
from lockstep.observe.settings import GuardSettings

if TYPE_CHECKING:
    from lockstep.launch.channel import Channel

_RANK = "lockstep.launch.doctor.rank"
_LOOK_S = 0.2
_LINGER_S = 10.0  # the machine that holds the store lets the others read

Say = Callable[[Check], None]


class Stopped(Exception):
    """Nothing that comes after the failed check, its one argument, could work."""


def examine(asked: Asked, environ: Mapping[str, str], say: Say) -> int:
    """Make all checks that can be made and `say` each; return the launcher's exit code, 0 where it was not needed.

    Stops where nothing further can work. Blocks for some seconds, and with several machines up to a few times
    `asked.wait_s`.
    """
    clock = [probes.clock_offset()]
    for check in probes.examine_machine(asked, environ):
        say(check)
    exit_code = 0
    try:
        refuse_few_files(asked.processes)
        channel = _meet(asked, environ, say)
        _refuse_settings(environ)
        exit_code = _examine_ranks(asked, channel, say)
    except Stopped as stopped:
        say(*stopped.args)
    except LaunchError as error:
        say(Check("FAIL", "way", str(error), "read what the doctor says on the machine that holds it"))
    except (ConfigError, OSError) as error:  # of the launcher: `lockstep run` would end with it
        say(Check("FAIL", "ranks", f"none was started: {error}", "correct that, then run the doctor again"))
    say(machine.check_clock_jump([*clock, probes.clock_offset()]))
    return exit_code


def _channels() -> type[Channel]:
    """The class, which needs torch."""
    try:
        from lockstep.launch.channel import Channel
    except (ImportError, OSError) as error:  # OSError: a library of torch's that the loader does not find
        text = f"not tried, because torch cannot be imported: {error}"
        raise Stopped(Check("FAIL", "ranks", text, "pip install torch")) from error
    return Channel


# ---------------------------------------------------------------------- where the machines meet


def _meet(asked: Asked, environ: Mapping[str, str], say: Say) -> Channel:
    """The channel of this run, once all machines are there. Raises: Stopped where a hop on the way to it fails."""
    if asked.machines == 1:
        if preflight.local_address("127.0.0.1") != "127.0.0.1":
            text = "127.0.0.1 leads nowhere, and there the ranks of one machine meet: the loopback interface is down"
            raise Stopped(Check("FAIL", "interfaces", text, "ip link set lo up"))
        _look_at_own_meeting_point(asked, environ, say)
        return _channels().on_loopback()
    try:
        addresses = preflight.resolve(asked.host, asked.port)
    except (OSError, UnicodeError, preflight.Deadline) as error:
        fix = f"correct {asked.source}, or add it to /etc/hosts; `getent hosts {asked.host}` shows what is known"
        raise Stopped(Check("FAIL", "way", preflight.unresolved(asked.place, error), fix)) from error
    is_here = preflight.leads_here(addresses)
    problem = machine.check_hosting(asked, is_here)
    if problem is not None:
        raise Stopped(problem)
    opens = is_here if asked.is_host is None else asked.is_host
    channel = (_host(asked, say) if opens else None) or _join(asked, addresses, say)
    _roll_call(asked, channel, say)
    return channel


def _look_at_own_meeting_point(asked: Asked, environ: Mapping[str, str], say: Say) -> None:
    """On one machine nothing depends on it, but a script that is started by hand takes it."""
    say(machine.check_port(probes.port_of(asked), asked))
    name = environ.get("MASTER_ADDR", "")
    if not name:
        return
    try:
        found = preflight.resolve(name, asked.port)
    except (OSError, UnicodeError, preflight.Deadline) as error:
        why = f"MASTER_ADDR={name} cannot be found ({getattr(error, 'strerror', None) or 'no answer'})"
        say(Check("FAIL", "way", f"{why}: a script started by hand ends with it", "unset MASTER_ADDR, or correct it"))
        return
    if not preflight.leads_here(found):
        text = f"MASTER_ADDR={name} ({found[0]}) is another machine, but this run has one"
        say(Check("warn", "way", text, "unset MASTER_ADDR; or for several machines see lockstep doctor --help"))


def _host(asked: Asked, say: Say) -> Channel | None:
    """Open the port; None where it is taken, perhaps by another process of this run. Raises: Stopped."""
    port = probes.port_of(asked)
    check = machine.check_port(port, asked)
    if not port.is_free:
        if asked.is_host is None:
            return None
        raise Stopped(check)
    say(check)
    try:
        return _channels().host(asked.host, asked.port, _prefix(asked))
    except LaunchError as error:
        raise Stopped(Check("FAIL", "port", str(error))) from error


def _join(asked: Asked, addresses: list[str], say: Say) -> Channel:
    """Connect to the machine that holds the port, and know it from what else that listens there. Raises: Stopped."""
    start = time.monotonic()
    found = preflight.await_listener(asked.place, addresses, asked.wait_s, tell, "machine")
    if found.result != "open":
        raise Stopped(machine.check_way(asked, found, time.monotonic() - start))
    try:
        channel = _channels().join(found.address, asked.port, _prefix(asked), asked.wait_s)
    except LaunchError as error:
        raise Stopped(machine.check_way(asked, found._replace(result="stranger", detail=str(error)), 0.0)) from error
    say(machine.check_way(asked, found, 0.0))
    return channel


def _prefix(asked: Asked) -> str:
    """Equal for machines of one run, and for none of another that meets at the same port."""
    words = list(asked.words)
    return f"doctor/{words[words.index('--rdzv-id') + 1]}" if "--rdzv-id" in words else "doctor"


def _roll_call(asked: Asked, channel: Channel, say: Say) -> None:
    """Wait for all machines, each with a number of its own. Raises: Stopped."""
    mine = group.Came(host=socket.gethostname(), pid=os.getpid(), node_rank=asked.node_rank)
    channel.append("machine", mine)
    start = time.monotonic()
    if channel.add("machines", 0) < asked.machines:
        tell(f"waiting for {asked.machines} machines, up to {asked.wait_s:g} s")
    keys = [f"machine/{number}" for number in range(asked.machines)]
    while channel.missing(keys, _LOOK_S) and time.monotonic() - start < asked.wait_s and channel.missing(["late"], 0):
        pass
    came = channel.read_all("machine", max(asked.machines, channel.add("machines", 0)))
    check = group.check_machines(came, asked.machines, time.monotonic() - start, asked.node_rank is not None)
    if check.status == "FAIL":
        channel.put("late", 1)  # nobody waits longer, and all read who came before the store goes with this process
        time.sleep(5 * _LOOK_S * channel.is_holder)
        raise Stopped(check)
    say(check)


# ---------------------------------------------------------------------- the ranks


def _refuse_settings(environ: Mapping[str, str]) -> None:
    """Raises: Stopped for settings of the guard with which `lockstep run` would end."""
    try:
        GuardSettings.of(environ)
    except ConfigError as error:
        text = str(error)
        raise Stopped(Check("FAIL", "guard", text, f"unset {text.partition('=')[0]}")) from error


def _examine_ranks(asked: Asked, channel: Channel, say: Say) -> int:
    """Start this machine's ranks as `lockstep run` does, and judge what all ranks have found."""
    from lockstep.launch.launcher import launch
    from lockstep.launch.torchrun_flags import read_flags

    where = [channel.address, str(channel.port), channel.prefix, f"{asked.wait_s:g}"]
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        exit_code = launch(read_flags([*asked.words, "--record", "off", "-m", _RANK, *where], Path(folder)))
    world_size = 0 if channel.missing(["world"], 0) else int(channel.read("world"))
    facts: list[group.Facts] = channel.read_all("facts", world_size)
    say(group.check_ranks(facts, world_size, exit_code))
    same = [*group.check_same_versions(facts), *group.check_torch_gpus(facts)] if facts else []
    for check in [*same, *_together(channel, world_size, {fact["rank"]: fact for fact in facts})]:
        say(check)
    channel.append("reader", 1)
    if channel.is_holder:  # the store goes with this process: the others read first
        channel.missing([f"reader/{number}" for number in range(asked.machines)], _LINGER_S)
    return exit_code


def _together(channel: Channel, world_size: int, facts: Mapping[int, group.Facts]) -> list[Check]:
    links = [link for some in channel.read_all("links", world_size) for link in some]
    checks = [*group.check_meeting(list(facts.values())), *group.check_links(links, facts)]
    if not channel.missing(["clocks"], 0):
        checks += group.check_clocks(channel.read("clocks"), facts)
    keys = {rank: f"error/{rank}" for rank in range(world_size)}
    errors = {rank: channel.read(key) for rank, key in keys.items() if not channel.missing([key], 0)}
    checks += group.check_joined(errors, facts)
    reduced = channel.read_all("reduced", world_size)
    checks += group.check_all_reduce(reduced)
    checks += group.check_pairs([pair for some in channel.read_all("pairs", world_size) for pair in some], facts)
    ended = len(facts) == world_size > len(reduced) and not errors
    if ended and all(check.status == "ok" for check in checks):
        checks.append(Check("FAIL", "group", "a rank ended before the all-reduce did", "read the lines above"))
    return checks
