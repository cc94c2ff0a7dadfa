"""The report of a run as one HTML file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.observe.report.single_file import asset, single_file

_IN_ORDER = """
    elements state canvas matrix header lane_model lane_picture lane_panel lane_input lanes
    curves heat overlap owners seals coverage replicas facts live
"""
SCRIPTS = tuple([f"page_{name}" for name in _IN_ORDER.split()])  # in the order in which they need each other


def render(document: Mapping[str, Any]) -> str:
    """The page of a document, as pure ASCII. Where a server gives it, it asks that one for document.json."""
    run = document.get("run") or {}
    return single_file(
        title=f"{run.get('id', 'run')} - lockstep",
        body=asset("page.html", __file__),
        style=asset("page.css", __file__),
        script="".join(asset(f"{name}.js", __file__) for name in SCRIPTS),
        document=document,
        may_fetch=True,
    )
