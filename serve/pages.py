"""The page on which people try the model: three files of the folder `page`, which ask this address and no other."""

import functools
import importlib.resources

from fastapi import APIRouter, Response

FOLDER = importlib.resources.files("serve") / "page"
FILES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
}
"""Content type by name."""
HEADERS = {
    # 'self' alone, and nothing written into the page: a label or a text that holds markup is shown, and never run.
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}
ROUTER = APIRouter()


@ROUTER.get("/", response_class=Response)
async def page() -> Response:
    """A page to try the model."""
    return _file("index.html")


@ROUTER.get("/page.css", response_class=Response)
async def style() -> Response:
    """How the page looks."""
    return _file("page.css")


@ROUTER.get("/page.js", response_class=Response)
async def script() -> Response:
    """What the page does."""
    return _file("page.js")


def _file(name: str) -> Response:
    return Response(_content(name), media_type=FILES[name], headers=HEADERS)


@functools.cache
def _content(name: str) -> bytes:
    return (FOLDER / name).read_bytes()
