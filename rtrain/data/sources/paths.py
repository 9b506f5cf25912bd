"""Addresses of rows: the path of a file, a glob, or a web address, which may have a query behind its path."""

import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import fsspec.utils

from rtrain.core.errors import ConfigError, Problem

STORAGE_CLIENTS = ("aiohttp", "azure", "botocore", "gcsfs", "google")
"""Packages that fsspec uses for remote storage. Their errors share no base class."""
COMPRESSIONS = (".gz", ".bz2", ".xz")


def make_config_error(field: str, value: str | None, reason: str, fix: str, code: str) -> ConfigError:
    """The error of a single problem."""
    return ConfigError([Problem(field, value, reason, fix, code=code)])


def strip_query(uri: str) -> str:
    """The address without its query, which is a signature in presigned addresses and no part of the name."""
    return urllib.parse.urlsplit(uri).path if _is_web(uri) else uri


def _is_web(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def file_suffix(uri: str) -> str:
    """The suffix that names the format of the rows, in lower case, without a compression suffix (.gz)."""
    path = Path(strip_query(uri).lower())
    return (path.with_suffix("") if path.suffix in COMPRESSIONS else path).suffix


def is_glob(uri: str) -> bool:
    """Whether an address may stand for several files. A web address never does."""
    return not _is_web(uri) and any(sign in uri for sign in "*?[")


def open_file(uri: str) -> Any:
    """The file, decompressed, for a `with`."""
    path = strip_query(uri).lower()
    packed = fsspec.utils.infer_compression(path) if path.endswith(COMPRESSIONS) else None
    return fsspec.open(uri, "rb", compression=packed)


def resolve_filesystem(field: str, uri: str) -> tuple[Any, str]:
    """fsspec's file system of an address, and the path in it. Raises `ConfigError` if no installed package reads the
    address; `field` is the setting that holds it."""
    try:
        filesystem_and_path: tuple[Any, str] = fsspec.core.url_to_fs(uri)
    except ImportError as error:
        reason = f"a package that reads it is not installed ({error})"
        raise make_config_error(
            field, uri, reason, "install it, e.g. the extra s3 of rtrain", "not_installed"
        ) from None
    except ValueError as error:
        fix = "write a path, or an address such as https:// or s3://"
        raise make_config_error(field, uri, f"no such kind of address ({error})", fix, "unknown_protocol") from None
    return filesystem_and_path


@contextmanager
def wrap_storage_errors(field: str, uri: str) -> Iterator[None]:
    """Convert errors of the storage, such as a refusal or a timeout, to `ConfigError`."""
    try:
        yield
    except Exception as error:
        if not is_storage_error(error):
            raise
        fix = "check the address, the network and the credentials; a signed address may have expired"
        raise make_config_error(
            field, strip_query(uri), f"it cannot be read ({format_storage_error(error)})", fix, "unreachable"
        ) from None


def is_storage_error(error: Exception) -> bool:
    """Whether an error comes from remote storage or the network. fsspec raises Python's own errors for timeouts and
    refusals of S3."""
    return type(error).__module__.partition(".")[0] in STORAGE_CLIENTS or isinstance(
        error, TimeoutError | PermissionError
    )


def format_storage_error(error: Exception) -> str:
    """The storage's error in one line, without the address: it may hold a signature."""
    if (status := getattr(error, "status", None)) is not None:
        return f"the server answers {status} {getattr(error, 'message', '')}".strip()
    return (str(error).splitlines() or [type(error).__name__])[0]
