"""Checks of a store's rows: bad rows and their quarantine, splits without rows, files changed during reading."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet

from rtrain.config import Recipe
from rtrain.core.errors import UserError, quote_value
from rtrain.data import row_reader, sources
from rtrain.tasks import base

MAX_TARGET_BYTES = 4_000_000_000
"""Most bytes of a multi-label task's targets, which are held in memory at once and stored in full."""


def check_files_unchanged(source: row_reader.DataSource, shard_rows: list[dict[str, Any]], root: Path) -> None:
    """Raise `UserError` if a file was changed between its digest and the reading of its rows.

    Its rows would be stored under the address of other rows. An entry of `shard_rows` without a shard name marks such a
    file, or has counts of rows and no `entry`.
    """
    # A file is read in many parts.
    numbers = dict.fromkeys(row["number"] for row in shard_rows if not row["shard"] and row["entry"])
    changed = [source.files[number].uri.removeprefix("file://") for number in numbers]
    if changed:
        sources.clear_cache(root)
        listed = "\n  ".join([*changed[:10], *([f"and {len(changed) - 10} more"] if len(changed) > 10 else [])])
        raise UserError(
            f"changed between its digest and the reading of its rows, so that nothing was stored:\n  {listed}\n"
            "Start again once nothing writes to it.",
            code="changed_files",
        )


def check_splits_not_empty(recipe: Recipe, rows: Mapping[str, int]) -> None:
    """Raise `UserError` if a split has no rows, unless the settings ask for that; `rows` counts them by split."""
    if not any(rows.values()):
        reason = (
            f"every row was quarantined (data.max_bad_rows={recipe.data.max_bad_rows:g}), so no row is left to train on"
        )
        raise UserError(f"data.path: {reason}; correct the rows, or name other files", code="no_rows")
    grouping = "Rows of one text are all in one split"
    if recipe.data.group_column is not None:  # with few distinct groups, all rows may be in one split
        grouping = (
            f"Rows with one value of the column {recipe.data.group_column!r}, blank ones too, are all in one split: if "
            "it has few values, name another column in data.group_column, or write null to group by text"
        )
    if recipe.data.split_time is not None:
        grouping = "Rows of one time are in one split: correct data.split_time"
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
            "data.valid_share=0.1 to take a tenth of the training rows, or 0 to train on all rows and keep the last "
            "weights",
            code="no_rows",
        )
    raise UserError(
        f"data.path: {rows['train']} training rows leave no validation row; give more rows (30 are a sane least). "
        f"{grouping}",
        code="too_few_rows",
    )


