"""The remote copy of a run, at any URL that fsspec supports. It restores a run whose folder is lost.

<cluster.storage>/<run>/
    owner                   token of the attempt that may write here; an earlier attempt that still runs is refused
    config.yaml decisions.json  as of the newest checkpoint here
    events.jsonl            the log as of this attempt's first copy
    events/000000012345     the log's later bytes, from this offset
    checkpoints/step-00000120/...  a checkpoint's files, and its MANIFEST.json last
    artifact/... predictions-*.parquet  of a finished run
    rungs/step-00000040.safetensors  of a trial: its predictions at the rungs of its search
    trials.jsonl trials/...  of a search: its journal, copied like a log; its trials lie below as runs

Object stores have no rename, so a checkpoint is complete once it has its manifest: an interrupted upload has none yet,
and a deletion removes it first. A downloaded checkpoint is verified like any other.
"""

import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from rtrain.checkpoint import format as checkpoint_format
from rtrain.config import ClusterConfig
from rtrain.core import atomic_write, events, manifest
from rtrain.core.errors import UserError, redact

OWNER_FILE = "owner"
IDENTITY_FIELDS = ("recipe_digest", "data_digest")
"""Keys of the event `created` that distinguish runs with different weights."""
RUN_FILES = ("config.yaml", "decisions.json", "costs.json", "trackers.json")
"""The files of a run or search that a resume reads, in addition to log and checkpoints; the first always exists."""
LOG_FILES = ("events.jsonl", "trials.jsonl")
"""Append-only files. New bytes are uploaded to a folder named like the file without its suffix."""
PREDICTION_FILES = ("predictions-valid.parquet", "predictions-test.parquet")
RUNGS_FOLDER = "rungs"
RUN_CONTENTS = (*RUN_FILES, *PREDICTION_FILES, RUNGS_FOLDER, "checkpoints", "artifact")
"""Content of a remote copy, in addition to the logs."""
T = TypeVar("T")


class StorageUnreachableError(UserError):
    """The storage cannot be read or written; the run folder still has everything."""

    code = "unreachable"


class RunTakenOverError(UserError):
    """Another attempt owns the run: this one must not write any more."""

    code = "run_taken_over"


