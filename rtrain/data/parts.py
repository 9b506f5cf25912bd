"""What one task reads of a file, hashed as it is read: a file may be changed between its digest and its rows."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

import fsspec
import fsspec.compression

if TYPE_CHECKING:
    import hashlib

    from _typeshed import WriteableBuffer

BUFFER = 1 << 20
ANYWHERE = ("parquet", "datasets", "zip")
"""Formats and compressions that are not read from the first byte to the last."""


class Hashed(io.RawIOBase):
    """A file that is read from here on, each byte hashed."""

    def __init__(self, file: Any, total: "hashlib._Hash | None"):
        self._file = file
        self._total = total

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        into = memoryview(buffer).cast("B")
        data = self._file.read(len(into))
        into[: len(data)] = data
        if self._total is not None:
            self._total.update(data)
        return len(data)


@contextmanager
def opened(uri: str, format: str, total: "hashlib._Hash | None" = None) -> Iterator[IO[bytes]]:
    """A file, decompressed. Once the block has ended without an error, `total` has hashed all of the file's bytes."""
    described = fsspec.open(uri, "rb", compression="infer")
    unpack: Any = fsspec.compression.compr[described.compression]
    with described.fs.open(described.path, "rb") as file:
        hashed = Hashed(file, total)
        if {format, described.compression} & set(ANYWHERE):
            yield unpack(file, mode="rb")
            file.seek(0)
        else:
            yield unpack(io.BufferedReader(hashed, BUFFER), mode="rb")
        while total is not None and hashed.read(BUFFER):
            pass
