"""Checks of all ranks together. Pure: each is a function of what the ranks have reported. No torch."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import TypedDict

from lockstep.comm.preflight import is_loopback
from lockstep.launch.doctor.check import Check, Status, size

SLOWER = 3.0  # than the median of its like: the pair is named
_SHOWN = 4
_ALONE_UP_TO = 16  # ranks
_CLOCK_S = 0.1
_LEAST_LOCAL = 0.2e9  # bytes/s between two ranks of one machine
_LEAST_REMOTE = 0.1e9  # of a network of 1 Gbit/s


class Facts(TypedDict):
    """What a rank says about itself."""

    rank: int
    host: str
    machine: str  # equal for ranks that share a kernel and its network
    pid: int
    versions: dict[str, str]
    devices: int  # files /dev/nvidiaN
    gpus: int  # that torch can use
    addresses: list[str]  # at which other machines may reach it, the likeliest first
    port: int
    meets_at: str  # MASTER_ADDR, as the launcher gave it
    leads_to: list[str]  # addresses of `meets_at` from here; [] where the name is not known


class Came(TypedDict):
    """A machine that has come."""

    host: str
    pid: int
    node_rank: int | None


class Link(TypedDict):
    """One attempt to connect from a rank to another."""

    src: int
    dst: int
    result: str  # as Knock.result
    detail: str


class Clock(TypedDict):
    """How far the clock of a rank's machine is ahead of rank 0's, in seconds, and how sure that is."""

    rank: int
    offset_s: float
    error_s: float


class Pair(TypedDict):
    """An exchange of `nbytes` in both directions at once."""

    first: int
    second: int
    nbytes: int
    seconds: float


class Reduced(TypedDict):
    """One all-reduce over all ranks."""

    nbytes: int
    seconds: float
    is_right: bool
    transport: str
    warning: str  # why it is not the best transport; "" where it is


def stages(world_size: int) -> list[list[tuple[int, int]]]:
    """Every pair of ranks once, in lists of those that measure at the same time: one in small worlds, else all."""
    if world_size <= _ALONE_UP_TO:
        return [[pair] for pair in itertools.combinations(range(world_size), 2)]
    seats: list[int | None] = [*range(world_size)] + [None] * (world_size % 2)
    found: list[list[tuple[int, int]]] = []
    for _ in range(len(seats) - 1):  # a round-robin tournament: one keeps its seat, the others move on
        halves = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in halves if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


# ---------------------------------------------------------------------- who is there


def check_machines(came: Sequence[Came], wanted: int, waited_s: float, is_static: bool) -> Check:
    """Whether as many machines have come as the run needs."""
    named = ", ".join(
        machine["host"] + ("" if machine["node_rank"] is None else f" (node rank {machine['node_rank']})")
        for machine in came[: 2 * _SHOWN]
    )
    numbers = [machine["node_rank"] for machine in came]
    twice = next((number for number in numbers if is_static and numbers.count(number) > 1), None)
    if twice is not None:
        who = " and ".join(f"{m['host']} (pid {m['pid']})" for m in came if m["node_rank"] == twice)
        return Check("FAIL", "machines", f"node rank {twice} was given twice: {who}", "give each its own --node-rank")
    if len(came) >= wanted:
        return Check("ok", "machines", f"{len(came)} came: {named}")
    missing = [number for number in range(wanted) if number not in numbers] if is_static else []
    late = f"; node rank {', '.join(map(str, missing[: 2 * _SHOWN]))} did not" if missing else ""
    fix = "run the same command on the others within that time (--wait-s), and read what they say"
    return Check("FAIL", "machines", f"{len(came)} of {wanted} came in {waited_s:.0f} s: {named}{late}", fix)


def check_ranks(facts: Sequence[Facts], world_size: int, exit_code: int) -> Check:
    """Whether every rank has reported. world_size: 0 where none has. exit_code: of the launcher here."""
    if world_size == 0:
        text = f"none has reported (exit code of the launcher: {exit_code})"
        return Check("FAIL", "ranks", text, "read the lines above")
    there = {fact["rank"] for fact in facts}
    missing = [rank for rank in range(world_size) if rank not in there]
    machines = len({fact["machine"] for fact in facts})
    if missing:
        text = f"{len(there)} of {world_size} ranks came; missing: {', '.join(map(str, missing[:8]))}"
        return Check("FAIL", "ranks", text, "read the lines above, here and on the other machines")
    return Check("ok", "ranks", f"{world_size} on {machines} machine{'s' * (machines > 1)}")


def check_same_versions(facts: Sequence[Facts]) -> list[Check]:
    """Whether all ranks run the same software."""
    checks: list[Check] = []
    names = dict.fromkeys(name for fact in facts for name in fact["versions"])
    for name in names:
        ranks: dict[str, list[Facts]] = {}
        for fact in facts:
            ranks.setdefault(fact["versions"].get(name, "") or "none", []).append(fact)
        if len(ranks) > 1:
            odd = [f"{version} on {_who(group)}" for version, group in sorted(ranks.items(), key=lambda i: -len(i[1]))]
            usual = max(ranks, key=lambda version: len(ranks[version]))
            fix = f"pip install {name}=={usual}, on every machine" if name not in ("python", "cuda", "nccl") else ""
            checks.append(Check("FAIL", "versions", f"{name} differs: {'; '.join(odd)}", fix))
    versions = facts[0]["versions"] if facts else {}
    which = "".join(f", {name.upper()} {versions[name]}" for name in ("cuda", "nccl") if versions.get(name))
    return checks or [Check("ok", "versions", f"the same on all ranks{which}")]


def _who(group: Sequence[Facts]) -> str:
    ranks = ", ".join(str(fact["rank"]) for fact in group[: 2 * _SHOWN])
    more = f" and {len(group) - 2 * _SHOWN} more" if len(group) > 2 * _SHOWN else ""
    hosts = ", ".join(dict.fromkeys(fact["host"] for fact in group[: 2 * _SHOWN]))
    return f"rank{'s' * (len(group) > 1)} {ranks}{more} ({hosts})"


def check_torch_gpus(facts: Sequence[Facts]) -> list[Check]:
    """GPUs that are there, but not for torch."""
    blind = [fact for fact in facts if fact["devices"] and not fact["gpus"]]
    if not blind:
        return []
    built = blind[0]["versions"].get("cuda")
    why, fix = "torch has no CUDA", "pip install a CUDA build of torch"
    if built:
        why = f"torch is built for CUDA {built}: the driver is too old, or none is visible"
        fix = "compare nvidia-smi's CUDA version with torch.version.cuda"
    text = f"{_who(blind)}: {blind[0]['devices']} GPUs, of which torch can use none: {why}"
    return [Check("FAIL", "gpus", text, fix)]


# ---------------------------------------------------------------------- the ways between them


def check_links(links: Sequence[Link], facts: Mapping[int, Facts]) -> list[Check]:
    """Whether machines reach each other at ports of their own, as Gloo and NCCL need it."""
    broken = [link for link in links if link["result"] not in ("open", "stranger")]
    if not links:
        return []
    if not broken:
        return [Check("ok", "links", f"{len(links)} ways between machines are open")]
    checks: list[Check] = []
    for link in broken[:_SHOWN]:
        src, dst = facts[link["src"]], facts[link["dst"]]
        way = f"{_name(link['src'], facts)} cannot reach {_name(link['dst'], facts)} at {_address(dst)}:{dst['port']}"
        fix = f"on {dst['host']}: iptables -I INPUT -s {_address(src)} -p tcp -j ACCEPT, or ufw allow from it"
        if link["result"] != "refused":  # it need not be a firewall
            fix += "; another network: export GLOO_SOCKET_IFNAME=<the one that joins the machines>, also for NCCL"
        checks.append(Check("FAIL", "links", f"{way}: {link['detail']}", fix))
    return checks + _more("FAIL", "links", len(broken))


def _more(status: Status, name: str, count: int) -> list[Check]:
    return [Check(status, name, f"and {count - _SHOWN} more")] if count > _SHOWN else []


def check_meeting(facts: Sequence[Facts]) -> list[Check]:
    """Whether the name that torch's rendezvous made up for rank 0's machine leads there from the others."""
    first = next((fact for fact in facts if fact["rank"] == 0), None)
    if first is None:
        return []
    lost = [fact for fact in facts if fact["machine"] != first["machine"] and all(map(is_loopback, fact["leads_to"]))]
    if not lost:
        return []
    there = "leads to that machine itself" if lost[0]["leads_to"] else "is not known"
    text = f"rank 0's machine is announced as {first['meets_at']!r}, which on {_who(lost)} {there}"
    return [Check("FAIL", "way", text, f"on {first['host']}, machine of rank 0, add: --local-addr {_address(first)}")]


def check_joined(errors: Mapping[int, str], facts: Mapping[int, Facts]) -> list[Check]:
    """What ranks said that could not form a group or not work in it; equal sentences once."""
    said: dict[str, list[Facts]] = {}
    for rank in sorted(errors.keys() & facts.keys()):
        said.setdefault(errors[rank].replace(f"rank {rank}: ", ""), []).append(facts[rank])
    fix = "correct what this says, then run the doctor again"
    return [Check("FAIL", "group", f"{_who(some)}: {text}", fix) for text, some in said.items()]


def check_clocks(clocks: Sequence[Clock], facts: Mapping[int, Facts]) -> list[Check]:
    """Clocks of the machines beside rank 0's."""
    checks: list[Check] = []
    for clock in clocks:
        off_s, error_s = clock["offset_s"], clock["error_s"]
        if abs(off_s) - error_s > _CLOCK_S:
            way, host = "ahead of" if off_s > 0 else "behind", facts[clock["rank"]]["host"]
            text = f"{host} is {abs(off_s):.3g} s {way} rank 0's machine (+-{error_s * 1e3:.1f} ms)"
            checks.append(Check("warn", "clock", f"{text}: logs cannot be compared", "timedatectl set-ntp true"))
    if clocks and not checks:
        worst = max(clocks, key=lambda clock: abs(clock["offset_s"]))
        text = f"machines agree within {abs(worst['offset_s']) * 1e3:.1f} ms (+-{worst['error_s'] * 1e3:.1f} ms)"
        checks.append(Check("ok", "clock", text))
    return checks


