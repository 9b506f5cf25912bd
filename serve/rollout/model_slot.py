"""The versions of a model that a replica holds: the one that answers, and one that may take its place.

The two lie beside each other in one process, so that a switch is an assignment: no request waits for a model to load,
and none is cut. What the old version had accepted it still answers.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from rtrain.core.errors import UserError
from serve.auth import middleware
from serve.model import ASKING, Service
from serve.rollout.shadow import Trial
from serve.schemas.predict import RequestError

Make = Callable[[Path], Awaitable[FastAPI]]
"""Loads an artefact, proves that it gives its golden answers, and builds its application."""


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

    @property
    def name(self) -> str:
        return self.service.predictor.artifact.version

    def is_of(self, folder: str, name: str) -> bool:
        """Whether it was made from what that folder has; an empty `name` is any version's."""
        return self.folder == folder and name in ("", self.name)


class Plan(NamedTuple):
    """What is tried beside the version that answers."""

    candidate: str
    """Its folder."""
    share: float
    """The part of the live texts that both answer."""
    slower: float
    """As `judge.Aim` has it."""
    weight: float
    """Share of the requests that the candidate answers itself."""
    version: str = ""
    """The one that the folder has to hold; empty for whichever it holds."""


class Versions:
    """An ASGI application: each request goes to the version that answers when it comes."""

    def __init__(self, make: Make):
        self._make = make
        self._one_at_a_time = asyncio.Lock()
        self._wish = ("", "")
        """The folder and the version that `become` was last asked for."""
        self.current: Version | None = None
        self.candidate: Version | None = None
        self.trial: Trial | None = None
        self.weight = 0.0
        """Share of the requests that the candidate answers."""
        self._dropped = 0
        """How often somebody has given a candidate up."""

    async def load(self, folder: str, name: str = "") -> str:
        """Make the artefact the candidate, unless it answers already, and give its version's name. Raises what loading
        it raises, and `UserError` where it is another version than the one of that `name`, if it has one; whatever
        answers goes on."""
        async with self._one_at_a_time:
            if self.current is not None and self.current.is_of(folder, name):
                return self.current.name
            dropped = self._dropped
            found = (await self._loaded(folder, name)).name
            if self._dropped != dropped:  # by a rollout that waits no longer: the late one must not answer anybody
                self._forget()
                raise UserError(f"{folder} was given up while it was loaded", code="given_up")
            return found

    async def _loaded(self, folder: str, name: str) -> Version:
        if self.candidate is None or not self.candidate.is_of(folder, name):
            self._forget()
            found = Version(folder, await self._make(Path(folder)))
            if not found.is_of(folder, name):
                found.service.close(wait=False)
                fix = "serve it by --update, if it is meant, or put the other one back"
                raise UserError(
                    f"{folder} holds the version {found.name} now, and not {name}, which is to answer; {fix}",
                    code="other_version",
                )
            self.candidate = found
        return self.candidate

    def drop(self) -> None:
        """Forget the candidate, also the one that is being loaded; what it has accepted it still answers."""
        self._dropped += 1
        self._forget()

    def _forget(self) -> None:
        self._end_trial()
        dropped, self.candidate = self.candidate, None
        if dropped is not None and dropped.requests == 0:
            dropped.service.close(wait=False)

    async def follow(self, plan: Plan) -> None:
        """Try what is planned. Raises what loading the candidate raises. Again is harmless: so a replica that was
        started meanwhile catches up."""
        await self.load(plan.candidate, plan.version)
        if self.trial is None and self.current is not None and self.candidate is not None:
            self.trial = Trial(self.current.service, self.candidate.service, plan.share, plan.slower)
        self.weight = plan.weight

    async def become(self, folder: str, name: str = "") -> None:
        """Answer with that artefact: at once where it is the candidate, else as soon as it is loaded, unless another
        one is wished by then. `name`: as `load` has it."""
        wish = self._wish = (folder, name)
        async with self._one_at_a_time:
            if self._wish != wish or (self.current is not None and self.current.is_of(folder, name)):
                return
            loaded = await self._loaded(folder, name)
            if self._wish != wish:
                self._forget()
                return
            self._end_trial()
            old, self.current, self.candidate = self.current, loaded, None
            if old is not None and old.requests == 0:
                old.service.close(wait=False)

    def status(self) -> dict[str, Any]:
        """What a person wants to know of this replica."""
        current, candidate = self.current, self.candidate
        if current is None:
            return {"version": None}
        trial = self.trial
        tried = {"seen": trial.tally()._asdict(), "ratio": trial.ratio} if trial else {}
        return {
            "version": current.name,
            "folder": current.folder,
            **current.service.status(),
            "candidate": {"version": candidate.name, "weight": self.weight, **tried} if candidate else None,
        }

    def _end_trial(self) -> None:
        self.weight = 0.0
        if self.trial is not None:
            self.trial.close()
            self.trial = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        version = self._taken(self._named(scope))
        try:
            await version.app(scope, receive, send)
        finally:
            self._left(version)

    @contextmanager
    def answering(self, version: str | None) -> Iterator[Service]:
        """The service for one request over another protocol: that of the version that it names, where it is here;
        with an empty name by weight; with None, of what is no question to the model, the one that answers. Raises
        `RequestError` before the first artefact is loaded: its port is open a moment before that."""
        if self.current is None:
            raise RequestError(503, "no model is loaded yet; try again in a moment", retry_after=1)
        taken = self._taken(version)
        try:
            yield taken.service
        finally:
            self._left(taken)

    def _named(self, scope: Scope) -> str | None:
        """The version that a request names; empty where it leaves that open, None where it asks the model nothing."""
        path = middleware.route(scope)
        if "/versions/" in path:
            return path.partition("/versions/")[2].partition("/")[0]
        return "" if path.endswith(ASKING) and scope["type"] == "http" else None

    def _taken(self, name: str | None) -> Version:
        """By which a request is answered, until it has `_left`."""
        version = self.current
        if version is None:  # the server listens a moment before the first artefact is loaded
            raise RuntimeError("no artefact is loaded yet")
        other = self.candidate
        if self.weight and other is not None and (name == other.name or (name == "" and random.random() < self.weight)):
            version = other
        version.requests += 1
        return version

    def _left(self, version: Version) -> None:
        version.requests -= 1
        if version.requests == 0 and version not in (self.current, self.candidate):
            version.service.close(wait=False)

    def close(self) -> None:
        """No request comes any more."""
        self._forget()
        if self.current is not None:
            self.current.service.close()
