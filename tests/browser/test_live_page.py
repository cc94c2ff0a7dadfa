"""The page as `lockstep watch` serves it: newer data is drawn in place, and what somebody looks at stays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from chromium import Chromium

from lockstep.observe.report.server import PageServer
from report_documents import run_document

Served = tuple[str, dict[str, Any]]  # address, and the document that is served there


@pytest.fixture
def served(browser: Chromium) -> Iterator[Served]:
    document: dict[str, Any] = run_document(2, 60)
    document["run"]["status"] = "running"

    server = PageServer(lambda: document)
    with server.serving():
        yield server.address, document
        browser.open("about:blank")


def test_newer_data_is_drawn_in_place(browser: Chromium, served: Served) -> None:
    address, document = served
    browser.screen(1280, 900)
    browser.open(address)
    browser.focus("#lanes-canvas")
    browser.press("Home", "+", "+", "ArrowRight")
    view, operation = browser.text("#lanes-view"), browser.text("#operation")
    step = browser.run("document.querySelector('#lanes-step').value")
    browser.run("document.querySelector('#heat').mark = 1")
    browser.run("document.querySelector('#heat .body').firstChild.mark = 1")
    document["run"] |= {"steps": 61, "wall_s": 12.5}
    document["lanes"]["steps"].append({**document["lanes"]["steps"][-1], "step": 60})
    document["curves"][0]["values"][-1] = 0.125
    document["cards"].insert(
        0, {"severity": "error", "title": "rank 1 has ended", "text": "", "ranks": [1], "step": 60}
    )
    browser.wait("document.querySelectorAll('.card').length === 3")
    assert "rank 1 has ended" in browser.text(".card")
    assert "61" in browser.text(".figures")
    assert browser.text("#curve-0 .value").startswith("0.125")
    assert "step 60" in browser.text("#lanes-step")
    assert browser.run("document.querySelector('#lanes-step').value") == step
    assert browser.text("#lanes-view") == view
    assert browser.text("#operation") == operation
    assert browser.run("document.activeElement.id") == "lanes-canvas"
    assert browser.run("document.querySelector('#heat .body').firstChild.mark") == 1, (
        "what is the same is not drawn anew"
    )
    assert "every second" in browser.text("footer")


@pytest.mark.parametrize("part", ["#overlap .aside-picture .scroll", "#curves summary"])
def test_the_keyboard_stays_in_a_table_that_is_drawn_anew(browser: Chromium, served: Served, part: str) -> None:
    address, document = served
    first = document["overlap"]["waiting"][0]
    document["overlap"]["waiting"] += [{**first, "site": f"train.py:{line}"} for line in range(40)]
    browser.screen(1280, 900)
    browser.open(address)
    browser.run(f"document.querySelector('{part}').mark = 1")
    browser.focus(part)
    browser.run("document.activeElement.scrollTop = 40")
    scrolled = browser.run("document.activeElement.scrollTop")
    document["overlap"]["waiting"][-1]["waited_us"] += 1_000_000
    document["curves"][0]["values"][-1] = 0.125
    browser.wait(f"!document.querySelector('{part}').mark")
    assert browser.run(f"document.activeElement === document.querySelector('{part}')")
    assert browser.run("document.activeElement.scrollTop") == scrolled == (40 if ".scroll" in part else 0)


def test_a_step_that_somebody_looks_at_stays(browser: Chromium, served: Served) -> None:
    address, document = served
    shown = "Number(document.querySelector('#lanes-step').value)"
    browser.screen(1280, 900)
    browser.open(address)
    slowest = browser.run(shown)
    kept = [step for step in document["lanes"]["steps"] if step["step"] != slowest]
    document["lanes"] = {**document["lanes"], "steps": [*kept, {**kept[0], "step": 77, "why": "slowest"}]}
    browser.wait(f"{shown} === 77")
    browser.focus("#lanes-canvas")
    browser.press("+", "End")
    view, operation = browser.text("#lanes-view"), browser.text("#operation")
    document["lanes"] = {"words": [{**document["lanes"]["words"][0], "text": "barrier"}] * 4, "steps": kept}
    document["run"]["steps"] = 78
    browser.wait("document.querySelector('.figures').innerText.includes('78')")
    browser.settle()
    assert browser.run(shown) == 77
    assert (browser.text("#lanes-view"), browser.text("#operation")) == (view, operation)
    browser.press("p")
    assert browser.run(shown) == kept[-1]["step"]
    assert "barrier" in browser.text("#operation")
    assert browser.console == []


def test_it_asks_its_own_server_only_until_the_run_is_over(browser: Chromium, served: Served) -> None:
    address, document = served
    document["run"]["status"] = "failed"
    browser.open(address)
    browser.wait("document.querySelector('footer').innerText.includes('over')")
    assert "failed" in browser.text("#status")
    assert set(browser.requests) == {address, f"{address}document.json"}
    assert browser.run("fetch('http://127.0.0.1:9/').then(() => 'went', () => 'refused')") == "refused"
    assert any("Content Security Policy" in line for line in browser.console)
