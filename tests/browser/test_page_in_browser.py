"""The page of a report in a real browser: what it shows, and what pointer and keyboard do to it."""

from __future__ import annotations

import base64
from itertools import pairwise

import pytest
from chromium import Show

from report_documents import empty_document, hostile_document, owners, run_document

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


def test_smoke(show: Show) -> None:
    document = run_document(2, 60)
    tab = show(document)
    assert tab.texts("main h2") == TITLES
    assert tab.text("h1").startswith(document["run"]["id"])
    assert "finished" in tab.text("#status")
    assert not tab.texts(".missing")
    assert tab.run("document.title") == f"{document['run']['id']} - lockstep"


@pytest.mark.parametrize(("ranks", "steps"), [(2, 60), (8, 10_000)])
def test_every_section_shows_what_was_recorded(show: Show, ranks: int, steps: int) -> None:
    document = run_document(ranks, steps, slow=1)
    tab = show(document)
    figures = " ".join(tab.texts(".figures div"))
    assert f"{ranks}" in figures
    assert f"{steps:,}" in figures
    assert tab.texts(".card .word") == [card["severity"].capitalize() for card in document["cards"]]
    assert "num_replicas=W" in tab.text(".card .lever")
    assert len(tab.texts("#lanes-step option")) == len(document["lanes"]["steps"])
    assert [text.split("\n")[0] for text in tab.texts(".curve figcaption b")] == [c["name"] for c in document["curves"]]
    for name in ("lanes", "heat", "owners", "coverage", "replicas", *(["waiting"] if ranks > 2 else [])):
        ink = f"document.querySelector('#{name}-canvas').getContext('2d')"
        data = f"{ink}.getImageData(0, 0, {ink}.canvas.width, {ink}.canvas.height).data"
        assert tab.run(f"new Set(new Uint32Array({data}.buffer)).size") > 3, f"{name} is painted"
    assert "exactly once" in tab.text("#coverage .seal.whole")
    assert "Equal on all ranks" in tab.text("#replicas .seal.whole")
    assert "as fast as the others" in tab.text("#overlap")
    assert document["owners"]["strategy"] in tab.text("#owners .lead")
    assert ["NCCL_SOCKET_IFNAME", "ens5", "Slurm"] in [text.split("\t") for text in tab.texts("#facts tr")]
    assert "SIGKILL" in tab.text(".attempts") if steps > 100 else not tab.count(".attempts")


def test_what_is_missing_is_said_with_what_to_do(show: Show) -> None:
    tab = show(empty_document())
    said = tab.texts("main .missing")
    assert len(said) == len(TITLES)
    assert any("lockstep.log(step, loss=...)" in text for text in said)
    assert all(tab.run("[...document.querySelectorAll('main .missing')].map((each) => !!each.querySelector('code'))"))
    show({**empty_document(), "missing": {"coverage": "This run read no data."}})
    assert "This run read no data." in tab.texts("#coverage .missing")


def test_what_is_estimated_of_steps_that_were_only_counted_is_said(show: Show) -> None:
    document = run_document(2, 60)
    tab = show(document)
    assert "short step" not in tab.text("body")
    tab = show({**document, "heat": {**document["heat"], "counted": 1730}})
    assert "Of 1,730 short steps only their time" in tab.text("#heat")


def test_a_part_that_is_damaged_leaves_the_rest(show: Show) -> None:
    tab = show({**run_document(2, 60), "heat": {"first": [0], "last": [0], "wall_us": [[1]]}})
    assert "cannot be drawn" in tab.text("#heat .missing")
    assert len(tab.texts(".missing")) == 1
    assert "Equal on all ranks" in tab.text("#replicas")
    assert len(tab.console) == 1
    tab.console.clear()


def test_nothing_of_a_record_becomes_markup_or_script(show: Show) -> None:
    document = hostile_document()
    tab = show(document)
    tab.focus(LANES)
    tab.press(".", ".", "ArrowDown", "n")
    tab.point(LANES, 0.6, 58 / 222)  # where the operations of the first rank stand
    for name in ("#heat-canvas", "#coverage-canvas", "#owners-canvas"):
        tab.focus(name)
        tab.press("ArrowRight")
    tab.run("for (const each of document.querySelectorAll('details')) each.open = true")
    tab.settle()
    assert tab.run("window.harmed ?? 0") == 0
    assert tab.run("document.scripts.length") == 2
    assert tab.count("img, iframe, object, embed, body script ~ script ~ script") == 0
    assert tab.count("a:not([href^='#'])") == 0
    everything = tab.text("body")
    assert "<img src=x onerror=" in everything
    assert "</script><script>" in everything
    assert "⟨U+202E⟩" in everything
    assert not set("\u202e\u2066\u200f\u2028\u0007") & set(everything)
    assert tab.run("document.documentElement.scrollWidth") <= 1280


# ------------------------------------------------------------------ curves, heat, the rest


