"""Entry point of a resumable job: `python -m rtrain.cluster.jobs.entry VERB ARGUMENTS`.

It runs the verb under the supervisor, resumes an existing run, and copies all output to a log beside the run, which
remains readable after the cluster is gone. With `cluster.storage`, the log is copied there too, with a file that names
its owner: a remote copy of another run of the same name is left alone. The remote log is sent in chunks, so that only
the last one is sent again: `NAME.log`, then `NAME.log.0001`, `NAME.log.0002`, and so on. It imports neither Ray nor
torch.
"""

import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar

from rtrain import config
from rtrain.cluster import supervisor
from rtrain.cluster.jobs import job_names
from rtrain.core import plugins
from rtrain.core.errors import TemporaryFailureError, UserError, redact

COPY_INTERVAL_S = 30.0
FLUSH_TIMEOUT_S = 10.0
"""Seconds in which the last lines of child processes must arrive."""
CHUNK_BYTES = 1 << 20
T = TypeVar("T")


def main(words: Sequence[str]) -> int:
    """Run a job; returns the verb's exit code, or 75 if the job should be submitted again
    (`supervisor.job_exit_code`)."""
    try:
        run_folder = job_names.resolve_run_folder(words)
    except UserError as error:
        sys.stderr.write(f"rtrain: {error}\n")
        return error.exit_code
    if run_folder is None:
        return _run_unsupervised(words)
    run = Path(run_folder)
    storage = resolve_storage(words, run)
    is_supervised = words[0] in job_names.SUPERVISED_VERBS
    other_folder, storage_error, arguments = None, None, list(words)
    try:
        other_folder = find_other_run(words, run, storage)
        arguments = resume_if_present(arguments, run, None if other_folder else storage) if is_supervised else arguments
    except TemporaryFailureError as error:
        storage_error = error
    log_storage = storage if other_folder is None else None
    log_url = f"{job_names.storage_path(log_storage, run.name)}.log" if log_storage else None
    with tee_output(Path(job_names.log_path(run_folder)), log_url):
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        if storage_error is not None:
            sys.stderr.write(f"--- {stamp} rtrain: {storage_error}\n")
            return storage_error.exit_code
        if other_folder is not None:
            sys.stdout.write(
                f"--- {stamp} rtrain: cluster.storage has the remote copy of another run of this name, {other_folder}; "
                "it is not used, and this log is not copied there. Name another storage or --out, or write --resume "
                "if this run was moved\n"
            )
        if log_storage is not None:
            _record_owner(log_storage, run)
        sys.stdout.write(f"--- {stamp} rtrain {redact(shlex.join(arguments))}\n")
        sys.stdout.flush()
        return supervisor.supervise(arguments, run) if is_supervised else _run_unsupervised(arguments)


def _run_unsupervised(words: Sequence[str]) -> int:
    code = supervisor.run_child(list(words))
    return code if code >= 0 else 128 - code


def resolve_storage(words: Sequence[str], run: Path) -> str | None:
    """Resolve `cluster.storage` of the verb: from the run if it exists, else from the named recipe or run, with the
    overrides of the words. The verb itself reports errors in them."""
    recipe_or_run = job_names.first_positional(words)
    run_configs = [path for path in (run / "config.yaml", Path(recipe_or_run or "", "config.yaml")) if path.is_file()]
    # Without a name any recipe will do: none sets a storage by default.
    source = str(run_configs[0]) if run_configs else recipe_or_run or config.list_recipe_names()[0]
    try:
        plugins.command_plugins.extend(plugins.load_plugins(job_names.plugin_addresses(words)))
        overrides = dict(config.parse_assignment(text) for text in job_names.assignments(words))
        # The run's file already includes the other overrides, and would conflict with them.
        storage_override = {name: value for name, value in overrides.items() if name == "cluster.storage"}
        storage = config.load_config(source, storage_override).deploy.cluster.storage
    except UserError:
        return None
    return storage if storage is None or "://" in storage else os.path.abspath(os.path.expanduser(storage))


def resume_if_present(words: list[str], run: Path, storage: str | None) -> list[str]:
    """Add --resume if the run or its remote copy exists. Raises `TemporaryFailureError` if the storage does not
    respond: a new run would overwrite the copy."""
    resumed_words = supervisor.with_resume_flag(words, run)
    if "--resume" not in resumed_words and storage and _exists(f"{storage.rstrip('/')}/{run.name}/config.yaml"):
        return [*resumed_words, "--resume"]
    return resumed_words


def find_other_run(words: Sequence[str], run: Path, storage: str | None) -> str | None:
    """The folder of another run whose remote copy has this run's name, else None; also None with --resume, and if the
    owner is unknown. Raises `TemporaryFailureError` like `resume_if_present`; an existing run resumes while its storage
    is down."""
    if storage is None or "--resume" in words:
        return None
    try:
        if not _exists(f"{storage.rstrip('/')}/{run.name}/config.yaml"):
            return None
        owner = (_query_storage(f"{job_names.storage_path(storage, run.name)}.run", _read_text) or "").strip()
    except TemporaryFailureError:
        if (run / "config.yaml").is_file():
            return None
        raise
    return owner if owner and owner != str(run) else None


