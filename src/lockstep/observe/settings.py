"""How the guard behaves, as the environment and the user say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from lockstep.errors import ConfigError

Mode = Literal["off", "on", "strict", "check"]
MODES: tuple[Mode, ...] = ("off", "on", "strict", "check")
CHECKED_STEPS = 3  # of the mode "check"
FIRST_STEPS = 10  # of which all gradients are looked at
GUARD, HANG_S, EVIDENCE = "LOCKSTEP_GUARD", "LOCKSTEP_HANG_S", "LOCKSTEP_EVIDENCE"
REPLICA_EVERY = "LOCKSTEP_REPLICA_EVERY"
NATIVE = "LOCKSTEP_NATIVE"


@dataclass(frozen=True)
class GuardSettings:
    """How the guard behaves.

    mode: "off"; "on" reports, and raises at the end of the step; "strict" raises at once; "check" is "on", and compares
    every operation of the first three steps before it is sent. hang_s: how long nothing may move while an operation is
    open. look_s: between two looks. evidence: folder for what is kept of a finding; "" keeps nothing.
    """

    mode: Mode = "on"
    hang_s: float = 10.0
    look_s: float = 0.25
    evidence: str = ".lockstep"

    @classmethod
    def of(cls, environ: Mapping[str, str], mode: str | None = None) -> GuardSettings:
        """What the variables say; `mode` overrides theirs.  Raises: ConfigError for what they cannot be."""
        word = mode or environ.get(GUARD, "") or "on"
        if word not in MODES:
            raise ConfigError(f"{GUARD}={word!r}: the guard is one of {', '.join(MODES)}")
        seconds = environ.get(HANG_S, "10")
        try:
            hang_s = float(seconds)
        except ValueError:
            hang_s = 0.0
        if not 0 < hang_s < 1e9:
            raise ConfigError(f"{HANG_S}={seconds!r}: it is a number of seconds above 0")
        every = environ.get(REPLICA_EVERY, "")
        if every and not every.isdecimal():
            raise ConfigError(f"{REPLICA_EVERY}={every!r}: give a number of steps, or 0 for never")
        if (native := environ.get(NATIVE, "")) not in ("", "on", "off"):
            raise ConfigError(f"{NATIVE}={native!r}: it is on or off")
        return cls(cast(Mode, word), hang_s, evidence=environ.get(EVIDENCE, ".lockstep"))
