"""A run's copy at a URL of any kind that fsspec knows: what a run whose folder is lost is resumed from.

<cluster.storage>/<run>/
    owner                       the start that may write here: an earlier one that is still alive is refused
    config.yaml decisions.json  as of the newest checkpoint here
    events.jsonl                the log as of this start's first copy
    events/000000012345         what came to it later, from that byte on
    checkpoints/update-00000120/...              a checkpoint's files, and its MANIFEST.json last
    artifact/... predictions-*.parquet           of a finished run
    rungs/update-00000040.safetensors            of a trial: its answers at the rungs of its search
    trials.jsonl trials/...                      of a search: its journal, as a log is; its trials lie below it as runs

Object stores have no rename, so a manifest makes the checkpoint: what an interrupted copy leaves has none, and what an
interrupted deletion leaves has lost it first. Whatever comes back is verified like any other checkpoint.
"""

import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from rtrain.checkpoint import format as checkpoint_format
from rtrain.config import Cluster
from rtrain.core import atomic_write, events, manifest
from rtrain.core.errors import UserError, hide

OWNER = "owner"
TOLD_APART = ("identity", "data_digest")
"""By what the event `created` says of these, runs are told apart whose weights differ."""
FILES = ("config.yaml", "decisions.json", "costs.json")
"""The files of a run or search that a resume reads, beside log and checkpoints; the first is always there."""
LOGS = ("events.jsonl", "trials.jsonl")
"""Files that are only added to. What is new lies in a folder of the name without its ending."""
ANSWERS = ("predictions-valid.parquet", "predictions-test.parquet")
RUNGS = "rungs"
HELD = (*FILES, *ANSWERS, RUNGS, "checkpoints", "artifact")
"""What of a run is here, beside its logs."""
Found = TypeVar("Found")


class Unreachable(UserError):
    """The storage cannot be read or written; what was trained is in the run folder all the same."""

    code = "unreachable"


class Lost(UserError):
    """Another start has taken the run over: whatever this one would still write is not wanted."""

    code = "taken_over"


