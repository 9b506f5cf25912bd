"""Who may ask the endpoint: a file of keys, what each of them opens, and how often. Nothing here knows a server.

    {"version": 1, "keys": [{"id": "3f9c0a1b", "name": "shop", "sha256": "<64 hex digits>", "scopes": ["predict"],
                             "rate": "100/minute", "created": "2026-11-23T10:00:00+00:00"}]}

A key is `rtrain_<id>_<secret>`. The id finds the record and is no secret; the secret is 32 random bytes. The file has
the SHA-256 of the whole key. A slow hash would add nothing: it protects secrets that can be guessed.
"""

import asyncio
import dataclasses
import fcntl
import functools
import hashlib
import hmac
import logging
import math
import os
import re
import secrets
import stat
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, get_args

import limits
import pydantic
from limits.storage import MemoryStorage
from limits.strategies import SlidingWindowCounterRateLimiter
from pydantic import Field

from rtrain.core import atomic_write
from rtrain.core.errors import UserError, meant, quoted
from serve.schemas.predict import Closed, RequestError

logger = logging.getLogger(__name__)

Scope = Literal["predict", "metrics"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
OPEN = frozenset({"/", "/page.css", "/page.js", "/models.js", "/v2/health/live", "/v2/health/ready"})
"""Paths that need no key: what watches an endpoint has none, and the page holds no word of the model."""
MOUNT = "/models/"
"""Under it each model has all its routes, behind its name."""
_MODEL_PAGE = re.compile(rf"{MOUNT}[^/]+/(page\.css|page\.js)?")
"""A model's page, which needs no key either, whatever the name is. All else under a name needs one: whoever has none
could guess the names by it."""
LOOK_S = 1.0
"""Least seconds between two looks at the file."""
LATER_S = 0.01
"""Seconds after which a window has room, once it has moved on: at that very time it has none yet."""
MOST_BYTES = 10_000_000
"""The largest file of keys. It is read between two requests, so that a larger one would hold them up."""
SHARE_S = 1.0
"""Seconds for which a process may use a share of a rate; then it is the others' again."""
_BEARER = re.compile(rb"(?i:bearer) +(rtrain_([0-9a-f]{8})_[A-Za-z0-9_-]{43})")
_RATE = re.compile(r"[1-9]\d{0,8} ?(/|per) ?([1-9]\d{0,3} ?)?(second|minute|hour|day|month|year)s?", re.ASCII)
_FOREIGN_WRITES = 0o022
_NOBODY = bytes(32)


class Key(Closed):
    """What the file has of a key; the key itself is not in it."""

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    scopes: tuple[Scope, ...]
    models: tuple[str, ...] | None = None
    """The models that the scope predict opens; None: all."""
    rate: str | None = None
    """E.g. 100/minute, in requests; without one there is no limit."""
    created: str

    @pydantic.field_validator("rate")
    @classmethod
    def _known(cls, rate: str | None) -> str | None:
        if rate is not None:
            parsed(rate)
        return rate

    @functools.cached_property
    def digest(self) -> bytes:
        return bytes.fromhex(self.sha256)


class _File(Closed):
    version: Literal[1] = 1
    keys: tuple[Key, ...] = ()

    @pydantic.model_validator(mode="after")
    def _distinct(self) -> "_File":
        for field in ("id", "name"):
            if len({getattr(key, field) for key in self.keys}) < len(self.keys):
                raise ValueError(f"two keys have the same {field}")
        return self


@functools.lru_cache(1024)
def parsed(rate: str) -> limits.RateLimitItem:
    """A rate like 100/minute or 5/second; raises `ValueError` for anything else."""
    if not _RATE.fullmatch(rate):  # `limits` takes the first of several, and spans of no seconds
        raise ValueError(f"{quoted(rate)} is no rate; write e.g. 100/minute or 5/second")
    return limits.parse(rate)


# ----------------------------------------------------------------------------------------------------------- the file


def read(path: Path) -> tuple[Key, ...]:
    """The keys of a file. Raises `UserError` where it is missing, torn, or others may write or replace it: whoever does
    lets himself in."""
    try:
        with path.open("rb") as file:
            facts, data = os.fstat(file.fileno()), file.read(MOST_BYTES + 1)
        folder = Path(os.path.realpath(path)).parent.stat()
    except FileNotFoundError:
        hint = meant(path) or f"make one: rtrain serve keys add {path} NAME"
        raise UserError(f"there is no file of keys {path}; {hint}", code="not_found") from None
    except OSError as error:
        raise UserError(f"the file of keys {path} cannot be read: {error.strerror}", code="unreadable") from None
    if facts.st_mode & _FOREIGN_WRITES:
        raise UserError(
            f"others may write the file of keys {path}, and so let themselves in; chmod 600 {path}",
            code="open_to_others",
        )
    if facts.st_uid not in (os.getuid(), 0):
        raise UserError(
            f"the file of keys {path} is another user's, who may write it; make a copy that is this user's",
            code="open_to_others",
        )
    if folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX:
        raise UserError(
            f"others may replace the file of keys {path}: its folder is open to all; chmod o-w the folder",
            code="open_to_others",
        )
    if len(data) > MOST_BYTES:
        raise UserError(f"the file of keys {path} has more than {MOST_BYTES:,} bytes", code="too_large")
    try:
        return _File.model_validate_json(data).keys
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        reason = f"{place}: {first['msg']}" if place else first["msg"]
        raise UserError(f"the file of keys {path} is torn or is none: {reason}", code="malformed") from None


def add(
    path: Path,
    name: str,
    scopes: Sequence[Scope] = ("predict",),
    rate: str | None = None,
    models: Sequence[str] | None = None,
) -> str:
    """A new key, which is written nowhere; the file has its hash. Where there is no file, there is one now."""
    identity = secrets.token_hex(4)
    plain = f"rtrain_{identity}_{secrets.token_urlsafe(32)}"
    digest = hashlib.sha256(plain.encode()).hexdigest()
    created = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        limited = None if models is None else tuple(models)
        key = Key(
            id=identity, name=name, sha256=digest, scopes=tuple(scopes), models=limited, rate=rate, created=created
        )
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        if first["loc"] == ("name",):
            raise UserError(
                f"{quoted(name)} is no name; take up to 64 letters, digits and . _ -", code="invalid_name"
            ) from None
        raise UserError(first["msg"].removeprefix("Value error, "), code="invalid") from None
    with _alone(path) as real:
        keys = read(real) if real.exists() else ()
        if any(other.name == name for other in keys):
            raise UserError(
                f"{path} has a key named {name} already; take another name, or revoke that one first",
                code="already_exists",
            )
        _write(real, (*keys, key))
    return plain


def revoke(path: Path, name: str) -> None:
    """Take a key out of the file."""
    with _alone(path) as real:
        keys = read(real)
        left = tuple(key for key in keys if key.name != name)
        if len(left) == len(keys):
            names = ", ".join(key.name for key in keys) or "none"
            raise UserError(f"{path} has no key named {quoted(name)}; it has {names}", code="unknown_name")
        _write(real, left)


@contextmanager
def _alone(path: Path) -> Iterator[Path]:
    """While it is entered, no other `add` or `revoke` writes there. The folder is locked, since the file is another one
    after each of them. Gives the path without links, which stay as they are."""
    real = Path(os.path.realpath(path))
    with ExitStack() as opened:
        try:
            folder = os.open(real.parent, os.O_RDONLY)
            opened.callback(os.close, folder)
            with suppress(OSError):  # storage that locks no folder
                fcntl.flock(folder, fcntl.LOCK_EX)
        except OSError as error:
            raise UserError(f"the folder of {path} cannot be opened: {error.strerror}", code="unreadable") from None
        yield real


def _write(path: Path, keys: Sequence[Key]) -> None:
    """All or nothing: a reader, or a machine that stops, sees the old file or the new one."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(_File(keys=tuple(keys)).model_dump_json(indent=1, exclude_none=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise UserError(f"the file of keys {path} cannot be written: {error.strerror}", code="unwritable") from None
    atomic_write.sync(path.parent)


class Keys:
    """The keys of a file as it is now. A file that is missing or torn changes nothing: the last good one counts, and
    the log has a warning. So a key is revoked by a file without it, not by no file."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic):
        """Raises `UserError` where there is no good file to begin with: a replica without keys is better not up than
        refusing everybody beside others that have some, and older keys from elsewhere might have been revoked."""
        self._path, self._clock = path, clock
        self._seen = _state(path)
        self._by_id = {key.id: key for key in read(path)}
        self._next_look, self._told = clock() + LOOK_S, ""

    def current(self) -> Mapping[str, Key]:
        """By id; at most `LOOK_S` old."""
        if (now := self._clock()) >= self._next_look:
            self._next_look = now + LOOK_S
            self._look()
        return self._by_id

    def _look(self) -> None:
        # Taken before the file is read: what is written meanwhile shows at the next look.
        state = _state(self._path)
        if state == self._seen:
            return
        try:
            self._by_id = {key.id: key for key in read(self._path)}
        except UserError as error:
            if str(error) != self._told:
                self._told = str(error)
                logger.warning("%s. The %d keys that it had still count", error, len(self._by_id))
            return
        self._seen, self._told = state, ""


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


# ------------------------------------------------------------------------------------------------------ the decisions


def scope_of(path: str, method: str = "GET") -> Scope | None:
    """What a key must have for a path; None where none is needed. A path that is not there asks for one too: whoever
    has none learns nothing of the routes."""
    if path in OPEN or (method in ("GET", "HEAD") and _MODEL_PAGE.fullmatch(path)):
        return None
    return "metrics" if path.endswith("/metrics") and (path == "/metrics" or path.startswith(MOUNT)) else "predict"


def find(keys: Mapping[str, Key], authorization: Sequence[bytes]) -> Key | None:
    """The key of a request, by the values of its Authorization headers; None where there is no right one.

    Comparing takes the same time whatever the key, also where no key has the id.
    """
    match = _BEARER.fullmatch(authorization[0]) if len(authorization) == 1 else None
    if match is None:
        return None
    plain, identity = match.groups()
    known = keys.get(identity.decode())
    right = hmac.compare_digest(hashlib.sha256(plain).digest(), known.digest if known else _NOBODY)
    return known if right else None


Others = Callable[[str, str], Awaitable[list[int]]]
"""What each other process has taken of the rate of a key, by the key's id and its rate."""


class Rates:
    """How often each key has asked, in sliding windows of this process.

    Each of several processes sees its own part of the requests alone. It takes shares of what all have left of a rate,
    each for a second at most: a client that one process answers gets the whole rate, and one that all answer no more.
    Where fewer requests are left than there are processes, those that take a share at the same moment get one each.
    """

    def __init__(self, others: Others | None = None):
        """`others`: None where this process answers alone."""
        self.others = others
        self._storage = MemoryStorage()
        self._limiter = SlidingWindowCounterRateLimiter(self._storage)
        self._shares: dict[tuple[str, str], _Share] = {}

    async def wait_s(self, key: Key) -> int:
        """Counts a request. 0 where it may pass, else the seconds until another might."""
        if key.rate is None:
            return 0
        rate = parsed(key.rate)
        if self.others is not None and not await self._share(key.id, key.rate, self.others):
            return self._reset_s(rate, key.id)
        return 0 if self._limiter.hit(rate, key.id) else self._reset_s(rate, key.id)

    def taken(self, key: str, rate: str) -> int:
        """Requests of the window that this process has let in, and those that it may let in without asking again."""
        share = self._shares.get((key, rate))
        window = self._limiter.get_window_stats(parsed(rate), key)
        reserved = share.left if share and time.monotonic() < share.until else 0
        return parsed(rate).amount - window.remaining + reserved

    async def _share(self, key: str, rate: str, others: Others) -> bool:
        """Whether a share of this process has room for a request, which is taken from it."""
        share = self._shares.setdefault((key, rate), _Share())
        async with share.lock:
            if not share.left or time.monotonic() >= share.until:
                if share.is_empty and time.monotonic() < share.until:
                    return False
                share.left = 0
                elsewhere = await others(key, rate)
                window = self._limiter.get_window_stats(parsed(rate), key)
                left = max(0, window.remaining - sum(elsewhere))
                share.left, share.is_empty = left // (len(elsewhere) + 1) or min(left, 1), not left
                share.until = time.monotonic() + SHARE_S
            share.left -= min(share.left, 1)
            return not share.is_empty

    def _reset_s(self, rate: limits.RateLimitItem, key: str) -> int:
        window = self._limiter.get_window_stats(rate, key)
        return max(1, math.ceil(window.reset_time - time.time() + LATER_S))


@dataclasses.dataclass
class _Share:
    left: int = 0
    until: float = 0.0
    is_empty: bool = False
    """Nothing was left of the rate."""
    lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)


