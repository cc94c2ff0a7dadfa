"""The page of a report in a real browser: what it shows, and what pointer and keyboard do to it."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from chromium import Chromium, Show

from report_documents import empty_document, hostile_document, open_step, owners, run_document

TITLES = [
    "Diagnosis",
    "Every rank on one clock",
    "Curves",
    "Every rank, every step",
    "Communication",
    "Who owns what",
    "Data, exactly once",
    "Replicas",
    "Facts of the run",
]
LANES = "#lanes-canvas"
GUTTER, TOP = 62, 24  # of the lanes, in a wide window


def _texts(tab: Chromium, selector: str) -> list[str]:
    return tab.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((each) => each.innerText)")


def _count(tab: Chromium, selector: str) -> int:
    return tab.run(f"document.querySelectorAll({json.dumps(selector)}).length")


def _shown_step(document: Mapping[str, Any], tab: Chromium) -> dict[str, Any]:
    number = int(tab.run("document.querySelector('#lanes-step').value"))
    return next(step for step in document["lanes"]["steps"] if step["step"] == number)


def _at_us(tab: Chromium, step: Mapping[str, Any], us: float) -> float:
    """Where a time stands in the lanes, as a part of their width."""
    width = tab.run(f"document.querySelector('{LANES}').getBoundingClientRect().width")
    return (GUTTER + us * (width - GUTTER - 1) / (step["ended_us"] - step["began_us"])) / width


def _track(tab: Chromium, ranks: int, row: int) -> float:
    """Where a rank's first operations stand in the lanes, as a part of their height."""
    height = tab.run(f"document.querySelector('{LANES}').getBoundingClientRect().height")
    lane, phases = (62, 24) if ranks <= 4 else (52, 18)
    return (TOP + row * lane + 4 + phases + 3 + 3) / height


def test_smoke(show: Show) -> None:
    document = run_document(2, 60)
    tab = show(document)
    assert _texts(tab, "main h2") == TITLES
    assert tab.text("h1").startswith(document["run"]["id"])
    assert "finished" in tab.text("#status")
    assert not _texts(tab, ".missing")
    assert tab.run("document.title") == f"{document['run']['id']} - lockstep"


@pytest.mark.parametrize(("ranks", "steps"), [(2, 60), (8, 10_000)])
def test_every_section_shows_what_was_recorded(show: Show, ranks: int, steps: int) -> None:
    document = run_document(ranks, steps, slow=1)
    tab = show(document)
    figures = " ".join(_texts(tab, ".figures div"))
    assert f"{ranks}" in figures
    assert f"{steps:,}" in figures
    assert _texts(tab, ".card .word") == [card["severity"].capitalize() for card in document["cards"]]
    assert "num_replicas=W" in tab.text(".card .lever")
    assert len(_texts(tab, "#lanes-step option")) == len(document["lanes"]["steps"])
    assert [text.split("\n")[0] for text in _texts(tab, ".curve figcaption b")] == [
        c["name"] for c in document["curves"]
    ]
    for name in ("lanes", "heat", "owners", "coverage", "replicas", *(["waiting"] if ranks > 2 else [])):
        ink = f"document.querySelector('#{name}-canvas').getContext('2d')"
        data = f"{ink}.getImageData(0, 0, {ink}.canvas.width, {ink}.canvas.height).data"
        assert tab.run(f"new Set(new Uint32Array({data}.buffer)).size") > 3, f"{name} is painted"
    assert "exactly once" in tab.text("#coverage .seal.whole")
    assert "Equal on all ranks" in tab.text("#replicas .seal.whole")
    assert "as fast as the others" in tab.text("#overlap")
    assert document["owners"]["strategy"] in tab.text("#owners .lead")
    assert ["NCCL_SOCKET_IFNAME", "ens5", "Slurm"] in [text.split("\t") for text in _texts(tab, "#facts tr")]
    assert "SIGKILL" in tab.text(".attempts") if steps > 100 else not _count(tab, ".attempts")


