"""API keys: a key file, the scopes of each key, and rate limits. Independent of any server.

    {"version": 1, "keys": [{"id": "3f9c0a1b", "name": "shop", "sha256": "<64 hex digits>", "scopes": ["predict"],
                             "rate": "100/minute", "created": "2026-11-23T10:00:00+00:00"}]}

A key is `rtrain_<id>_<secret>`. The id finds the record and is public; the secret is 32 random bytes. The file stores
the SHA-256 of the whole key. A slow hash protects only secrets that can be guessed, and these cannot.
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
from rtrain.core.errors import UserError, quote_value, suggest_path
from serve.schemas.predict import RequestError, StrictModel

logger = logging.getLogger(__name__)

KeyScope = Literal["predict", "metrics"]
SCOPES: tuple[KeyScope, ...] = get_args(KeyScope)
PUBLIC_PATHS = frozenset({"/", "/page.css", "/page.js", "/models.js", "/v2/health/live", "/v2/health/ready"})
"""Paths that need no key: what watches an endpoint has none, and the page holds no word of the model."""
MOUNT = "/models/"
"""Under it each model has all its routes, behind its name."""
_MODEL_PAGE = re.compile(rf"{MOUNT}[^/]+/(page\.css|page\.js)?")
"""A model's page, which needs no key either, whatever the name is. All else under a name needs one: whoever has none
could guess the names by it."""
RELOAD_INTERVAL_S = 1.0
"""Least seconds between two looks at the file."""
RETRY_MARGIN_S = 0.01
"""Seconds after which a window has room, once it has moved on: at that very time it has none yet."""
MAX_FILE_BYTES = 10_000_000
"""The largest file of keys. It is read between two requests, so that a larger one would hold them up."""
SHARE_LIFETIME_S = 1.0
"""Seconds for which a process may use a share of a rate; then it is the others' again."""
_BEARER = re.compile(rb"(?i:bearer) +(rtrain_([0-9a-f]{8})_[A-Za-z0-9_-]{43})")
_RATE = re.compile(r"[1-9]\d{0,8} ?(/|per) ?([1-9]\d{0,3} ?)?(second|minute|hour|day|month|year)s?", re.ASCII)
_GROUP_OR_OTHER_WRITE = 0o022
_UNKNOWN_KEY_DIGEST = bytes(32)


class ApiKey(StrictModel):
    """Record of a key in the file; the key itself is not stored."""

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    scopes: tuple[KeyScope, ...]
    models: tuple[str, ...] | None = None
    """The models that the scope predict opens; None: all."""
    rate: str | None = None
    """E.g. 100/minute, in requests; without one there is no limit."""
    created: str

    @pydantic.field_validator("rate")
    @classmethod
    def _check_rate(cls, rate: str | None) -> str | None:
        if rate is not None:
            parse_rate(rate)
        return rate

    @functools.cached_property
    def digest(self) -> bytes:
        return bytes.fromhex(self.sha256)


class _KeyFile(StrictModel):
    version: Literal[1] = 1
    keys: tuple[ApiKey, ...] = ()

    @pydantic.model_validator(mode="after")
    def _check_distinct(self) -> "_KeyFile":
        for field in ("id", "name"):
            if len({getattr(key, field) for key in self.keys}) < len(self.keys):
                raise ValueError(f"two keys have the same {field}")
        return self


@functools.lru_cache(1024)
def parse_rate(rate: str) -> limits.RateLimitItem:
    """A rate like 100/minute or 5/second; raises `ValueError` for anything else."""
    if not _RATE.fullmatch(rate):  # `limits` takes the first of several, and spans of no seconds
        raise ValueError(f"{quote_value(rate)} is not a rate; write e.g. 100/minute or 5/second")
    return limits.parse(rate)


