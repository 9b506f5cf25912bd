"""Headless Chromium by its debugging protocol, as far as looking at a page takes it: size, theme, script, picture."""

import asyncio
import base64
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_browser() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self._socket, self._number = socket, 0
        self.events: list[dict[str, Any]] = []
        """Events of the browser: requests, errors, console lines."""

    async def ask(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=30)
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    async def run(self, script: str) -> Any:
        """The value of an expression; a promise is awaited."""
        params = {"expression": script, "awaitPromise": True, "returnByValue": True, "userGesture": True}
        result = await self.ask("Runtime.evaluate", **params)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, condition: str) -> None:
        for _ in range(400):
            if await self.run(condition):
                return
            await asyncio.sleep(0.025)
        raise AssertionError(f"never true: {condition}; status: {await self.run('document.body.innerText')}")

    async def open(self, address: str, width: int, *, dark: bool) -> None:
        await self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=width < 600
        )
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.ask("Emulation.setEmulatedMedia", features=[theme])
        await self.ask("Page.navigate", url=address)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def key(self, name: str, code: int, modifiers: int = 0) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if name == "Enter" and kind == "keyDown" else {}
            event = {"key": name, "code": name, "windowsVirtualKeyCode": code, "modifiers": modifiers, **text}
            await self.ask("Input.dispatchKeyEvent", type=kind, **event)

    async def picture(self, path: Path) -> None:
        result = await self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(result["data"]))


async def look(folder: Path, at: Callable[[Page], Awaitable[None]]) -> None:
    """Run `at` on an empty page of a browser of its own, whose profile is in `folder`."""
    program = find_browser()
    assert program is not None
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run"]
    options += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--lang=en"]
    log = (folder / "browser.log").open("wb")
    process = subprocess.Popen(
        [program, *options, f"--user-data-dir={folder / 'profile'}", "about:blank"], stdout=log, stderr=log
    )
    try:
        port_file = folder / "profile" / "DevToolsActivePort"
        for _ in range(1200):
            if port_file.exists() and "\n" in port_file.read_text():
                break
            assert process.poll() is None, (folder / "browser.log").read_text()
            await asyncio.sleep(0.025)
        port = port_file.read_text().splitlines()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as reply:
                [target] = [target_info for target_info in await reply.json() if target_info["type"] == "page"]
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=1 << 26) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Network", "Log"):
                    await page.ask(f"{domain}.enable")
                await at(page)
                with suppress(ConnectionError, TypeError):  # it closes the socket before it answers
                    await page.ask("Browser.close")
    finally:
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()
        process.wait()
        log.close()