class Replica:
    """The copy of the run `name` under the URL `storage`. Calls go to the network and may raise `Unreachable`."""

    def __init__(self, storage: str, name: str, owners: Sequence[str] = ()):
        """`owners` are the tokens of the starts from this run folder, this start's last: what one of them has claimed,
        this one may write to."""
        self.url = f"{storage.rstrip('/')}/{name}"
        self.owners = tuple(owners)
        self._logged: dict[str, int] = {}
        self._opened: tuple[Any, str] | None = None
        self._distrusted: set[str] = set()

    def exists(self) -> bool:
        """Whether a run was ever copied here."""
        return self._try(lambda files, root: bool(files.exists(f"{root}/config.yaml")))

    def refuse_other(self, run: Path) -> None:
        """Raise `UserError` where another run than the one of this folder was copied here: claimed by no start of it,
        with other settings or other rows. It would be overwritten."""

        def read(files: Any, root: str) -> Mapping[str, Any]:
            owner = files.cat_file(f"{root}/{OWNER}").decode() if files.exists(f"{root}/{OWNER}") else None
            log = f"{root}/{events.NAME}"
            return {} if owner in self.owners or not files.exists(log) else _created(files.cat_file(log))

        own, other = _created((run / events.NAME).read_bytes()), self._try(read)
        if any(own.get(name) != other[name] for name in TOLD_APART if name in other):
            raise UserError(
                f"cluster.storage: {hide(self.url)} holds another run, of other settings or rows, which would be lost; "
                "name another storage, or fetch it and remove it there",
                code="other_run",
            )

    def claim(self) -> None:
        """Become the one start that may write here. Shows at once whether the storage works."""
        self._try(self._own)

    def restore(self, run: Path) -> None:
        """Bring back what `--resume` reads of a run whose folder is lost, what a search reads of a trial, and the
        artefact of one that is finished; the checkpoints come when they are wanted, and a search's trials by
        themselves.

        The configuration comes last, since by it a run is known: what is interrupted before is begun again.
        """

        def read(files: Any, root: str) -> None:
            with _draft(run) as draft:
                for name in (*FILES, *ANSWERS):
                    if files.exists(f"{root}/{name}"):
                        files.get_file(f"{root}/{name}", str(draft / name))
                _get_logs(files, root, draft)
                whole = files.exists(f"{root}/artifact/{manifest.NAME}")
                for folder in (RUNGS, "artifact") if whole else (RUNGS,):
                    for place in sorted(files.find(f"{root}/{folder}")):
                        path = draft / _inner(place, root)
                        path.parent.mkdir(parents=True, exist_ok=True)
                        files.get_file(place, str(path))
                run.mkdir(parents=True, exist_ok=True)
                atomic_write.sync_tree(draft)
                for name in ("artifact", RUNGS, *ANSWERS, *LOGS, *reversed(FILES)):
                    if (draft / name).is_dir():  # one that is here is of a restore that was interrupted
                        shutil.rmtree(run / name, ignore_errors=True)
                    if (draft / name).exists():
                        (draft / name).rename(run / name)

        self._try(read)

    def fetch(self, to: Path) -> int:
        """Copy the run into the new folder `to`, whole or not at all, and with its log in one piece; returns its bytes.

        Names are taken only where they are a run's own: whoever can write to the storage must not choose where this
        machine is written to.
        """
        if to.exists():
            raise UserError(f"{to} is there already; name another folder with --to", code="already_exists")

        def read(files: Any, root: str) -> int:
            if not files.exists(f"{root}/config.yaml"):
                raise UserError(f"{hide(self.url)} holds no run", code="not_a_run")
            complete = _complete(files, f"{root}/checkpoints")
            with _draft(to) as draft:
                for place in sorted(files.find(root)):
                    path = _inner(place, root)
                    cut_short = path.parts[0] == "checkpoints" and path.parent.name not in complete
                    if path.parts[0] in HELD and not cut_short:
                        (draft / path).parent.mkdir(parents=True, exist_ok=True)
                        files.get_file(place, str(draft / path))
                _get_logs(files, root, draft)
                atomic_write.publish_folder(draft, to)
            return sum(path.stat().st_size for path in to.rglob("*") if path.is_file())

        return self._try(read)

    def push(self, run: Path, checkpoints: Sequence[Path], moved: Callable[[], None] = lambda: None) -> None:
        """Make the checkpoints here those of the run folder; `moved` is called as pieces of them arrive. Raises `Lost`
        where another start has claimed the run."""

        def write(files: Any, root: str) -> None:
            self._keep_owned(files, root, run)
            present = _complete(files, f"{root}/checkpoints")
            for path in checkpoints:
                if path.name not in present - self._distrusted:
                    _put(files, path, f"{root}/checkpoints/{path.name}", moved)
                    self._distrusted.discard(path.name)
            self._put_files(files, root, run)
            # Only now: until the newer ones are whole, the older ones are all there is. What is incomplete is what an
            # earlier copy left: none but this one may write here.
            for name in _begun(files, f"{root}/checkpoints") - {path.name for path in checkpoints}:
                _remove(files, f"{root}/checkpoints/{name}")

        self._try(write)

    def push_artifact(self, run: Path) -> None:
        """Copy a finished run's artefact and answers, and its log to the end: where that tells of the end, they are
        there."""

        def write(files: Any, root: str) -> None:
            _put(files, run / "artifact", f"{root}/artifact")
            for name in ANSWERS:
                if (run / name).is_file():
                    files.put_file(str(run / name), f"{root}/{name}")
            self._put_files(files, root, run)

        self._try(write)

    def checkpoints(self) -> list[str]:
        """Names of the complete checkpoints here, the newest last."""
        return self._try(lambda files, root: sorted(_complete(files, f"{root}/checkpoints")))

    def pull(self, final: Path, moved: Callable[[], None] = lambda: None) -> None:
        """Copy a checkpoint into the run folder, whole or not at all. It is not verified yet. `moved` as in `push`."""

        def read(files: Any, root: str) -> None:
            draft = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}")
            draft.mkdir(parents=True)
            try:
                for path in files.ls(f"{root}/checkpoints/{final.name}", detail=False):
                    files.get_file(path, str(draft / path.rsplit("/", 1)[-1]), callback=_telling(moved))
                    moved()
                # One without its manifest: what a copy of the run folder that was cut off has.
                checkpoint_format.discard(final)
                draft.rename(final)
            finally:
                shutil.rmtree(draft, ignore_errors=True)

        self._try(read)

    def distrust(self, name: str) -> None:
        """A checkpoint came back damaged: the next one of that name is written over it. Until there is a newer one it
        stays, since what came back may not be what lies here."""
        self._distrusted.add(name)

    def _own(self, files: Any, root: str) -> None:
        token = self.owners[-1].encode()
        files.makedirs(root, exist_ok=True)
        files.pipe_file(f"{root}/{OWNER}", token)
        if files.cat_file(f"{root}/{OWNER}") != token:
            raise OSError("what was written does not come back")

    def _keep_owned(self, files: Any, root: str, run: Path) -> None:
        """Raise `Lost` where another start has claimed the run; make up for a claim that failed."""
        owner = files.cat_file(f"{root}/{OWNER}").decode() if files.exists(f"{root}/{OWNER}") else None
        if owner is None or owner in self.owners[:-1]:
            self._own(files, root)
        elif owner != self.owners[-1]:
            raise Lost(
                f"another process has taken up the run at {hide(self.url)}; this one, in {run}, ends. "
                "Write --new for a run of its own."
            )

    def _put_files(self, files: Any, root: str, run: Path) -> None:
        for name in FILES:
            if (run / name).is_file():
                files.put_file(str(run / name), f"{root}/{name}")
        for path in sorted((run / RUNGS).glob("*.safetensors")):
            if not files.exists(f"{root}/{RUNGS}/{path.name}"):
                files.makedirs(f"{root}/{RUNGS}", exist_ok=True)
                files.put_file(str(path), f"{root}/{RUNGS}/{path.name}")
        for name in LOGS:
            if (run / name).is_file():
                self._put_log(files, f"{root}/{name}", (run / name).read_bytes())

    def _put_log(self, files: Any, place: str, log: bytes) -> None:
        """Write the whole log the first time, over what another start has left; later write what is new into a file of
        its own, since no object store appends."""
        before, parts = self._logged.get(place), _parts(place)
        if before is None:
            files.pipe_file(place, log)
            if files.exists(parts):
                _remove_all(files, parts)
        elif len(log) > before:
            files.makedirs(parts, exist_ok=True)
            files.pipe_file(f"{parts}/{before:012d}", log[before:])
        self._logged[place] = len(log)

    def _try(self, do: Callable[[Any, str], Found]) -> Found:
        import fsspec

        try:
            if self._opened is None:
                self._opened = fsspec.core.url_to_fs(self.url)
            files, root = self._opened
            files.invalidate_cache()  # others write here too
            return do(files, root)
        except UserError:
            raise
        except Exception as error:  # every kind of storage has errors of its own
            raise Unreachable(
                f"cluster.storage: {hide(self.url)} fails: {str(error) or type(error).__name__}. Name a URL that "
                "every node may read and write, with credentials in the environment (s3:// needs s3fs, gs:// gcsfs)."
            ) from error