def test_what_is_missing_is_said_with_what_to_do(show: Show) -> None:
    tab = show(empty_document())
    said = _texts(tab, "main .missing")
    assert len(said) == len(TITLES)
    assert any("lockstep.log(step, loss=...)" in text for text in said)
    assert all(tab.run("[...document.querySelectorAll('main .missing')].map((each) => !!each.querySelector('code'))"))
    show({**empty_document(), "missing": {"coverage": "This run read no data."}})
    assert "This run read no data." in _texts(tab, "#coverage .missing")


def test_a_part_that_is_damaged_leaves_the_rest(show: Show) -> None:
    tab = show({**run_document(2, 60), "heat": {"first": [0], "last": [0], "wall_us": [[1]]}})
    assert "cannot be drawn" in tab.text("#heat .missing")
    assert len(_texts(tab, ".missing")) == 1
    assert "Equal on all ranks" in tab.text("#replicas")
    assert len(tab.console) == 1
    tab.console.clear()


def test_nothing_of_a_record_becomes_markup_or_script(show: Show) -> None:
    document = hostile_document()
    tab = show(document)
    tab.focus(LANES)
    tab.press(".", ".", "ArrowDown", "n")
    tab.point(LANES, 0.6, _track(tab, 3, 0))
    for name in ("#heat-canvas", "#coverage-canvas", "#owners-canvas"):
        tab.focus(name)
        tab.press("ArrowRight")
    tab.run("for (const each of document.querySelectorAll('details')) each.open = true")
    tab.settle()
    assert tab.run("window.harmed ?? 0") == 0
    assert tab.run("document.scripts.length") == 2
    assert _count(tab, "img, iframe, object, embed, body script ~ script ~ script") == 0
    assert _count(tab, "a:not([href^='#'])") == 0
    everything = tab.text("body")
    assert "<img src=x onerror=" in everything
    assert "</script><script>" in everything
    assert "⟨U+202E⟩" in everything
    assert not set("\u202e\u2066\u200f\u2028\u0007") & set(everything)
    assert tab.run("document.documentElement.scrollWidth") <= 1280


# ------------------------------------------------------------------ lanes


def test_pointer_tells_what_an_operation_is(show: Show) -> None:
    document = run_document(2, 60)
    tab = show(document)
    step = _shown_step(document, tab)
    entered, left = step["ranks"][1]["ops"][0][2:4]
    tab.point(LANES, _at_us(tab, step, (entered + left) / 2), _track(tab, 2, 1))
    tip = tab.text("#tip")
    last = next(join[1] for join in step["joins"] if join[0] == 0)
    for part in ("all_reduce float32 [2097152] sum", "at train.py:58 in step", "bucket 0", "rank 1:", "8 MiB at", "/s"):
        assert part in tip
    assert ("arrived last" if last == 1 else f"last to arrive: rank {last}") in tip
    tab.point(LANES, _at_us(tab, step, 4_000), (TOP + 4 + 10) / (TOP + 2 * 62 + 12))
    assert tab.text("#tip").startswith("forward\nrank 0")
    tab.point("#curves-title")
    assert tab.run("document.querySelector('#tip').hidden")


def test_keyboard_goes_through_operations_ranks_and_steps(show: Show) -> None:
    document = run_document(8, 10_000, slow=5)
    tab = show(document)
    tab.focus(LANES)
    tab.press("Home")
    assert "bucket 0" in tab.text("#operation")
    said = tab.text("#live")
    assert "rank 0" in said
    assert "train.py:58 in step" in said
    assert "last to arrive: rank 5" in said
    tab.press(".")
    assert "bucket 1" in tab.text("#operation")
    tab.press("ArrowDown", "ArrowDown")
    assert "rank 2:" in tab.text("#live")
    rows = [row.split("\t") for row in _texts(tab, "#operation tbody tr")]
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "4", "5 (last)", "6", "7"]
    tab.press("Escape")
    assert "choose an operation" in tab.text("#operation")
    steps = [str(step["step"]) for step in document["lanes"]["steps"]]
    tab.press("p", "p", "p", "p")
    assert tab.run("document.querySelector('#lanes-step').value") == steps[0]
    tab.press("n")
    assert tab.run("document.querySelector('#lanes-step').value") == steps[1]
    assert tab.run("document.activeElement.id") == "lanes-canvas", "the keyboard stays where it was"


