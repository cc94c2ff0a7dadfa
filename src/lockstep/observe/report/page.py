"""The report of a run as one HTML file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.observe.report.single_file import single_file

_HERE = Path(__file__).parent
SCRIPTS = (  # in the order in which they need each other
    "page_elements",
    "page_state",
    "page_canvas",
    "page_matrix",
    "page_header",
    "page_lane_model",
    "page_lane_picture",
    "page_lane_panel",
    "page_lane_input",
    "page_lanes",
    "page_curves",
    "page_heat",
    "page_overlap",
    "page_owners",
    "page_seals",
    "page_coverage",
    "page_replicas",
    "page_facts",
    "page_live",
)


def render(document: Mapping[str, Any]) -> str:
    """The page of a document, as pure ASCII. Where a server gives it, it asks that one for document.json."""
    run = document.get("run") or {}
    return single_file(
        title=f"{run.get('id', 'run')} - lockstep",
        body=_asset("page.html"),
        style=_asset("page.css"),
        script="".join(_asset(f"{name}.js") for name in SCRIPTS),
        document=document,
        may_fetch=True,
    )


def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="ascii")