def _read_text(filesystem: Any, path: str) -> str:
    """Read a file; empty if it is missing."""
    return filesystem.cat_file(path).decode(errors="replace") if filesystem.exists(path) else ""


def _record_owner(storage: str, run: Path) -> None:
    """Record the owner beside the remote log."""
    import fsspec

    with suppress(Exception):  # of any kind: the verb reports storage errors
        filesystem, path = fsspec.core.url_to_fs(f"{job_names.storage_path(storage, run.name)}.run")
        filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
        filesystem.pipe_file(path, f"{run}\n".encode())


def _exists(url: str) -> bool:
    return _query_storage(url, lambda files, path: bool(files.exists(path))) or False


def _query_storage(url: str, query: Callable[[Any, str], T]) -> T | None:
    """Run `query` on a storage; None if the verb itself will report the error."""
    import fsspec

    try:
        try:
            filesystem, path = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError):  # not a storage: the verb reports the setting
            return None
        return query(filesystem, path)
    except Exception as error:  # backends raise errors of their own; some connect on open
        message = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        if _ACCESS_DENIED.search(message):  # permanent: the verb retries, and reports it
            return None
        raise TemporaryFailureError(
            f"cluster.storage: {redact(url)} does not respond ({redact(message)}); submit the same job again to resume",
            code="unreachable",
        ) from error


_ACCESS_DENIED = re.compile(
    r"credential|permission|forbidden|denied|unauthori[sz]ed|authentic|\b(?:40[13]|530)\b", re.IGNORECASE
)
"""Fragments of access errors; their exception classes have no common base."""


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


@contextmanager
def tee_output(log: Path, copy_url: str | None) -> Iterator[None]:
    """Copy the output of this process and its children to the file `log` while the block runs, and periodically to the
    URL `copy_url`. An unwritable log is reported, and stops nothing.

    If the folder was lost, the lines at `copy_url` come first in both.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    stdout_fd, stderr_fd = os.dup(1), os.dup(2)
    chunked_log = ChunkedLog(log, copy_url) if copy_url else None
    if chunked_log is not None:
        try:
            chunked_log.connect()
        except Exception as error:  # any backend; the first copy retries
            _write(
                stderr_fd, f"rtrain: the log at {redact(str(copy_url))} cannot be read: {redact(str(error))}\n".encode()
            )
    read_fd, write_fd = os.pipe()
    os.dup2(write_fd, 1)
    os.dup2(write_fd, 2)
    os.close(write_fd)
    stop_event = threading.Event()
    reader = threading.Thread(target=_tee, args=(read_fd, stdout_fd, log), name="rtrain-log", daemon=True)
    copier = threading.Thread(
        target=_copy_periodically, args=(log, chunked_log, stop_event, stderr_fd), name="rtrain-log-copy"
    )
    reader.start()
    copier.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(stdout_fd, 1)
        os.dup2(stderr_fd, 2)
        reader.join(FLUSH_TIMEOUT_S)  # an orphaned process may hold the other end
        stop_event.set()
        copier.join()
        for fd in () if reader.is_alive() else (read_fd, stdout_fd, stderr_fd):
            os.close(fd)


def _tee(read_fd: int, stdout_fd: int, log: Path) -> None:
    file: IO[bytes] | None = None
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        file = log.open("ab")
    except OSError as error:
        _write(stdout_fd, f"rtrain: no log at {log}: {error}\n".encode())
    while portion := os.read(read_fd, 1 << 16):
        _write(stdout_fd, portion)
        if file is not None:
            try:
                file.write(portion)
                file.flush()
            except OSError as error:
                _write(stdout_fd, f"rtrain: the log {log} stopped: {error}\n".encode())
                file = None
    if file is not None:
        file.close()


def _write(fd: int, portion: bytes) -> None:
    """Write as much as possible, and nothing to a full disk: the pipe must be drained, or the training would block on
    its next line."""
    with suppress(OSError):
        while portion:
            portion = portion[os.write(fd, portion) :]


def _copy_periodically(log: Path, chunked_log: ChunkedLog | None, stop_event: threading.Event, stderr_fd: int) -> None:
    has_failed = False
    while chunked_log is not None:
        is_last = stop_event.wait(COPY_INTERVAL_S)
        try:
            if log.is_file():
                chunked_log.flush()
        except Exception as error:  # any backend; the next copy retries
            if not has_failed:
                has_failed = True
                _write(stderr_fd, f"rtrain: the log {log} is not copied: {redact(str(error))}\n".encode())
        if is_last:
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
