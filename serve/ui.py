"""The page on which people try a model, the one that lists several, and the one that describes the routes: files of the
folder `page`, and of a package that has Swagger UI, which ask this address and no other."""

import functools
import importlib.resources
import importlib.util

from fastapi import APIRouter, HTTPException, Response

FOLDER = importlib.resources.files("serve") / "page"
FILES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "models.html": "text/html; charset=utf-8",
    "models.js": "text/javascript; charset=utf-8",
    "docs.html": "text/html; charset=utf-8",
    "docs.js": "text/javascript; charset=utf-8",
}
"""Content type by name."""
HEADERS = {
    # 'self' alone, and nothing written into the page: a label or a text that holds markup is shown, and never run.
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}

SWAGGER = "fastapi_offline"
"""The package that has Swagger UI in its folder `static`."""
SWAGGER_FILES = {
    "swagger-ui-bundle.js": "text/javascript; charset=utf-8",
    "swagger-ui.css": "text/css; charset=utf-8",
}
SWAGGER_HEADERS = {
    # Swagger UI writes styles into its elements, and has its icons in its style sheet.
    "content-security-policy": HEADERS["content-security-policy"].replace(
        "style-src 'self'", "style-src 'self' 'unsafe-inline'; img-src 'self' data:"
    )
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


def docs() -> APIRouter:
    """The page of the routes; without routes where the package with Swagger UI is not installed."""
    router = APIRouter()
    if importlib.util.find_spec(SWAGGER) is None:
        return router

    @router.get("/docs", include_in_schema=False)
    async def shown() -> Response:
        return Response(_content("docs.html"), media_type=FILES["docs.html"], headers=SWAGGER_HEADERS)

    @router.get("/docs/docs.js", include_in_schema=False)
    async def program() -> Response:
        return _file("docs.js")

    @router.get("/docs/{name}", include_in_schema=False)
    async def swagger(name: str) -> Response:
        if name not in SWAGGER_FILES:
            raise HTTPException(404)
        return Response(_swagger_file(name), media_type=SWAGGER_FILES[name], headers=SWAGGER_HEADERS)

    return router


@functools.cache
def _swagger_file(name: str) -> bytes:
    return (importlib.resources.files(SWAGGER) / "static" / name).read_bytes()


MODEL = _router("index.html", "page.js")
"""To try a model."""
SEVERAL = _router("models.html", "models.js")
"""To choose one of several."""
