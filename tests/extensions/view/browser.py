"""A real browser without a window, told what to do over its DevTools protocol: nothing to install but the browser.

with Browser.start(binary, tmp_path) as browser:
    browser.open("http://127.0.0.1:6100/")
    browser.value("document.title")
    browser.click("tbody tr")
    browser.screenshot(path)
"""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import subprocess
import time
from pathlib import Path

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DEADLINE_S = 60
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0",
    "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-default-apps",
    "--disable-sync", "--disable-extensions", "--mute-audio", "--hide-scrollbars", "--force-device-scale-factor=1",
)  # fmt: skip


def find_browser():
    """The browser's program, or None: RL4LLM_BROWSER, or what is installed."""
    return os.environ.get("RL4LLM_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)


class Navigated(RuntimeError):
    """The page was replaced while it answered."""


class Browser:
    """One page of a browser. What the page logs as an error or throws is in `errors`, what it asked for in `requests`."""

    def __init__(self, process, runner, session, socket):
        self._process, self._runner, self._session, self._socket = process, runner, session, socket
        self._count = 0
        self.errors, self.requests = [], []

    @classmethod
    def start(cls, program, directory, size=(1280, 860)):
        profile = Path(directory) / "browser"
        profile.mkdir()
        command = [
            program,
            *FLAGS,
            f"--user-data-dir={profile}",
            f"--window-size={size[0]},{size[1]}",
            "about:blank",
        ]
        log = open(profile / "log", "wb")  # noqa: SIM115 - the browser's for as long as it runs
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "HOME": str(profile)})
        runner = asyncio.Runner()
        try:
            port = _wait(
                lambda: (profile / "DevToolsActivePort").read_text().split()[0], "the browser does not start"
            )
            browser = cls(process, runner, *runner.run(_connect(port)))
        except BaseException:
            process.kill()
            runner.close()
            raise
        for domain in ("Page", "Runtime", "Log", "Network"):
            browser.call(f"{domain}.enable")
        return browser

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._runner.run(self._session.close())
        self._runner.close()
        self._process.kill()
        self._process.wait()

    def call(self, method, **params):
        """One command of the protocol."""
        return self._runner.run(asyncio.wait_for(self._call(method, params), DEADLINE_S))

    async def _call(self, method, params):
        self._count += 1
        number = self._count
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json()
            self._notice(message)
            if message.get("id") == number:
                if "error" in message:
                    replaced = "navigated" in message["error"]["message"]
                    raise (Navigated if replaced else RuntimeError)(f"{method}: {message['error']}")
                return message["result"]

    def _notice(self, message):
        kind, params = message.get("method"), message.get("params", {})
        if kind == "Runtime.exceptionThrown":
            self.errors.append(
                params["exceptionDetails"].get("exception", {}).get("description", str(params))
            )
        elif kind == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif kind == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, url):
        """Load a page and wait until it says that it is ready."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        self.until("document.documentElement?.dataset.ready === 'yes'")

    def value(self, expression):
        """What JavaScript gives for an expression, as JSON."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']['exception'].get('description')}")
        return result["result"].get("value")

    def until(self, condition):
        """Wait for a condition, also one of the page that comes after this one."""

        def holds():
            try:
                return self.value(f"Boolean({condition})")
            except Navigated:
                return False

        return _wait(holds, f"never came: {condition}; errors: {self.errors}")

    def text(self, selector):
        return self.value(f"document.querySelector({selector!r})?.innerText")

    def point(self, selector, shift=0.5):
        """Move the mouse onto an element, `shift` of its width from the left."""
        x, y = self.value(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}});"
            f" const r = e.getBoundingClientRect(); return [r.x + {shift} * r.width, r.y + r.height / 2]; }})()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        return x, y

    def click(self, selector):
        x, y = self.point(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text):
        self.call("Input.insertText", text=text)

    def press(self, *keys):
        for key in keys:
            named = {"Enter": "\r", "Escape": "\x1b"}
            text = named.get(key, key if len(key) == 1 else None)
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **({"text": text} if text else {}))
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def screenshot(self, path):
        Path(path).write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


async def _connect(port):
    session = aiohttp.ClientSession()
    async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
        page = next(target for target in await response.json() if target["type"] == "page")
    return session, await session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)


def _wait(get, failure):
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        try:
            if value := get():
                return value
        except (OSError, IndexError):
            pass
        time.sleep(0.05)
    raise AssertionError(failure)


def list_episodes(page, by="sample"):
    """Open the list of episodes, a row for each sample."""
    page.press("2")
    page.until("document.getElementById('count')")
    page.value(
        f"(() => {{ const field = document.querySelector('[data-by]'); field.value = '{by}';"
        " field.dispatchEvent(new Event('change')); })()"
    )