# ---------------------------------------------------------------------- speed


def check_all_reduce(reduced: Sequence[Reduced]) -> list[Check]:
    """The all-reduce over all ranks, as each has seen it."""
    if not reduced:
        return []
    if not all(one["is_right"] for one in reduced):
        return [Check("FAIL", "all-reduce", "the sum is wrong on some rank: a defect of memory, network or software")]
    slowest = max(reduced, key=lambda one: one["seconds"])
    ms, over = slowest["seconds"] * 1e3, slowest["transport"]
    text = f"{size(slowest['nbytes'])} in {ms:.3g} ms over {over}, right on every rank"
    warning = next((one["warning"] for one in reduced if one["warning"]), "")
    return [Check("ok", "all-reduce", text), *([Check("warn", "all-reduce", warning)] if warning else [])]


def check_pairs(pairs: Sequence[Pair], facts: Mapping[int, Facts]) -> list[Check]:
    """Bandwidth of each pair against the others of its kind: inside a machine, or between machines."""
    checks: list[Check] = []
    for is_local, kind, least in ((True, "inside a machine", _LEAST_LOCAL), (False, "between machines", _LEAST_REMOTE)):
        alike = [p for p in pairs if (facts[p["first"]]["machine"] == facts[p["second"]]["machine"]) == is_local]
        if alike:
            checks += _check_alike(alike, kind, least, facts)
    return checks