def check_row_weights(recipe: Recipe, weights: npt.NDArray[np.float64]) -> None:
    """Raise `UserError` unless some training row has a weight in the loss."""
    if len(weights) and not weights.any():
        column = recipe.data.weight_column
        problem = f"data.weight_column: the weight {column!r} of all {len(weights):,} training rows is 0"
        raise UserError(f"{problem}; write a weight above 0 for the rows to learn", code="no_weight")


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
    has_single_labels = base.get_task(recipe.task).output != "labels"
    if has_single_labels or recipe.data.separator is not None or recipe.distill.teacher is not None:
        return
    plain = {label: rows for label, rows in labels.items() if not label.startswith("[")}
    counts = {sign: sum(rows for label, rows in plain.items() if sign in label) for sign in LABEL_SEPARATORS}
    sign = max(counts, key=lambda candidate: counts[candidate])
    if counts[sign] > sum(labels.values()) - sum(plain.values()):
        example = next(label for label in plain if sign in label)
        raise UserError(
            f"data.separator: {counts[sign]:,} training labels hold {sign!r}, e.g. {quote_value(example)}, and each "
            f"would be learned as one label; write --set \"data.separator='{sign}'\", or a sign that no label has "
            "where they are whole labels",
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
            f"{out_of_scope_label!r}, and the threshold is chosen on rows with it and without; add rows of the other "
            "kind, or set data.out_of_scope_label=null",
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


# ----------------------------------------------------------------------------------------------------- quarantined rows

FILE_NAME = "quarantine.parquet"
MAX_REASONS = 3
UNKNOWN_LABEL_REASON = "its label occurs in no training row; add rows of it"
MAX_NAMED_LABELS = 5
"""Most labels named in one message."""
RowLocator = Callable[[int], str]
"""Maps the number of a row in an unfinished store to its location, as file:line."""


class QuarantinedRows(NamedTuple):
    """Bad rows of an unfinished store: their numbers, ascending, and the reason of each."""

    rows: npt.NDArray[np.int64]
    reasons: pa.Array

    def merge(self, other: "QuarantinedRows") -> "QuarantinedRows":
        """These rows and the other's, ascending."""
        rows = np.concatenate([self.rows, other.rows])
        order = np.argsort(rows, kind="stable")
        return QuarantinedRows(rows[order], pa.concat_arrays([self.reasons, other.reasons]).take(pa.array(order)))


def check_bad_row_share(recipe: Recipe, bad: QuarantinedRows, total_rows: int, locate_row: RowLocator) -> None:
    """Raise `UserError` if more than the share `data.max_bad_rows` of `total_rows` rows is bad, naming the first
    five."""
    first = zip(bad.rows[:5], bad.reasons[:5].to_pylist(), strict=True)
    examples = [f"{locate_row(row)}: {reason}" for row, reason in first]
    row_reader.check_bad_row_share(len(bad.rows), total_rows, examples, recipe.data)


def quarantine_unknown_labels(
    rows: npt.NDArray[np.int64],
    from_eval_file: npt.NDArray[np.bool_],
    labels: pa.ChunkedArray,
    locate_row: RowLocator,
    training_labels: Sequence[str],
) -> QuarantinedRows:
    """Quarantine the rows whose label is not in `training_labels`.

    `from_eval_file` marks every row of the store that comes from a validation or test file. Such a label in these files
    is the user's mistake and raises `UserError`. Elsewhere the hash split has moved all rows of a rare label out of
    training.
    """
    eval_rows = rows[from_eval_file[rows]]
    if len(eval_rows):
        first = (f"{locate_row(row)}: label {quote_value(labels[int(row)].as_py())}" for row in eval_rows[:5])
        listed = "\n  ".join(first)
        raise UserError(
            f"data.label: {len(eval_rows)} rows have a label that no training row has:\n  {listed}\n"
            f"Training rows have {format_labels(training_labels)}. Add training rows of it, or correct these labels.",
            code="unknown_labels",
        )
    return QuarantinedRows(rows, pa.array([UNKNOWN_LABEL_REASON] * len(rows), pa.string()))


def format_labels(labels: Sequence[str]) -> str:
    """The first labels, for a message."""
    return ", ".join(map(quote_value, labels[:MAX_NAMED_LABELS])) + (", ..." if labels[MAX_NAMED_LABELS:] else "")


def make_row_locator(
    source: row_reader.DataSource, shards: list[str], shard_numbers: npt.NDArray[np.uint32], lines: Any
) -> RowLocator:
    """Build the locator from the names of the shards, and the shard number and the line of each row."""
    file_names = [source.files[int(name.split("-")[0])].uri.removeprefix("file://") for name in shards]
    return lambda row: f"{file_names[shard_numbers[row]]}:{lines[row]}"


def write_quarantine(folder: Path, bad: QuarantinedRows, locate_row: RowLocator) -> None:
    """Write `quarantine.parquet` of a store's folder: source, line and reason of each bad row."""
    locations = [locate_row(row).rsplit(":", 1) for row in bad.rows]
    table = pa.table(
        {
            "source": pa.array([source for source, _ in locations], pa.string()),
            "line": pa.array([int(line) for _, line in locations], pa.int64()),
            "reason": bad.reasons,
        }
    )
    pyarrow.parquet.write_table(table, folder / FILE_NAME)


def summarize_reasons(folder: Path) -> list[dict[str, Any]]:
    """The most frequent reasons of a store's bad rows: `reason`, `rows`, and the first row's `location` (file:line)."""
    if not (folder / FILE_NAME).is_file():
        return []
    table = pyarrow.parquet.read_table(folder / FILE_NAME)
    counts = sorted(table["reason"].value_counts().to_pylist(), key=lambda count: -count["counts"])
    summaries = []
    for reason, rows in (count.values() for count in counts[:MAX_REASONS]):
        first = table.slice(table["reason"].index(reason).as_py(), 1).to_pylist()[0]
        summaries.append({"reason": reason, "rows": rows, "location": f"{first['source']}:{first['line']}"})
    return summaries