def test_step_that_was_not_ended_comes_first_with_who_is_to_blame(show: Show) -> None:
    document = run_document(8, 60)
    document["lanes"]["steps"].append(open_step(document, culprit=5))
    document["run"]["status"] = "failed"
    tab = show(document)
    assert tab.text("#lanes-step option:checked") == "step 60 · never ended"
    assert tab.text("#lanes .lead").startswith("Step 60 was never ended.")
    said = _texts(tab, "#lanes .says li")
    assert said == ["rank 5: does not move: at train.py:41 load", "ranks 0–4, 6–7: waits for rank 5: all_reduce"]
    assert "culprit" in tab.run("document.querySelector('#lanes .says li').className")
    assert "never came\nrank 5" in tab.text("#operation"), "what most ranks are in is chosen"
    assert "bandwidth" not in tab.text("#operation .facts"), "nothing has moved"
    tab.point(LANES, 0.5, (TOP + 5.2 * 52) / (TOP + 8 * 52 + 12))
    assert tab.text("#tip").startswith("does not move: at train.py:41 load\nrank 5")
    legend = _texts(tab, "#lanes .legend li")[:4]
    assert legend == ["forward", "backward", "exposed communication", "in the step that was not ended"]
    tab.point(LANES, 0.5, (TOP + 4.2 * 52) / (TOP + 8 * 52 + 12))
    assert tab.text("#tip").startswith("waits for rank 5: all_reduce\nexposed communication\nrank 4")
    tab.point(LANES, 0.5, _track(tab, 8, 2))
    assert "rank 5 never came" in tab.text("#tip")
    whole = tab.picture(of=LANES)
    tab.click("#lanes-previous")
    assert tab.text("#lanes .lead").startswith("Step 59 took")
    assert not _count(tab, "#lanes .says")
    assert tab.picture(of=LANES) != whole


def test_zoom_and_pan_by_keys_wheel_drag_and_buttons(show: Show) -> None:
    document = run_document(2, 60)
    tab = show(document)
    whole = tab.text("#lanes-view")
    assert whole.startswith("all ")
    views = [whole]

    def changed() -> bool:
        views.append(tab.text("#lanes-view"))
        return views[-1] != views[-2]

    tab.focus(LANES)
    tab.press("Escape", "+")
    assert changed()
    tab.press("ArrowRight")
    assert changed()
    tab.press("-", "-", "-")
    assert changed()
    assert views[-1] == whole
    tab.wheel(LANES, -240, control=True)
    assert changed()
    tab.drag(LANES, 0.7, 0.4, 0.4)
    assert changed()
    tab.press("0")
    assert changed()
    assert views[-1] == whole
    tab.click("#lanes-in")
    assert changed()
    tab.click("#lanes-fit")
    assert changed()
    tab.run("document.activeElement.blur()")
    tab.wheel(LANES, 100)
    assert not changed(), "the wheel alone scrolls the page"


