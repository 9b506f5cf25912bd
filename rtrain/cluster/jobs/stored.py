"""A run's log and folder where no cluster is needed: in its folder, or in the storage that it was copied to."""

from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from rtrain.cluster.jobs import naming
from rtrain.errors import UserError


def log(run: str, storage: str | None) -> str | None:
    """All lines of a run's jobs; None where there are none. `run`: its folder, or its name where storage is named."""
    beside = Path(naming.log_of(PurePosixPath(Path(run).expanduser().absolute())))
    if beside.is_file():
        return beside.read_text(encoding="utf-8", errors="replace")
    if storage is None:
        return None
    files, root = _opened(storage)
    place = f"{root}/{naming.LOGS}/{PurePosixPath(run).name}.log"
    return files.cat_file(place).decode("utf-8", errors="replace") if files.exists(place) else None


def fetch(name: str, storage: str, to: Path, say: Callable[[str], None]) -> int:
    """Copy what the storage holds of a run, its log included, into the new folder `to`; returns how many bytes."""
    if to.exists():
        raise UserError(f"{to} is there already; name another folder with --to")
    files, root = _opened(storage)
    if not files.exists(f"{root}/{name}"):
        raise UserError(f"{storage} holds no run {name}")
    size, begin = 0, f"/{root.strip('/')}/{name}/"
    for place in sorted(files.find(f"{root}/{name}")):
        inner = f"/{place.lstrip('/')}".removeprefix(begin)
        target = to / inner
        target.parent.mkdir(parents=True, exist_ok=True)
        files.get_file(place, str(target))
        size += target.stat().st_size
    kept = f"{root}/{naming.LOGS}/{name}.log"
    if files.exists(kept):
        files.get_file(kept, str(to / "job.log"))
    say(f"{to}: {size / 1e6:.1f} MB")
    return size


def _opened(storage: str) -> tuple[Any, str]:
    import fsspec

    try:
        files, root = fsspec.core.url_to_fs(storage.rstrip("/"))
    except (ImportError, ValueError) as error:
        raise UserError(f"{storage}: {error}") from None
    return files, root
