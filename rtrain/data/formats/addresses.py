"""Addresses of rows: the path of a file, a glob, or a web address, which may have a query behind its path."""

import urllib.parse
from pathlib import Path
from typing import Any

import fsspec
import fsspec.utils

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zip")


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
    return fsspec.open(uri, "rb", compression=fsspec.utils.infer_compression(path_of(uri)))