def test_a_wait_that_lies_over_a_phase_hides_its_name(show: Show) -> None:
    document = run_document(2, 60)
    step = open_step(document, culprit=1)
    row = step["ranks"][0]
    row["spans"] = [["backward", 0, 3_000_000], ["exposed", 3_000_000, row["ended_us"]]]
    document["lanes"]["steps"].append(step)

    def texts(wait_from_us: int) -> list[str]:
        row["ops"][1][2:5:2] = [wait_from_us] * 2
        tab = show(document)
        tab.run(
            "(() => { window.texts = []; const old = CanvasRenderingContext2D.prototype.fillText;"
            "CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {"
            "window.texts.push(text); old.call(this, text, x, y); }; })()"
        )
        tab.screen(1281, 900)
        tab.settle()
        return tab.run("window.texts")

    assert "backward" in texts(2_900_000)
    covered = texts(300_000)
    assert "waits for rank 1" in covered
    assert "backward" not in covered


def test_a_click_chooses_an_operation_on_all_ranks(show: Show) -> None:
    document = run_document(2, 60)
    tab = show(document)
    step = _shown_step(document, tab)
    entered, left = step["ranks"][0]["ops"][0][2:4]
    before = tab.picture(of=LANES)
    tab.click(LANES, _at_us(tab, step, (entered + left) / 2), _track(tab, 2, 0))
    assert "bucket 0" in tab.text("#operation")
    assert "8 MiB" in tab.text("#operation .facts")
    tab.point("#curves-title")
    assert tab.picture(of=LANES) != before


def test_what_is_not_drawn_and_what_is_a_lower_bound_is_said(show: Show) -> None:
    document = run_document(2, 60)
    tab = show(document)
    assert _count(tab, "#lanes-unlisted") == 0
    assert "\u2265" not in tab.text("#overlap")
    for step in document["lanes"]["steps"]:
        for n, rank in enumerate(step["ranks"]):
            rank["unlisted"] = 130 * n
    document["overlap"]["what_if"][2]["is_least"] = True
    tab = show(document)
    assert tab.text("#lanes-unlisted").startswith("Not drawn: 130 operations, of one rank up to 130.")
    assert "24.8 ms\t\u2265 1.06\u00d7" in tab.text("#overlap")
    assert "a faster network gains at least that much" in tab.text("#overlap")


def test_a_card_jumps_to_its_step_and_rank(show: Show) -> None:
    document = run_document(8, 10_000, slow=5)
    document["cards"][1]["step"] = 5_207  # not recorded in detail
    tab = show(document)
    tab.click("#card-0-jump")
    assert tab.run("document.querySelector('#lanes-step').value") == "5000"
    assert tab.run("document.activeElement.id") == "lanes-canvas"
    assert tab.run("document.querySelector('#lanes').getBoundingClientRect().top") < 200
    tab.focus("#card-1-jump")
    tab.press("Enter")
    assert "Step 5,207 was not recorded" in tab.text("#lanes-note")
    assert "rank 5" in tab.text("#live")


# ------------------------------------------------------------------ curves, heat, the rest


def test_curves_tell_values_and_what_is_not_finite(show: Show) -> None:
    document = run_document(2, 60)
    values = document["curves"][0]["values"]
    values[40] = float("nan")
    document["curves"][3] |= {"steps": [7], "values": [0.5], "low": None, "high": None}
    tab = show(document)
    assert "not finite (NaN or Inf) at 1 point, first at step 40" in tab.text("#curve-0")
    assert _count(tab, "#curve-0 .not-finite") == 1
    assert _count(tab, "#curve-3 .lone") == 1, "one value is no line"
    tab.focus("#curve-0-plot")
    tab.press("Home", "ArrowRight")
    assert f"{values[1]:.4g}" in tab.text("#curve-0 .value")
    assert tab.text("#curve-0 .value").endswith("step 1")
    assert tab.text("#curve-2 .value").endswith("step 1"), "one cursor for all"
    assert tab.text("#live").startswith("loss at step 1")
    tab.point("#curve-1-plot", 0.99)
    assert tab.text("#curve-0 .value").endswith("step 59")
    marks = tab.run("document.querySelector('#curve-0-plot').textContent")
    tab.click("#curve-0-log")
    assert tab.run("document.querySelector('#curve-0-log').ariaPressed") == "true"
    assert tab.run("document.querySelector('#curve-0-plot').textContent") != marks