class RemoteCopy:
    """The remote copy of the run `name` under the URL `storage`. Calls use the network and may raise
    `StorageUnreachableError`."""

    def __init__(self, storage: str, name: str, owner_tokens: Sequence[str] = ()):
        """`owner_tokens`: tokens of the attempts from this run folder, this attempt's last. It may write to a copy that
        any of them owns."""
        self.url = f"{storage.rstrip('/')}/{name}"
        self.owner_tokens = tuple(owner_tokens)
        self._logged_bytes: dict[str, int] = {}
        self._opened_storage: tuple[Any, str] | None = None
        self._damaged_names: set[str] = set()

    def exists(self) -> bool:
        """Whether a run was ever copied here."""
        return self._call_storage(lambda files, root: bool(files.exists(f"{root}/config.yaml")))

    def refuse_other_run(self, run_folder: Path) -> None:
        """Raise `UserError` where the copy is of another run, owned by no attempt of this folder, with other settings
        or rows. It would be overwritten."""

        def read_created_event(filesystem: Any, root: str) -> Mapping[str, Any]:
            log = f"{root}/{events.FILE_NAME}"
            if _read_owner(filesystem, root) in self.owner_tokens or not filesystem.exists(log):
                return {}
            return _find_created_event(filesystem.cat_file(log))

        local_event = _find_created_event((run_folder / events.FILE_NAME).read_bytes())
        remote_event = self._call_storage(read_created_event)
        if any(local_event.get(name) != remote_event[name] for name in IDENTITY_FIELDS if name in remote_event):
            raise UserError(
                f"cluster.storage: {redact(self.url)} holds another run, with other settings or rows, which would be "
                "lost; name another storage, or fetch it and remove it there",
                code="other_run",
            )

    def claim_ownership(self) -> None:
        """Become the only attempt that may write here. Fails at once if the storage does not work."""
        self._call_storage(self._write_owner)

    def restore(self, run_folder: Path) -> None:
        """Restore the files that `--resume` needs from a run whose folder is lost, or a search from a trial, and the
        artifact of a finished run. Checkpoints are pulled on demand, and a search's trials one by one.

        The configuration comes last, since it marks a folder as a run: an interrupted restore starts again.
        """

        def download(filesystem: Any, root: str) -> None:
            with _open_draft(run_folder) as draft:
                for name in (*RUN_FILES, *PREDICTION_FILES):
                    if filesystem.exists(f"{root}/{name}"):
                        filesystem.get_file(f"{root}/{name}", str(draft / name))
                _download_logs(filesystem, root, draft)
                has_artifact = filesystem.exists(f"{root}/artifact/{manifest.FILE_NAME}")
                for folder in (RUNGS_FOLDER, "artifact") if has_artifact else (RUNGS_FOLDER,):
                    for remote_path in sorted(filesystem.find(f"{root}/{folder}")):
                        path = draft / _relative_path(remote_path, root)
                        path.parent.mkdir(parents=True, exist_ok=True)
                        filesystem.get_file(remote_path, str(path))
                run_folder.mkdir(parents=True, exist_ok=True)
                atomic_write.sync_tree(draft)
                for name in ("artifact", RUNGS_FOLDER, *PREDICTION_FILES, *LOG_FILES, *reversed(RUN_FILES)):
                    if (draft / name).is_dir():  # left by an interrupted restore
                        shutil.rmtree(run_folder / name, ignore_errors=True)
                    if (draft / name).exists():
                        (draft / name).rename(run_folder / name)

        self._call_storage(download)

    def fetch_run(self, target: Path) -> int:
        """Copy the run into the new folder `target`, atomically, with its log in one file; returns its bytes.

        Only file names of a run are accepted: a writer to the storage must not choose paths on this machine.
        """
        if target.exists():
            raise UserError(f"{target} exists already; name another folder with --to", code="already_exists")

        def download(filesystem: Any, root: str) -> int:
            if not filesystem.exists(f"{root}/config.yaml"):
                raise UserError(f"{redact(self.url)} holds no run", code="not_a_run")
            complete_names = _list_complete_names(filesystem, f"{root}/checkpoints")
            with _open_draft(target) as draft:
                for remote_path in sorted(filesystem.find(root)):
                    path = _relative_path(remote_path, root)
                    is_incomplete = path.parts[0] == "checkpoints" and path.parent.name not in complete_names
                    if path.parts[0] in RUN_CONTENTS and not is_incomplete:
                        (draft / path).parent.mkdir(parents=True, exist_ok=True)
                        filesystem.get_file(remote_path, str(draft / path))
                _download_logs(filesystem, root, draft)
                atomic_write.publish_folder(draft, target)
            return sum(path.stat().st_size for path in target.rglob("*") if path.is_file())

        return self._call_storage(download)

    def push(
        self, run_folder: Path, checkpoints: Sequence[Path], on_progress: Callable[[], None] = lambda: None
    ) -> None:
        """Upload checkpoints and files of the run folder, and remove other checkpoints; `on_progress` is called for
        each part. Raises `RunTakenOverError` where another attempt owns the run."""

        def upload(filesystem: Any, root: str) -> None:
            self._check_owner(filesystem, root, run_folder)
            complete_names = _list_complete_names(filesystem, f"{root}/checkpoints")
            for path in checkpoints:
                if path.name not in complete_names - self._damaged_names:
                    _upload_folder(filesystem, path, f"{root}/checkpoints/{path.name}", on_progress)
                    self._damaged_names.discard(path.name)
            self._upload_files(filesystem, root, run_folder)
            # Only now: the older checkpoints are needed until the newer ones are complete. Incomplete ones are left
            # from an earlier upload: only this attempt may write here.
            names = {path.split("/")[-2] for path in filesystem.find(f"{root}/checkpoints")}
            for name in names - {path.name for path in checkpoints}:
                _remove_manifest(filesystem, f"{root}/checkpoints/{name}")
                _remove_folder(filesystem, f"{root}/checkpoints/{name}")

        self._call_storage(upload)

    def push_artifact(self, run_folder: Path) -> None:
        """Upload a finished run's artifact and predictions, then its log: a log with the last event implies a complete
        artifact."""

        def upload(filesystem: Any, root: str) -> None:
            _upload_folder(filesystem, run_folder / "artifact", f"{root}/artifact")
            for name in PREDICTION_FILES:
                if (run_folder / name).is_file():
                    filesystem.put_file(str(run_folder / name), f"{root}/{name}")
            self._upload_files(filesystem, root, run_folder)

        self._call_storage(upload)

    def list_checkpoints(self) -> list[str]:
        """Return the names of the complete checkpoints, the newest last."""
        return self._call_storage(lambda files, root: sorted(_list_complete_names(files, f"{root}/checkpoints")))

    def pull(self, final_path: Path, on_progress: Callable[[], None] = lambda: None) -> None:
        """Copy a checkpoint into the run folder, atomically and without verification. `on_progress`: see `push`."""

        def download(filesystem: Any, root: str) -> None:
            draft = final_path.with_name(f".{final_path.name}.{uuid.uuid4().hex[:8]}")
            draft.mkdir(parents=True)
            try:
                callback = _make_progress_callback(on_progress)
                for path in filesystem.ls(f"{root}/checkpoints/{final_path.name}", detail=False):
                    filesystem.get_file(path, str(draft / path.rsplit("/", 1)[-1]), callback=callback)
                    on_progress()
                # A local one without its manifest, from a truncated copy of the run folder.
                checkpoint_format.delete_checkpoint(final_path)
                atomic_write.publish_folder(draft, final_path)
            finally:
                shutil.rmtree(draft, ignore_errors=True)

        self._call_storage(download)

    def mark_damaged(self, name: str) -> None:
        """Mark a checkpoint whose download did not verify: the next of that name overwrites it. Until then it stays,
        since the damage may be in the download alone."""
        self._damaged_names.add(name)

    def _write_owner(self, filesystem: Any, root: str) -> None:
        token = self.owner_tokens[-1].encode()
        filesystem.makedirs(root, exist_ok=True)
        filesystem.pipe_file(f"{root}/{OWNER_FILE}", token)
        if filesystem.cat_file(f"{root}/{OWNER_FILE}") != token:
            raise OSError("a written file reads back with other content")

    def _check_owner(self, filesystem: Any, root: str, run_folder: Path) -> None:
        """Raise `RunTakenOverError` where another attempt owns the run; repeat a claim that failed."""
        owner = _read_owner(filesystem, root)
        if owner is None or owner in self.owner_tokens[:-1]:
            self._write_owner(filesystem, root)
        elif owner != self.owner_tokens[-1]:
            raise RunTakenOverError(
                f"another process owns the run at {redact(self.url)}; this one, in {run_folder}, ends. "
                "Write --new for a separate run."
            )

    def _upload_files(self, filesystem: Any, root: str, run_folder: Path) -> None:
        for name in RUN_FILES:
            if (run_folder / name).is_file():
                filesystem.put_file(str(run_folder / name), f"{root}/{name}")
        for path in sorted((run_folder / RUNGS_FOLDER).glob("*.safetensors")):
            if not filesystem.exists(f"{root}/{RUNGS_FOLDER}/{path.name}"):
                filesystem.makedirs(f"{root}/{RUNGS_FOLDER}", exist_ok=True)
                filesystem.put_file(str(path), f"{root}/{RUNGS_FOLDER}/{path.name}")
        for name in LOG_FILES:
            if (run_folder / name).is_file():
                self._upload_log(filesystem, f"{root}/{name}", (run_folder / name).read_bytes())

    def _upload_log(self, filesystem: Any, remote_path: str, log: bytes) -> None:
        """Write the whole log the first time, over that of an earlier attempt; later write new bytes to a file of their
        own, since object stores cannot append."""
        logged_bytes, parts_folder = self._logged_bytes.get(remote_path), _log_parts_folder(remote_path)
        if logged_bytes is None:
            filesystem.pipe_file(remote_path, log)
            if filesystem.exists(parts_folder):
                _remove_folder(filesystem, parts_folder)
        elif len(log) > logged_bytes:
            filesystem.makedirs(parts_folder, exist_ok=True)
            filesystem.pipe_file(f"{parts_folder}/{logged_bytes:012d}", log[logged_bytes:])
        self._logged_bytes[remote_path] = len(log)

    def _call_storage(self, operation: Callable[[Any, str], T]) -> T:
        import fsspec

        try:
            if self._opened_storage is None:
                self._opened_storage = fsspec.core.url_to_fs(self.url)
            filesystem, root = self._opened_storage
            filesystem.invalidate_cache()  # other processes write here too
            return operation(filesystem, root)
        except UserError:
            raise
        except Exception as error:  # every storage has its own exceptions
            raise StorageUnreachableError(
                f"cluster.storage: {redact(self.url)} fails: {str(error) or type(error).__name__}. Name a URL that "
                "every node may read and write, with credentials in the environment (s3:// needs s3fs, gs:// gcsfs)."
            ) from error