class Door:
    """Lets a request in, or says why not."""

    def __init__(self, keys: Keys, rates: Rates):
        self._keys, self.rates = keys, rates

    async def admit(self, scope: Scope, authorization: Sequence[bytes], model: str | None = None) -> Key:
        """The key by which a request gets in, to that model where it is for one. Raises `RequestError`: 401 without a
        right key, 403 where it lacks the scope or the model, 429 where it asks too often."""
        key = self.identify(scope, authorization)
        if model is not None and scope == "predict" and key.models is not None and model not in key.models:
            raise RequestError(403, f"key {key.name} may ask {' and '.join(key.models)}, and not {model}")
        if wait_s := await self.rates.wait_s(key):
            raise RequestError(429, f"key {key.name} may ask {key.rate}; try again in {wait_s} s", retry_after=wait_s)
        return key

    def identify(self, scope: Scope, authorization: Sequence[bytes]) -> Key:
        """The key of a request that opens the scope. The request is not counted. Raises `RequestError`: 401 or 403."""
        key = find(self._keys.current(), authorization)
        if key is None:
            reason = "this key opens nothing here" if authorization else "no key"
            refused = RequestError(401, f"{reason}; send the header Authorization: Bearer KEY")
            refused.headers["www-authenticate"] = 'Bearer realm="rtrain"'
            raise refused
        if scope not in key.scopes:
            raise RequestError(403, f"key {key.name} has no scope {scope}")
        return key
