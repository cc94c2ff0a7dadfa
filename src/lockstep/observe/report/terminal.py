"""A run in the terminal: a row per rank while it lives, and what is known to be wrong below."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO, final

from rich.console import Console, Group
from rich.live import Live

from lockstep.observe.onlooker import Onlooker
from lockstep.observe.report.rank_rows import Stand, Tail, rows_of
from lockstep.observe.report.source import places_of
from lockstep.observe.report.terminal_frame import Picture, card_lines, frame, header
from lockstep.observe.scene import Limits, Scene
from lockstep.observe.wording import names

_PERIOD_S = 0.5  # between two pictures
_PROGRESS_S = 10.0  # between two lines of progress where the output is no terminal
_LASTING_S = 5.0  # what a rank waits for less long is no news there


@final
class TerminalView:
    """Shows the run in `folder`: live in a terminal, as a line per change where the output is a file or a pipe.

    document: gives the report's newest, and is asked twice a second. about: a line that stays on the screen meanwhile.
    """

    def __init__(
        self, folder: Path, document: Callable[[], Mapping[str, Any]], file: TextIO = sys.stdout, about: str = ""
    ) -> None:
        self._folder = folder
        self._document = document
        self._file = file
        self._about = about
        self._newest: Mapping[str, Any] = {"run": {"id": folder.name, "status": "unknown"}, "cards": []}
        self._tails: dict[int, Tail] = {}
        self._onlooker = Onlooker()

    def show(self, stop: threading.Event | None = None) -> None:
        """Draw until the run is over or `stop` is set. Ctrl-C is passed on once the terminal is as it was before."""
        console = Console(file=self._file, highlight=False)
        with contextlib.closing(self._onlooker):
            if self._file.isatty() and not console.is_dumb_terminal:
                self._draw(console, stop or threading.Event())
            else:
                self._tell(stop or threading.Event())

    def look(self) -> Picture:
        """The run as it is now."""
        record, flights = places_of(self._folder)
        self._onlooker.follow(flights)
        scene = Scene(-1, self._onlooker.sights(), self._onlooker.records_of, Limits())
        self._newest = self._document()
        run = self._newest["run"]
        if run["status"] == "running" and run.get("began"):  # a document is only built where there is something new
            run = {**run, "wall_s": time.time() - datetime.fromisoformat(run["began"]).timestamp()}
        for path in record.glob("rank-*.jsonl"):
            if path.stem[5:].isdigit():
                self._tails.setdefault(int(path.stem[5:]), Tail(path))
        for tail in self._tails.values():
            tail.read()
        world_size = max((sight.status.world_size for sight in scene.sights.values()), default=0)
        picture = Picture(run, (), {}, self._cards())
        unheard = Stand("idle", run["status"] if picture.is_over else "")
        return picture._replace(
            rows=rows_of(self._tails, scene, world_size or run.get("world_size") or 0, unheard),
            values=next((tail.values for _, tail in sorted(self._tails.items()) if tail.values), {}),
        )

    def _cards(self) -> list[Mapping[str, Any]]:
        """First what the ranks have found since the document was built."""
        cards = list(self._newest["cards"])
        found = self._onlooker.finding()
        if found is not None:
            title, _, text = found.text.removeprefix("lockstep: ").partition("\n")
            if not any(title in f"{card['title']}\n{card['text']}" for card in cards):
                cards.insert(0, {"severity": "error", "title": title, "text": text})
        return cards

    def _draw(self, console: Console, stop: threading.Event) -> None:
        picture = self.look()
        with ending_by_exception():
            try:
                with Live(console=console, screen=True, auto_refresh=False) as live:
                    while not (picture.is_over or stop.is_set()):
                        shown = picture._replace(about=self._about)
                        live.update(Group(*frame(shown, *console.size)), refresh=True)
                        stop.wait(_PERIOD_S)
                        picture = self.look()
            finally:  # the screen is what it was before, and the last picture stays
                console.print(Group(*frame(picture, console.width)))

    def _tell(self, stop: threading.Event) -> None:
        news = News(time.monotonic)
        while True:
            picture = self.look()
            for line in news.of(picture):
                self._file.write(f"{time.strftime('%H:%M:%S')}  {line}\n")
            self._file.flush()
            if picture.is_over or stop.wait(_PERIOD_S):
                return


@final
class News:
    """What has changed since the last picture, as plain lines."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stands: dict[int, str] = {}
        self._told_cards: set[tuple[Any, ...]] = set()
        self._told = ("", 0)  # status and step
        self._told_s = 0.0

    def of(self, picture: Picture) -> Iterator[str]:
        """The lines that `picture` adds."""
        now_s, told = self._clock(), (picture.run["status"], picture.step)
        if told[0] != self._told[0] or (told != self._told and now_s - self._told_s >= _PROGRESS_S):
            self._told, self._told_s = told, now_s
            yield "  ".join(line.plain for line in header(picture))
        changed: dict[str, list[int]] = {}
        for row in picture.rows:
            text = _lasting(row.stand)
            if text != self._stands.get(row.ranks[0], ""):
                self._stands[row.ranks[0]] = text
                changed.setdefault(text, []).extend(row.ranks)
        yield from (f"{names(ranks)}: {text}" for text, ranks in changed.items() if text)
        for card in picture.cards:
            kind, as_found = _kind_of(card), (card["title"],)
            if not {kind, as_found} & self._told_cards:
                yield from (line.plain for line in card_lines(card))
            self._told_cards |= {kind, as_found if card.get("ranks") is None else kind}


def _kind_of(card: Mapping[str, Any]) -> tuple[Any, ...]:
    """Equal for a card whose figures are newer, and nothing else."""
    step = card.get("step") if card["severity"] in ("error", "warning") else None
    return re.sub(r"\d+", "", card["title"]), tuple(card.get("ranks", ())), step


def _lasting(stand: Stand) -> str:
    """What is told of it; "running" for what may be over in a moment."""
    is_short = stand.mood == "good" or (stand.mood == "warning" and stand.age_s < _LASTING_S)
    return "running" if is_short else str(stand._replace(age_s=0.0))


@contextlib.contextmanager
def ending_by_exception() -> Iterator[None]:
    """SIGTERM and SIGHUP raise within, so that whoever has changed the terminal changes it back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _exit) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, _: object) -> None:
    raise SystemExit(128 + number)