# ----------------------------------------------------------------------------------------------------------- the file


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a file. Raises `UserError` where it is missing, torn, or others may write or replace it: whoever does
    lets himself in."""
    try:
        with path.open("rb") as file:
            file_stat, data = os.fstat(file.fileno()), file.read(MAX_FILE_BYTES + 1)
        folder_stat = Path(os.path.realpath(path)).parent.stat()
    except FileNotFoundError:
        hint = suggest_path(path) or f"create one: rtrain serve keys add {path} NAME"
        raise UserError(f"key file {path} does not exist; {hint}", code="not_found") from None
    except OSError as error:
        raise UserError(f"key file {path} cannot be read: {error.strerror}", code="unreadable") from None
    is_folder_open = folder_stat.st_mode & stat.S_IWOTH and not folder_stat.st_mode & stat.S_ISVTX
    for is_open, reason in (
        (file_stat.st_mode & _GROUP_OR_OTHER_WRITE, f"other users can write {path} and add keys; run chmod 600 {path}"),
        (file_stat.st_uid not in (os.getuid(), 0), f"{path} belongs to another user; make a copy of this user's"),
        (is_folder_open, f"other users can replace {path}; run chmod o-w on its folder"),
    ):
        if is_open:
            raise UserError(f"key file: {reason}", code="open_to_others")
    if len(data) > MAX_FILE_BYTES:
        raise UserError(f"key file {path} has more than {MAX_FILE_BYTES:,} bytes", code="too_large")
    try:
        return _KeyFile.model_validate_json(data).keys
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        reason = f"{place}: {first['msg']}" if place else first["msg"]
        raise UserError(f"{path} is not a valid key file: {reason}", code="invalid_file") from None


def add_key(
    path: Path,
    name: str,
    scopes: Sequence[KeyScope] = ("predict",),
    rate: str | None = None,
    models: Sequence[str] | None = None,
) -> str:
    """A new key, which is written nowhere; the file has its hash. Where there is no file, there is one now."""
    key_id = secrets.token_hex(4)
    key_text = f"rtrain_{key_id}_{secrets.token_urlsafe(32)}"
    digest = hashlib.sha256(key_text.encode()).hexdigest()
    created = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        allowed_models = None if models is None else tuple(models)
        key = ApiKey(
            id=key_id, name=name, sha256=digest, scopes=tuple(scopes), models=allowed_models, rate=rate, created=created
        )
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        if first["loc"] == ("name",):
            raise UserError(
                f"{quote_value(name)} is not a valid name; use up to 64 letters, digits and . _ -", code="invalid_name"
            ) from None
        raise UserError(first["msg"].removeprefix("Value error, "), code="invalid") from None
    with _lock_folder(path) as real_path:
        keys = read_keys(real_path) if real_path.exists() else ()
        if any(other.name == name for other in keys):
            raise UserError(
                f"{path} already has a key named {name}; use another name, or revoke that key first",
                code="already_exists",
            )
        _write_keys(real_path, (*keys, key))
    return key_text


def revoke_key(path: Path, name: str) -> None:
    """Take a key out of the file."""
    with _lock_folder(path) as real_path:
        keys = read_keys(real_path)
        remaining = tuple(key for key in keys if key.name != name)
        if len(remaining) == len(keys):
            names = ", ".join(key.name for key in keys) or "none"
            raise UserError(f"{path} has no key named {quote_value(name)}; it has {names}", code="unknown_name")
        _write_keys(real_path, remaining)


@contextmanager
def _lock_folder(path: Path) -> Iterator[Path]:
    """Lock the folder of the key file against other `add_key` and `revoke_key` calls. The file itself is replaced by
    each write, so it cannot be locked. Yields the path with symbolic links resolved."""
    real_path = Path(os.path.realpath(path))
    with ExitStack() as stack:
        try:
            folder = os.open(real_path.parent, os.O_RDONLY)
            stack.callback(os.close, folder)
            with suppress(OSError):  # storage that locks no folder
                fcntl.flock(folder, fcntl.LOCK_EX)
        except OSError as error:
            raise UserError(f"the folder of {path} cannot be opened: {error.strerror}", code="unreadable") from None
        yield real_path


def _write_keys(path: Path, keys: Sequence[ApiKey]) -> None:
    """All or nothing: a reader, or a machine that stops, sees the old file or the new one."""
    try:
        with (
            atomic_write.replace_file(path) as draft,
            os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file,
        ):
            file.write(_KeyFile(keys=tuple(keys)).model_dump_json(indent=1, exclude_none=True) + "\n")
    except OSError as error:
        raise UserError(f"key file {path} cannot be written: {error.strerror}", code="unwritable") from None


class KeyStore:
    """The keys of a file as it is now. A file that is missing or torn changes nothing: the last good one counts, and
    the log has a warning. So a key is revoked by a file without it, not by no file."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic):
        """Raises `UserError` where there is no good file to begin with: a replica without keys is better not up than
        refusing everybody beside others that have some, and older keys from elsewhere might have been revoked."""
        self._path, self._clock = path, clock
        self._last_state = _file_state(path)
        self._by_id = {key.id: key for key in read_keys(path)}
        self._next_reload, self._last_warning = clock() + RELOAD_INTERVAL_S, ""

    def current(self) -> Mapping[str, ApiKey]:
        """Keys by id; at most `RELOAD_INTERVAL_S` old."""
        if (now := self._clock()) >= self._next_reload:
            self._next_reload = now + RELOAD_INTERVAL_S
            self._reload()
        return self._by_id

    def _reload(self) -> None:
        # The state is taken before the file is read, so the next check sees a write during the read.
        state = _file_state(self._path)
        if state == self._last_state:
            return
        try:
            self._by_id = {key.id: key for key in read_keys(self._path)}
        except UserError as error:
            if str(error) != self._last_warning:
                self._last_warning = str(error)
                logger.warning("%s. The %d keys that it had still count", error, len(self._by_id))
            return
        self._last_state, self._last_warning = state, ""


