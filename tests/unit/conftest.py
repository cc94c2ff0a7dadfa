"""Hypothesis judges results here, not speed: a deadline per example would fail on a busy machine for nothing."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("lockstep", deadline=None)
settings.load_profile("lockstep")
