"""Chaos as pure functions: who is struck and when, what came of it, and how that is told."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

Role = Literal["rank", "fork server", "supervisor"]
Phase = Literal["start-up", "step", "save", "restart"]
PHASES: tuple[Phase, ...] = ("start-up", "step", "save", "restart")
# A rank is forked anew in a fraction of a second; the others cost a start from nothing, so fewer fit into a minute.
SHARES: Mapping[Role, float] = {"rank": 0.96, "fork server": 0.02, "supervisor": 0.02}
# Whom a signal is for, each started by the next: a fork server has nothing to save when it is told to end, and nobody
# would notice that the supervisor is stopped.
_TARGETS: Mapping[str, Sequence[Role]] = {
    "SIGKILL": ("rank", "fork server", "supervisor"),
    "SIGTERM": ("rank", "supervisor"),
    "SIGSTOP": ("rank",),
}


class Strike(NamedTuple):
    """One entry of a plan. The draws are from [0, 1); what they mean is decided when its turn comes."""

    signal: str  # SIGKILL, SIGSTOP or SIGTERM
    role: Role
    which: float  # of several
    moment: float  # between the last start or restart, 0, and a few times what one takes, 1


class Blow(NamedTuple):
    """A strike that was dealt, and what came of it."""

    signal: str
    victim: str  # "rank 1", "fork server"
    phase: Phase
    steps_redone: int | None  # of those finished before; None where another strike came before it was known
    recovery_s: float | None  # until all ranks had done a step again; None where another strike came first


def draw_plan(seed: int, kills: int, stops: int = 0, terms: int = 0) -> list[Strike]:
    """The strikes that `seed` stands for: `kills` SIGKILLs, with SIGSTOPs and SIGTERMs among them."""
    draw = random.Random(seed)
    signals = ["SIGKILL"] * kills + ["SIGSTOP"] * stops + ["SIGTERM"] * terms
    draw.shuffle(signals)
    roles, weights = list(SHARES), list(SHARES.values())
    plan = []
    for signal in signals:
        (role,) = draw.choices(roles, weights)
        if role not in _TARGETS[signal]:
            role = "rank"
        plan.append(Strike(signal, role, draw.random(), draw.random()))
    return plan


def choose(strike: Strike, present: Mapping[Role, Sequence[object]], is_start: bool = True) -> tuple[Role, int] | None:
    """Whom to strike of those that are there, by role and number: who was drawn; in a start, else who starts them.

    None where there is nobody yet whom this strike is for: it waits. In a restart that is soon over; in a start, when
    all the time goes into loading, nothing would ever be struck.
    """
    targets = _TARGETS[strike.signal]
    first = targets.index(strike.role)
    for role in targets[first:] if is_start else targets[first : first + 1]:
        candidates = present.get(role, ())
        if candidates:
            return role, int(strike.which * len(candidates))
    return None


def table(blows: Sequence[Blow]) -> list[str]:
    """Who was struck in which phase how often, one line per victim and one for all; left to right as aligned text."""
    counts = Counter((_victim(blow), blow.phase) for blow in blows)
    victims = sorted({_victim(blow) for blow in blows}, key=lambda name: (not name.startswith("rank"), name))
    rows = [["victim", *PHASES, "all"]]
    for victim in victims:
        figures = [counts[victim, phase] for phase in PHASES]
        rows.append([victim, *map(str, figures), str(sum(figures))])
    totals = [sum(counts[victim, phase] for victim in victims) for phase in PHASES]
    rows.append(["all", *map(str, totals), str(sum(totals))])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) if not column else cell.rjust(width)
                  for column, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]  # fmt: skip


def recoveries(blows: Sequence[Blow]) -> Iterator[str]:
    """Time from a strike to the next step of all ranks, one line per kind of victim and signal.

    Only strikes that no other one followed before that step can tell; each line says how many they are.
    """
    kinds: dict[str, list[Blow]] = {}
    for blow in blows:
        role = "rank" if blow.victim.startswith("rank") else blow.victim
        kinds.setdefault(f"{blow.signal} of a {role}", []).append(blow)
    for kind, of_kind in sorted(kinds.items()):
        seconds = [blow.recovery_s for blow in of_kind if blow.recovery_s is not None]
        if seconds:
            yield (
                f"{kind} to the next step: median {statistics.median(seconds):.2f} s, 95 % {p95(seconds):.2f} s, "
                f"worst {max(seconds):.2f} s ({len(seconds)} of {len(of_kind)}, which no other followed before it)"
            )


def p95(figures: Sequence[float]) -> float:
    """The 95th percentile; of a single figure, itself."""
    return figures[0] if len(figures) == 1 else statistics.quantiles(figures, n=20, method="inclusive")[-1]


def _victim(blow: Blow) -> str:
    return blow.victim if blow.signal == "SIGKILL" else f"{blow.victim} ({blow.signal})"