def _file_state(path: Path) -> tuple[int, int, int] | None:
    try:
        file_stat = path.stat()
    except OSError:
        return None
    return file_stat.st_mtime_ns, file_stat.st_size, file_stat.st_ino


# ------------------------------------------------------------------------------------------------------ the decisions


def required_scope(path: str, method: str = "GET") -> KeyScope | None:
    """Scope that a path requires; None for a public path. An unknown path requires one too, so a client without a key
    cannot discover routes."""
    if path in PUBLIC_PATHS or (method in ("GET", "HEAD") and _MODEL_PAGE.fullmatch(path)):
        return None
    return "metrics" if path.endswith("/metrics") and (path == "/metrics" or path.startswith(MOUNT)) else "predict"


def find_key(keys: Mapping[str, ApiKey], authorization: Sequence[bytes]) -> ApiKey | None:
    """The key of a request, by the values of its Authorization headers; None where there is no right one.

    Comparing takes the same time whatever the key, also where no key has the id.
    """
    match = _BEARER.fullmatch(authorization[0]) if len(authorization) == 1 else None
    if match is None:
        return None
    key_bytes, key_id = match.groups()
    key = keys.get(key_id.decode())
    is_valid = hmac.compare_digest(hashlib.sha256(key_bytes).digest(), key.digest if key else _UNKNOWN_KEY_DIGEST)
    return key if is_valid else None


FetchOtherCounts = Callable[[str, str], Awaitable[list[int]]]
"""Fetches how many requests each other process has used of a key's rate, by key id and rate."""


