"""All scores of a split: `scores-<split>.json` of a finished run, and the output of `rtrain evaluate`.

{
  "schema_version": 1, "split": "test", "task": "classification", "output": "classes", "rows": 300,
  "headline": "accuracy",            the score that ranks models; larger is better
  "scores": {"accuracy": 0.93, ...}, all scores of all rows
  "intervals": {"confidence": 0.95, "replicates": 1000, "scores": {"accuracy": [0.90, 0.95], ...}},
  "slices": {"language": [...], "length": [...]},
  "tables": {...}                    results that are not single numbers: see rtrain.metrics.tables
  "unseen": {"in_training_set": 10, "rows": 290, "scores": {...}}   scores without the 10 training rows
  "sample": {"rows": 9000, "scores": {...}, "intervals": {...}}   scores on the rows that baselines are scored on
  "collapsed": [{"answer": "billing", "rows": 290, "total_rows": 300, "other_rows": 140,
                 "other_rows_with_answer": 138}]   almost all rows get one answer; the last two keys are in runs alone
}

A slice is {"value", "rows", "scores", "interval": of its headline, "merged": how many values are in it, "examples":
some of them}. The worst headline is first; values with few rows are merged into one slice (`rtrain.metrics.slices`),
and so are all but the `MAX_SLICES` most frequent. `length` has the quarters of the rows by tokens, unless a column has
that name. The intervals are bootstrap percentiles of the scores that are sums over rows; rows are assumed independent.
The file's size depends on the number of classes and columns, not of rows. Numbers are finite.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rtrain.core import atomic_write
from rtrain.core.errors import UserError
from rtrain.core.ragged import OUT_OF_SCOPE, Head, Int32s, RaggedArray
from rtrain.metrics import bootstrap, per_class, slices
from rtrain.metrics.registry import Metric, get_metric
from rtrain.metrics.sums import SumMetric

SCHEMA_VERSION = 1
MAX_SLICES = 50
"""Most values of a column with separate scores."""
MAX_MERGED_EXAMPLES = 10
"""Most values of a merged slice that are named."""
LENGTH_COLUMN = "length"
CONFIDENCE = 0.95
MAX_DRAWS = 50_000_000
"""Most rows x resamples: 1,000 resamples of up to 50,000 rows, and fewer resamples of more rows."""
SLICE_REPLICATES = 400
"""Resamples of a slice; fewer than of the split, since there are many slices."""


class ScoredTask(Protocol):
    """The attributes of a task that its scores need."""

    name: str
    output: str


def measure_split(
    task: ScoredTask,
    head: Head,
    split: str,
    row_results: RaggedArray,
    targets: RaggedArray,
    lengths: npt.NDArray[Any] | Int32s,
    columns: Mapping[str, Sequence[str]],
    heartbeat: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Build the document above. `row_results`, `targets`, `lengths` (tokens) and `columns` have one entry per row, in
    the same order. `heartbeat` is called before each slice is scored, which may take as long as the split. Raises
    `UserError` if non-finite answers make the headline non-finite."""
    metric, rows = get_metric(task.output), len(row_results)
    document = {
        "schema_version": SCHEMA_VERSION,
        "split": split,
        "task": task.name,
        "output": task.output,
        "rows": rows,
        "headline": metric.headline,
    }
    if not rows:
        return {**document, "scores": metric.main_scores(row_results, targets, head), "slices": {}, "tables": {}}
    scores = _keep_finite(metric.all_scores(row_results, targets, head))
    if metric.headline not in scores:
        raise UserError(
            f"the {metric.headline} of {rows:,} {split} rows is not finite, nor are some of the answers: the "
            "model's training has diverged; train it with a lower optim.lr",
            code="diverged",
        )
    sum_metric = metric.make_sum_metric(row_results, targets, head)
    slices_by_column = {
        name: _score_slices(metric, values, row_results, targets, head, sum_metric, heartbeat)
        for name, values in columns.items()
    }
    if LENGTH_COLUMN not in columns:
        quarters = slices.bin_by_quantile(lengths)
        slices_by_column[LENGTH_COLUMN] = _score_slices(
            metric, quarters, row_results, targets, head, sum_metric, heartbeat, min_rows=1
        )
    return {
        **document,
        "scores": scores,
        "intervals": _build_interval_table(sum_metric),
        "slices": slices_by_column,
        "tables": {} if metric.build_tables is None else metric.build_tables(row_results, targets, head),
    }


def score_unseen_rows(
    task: ScoredTask, head: Head, row_results: RaggedArray, targets: RaggedArray, in_training_set: npt.NDArray[np.bool_]
) -> dict[str, Any]:
    """The main scores without the rows that are training rows too; empty if all are."""
    rest = np.flatnonzero(~in_training_set)
    scores = get_metric(task.output).main_scores(row_results.take(rest), targets.take(rest), head) if len(rest) else {}
    return {"in_training_set": int(in_training_set.sum()), "rows": len(rest), "scores": _keep_finite(scores)}


