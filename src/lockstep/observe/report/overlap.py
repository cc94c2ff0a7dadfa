"""Where the time went and what would make it faster, as the profile has judged it."""

from __future__ import annotations

from typing import Any

from lockstep.observe.profile.verdict import Verdict

_PAIRS_MAX = 40


def overlap_of(verdict: Verdict) -> dict[str, Any]:
    """Rates, microseconds per step of each rank, the estimates, and who waited for whom."""
    waited_s = sum(pair.waited_s for pair in verdict.waits.pairs)
    return {
        "unseen": verdict.unseen,
        "hidden": verdict.overlap,
        "tokens_per_s": round(max((share.tokens_per_s for share in verdict.shares), default=0.0), 3),
        "samples_per_s": round(sum(share.samples_per_s for share in verdict.shares), 3),
        "flops_per_s": verdict.flops_per_s,
        "ranks": [
            {
                "rank": share.rank,
                "steps": share.steps,
                "wall_us": round(1e3 * share.step_ms),
                "exposed_us": round(1e3 * share.phases_ms["exposed"]),
                "waited_us": round(1e3 * share.waited_ms),
                "hidden_us": round(1e3 * share.hidden_ms),
                "longest_us": round(1e3 * share.longest_ms),
                "phases_us": {name: round(1e3 * ms) for name, ms in share.phases_ms.items()},
            }
            for share in verdict.shares
        ],
        "what_if": [
            {"name": name, "step_us": round(1e3 * ms), "gain": round(gain, 3), "is_least": is_least}
            for name, ms, gain, is_least in verdict.what_ifs
        ],
        "waiting": [
            {"site": pair.site, "text": pair.text, "label": pair.label, "rank": pair.rank, "last_rank": pair.last}
            | {"waited_us": round(1e6 * pair.waited_s), "share": round(pair.waited_s / waited_s, 4)}
            for pair in verdict.waits.pairs[:_PAIRS_MAX]
            if pair.waited_s > 0
        ],
    }
