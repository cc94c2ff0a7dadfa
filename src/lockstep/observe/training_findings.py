"""What is wrong with the training itself, from the ranks' facts: other models, drifted replicas, lost gradients, data.

Pure, like `diagnosis`. What is certain makes results wrong; the rest is only said, once.
"""

from __future__ import annotations

from typing import final

from lockstep.observe import data_findings, model_findings
from lockstep.observe.facts import told_by_kind, topics_of
from lockstep.observe.replica_findings import find_drift
from lockstep.observe.scene import Scene
from lockstep.observe.wording import Finding


@final
class Training:
    """Of the same ranks, look after look: what they tell is read again once one of them tells something else."""

    def __init__(self) -> None:
        self._sights: object = None  # of the last look: it asks for both, what is certain and what is not
        self._about: object = None
        self._found: dict[str, list[Finding]] = {}  # in that, by kind

    def find_training(self, scene: Scene) -> Finding | None:
        """The first of the facts that makes the run's results wrong."""
        return next((finding for finding in self._findings(scene) if finding.is_certain), None)

    def notes(self, scene: Scene) -> list[Finding]:
        """What one should know of, and can live with."""
        return [finding for finding in self._findings(scene) if not finding.is_certain]

    def _findings(self, scene: Scene) -> list[Finding]:
        if scene.sights is not self._sights:
            self._look(scene)
            self._sights = scene.sights
        return [finding for kind in _CASES for finding in self._found[kind]]

    def _look(self, scene: Scene) -> None:
        told = told_by_kind(scene.sights)
        states = {rank: (one.status.state, one.is_gone) for rank, one in scene.sights.items()}
        about = states, {kind: rows for kind, rows in told.items() if kind not in _OF_STEPS}
        kinds, self._about = _OF_STEPS if about == self._about else _CASES.keys(), about
        for kind in kinds:
            topics = topics_of(told.get(kind, ()))
            self._found[kind] = [finding for topic in topics for finding in _CASES[kind](scene, topic)]


_CASES = {
    "mesh": model_findings.find_other_meshes,
    "model": model_findings.find_other_models,
    "trained": model_findings.find_frozen,
    "unused": model_findings.find_unused,
    "sync": model_findings.find_unsynced,
    "replica": find_drift,
    "gradient": model_findings.find_not_finite,
    "data": data_findings.find_data,
    "samples": data_findings.find_unshared,
    "save": data_findings.find_shared_files,
}
# What these mean changes with how far the ranks are, or they are told again and again; no other is judged by them.
_OF_STEPS = frozenset(("sync", "gradient", "trained"))
