"""The lanes of a report in a real browser: what is seen of a step, and what pointer and keyboard do to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from chromium import Chromium, Show

from report_documents import open_step, run_document

LANES = "#lanes-canvas"
GUTTER, TOP = 62, 24  # of the lanes, in a wide window


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
    rows = [row.split("\t") for row in tab.texts("#operation tbody tr")]
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
    said = tab.texts("#lanes .says li")
    assert said == ["rank 5: does not move: at train.py:41 load", "ranks 0–4, 6–7: waits for rank 5: all_reduce"]
    assert "culprit" in tab.run("document.querySelector('#lanes .says li').className")
    assert "never came\nrank 5" in tab.text("#operation"), "what most ranks are in is chosen"
    assert "bandwidth" not in tab.text("#operation .facts"), "nothing has moved"
    tab.point(LANES, 0.5, (TOP + 5.2 * 52) / (TOP + 8 * 52 + 12))
    assert tab.text("#tip").startswith("does not move: at train.py:41 load\nrank 5")
    legend = tab.texts("#lanes .legend li")[:4]
    assert legend == ["forward", "backward", "exposed communication", "in the step that was not ended"]
    tab.point(LANES, 0.5, (TOP + 4.2 * 52) / (TOP + 8 * 52 + 12))
    assert tab.text("#tip").startswith("waits for rank 5: all_reduce\nexposed communication\nrank 4")
    tab.point(LANES, 0.5, _track(tab, 8, 2))
    assert "rank 5 never came" in tab.text("#tip")
    whole = tab.picture(of=LANES)
    tab.click("#lanes-previous")
    assert tab.text("#lanes .lead").startswith("Step 59 took")
    assert not tab.count("#lanes .says")
    assert tab.picture(of=LANES) != whole


def test_a_rank_that_is_a_step_behind_is_shown_in_the_step_that_it_never_ended(show: Show) -> None:
    document = run_document(2, 60)
    step = open_step(document, culprit=1)
    step["ranks"][1]["step"] -= 1  # its part in the collectives of that was done
    document["lanes"]["steps"].append(step)
    document["run"]["status"] = "failed"
    document["cards"][0] |= {"step": step["step"] - 1, "ranks": [1]}
    tab = show(document)
    assert tab.text("#lanes-step option:checked") == "step 59–60 · never ended"
    assert tab.text("#lanes .lead").startswith("Step 59–60 was never ended.")
    assert tab.texts("#lanes .says li") == [
        "rank 1, in step 59: does not move: at train.py:41 load",
        "rank 0, in step 60: waits for rank 1: all_reduce",
    ]
    tab.click("#lanes-previous")
    assert tab.text("#lanes .lead").startswith("Step 59 took"), "the others have ended it"
    tab.click("#card-0-jump")
    assert tab.text("#lanes .lead").startswith("Step 59–60 was never ended.")


def test_what_a_rank_waits_ends_where_the_last_one_comes(show: Show) -> None:
    """Though it was let go before the last one was: the time of that is not taken from its end."""
    document = run_document(2, 60)
    for step in document["lanes"]["steps"]:
        early, late = (row["ops"][3] for row in step["ranks"])
        early[2:] = [late[2] - 400, late[2] + 50, late[2] - 400, 450, 400]
        late[2:] = [late[2], late[2] + 70, late[2], 70, 0]
        step["joins"][3][1:4] = [1, 70, 400]
    tab = show(document)
    step = _shown_step(document, tab)
    tab.click(LANES, _at_us(tab, step, step["ranks"][0]["ops"][3][2] + 200), _track(tab, 2, 0))
    rows = tab.texts("#operation tbody tr")
    assert [row.split("\t")[1:4] for row in rows] == [["+0 µs", "400 µs", "50 µs"], ["+400 µs", "0 µs", "70 µs"]]


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


@pytest.mark.parametrize(("times", "unit"), [(0.01, "\u00b5s"), (1, "ms"), (2000, "s")])
def test_times_of_a_narrow_axis_are_in_their_unit_and_do_not_lie_upon_it(show: Show, times: float, unit: str) -> None:
    document = run_document(2, 60)
    for step in document["lanes"]["steps"]:
        step["ended_us"] = step["began_us"] + round((step["ended_us"] - step["began_us"]) * times)
        for rank in step["ranks"]:
            rank |= {"began_us": 0, "ended_us": round(rank["ended_us"] * times), "spans": [], "ops": []}
    tab = show(document, width=400)
    tab.run(
        "{ const fill = CanvasRenderingContext2D.prototype.fillText; window.told = [];"
        "CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {"
        "if (this.canvas.id === 'lanes-canvas' && y === 9)"
        "told.push([text, x, this.measureText(text).width, this.textAlign]); return fill.call(this, text, x, y); } }"
    )
    tab.focus(LANES)
    tab.press("0")
    *marks, (name, end, width, _) = tab.run("told")
    assert name == unit
    assert marks
    assert all(x + w / 2 < end - width for _, x, w, _ in marks)


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
    assert tab.count("#lanes-unlisted") == 0
    assert "\u2265" not in tab.text("#overlap")
    for step in document["lanes"]["steps"]:
        for n, rank in enumerate(step["ranks"]):
            rank["unlisted"] = 130 * n
    document["overlap"]["what_if"][2]["is_least"] = True
    tab = show(document)
    assert tab.text("#lanes-unlisted").startswith("Not drawn: 130 operations, of one rank up to 130.")
    assert "24.8 ms\t\u2265 1.06\u00d7" in tab.text("#overlap")
    assert "a faster network gains at least that much" in tab.text("#overlap")


def test_what_nobody_sees_is_not_shown_as_nothing(show: Show) -> None:
    document = run_document(8, 60)
    assert "not known" not in show(document).text("#overlap")
    document["overlap"] |= {"unseen": "all_reduce at tp.py:10", "waiting": []}
    for rank in document["overlap"]["ranks"]:
        rank["waited_us"] = 0
    document["lanes"]["words"][0]["unseen"] = True
    tab = show(document)
    assert "\u2265" in tab.text(".figures")
    assert "of all_reduce at tp.py:10 nobody sees who stands in it" in tab.text("#overlap .lead")
    cells = tab.texts("#overlap tbody tr:first-child td")
    assert (cells[1], cells[3]) == ("not known", "not known")
    assert cells[2].startswith("\u2265 ")
    assert "Nobody waited" not in tab.text("#overlap")
    for rank in document["overlap"]["ranks"]:
        rank["exposed_us"] = 0
    document["overlap"]["what_if"][2] |= {"is_least": True, "gain": 1.0}
    for step in document["lanes"]["steps"]:
        step["joins"] = []
        for rank in step["ranks"]:
            rank["ops"] = [[0, *row[1:4], -1, 0] for row in rank["ops"]]
    tab = show(document)
    assert "exposed communication\nnot known" in tab.text(".figures")
    assert "not known of a step" not in " ".join(tab.text(".figures").split())
    assert "Arrows" not in tab.text("#lanes .lead")
    tab.focus(LANES)
    tab.press("Home")
    assert "who stands in it, and until when, is not known" in tab.text("#live")
    assert "hidden" not in tab.text("#operation")


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
    assert "Step 5,207 is not among those kept in detail" in tab.text("#lanes-note")
    assert "rank 5" in tab.text("#live")
