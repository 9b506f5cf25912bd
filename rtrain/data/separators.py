"""Several labels in one text: which sign stands between them, as the labels themselves show.

A sign is the separator where the parts that it makes stand in other labels too, in other company: `Delivery; Other`
beside `Delivery` and `Other; Account`. Nothing recurs where the sign is a part of the names: `Paris, France`. The rule
looks at each different label once, so that a frequent label proves no more than a rare one.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rtrain.config import Recipe
from rtrain.data import records
from rtrain.errors import Problem, quoted
from rtrain.tasks import base

SIGNS = (";", "|", ",")
MOST_ROWS = 20_000
"""Rows whose labels are looked at before a run: half a second of reading."""
RECURRING = 0.8
"""Least share of the parts, counted in each different label, that must stand in other labels too."""
DISTINCT = 0.5
"""The same of the different parts: a few frequent ones must not speak for all."""
DOUBTFUL = 0.05
"""Share of labels that look like lists from which on a task of one label per text says so."""
NO_SIGN = "@@"
"""Named in messages as a sign that is in no label."""


class Candidate(NamedTuple):
    """A sign that stands in labels."""

    sign: str
    rows: int
    """Rows whose label holds it."""
    example: str
    safe: bool
    """The parts that it makes recur: it is a separator."""


class Found(NamedTuple):
    """What the labels of some rows show."""

    rows: int
    """Rows with a label that is a plain text."""
    lists: int
    """Rows whose label is a list."""
    candidates: tuple[Candidate, ...]

    @property
    def separator(self) -> Candidate | None:
        """The only sign that is safe."""
        safe = [one for one in self.candidates if one.safe]
        return safe[0] if len(safe) == 1 else None

    @property
    def by_lists(self) -> bool:
        """Lists are how these rows have several labels: then a sign in a plain text is a part of its name. A few
        lists, such as the empty ones of rows without a label, do not say so."""
        return self.lists > max((one.rows for one in self.candidates), default=0)


def found(labels: Mapping[str, int]) -> Found:
    """What the labels show; `labels` counts the rows of each different one."""
    plain = {label: rows for label, rows in labels.items() if label and not is_list(label)}
    candidates = []
    for sign in SIGNS:
        having = {label: rows for label, rows in plain.items() if sign in label}
        if having:
            most = max(having, key=lambda label: having[label])
            candidates.append(Candidate(sign, sum(having.values()), most, _recurs(plain, sign)))
    lists = sum(rows for label, rows in labels.items() if is_list(label))
    return Found(sum(plain.values()), lists, tuple(candidates))


def is_list(label: str) -> bool:
    """Whether a label is written as a list, in JSON or nearly so."""
    return label.startswith("[") and label.endswith("]")


def parts(label: str, sign: str) -> list[str]:
    return [part.strip() for part in label.split(sign) if part.strip()]


def _recurs(labels: Iterable[str], sign: str) -> bool:
    """Whether the parts of the labels with that sign stand in other combinations too."""
    combinations = {frozenset(parts(label, sign)) for label in labels}
    in_how_many = Counter(part for combination in combinations for part in combination)
    several = [part for combination in combinations if len(combination) > 1 for part in combination]
    if not several:
        return False
    recurring = [part for part in several if in_how_many[part] > 1]
    distinct = len(set(recurring)) / len(set(several))
    return len(recurring) >= RECURRING * len(several) and distinct >= DISTINCT


# ------------------------------------------------------------------------------------------------------ before a run


def shown(recipe: Recipe, source: records.Source) -> Found:
    """What the labels of the first training rows show; nothing where they are not to be looked at."""
    if not _applies(recipe):
        return Found(0, 0, ())
    pieces = (piece for piece in source.pieces if piece.role == "train")
    rows = itertools.chain.from_iterable(records.read(piece, recipe.data) for piece in pieces)
    return found(Counter(row.label for row in itertools.islice(rows, MOST_ROWS) if row.reason is None))


def _applies(recipe: Recipe) -> bool:
    """Whether the labels are to be looked at: one column of texts without a separator. A student learns the rows of its
    teacher as these were read."""
    one = isinstance(recipe.data.label, str) and recipe.data.separator is None and recipe.distill.teacher is None
    return one and base.get(recipe.task).output in ("classes", "labels")


def problems(recipe: Recipe, seen: Found) -> list[Problem]:
    """The problem of a task of several labels whose plain texts may hold several, and nobody can tell by which sign."""
    if base.get(recipe.task).output != "labels" or seen.by_lists or seen.separator or not seen.candidates:
        return []
    most = max(seen.candidates, key=lambda one: one.rows)
    reason = (
        f"{most.rows:,} of the first {seen.rows:,} labels hold a sign that may stand between several, "
        f"e.g. {quoted(most.example)}, and each would be learned as one label"
    )
    options = " or ".join(f"{setting(one.sign)} ({one.rows:,} of them)" for one in seen.candidates)
    fix = f"write {options}; where they are whole labels, a sign that is in none: {setting(NO_SIGN)}"
    return [Problem("data.separator", None, reason, fix)]


def setting(sign: str) -> str:
    """The option that names a separator, for a shell; the inner quotes are YAML's."""
    return f"--set \"data.separator='{sign}'\""


def late_problem(recipe: Recipe, labels: Mapping[str, int]) -> str | None:
    """Why rows must not be stored whose labels hold a separator that the first rows did not show, or None."""
    if not _applies(recipe) or base.get(recipe.task).output != "labels":
        return None
    seen = found(labels)
    sign = seen.separator
    if sign is None or seen.by_lists:
        return None
    return (
        f"data.separator: {sign.rows:,} of {seen.rows:,} training labels hold {sign.sign!r} between several, e.g. "
        f"{quoted(sign.example)}, and each would be learned as one label; write {setting(sign.sign)}"
    )


def told(recipe: Recipe, seen: Found) -> dict[str, Any] | None:
    """What a run's log says of its labels: the separator that was found, or what is doubtful about them; or None."""
    separator, rows = seen.separator, seen.rows + seen.lists
    if not rows:
        return None
    if base.get(recipe.task).output == "labels":
        if separator and not seen.by_lists:
            return {"what": "separator", **_of(separator, rows)}
        return None if seen.lists or seen.candidates else {"what": "single", "of": rows}
    if separator and separator.rows >= DOUBTFUL * rows:
        return {"what": "lists", **_of(separator, rows)}
    return {"what": "lists", "rows": seen.lists, "of": rows} if seen.lists >= DOUBTFUL * rows else None


def _of(separator: Candidate, rows: int) -> dict[str, Any]:
    return {"sign": separator.sign, "rows": separator.rows, "of": rows, "example": separator.example}
