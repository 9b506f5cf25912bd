"""The page in headless Chromium, for each task, on a desk and on a phone, in light and in dark: asked by an example and
by the keyboard, without an error, without a request to elsewhere, and without scrolling sideways.

With RTRAIN_PICTURES=FOLDER the pages are left there as pictures.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rtrain.config import ServeConfig
from rtrain.inference.predictor import Predictor
from serve.app import build_app
from serve.registry import ModelRegistry
from serve.standalone import build_model_registry
from tests.support import browser
from tests.support.browser import Page
from tests.support.reports import write_predictions
from tests.support.serving import HEADS, listening, predictor_of
from tests.support.tiny import make_artifact
from tests.unit.serve.test_registry import NAMES

pytestmark = pytest.mark.slow

SIZES = (1280, 390)
DONE = "document.getElementById('status').textContent.startsWith('Answered in')"
HOSTILE = "<img src=x onerror=window.ran=1><b>bold</b>"


@pytest.fixture(autouse=True)
def chromium() -> None:
    if browser.find_browser() is None:
        pytest.skip("no Chromium on PATH")


def wrong(page: Page, address: str) -> list[str]:
    """Errors that the browser told of, and requests to anywhere but `address`."""
    loaded = []
    for event in page.events:
        method, arguments = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            loaded.append(str(arguments["exceptionDetails"]))
        if method == "Log.entryAdded" and arguments["entry"]["level"] == "error":
            loaded.append(arguments["entry"]["text"])
        if method == "Network.requestWillBeSent" and not arguments["request"]["url"].startswith(address):
            loaded.append(arguments["request"]["url"])
    return loaded


async def shown(page: Page) -> dict[str, str]:
    """The calls that the page shows, by language."""
    result = {}
    for language in ("curl", "python"):
        await page.run(f"document.querySelector('[value={language}]').click()")
        result[language] = await page.run("document.getElementById('call').textContent")
    return result


def ran(language: str, call: str) -> str:
    """What such a call prints."""
    command = ["bash", "-c", call] if language == "curl" else [sys.executable, "-c", call]
    environment = {**os.environ, "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
    assert done.stdout.strip()
    assert '"error"' not in done.stdout, done.stdout
    return done.stdout


@pytest.mark.parametrize("task", sorted(HEADS))
def test_the_page_of_each_task(task: str, tmp_path: Path) -> None:
    predictor = predictor_of(tmp_path / "artifact", task)
    pictures = Path(os.environ.get("RTRAIN_PICTURES", tmp_path))
    explains = task not in ("span_qa", "extractive_summary", "masked_lm")
    calls: dict[str, str] = {}

    async def at(page: Page) -> None:
        for width in SIZES:
            for dark in (False, True):
                await page.open(address, width, dark=dark)
                await page.until("document.querySelectorAll('#examples button').length > 0")
                assert await page.run("document.activeElement.tagName") == "TEXTAREA"
                if explains:
                    await page.run("document.getElementById('why').click()")
                await page.run("document.querySelector('#examples button').click()")
                await page.until(DONE)
                assert await page.run("document.querySelector('#answer').children.length") > 1
                assert await page.run("document.querySelectorAll('#answer .for, #answer .against').length > 0") in (
                    explains,
                    task == "extractive_summary",
                )
                wide = await page.run("document.documentElement.scrollWidth")
                assert wide <= width, "the page scrolls sideways"
                await page.picture(pictures / f"{task}-{width}-{'dark' if dark else 'light'}.png")
        # By the keyboard alone: from the field, Ctrl and Enter.
        await page.open(address, SIZES[0], dark=False)
        await page.until("document.querySelectorAll('#examples button').length > 0")
        text = await page.run("about.examples[0]")
        values = list(text.values()) if isinstance(text, dict) else [text]
        for place, value in enumerate(values):
            await page.run(f"document.querySelectorAll('textarea')[{place}].focus()")
            await page.ask("Input.insertText", text=value)
        await page.key("Enter", 13, modifiers=2)
        await page.until(DONE)
        calls.update(await shown(page))
        assert wrong(page, address) == []

    with listening(build_app(predictor, ServeConfig())) as address:
        asyncio.run(browser.look(tmp_path, at))
        for language, call in calls.items():
            printed = ran(language, call)
            assert {"regression": ".", "extractive_summary": "summary_text"}.get(task, "score") in printed, call


def test_labels_and_texts_are_shown_and_never_run(tmp_path: Path) -> None:
    """And what the page shows as the same call in a program is that call."""
    predictor = Predictor.load(make_artifact(tmp_path / "artifact", ("a", HOSTILE, "c")), threads=1)
    write_predictions(tmp_path, ["a"], ["a"], text=[HOSTILE], split="valid", measured=False)
    inputs = f'it\'s {HOSTILE} \\ "quoted" $HOME `id` 🙂\nline two'
    calls: list[dict[str, str]] = []

    async def at(page: Page) -> None:
        await page.open(address, 1280, dark=False)
        await page.until("document.querySelectorAll('#examples button').length > 0")
        assert await page.run("document.getElementById('examples').textContent") == HOSTILE
        assert await page.run("document.querySelectorAll('#examples img, #examples b').length") == 0
        await page.run(f"document.querySelector('textarea').value = {json.dumps(inputs)}")
        await page.run("document.getElementById('why').click()")
        await page.run("document.getElementById('ask').click()")
        await page.until(DONE)
        assert HOSTILE in await page.run("document.getElementById('answer').innerText")
        assert await page.run("document.querySelectorAll('#answer img, #answer b b').length") == 0
        assert await page.run("window.ran === undefined && document.title === 'tiny'")
        calls.append(await shown(page))
        await page.run("document.getElementById('why').click()")
        calls.append(await shown(page))
        assert wrong(page, address) == []

    with listening(build_app(predictor, ServeConfig())) as address:
        asyncio.run(browser.look(tmp_path, at))
        expected = predictor([inputs])[0]
        for language, call in (item for pair in calls for item in pair.items()):
            assert expected[0]["label"] in answered(ran(language, call)), call


def test_several_models_are_listed_and_each_is_tried_on_its_own_page(tmp_path: Path) -> None:
    folders = {name: str(make_artifact(tmp_path / name, seed=seed)) for seed, name in enumerate(NAMES)}
    pictures = Path(os.environ.get("RTRAIN_PICTURES", tmp_path))

    async def loaded() -> ModelRegistry:
        models = build_model_registry(ServeConfig(), NAMES)
        await models.apply(folders)
        return models

    async def at(page: Page) -> None:
        for width in SIZES:
            for dark in (False, True):
                await page.open(address, width, dark=dark)
                await page.until(f"document.querySelectorAll('#models a').length === {len(NAMES)}")
                assert await page.run("document.documentElement.scrollWidth") <= width
                await page.picture(pictures / f"models-{width}-{'dark' if dark else 'light'}.png")
        await page.run("document.querySelectorAll('#models a')[1].click()")
        await page.until("document.querySelectorAll('#examples button').length > 0")
        assert await page.run("document.title") == NAMES[1]
        await page.run("document.querySelector('#examples button').click()")
        await page.until(DONE)
        assert f"{address}/models/{NAMES[1]}/predict" in await page.run("document.getElementById('call').textContent")
        await page.run("document.querySelector('#others a').click()")
        await page.until("document.querySelectorAll('#models a').length > 0")
        assert wrong(page, address) == []

    with listening(asyncio.run(loaded())) as address:
        asyncio.run(browser.look(tmp_path, at))


def answered(printed: str) -> str:
    """A reply as a client prints it, with its labels as they are."""
    try:
        reply: Any = json.loads(printed)
    except ValueError:
        return printed
    return " ".join(str(part) for part in reply)


def test_a_key_is_asked_for_once_and_sent(tmp_path: Path) -> None:
    """As behind anything that asks for a key: all but the page's own files is answered 401 without one."""
    app = build_app(predictor_of(tmp_path / "artifact", "classification"), ServeConfig())

    async def guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        if request.url.path in ("/info", "/predict") and request.headers.get("authorization") != "Bearer it's a key":
            return JSONResponse({"error": {"type": "unauthorized", "message": "send a key", "field": None}}, 401)
        return await call_next(request)

    async def at(page: Page) -> None:
        await page.open(address, 390, dark=False)
        await page.until("document.getElementById('status').textContent === 'send a key'")
        assert await page.run("document.activeElement.id") == "key"
        await page.ask("Input.insertText", text="it's a key")
        await page.key("Enter", 13)
        await page.until("document.querySelectorAll('#examples button').length > 0")
        await page.run("document.querySelector('#examples button').click()")
        await page.until(DONE)
        shown = await page.run("document.getElementById('call').textContent")
        assert "$RTRAIN_KEY" in shown
        assert "it's a key" not in await page.run("document.body.innerText")

    with listening(BaseHTTPMiddleware(app, dispatch=guard)) as address:
        asyncio.run(browser.look(tmp_path, at))


def test_a_refused_question_and_a_dead_endpoint_are_told(tmp_path: Path) -> None:
    predictor = predictor_of(tmp_path / "artifact", "classification")

    async def at(page: Page) -> None:
        with listening(build_app(predictor, ServeConfig(max_body_bytes=100))) as address:
            await page.open(address, 390, dark=True)
            await page.until("document.querySelectorAll('#examples button').length > 0")
            await page.run(f"document.querySelector('textarea').value = {json.dumps('long ' * 50)}")
            await page.run("document.getElementById('ask').click()")
            await page.until("document.getElementById('status').className === 'bad'")
            assert "more than 100 bytes" in await page.run("document.getElementById('status').textContent")
        await page.run("document.getElementById('ask').click()")
        await page.until("document.getElementById('status').textContent === 'The endpoint does not answer.'")

    asyncio.run(browser.look(tmp_path, at))
