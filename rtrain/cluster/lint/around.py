"""What a cluster's file is read beside: the folder it lies in, and what is installed where the check runs."""

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path


@functools.cache
def installed(package: str) -> str | None:
    """The version of an installed package; None without."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Around:
    folder: Path
    version: Callable[[str], str | None] = installed
    verbs: Collection[str] = field(default=())
    """The verbs of rtrain's command line; none are checked where it is empty."""

    def constraints(self) -> dict[str, str]:
        """Version by package, of the constraints.txt that lies beside the file."""
        file = self.folder / "constraints.txt"
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        pairs = (line.split(";")[0].strip().split("==") for line in lines if "==" in line)
        return {name.strip().lower(): version.strip() for name, version in pairs}
