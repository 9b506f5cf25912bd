"""Copy a growing log to object storage, in chunks: only the last chunk is sent again.

The chunks of `NAME.log` are that file, then `NAME.log.0001`, `NAME.log.0002`, and so on.
"""

import re
from pathlib import Path, PurePosixPath
from typing import Any

from rtrain.cluster.jobs import job_names
from rtrain.core.errors import UserError, redact

CHUNK_BYTES = 1 << 20


def list_chunks(filesystem: Any, log_path: str) -> list[tuple[str, int]]:
    """List the chunks of the log at `log_path`, with their sizes in bytes."""
    folder, _, name = log_path.rpartition("/")
    filesystem.invalidate_cache(folder)
    if not filesystem.exists(log_path):
        return []
    pattern = re.compile(rf"{re.escape(name)}(\.\d{{4,}})?")
    entries = [(path, entry["size"]) for entry in filesystem.ls(folder, detail=True) if (path := entry["name"])]
    chunks = [(path, size) for path, size in entries if pattern.fullmatch(path.rpartition("/")[2])]
    return sorted(chunks, key=lambda part: (len(part[0]), part[0]))


def read_log(filesystem: Any, log_path: str) -> bytes | None:
    """Read the whole log; None if it is missing."""
    chunks = list_chunks(filesystem, log_path)
    return b"".join(filesystem.cat_file(path) for path, _ in chunks) if chunks else None


class ChunkedLog:
    """The remote copy of one append-only log. Call `connect` before the first new line, and `flush` to send new
    lines."""

    def __init__(self, log: Path, url: str):
        self._log, self._url = log, url
        self._previous_bytes = self._log_size()
        """Bytes of the log from earlier jobs."""
        self._is_open = False
        self._remote_path, self._chunk_index, self._last_chunk, self._sent_bytes = "", 0, b"", 0

    def _log_size(self) -> int:
        return self._log.stat().st_size if self._log.is_file() else 0

    def connect(self) -> None:
        """Read the remote log. If it is longer than the local log, since the folder was lost, the local log begins with
        it. Storage errors propagate: `flush` then retries, and the remote lines stay first."""
        import fsspec

        self._files: Any
        self._files, self._remote_path = fsspec.core.url_to_fs(self._url)
        self._files.makedirs(self._remote_path.rpartition("/")[0], exist_ok=True)
        chunks = list_chunks(self._files, self._remote_path)
        total_bytes = sum(size for _, size in chunks)
        if total_bytes > self._previous_bytes and self._log_size() == self._previous_bytes:
            self._fetch()
            self._previous_bytes = total_bytes
        is_last_full = not chunks or chunks[-1][1] >= CHUNK_BYTES
        self._chunk_index = len(chunks) if is_last_full else len(chunks) - 1
        self._last_chunk = b"" if is_last_full else self._files.cat_file(chunks[-1][0])
        self._sent_bytes, self._is_open = min(total_bytes, self._previous_bytes), True

    def _fetch(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        draft = self._log.with_name(f"{self._log.name}.draft")
        draft.write_bytes(read_log(self._files, self._remote_path) or b"")
        draft.replace(self._log)

    def flush(self) -> None:
        """Send new lines. Storage errors propagate; the next call sends them again."""
        if not self._is_open:
            self.connect()
        with self._log.open("rb") as file:
            while file.seek(self._sent_bytes) is not None and (
                new_bytes := file.read(CHUNK_BYTES - len(self._last_chunk))
            ):
                chunk = self._last_chunk + new_bytes
                self._files.pipe_file(
                    f"{self._remote_path}.{self._chunk_index:04d}" if self._chunk_index else self._remote_path, chunk
                )
                self._sent_bytes += len(new_bytes)
                self._chunk_index, self._last_chunk = (
                    (self._chunk_index, chunk) if len(chunk) < CHUNK_BYTES else (self._chunk_index + 1, b"")
                )


def read_run_log(run: str, storage: str | None) -> str | None:
    """Read all lines of a run's jobs, from beside its folder or from its storage; None if missing. `run`: its folder,
    or its name if storage is given."""
    local_log = Path(job_names.log_path(PurePosixPath(Path(run).expanduser().absolute())))
    if local_log.is_file():
        return local_log.read_text(encoding="utf-8", errors="replace")
    if storage is None:
        return None
    import fsspec

    try:
        filesystem, log_path = fsspec.core.url_to_fs(f"{job_names.storage_path(storage, PurePosixPath(run).name)}.log")
        content = read_log(filesystem, log_path)
    except Exception as error:  # storage backends raise errors of their own
        redacted, reason = redact(storage), redact(str(error)) or type(error).__name__
        raise UserError(
            f"--storage {redacted} cannot be read: {reason}; see its address and your credentials", code="unreachable"
        ) from None
    return None if content is None else content.decode("utf-8", errors="replace")