def make_remote_copy(cluster: ClusterConfig, run_folder: Path, owner_tokens: Sequence[str] = ()) -> RemoteCopy | None:
    """Return the remote copy of a run; None without `cluster.storage`."""
    return RemoteCopy(cluster.storage, run_folder.name, owner_tokens) if cluster.storage else None


def _find_created_event(log: bytes) -> Mapping[str, Any]:
    """Return the first event `created` of a log; empty without one, as in a trial's log."""
    return next((event for event in events.parse_events(log) if event["kind"] == "created"), {})


@contextmanager
def _open_draft(final_path: Path) -> Iterator[Path]:
    """Open a staging folder beside `final_path`, removed at the end; stale ones of killed processes are removed
    first."""
    atomic_write.remove_stale_drafts(final_path)
    draft = atomic_write.Draft(final_path)
    try:
        staging_folder = draft.folder / final_path.name
        staging_folder.mkdir()
        yield staging_folder
    finally:
        shutil.rmtree(draft.folder, ignore_errors=True)
        draft.release()


def _read_owner(filesystem: Any, root: str) -> str | None:
    path = f"{root}/{OWNER_FILE}"
    return filesystem.cat_file(path).decode() if filesystem.exists(path) else None


def _log_parts_folder(log: str) -> str:
    """Return the folder of the later parts of a log."""
    return log.removesuffix(".jsonl")


