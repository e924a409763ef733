"""A page in a headless Chromium, driven over the DevTools protocol."""

import asyncio
import contextlib
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_OPTIONS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --remote-debugging-port=0""".split()


class Tab:
    """A tab of a browser."""

    def __init__(self, connection: aiohttp.ClientWebSocketResponse) -> None:
        self._connection = connection
        self._last = 0

    async def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result. Events are discarded."""
        self._last += 1
        await self._connection.send_json({"id": self._last, "method": method, "params": arguments})
        while (answer := await self._connection.receive_json()).get("id") != self._last:
            pass
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    async def open(self, url: str) -> None:
        """Load a page, and wait until its scripts have run."""
        await self.call("Page.navigate", url=url)
        await self.evaluate(
            f"""new Promise(resolve => {{
                const look = () => document.readyState == "complete" && location.href.startsWith({url!r})
                    ? resolve() : setTimeout(look, 10);
                look();
            }})"""
        )

    async def evaluate(self, script: str) -> Any:
        """Return the value of an expression; if it is a promise, the value that it resolves to."""
        while True:
            with contextlib.suppress(AssertionError):  # the page that evaluated it was replaced
                answer = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
                assert "exceptionDetails" not in answer
                return answer["result"].get("value")

    async def show_on(self, width: int, height: int, scheme: str) -> None:
        """Set the size of the window and the colour scheme of the system."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])


@contextlib.asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Tab]:
    """Start Chromium with an empty profile."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    try:
        while not (
            found := re.search(r"listening on ws://([^/]+)/", line := (await process.stderr.readline()).decode())
        ):
            assert line, "Chromium ended"
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{found[1]}/json") as answer:
                pages = [each for each in await answer.json() if each["type"] == "page"]
            async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as connection:
                yield Tab(connection)
    finally:
        process.terminate()
        await process.communicate()
