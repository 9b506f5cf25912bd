"""Web pages: to try a model, to list several models, and for the API documentation. Static files from `page` and from
the package with Swagger UI; they load nothing from other hosts."""

import functools
import importlib.resources
import importlib.util

from fastapi import APIRouter, HTTPException, Response

PAGE_FOLDER = importlib.resources.files("serve") / "page"
CONTENT_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "models.html": "text/html; charset=utf-8",
    "models.js": "text/javascript; charset=utf-8",
    "docs.html": "text/html; charset=utf-8",
    "docs.js": "text/javascript; charset=utf-8",
}
"""Content type by name."""
PAGE_HEADERS = {
    # 'self' alone, and nothing written into the page: a label or a text that holds markup is shown, and never run.
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}

SWAGGER_PACKAGE = "fastapi_offline"
"""The package that has Swagger UI in its folder `static`."""
SWAGGER_CONTENT_TYPES = {
    "swagger-ui-bundle.js": "text/javascript; charset=utf-8",
    "swagger-ui.css": "text/css; charset=utf-8",
}
SWAGGER_HEADERS = {
    # Swagger UI writes styles into its elements, and has its icons in its style sheet.
    "content-security-policy": PAGE_HEADERS["content-security-policy"].replace(
        "style-src 'self'", "style-src 'self' 'unsafe-inline'; img-src 'self' data:"
    )
}


def _build_page_router(page: str, script: str) -> APIRouter:
    """A page at `/`, with the script and the style that it loads."""
    router = APIRouter()

    @router.get("/", response_class=Response)
    async def get_page() -> Response:
        """A page for a browser."""
        return _page_response(page)

    @router.get("/page.css", response_class=Response)
    async def get_style() -> Response:
        """How the page looks."""
        return _page_response("page.css")

    @router.get(f"/{script}", response_class=Response)
    async def get_script() -> Response:
        """Script of the page."""
        return _page_response(script)

    return router


def _page_response(name: str) -> Response:
    return Response(_read_page_file(name), media_type=CONTENT_TYPES[name], headers=PAGE_HEADERS)


@functools.cache
def _read_page_file(name: str) -> bytes:
    return (PAGE_FOLDER / name).read_bytes()


def build_docs_router() -> APIRouter:
    """The page of the routes; without routes where the package with Swagger UI is not installed."""
    router = APIRouter()
    if importlib.util.find_spec(SWAGGER_PACKAGE) is None:
        return router

    @router.get("/docs", include_in_schema=False)
    async def get_docs() -> Response:
        return Response(_read_page_file("docs.html"), media_type=CONTENT_TYPES["docs.html"], headers=SWAGGER_HEADERS)

    @router.get("/docs/docs.js", include_in_schema=False)
    async def get_docs_script() -> Response:
        return _page_response("docs.js")

    @router.get("/docs/{name}", include_in_schema=False)
    async def get_swagger_file(name: str) -> Response:
        if name not in SWAGGER_CONTENT_TYPES:
            raise HTTPException(404)
        return Response(_read_swagger_file(name), media_type=SWAGGER_CONTENT_TYPES[name], headers=SWAGGER_HEADERS)

    return router


@functools.cache
def _read_swagger_file(name: str) -> bytes:
    return (importlib.resources.files(SWAGGER_PACKAGE) / "static" / name).read_bytes()


MODEL_PAGE = _build_page_router("index.html", "page.js")
"""To try a model."""
MODEL_LIST = _build_page_router("models.html", "models.js")
"""To choose one of several."""