def test_heat_map_chooses_a_phase_and_jumps(show: Show) -> None:
    document = run_document(8, 10_000, slow=5)
    tab = show(document)
    assert "Rank 5 works" in tab.text("#heat .lead")
    scale = tab.text("#heat .scale")
    tab.click("#phase-forward")
    assert tab.text("#heat .scale") != scale
    tab.point("#heat-canvas", 0.5, 5.5 * 22 / (8 * 22 + 18))
    tip = tab.text("#tip")
    assert ", rank 5" in tip.split("\n")[0]
    assert "forward: " in tip
    assert "exposed communication" in tip
    tab.click("#heat-canvas", 0.06, 2.5 * 22 / (8 * 22 + 18))
    assert tab.run("document.querySelector('#lanes-step').value") == "1000"
    assert "rank 2" in tab.text("#live")
    tab.focus("#heat-canvas")
    tab.press("End")
    assert tab.text("#live").startswith("steps 9,975–9,999, rank 2")
    tab.press("ArrowDown", "Enter")
    assert tab.run("document.querySelector('#lanes-step').value") == "9999"
    assert "rank 3" in tab.text("#live")


@pytest.mark.parametrize("sharded", [False, True])
def test_owners_tell_whole_copies_from_parts(show: Show, sharded: bool) -> None:
    tab = show({**run_document(4, 60), "owners": owners(4, sharded=sharded)})
    tab.focus("#owners-canvas")
    tab.press("ArrowRight", "ArrowRight")
    said = tab.text("#live")
    assert "embed.weight" in said
    assert ("rank 1 holds 18.4 MiB, 25 %" if sharded else "rank 1 holds 73.6 MiB, 100 %") in said


def test_a_broken_seal_says_which(show: Show) -> None:
    document = run_document(2, 60)
    epoch = document["coverage"]["epochs"][1]
    epoch |= {"sealed": False, "twice": 2, "missing": 3, "examples": "twice: 17, 18; never: 40001"}
    epoch["cells"] = [[0, 0, 24_999, 1], [0, 17, 18, 1], [1, 25_000, 39_999, 1], [1, 40_003, 49_999, 1]]
    document["replicas"] |= {"checks": [[100, True], [200, False]], "sealed_until": 100, "differs": "layer.0 on rank 1"}
    tab = show(document)
    broken = tab.text("#coverage .seal.broken")
    assert "2 samples more than once and 3 samples never" in broken
    assert "40001" in broken
    tab.focus("#coverage-canvas")
    tab.press("End", "ArrowDown", "ArrowDown", "Home")
    assert "some more than once" in tab.text("#live")
    tab.point("#coverage-canvas", (62 + 0.8 * (1132 - 62)) / 1132, 2.5 * 17 / (3 * 17 + 18))
    assert "some never" in tab.text("#tip")
    assert "Different at step 200" in tab.text("#replicas .seal.broken")
    assert "layer.0 on rank 1" in tab.text("#replicas")
    tab.click("#epoch-0")
    assert "exactly once" in tab.text("#coverage .seal.whole")


def test_epoch_that_is_not_over_is_not_broken(show: Show) -> None:
    document = run_document(2, 60)
    epoch = document["coverage"]["epochs"][1]
    epoch |= {"sealed": False, "running": True, "samples": 10_000, "missing": 40_000, "length": 50_000}
    epoch["cells"] = [[0, 0, 4_999, 1], [1, 25_000, 29_999, 1]]
    tab = show(document)
    assert "Epoch 0: exactly once" in tab.text("#coverage .seal.whole"), "the last that has ended is shown first"
    assert [text.strip() for text in _texts(tab, "#coverage label")] == ["0", "1 (open)"]
    tab.click("#epoch-1")
    assert "10,000 samples of 50,000; it did not end" in tab.text("#coverage .seal.open")
    tab.focus("#coverage-canvas")
    tab.press("End", "ArrowDown", "ArrowDown")
    assert "some not yet" in tab.text("#live")
    epoch |= {"running": False, "missing": 0, "earlier": 40_000}
    tab = show(document)
    tab.click("#epoch-1")
    assert "an earlier start had used 40,000" in tab.text("#coverage .seal.open")
    assert "not by the starts that are known" in tab.text("#coverage .legend")


