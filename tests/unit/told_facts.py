"""What ranks tell of their training, as one guard sees it, and what it finds in that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lockstep.observe.facts import Facts
from lockstep.observe.flight import Record
from lockstep.observe.scene import Limits, Scene
from lockstep.observe.status import Progress, Sight, Status, Waiting
from lockstep.observe.training_findings import Training
from lockstep.observe.wording import Finding

SITE = "train.py:9 main"
Tell = Callable[[Facts, int], object]  # what a rank tells


def scene_of(
    tell: Tell,
    size: int = 3,
    steps: Mapping[int, int] | None = None,
    gone: Sequence[int] = (),
    unheard: Sequence[int] = (),
    texts: Sequence[str] = (),
    waits: Mapping[int, Waiting] | None = None,
) -> Scene:
    """Ranks that have told it, and have seen what the others told. steps: how far each is, else at 5.

    unheard: they said so a while ago, and their steps are those of their records. texts: of what each has recorded.
    waits: of ranks that stand in a collective of all, which the others have not begun.
    """
    facts = [Facts() for _ in range(size)]
    for rank, one in enumerate(facts):
        tell(one, rank)
    sights: dict[int, Sight] = {}
    for _ in range(2):
        for rank, one in enumerate(facts):
            step = (steps or {}).get(rank, 5)
            wait = (waits or {}).get(rank)
            progress = {"world": Progress(tuple(range(size)), 2 if wait else 1, ())} if waits else {}
            status = Status(rank, size, 4710 + rank, "b", step=step, facts=one.said(), groups=progress)
            status = replace(status, waiting=(wait,)) if wait else status
            sights[rank] = Sight(Status.from_json(status.to_json()), 1.5 * (rank in unheard), rank in gone)
        for rank, one in enumerate(facts):
            one.compare(sights, rank)
    return Scene(0, sights, lambda _: [record(text) for text in texts], Limits(evidence=".lockstep/r7"))


def record(text: str, step: int = 5) -> Record:
    return Record(1, 1, step, 1, 0, 7, False, "world", text, SITE, "")


def found(tell: Tell, size: int = 3, **about: Any) -> Finding:
    """What makes results wrong, which is said in at most 12 lines."""
    finding = Training().find_training(scene_of(tell, size, **about))
    assert finding is not None
    assert len(finding.text.splitlines()) <= 12
    assert all(len(line) <= 110 for line in finding.text.splitlines())
    return finding


def noted(tell: Tell, size: int = 3, **about: Any) -> list[Finding]:
    """What can be lived with."""
    scene = scene_of(tell, size, **about)
    assert Training().find_training(scene) is None
    return Training().notes(scene)


def is_quiet(tell: Tell, size: int = 3, **about: Any) -> bool:
    scene = scene_of(tell, size, **about)
    return Training().find_training(scene) is None and not Training().notes(scene)
