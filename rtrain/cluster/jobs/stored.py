"""The log of a run's jobs where no cluster is needed: beside its folder, or in the storage that it was copied to."""

from pathlib import Path, PurePosixPath
from typing import Any

from rtrain.cluster.jobs import copied, naming
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
    found = copied.read(files, place)
    return None if found is None else found.decode("utf-8", errors="replace")


def _opened(storage: str) -> tuple[Any, str]:
    import fsspec

    try:
        files, root = fsspec.core.url_to_fs(storage.rstrip("/"))
    except (ImportError, ValueError) as error:
        raise UserError(f"{storage}: {error}") from None
    return files, root
