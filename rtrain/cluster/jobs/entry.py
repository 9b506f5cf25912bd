"""The entry point of a job that can be tried again: `python -m rtrain.cluster.jobs.entry VERB ARGUMENTS`.

It runs the verb under the supervisor of jobs, resumes a run that is there, and writes every line that is printed to a
log beside the run as well, so that it can be read when the cluster is gone. Where `cluster.storage` is set, the log is
copied there, and beside it whose it is: the copy of another run of the same name is left as it is. It imports neither
Ray nor torch.
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
from rtrain.cluster.jobs.chunked_log_upload import Copied
from rtrain.core.errors import TryAgain, UserError, hide

if TYPE_CHECKING:
    from collections.abc import Iterator

COPY_EVERY_S = 30.0
LEFT_S = 10.0
"""Seconds in which the last lines of what was started must come."""
Found = TypeVar("Found")


def main(words: Sequence[str]) -> int:
    """The exit code of the verb; 75 where its run is to be gone on with (`supervise.again`)."""
    try:
        found = job_names.run_of(words)
    except UserError as error:
        sys.stderr.write(f"rtrain: {error}\n")
        return error.exit_code
    if found is None:
        return _alone(words)
    run = Path(found)
    storage = storage_of(words, run)
    supervised = words[0] in job_names.SUPERVISED
    other, away, arguments = None, None, list(words)
    try:
        other = other_run(words, run, storage)
        arguments = resumed(arguments, run, None if other else storage) if supervised else arguments
    except TryAgain as error:
        away = error
    mine = storage if other is None else None
    with kept(Path(job_names.log_of(found)), mine and f"{job_names.stored(mine, run.name)}.log"):
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        if away is not None:
            sys.stderr.write(f"--- {stamp} rtrain: {away}\n")
            return away.exit_code
        if other is not None:
            sys.stdout.write(
                f"--- {stamp} rtrain: cluster.storage has the copy of another run of this name, {other}: nothing of it "
                "is taken over, and this log is not copied there; name another storage or --out, or write --resume "
                "where it is this run, moved\n"
            )
        if mine is not None:
            _note(mine, run)
        sys.stdout.write(f"--- {stamp} rtrain {hide(shlex.join(arguments))}\n")
        sys.stdout.flush()
        return supervisor.supervise(arguments, run) if supervised else _alone(arguments)


def _alone(words: Sequence[str]) -> int:
    code = supervisor.child(list(words))
    return code if code >= 0 else 128 - code


def storage_of(words: Sequence[str], run: Path) -> str | None:
    """`cluster.storage` of the verb's configuration: that of the run, where it is there, else of the recipe or of the
    run that the words name; with what they set. What is wrong in it is the verb's to say."""
    given, known = job_names.given(words), run / "config.yaml"
    named = Path(given or "", "config.yaml")
    # Where nothing is named, any recipe does: by default none has a storage.
    source = str(known) if known.is_file() else str(named) if named.is_file() else given or config.recipe_names()[0]
    try:
        overrides = dict(config.parse_assignment(text) for text in job_names.assignments(words))
        # The run's own file has resolved what else the words set, and would contradict it.
        told = {name: value for name, value in overrides.items() if name == "cluster.storage"}
        storage = config.load(source, told).deploy.cluster.storage
    except UserError:
        return None
    return storage if storage is None or "://" in storage else os.path.abspath(os.path.expanduser(storage))


def resumed(words: list[str], run: Path, storage: str | None) -> list[str]:
    """The words with --resume where the run is there, or its copy, in place of what they say of it themselves. Raises
    `TryAgain` where the storage does not answer: a run that begins anew would take the place of the one there."""
    found = supervisor.resumed(words, run)
    if "--resume" not in found and storage and _is_there(f"{storage.rstrip('/')}/{run.name}/config.yaml"):
        return [*found, "--resume"]
    return found


def other_run(words: Sequence[str], run: Path, storage: str | None) -> str | None:
    """The folder of the run whose copy the storage has under this one's name, where that is another: runs in other
    folders may have one name. None where the words say --resume, and where nothing tells the folder. Raises `TryAgain`
    as `resumed` does: a run that is there goes on while its storage is away."""
    if storage is None or "--resume" in words:
        return None
    try:
        if not _is_there(f"{storage.rstrip('/')}/{run.name}/config.yaml"):
            return None
        whose = (_ask(f"{job_names.stored(storage, run.name)}.run", _text) or "").strip()
    except TryAgain:
        if (run / "config.yaml").is_file():
            return None
        raise
    return whose if whose and whose != str(run) else None


