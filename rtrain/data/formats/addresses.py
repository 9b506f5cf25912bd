"""Where rows lie: the path of a file, a glob, or an address of the web, which may have a query behind its path."""

import urllib.parse
from pathlib import Path
from typing import Any

import fsspec
import fsspec.utils


def path_of(uri: str) -> str:
    """Without the query: what is behind the question mark of a presigned address is a signature, no name."""
    return urllib.parse.urlsplit(uri).path if _is_web(uri) else uri


def _is_web(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def suffix(uri: str) -> str:
    """That of the rows, under the suffix of a compression."""
    return Path(path_of(uri).removesuffix(".gz")).suffix


def is_glob(uri: str) -> bool:
    """Whether a name that no file has may stand for several; an address of the web never does."""
    return not _is_web(uri) and any(sign in uri for sign in "*?[")


def opened(uri: str) -> Any:
    """The file, decompressed, for a `with`."""
    return fsspec.open(uri, "rb", compression=fsspec.utils.infer_compression(path_of(uri)))
