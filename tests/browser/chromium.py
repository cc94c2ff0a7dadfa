"""A headless Chromium, driven over the two pipes of its own protocol: no driver, no package, no port.

One browser, one tab. Everything the tab said (console, errors, requests) is kept until `open` is called again.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_PATIENCE_S = 30.0
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # root has none in a container, and the page is ours
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)
_KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "Home": 36, "End": 35, " ": 32}
_KEYS |= {f"Arrow{side}": 37 + at for at, side in enumerate(("Left", "Up", "Right", "Down"))}


def executable() -> str | None:
    """Where a Chromium is, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class BrowserError(AssertionError):
    """The browser refused, or did not answer in time."""


@final
class Chromium:
    """`with Chromium() as tab:`"""

    def __init__(self) -> None:
        self._number = 0
        self._session = ""
        self._rest = b""
        self.console: list[str] = []  # errors and warnings, also of the network and of the policy
        self.requests: list[str] = []  # addresses

    def __enter__(self) -> Chromium:
        path = executable()
        if path is None:
            raise BrowserError("there is no Chromium on PATH")
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-browser-", ignore_cleanup_errors=True)
        hears, self._write = os.pipe()
        self._read, says = os.pipe()
        as_three_and_four = f'exec "$@" 3</proc/self/fd/{hears} 4>/proc/self/fd/{says}'  # where it looks for them
        self._process = subprocess.Popen(
            ["sh", "-c", as_three_and_four, "sh", path, *_FLAGS, f"--user-data-dir={self._folder.name}", "about:blank"],
            pass_fds=(hears, says),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(hears)
        os.close(says)
        try:
            self._attach()
        except BaseException:
            self._process.kill()
            self._clear_away()
            raise
        return self

    def _attach(self) -> None:
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def __exit__(self, *_: object) -> None:
        self._session = ""
        try:
            self.send("Browser.close")
        finally:
            self._clear_away()

    def _clear_away(self) -> None:
        os.close(self._write)  # a browser whose pipe is closed ends
        try:
            self._process.wait(_PATIENCE_S)
        finally:
            os.close(self._read)
            self._folder.cleanup()

    # ------------------------------------------------------------------ protocol

    def send(self, method: str, **values: Any) -> dict[str, Any]:
        """What the browser answers.  Raises: BrowserError."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": values}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _PATIENCE_S
        while (answer := self._next(deadline)).get("id") != self._number:
            self._hear(answer)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._read, 1 << 20) if ready else b""
            if not part:
                raise BrowserError("the browser does not answer" if not ready else "the browser has ended")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def _hear(self, event: Mapping[str, Any]) -> None:
        values = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                details = values["exceptionDetails"]
                self.console.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if values["type"] in ("error", "warning", "assert"):
                self.console.append(" ".join(str(each.get("value", each)) for each in values["args"]))
            case "Log.entryAdded":
                self.console.append(f"{values['entry']['level']}: {values['entry']['text']}")
            case "Network.requestWillBeSent":
                self.requests.append(values["request"]["url"])

    # ------------------------------------------------------------------ what a person does

    def open(self, place: Path | str) -> None:
        """A file, or an address; returns once the page has been painted."""
        self.console.clear()
        self.requests.clear()
        went = self.send("Page.navigate", url=place.as_uri() if isinstance(place, Path) else place)
        if "errorText" in went:
            raise BrowserError(f"{place}: {went['errorText']}")
        self.wait("document.readyState === 'complete'")
        self.settle()

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise BrowserError(f"{script}: {details.get('exception', {}).get('description', details['text'])}")
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until an expression in the page is true."""
        deadline = time.monotonic() + _PATIENCE_S
        while not self.run(condition):
            if time.monotonic() > deadline:
                raise BrowserError(f"this did not become true: {condition}")
            self.settle()

    def settle(self) -> None:
        """Two frames, so that what was asked for has been painted."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def text(self, selector: str) -> str:
        """What an element shows."""
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def texts(self, selector: str) -> list[str]:
        """What each of them shows."""
        return self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((each) => each.innerText)")

    def count(self, selector: str) -> int:
        """How many there are."""
        return self.run(f"document.querySelectorAll({json.dumps(selector)}).length")

    def click(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """At a part of an element's width and height."""
        self.point(selector, x, y)
        at = self._place(selector, x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)
        self.settle()

    def point(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """Moves the mouse there."""
        self.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        self.settle()  # scrolling hides the tip
        self.send("Input.dispatchMouseEvent", type="mouseMoved", **self._place(selector, x, y))
        self.settle()

    def drag(self, selector: str, x: float, to_x: float, y: float = 0.5) -> None:
        """Across an element, from one part of its width to another."""
        self.point(selector, x, y)
        self.send(
            "Input.dispatchMouseEvent", type="mousePressed", button="left", clickCount=1, **self._place(selector, x, y)
        )
        self.send("Input.dispatchMouseEvent", type="mouseMoved", button="left", **self._place(selector, to_x, y))
        self.send(
            "Input.dispatchMouseEvent",
            type="mouseReleased",
            button="left",
            clickCount=1,
            **self._place(selector, to_x, y),
        )
        self.settle()

    def wheel(self, selector: str, by: float, x: float = 0.5, y: float = 0.5, *, control: bool = False) -> None:
        """Turns the wheel over an element."""
        self.point(selector, x, y)
        place = self._place(selector, x, y)
        self.send(
            "Input.dispatchMouseEvent", type="mouseWheel", deltaX=0, deltaY=by, modifiers=2 if control else 0, **place
        )
        self.settle()

    def _place(self, selector: str, x: float, y: float) -> dict[str, float]:
        box = self.run(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()")
        return {"x": box["left"] + x * box["width"], "y": box["top"] + y * box["height"]}

    def press(self, *keys: str) -> None:
        """Keys, one after the other, to what has the keyboard."""
        for key in keys:
            values: dict[str, Any] = {"key": key, "code": key if len(key) > 1 else ""}
            values |= {"windowsVirtualKeyCode": _KEYS[key]} if key in _KEYS else {"text": key}
            values |= {"text": "\r"} if key == "Enter" else {}
            self.send("Input.dispatchKeyEvent", type="keyDown", **values)
            self.send("Input.dispatchKeyEvent", type="keyUp", **values)
        self.settle()

    def focus(self, selector: str) -> None:
        """Gives an element the keyboard."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")

    # ------------------------------------------------------------------ what a person has

    def screen(self, width: int, height: int, *, dark: bool = False, sharpness: float = 1.0) -> None:
        """The size of the window and the theme of the system."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=sharpness, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.send("Emulation.setEmulatedMedia", features=[scheme, still])
        self.settle()

    def picture(self, *, whole: bool = False, of: str = "") -> bytes:
        """PNG of the window, of the whole page, or of one element."""
        values: dict[str, Any] = {"captureBeyondViewport": whole or bool(of)}
        if of:
            box = self.run(
                f"(() => {{ const b = document.querySelector({json.dumps(of)}).getBoundingClientRect();"
                "return {x: b.x + scrollX, y: b.y + scrollY, width: b.width, height: b.height, scale: 1}; })()"
            )
            values["clip"] = box
        return base64.b64decode(self.send("Page.captureScreenshot", format="png", **values)["data"])


Show = Callable[..., Chromium]  # opens the page of a document
