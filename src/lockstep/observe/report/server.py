"""Serves the page of a run while it goes on, on this machine only unless asked otherwise.

Nothing can be changed through it. A page of another site cannot read it either: the browser keeps it apart from other
origins, and a name of somebody else's that leads here (DNS rebinding) is refused by the Host that such a request has.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, final
from weakref import WeakSet

from lockstep.errors import ConfigError
from lockstep.observe.report.document import Document
from lockstep.observe.report.page import render
from lockstep.observe.report.single_file import to_json

LOOPBACK = "127.0.0.1"
_TIMEOUT_S = 10.0  # of a client that says nothing


@final
class PageServer(ThreadingHTTPServer):
    """Answers / with the page and /document.json with the document alone, as `document` has it at that moment."""

    daemon_threads = False

    def __init__(self, document: Callable[[], Document], host: str = LOOPBACK, port: int = 0) -> None:
        """Raises: ConfigError where the address cannot be had."""
        self.document = document
        self.has_page = threading.Event()  # somebody has opened it
        self.has_told_end = threading.Event()  # and asked again after the run was over
        self._connections: WeakSet[socket.socket] = WeakSet()
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            hint = f"--port 0 takes a free one, --host {LOOPBACK} is always this machine's"
            raise ConfigError(f"cannot serve on {host} port {port}: {error}; {hint}") from error

    @property
    def address(self) -> str:
        """What to open in a browser."""
        host, port = self.server_address[:2]
        return f"http://{host if host != '0.0.0.0' else socket.gethostname()}:{port}/"

    def may_be_called(self, host: str) -> bool:
        """Whether a request may name this server so. On loopback the name must be, else any address or our own name."""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if name in ("localhost", LOOPBACK):
            return True
        if self.server_address[0] == LOOPBACK:
            return False
        try:
            return bool(ipaddress.ip_address(name))
        except ValueError:
            return name in (socket.gethostname(), socket.getfqdn())

    def get_request(self) -> tuple[socket.socket, Any]:
        """The next connection. Browsers open some ahead, and may say nothing through them for minutes."""
        connection, address = super().get_request()
        self._connections.add(connection)
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that has gone away is no news."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Within, requests are answered by another thread."""
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, name="lockstep-page")
        thread.start()
        try:
            yield
        finally:
            self.shutdown()
            thread.join()
            for connection in list(self._connections):
                with suppress(OSError):  # it has ended
                    connection.shutdown(socket.SHUT_RD)
            self.server_close()  # waits for the answers that are under way


@final
class _Handler(BaseHTTPRequestHandler):
    server: PageServer  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = _TIMEOUT_S
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if not self.server.may_be_called(self.headers.get("Host", "")):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "open the address that `lockstep watch` has named\n")
            return
        path = self.path.partition("?")[0]
        if path not in ("/", "/document.json"):
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there are / and /document.json\n")
            return
        try:
            document = self.server.document()
        except ConfigError as error:
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", f"{error}\n")
            return
        if path == "/":
            self._answer(HTTPStatus.OK, "text/html", render(document))
            self.server.has_page.set()
            return
        self._answer(HTTPStatus.OK, "application/json", to_json(document))
        if document["run"]["status"] != "running":
            self.server.has_told_end.set()

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Cross-Origin-Resource-Policy": "same-origin",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are no news."""
