"""Reasons to refuse the rows of a store: too few of a kind, or files that were changed while they were read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rtrain.config import Recipe
from rtrain.core.errors import UserError, quoted
from rtrain.data import row_reader
from rtrain.data.sources import digests
from rtrain.tasks import base

TARGET_BYTES = 4_000_000_000
"""Most bytes of the targets of a task of several labels, which are held at once and stored in full."""


def changed_files(source: row_reader.Source, shards: list[dict[str, Any]], root: Path) -> None:
    """Raise `UserError` if a file was changed between its digest and the reading of its rows.

    Its rows would lie under the address of other rows. A row of `shards` without a name tells of such a file.
    """
    numbers = dict.fromkeys(row["number"] for row in shards if not row["shard"])  # a file is read in many parts
    changed = [source.pieces[number].uri.removeprefix("file://") for number in numbers]
    if changed:
        digests.forget(root)
        listed = "\n  ".join([*changed[:10], *([f"and {len(changed) - 10} more"] if len(changed) > 10 else [])])
        raise UserError(
            f"changed between its digest and the reading of its rows, so that nothing was stored:\n  {listed}\n"
            "Start again once nothing writes to it.",
            code="changed_files",
        )


def empty_splits(recipe: Recipe, rows: Mapping[str, int]) -> None:
    """Raise `UserError` if a split has no rows, unless the settings ask for that; `rows` counts them by split."""
    if not any(rows.values()):
        aside = f"every row was set aside (data.max_bad_rows={recipe.data.max_bad_rows:g})"
        raise UserError(
            f"data.path: {aside}, so that none is left to train on; mend the rows, or give others", code="no_rows"
        )
    together = _together(recipe)
    if not rows["train"]:
        where = f"column {recipe.data.split!r}" if recipe.data.split else "data.path"
        why = "" if recipe.data.split else f". {together}"
        raise UserError(
            f"{where}: no row to train on; {rows['valid']} are for validation, {rows['test']} for the test{why}",
            code="no_rows",
        )
    if recipe.data.split is not None and not rows["test"]:
        raise UserError(
            f"data.split: no row of column {recipe.data.split!r} is for the test; name some `test`", code="no_rows"
        )
    if rows["valid"] or recipe.data.valid_share == 0:
        return
    if recipe.data.split is not None:
        raise UserError(
            f"data.split: no row of column {recipe.data.split!r} is for validation; set data.valid_share=0.1 to take "
            "a tenth of the training rows, or 0 to train on all rows and keep the last weights",
            code="no_rows",
        )
    raise UserError(
        f"data.path: {rows['train']} training rows leave no validation row; give more rows (30 are a sane least). "
        f"{together}",
        code="too_few_rows",
    )


def _together(recipe: Recipe) -> str:
    """Which rows stay in one split: of few different ones all may."""
    if recipe.data.split_by is None:
        return "Rows of one text are all in one split"
    return (
        f"Rows with one value of the column {recipe.data.split_by!r}, blank ones too, are all in one split: where it "
        "has few values, name another column by data.split_by, or null to go by the texts"
    )


def too_many_targets(rows: int, labels: int) -> None:
    """Raise `UserError` if a yes or no for each label of each row takes more than `TARGET_BYTES`."""
    size = 4 * rows * labels
    if size > TARGET_BYTES:
        raise UserError(
            f"data.label: {labels:,} labels of {rows:,} rows are {size / 1e9:,.1f} GB of targets, and at most "
            f"{TARGET_BYTES / 1e9:g} GB are allowed; leave out rare labels, or give fewer rows",
            code="too_large",
        )


SIGNS = (";", "|", ",")
"""Signs that may stand between several labels in one text."""


def unseparated_labels(recipe: Recipe, labels: Mapping[str, int]) -> None:
    """Raise `UserError` if texts with one of `SIGNS` would each be learned as one label by a task of several; `labels`
    counts the training rows of each. Where lists are how most rows have several labels, a sign is a part of a name."""
    data = recipe.data
    if base.get(recipe.task).output != "labels" or data.separator is not None or recipe.distill.teacher is not None:
        return
    plain = {label: rows for label, rows in labels.items() if not label.startswith("[")}
    counts = {sign: sum(rows for label, rows in plain.items() if sign in label) for sign in SIGNS}
    sign = max(counts, key=lambda one: counts[one])
    if counts[sign] > sum(labels.values()) - sum(plain.values()):
        example = next(label for label in plain if sign in label)
        raise UserError(
            f"data.separator: {counts[sign]:,} training labels hold {sign!r}, e.g. {quoted(example)}, and each would "
            f"be learned as one label; write --set \"data.separator='{sign}'\", or a sign that no label has where they "
            "are whole labels",
            code="no_separator",
        )


def without_outside(recipe: Recipe, rows: int, named: int) -> None:
    """Raise `UserError` unless the validation rows include rows with the label `data.outside` and rows without it.

    The threshold that tells the two apart is chosen on these rows. `rows` counts them all, `named` those with it.
    """
    outside = recipe.data.outside
    if outside is not None and named in (0, rows):
        raise UserError(
            f"data.outside: of {rows} validation rows {named} have the label {outside!r}, and "
            "the threshold is chosen on rows with it and without; add rows of the other kind, or set data.outside=null",
            code="too_few_rows",
        )


def changes(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> list[str]:
    """What happened to which file between two stores, by their origins (`commit.origin`)."""
    found = []
    for role in sorted({*before, *after}):
        old, new = before.get(role, {}), after.get(role, {})
        found += [f"{name} was removed" for name in old if name not in new]
        found += [f"{name} was added" for name in new if name not in old]
        found += [f"{name} was changed" for name in old if name in new and old[name] != new[name]]
    return found
