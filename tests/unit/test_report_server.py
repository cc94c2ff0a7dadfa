"""The live page: what is served to whom, and what the commands say where there is nothing to show."""

from __future__ import annotations

import errno
import http.client
import json
import os
import shutil
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from profiled_worlds import World
from reported_runs import add_launch, full_run

from lockstep.cli import main
from lockstep.cli.report import tell_record
from lockstep.cli.watched import watched
from lockstep.comm.waiting import wait_until
from lockstep.errors import ConfigError
from lockstep.observe.profile.window import PROFILE, RUN
from lockstep.observe.report import server as report_server
from lockstep.observe.report.server import PageServer
from lockstep.observe.report.writing import LiveDocument


class Client:
    def __init__(self, server: PageServer) -> None:
        self.address = ("127.0.0.1", server.server_address[1])

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = http.client.HTTPConnection(*self.address, timeout=20)
        try:
            connection.request(method, path, headers={name.replace("_", "-"): text for name, text in headers.items()})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    server = PageServer(LiveDocument(full_run(tmp_path, steps=20)))
    with server.serving():
        yield Client(server)


def test_page_and_document_are_served(client: Client) -> None:
    status, headers, page = client.get("/")
    assert (status, headers.get_content_type()) == (200, "text/html")
    assert b"<script" in page
    status, headers, text = client.get("/document.json?x=1")
    assert (status, headers["Cache-Control"]) == (200, "no-store")
    assert json.loads(text)["run"]["steps"] == 20


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "10.0.0.1", "localhost.evil"]
)
def test_foreign_names_are_refused(client: Client, host: str) -> None:
    for path in ("/", "/document.json"):
        status, headers, text = client.get(path, Host=host)
        assert status == 403
        assert b"lockstep watch" in text
        assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:9"])
def test_own_names_are_not_also_behind_a_tunnel(client: Client, host: str) -> None:
    assert client.get("/document.json", Host=host)[0] == 200


def test_record_that_cannot_be_made_out_is_said_to_the_browser(tmp_path: Path) -> None:
    (tmp_path / "rank-0.jsonl").write_text("[]\n")
    server = PageServer(LiveDocument(tmp_path))
    with server.serving():
        for path in ("/", "/document.json"):
            status, _, text = Client(server).get(path)
            assert status == 500
            assert b"holds no record that can be read: rank-0.jsonl: line 1 " in text


def test_browser_that_goes_away_is_no_news(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_connection(client.address) as gone:
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its end is a reset
        gone.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert client.get("/document.json")[0] == 200
    assert capsys.readouterr().err == ""


def test_connection_that_says_nothing_does_not_delay_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_server._Handler, "timeout", None)  # or it would be given up by itself
    server = PageServer(dict)
    with server.serving():
        silent = socket.create_connection(("127.0.0.1", server.server_port))
        assert wait_until(lambda: len(server._connections) == 1, 20)
    assert silent.recv(1) == b"", "it was ended"
    silent.close()


def test_watched_command_that_is_refused_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert watched(["report", "nowhere"], tmp_path / "run") == 2
    assert "nowhere does not exist" in capfd.readouterr().out
    assert main(["run", "--nproc-per-node", "1", "--watch", __file__]) == 2
    assert "--watch comes first" in capfd.readouterr().err
    assert main(["run", "--watch", "--record=off", __file__]) == 2
    assert "leave out --record off" in capfd.readouterr().err


def test_record_of_the_script_is_its_own_affair(monkeypatch: pytest.MonkeyPatch) -> None:
    def begun(words: Sequence[str], folder: Path) -> int:
        raise EOFError(words)

    monkeypatch.setattr("lockstep.cli.watched.watched", begun)
    with pytest.raises(EOFError):
        main(["run", "--watch", __file__, "--record", "off"])


def test_nothing_else_is_there(client: Client) -> None:
    for path in ("/rank-0.jsonl", "/../rank-0.jsonl", "/%2e%2e/", "/document.json/"):
        assert client.get(path)[0] == 404
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert client.get("/", method)[0] == 501