def test_curves_tell_values_and_what_is_not_finite(show: Show) -> None:
    document = run_document(2, 60)
    values = document["curves"][0]["values"]
    values[40] = float("nan")
    document["curves"][3] |= {"steps": [7], "values": [0.5], "low": None, "high": None}
    tab = show(document)
    assert "not finite (NaN or Inf) at 1 point, first at step 40" in tab.text("#curve-0")
    assert tab.count("#curve-0 .not-finite") == 1
    assert tab.count("#curve-3 .lone") == 1, "one value is no line"
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


@pytest.mark.parametrize(
    ("exposed_us", "lead"),
    [
        ([1000, 1000], "Each rank works about 3 ms of a step."),
        ([2000, 500], "Rank 1 works 3.5 ms of a step, the others about 2 ms."),
        ([1000, 950, 900, 1050], "Each rank works about 3 ms of a step."),
        ([100, 2000, 2000, 1900], "Rank 0 works 3.9 ms of a step, the others about 2 ms."),
    ],
)
def test_heat_map_says_which_rank_works_longer_than_the_others(show: Show, exposed_us: list[int], lead: str) -> None:
    ranks = len(exposed_us)
    rows = {"wall_us": [[4000, 4000]] * ranks, "phases_us": {"exposed": [[each] * 2 for each in exposed_us]}}
    document = {
        **empty_document(),
        "heat": {"first": [1, 2], "last": [1, 2], "ranks": [*range(ranks)], "phases": ["exposed"], **rows},
    }
    assert show(document).text("#heat .lead") == f"{lead} Choose a cell to see its step."


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


def test_first_steps_do_not_count_as_usual_work(show: Show) -> None:
    document = run_document(2, 60)
    usual = show(document).text("#heat .lead")
    for rows in (document["heat"]["wall_us"], document["heat"]["phases_us"]["forward"]):
        for row in rows:
            row[0], row[1] = row[0] + 9_000_000, row[1] + 1_000_000
    assert show(document).text("#heat .lead") == usual


def test_a_start_that_was_done_again_says_how_far_it_came(show: Show) -> None:
    document = run_document(2, 60)
    started = {"name": "a/0", "world_size": 2, "began_s": 0, "ended_s": 9, "code": 1, "causes": ["rank 1 failed"]}
    gone = {**started, "first_step": None, "last_step": None, "reached": 19}
    part = {**started, "first_step": 1, "last_step": 10, "reached": 19}
    never = {**started, "first_step": None, "last_step": None, "reached": 0}
    document["run"]["attempts"] = [gone, part, never]
    tab = show(document, width=400)
    told = ["to 19, done again", "1\u201310; to 19, done again", "none"]
    assert tab.texts(".attempts tbody td:nth-child(3)") == told


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
    assert [text.strip() for text in tab.texts("#coverage label")] == ["0", "1 (open)"]
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


def test_what_a_sampler_does_so_that_ranks_have_equally_many_breaks_no_seal(show: Show) -> None:
    document = run_document(2, 60)
    padded, cut = document["coverage"]["epochs"]
    padded |= {"samples": 6, "length": 5, "repeated": 1, "cells": [[0, 0, 2, 1], [1, 3, 4, 1], [1, 0, 0, 1]]}
    cut |= {"samples": 4, "length": 5, "dropped": 1, "cells": [[0, 0, 1, 1], [1, 2, 3, 1]]}
    tab = show(document)
    assert "Each of 4 samples was read once, by one rank; the sampler leaves out 1 more." in tab.text("#coverage .seal")
    legend = ["exactly once", "once more, or left out, as the sampler has it"]
    assert tab.texts("#coverage .legend li") == legend
    tab.click("#epoch-0")
    assert "Each of 5 samples was read once" in tab.text("#coverage .seal")
    assert "the sampler hands out 1 of them once more" in tab.text("#coverage .seal")
    assert tab.texts("#coverage .legend li") == legend
    tab.focus("#coverage-canvas")
    tab.press("Home", "ArrowDown", "ArrowDown")
    assert "once more, or left out" in tab.text("#live")


def test_figures_of_ranks_that_left_nothing_are_not_those_of_all(show: Show) -> None:
    """Rank 2 was killed before it had written down a step."""
    document = run_document(3, 60)
    document["overlap"]["ranks"].pop()
    document["overlap"] |= {"samples_per_s": 512, "what_if": []}
    document["owners"] = owners(2, sharded=False)
    for rows in (document["heat"]["wall_us"], *document["heat"]["phases_us"].values()):
        rows[2] = [None] * len(rows[2])
    tab = show(document)
    figures = dict(zip(tab.texts(".figures dt"), tab.texts(".figures dd"), strict=True))
    assert figures["samples/s"].split(maxsplit=1) == ["512", "of 2 ranks"]
    assert "over 2 of 3 ranks that have told:" in tab.text("#owners .lead")
    assert figures["exposed communication"].endswith("of a step")
    assert "waiting for a rank without a record is not known" in tab.text("#overlap .lead")
    assert set(tab.texts("[aria-label='Communication of each rank'] tbody td:last-child")) == {"not known"}
    assert "by all ranks" in tab.text("#overlap .missing")
    assert "0 µs" not in tab.text("#heat .lead")


