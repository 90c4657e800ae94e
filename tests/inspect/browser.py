"""A headless Chromium and its pages, over the DevTools protocol (chromedevtools.github.io/devtools-protocol)."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT_S = 120.0


def installed() -> str | None:
    """The browser's path, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """An open page. ``errors`` are those of its scripts and of its console; ``requests`` the addresses that it
    requested."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()

    async def open(self, path: Path, width: int, height: int, dark: bool) -> None:
        """Show a file in a window of this size, and wait until it is loaded."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self._ask(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self._ask("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self._ask("Emulation.setEmulatedMedia", features=[feature])
        await self._ask("Page.navigate", url=path.absolute().as_uri())
        await asyncio.wait_for(self._loaded.wait(), TIMEOUT_S)

    async def evaluate(self, script: str) -> Any:
        """The value of an expression; a promise is awaited."""
        answer = await self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"])
        return answer["result"].get("value")

    async def listen(self) -> None:
        """Handle the browser's messages until cancelled."""
        async for message in self._socket:
            received = message.json()
            if "id" in received:
                self._answers.pop(received["id"]).set_result(received)
                continue
            what, facts = received["method"], received["params"]
            if what == "Page.loadEventFired":
                self._loaded.set()
            elif what == "Runtime.exceptionThrown":
                self.errors.append(str(facts["exceptionDetails"]))
            elif what == "Log.entryAdded" and facts["entry"]["level"] in ("error", "warning"):
                self.errors.append(str(facts["entry"]))
            elif what == "Runtime.consoleAPICalled" and facts["type"] in ("error", "warning", "assert"):
                self.errors.append(str(facts["args"]))
            elif what == "Network.requestWillBeSent":
                self.requests.append(facts["request"]["url"])

    async def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        reply = await asyncio.wait_for(answer, TIMEOUT_S)
        if "error" in reply:
            raise AssertionError(f"{method}: {reply['error']}")
        result: dict[str, Any] = reply["result"]
        return result


@contextmanager
def browser(profile: Path) -> Iterator[str]:
    """Start a browser with its profile in this folder. Returns the address of its DevTools."""
    program = installed()
    assert program is not None
    process = subprocess.Popen(
        [
            *(program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    limit = threading.Timer(TIMEOUT_S, process.kill)
    limit.start()
    try:
        assert process.stderr is not None
        line = next((line for line in process.stderr if b"DevTools listening on ws://" in line), None)
        assert line is not None, "the browser ended"
        limit.cancel()
        yield f"http://{line.decode().split('ws://')[1].partition('/')[0]}"
    finally:
        limit.cancel()
        process.kill()
        process.communicate()


@asynccontextmanager
async def page(browser: str) -> AsyncIterator[Page]:
    """A new page of the browser at this address. It stays open until the browser ends."""
    async with (
        aiohttp.ClientSession() as session,
        session.put(f"{browser}/json/new") as answer,
        session.ws_connect((await answer.json())["webSocketDebuggerUrl"], max_msg_size=0) as socket,
    ):
        shown = Page(socket)
        listening = asyncio.create_task(shown.listen())
        yield shown
        listening.cancel()
