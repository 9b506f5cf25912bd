"""Addresses of rows: the path of a file, a glob, or a web address, which may have a query behind its path."""

import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import fsspec.utils

from rtrain.core.errors import ConfigError, Problem

CLIENTS = ("aiohttp", "azure", "botocore", "gcsfs", "google")
"""Packages by which fsspec speaks to storage. Their errors share no base class."""
COMPRESSIONS = (".gz", ".bz2", ".xz")


def refused(field: str, value: str | None, reason: str, fix: str, code: str) -> ConfigError:
    """The error of a single problem."""
    return ConfigError([Problem(field, value, reason, fix, code=code)])


def path_of(uri: str) -> str:
    """The address without its query, which is a signature in presigned addresses and no part of the name."""
    return urllib.parse.urlsplit(uri).path if _is_web(uri) else uri


def _is_web(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def suffix(uri: str) -> str:
    """The suffix that names the format of the rows, in lower case; that of a compression (.gz) is taken off first."""
    path = Path(path_of(uri).lower())
    return (path.with_suffix("") if path.suffix in COMPRESSIONS else path).suffix


def is_glob(uri: str) -> bool:
    """Whether an address may stand for several files. A web address never does."""
    return not _is_web(uri) and any(sign in uri for sign in "*?[")


def opened(uri: str) -> Any:
    """The file, decompressed, for a `with`."""
    path = path_of(uri).lower()
    packed = fsspec.utils.infer_compression(path) if path.endswith(COMPRESSIONS) else None
    return fsspec.open(uri, "rb", compression=packed)


def filesystem(field: str, uri: str) -> tuple[Any, str]:
    """fsspec's file system of an address, and the path in it. Raises `ConfigError` for one that no package here reads;
    `field` is the setting that holds the address."""
    try:
        found: tuple[Any, str] = fsspec.core.url_to_fs(uri)
    except ImportError as error:
        reason = f"a package that reads it is not installed ({error})"
        raise refused(field, uri, reason, "install it, e.g. the extra s3 of rtrain", "not_installed") from None
    except ValueError as error:
        fix = "write a path, or an address such as https:// or s3://"
        raise refused(field, uri, f"no such kind of address ({error})", fix, "unknown_protocol") from None
    return found


@contextmanager
def asked(field: str, uri: str) -> Iterator[None]:
    """Around questions to the storage of an address: an answer that is a refusal, or none, becomes a `ConfigError`."""
    try:
        yield
    except Exception as error:
        if not is_of_storage(error):
            raise
        fix = "check the address, the network and the credentials; one that is signed may have expired"
        raise refused(field, path_of(uri), f"it cannot be read ({said(error)})", fix, "unreachable") from None


def is_of_storage(error: Exception) -> bool:
    """Whether an error is that of a storage or of the way to it. fsspec makes a time-out, and S3's refusal, errors of
    Python's own."""
    return type(error).__module__.partition(".")[0] in CLIENTS or isinstance(error, TimeoutError | PermissionError)


def said(error: Exception) -> str:
    """What a storage answered, in one line. A web server's text repeats the address, with its signature."""
    if (status := getattr(error, "status", None)) is not None:
        return f"the server answers {status} {getattr(error, 'message', '')}".strip()
    return (str(error).splitlines() or [type(error).__name__])[0]