def _download_logs(filesystem: Any, root: str, run_folder: Path) -> None:
    for name in LOG_FILES:
        if filesystem.exists(f"{root}/{name}"):
            (run_folder / name).write_bytes(_read_full_log(filesystem, f"{root}/{name}"))


def _read_full_log(filesystem: Any, remote_path: str) -> bytes:
    """Return a log with all parts that continue it; other parts belong to another attempt."""
    log: bytes = filesystem.cat_file(remote_path)
    paths = sorted(filesystem.find(_log_parts_folder(remote_path)))
    # Not `filesystem.cat`: it treats the name of a run as a pattern (`_remove_folder`).
    for path, log_part in zip(paths, filesystem.cat_ranges(paths, None, None, on_error="raise"), strict=True):
        if int(path.rsplit("/", 1)[-1]) == len(log):
            log += log_part
    return log


def _relative_path(remote_path: str, root: str) -> PurePosixPath:
    """Return a file's path in the run. Raises `UserError` for a path outside the run."""
    prefix, full_path = f"/{root.strip('/')}/", f"/{remote_path.lstrip('/')}"
    parts = full_path.removeprefix(prefix).split("/")
    if not full_path.startswith(prefix) or {"", ".", ".."} & set(parts):
        message = f"{root} holds a file named {full_path!r}, outside of the run; nothing was copied"
        raise UserError(message, code="unsafe_path")
    return PurePosixPath(*parts)


def _list_complete_names(filesystem: Any, folder: str) -> set[str]:
    return {path.split("/")[-2] for path in filesystem.find(folder) if path.endswith(f"/{manifest.FILE_NAME}")}


def _make_progress_callback(on_progress: Callable[[], None]) -> Any:
    """Make a callback for fsspec, called as bytes are copied; some storages call it per file, or never."""
    import fsspec

    return fsspec.Callback(hooks={"moved": lambda size, value, **rest: on_progress()})


def _upload_folder(filesystem: Any, folder: Path, target: str, on_progress: Callable[[], None] = lambda: None) -> None:
    """Upload a folder's files, the manifest last; an older manifest is removed first, since it describes other
    files."""
    _remove_manifest(filesystem, target)
    filesystem.makedirs(target, exist_ok=True)
    for path in sorted(folder.rglob("*"), key=lambda path: path == folder / manifest.FILE_NAME):
        remote_path = f"{target}/{path.relative_to(folder).as_posix()}"
        if path.is_dir():
            filesystem.makedirs(remote_path, exist_ok=True)
        else:
            filesystem.put_file(str(path), remote_path, callback=_make_progress_callback(on_progress))
            on_progress()


def _remove_manifest(filesystem: Any, folder: str) -> None:
    if filesystem.exists(f"{folder}/{manifest.FILE_NAME}"):
        filesystem.rm_file(f"{folder}/{manifest.FILE_NAME}")


def _remove_folder(filesystem: Any, folder: str) -> None:
    """Remove a folder with its content. fsspec treats a name with *, ? or [ as a pattern on all storages but a mounted
    one: it would match nothing, or another run. Such a folder is emptied file by file."""
    from fsspec.implementations.local import LocalFileSystem

    if isinstance(filesystem, LocalFileSystem) or set("*?[").isdisjoint(folder):
        filesystem.rm(folder, recursive=True)
        return
    for path in filesystem.find(folder):
        filesystem.rm_file(path)
