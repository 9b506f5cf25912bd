"""The application of an address with several models: what is said of all of them, and where each one is asked."""

from collections.abc import Collection

from fastapi import FastAPI, Request, Response
from starlette.responses import RedirectResponse

import rtrain
from rtrain.config import Serve
from serve import base, pages, protocol
from serve.door import guard, keys
from serve.door.keys import MOUNT
from serve.models import PROTOCOL, Models
from serve.schema import RequestError
from serve.watching import tracing
from serve.watching.access_log import AccessLog
from serve.watching.telemetry import Requests

ALONE = ("/predict", "/info")
"""Routes of a model, which where there are several belong to none."""
METHODS = ["GET", "POST"]


def build_desk(
    models: Models, settings: Serve, door: keys.Door | None, exposition: base.Exposition | None = None
) -> FastAPI:
    """`exposition`: as `base.routes` has it."""
    counters = Requests(settings.exemplars)
    models.count_beside(counters)
    app = base.Application(settings, (protocol.IndexRequest,), title="rtrain", version=rtrain.__version__)
    app.dress(settings, door, None, counters.count, tracing.spans(settings, None), AccessLog(settings.access_log))
    app.include_router(base.routes(models, settings, exposition))
    app.include_router(pages.SEVERAL)
    if door is not None:
        app.include_router(pages.MODEL, prefix=MOUNT + "{name}", include_in_schema=False)  # of no model (`keys`)

    def named(request: Request) -> list[str]:
        """Those that the request's key may ask."""
        only: Collection[str] | None = request.state.models
        return [name for name in models.names if only is None or name in only]

    async def which(request: Request) -> Response:
        """Several models answer at this address, each under a path of its own."""
        path = f"{MOUNT}NAME{guard.route(request.scope)}"
        raise RequestError(404, f"several models answer here; ask {path}, where NAME is {' or '.join(named(request))}")

    for path in ALONE:
        app.add_api_route(path, which, methods=METHODS, include_in_schema=False)

    @app.get(MOUNT + "{name}", include_in_schema=False)
    async def model(name: str, request: Request) -> Response:
        if name not in named(request):
            raise RequestError(404, models.unknown(named(request)), "name")
        return RedirectResponse(f"{name}/")  # beside this one, whatever the host is called

    @app.api_route(PROTOCOL + "{rest:path}", methods=METHODS, include_in_schema=False)
    @app.api_route(MOUNT + "{rest:path}", methods=METHODS, include_in_schema=False)
    async def unknown(request: Request) -> Response:
        raise RequestError(404, models.unknown(named(request)), "name")

    return app
