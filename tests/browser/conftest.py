"""One headless browser for all tests, and the pages that they open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from chromium import Chromium, Show, executable

from lockstep.observe.report.page import render


@pytest.fixture(scope="session")
def browser() -> Iterator[Chromium]:
    if executable() is None:
        pytest.skip("no Chromium on PATH (Debian: apt-get install chromium)")
    with Chromium() as tab:
        yield tab


@pytest.fixture
def show(browser: Chromium, tmp_path: Path) -> Iterator[Show]:
    """Opens the page of a document from disk. When the test ends, nothing may have been complained of or asked for."""
    path = tmp_path / "report.html"

    def open_page(document: Mapping[str, Any], *, width: int = 1280, dark: bool = False) -> Chromium:
        path.write_text(render(document))
        browser.screen(width, 900, dark=dark)
        browser.open(path)
        return browser

    yield open_page
    assert browser.console == []
    assert browser.requests == [path.as_uri()]
