"""A run as one document of plain values, which page and terminal draw. No file and no clock here."""

from __future__ import annotations

from typing import Any

from lockstep.observe.profile.verdict import judge
from lockstep.observe.report.cards import cards_of, culprits_of, findings_of
from lockstep.observe.report.curves import curves_of
from lockstep.observe.report.heat import heat_of
from lockstep.observe.report.lanes import lanes_of
from lockstep.observe.report.overlap import overlap_of
from lockstep.observe.report.owners import owners_of
from lockstep.observe.report.proofs import coverage_of, replicas_of
from lockstep.observe.report.run_rows import Status, began_ns_of, run_of
from lockstep.observe.report.source import Source, unswept

VERSION = 1
Document = dict[str, Any]


@unswept()
def document_of(source: Source, status: Status, now_ns: int) -> Document:
    """Units: times in microseconds since the run began, or as their name says.

    Memory: each section has a bound, together 1.5 MB as JSON.
    """
    verdict = judge(source.run)
    coverage, replicas = coverage_of(source), replicas_of(source)
    steps = [step for *_, step in findings_of(source) if step is not None]
    return {
        "version": VERSION,
        "run": run_of(source, status, now_ns),
        "cards": cards_of(source, status, verdict, coverage, replicas),
        "curves": curves_of(source),
        "heat": heat_of(source.run),
        "lanes": lanes_of(source.run, began_ns_of(source) / 1e3, steps, source.moments, culprits_of(source)),
        "overlap": overlap_of(verdict),
        "owners": owners_of(source),
        "coverage": coverage,
        "replicas": replicas,
    }
