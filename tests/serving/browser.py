"""Chromium without a window, spoken to through a pipe: a few words of the DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome")
PROGRAM = next(filter(None, map(shutil.which, _NAMES)), None)
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
# Chromium reads at file descriptor 3 and writes at 4.
_START = """
import fcntl, os, sys
reads, writes = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(reads, 3); os.dup2(writes, 4); os.execv(sys.argv[3], sys.argv[3:])
"""
PATIENCE = 60.0  # seconds


class Browser:
    """One process of Chromium; each page that it opens has a profile of its own."""

    def __init__(self, folder: str) -> None:
        reads, self._writes = os.pipe()
        self._reads, writes = os.pipe()
        assert PROGRAM is not None
        self._process = subprocess.Popen(
            [sys.executable, "-ISc", _START, str(reads), str(writes), PROGRAM, *_FLAGS,
             f"--user-data-dir={folder}"],
            pass_fds=(reads, writes), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(reads)
        os.close(writes)
        self._ids, self._rest = itertools.count(1), b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._reads, selectors.EVENT_READ)
        self.heard: Callable[[dict[str, Any]], None] = lambda event: None

    def ask(self, method: str, session: str | None = None, **params: Any) -> Any:
        """What Chromium answers to a command; events meanwhile go to `heard`."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            for found in self.messages(end - time.monotonic()):
                if found.get("id") == number:
                    if "error" in found:
                        raise RuntimeError(f"{method}: {found['error']}")
                    return found["result"]
        raise TimeoutError(method)

    def messages(self, timeout: float) -> Iterator[dict[str, Any]]:
        """What has come within `timeout` seconds; events have been given to `heard`."""
        while b"\0" not in self._rest:
            if not self._selector.select(max(0.0, timeout)):
                return
            data = os.read(self._reads, 1 << 20)
            if not data:
                raise RuntimeError("Chromium has ended")
            self._rest += data
        *whole, self._rest = self._rest.split(b"\0")
        found = [json.loads(one) for one in whole]
        for one in found:
            if "method" in one:
                self.heard(one)
        yield from found

    @contextlib.contextmanager
    def page(self, width: int = 1280, height: int = 800, dark: bool = False) -> Iterator[Page]:
        """An empty page of this size, light or dark; nothing is left of it afterwards."""
        context = self.ask("Target.createBrowserContext")["browserContextId"]
        target = self.ask(
            "Target.createTarget", url="about:blank", browserContextId=context
        )["targetId"]  # fmt: skip
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        found = Page(self, session)
        self.heard = found.heard
        for domain in ("Page", "Network", "Runtime", "Log"):
            found.ask(f"{domain}.enable")
        found.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        found.ask("Emulation.setEmulatedMedia", features=[scheme])
        try:
            yield found
        finally:
            self.heard = lambda event: None
            self.ask("Target.disposeBrowserContext", browserContextId=context)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.ask("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._selector.close()
        os.close(self._reads)
        os.close(self._writes)


class Page:
    """A page, what it has asked for (`asked`, URLs), and what went wrong in it (`wrong`).

    `answers` maps the end of a URL to (status, content type, body), given in place of the server's.
    """

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.asked: list[str] = []
        self.wrong: list[str] = []
        self.bodies: list[Any] = []
        self.answers: dict[str, tuple[int, str, str]] = {}

    def ask(self, method: str, **params: Any) -> Any:
        return self._browser.ask(method, self._session, **params)

    def heard(self, event: dict[str, Any]) -> None:
        method, params = event["method"], event["params"]
        if method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
            if (body := params["request"].get("postData")) is not None:
                self.bodies.append(json.loads(body))
        elif method == "Runtime.exceptionThrown":
            self.wrong.append(params["exceptionDetails"].get("exception", {}).get("description"))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.wrong.append(params["entry"]["text"])
        elif method == "Fetch.requestPaused":
            self._answer(params)

    def _answer(self, params: Any) -> None:
        status, kind, body = next(
            answer for end, answer in self.answers.items() if params["request"]["url"].endswith(end)
        )
        message = {
            "id": 0, "method": "Fetch.fulfillRequest", "sessionId": self._session,
            "params": {
                "requestId": params["requestId"], "responseCode": status,
                "responseHeaders": [{"name": "Content-Type", "value": kind}],
                "body": base64.b64encode(body.encode()).decode(),
            },
        }  # fmt: skip
        os.write(self._browser._writes, json.dumps(message).encode() + b"\0")

    def instead(self, end: str, status: int, kind: str, body: str) -> None:
        """Answer requests for URLs that end so in place of the server."""
        self.answers[end] = status, kind, body
        self.ask("Fetch.enable", patterns=[{"urlPattern": f"*{end}"} for end in self.answers])

    def open(self, url: str) -> None:
        self.ask("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """What a JavaScript expression is, promises awaited. Raises RuntimeError."""
        found = self.ask(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"]["description"])
        return found["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until an expression is true, or an element."""
        end = time.monotonic() + PATIENCE
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < end, f"never came: {script}"
            for _ in self._browser.messages(0.05):
                pass

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)}).textContent"))

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def fill(self, selector: str, value: str) -> None:
        where = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{where}.value = {json.dumps(value)}")
        self.run(f"{where}.dispatchEvent(new Event('change', {{bubbles: true}}))")

    def write(self, text: str) -> None:
        """Type into what has the keyboard."""
        self.ask("Input.insertText", text=text)

    def press(self, key: str, shift: bool = False) -> None:
        """Press a key, as a keyboard would."""
        number = {"Enter": 13, "Escape": 27, "Tab": 9, " ": 32}[key]
        text = {"Enter": "\r", " ": " "}.get(key)
        own = {
            "key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": number,
            "modifiers": 8 if shift else 0,
        }  # fmt: skip
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        self.ask("Input.dispatchKeyEvent", **down, **own)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **own)

    def picture(self) -> bytes:
        """What is seen, as a PNG."""
        return base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"])


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with a profile that is thrown away."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        found = Browser(folder)
        try:
            yield found
        finally:
            found.close()
