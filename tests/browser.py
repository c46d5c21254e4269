"""A headless Chromium, driven over the pipe of its DevTools protocol
(chromedevtools.github.io/devtools-protocol).
"""

import base64
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-extensions",
    "--no-first-run",
    "--hide-scrollbars",
)


class Browser:
    """One tab. `problems` collects console messages, exceptions and requests for anything but the
    page itself.
    """

    def __init__(self, reads: int, writes: int):
        self._reads = reads
        self._writes = writes
        self._pending = b""
        self._ids = itertools.count(1)
        self._session: dict[str, str] = {}
        self._events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        message = {"id": next(self._ids), "method": method, "params": params} | self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != message["id"]:
            self._events.append(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            part = os.read(self._reads, 1 << 20)
            assert part, "Chromium ended"
            self._pending += part
        message, self._pending = self._pending.split(b"\0", 1)
        return json.loads(message)

    def open(
        self, url: str, width: int, *, height: int = 900, dark: bool = False, scale: float = 1
    ) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )
        self._events.clear()
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._events.append(self._read())
        self.evaluate(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        done = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        pause = "await new Promise(done => setTimeout(done, 20))"
        self.evaluate(f"(async () => {{ while (!({condition})) {pause}; }})()")

    def press(self, key: str) -> None:
        codes = {
            "Tab": 9,
            "Escape": 27,
            "ArrowLeft": 37,
            "ArrowUp": 38,
            "ArrowRight": 39,
            "ArrowDown": 40,
        }
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
            )

    def point(self, x: float, y: float) -> None:
        """Move the mouse there."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        self.point(*start)
        for kind, (x, y) in (("mousePressed", start), ("mouseMoved", end), ("mouseReleased", end)):
            self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=x,
                y=y,
                button="left",
                buttons=1,
                clickCount=1,
            )

    def screenshot(self, file: Path, *, full: bool = True) -> None:
        """Write a PNG of the page; of what is in view unless `full`."""
        made = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        file.write_bytes(base64.b64decode(made["data"]))

    @property
    def problems(self) -> list[str]:
        """What went wrong since the page was opened."""
        self.evaluate("0")  # takes in what was reported so far
        found = []
        for event in self._events:
            method = event.get("method")
            params = event.get("params", {})
            if method == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                found.append(details.get("exception", {}).get("description") or details["text"])
            elif method in ("Runtime.consoleAPICalled", "Log.entryAdded"):
                found.append(json.dumps(params))
            elif method == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if url != params["documentURL"] and not url.startswith("data:"):
                    found.append(url)
        return found


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start Chromium with its profile in an empty folder."""
    to_browser, own_writes = os.pipe()
    own_reads, from_browser = os.pipe()
    flags = [*_FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
    # It reads commands from file descriptor 3 and answers on 4.
    command = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
    process = subprocess.Popen(
        ["bash", "-c", command, CHROMIUM, *flags],
        pass_fds=(to_browser, from_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Browser(own_reads, own_writes)
    finally:
        os.close(own_writes)
        process.terminate()
        process.wait(30)
        os.close(own_reads)