def of(cluster: Cluster, run: Path, owners: Sequence[str] = ()) -> Replica | None:
    """The replica of a run, where it has one."""
    return Replica(cluster.storage, run.name, owners) if cluster.storage else None


def _created(log: bytes) -> Mapping[str, Any]:
    """The event with which a log begins; empty where there is none, as in a trial's."""
    return next((event for event in events.parsed(log) if event["kind"] == "created"), {})


@contextmanager
def _draft(final: Path) -> Iterator[Path]:
    """A folder beside `final` for what comes in. It goes in the end, and now what a killed process left of one."""
    atomic_write.sweep(final)
    draft = atomic_write.Draft(final)
    try:
        inside = draft.folder / final.name
        inside.mkdir()
        yield inside
    finally:
        shutil.rmtree(draft.folder, ignore_errors=True)
        draft.release()


def _parts(log: str) -> str:
    """Where what came to a log later lies."""
    return log.removesuffix(".jsonl")


def _get_logs(files: Any, root: str, run: Path) -> None:
    for name in LOGS:
        if files.exists(f"{root}/{name}"):
            (run / name).write_bytes(_joined(files, f"{root}/{name}"))


def _joined(files: Any, place: str) -> bytes:
    """A log with the parts that go on where it ends; one that does not is another start's."""
    log: bytes = files.cat_file(place)
    paths = sorted(files.find(_parts(place)))
    # Not `files.cat`, to which the name of a run may be a pattern (`_remove_all`).
    for path, part in zip(paths, files.cat_ranges(paths, None, None, on_error="raise"), strict=True):
        if int(path.rsplit("/", 1)[-1]) == len(log):
            log += part
    return log


