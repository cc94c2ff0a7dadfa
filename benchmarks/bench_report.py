"""How soon the page of a report stands on the screen, and how large it is. Needs a Chromium.

python benchmarks/bench_report.py [--record]
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from harness import Result, arguments, compare, interleaved, report
from lockstep.observe.report.page import render
from machine import ROOT

sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "browser")]
from chromium import Chromium  # noqa: E402  # pyright: ignore[reportMissingImports]

from report_documents import empty_document, run_document  # noqa: E402  # pyright: ignore[reportMissingImports]

GOAL_S, GOAL_BYTES = 2.0, 2_000_000
# Everything is painted by the one script, so that the first paint shows all of it.
_PAINTED_MS = (
    "Math.max(performance.getEntriesByType('navigation')[0].loadEventEnd,"
    " ...performance.getEntriesByType('paint').map((each) => each.startTime))"
)


def opened(tab: Chromium, path: Path) -> Callable[[int], dict[str, float]]:
    """A variant that opens a page and returns the seconds from the request to the painted page."""

    def run(_: int) -> dict[str, float]:
        tab.open(path)
        tab.wait("performance.getEntriesByType('paint').length > 1")
        return {"open": tab.run(_PAINTED_MS) / 1e3}

    return run


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = arguments("time until the report is on the screen").parse_args(words)
    documents = {
        "nothing recorded": empty_document(),
        "2 ranks, 60 steps": run_document(2, 60),
        "8 ranks, 10,000 steps": run_document(8, 10_000, slow=5),
        "64 ranks, 10,000 steps": run_document(64, 10_000, slow=5),
    }
    sizes, rendered = {}, {}
    with tempfile.TemporaryDirectory() as folder, Chromium() as tab:
        tab.screen(1280, 900)
        paths = {name: Path(folder) / f"{at}.html" for at, name in enumerate(documents)}
        for name, path in paths.items():
            start = time.perf_counter()
            text = render(documents[name])
            rendered[name] = time.perf_counter() - start
            sizes[name] = path.write_text(text)
        variants = {name: opened(tab, path) for name, path in paths.items()}
        seconds = interleaved(variants, rounds=3 if options.quick else 20, warmup=1)["open"]
    plain = seconds.pop("nothing recorded")
    found: list[Result] = [
        compare(
            f"open, {name} / nothing recorded",
            each,
            plain,
            unit="s",
            world_size=int(name.split()[0]),
            goal=f"at most {GOAL_S:g} s and {GOAL_BYTES / 1e6:g} MB",
            kB=round(sizes[name] / 1e3),
            render_s=round(rendered[name], 3),
        )
        for name, each in seconds.items()
    ]
    report("report", found, record=options.record)


if __name__ == "__main__":
    main()
