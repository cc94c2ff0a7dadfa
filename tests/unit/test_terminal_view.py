"""A run in the terminal: what each rank is said to do, what fits, what is left of the terminal, what a pipe gets."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rank_sights import FIRST, PaperRank, rank_1, running, waiting_for_rank_1
from rich.console import Console
from rich.text import Text

from lockstep.comm.waiting import wait_until
from lockstep.observe.report.rank_rows import RankRow, Stand, folded, rows_of, stand_of
from lockstep.observe.report.terminal import News, TerminalView
from lockstep.observe.report.terminal_frame import Picture, frame
from lockstep.observe.scene import Limits, Scene

GOOD = Stand("good", "running")
PHASES_US = (5_000, 20_000, 40_000, 15_000, 10_000, 10_000)


def stands(ranks: Sequence[PaperRank]) -> list[str]:
    by_rank = {one.rank: one for one in ranks}
    sights = {one.rank: one.sight() for one in ranks}
    scene = Scene(-1, sights, lambda rank: by_rank[rank].kept_records(), Limits())
    return [f"{stand.mood} {stand}" for stand in (stand_of(scene, rank) for rank in by_rank)]


def row(rank: int, stand: Stand = GOOD, **fields: Any) -> RankRow:
    given = {
        "ranks": (rank,),
        "host": f"node-{rank // 8}",
        "step": 812,
        "steps_ms": (98.0, 100.0, 104.0, 190.0),
        "shares": tuple(us / sum(PHASES_US) for us in PHASES_US),
        "tokens_per_s": 45_678.9,
        "samples_per_s": 0.0,
        "memory_mib": 700 + rank,
        "stand": stand,
    }
    return RankRow(**{**given, **fields})


def run(status: str = "running", **fields: Any) -> dict[str, Any]:
    return {"id": "gpt2-tiny", "status": status, "wall_s": 192.4, "attempts": [{}], "facts": [], **fields}


def card(title: str, text: str = "", severity: str = "error", lever: str = "") -> dict[str, Any]:
    return {"severity": severity, "title": title, "text": text, "ranks": [1], "step": 3, "lever": lever}


def picture(rows: Sequence[RankRow], cards: Sequence[Mapping[str, Any]] = (), **about: Any) -> Picture:
    return Picture(run(**about), rows, {"loss": 1.23456789, "lr": 3e-4}, cards)


def text_of(lines: Sequence[Text]) -> str:
    return "\n".join(line.plain for line in lines)


# ------------------------------------------------------------------ what a rank does


def test_each_rank_is_said_to_wait_for_whom_where_and_since_when() -> None:
    rank_0, culprit, rank_2 = stands(waiting_for_rank_1())

    assert rank_0 == f"warning waits for rank 1 for 12.4 s: all_reduce at {FIRST} (float32 [4] sum)"
    assert rank_2 == rank_0
    assert culprit == "warning does not move for 12.4 s: at data.py:31 load_batch"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda one: one.finishes(), "idle finished"),
        (lambda one: one.raises("ValueError", "bad\nworse", "t.py:3"), "error raised at t.py:3: ValueError: bad"),
        (lambda one: one.raises("PeerFailed", "rank 0", "", True), "idle raised: PeerFailed: rank 0"),
        (lambda one: vars(one).update(is_gone=True), "error killed, or gone without a word: at data.py:31 load_batch"),
        (lambda one: vars(one).update(age_s=3.4), "error stopped, no sign of life for 3.4 s: at data.py:31 load_batch"),
        (lambda one: one.is_at("save.py:1 save", activity="checkpoint"), "good checkpoint"),
        (lambda one: one.is_at("t.py:8 f", unmoved_s=0.5), "good running"),
    ],
)
def test_what_rank_1_does_is_said(change: Callable[[PaperRank], object], said: str) -> None:
    assert stands(rank_1(change))[1] == said


def test_ranks_of_a_run_that_was_stopped_are_not_said_to_be_killed() -> None:
    sights = {one.rank: one.sight() for one in rank_1(lambda one: vars(one).update(is_gone=True))}
    scene = Scene(-1, sights, lambda rank: [], Limits())

    said = {text: [str(each.stand) for each in rows_of({}, scene, 4, Stand("idle", text))] for text in ("stopped", "")}

    assert said["stopped"][1] == "stopped"
    assert said[""][1].startswith("killed")
    assert [each[0] == each[2] != each[3] for each in said.values()] == [True, True]
    assert (said["stopped"][3], said[""][3]) == ("stopped", "")


def test_an_operation_that_has_just_begun_is_no_waiting() -> None:
    ranks = running(2)
    for one in ranks:
        one.waits(one.call(site=FIRST), age_s=0.9, unmoved_s=0.9)

    assert stands(ranks) == ["good running"] * 2


def test_a_collective_that_all_have_come_to_waits_for_nobody() -> None:
    ranks = running(2)
    for one in ranks:
        one.waits(one.call(site=FIRST), age_s=5.0)

    assert stands(ranks) == [f"warning waits for 5.0 s: all_reduce at {FIRST} (float32 [4] sum)"] * 2


# ------------------------------------------------------------------ what fits


@pytest.mark.parametrize("width", [40, 80, 110, 160, 200])
@pytest.mark.parametrize("height", [6, 24, 50, None])
@pytest.mark.parametrize("ranks", [0, 1, 3, 64])
def test_no_line_is_too_long_and_no_picture_too_high(width: int, height: int | None, ranks: int) -> None:
    waits = Stand("warning", "waits for rank 1", f"all_reduce at {FIRST} (float32 [4] sum)", 12.4)
    rows = [row(rank, waits if rank != 1 else Stand("error", "gone")) for rank in range(ranks)]

    lines = frame(picture(rows, [card("HANG", "x" * 300 + "\nlast")]), width, height)

    assert all(line.cell_len <= width for line in lines)
    assert height is None or len(lines) <= height


@pytest.mark.parametrize("width", [80, 200])
def test_the_picture_has_run_figures_ranks_and_cards(width: int) -> None:
    facts = [["config", "train.steps", 1000, ""]]
    waits = Stand("warning", "waits for rank 1", f"all_reduce at {FIRST} (float32 [4] sum)", 12.4)
    shown = picture([row(0, waits), row(1)], [card("HANG", "rank 1 is not there", lever="look")], facts=facts)

    text = text_of(frame(shown, width, 24))

    assert "gpt2-tiny  running 0:03:12  2 ranks  step 812 of 1000  ETA 0:00:19" in text
    assert "loss 1.2346  lr 0.0003  102.0 ms per step  45,679 tokens/s" in text
    assert "waits for rank 1 for 12.4 s: all_reduce" in " ".join(text.split())
    assert "error: HANG\n  rank 1 is not there\n  to change that: look" in text
    assert "▃▃▄▇" in text or "▄▄▅█" in text or "▃▄▄▇" in text
    if width == 200:
        assert "node-0" in text
        assert " 5%   20%   40%   15%   10%   10%" in text
        assert "701 MiB" in text
    else:
        assert "ffbbbbcco." in text


def test_in_forty_columns_there_is_room_for_what_a_rank_does_and_where_else_it_is_shown() -> None:
    waits = Stand("warning", "waits for rank 1", f"all_reduce at {FIRST} (float32 [4] sum)", 12.4)
    shown = picture([row(0, waits), row(1)])._replace(about="http://127.0.0.1:34475/ (Ctrl-C ends this, not the run)")
    lines = frame(shown, 40, 24)
    text = " ".join(text_of(lines).split())
    assert all(line.cell_len <= 40 for line in lines)
    assert "waits for rank 1 for" in text
    assert "2 ranks step 812" in text
    assert "http://127.0.0.1:34475/ (Ctrl-C ends this, not the run)" in text


def test_sixty_four_ranks_fold_by_what_they_do_the_worst_first() -> None:
    waits = Stand("warning", "waits for rank 9", "all_reduce at train.py:3")
    rows = [row(rank, waits._replace(age_s=rank / 10)) for rank in range(64) if rank not in (9, 30)]
    rows += [row(9, Stand("error", "gone")), row(30)]

    shown = folded(sorted(rows), 3)

    assert [each.ranks for each in shown] == [(9,), tuple(r for r in range(64) if r not in (9, 30)), (30,)]
    assert str(shown[1].stand) == "waits for rank 9 for 6.3 s: all_reduce at train.py:3"
    assert shown[1].host == "8 hosts"
    assert "62 ranks" in text_of(frame(picture(shown), 80, 24))


def test_where_there_is_room_those_the_others_wait_for_stand_alone() -> None:
    busy = (0.0, 0.45, 0.5, 0.0, 0.05, 0.0)
    rows = [row(rank, shares=busy) if rank in (7, 40) else row(rank) for rank in range(64)]

    assert [each.ranks for each in folded(rows, 3)][:2] == [(7,), (40,)]
    assert [len(each.ranks) for each in folded(rows, 20)] == [*[1] * 19, 45]
    assert sorted(rank for each in folded(rows, 20) for rank in each.ranks) == list(range(64))


def test_rows_that_are_still_too_many_become_one() -> None:
    rows = [row(rank, Stand("warning", f"at line {rank}")) for rank in range(10)]

    shown = folded(rows, 3)

    assert [each.ranks for each in shown] == [(0,), (1,), tuple(range(2, 10))]
    assert shown[2].stand.text.startswith("at line 2; at line 3")


def test_cards_that_do_not_fit_say_so() -> None:
    lines = text_of(frame(picture([row(0)], [card(f"card {n}", "a\nb\nc") for n in range(9)]), 80, 24)).splitlines()

    assert lines[-1] == "... 19 more lines"
    assert len(lines) == 24


def test_a_long_line_of_a_card_goes_on_further_to_the_right() -> None:
    long = "rank 1 is not there: " + "at data.py:31 load_batch " * 4
    shown = picture([row(0)], [card("HANG", long, lever="see what rank 1 is stuck in")])

    lines = text_of(frame(shown, 60)).splitlines()[-5:]

    assert lines == [
        "error: HANG",
        "  rank 1 is not there: at data.py:31 load_batch at",
        "    data.py:31 load_batch at data.py:31 load_batch at",
        "    data.py:31 load_batch",
        "  to change that: see what rank 1 is stuck in",
    ]


def test_colours_are_left_out_where_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)

    for line in frame(picture([row(0)], [card("HANG")]), 80, 24):
        console.print(line)

    assert "\x1b[3" not in out.getvalue()
    assert "ffbbbbcco." in out.getvalue()  # the letters say what the colours said


# ------------------------------------------------------------------ pipes


def test_a_pipe_gets_a_line_per_change_and_no_control_codes() -> None:
    now_s = [0.0]
    news = News(lambda: now_s[0])

    def told(*args: Any, **about: Any) -> list[str]:
        now_s[0] += 1
        return list(news.of(picture(*args, **about)))

    brief, long = (Stand("warning", "waits for rank 1", "barrier at t.py:1", age) for age in (1.5, 6.0))
    first = told([row(0), row(1)])
    assert first[0].startswith("gpt2-tiny  running 0:03:12  2 ranks  step 812")
    assert first[1:] == ["ranks 0,1: running"]
    assert told([row(0, brief), row(1, step=813)]) == []
    assert told([row(0, long), row(1)], [card("HANG", "why")]) == [
        "rank 0: waits for rank 1: barrier at t.py:1",
        "error: HANG",
        "  why",
    ]
    assert told([row(0, long._replace(age_s=7.0)), row(1)], [card("HANG", "why, again")]) == []
    now_s[0] += 10
    assert told([row(0, step=900), row(1, step=900)])[0].startswith("gpt2-tiny  running 0:03:12  2 ranks  step 900")
    assert "failed" in told([row(0), row(1, Stand("error", "gone"))], status="failed")[0]


def test_a_card_is_told_again_for_another_rank_or_step_and_not_for_newer_figures() -> None:
    news = News(lambda: 0.0)

    def told(title: str, severity: str = "warning", **about: Any) -> int:
        return len(list(news.of(picture([], [{**card(title, severity=severity), **about}]))))

    assert told("the others lose 20% of the step", ranks=[2]) == 2  # with the head of the run
    assert told("the others lose 21% of the step", ranks=[2]) == 0
    assert told("the others lose 21% of the step", ranks=[1]) == 1
    assert told("the others lose 21% of the step", ranks=[1], step=9) == 1
    assert told("one model through step 40", "good", step=40) == 1
    assert told("one model through step 80", "good", step=80) == 0


def test_what_the_ranks_have_found_is_not_told_again_when_the_document_has_it() -> None:
    news = News(lambda: 0.0)

    def told(**about: Any) -> list[str]:
        return list(news.of(picture([], [{"severity": "error", "title": "GONE in step 27.", "text": "why", **about}])))

    assert told()[1:] == ["error: GONE in step 27.", "  why"]
    assert told(ranks=[1], step=27) == []
    assert told(ranks=[1], step=27, severity="warning") == []  # the run went on after it
    assert told(ranks=[1], step=31, title="GONE in step 31.") == ["error: GONE in step 31.", "  why"]


def test_a_run_that_is_over_is_told_once(tmp_path: Path) -> None:
    out = io.StringIO()

    TerminalView(tmp_path, lambda: {"run": run("finished", world_size=2), "cards": [card("slow")]}, out).show()

    lines = [line.partition("  ")[2] for line in out.getvalue().splitlines()]
    assert lines == ["gpt2-tiny  finished 0:03:12  2 ranks", "ranks 0,1: finished", "error: slow"]


def test_a_view_ends_when_it_is_told_to(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()

    TerminalView(tmp_path, lambda: {"run": run(), "cards": []}, io.StringIO()).show(stop)


# ------------------------------------------------------------------ terminals

_PROGRAM = """
import sys
from pathlib import Path
from lockstep.observe.report.terminal import TerminalView
assert "torch" not in sys.modules
run = {"id": "tiny", "status": "running", "world_size": 3}
TerminalView(Path(sys.argv[1]), lambda: {"run": run, "cards": []}, about="http://here:1/").show()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_the_terminal_is_left_as_it_was(tmp_path: Path, number: signal.Signals) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    said = b""
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(tmp_path)], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        os.set_blocking(ours, False)

        def has_said(text: bytes) -> bool:
            nonlocal said
            with contextlib.suppress(BlockingIOError, OSError):  # nothing new; nobody is there any more
                while chunk := os.read(ours, 65536):
                    said += chunk
            return text in said

        try:
            assert wait_until(lambda: has_said(b"rank"), 20), said
            fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 10, 120, 0, 0))
            process.send_signal(number)
            assert wait_until(lambda: process.poll() is not None and has_said(b""), 20), said
        finally:
            process.kill()
            os.close(ours)

    before, left, after = said.rpartition(b"\x1b[?1049l")
    assert before.count(b"\x1b[?1049h") == 1
    assert left
    assert b"http://here:1/" in before, "it stays in sight"
    assert b"http://here:1/" not in after
    assert b"\x1b[?25h" in said
    assert b"\x1b[?25l" not in after  # the cursor is there
    assert b"tiny" in after  # the last picture stays
    assert process.returncode in (-signal.SIGINT, 128 + number)
