"""Entry point of a resumable job: `python -m rtrain.cluster.jobs.entry VERB ARGUMENTS`.

It runs the verb under the supervisor, resumes an existing run, and copies all output to a log beside the run, which
remains readable after the cluster is gone. With `cluster.storage`, the log is copied there too, with a file that names
its owner: a remote copy of another run of the same name is left alone. It imports neither Ray nor torch.
"""

import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from rtrain import config
from rtrain.cluster import supervisor
from rtrain.cluster.jobs import job_names
from rtrain.cluster.jobs.chunked_log_upload import ChunkedLog
from rtrain.core.errors import TemporaryFailureError, UserError, redact

if TYPE_CHECKING:
    from collections.abc import Iterator

COPY_INTERVAL_S = 30.0
FLUSH_TIMEOUT_S = 10.0
"""Seconds in which the last lines of child processes must arrive."""
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
    with tee_output(
        Path(job_names.log_path(run_folder)), log_storage and f"{job_names.storage_path(log_storage, run.name)}.log"
    ):
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
    recipe_or_run, run_config = job_names.first_positional(words), run / "config.yaml"
    named_config = Path(recipe_or_run or "", "config.yaml")
    # Without a name any recipe will do: none sets a storage by default.
    source = (
        str(run_config)
        if run_config.is_file()
        else str(named_config)
        if named_config.is_file()
        else recipe_or_run or config.list_recipe_names()[0]
    )
    try:
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


@contextmanager
def tee_output(log: Path, copy_url: str | None) -> "Iterator[None]":
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
