"""A log's copy in a storage that takes whole files alone: in parts, of which only the last is sent again.

The parts of `NAME.log` are that file itself, then `NAME.log.0001`, `NAME.log.0002` and so on, in their order.
"""

import re
from pathlib import Path, PurePosixPath
from typing import Any

from rtrain.cluster.jobs import job_names
from rtrain.core.errors import UserError, hide

PART_BYTES = 1 << 20


def parts(files: Any, place: str) -> list[tuple[str, int]]:
    """The parts of the log at `place` of a file system, each with its size in bytes."""
    folder, _, name = place.rpartition("/")
    files.invalidate_cache(folder)
    if not files.exists(place):
        return []
    pattern = re.compile(rf"{re.escape(name)}(\.\d{{4,}})?")
    found = [(path, one["size"]) for one in files.ls(folder, detail=True) if (path := one["name"])]
    mine = [(path, size) for path, size in found if pattern.fullmatch(path.rpartition("/")[2])]
    return sorted(mine, key=lambda part: (len(part[0]), part[0]))


def read(files: Any, place: str) -> bytes | None:
    """The whole log; None where there is none."""
    found = parts(files, place)
    return b"".join(files.cat_file(path) for path, _ in found) if found else None


class Copied:
    """The copy of one log, which is appended to. `open` before the first new line, `put` for what has come since."""

    def __init__(self, log: Path, url: str):
        self._log, self._url = log, url
        self._begun = self._size()
        """Bytes of the log that are of earlier starts."""
        self._is_open = False
        self._place, self._last, self._tail, self._sent = "", 0, b"", 0

    def _size(self) -> int:
        return self._log.stat().st_size if self._log.is_file() else 0

    def open(self) -> None:
        """Look at what is there; where that is longer than the log, as after the loss of its folder, the log begins
        with it. Raises what the storage raises: then `put` looks again, and what is there stays before what is new."""
        import fsspec

        self._files: Any
        self._files, self._place = fsspec.core.url_to_fs(self._url)
        self._files.makedirs(self._place.rpartition("/")[0], exist_ok=True)
        found = parts(self._files, self._place)
        total = sum(size for _, size in found)
        if total > self._begun and self._size() == self._begun:
            self._fetch()
            self._begun = total
        is_whole = not found or found[-1][1] >= PART_BYTES
        self._last = len(found) if is_whole else len(found) - 1
        self._tail = b"" if is_whole else self._files.cat_file(found[-1][0])
        self._sent, self._is_open = min(total, self._begun), True

    def _fetch(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        draft = self._log.with_name(f"{self._log.name}.draft")
        draft.write_bytes(read(self._files, self._place) or b"")
        draft.replace(self._log)

    def put(self) -> None:
        """Send what has come. Raises what the storage raises; the next call sends that again."""
        if not self._is_open:
            self.open()
        with self._log.open("rb") as file:
            while file.seek(self._sent) is not None and (new := file.read(PART_BYTES - len(self._tail))):
                part = self._tail + new
                self._files.pipe_file(f"{self._place}.{self._last:04d}" if self._last else self._place, part)
                self._sent += len(new)
                self._last, self._tail = (self._last, part) if len(part) < PART_BYTES else (self._last + 1, b"")


def find_log(run: str, storage: str | None) -> str | None:
    """All lines of a run's jobs, from beside its folder or from its storage; None where there are none. `run`: its
    folder, or its name where storage is named."""
    beside = Path(job_names.log_of(PurePosixPath(Path(run).expanduser().absolute())))
    if beside.is_file():
        return beside.read_text(encoding="utf-8", errors="replace")
    if storage is None:
        return None
    import fsspec

    try:
        files, place = fsspec.core.url_to_fs(f"{job_names.stored(storage, PurePosixPath(run).name)}.log")
        found = read(files, place)
    except Exception as error:  # every kind of storage has errors of its own
        shown, reason = hide(storage), hide(str(error)) or type(error).__name__
        raise UserError(
            f"--storage {shown} cannot be read: {reason}; see its address and your credentials", code="unreachable"
        ) from None
    return None if found is None else found.decode("utf-8", errors="replace")
