"""The same case on torch's fully_shard, on ours, and on neither: many cases in one job of real processes."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, final

from case_table import CaseTable
from lockstep.comm.communicator import Communicator
from shard_sides import Side, difference

Body = Callable[[Side], Any]
# Three ranks go over Gloo, which adds in its own order; the others through shared memory, in ours.
SHARED_MEMORY = {1: "off", 2: "on", 3: "off", 4: "on"}
SAME_ORDER = {"torch": (1, 2), "plain": (1, 2, 4), "one": (1,)}  # where every sum is rounded as ours
TOLERANCE = {"torch": 1e-5, "plain": 1e-5, "one": 1e-6}  # elsewhere, relative to the norm of a tensor


class Case(NamedTuple):
    """`against`: the sides that ours must equal. `tolerance`: in place of TOLERANCE, for the same order too."""

    body: Body
    worlds: tuple[int, ...]
    against: tuple[str, ...]
    tolerance: dict[str, float]


@final
class Cases(CaseTable):
    """The cases of one test module, on our fully_shard and on other sides."""

    def add(
        self,
        *worlds: int,
        against: str | tuple[str, ...] = ("torch", "plain"),
        tolerance: dict[str, float] | None = None,
    ) -> Callable[[Body], Body]:
        """Register a case: bitwise where both sides add in one order and `tolerance` does not name the other side."""

        def register(body: Body) -> Body:
            sides = (against,) if isinstance(against, str) else against
            self.by_name[body.__name__] = Case(body, worlds or (2,), sides, tolerance or {})
            return body

        return register

    def shared_memory(self, world_size: int) -> str:
        return SHARED_MEMORY[world_size]

    def run(self, comm: Communicator, name: str) -> str | None:
        return run_case(comm, self.by_name[name])


def run_case(comm: Communicator, case: Case, subject: str = "ours") -> str | None:
    """One case on all its sides. A warning that torch's side does not give is a difference too."""
    against = [kind for kind in case.against if kind != subject]
    results: dict[str, Any] = {}
    warned: dict[str, set[str]] = {}
    for kind in (subject, *against):
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                results[kind] = case.body(Side(kind, comm))
        except Exception:  # noqa: BLE001 - told to the test
            return f"{traceback.format_exc()}on the side {kind!r}"
        warned[kind] = {f"{one.category.__name__}: {one.message}" for one in caught}
    extra = warned[subject] - warned.get("torch", set())
    if extra and "torch" in warned:
        return f"warned: {sorted(extra)[0]}"
    for kind in against:
        usual = None if comm.world_size in SAME_ORDER[kind] else TOLERANCE[kind]
        ours, theirs = results[subject], results[kind]
        if kind == "one":
            ours, theirs = weights(ours), weights(theirs)
        found = difference(ours, theirs, case.tolerance.get(kind, usual))
        if found:
            return f"{subject} against {kind}{found}"
    return None


def weights(result: Any) -> Any:
    """A result without its gradients: roundings that weights of size one do not see are large in a small gradient."""
    if isinstance(result, dict):
        return {key: weights(value) for key, value in result.items() if not str(key).startswith("grad ")}
    return [weights(value) for value in result] if isinstance(result, (list, tuple)) else result