def score_sampled_rows(
    task: ScoredTask, head: Head, row_results: RaggedArray, targets: RaggedArray, rows: npt.NDArray[np.int64]
) -> dict[str, Any]:
    """The main scores and their intervals on a sample: the rows that baselines are scored on."""
    metric, sample = get_metric(task.output), (row_results.take(rows), targets.take(rows), head)
    return {
        "rows": len(rows),
        "scores": _keep_finite(metric.main_scores(*sample)),
        "intervals": _build_interval_table(metric.make_sum_metric(*sample)),
    }


def write_scores(path: Path, document: dict[str, Any]) -> None:
    """Write the file atomically."""
    atomic_write.write_text(path, json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n")


def read_scores(path: Path) -> dict[str, Any] | None:
    """The document; None if the run is not finished. Raises `UserError` if the file is truncated."""
    if not path.is_file():
        return None
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            f"{path} cannot be read ({error}); copy it again, or remove it and go without it", code="unreadable"
        ) from None
    return document


def collect_headlines(document: Mapping[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """Column -> value -> headline and rows: short enough for the log. The worst first."""
    name = document["headline"]
    return {
        column: {entry["value"]: {name: entry["scores"][name], "rows": entry["rows"]} for entry in every}
        for column, every in document["slices"].items()
    }


def format_scores(document: Mapping[str, Any]) -> str:
    """The document for the terminal: scores with intervals, then classes and slices, the worst first."""
    score_intervals = document.get("intervals", {}).get("scores", {})
    lines = []
    for name, value in document["scores"].items():
        interval = "  [{:.4f}, {:.4f}]".format(*score_intervals[name]) if name in score_intervals else ""
        lines.append(f"{name:>24}  {value:.4f}{interval}" if isinstance(value, float) else f"{name:>24}  {value}")
    if missing := document["tables"].get("words_without_tokens"):
        lines.append(f"{missing:,} words have no token of the model's tokenizer: each counts as answered O")
    if classes := per_class.collect_classes(document["tables"]):
        lines += ["", *per_class.format_classes(classes)]
    headline = document["headline"]
    for column, slice_list in document["slices"].items():
        lines.append(f"\n{column}: {headline} (rows), the worst first")
        lines += [f"{entry['value']:>24}  {entry['scores'][headline]:.4f}  ({entry['rows']})" for entry in slice_list]
    return "\n".join(lines)


def _build_interval_table(sum_metric: SumMetric) -> dict[str, Any]:
    replicates = max(100, min(bootstrap.REPLICATES, MAX_DRAWS // len(sum_metric)))
    score_intervals = bootstrap.compute_intervals(sum_metric, replicates=replicates, confidence=CONFIDENCE)
    ends = {
        name: [interval.low, interval.high]
        for name, interval in score_intervals.items()
        if np.isfinite([interval.low, interval.high]).all()
    }
    return {"confidence": CONFIDENCE, "replicates": replicates, "scores": ends}


def _score_slices(
    metric: Metric,
    values: Sequence[str],
    row_results: RaggedArray,
    targets: RaggedArray,
    head: Head,
    sum_metric: SumMetric,
    heartbeat: Callable[[], None],
    min_rows: int = slices.MIN_ROWS,
) -> list[dict[str, Any]]:
    slice_documents = []
    for group in slices.group_rows(values, min_rows, MAX_SLICES):
        group_targets = targets.take(group.rows)
        if "out_of_scope_label" in head.facts and (group_targets.values == OUT_OF_SCOPE).all():
            continue  # the headline needs in-scope rows, and this slice has none
        heartbeat()
        scores = _keep_finite(metric.all_scores(row_results.take(group.rows), group_targets, head))
        if metric.headline not in scores:
            raise UserError(
                f"the {metric.headline} of the rows with {group.value!r} is no finite number", code="diverged"
            )
        document = {"value": group.value, "rows": len(group.rows), "scores": scores}
        document["interval"] = _compute_headline_interval(sum_metric, group.rows, metric.headline)
        if group.merged_values:
            document |= {
                "merged": len(group.merged_values),
                "examples": list(group.merged_values[:MAX_MERGED_EXAMPLES]),
            }
        slice_documents.append(document)
    return sorted(slice_documents, key=lambda entry: (entry["scores"][metric.headline], -entry["rows"], entry["value"]))


def _compute_headline_interval(sum_metric: SumMetric, rows: npt.NDArray[np.int64], headline: str) -> list[float]:
    """The interval of a slice's headline."""
    replicates = max(100, min(SLICE_REPLICATES, MAX_DRAWS // len(sum_metric)))
    interval = bootstrap.compute_intervals(
        SumMetric(sum_metric.rows[rows], sum_metric.score), 0, replicates, CONFIDENCE
    )[headline]
    return [interval.low, interval.high]


def _keep_finite(scores: Mapping[str, float]) -> dict[str, float]:
    """Only the finite scores: JSON cannot hold the infinite perplexity of an untrained model."""
    return {name: value for name, value in scores.items() if np.isfinite(value)}
