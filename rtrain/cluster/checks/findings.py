"""Findings of the checks of a cluster file, and their context."""

import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

from rtrain.cluster.checks.yaml_document import YamlPath

Level = Literal["error", "warning"]
RuleResults = Iterator[tuple[int, str, str]]
"""Line, message and fix."""

FILL_IN = "FILL-IN"
"""Text of a cluster file at values that the user must write."""


@dataclass(frozen=True)
class LintFinding:
    """A problem of a file."""

    rule: str
    level: Level
    line: int
    message: str
    fix: str

    def format(self, file: str) -> str:
        return f"{file}:{self.line}: {self.level}: {self.message}; {self.fix} [{self.rule}]"


def format_path(path: YamlPath) -> str:
    """Format a YAML path: `provider.region`, `setup_commands[2]`."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text or "the file"


@functools.cache
def installed_version(package: str) -> str | None:
    """Version of an installed package; None if it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class LintContext:
    """Context of a check: the folder of the file, and the installed versions."""

    folder: Path
    get_version: Callable[[str], str | None] = installed_version
    verbs: Collection[str] = field(default=())
    """Verbs of rtrain's command line; empty disables the check."""

    def load_constraints(self) -> dict[str, str]:
        """Versions in the constraints.txt beside the file."""
        file = self.folder / "constraints.txt"
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        pairs = (line.split(";")[0].strip().split("==") for line in lines if "==" in line)
        return {name.strip().lower(): version.strip() for name, version in pairs}
