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
    """One thing that is wrong: the setting, the value found, why it cannot work, and what to write instead.

    `code` names the cause in snake_case and does not change with the wording.
    """

    field: str
    value: Any
    reason: str
    fix: str
    _: KW_ONLY
    code: str

    def __str__(self) -> str:
        shown = "" if self.value is None else f"={_short(self.value)}"
        return f"{self.field}{shown}: {self.reason}; {self.fix}"


class UserError(Exception):
    """Something outside rtrain's code is wrong; the message says what, where, and what to do. Exit code 1.

    `code` names the cause in snake_case and does not change with the wording.
    """

    exit_code = 1
    code = "failed"

    def __init__(self, message: str, *, code: str | None = None):
        super().__init__(message)
        if code is not None:
            self.code = code

    def to_document(self) -> dict[str, Any]:
        """What a command prints on stdout by `--json`."""
        return {"error": {"code": self.code, "message": str(self), "problems": []}}


class Ended(UserError):
    """The command was ended from outside; the message says how to go on, `exit_code` by which signal."""

    code = "ended"

    def __init__(self, message: str, exit_code: int):
        self.exit_code = exit_code
        super().__init__(message)


class ConfigError(UserError):
    """The configuration cannot work. Holds every problem found, not only the first. Exit code 2."""

    exit_code = 2
    code = "config"

    def __init__(self, problems: Sequence[Problem], advice: str | None = None):
        self.problems, self.advice = tuple(problems), advice
        super().__init__("\n".join([*map(str, problems), *([advice] if advice else [])]))

    def to_document(self) -> dict[str, Any]:
        problems = [{"field": each.field, "code": each.code, "message": str(each)} for each in self.problems]
        return {"error": {"code": self.code, "message": str(self), "problems": problems}}

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[tuple[Problem, ...], str | None]]:
        return type(self), (self.problems, self.advice)  # pickling must keep both, on the way back from a Ray worker


class TryAgain(UserError):
    """Nothing is wrong; the rest is for another start, with --resume. Exit code 75 (EX_TEMPFAIL), at which a batch
    system submits a job again."""

    exit_code = 75
    code = "try_again"


def visible(text: str) -> str:
    """The text with escapes in place of what steers a terminal or is half of a character: hostile text cannot write on
    it. Letters of every script stay as they are, so that their readers know their own files and labels."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def quoted(value: object, limit: int = 60) -> str:
    """A value of a row on one line, as `visible` has it."""
    shown = repr(value)  # which escapes the same
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def find_nearest_file(name: str, names: Iterable[str]) -> str | None:
    """The file's name most like one that is not there; None where none is. Endings do not count: most names share
    them."""
    stems = {each.partition(".")[0] or each: each for each in sorted(names, reverse=True)}
    near = difflib.get_close_matches(name.partition(".")[0] or name, list(stems), n=1)
    return stems[near[0]] if near else None


def meant(path: Path) -> str | None:
    """`did you mean ...?` of a path that is not there: what stands beside it under the name most like its own. None
    where nothing is like it. Hidden names are nobody's meaning."""
    missing = path
    while not missing.parent.is_dir():
        missing = missing.parent
    readable = os.access(missing.parent, os.R_OK)
    beside = [name for name in os.listdir(missing.parent) if name[0] != "."] if readable else []
    near = find_nearest_file(missing.name, beside)
    if near is None or missing.exists():
        return None
    found = missing.with_name(near)
    whole = found / path.relative_to(missing)
    return f"did you mean {whole if whole.exists() else found}?"


def _short(value: Any, limit: int = 80) -> str:
    """`value` on one line, as `visible` has it. The middle of a long one is left out: the end of a path says which file
    is meant."""
    text = visible(value) if isinstance(value, str) else repr(value)
    if len(text) <= limit:
        return text
    begins = (limit - 3) // 2
    return f"{text[:begins]}...{text[begins + 3 - limit :]}"


def hide(text: str) -> str:
    """`text` without the user and password of its addresses, without the passwords of their queries, and without the
    whole query of web addresses, which in presigned ones is a signature that whoever reads it may use."""
    # A database's password may hold a slash. A path with an @ behind a port looks alike, and is hidden with it.
    text = re.sub(r"://(?:[^/:@\s]*:[^@\s]*|[^/@\s]+)@", "://***@", text)
    text = re.sub(r"(https?://[^?\s]+)\?[^\s\"',]+", r"\1?***", text)
    return re.sub(r"([?&](?:ssl)?(?:password|passwd)=)[^&\s\"',]+", r"\1***", text)