def _inner(place: str, root: str) -> PurePosixPath:
    """A file's path in the run. Raises `UserError` for one that leads out of it."""
    begin, whole = f"/{root.strip('/')}/", f"/{place.lstrip('/')}"
    parts = whole.removeprefix(begin).split("/")
    if not whole.startswith(begin) or {"", ".", ".."} & set(parts):
        told = f"{root} holds a file named {whole!r}, which leads out of the run; nothing was copied"
        raise UserError(told, code="unsafe_path")
    return PurePosixPath(*parts)


def _begun(files: Any, folder: str) -> set[str]:
    """Names of all checkpoints in `folder`, with those of which only a part is there."""
    return {path.split("/")[-2] for path in files.find(folder)}


def _complete(files: Any, folder: str) -> set[str]:
    return {path.split("/")[-2] for path in files.find(folder) if path.endswith(f"/{manifest.NAME}")}


def _telling(moved: Callable[[], None]) -> Any:
    """For fsspec, which calls it as bytes go; some storages do so for whole files alone, or never."""
    import fsspec

    return fsspec.Callback(hooks={"moved": lambda size, value, **rest: moved()})


def _put(files: Any, folder: Path, target: str, moved: Callable[[], None] = lambda: None) -> None:
    """A folder's files, the manifest last; one that is there already goes first, since it vouches for other files."""
    if files.exists(f"{target}/{manifest.NAME}"):
        files.rm_file(f"{target}/{manifest.NAME}")
    files.makedirs(target, exist_ok=True)
    for path in sorted(folder.rglob("*"), key=lambda path: path == folder / manifest.NAME):
        copy = f"{target}/{path.relative_to(folder).as_posix()}"
        if path.is_dir():
            files.makedirs(copy, exist_ok=True)
        else:
            files.put_file(str(path), copy, callback=_telling(moved))
            moved()


def _remove(files: Any, target: str) -> None:
    if files.exists(f"{target}/{manifest.NAME}"):
        files.rm_file(f"{target}/{manifest.NAME}")
    _remove_all(files, target)


def _remove_all(files: Any, folder: str) -> None:
    """A folder with what is in it. To fsspec a name with *, ? or [ is a pattern, on all storages but a mounted one: it
    would find nothing, or what is another run's. So such a folder is emptied file by file."""
    from fsspec.implementations.local import LocalFileSystem

    if isinstance(files, LocalFileSystem) or set("*?[").isdisjoint(folder):
        files.rm(folder, recursive=True)
        return
    for path in files.find(folder):
        files.rm_file(path)
