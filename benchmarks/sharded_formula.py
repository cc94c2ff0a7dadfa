"""How much memory a fully sharded model needs on each rank, from the sizes of its units. Pure arithmetic, in bytes.

P parameters over W ranks, all in fp32, AdamW. Between steps a rank has its parts of the parameters, and of the two
moments; from the backward to the optimizer's step also of the gradients: 4 bytes x P / W each.

While backward is in a unit, a rank also has
- that unit and the root whole, and the next unit, gathered ahead of its need; where ranks share memory, one copy of
  them for all ranks;
- the unit's gradients as autograd leaves them, and once more as the operand of their reduction;
- until that operand is made, the one of the unit before, whose reduction is under way;
- the first gradient of every weight that is used in two places, as the tied weight of a language model is: from its
  first use in backward, the head, to its last, the embedding. There autograd holds it, the second one and their sum;
- what forward has saved for the units whose backward is still to come.

The peak is the largest sum of these over the units, in the order of backward: the blocks from the last one, the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

FP32 = 4
STATES = 2  # AdamW's moments


class Unit(NamedTuple):
    """Modules that are gathered together."""

    numel: int  # elements of their parameters, each counted once
    tied: int = 0  # how many of these belong to weights that are used in two places


def at_rest(units: Sequence[Unit], world_size: int) -> dict[str, float]:
    """Bytes per rank of each part that outlives forward and backward."""
    part = sum(unit.numel for unit in units) * FP32 / world_size
    return {"parameters": part, "gradients": part, "state": STATES * part}


def peak(
    units: Sequence[Unit], world_size: int, activations: float, *, sharing: bool, reductions_under_way: int = 1
) -> float:
    """Bytes per rank at the worst moment of a step.

    units: in the order of forward, the root first. activations: bytes that forward has saved when backward begins.
    sharing: whether the ranks hold whole parameters in memory that all of them see.
    reductions_under_way: the most that may be, the unit's own included, when its gradients have become an operand.
    """
    parts = at_rest(units, world_size)
    copies = 1 / world_size if sharing else 1.0
    root, done, worst = units[0], 0, 0.0
    for place in reversed(range(len(units))):
        whole = {0, max(place - 1, 0), place}
        before = [unit.numel for unit in units[place + 1 :]]
        summing = units[place].numel + (2 if place == 0 else 1) * root.tied + sum(before[:1])
        reducing = 2 * units[place].numel + (root.tied if place else 0) + sum(before[: reductions_under_way - 1])
        moment = copies * sum(units[each].numel for each in whole) + max(summing, reducing) + done / world_size
        worst = max(worst, FP32 * moment + activations * place / len(units))
        done += units[place].numel
    return parts["parameters"] + parts["state"] + worst
