"""Browser: a real Chromium without a window, asked over a pipe in the DevTools protocol.

with open_browser() as browser:
    with browser.open(path) as page:
        page.draw_charts()
        page.click("#theme")
        page.screenshot(to)
        assert page.errors == []
        assert page.requests == [path.as_uri()]
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import PATIENCE_S

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--remote-debugging-pipe", "--force-color-profile=srgb", "--font-render-hinting=none",
)  # fmt: skip
LAPTOP = (1280, 800)


def find_browser() -> str:
    """The program, '' where there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), "")


@dataclass
class Page:
    """One tab: what it logged, and what it asked the network for."""

    browser: Browser
    session: str
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    events: set[str] = field(default_factory=set)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.send(method, params, self.session)

    def value(self, script: str) -> Any:
        """What a JavaScript expression is worth."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        until = time.monotonic() + PATIENCE_S
        while not self.value(condition):
            if time.monotonic() > until:
                raise AssertionError(f"never came true: {condition}; errors {self.errors}")
            time.sleep(0.02)

    def draw_charts(self) -> None:
        """Make the charts of a report interactive, and wait until all are drawn."""
        self.wait_for("document.documentElement.dataset.page === 'ready'")
        self.value("document.querySelector('#interactive')?.click(); 0")
        self.wait_for("document.documentElement.dataset.charts === 'drawn'")

    def wait_for_event(self, name: str) -> None:
        while name not in self.events:
            self.browser.receive()

    def click(self, selector: str) -> None:
        """A real click with the mouse, on what is in the middle of an element."""
        place = self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def type(self, selector: str, text: str) -> None:
        self.click(selector)
        self.send("Input.insertText", text=text)

    def scheme(self, name: str) -> None:
        """light or dark, as the system would prefer it."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def size(self, width: int, height: int, scale: float = 1.0) -> None:
        screen = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **screen)

    def screenshot(self, to: Path, whole: bool = False) -> None:
        answer = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        to.write_bytes(base64.b64decode(answer["data"]))

    def pdf(self, to: Path) -> None:
        answer = self.send("Page.printToPDF", printBackground=True, paperWidth=8.27, paperHeight=11.69)
        to.write_bytes(base64.b64decode(answer["data"]))


class Browser:
    """A running Chromium."""

    def __init__(self, process: subprocess.Popen[bytes], write: int, read: int) -> None:
        self.process, self._write, self._read = process, write, read
        self._buffer, self._number = b"", 0
        self._pages: dict[str, Page] = {}

    @contextmanager
    def open(
        self, path: Path, scripts: bool = True, scheme: str = "light", size: tuple[int, int] = LAPTOP
    ) -> Iterator[Page]:
        """A tab with a file in it, closed at the end."""
        target = self.send("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.send("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Runtime", "Log", "Network", "Page"):
            page.send(f"{domain}.enable")
        page.size(*size)
        page.scheme(scheme)
        if not scripts:
            page.send("Emulation.setScriptExecutionDisabled", value=True)
        page.send("Page.navigate", url=path.resolve().as_uri())
        page.wait_for_event("Page.loadEventFired")
        try:
            yield page
        finally:
            self.send("Target.closeTarget", {"targetId": target})

    def send(self, method: str, params: dict[str, Any], session: str = "") -> dict[str, Any]:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']['message']}")
                return dict(answer["result"])

    def receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._read, 1 << 20)
            if not chunk:
                raise AssertionError("the browser has gone")
            self._buffer += chunk
        text, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        if page := self._pages.get(message.get("sessionId", "")):
            _note(page, message.get("method", ""), message.get("params", {}))
        return message


def _note(page: Page, event: str, params: dict[str, Any]) -> None:
    page.events.add(event)
    if event == "Runtime.exceptionThrown":
        page.errors.append(json.dumps(params["exceptionDetails"])[:500])
    elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
        page.errors.append(json.dumps(params["args"])[:500])
    elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
        page.errors.append(params["entry"]["text"][:500])
    elif event == "Network.requestWillBeSent":
        page.requests.append(params["request"]["url"])


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start Chromium on a profile of its own, and end it."""
    to_browser, from_browser = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # Chromium reads commands from descriptor 3 and answers on 4.
        command = f'exec "$0" "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'
        process = subprocess.Popen(
            ["/bin/bash", "-c", command, find_browser(), *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_browser[0], from_browser[1]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser[0])
        os.close(from_browser[1])
        try:
            yield Browser(process, to_browser[1], from_browser[0])
        finally:
            os.close(to_browser[1])
            os.close(from_browser[0])
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
