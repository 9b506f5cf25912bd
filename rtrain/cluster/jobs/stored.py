"""The log of a run's jobs where no cluster is needed: beside its folder, or in the storage that it was copied to."""

from pathlib import Path, PurePosixPath

from rtrain.cluster.jobs import copied, naming
from rtrain.errors import UserError, hide


def log(run: str, storage: str | None) -> str | None:
    """All lines of a run's jobs; None where there are none. `run`: its folder, or its name where storage is named."""
    beside = Path(naming.log_of(PurePosixPath(Path(run).expanduser().absolute())))
    if beside.is_file():
        return beside.read_text(encoding="utf-8", errors="replace")
    if storage is None:
        return None
    import fsspec

    try:
        files, place = fsspec.core.url_to_fs(f"{naming.stored(storage, PurePosixPath(run).name)}.log")
        found = copied.read(files, place)
    except Exception as error:  # every kind of storage has errors of its own
        shown, reason = hide(storage), hide(str(error)) or type(error).__name__
        raise UserError(f"--storage {shown} cannot be read: {reason}; see its address and your credentials") from None
    return None if found is None else found.decode("utf-8", errors="replace")