class RateLimiter:
    """Sliding-window rate limits of this process.

    Each process sees only its own requests. It reserves shares of the remaining rate, each valid for one second: a
    client that talks to one process gets the whole rate, and a client that talks to all of them gets no more. If fewer
    requests remain than processes exist, each process that reserves at the same moment gets one request.
    """

    def __init__(self, fetch_other_counts: FetchOtherCounts | None = None):
        """`fetch_other_counts`: None where this process answers alone."""
        self.fetch_other_counts = fetch_other_counts
        self._storage = MemoryStorage()
        self._limiter = SlidingWindowCounterRateLimiter(self._storage)
        self._shares: dict[tuple[str, str], _RateShare] = {}

    async def acquire_or_retry_after(self, key: ApiKey) -> int:
        """Counts a request. 0 where it may pass, else the seconds until another might."""
        if key.rate is None:
            return 0
        rate = parse_rate(key.rate)
        if self.fetch_other_counts is not None and not await self._take_share(
            key.id, key.rate, self.fetch_other_counts
        ):
            return self._seconds_to_reset(rate, key.id)
        return 0 if self._limiter.hit(rate, key.id) else self._seconds_to_reset(rate, key.id)

    def count_used(self, key_id: str, rate: str) -> int:
        """Requests of the current window that this process has accepted, plus its unused reservation."""
        share = self._shares.get((key_id, rate))
        window = self._limiter.get_window_stats(parse_rate(rate), key_id)
        reserved = share.remaining if share and time.monotonic() < share.expires_at else 0
        return parse_rate(rate).amount - window.remaining + reserved

    async def _take_share(self, key_id: str, rate: str, fetch_other_counts: FetchOtherCounts) -> bool:
        """Whether a share of this process has room for a request, which is taken from it."""
        share = self._shares.setdefault((key_id, rate), _RateShare())
        async with share.lock:
            if not share.remaining or time.monotonic() >= share.expires_at:
                if share.is_empty and time.monotonic() < share.expires_at:
                    return False
                share.remaining = 0
                other_counts = await fetch_other_counts(key_id, rate)
                window = self._limiter.get_window_stats(parse_rate(rate), key_id)
                remaining = max(0, window.remaining - sum(other_counts))
                share.remaining = remaining // (len(other_counts) + 1) or min(remaining, 1)
                share.is_empty = not remaining
                share.expires_at = time.monotonic() + SHARE_LIFETIME_S
            share.remaining -= min(share.remaining, 1)
            return not share.is_empty

    def _seconds_to_reset(self, rate: limits.RateLimitItem, key_id: str) -> int:
        window = self._limiter.get_window_stats(rate, key_id)
        return max(1, math.ceil(window.reset_time - time.time() + RETRY_MARGIN_S))


@dataclasses.dataclass
class _RateShare:
    remaining: int = 0
    expires_at: float = 0.0
    is_empty: bool = False
    """Nothing was left of the rate."""
    lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)


class Authenticator:
    """Lets a request in, or says why not."""

    def __init__(self, key_store: KeyStore, rate_limiter: RateLimiter):
        self._key_store, self.rate_limiter = key_store, rate_limiter

    async def authorize(self, scope: KeyScope, authorization: Sequence[bytes], model: str | None = None) -> ApiKey:
        """Check key, scope, model and rate of a request; returns the key. Raises `RequestError`: 401 for a missing or
        invalid key, 403 for a missing scope or model, 429 above the rate."""
        key = self.authenticate(scope, authorization)
        if model is not None and scope == "predict" and key.models is not None and model not in key.models:
            raise RequestError(403, f"key {key.name} may ask {' and '.join(key.models)}, and not {model}")
        if retry_after := await self.rate_limiter.acquire_or_retry_after(key):
            raise RequestError(
                429, f"key {key.name} may ask {key.rate}; try again in {retry_after} s", retry_after=retry_after
            )
        return key

    def authenticate(self, scope: KeyScope, authorization: Sequence[bytes]) -> ApiKey:
        """The key of a request that opens the scope. The request is not counted. Raises `RequestError`: 401 or 403."""
        key = find_key(self._key_store.current(), authorization)
        if key is None:
            reason = "invalid API key" if authorization else "API key missing"
            error = RequestError(401, f"{reason}; send the header Authorization: Bearer KEY")
            error.headers["www-authenticate"] = 'Bearer realm="rtrain"'
            raise error
        if scope not in key.scopes:
            raise RequestError(403, f"key {key.name} has no scope {scope}")
        return key
