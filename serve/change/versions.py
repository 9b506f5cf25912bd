"""The versions of a model that a replica holds: the one that answers, and one that may take its place.

The two lie beside each other in one process, so that a switch is an assignment: no request waits for a model to load,
and none is cut. What the old version had accepted it still answers.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from serve.app import Service

Make = Callable[[Path], Awaitable[FastAPI]]
"""Loads an artefact, proves that it gives its golden answers, and builds its application."""
Beside = Callable[["Versions"], AbstractAsyncContextManager[Any]]


@dataclass(eq=False)
class Version:
    folder: str
    app: FastAPI
    requests: int = 0
    """How many it has accepted and not answered."""

    @property
    def service(self) -> Service:
        found: Service = self.app.state.service
        return found


class Versions:
    """An ASGI application: each request goes to the version that answers when it comes."""

    def __init__(self, make: Make, beside: Beside = lambda versions: nullcontext()):
        """`beside`: what listens beside the ASGI server, as long as that does."""
        self._make, self._beside = make, beside
        self._one_at_a_time = asyncio.Lock()
        self.current: Version | None = None
        self.candidate: Version | None = None

    async def load(self, folder: str) -> str:
        """Make the artefact the candidate, and give its version's name. Raises what loading it raises; whatever
        answers goes on."""
        async with self._one_at_a_time:
            if self.candidate is None or self.candidate.folder != folder:
                self.drop()
                self.candidate = Version(folder, await self._make(Path(folder)))
            return self.candidate.service.predictor.artifact.version

    def drop(self) -> None:
        """Forget the candidate."""
        if self.candidate is not None:
            self.candidate.service.close()
            self.candidate = None

    async def become(self, folder: str) -> None:
        """Answer with that artefact: at once where it is the candidate, else as soon as it is loaded."""
        if self.current is not None and self.current.folder == folder:
            return
        await self.load(folder)
        old, self.current, self.candidate = self.current, self.candidate, None
        if old is not None and old.requests == 0:
            old.service.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        with self._taken() as version:
            await version.app(scope, receive, send)

    @contextmanager
    def answering(self) -> Iterator[Service]:
        """The service that answers now, for one request over another protocol."""
        with self._taken() as version:
            yield version.service

    @contextmanager
    def _taken(self) -> Iterator[Version]:
        version = self.current
        if version is None:  # the server listens a moment before the first artefact is loaded
            raise RuntimeError("no artefact is loaded yet")
        version.requests += 1
        try:
            yield version
        finally:
            version.requests -= 1
            if version.requests == 0 and version is not self.current:
                version.service.close()

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        async with self._beside(self):
            await send({"type": "lifespan.startup.complete"})
            await receive()
        self.drop()
        if self.current is not None:
            self.current.service.close()
        await send({"type": "lifespan.shutdown.complete"})