def test_share_in_the_head_is_that_of_the_section(show: Show) -> None:
    """Of ranks whose steps took differently long: of all their time, not of each one's."""
    document = run_document(2, 60)
    ranks = document["overlap"]["ranks"]
    ranks[0] |= {"wall_us": 10_000, "exposed_us": 9000, "waited_us": 0}
    ranks[1] |= {"wall_us": 30_000, "exposed_us": 3000, "waited_us": 0}
    document["overlap"]["unseen"] = ""
    tab = show(document)
    figures = dict(zip(tab.texts(".figures dt"), tab.texts(".figures dd"), strict=True))
    assert figures["exposed communication"].startswith("30 %")
    assert "for 30 % of a step ranks stand still" in tab.text("#overlap .lead")


def test_axes_have_whole_steps_and_one_way_to_write_numbers(show: Show) -> None:
    document = run_document(2, 20)
    document["curves"][0] |= {"steps": list(range(1, 21)), "values": [0.001] * 20, "low": None, "high": None}
    tab = show(document)
    marks = tab.run(
        "[...document.querySelector('#curves figure').querySelectorAll('text[text-anchor=end]')]"
        ".map((each) => each.textContent)"
    )
    assert len(marks) > 2
    assert all("e-" in mark for mark in marks), marks
    tab.run(
        "(() => { window.painted = []; const paint = CanvasRenderingContext2D.prototype.fillText;"
        "CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {"
        "window.painted.push(text); paint.call(this, text, ...rest); }; })()"
    )
    tab.click("#phase-forward")
    steps = [int(text) for text in tab.run("window.painted") if text.isdigit()]
    assert {after - before for before, after in pairwise(steps)} == {5}


def test_option_in_an_advice_is_one_word(show: Show) -> None:
    document = run_document(2, 60)
    document["cards"][0]["lever"] = "look at what rank 1 does: add --profile steps=10:13 for a trace"
    tab = show(document)
    assert tab.text(".card .lever") == "Do: look at what rank 1 does: add --profile steps=10:13 for a trace"
    word = "document.querySelector('.card .lever .word')"
    assert tab.run(f"{word}.textContent").strip() == "--profile"
    assert tab.run(f"getComputedStyle({word}).whiteSpace") == "nowrap"
    assert tab.run(f"getComputedStyle({word}).color === getComputedStyle({word}.parentElement).color")


# ------------------------------------------------------------------ for everybody


def test_every_picture_is_there_as_a_table(show: Show) -> None:
    tab = show(run_document(4, 301, slow=1))
    tab.run("for (const each of document.querySelectorAll('details')) each.open = true")
    tab.settle()
    rows = tab.run("[...document.querySelectorAll('details')].map((each) => each.querySelectorAll('tbody tr').length)")
    assert len(rows) == 9, "lanes, four curves, heat, owners, coverage, replicas"
    assert min(rows) >= 2
    assert tab.texts("#lanes-table tbody tr")[0].split("\t")[1] == "train.py:58 in step"


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


@pytest.mark.parametrize("steps", [101, 1_000_001])
def test_words_of_a_curve_are_whole(show: Show, steps: int) -> None:
    document = run_document(2, 101)
    for curve in document["curves"]:
        curve["steps"][-1] = steps - 1
    tab = show(document)
    beyond = tab.run(
        "[...document.querySelectorAll('.curve svg')].flatMap((of) => [...of.querySelectorAll('text')].filter((each) =>"
        "each.getBoundingClientRect().right > of.getBoundingClientRect().right).map((each) => each.textContent))"
    )
    assert beyond == []
    assert f"{steps - 1:,}" in tab.run("document.querySelector('.curve svg').textContent")


def test_facts_are_whole_on_a_narrow_screen_though_names_are_long(show: Show) -> None:
    document = run_document(2, 60)
    document["run"]["facts"].append(["environment", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1", "environment"])
    tab = show(document, width=400)
    beyond = "((of) => of.scrollWidth - of.clientWidth)(document.querySelector('.fact-table'))"
    assert tab.run(beyond) == 0


def test_paper_has_whole_tables_in_their_whole_width(show: Show) -> None:
    tab = show(run_document(2, 10_000))
    tab.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    tab.settle()
    tab.send("Emulation.setEmulatedMedia", media="print")
    try:
        styles = "[...document.querySelectorAll('.scroll')].map((each) => getComputedStyle(each))"
        assert set(tab.run(f"{styles}.map((each) => each.maxWidth + ' ' + each.maxHeight)")) == {"none none"}
        assert tab.run("getComputedStyle(document.querySelector('.aside-picture')).display") == "grid"
    finally:
        tab.send("Emulation.setEmulatedMedia", media="")


def test_paper_is_light_and_whole(show: Show) -> None:
    tab = show(run_document(2, 60), dark=True)
    pdf = base64.b64decode(tab.send("Page.printToPDF", printBackground=True)["data"])
    assert pdf.startswith(b"%PDF")
    tab.settle()
    assert tab.run("document.documentElement.dataset.theme") == "auto", "the screen is as it was"