def _text(files: Any, path: str) -> str:
    """What a file holds; nothing where there is none."""
    return files.cat_file(path).decode(errors="replace") if files.exists(path) else ""


def _note(storage: str, run: Path) -> None:
    """Keep beside the log's copy whose it is, and the run's."""
    import fsspec

    with suppress(Exception):  # of any kind: the verb says what is wrong with its storage
        files, path = fsspec.core.url_to_fs(f"{job_names.stored(storage, run.name)}.run")
        files.makedirs(path.rpartition("/")[0], exist_ok=True)
        files.pipe_file(path, f"{run}\n".encode())


def _is_there(url: str) -> bool:
    return _ask(url, lambda files, path: bool(files.exists(path))) or False


def _ask(url: str, ask: Callable[[Any, str], Found]) -> Found | None:
    """What `ask` finds there; None where the verb is to say what is wrong."""
    import fsspec

    try:
        try:
            files, path = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError):  # not a storage: the verb says so, and which setting names it
            return None
        return ask(files, path)
    except Exception as error:  # each kind of storage has its own; some connect as they are opened
        told = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        if _REFUSED.search(told):  # which time does not mend: the verb asks again, and says what to look at
            return None
        raise TryAgain(
            f"cluster.storage: {hide(url)} does not answer ({hide(told)}); the same job, submitted again, goes on",
            code="unreachable",
        ) from error


_REFUSED = re.compile(
    r"credential|permission|forbidden|denied|unauthori[sz]ed|authentic|\b(?:40[13]|530)\b", re.IGNORECASE
)
"""In what storages say to those who may not ask; the classes of their errors have nothing in common."""


@contextmanager
def kept(log: Path, copy: str | None) -> "Iterator[None]":
    """While the block runs, what this process and its children print goes to the file `log` too; and to the URL
    `copy`, now and then and at the end. A log that cannot be written is said, and ends nothing.

    What is at `copy` and no longer in `log`, since the folder was lost, comes first in both.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    out, err = os.dup(1), os.dup(2)
    copied = Copied(log, copy) if copy else None
    if copied is not None:
        try:
            copied.open()
        except Exception as error:  # any kind of storage; the first copy looks again
            _write(err, f"rtrain: the log at {hide(str(copy))} cannot be read: {hide(str(error))}\n".encode())
    reading, writing = os.pipe()
    os.dup2(writing, 1)
    os.dup2(writing, 2)
    os.close(writing)
    ended = threading.Event()
    reader = threading.Thread(target=_tee, args=(reading, out, log), name="rtrain-log", daemon=True)
    copier = threading.Thread(target=_copy, args=(log, copied, ended, err), name="rtrain-log-copy")
    reader.start()
    copier.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(out, 1)
        os.dup2(err, 2)
        reader.join(LEFT_S)  # a process that outlives its parent may hold the other end
        ended.set()
        copier.join()
        for one in () if reader.is_alive() else (reading, out, err):
            os.close(one)


def _tee(reading: int, out: int, log: Path) -> None:
    file: IO[bytes] | None = None
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        file = log.open("ab")
    except OSError as error:
        _write(out, f"rtrain: no log at {log}: {error}\n".encode())
    while portion := os.read(reading, 1 << 16):
        _write(out, portion)
        if file is not None:
            try:
                file.write(portion)
                file.flush()
            except OSError as error:
                _write(out, f"rtrain: the log {log} goes on no more: {error}\n".encode())
                file = None
    if file is not None:
        file.close()


def _write(to: int, portion: bytes) -> None:
    """Write what can be written, to a disk that is full nothing: the pipe must be read on, or the training would wait
    in its next line for ever."""
    with suppress(OSError):
        while portion:
            portion = portion[os.write(to, portion) :]


def _copy(log: Path, copied: Copied | None, ended: threading.Event, err: int) -> None:
    failed = False
    while copied is not None:
        last = ended.wait(COPY_EVERY_S)
        try:
            if log.is_file():
                copied.put()
        except Exception as error:  # any kind of storage; the next look may do better
            if not failed:
                failed = True
                _write(err, f"rtrain: the log {log} is not copied: {hide(str(error))}\n".encode())
        if last:
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
