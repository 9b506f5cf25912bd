"""Rules for cluster files and manifests: their findings and context."""

import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

Level = Literal["error", "warning"]
RuleResults = Iterator[tuple[int, str, str]]
"""Line, message and fix."""


@dataclass(frozen=True)
class LintFinding:
    rule: str
    level: Level
    line: int
    message: str
    fix: str

    def format(self, file: str) -> str:
        return f"{file}:{self.line}: {self.level}: {self.message}; {self.fix} [{self.rule}]"


@functools.cache
def installed_version(package: str) -> str | None:
    """Version of an installed package; None if it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class LintContext:
    """Context of a check: the folder of the file, and the verbs."""

    folder: Path
    verbs: Collection[str] = field(default=())
    """Verbs of rtrain's command line; empty disables the check."""

    def load_constraints(self) -> dict[str, str]:
        """Versions in the constraints.txt beside the file."""
        file = self.folder / "constraints.txt"
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        pairs = (line.split(";")[0].strip().split("==") for line in lines if "==" in line)
        return {name.strip().lower(): version.strip() for name, version in pairs}
