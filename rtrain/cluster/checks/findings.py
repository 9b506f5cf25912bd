"""What a check of a cluster's file has found, and what the file is read beside."""

import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

from rtrain.cluster.checks.yaml_document import Place

Level = Literal["error", "warning"]
Found = Iterator[tuple[int, str, str]]
"""Line, what is wrong, and what to write instead."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong in a file."""

    rule: str
    level: Level
    line: int
    what: str
    mend: str

    def text(self, file: str) -> str:
        return f"{file}:{self.line}: {self.level}: {self.what}; {self.mend} [{self.rule}]"


def shown(place: Place) -> str:
    """A place as people write it: `provider.region`, `setup_commands[2]`."""
    text = ""
    for key in place:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text or "the file"


@functools.cache
def installed(package: str) -> str | None:
    """The version of an installed package; None without."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Around:
    """What a file is read beside: the folder that it lies in, and what is installed where the check runs."""

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