def _check_alike(pairs: Sequence[Pair], kind: str, least: float, facts: Mapping[int, Facts]) -> list[Check]:
    median = statistics.median(pair["seconds"] for pair in pairs)
    slow = sorted((p for p in pairs if p["seconds"] > SLOWER * median), key=lambda p: -p["seconds"])
    checks = [
        Check(
            "warn", "pairs", f"{_name(pair['first'], facts)} and {_name(pair['second'], facts)}: {_rate(pair)}, "
            f"{pair['seconds'] / median:.1f} times slower than the median {kind}", _cause(pair, slow, facts),
        )
        for pair in slow[:_SHOWN]
    ]  # fmt: skip
    checks += _more("warn", "pairs", len(slow))
    typical = min(pairs, key=lambda pair: abs(pair["seconds"] - median))
    text = f"1 {kind}: {_rate(typical)} each way"
    if len(pairs) > 1:
        slowest = max(pairs, key=lambda pair: pair["seconds"])
        text = f"{len(pairs)} {kind}: median {_rate(typical)} each way, slowest {_rate(slowest)}"
    if typical["nbytes"] / median < least:
        fix = "another interface (GLOO_SOCKET_IFNAME)?" if "between" in kind else "other programs on it? see top"
        return [*checks, Check("warn", "pairs", f"{text}: expected {least / 1e9:g} GB/s", fix)]
    return checks or [Check("ok", "pairs", text)]


def _cause(pair: Pair, slow: Sequence[Pair], facts: Mapping[int, Facts]) -> str:
    """Which rank to look at, where one is in all slow pairs."""
    is_local = facts[pair["first"]]["machine"] == facts[pair["second"]]["machine"]
    common = set.intersection(*({p["first"], p["second"]} for p in slow))
    if len(slow) > 1 and len(common) == 1:
        return f"rank {common.pop()} is in all slow pairs: look at its {'core' if is_local else 'cable and interface'}"
    way = f"look at the way between rank {pair['first']} and rank {pair['second']}: interface, cable, other traffic"
    return "other programs on their cores? see top" if is_local else way


def _name(rank: int, facts: Mapping[int, Facts]) -> str:
    return f"rank {rank} ({facts[rank]['host']})"


def _address(fact: Facts) -> str:
    return next(iter(fact["addresses"]), "<its address>")


def _rate(pair: Pair) -> str:
    return f"{pair['nbytes'] / pair['seconds'] / 1e9:.3g} GB/s"
