"""A run's copy at a URL of any kind that fsspec knows: what a run whose folder is lost is resumed from.

<cluster.storage>/<run>/
    owner                       the start that may write here: an earlier one that is still alive is refused
    config.yaml events.jsonl decisions.json      as of the newest checkpoint here
    checkpoints/update-00000120/...              a checkpoint's files, and its MANIFEST.json last
    artifact/...                                 of a finished run

Object stores have no rename, so a manifest makes the checkpoint: what an interrupted copy leaves has none, and what an
interrupted deletion leaves has lost it first. Whatever comes back is verified like any other checkpoint.
"""

import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rtrain import manifest
from rtrain.config import Cluster
from rtrain.errors import UserError

OWNER = "owner"
FILES = ("config.yaml", "events.jsonl", "decisions.json")
"""Of the run folder: what a resume reads, beside the checkpoints."""
Found = TypeVar("Found")


class Unreachable(UserError):
    """The storage cannot be read or written; what was trained is in the run folder all the same."""


class Lost(UserError):
    """Another start has taken the run over: whatever this one would still write is not wanted."""


class Replica:
    """The copy of the run `name` under the URL `storage`. Calls go to the network and may raise `Unreachable`."""

    def __init__(self, storage: str, name: str, token: str = ""):
        """`token` is what `claim` returned to whoever started the run."""
        self.url = f"{storage.rstrip('/')}/{name}"
        self._token = token
        self._opened: tuple[Any, str] | None = None

    def exists(self) -> bool:
        """Whether a run was ever copied here."""
        return self._try(lambda files, root: bool(files.exists(f"{root}/config.yaml")))

    def claim(self) -> str:
        """Become the one start that may write here; returns its token. Shows at once whether the storage works."""
        token = uuid.uuid4().hex

        def write(files: Any, root: str) -> None:
            files.makedirs(root, exist_ok=True)
            files.pipe_file(f"{root}/{OWNER}", token.encode())
            if files.cat_file(f"{root}/{OWNER}") != token.encode():
                raise OSError("what was written does not come back")

        self._try(write)
        return token

    def restore(self, run: Path) -> None:
        """Bring back what `--resume` reads of a run whose folder is lost; the checkpoints come when they are wanted."""

        def read(files: Any, root: str) -> None:
            run.mkdir(parents=True, exist_ok=True)
            for name in FILES:
                if files.exists(f"{root}/{name}"):
                    files.get_file(f"{root}/{name}", str(run / name))

        self._try(read)

    def push(self, run: Path, checkpoints: Sequence[Path], moved: Callable[[], None] = lambda: None) -> None:
        """Make the checkpoints here those of the run folder; `moved` is called as pieces of them arrive. Raises `Lost`
        where another start has claimed the run."""

        def write(files: Any, root: str) -> None:
            if files.cat_file(f"{root}/{OWNER}").decode() != self._token:
                raise Lost(
                    f"another process has taken up the run at {self.url}; this one, in {run}, ends. "
                    "Write --new for a run of its own."
                )
            present = _complete(files, f"{root}/checkpoints")
            for path in checkpoints:
                if path.name not in present:
                    _put(files, path, f"{root}/checkpoints/{path.name}", moved)
            for name in FILES:
                if (run / name).is_file():
                    files.put_file(str(run / name), f"{root}/{name}")
            # Only now: until the newer ones are whole, the older ones are all there is.
            for name in present - {path.name for path in checkpoints}:
                _remove(files, f"{root}/checkpoints/{name}")

        self._try(write)

    def push_artifact(self, run: Path) -> None:
        """Copy a finished run's artefact, and its log to the end."""
        self._try(lambda files, root: _put(files, run / "artifact", f"{root}/artifact"))
        self._try(lambda files, root: [files.put_file(str(run / name), f"{root}/{name}") for name in FILES])

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
                draft.rename(final)
            finally:
                shutil.rmtree(draft, ignore_errors=True)

        self._try(read)

    def drop(self, name: str) -> None:
        """Remove a checkpoint that came back damaged: one of that name may be made again."""
        self._try(lambda files, root: _remove(files, f"{root}/checkpoints/{name}"))

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
                f"cluster.storage: {self.url} fails: {str(error) or type(error).__name__}. Name a URL that "
                "every node may read and write, with credentials in the environment (s3:// needs s3fs, gs:// gcsfs)."
            ) from error


def of(cluster: Cluster, run: Path, token: str = "") -> Replica | None:
    """The replica of a run, where it has one."""
    return Replica(cluster.storage, run.name, token) if cluster.storage else None


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
    files.rm_file(f"{target}/{manifest.NAME}")
    files.rm(target, recursive=True)
