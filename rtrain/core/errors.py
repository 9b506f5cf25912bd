"""Errors that a user can act on. The command line prints them without a traceback."""

import difflib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One invalid setting: its name and value, the reason, and the value to write instead (`fix`).

    `code` names the cause in snake_case, independent of the wording.
    """

    field: str
    value: Any
    reason: str
    fix: str
    _: KW_ONLY
    code: str

    def __str__(self) -> str:
        value_text = "" if self.value is None else f"={_abbreviate(self.value)}"
        return f"{self.field}{value_text}: {self.reason}; {self.fix}"


class UserError(Exception):
    """An error that the user can fix; the message names the problem, its place and the fix. Exit code 1.

    `code` names the cause in snake_case, independent of the wording.
    """

    exit_code = 1
    code = "failed"
    problems: tuple[Problem, ...] = ()
    """The invalid settings; empty for other errors."""

    def __init__(self, message: str, *, code: str | None = None):
        super().__init__(message)
        if code is not None:
            self.code = code

    def to_document(self) -> dict[str, Any]:
        """Return the JSON object that a command prints on stdout with `--json`."""
        return {"error": {"code": self.code, "message": str(self), "problems": []}}


class CommandInterruptedError(UserError):
    """A signal ended the command; the message has the command to resume, `exit_code` the signal."""

    code = "interrupted"

    def __init__(self, message: str, exit_code: int):
        self.exit_code = exit_code
        super().__init__(message)


class ConfigError(UserError):
    """An invalid configuration, with all problems. Exit code 2."""

    exit_code = 2
    code = "config"

    def __init__(self, problems: Sequence[Problem], advice: str | None = None):
        self.problems, self.advice = tuple(problems), advice
        super().__init__("\n".join([*map(str, problems), *([advice] if advice else [])]))

    def to_document(self) -> dict[str, Any]:
        problems = [
            {"field": problem.field, "code": problem.code, "message": str(problem)} for problem in self.problems
        ]
        return {"error": {"code": self.code, "message": str(self), "problems": problems}}

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[tuple[Problem, ...], str | None]]:
        return type(self), (self.problems, self.advice)  # for pickling, from a Ray worker


class TemporaryFailureError(UserError):
    """A temporary failure; another attempt with --resume continues. Exit code 75 (EX_TEMPFAIL), at which a batch system
    submits a job again."""

    exit_code = 75
    code = "temporary_failure"


def escape(text: str) -> str:
    """Escape control characters and lone surrogates, so that hostile text cannot control a terminal. Letters of every
    script stay."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def quote_value(value: object, limit: int = 60) -> str:
    """Format a value of a row on one line, escaped."""
    value_text = repr(value)  # repr escapes the same characters
    return value_text if len(value_text) <= limit else value_text[: limit - 3] + "..."


def find_nearest_file(name: str, names: Iterable[str]) -> str | None:
    """Return the existing name most similar to a missing file's name, or None. Suffixes are ignored: most names share
    them."""
    stems = {candidate.partition(".")[0] or candidate: candidate for candidate in sorted(names, reverse=True)}
    matches = difflib.get_close_matches(name.partition(".")[0] or name, list(stems), n=1)
    return stems[matches[0]] if matches else None


def suggest_path(path: Path) -> str | None:
    """Return `did you mean ...?` for a missing path, with the sibling of the most similar name; None without a similar
    name. Hidden names are ignored."""
    missing = path
    while not missing.parent.is_dir():
        missing = missing.parent
    is_readable = os.access(missing.parent, os.R_OK)
    sibling_names = [name for name in os.listdir(missing.parent) if name[0] != "."] if is_readable else []
    closest_name = find_nearest_file(missing.name, sibling_names)
    if closest_name is None or missing.exists():
        return None
    closest_path = missing.with_name(closest_name)
    suggested_path = closest_path / path.relative_to(missing)
    return f"did you mean {suggested_path if suggested_path.exists() else closest_path}?"


def _abbreviate(value: Any, limit: int = 80) -> str:
    """Format `value` on one line, escaped. A long value is shortened in the middle: the end of a path identifies the
    file."""
    text = escape(value) if isinstance(value, str) else repr(value)
    if len(text) <= limit:
        return text
    head_length = (limit - 3) // 2
    return f"{text[:head_length]}...{text[head_length + 3 - limit :]}"


def redact(text: str) -> str:
    """Remove user and password from URLs in `text`, passwords from their queries, and the whole query of web URLs,
    which is a usable signature in presigned URLs."""
    # A database's password may contain a slash. A path with an @ after a port looks the same, and is removed too.
    text = re.sub(r"://(?:[^/:@\s]*:[^@\s]*|[^/@\s]+)@", "://***@", text)
    text = re.sub(r"(https?://[^?\s]+)\?[^\s\"',]+", r"\1?***", text)
    return re.sub(r"([?&](?:ssl)?(?:password|passwd)=)[^&\s\"',]+", r"\1***", text)
