"""Who is measured against whom, and what ours have to reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from harness import Result
from sharded_variants import OVER, Engine, Kind, Over, Steps

Topic = Literal["fully", "optimizer"]
TOPICS: tuple[Topic, ...] = ("fully", "optimizer")
ALONE = (Kind("alone", "gloo", "AdamW"), Kind("alone", "gloo", "fused AdamW"))
FULLY: tuple[tuple[Engine, Steps], ...] = (
    ("FSDP2", "AdamW"),
    ("FSDP2", "fused AdamW"),
    ("FSDP1", "AdamW"),
    ("FSDP1", "fused AdamW"),
    ("fully_shard", "AdamW"),
    ("fully_shard", "fused AdamW"),
    ("fully_shard", "ShardedOptimizer"),
    ("fully_shard", "plain ShardedOptimizer"),
)
OPTIMIZER: tuple[tuple[Engine, Steps], ...] = (
    ("torch DDP", "AdamW"),
    ("torch DDP", "fused AdamW"),
    ("torch DDP", "ZeRO"),
    ("torch DDP", "fused ZeRO"),
    ("our DDP", "AdamW"),
    ("our DDP", "ShardedOptimizer"),
    ("our DDP", "plain ShardedOptimizer"),
    ("our DDP", "joined"),
    ("our DDP", "plain joined"),
)
GOAL_STEP = {"fully": 0.90, "optimizer": 1.00}  # of the peer's whole step on the same transport
GOAL_MEMORY = 1.00  # of the peer's peak
GOAL_FORMULA = 1.05  # of what the formula says


class Contest(NamedTuple):
    """Some ways to train the same model. Ours are held against torch's FSDP2, or torch's DDP, on the same transport."""

    topic: Topic
    kinds: tuple[Kind, ...]

    def peers(self, over: Over) -> tuple[Kind, ...]:
        """The peer with its two kinds of AdamW: the faster one is the one to beat."""
        return tuple(k for k in self.kinds if k.over == over and _is_peer(k))

    def peer_of(self, kind: Kind) -> Kind | None:
        """The peer whose optimizer does the same arithmetic."""
        return next((peer for peer in self.peers(kind.over) if peer.is_fused == kind.is_fused), None)

    def has_goal(self, kind: Kind) -> bool:
        """Whether `kind` is ours and does what the topic is about."""
        return kind.engine == "fully_shard" or (kind.engine == "our DDP" and kind.shards_optimizer_only)


def _is_peer(kind: Kind) -> bool:
    return kind.engine in ("FSDP2", "torch DDP") and kind.steps.endswith("AdamW")


def contest_of(topic: Topic, engines: Sequence[str] = ()) -> Contest:
    """All kinds of a topic; with `engines` those of them only."""
    pairs = FULLY if topic == "fully" else OPTIMIZER
    kinds = (*ALONE, *(Kind(engine, over, steps) for over in OVER for engine, steps in pairs))
    return Contest(topic, tuple(kind for kind in kinds if not engines or kind.engine in engines))


def judged(result: Result, limit: float) -> Result:
    """`result` with its goal and whether it is met."""
    assert result.ratio is not None
    return replace(result, goal=f"at most {limit:.2f}", extra={**result.extra, "met": result.ratio <= limit})
