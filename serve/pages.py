"""The page on which people try a model, and the one that lists several: files of the folder `page`, which ask this
address and no other."""

import functools
import importlib.resources

from fastapi import APIRouter, Response

FOLDER = importlib.resources.files("serve") / "page"
FILES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "models.html": "text/html; charset=utf-8",
    "models.js": "text/javascript; charset=utf-8",
}
"""Content type by name."""
HEADERS = {
    # 'self' alone, and nothing written into the page: a label or a text that holds markup is shown, and never run.
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


def _router(page: str, script: str) -> APIRouter:
    """A page at `/`, with the script and the style that it loads."""
    router = APIRouter()

    @router.get("/", response_class=Response)
    async def shown() -> Response:
        """A page for a browser."""
        return _file(page)

    @router.get("/page.css", response_class=Response)
    async def style() -> Response:
        """How the page looks."""
        return _file("page.css")

    @router.get(f"/{script}", response_class=Response)
    async def program() -> Response:
        """What the page does."""
        return _file(script)

    return router


def _file(name: str) -> Response:
    return Response(_content(name), media_type=FILES[name], headers=HEADERS)


@functools.cache
def _content(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


MODEL = _router("index.html", "page.js")
"""To try a model."""
SEVERAL = _router("models.html", "models.js")
"""To choose one of several."""
