"""What the page of a real run draws of its data and its speed, against what its script counted itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chromium import Show

from figured_runs import SAMPLES, WARM_UP, assert_grid_shows, document_in, stock_run


@pytest.mark.limit_s(120)
def test_grid_and_rate_that_are_drawn_are_those_of_the_script(show: Show, tmp_path: Path) -> None:
    tab = show(document_in(stock_run(tmp_path)))
    counted = [json.loads((tmp_path / f"counted-{rank}.json").read_text()) for rank in (0, 1)]
    for epoch in (0, 1, 2):
        tab.click(f"#epoch-{epoch}")
        tab.run("document.querySelector('#coverage-table').open = true")
        tab.settle()
        rows = [text.split("\t") for text in tab.texts("#coverage-table tbody tr")]
        due = {
            rank: [id for each, ids in used if each == epoch for id in ids] for rank, (used, _) in enumerate(counted)
        }
        assert_grid_shows([[float(word) for word in row] for row in rows], due)
        assert f"Epoch {epoch}: exactly once" in tab.text("#coverage .seal.whole")
        assert f"Each of {SAMPLES} samples was read once" in tab.text("#coverage .seal.whole")
        assert "the sampler hands out 1 of them once more" in tab.text("#coverage .seal.whole")
    figures = dict(zip(tab.texts(".figures dt"), tab.texts(".figures dd"), strict=True))
    rate, whose = figures["samples/s"].split(maxsplit=1)
    seconds = [ended_s[-1] - ended_s[WARM_UP - 1] for _, ended_s in counted]
    samples = [sum(len(ids) for _, ids in used[WARM_UP:]) for used, _ in counted]
    due_rate = sum(each / s for each, s in zip(samples, seconds, strict=True))
    assert float(rate.replace(",", "")) == pytest.approx(due_rate, rel=0.3)
    assert whose == "all ranks"
