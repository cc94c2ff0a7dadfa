"""The replay of a lesson in a real browser: played, stepped through, looked at."""

from __future__ import annotations

from pathlib import Path

import pytest
from chromium import Chromium

from lockstep.learn.events import Event, Screen
from lockstep.learn.replay import replay


def ring(world_size: int) -> Screen:
    """One step of a ring, then its sums."""
    events: list[Event] = []
    for rank in range(world_size):
        for kind, peer, source in (
            ("send", (rank + 1) % world_size, rank),
            ("recv", (rank - 1) % world_size, rank - 1),
        ):
            values = (10.0 ** (source % world_size),)
            ends = {"before": values} if kind == "send" else {"after": values}
            about = {"name": "sum of part 0", "dtype": "float32", "shape": (1,), "bytes": 4}
            events.append(Event(rank, kind, 1000 * rank, 90_000, peer=peer, **about, **ends))  # type: ignore[arg-type]
        events.append(Event(rank, "all_reduce", 0, 100_000, reduce="sum", before=(1.0,), after=(11.0,)))
        events.append(Event(rank, "show", 100_001, 100_001, "x", after=(11.0,)))
        events.append(Event(rank, "curve", 100_002, 100_002, "loss", after=(3.0, 2.0, 1.0)))
    return Screen("The ring", "W chunks.", tuple(events))


@pytest.fixture
def tab(browser: Chromium, tmp_path: Path) -> Chromium:
    path = tmp_path / "replay.html"
    path.write_text(replay("all_reduce", "Every rank has a part.", [ring(3), Screen("Nothing", "yet", ())], 3))
    browser.screen(1200, 900)
    browser.open(path)
    return browser


def position(tab: Chromium) -> float:
    return tab.run("Number(document.getElementById('scrub').value)")


def holds(tab: Chromium, rank: int) -> str:
    return tab.run(f"document.getElementById('holds{rank}').textContent")


def test_one_step_at_a_time(tab: Chromium) -> None:
    assert tab.run("document.querySelectorAll('svg .item.future').length") == 6
    tab.press("ArrowRight")
    assert position(tab) == 1
    assert tab.run("document.querySelectorAll('svg .item:not(.future)').length") == 3, "all three messages of the step"
    assert holds(tab, 0) == "[100]", "what came from rank 2"
    tab.press("End")
    assert holds(tab, 1) == "x = 11"
    assert tab.run("document.querySelectorAll('#lines li.future').length") == 0
    tab.press("ArrowLeft", "Home")
    assert position(tab) == 0
    assert tab.console == []
    assert len(tab.requests) == 1


def test_it_plays_to_the_end_and_stops(tab: Chromium) -> None:
    tab.run("document.getElementById('speed').value = '4'")
    tab.click("#play")
    assert tab.text("#play") == "pause"
    tab.wait("document.getElementById('play').textContent === 'play'")
    assert position(tab) == tab.run("Number(document.getElementById('scrub').max)")


def test_what_is_pointed_at_or_has_the_keyboard_says_bytes_and_time(tab: Chromium) -> None:
    for way in ("pointermove", "focus"):
        event = f"new PointerEvent('{way}', {{clientX: 300, clientY: 300}})"
        tab.run(f"document.querySelector('svg .item').dispatchEvent({event})")
        said = tab.text("#tip")
        assert "4 B" in said
        assert " us, from " in said
        tab.run("document.getElementById('tip').hidden = true")


def test_real_time_screens_and_theme(tab: Chromium) -> None:
    before = tab.run("document.querySelector('svg .arrow').getAttribute('d')")
    tab.press("t")
    assert tab.run("document.getElementById('real').checked")
    assert tab.run("document.querySelector('svg .arrow').getAttribute('d')") != before
    tab.click("#screens button:nth-child(2)")
    assert tab.text("#heading") == "2. Nothing"
    tab.click("#screens button:nth-child(1)")
    tab.press("ArrowRight")
    assert tab.text("#heading") == "1. The ring"
    assert position(tab) == 1, "keys are still the page's when a button has been clicked"
    light = tab.run("getComputedStyle(document.body).backgroundColor")
    tab.click("#theme")
    assert tab.run("getComputedStyle(document.body).backgroundColor") != light
    assert tab.console == []