# ------------------------------------------------------------------ for everybody


def test_every_picture_is_there_as_a_table(show: Show) -> None:
    tab = show(run_document(4, 301, slow=1))
    tab.run("for (const each of document.querySelectorAll('details')) each.open = true")
    tab.settle()
    rows = tab.run("[...document.querySelectorAll('details')].map((each) => each.querySelectorAll('tbody tr').length)")
    assert len(rows) == 9, "lanes, four curves, heat, owners, coverage, replicas"
    assert min(rows) >= 2
    assert _texts(tab, "#lanes-table tbody tr")[0].split("\t")[1] == "train.py:58 in step"


def test_what_takes_the_keyboard_has_a_name(show: Show) -> None:
    tab = show(run_document(8, 20, slow=5))
    nodes = tab.send("Accessibility.getFullAXTree")["nodes"]
    seen = [node for node in nodes if not node.get("ignored")]
    roles = {node["role"]["value"] for node in seen if "role" in node}
    assert {"main", "navigation", "banner", "contentinfo", "heading", "application", "radio", "table"} <= roles
    takes = [n for n in seen if any(p["name"] == "focusable" and p["value"]["value"] for p in n.get("properties", ()))]
    nameless = [n["role"]["value"] for n in takes if n["role"]["value"] != "RootWebArea" and not n["name"].get("value")]
    assert len(takes) > 40
    assert nameless == []
    levels = tab.run("[...document.querySelectorAll('h1, h2, h3')].map((each) => Number(each.tagName[1]))")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_focus_is_seen(show: Show) -> None:
    tab = show(run_document(2, 60))
    tab.press(*["Tab"] * 4)
    assert tab.run("document.activeElement.matches(':focus-visible')")
    assert tab.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"


@pytest.mark.parametrize("dark", [False, True])
def test_theme_is_the_systems_until_it_is_switched(show: Show, dark: bool) -> None:
    tab = show(run_document(2, 60), dark=dark)
    ground = "getComputedStyle(document.body).backgroundColor"
    ink = "document.querySelector('#lanes-canvas').toDataURL()"
    names = {False: "rgb(255, 255, 255)", True: "rgb(17, 21, 27)"}
    assert tab.run(ground) == names[dark]
    before = tab.run(ink)
    choose = (
        "(theme => { theme.value = %r; theme.dispatchEvent(new Event('change')); })(document.querySelector('#theme'))"
    )
    tab.run(choose % ("light" if dark else "dark"))
    assert tab.run(ground) == names[not dark]
    assert tab.run(ink) != before, "canvases change too"
    tab.run(choose % "auto")
    assert tab.run(ground) == names[dark]


@pytest.mark.parametrize("width", [320, 768])
def test_narrow_windows_need_no_sideways_scrolling(show: Show, width: int) -> None:
    tab = show(run_document(8, 10_000, slow=5), width=width)
    assert tab.run("document.documentElement.scrollWidth") <= width
    assert tab.run(f"document.querySelector('{LANES}').getBoundingClientRect().width") <= width


def test_paper_is_light_and_whole(show: Show) -> None:
    tab = show(run_document(2, 60), dark=True)
    pdf = base64.b64decode(tab.send("Page.printToPDF", printBackground=True)["data"])
    assert pdf.startswith(b"%PDF")
    tab.settle()
    assert tab.run("document.documentElement.dataset.theme") == "auto", "the screen is as it was"