def test_only_this_machine_is_served_unless_asked() -> None:
    with PageServer(dict).serving() as _, PageServer(dict, "0.0.0.0") as wide:
        assert wide.may_be_called("10.1.2.3:80")
        assert wide.may_be_called(f"{socket.gethostname()}:80")
        assert not wide.may_be_called("evil.example")
    with PageServer(dict) as server:
        assert server.server_address[0] == "127.0.0.1"
        with pytest.raises(ConfigError, match="--port 0 takes a free one"):
            PageServer(dict, port=server.server_address[1])
    for port in (70_000, -1):
        with pytest.raises(ConfigError, match="cannot serve"):
            PageServer(dict, port=port)


def test_document_is_built_anew_only_where_something_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    World(work_us=lambda rank, step: 1000, steps=4).run(tmp_path)
    now = [100.0]
    monkeypatch.setattr("lockstep.observe.report.writing.time.monotonic", lambda: now[0])
    live = LiveDocument(tmp_path)
    first = live()
    now[0] += 1000
    assert live() is first
    add_launch(
        tmp_path,
        {"launch": "a", "command": [], "time_ns": 1, "pid": 1, "host": ""},
        {"over": "a", "code": 0, "time_ns": 9},
    )
    assert live() is first  # it was looked at a moment ago
    now[0] += 1000
    assert live()["run"]["status"] == "finished"


# ------------------------------------------------------------------ commands


def test_report_writes_the_page_and_says_what_matters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full_run(tmp_path / "run", steps=20)
    assert main(["report", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("run      run: failed, 2 ranks, 20 steps, ")
    assert "error    The run failed: rank 1 failed at train.py:88: ValueError: no" in said
    assert said.splitlines()[-1].endswith("run/report.html")
    assert (tmp_path / "run" / "report.html").read_text().startswith("<!")
    assert [path.name for path in (tmp_path / "run").glob(".report*")] == []
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "mine.html")]) == 0
    assert (tmp_path / "mine.html").exists()


def test_newest_run_is_reported_without_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report"]) == 2
    full_run(tmp_path / "runs" / "one", steps=5)
    assert main(["report"]) == 0
    assert (tmp_path / "runs" / "one" / "report.html").exists()


