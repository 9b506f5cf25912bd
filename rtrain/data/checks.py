"""Checks of a store's rows: too few of a kind, or files that were changed while they were read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rtrain.config import Recipe
from rtrain.core.errors import UserError, quote_value
from rtrain.data import row_reader
from rtrain.data.sources import digests
from rtrain.tasks import base

MAX_TARGET_BYTES = 4_000_000_000
"""Most bytes of a multi-label task's targets, which are held in memory at once and stored in full."""


def check_files_unchanged(source: row_reader.DataSource, shard_rows: list[dict[str, Any]], root: Path) -> None:
    """Raise `UserError` if a file was changed between its digest and the reading of its rows.

    Its rows would be stored under the address of other rows. An entry of `shard_rows` without a shard name marks such a
    file.
    """
    numbers = dict.fromkeys(row["number"] for row in shard_rows if not row["shard"])  # a file is read in many parts
    changed = [source.files[number].uri.removeprefix("file://") for number in numbers]
    if changed:
        digests.clear_cache(root)
        listed = "\n  ".join([*changed[:10], *([f"and {len(changed) - 10} more"] if len(changed) > 10 else [])])
        raise UserError(
            f"changed between its digest and the reading of its rows, so that nothing was stored:\n  {listed}\n"
            "Start again once nothing writes to it.",
            code="changed_files",
        )


def check_splits_not_empty(recipe: Recipe, rows: Mapping[str, int]) -> None:
    """Raise `UserError` if a split has no rows, unless the settings ask for that; `rows` counts them by split."""
    if not any(rows.values()):
        reason = f"every row was quarantined (data.max_bad_rows={recipe.data.max_bad_rows:g})"
        raise UserError(
            f"data.path: {reason}, so no row is left to train on; correct the rows, or name other files", code="no_rows"
        )
    grouping = _explain_grouping(recipe)
    if not rows["train"]:
        location = f"column {recipe.data.split_column!r}" if recipe.data.split_column else "data.path"
        why = "" if recipe.data.split_column else f". {grouping}"
        raise UserError(
            f"{location}: no row to train on; {rows['valid']} are for validation, {rows['test']} for the test{why}",
            code="no_rows",
        )
    if recipe.data.split_column is not None and not rows["test"]:
        raise UserError(
            f"data.split_column: no row of column {recipe.data.split_column!r} is for the test; name some `test`",
            code="no_rows",
        )
    if rows["valid"] or recipe.data.valid_share == 0:
        return
    if recipe.data.split_column is not None:
        raise UserError(
            f"data.split_column: no row of column {recipe.data.split_column!r} is for validation; set "
            "data.valid_share=0.1 to take "
            "a tenth of the training rows, or 0 to train on all rows and keep the last weights",
            code="no_rows",
        )
    raise UserError(
        f"data.path: {rows['train']} training rows leave no validation row; give more rows (30 are a sane least). "
        f"{grouping}",
        code="too_few_rows",
    )


def _explain_grouping(recipe: Recipe) -> str:
    """Explain which rows stay in one split; with few distinct groups, all rows may."""
    if recipe.data.group_column is None:
        return "Rows of one text are all in one split"
    return (
        f"Rows with one value of the column {recipe.data.group_column!r}, blank ones too, are all in one split: "
        "if it "
        "has few values, name another column in data.group_column, or write null to group by text"
    )


def check_target_size(rows: int, labels: int) -> None:
    """Raise `UserError` if one target per label and row takes more than `MAX_TARGET_BYTES`."""
    size = 4 * rows * labels
    if size > MAX_TARGET_BYTES:
        raise UserError(
            f"data.label: {labels:,} labels of {rows:,} rows are {size / 1e9:,.1f} GB of targets, and at most "
            f"{MAX_TARGET_BYTES / 1e9:g} GB are allowed; leave out rare labels, or give fewer rows",
            code="too_large",
        )


LABEL_SEPARATORS = (";", "|", ",")
"""Characters that may separate several labels in one text."""


def check_separator(recipe: Recipe, labels: Mapping[str, int]) -> None:
    """Raise `UserError` if texts with one of `LABEL_SEPARATORS` would each be learned as one label by a task of
    several; `labels` counts the training rows of each. Where lists are how most rows have several labels, a sign is a
    part of a name."""
    data = recipe.data
    if (
        base.get_task(recipe.task).output != "labels"
        or data.separator is not None
        or recipe.distill.teacher is not None
    ):
        return
    plain = {label: rows for label, rows in labels.items() if not label.startswith("[")}
    counts = {sign: sum(rows for label, rows in plain.items() if sign in label) for sign in LABEL_SEPARATORS}
    sign = max(counts, key=lambda candidate: counts[candidate])
    if counts[sign] > sum(labels.values()) - sum(plain.values()):
        example = next(label for label in plain if sign in label)
        raise UserError(
            f"data.separator: {counts[sign]:,} training labels hold {sign!r}, e.g. {quote_value(example)}, and each "
            "would "
            f"be learned as one label; write --set \"data.separator='{sign}'\", or a sign that no label has where they "
            "are whole labels",
            code="no_separator",
        )


def check_out_of_scope_rows(recipe: Recipe, rows: int, num_out_of_scope: int) -> None:
    """Raise `UserError` unless the validation rows include rows with the label `data.out_of_scope_label` and rows
    without it.

    The threshold that tells the two apart is chosen on these rows. `rows` counts them all, `num_out_of_scope` those
    with it.
    """
    out_of_scope_label = recipe.data.out_of_scope_label
    if out_of_scope_label is not None and num_out_of_scope in (0, rows):
        raise UserError(
            f"data.out_of_scope_label: of {rows} validation rows {num_out_of_scope} have the label "
            f"{out_of_scope_label!r}, and "
            "the threshold is chosen on rows with it and without; add rows of the other kind, or set "
            "data.out_of_scope_label=null",
            code="too_few_rows",
        )


def describe_changes(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> list[str]:
    """List the files that were removed, added or changed between two stores, by `commit.hash_sources`."""
    messages = []
    for role in sorted({*before, *after}):
        old, new = before.get(role, {}), after.get(role, {})
        messages += [f"{name} was removed" for name in old if name not in new]
        messages += [f"{name} was added" for name in new if name not in old]
        messages += [f"{name} was changed" for name in old if name in new and old[name] != new[name]]
    return messages
