"""A call of init_process_group beside what the launcher gave this rank: what may keep ranks apart is said before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MEETING = ("MASTER_ADDR", "MASTER_PORT")
_HERE = ("localhost", "127.0.0.1", "::1")


def misfits(given: Mapping[str, str], now: Mapping[str, str], call: Mapping[str, Any], rank: int) -> list[str]:
    """What the program has made of its place among the ranks, as "RANK=0, but the launcher gave 1".

    given: MEETING as the launcher set it, now: the environment at the call, call: its arguments, rank: the launcher's.
    """
    found: list[str] = []
    asked = call.get("rank", -1)
    name, value = ("rank", str(asked)) if asked not in (-1, None) else ("RANK", now.get("RANK", str(rank)))
    if value != str(rank):
        found.append(f"{name}={value}, but the launcher gave {rank}")
    by_environment = call.get("store") is None and str(call.get("init_method") or "env://").startswith("env://")
    if by_environment and now.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # else rank 0 opens a port of its own
        pairs = {each: (now.get(each, ""), given.get(each, "")) for each in MEETING}
        changed = [each for each, pair in pairs.items() if len(set(pair)) > 1 and not set(pair) <= set(_HERE)]
        found += [f"{each}={now.get(each, '(unset)')}, but the launcher waits at {given.get(each)}" for each in changed]
    return found