@pytest.mark.parametrize("command", ["report", "watch", "profile"])
def test_record_that_may_not_be_read_is_named(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To whom a folder is closed it looks empty."""
    closed = tmp_path / "one" / "profile"
    closed.mkdir(parents=True)

    def closing(listing: Callable[[Any], Any], path: Any = ".") -> Any:  # root may read all
        if str(path) == str(closed):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listing(path)

    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, partial(closing, getattr(os, name)))
    monkeypatch.chdir(tmp_path)
    assert main([command, "one"]) == 1
    assert capsys.readouterr().err == f"lockstep: {closed}: Permission denied\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["report", "nowhere"], "does not exist"),
        (["watch", "nowhere"], "does not exist"),
        (["report", "one", "--out", "not/there.html"], "; another place: `lockstep report RUN --out FILE`"),
        (["report", "one", "--out", "."], "; another place: `lockstep report RUN --out FILE`"),
        (
            ["report", "one", "--out", "damaged/rank-0.jsonl/x.html"],
            "x.html: Not a directory; another place: `lockstep report RUN --out FILE`",
        ),
        (["watch", "one", "--port", "70000"], "--port 0 takes a free one"),
        (["watch", "one", "--host", "198.51.100.7"], "; --port 0 takes a free one, --host 127.0.0.1 is always"),
        (["watch", "one", "--host", "no host"], "--host 127.0.0.1 is always this machine's"),
        (["profile", "one", "--peak-tflops", "-3"], "--peak-tflops -3: it is a number above 0"),
        (["profile", "one", "--flops-per-token", "nan"], "--flops-per-token nan: it is a number above 0"),
        (["report", "damaged"], "holds no record that can be read: rank-0.jsonl: line 1 "),
        (["reprot"], "did you mean `lockstep report`"),
    ],
)
def test_wrong_words_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    full_run(tmp_path / "one", steps=5)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "rank-0.jsonl").write_text("[]\n")
    assert main(words) == 2
    assert says in capsys.readouterr().err


def test_watch_of_a_run_that_is_over_shows_it_and_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full_run(tmp_path / "run", steps=5)
    for words in ([], ["--no-terminal"]):
        assert main(["watch", str(tmp_path / "run"), *words]) == 0
        said = capsys.readouterr().out.splitlines()
        assert "http://127.0.0.1:" in said[0]
        assert said[-1].startswith("lockstep: the run has failed; lockstep report ")


def test_watch_ends_where_the_folder_of_the_run_is_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    World(work_us=lambda rank, step: 1000).run(folder)
    add_launch(folder, {"launch": "a", "pid": os.getpid(), "host": socket.gethostname(), "time_ns": time.time_ns()})
    remover = threading.Timer(0.5, shutil.rmtree, [folder])
    remover.start()
    assert main(["watch", str(folder)]) == 1
    remover.join()
    said = capsys.readouterr().out.splitlines()
    assert "running" in said[1]
    assert said[-1] == f"lockstep: {folder} was removed"


# ------------------------------------------------------------------ at the end of a run


def test_end_of_a_run_says_where_its_report_lies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full_run(tmp_path, steps=5)
    for is_quiet in (True, False):
        tell_record({RUN: str(tmp_path)}, is_quiet=is_quiet)
        assert capsys.readouterr().err.splitlines()[-1].startswith("lockstep: report: ")
    assert (tmp_path / "report.html").exists()
    for environ in ({}, {RUN: ""}, {RUN: str(tmp_path / "not made")}):
        tell_record(environ, is_quiet=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("is_one", [False, True])
def test_line_of_the_report_begins_a_line_where_the_ranks_print(
    is_one: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full_run(tmp_path, steps=5)
    monkeypatch.setattr("os.path.sameopenfile", lambda first, second: is_one and {first, second} == {1, 2})
    for is_quiet in (True, False):  # quiet: the launcher has said a line before
        tell_record({RUN: str(tmp_path)}, is_quiet=is_quiet)
        is_apart = is_one and not is_quiet
        assert capsys.readouterr().err.startswith("\nlockstep: report: " if is_apart else "lockstep: report: ")


def test_end_of_a_run_is_what_it_is_where_nothing_can_be_said_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_run(tmp_path, steps=5)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        tell_record({RUN: str(tmp_path), PROFILE: "steps=70:75"}, is_quiet=False)
        tell_record({RUN: str(tmp_path), PROFILE: "no window"}, is_quiet=False)
        assert main(["watsh"]) == 2
    assert (tmp_path / "report.html").exists()


def test_window_that_no_step_has_reached_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full_run(tmp_path, steps=5)
    tell_record({RUN: str(tmp_path), PROFILE: "steps=70:75"}, is_quiet=False)
    assert "lockstep: no trace: no rank has come to step 70\n" in capsys.readouterr().err


def test_broken_record_is_said_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full_run(tmp_path, steps=5)
    tell_record({RUN: str(tmp_path), PROFILE: "no window"}, is_quiet=False)
    assert "lockstep: no report: --profile" in capsys.readouterr().err

    def breaks(*words: Any) -> None:
        raise MemoryError("too large")

    monkeypatch.setattr("lockstep.cli.report.document_in", breaks)
    tell_record({RUN: str(tmp_path)}, is_quiet=False)
    assert capsys.readouterr().err == f"lockstep: no report of {tmp_path}: MemoryError: too large\n"


def test_report_that_takes_too_long_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full_run(tmp_path, steps=5)
    idle, silent = socket.socketpair()
    monkeypatch.setattr("lockstep.cli.report._LIMIT_S", 1)
    monkeypatch.setattr("lockstep.cli.report.document_in", lambda place: idle.recv(1))
    with idle, silent:
        tell_record({RUN: str(tmp_path)}, is_quiet=False)
    assert "it takes longer than 1 s: `lockstep report` has the time" in capsys.readouterr().err
