"""All scores of a split: `scores-<split>.json` of a finished run, and the output of `rtrain evaluate`.

{
  "schema_version": 1, "split": "test", "task": "classification", "output": "classes", "rows": 300,
  "headline": "accuracy",            the score that ranks models; larger is better
  "scores": {"accuracy": 0.93, ...}, all scores of all rows
  "intervals": {"confidence": 0.95, "replicates": 1000, "scores": {"accuracy": [0.90, 0.95], ...}},
  "slices": {"language": [...], "length": [...]},
  "tables": {...}                    results that are not single numbers, see below
  "unseen": {"in_training_set": 10, "rows": 290, "scores": {...}}   scores without the 10 training rows
  "sample": {"rows": 9000, "scores": {...}, "intervals": {...}}   scores on the rows that baselines are scored on
  "collapsed": [{"answer": "billing", "rows": 290, "total_rows": 300, "other_rows": 140,
                 "other_rows_with_answer": 138}]   almost all rows get one answer; the last two keys are in runs alone
}

A slice is {"value", "rows", "scores", "interval": of its headline, "merged": how many values are in it, "examples":
some of them}. The worst headline is first; values with few rows are merged into one slice (`group_rows`), and so
are all but the `MAX_SLICES` most frequent. `length` has the quarters of the rows by tokens, unless a column has
that name. The intervals are bootstrap percentiles of the scores that are sums over rows; rows are assumed independent.
The file's size depends on the number of classes and columns, not of rows. Numbers are finite.

The tables of each kind of output, as plain JSON of bounded size:

classes   per_class: [{class, precision, recall, f1, auc, support, predicted}, ...], worst F1 first, at most
          `MAX_CLASSES` of `classes`; confusion: {labels, counts [true][predicted], without_class: how often each was
          predicted for a row that has no class} up to `MAX_CONFUSION_CLASSES` classes; with `data.out_of_scope_label`
          that label is a class too, and threshold the confidence below which it is predicted; confused: the
          `MAX_CONFUSED_PAIRS` most frequent mistakes [{true, predicted, rows}, ...]; calibration: {ece, bins: [{low,
          high, rows, confidence, accuracy}, ...]}
labels    per_class (with the threshold of each label, without auc), classes, calibration of each label's binary
          decision
heads     heads: {head: as for classes, over the rows with a label of that head}
number    residuals: {edges, rows}, a histogram of predicted - true in `RESIDUAL_BINS` bins; scale: confusion on the
          scale of the training scores if they are on one
tags      per_class by type of entity, classes, calibration of the words' tags; words_without_tokens, if any: each is
          answered O
summary   positions: {tenths: 10, oracle, picked}, how many sentences of each tenth of their documents the oracle and
          the model select; calibration of each sentence's binary decision; lengths: {budget: words, over_budget:
          longer summaries, document, picked, oracle: {sentences, words}, each a mean over the documents};
          compared_with_lead: {better, same, worse}: summaries by their ROUGE against the lead sentences'
spans     by_length: [{low, high, rows, f1, exact_match}, ...], over the answerable questions, by tokens of the
          answer; if some are unanswerable: no_answer: {rows, unanswered_share: the share of them left unanswered,
          threshold, curve: [{threshold, f1, exact_match, answered}, ...] of at most `MAX_CURVE_POINTS` + 1 points,
          falling thresholds}
"""

import json
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from rtrain.core import atomic_write
from rtrain.core.errors import UserError
from rtrain.core.ragged import OUT_OF_SCOPE, Head, Int32s, RaggedArray
from rtrain.metrics import bootstrap, per_class
from rtrain.metrics.bootstrap import Ints, SumMetric
from rtrain.metrics.registry import Metric, get_metric

T = TypeVar("T")

SCHEMA_VERSION = 1
MIN_ROWS = 20
"""Values of a column with fewer rows are merged."""
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
    scored = _ScoredRows(metric, row_results, targets, head)
    document = {
        "schema_version": SCHEMA_VERSION,
        "split": split,
        "task": task.name,
        "output": task.output,
        "rows": rows,
        "headline": metric.headline,
    }
    if not rows:
        return {**document, "scores": scored.apply(metric.main_scores), "slices": {}, "tables": {}}
    scores = _keep_finite(scored.apply(metric.all_scores))
    if metric.headline not in scores:
        raise UserError(
            f"the {metric.headline} of {rows:,} {split} rows is not finite, nor are some of the answers: the "
            "model's training has diverged; train it with a lower optim.lr",
            code="diverged",
        )
    slices_by_column = {name: _score_slices(scored, values, heartbeat) for name, values in columns.items()}
    if LENGTH_COLUMN not in columns:
        slices_by_column[LENGTH_COLUMN] = _score_slices(scored, bin_by_quantile(lengths), heartbeat, min_rows=1)
    return {
        **document,
        "scores": scores,
        "intervals": _build_interval_table(scored.interval_metric),
        "slices": slices_by_column,
        "tables": scored.apply(metric.build_tables) if metric.build_tables else {},
    }


@dataclass(frozen=True, eq=False)
class _ScoredRows:
    metric: Metric
    row_results: RaggedArray
    targets: RaggedArray
    head: Head

    def apply(self, function: Callable[[RaggedArray, RaggedArray, Head], T]) -> T:
        return function(self.row_results, self.targets, self.head)

    @cached_property
    def sum_metric(self) -> SumMetric:
        return self.apply(self.metric.make_sum_metric)

    @property
    def interval_metric(self) -> SumMetric:
        """The scores with intervals: those of plug-ins are among them."""
        make = self.metric.make_plugin_metric
        return bootstrap.combine_metrics(self.sum_metric, self.apply(make)) if make else self.sum_metric

    def take(self, rows: Ints) -> "_ScoredRows":
        return replace(self, row_results=self.row_results.take(rows), targets=self.targets.take(rows))


def score_unseen_rows(
    task: ScoredTask, head: Head, row_results: RaggedArray, targets: RaggedArray, in_training_set: npt.NDArray[np.bool_]
) -> dict[str, Any]:
    """The main scores without the rows that are training rows too; empty if all are."""
    metric, rest = get_metric(task.output), np.flatnonzero(~in_training_set)
    scores = _ScoredRows(metric, row_results, targets, head).take(rest).apply(metric.main_scores) if len(rest) else {}
    return {"in_training_set": int(in_training_set.sum()), "rows": len(rest), "scores": _keep_finite(scores)}


def score_sampled_rows(
    task: ScoredTask, head: Head, row_results: RaggedArray, targets: RaggedArray, rows: npt.NDArray[np.int64]
) -> dict[str, Any]:
    """The main scores and their intervals on a sample: the rows that baselines are scored on."""
    sample = _ScoredRows(get_metric(task.output), row_results, targets, head).take(rows)
    return {
        "rows": len(rows),
        "scores": _keep_finite(sample.apply(sample.metric.main_scores)),
        "intervals": _build_interval_table(sample.sum_metric),
    }


def write_scores(path: Path, document: dict[str, Any]) -> None:
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
    intervals = bootstrap.compute_intervals(sum_metric, replicates=replicates, confidence=CONFIDENCE)
    ends = {name: [low, high] for name, (_, low, high) in intervals.items() if np.isfinite([low, high]).all()}
    return {"confidence": CONFIDENCE, "replicates": replicates, "scores": ends}


def _score_slices(
    scored: _ScoredRows, values: Sequence[str], heartbeat: Callable[[], None], min_rows: int = MIN_ROWS
) -> list[dict[str, Any]]:
    headline, sum_metric = scored.metric.headline, scored.sum_metric
    replicates = max(100, min(SLICE_REPLICATES, MAX_DRAWS // len(sum_metric)))
    slice_documents: list[dict[str, Any]] = []
    for group in group_rows(values, min_rows, MAX_SLICES):
        slice_rows = scored.take(group.rows)
        if "out_of_scope_label" in scored.head.facts and (slice_rows.targets.values == OUT_OF_SCOPE).all():
            continue  # the headline needs in-scope rows, and this slice has none
        heartbeat()
        scores = _keep_finite(slice_rows.apply(scored.metric.all_scores))
        if headline not in scores:
            raise UserError(f"the {headline} of the rows with {group.value!r} is not finite", code="diverged")
        interval = bootstrap.compute_intervals(sum_metric.take(group.rows), 0, replicates, CONFIDENCE)[headline]
        document = {"value": group.value, "rows": len(group.rows), "scores": scores}
        document["interval"] = [interval.low, interval.high]
        if group.merged_values:
            examples = list(group.merged_values[:MAX_MERGED_EXAMPLES])
            document |= {"merged": len(group.merged_values), "examples": examples}
        slice_documents.append(document)
    return sorted(slice_documents, key=lambda entry: (entry["scores"][headline], -entry["rows"], entry["value"]))


def _keep_finite(scores: Mapping[str, float]) -> dict[str, float]:
    """Only the finite scores: JSON cannot hold the infinite perplexity of an untrained model."""
    return {name: value for name, value in scores.items() if np.isfinite(value)}


class SliceRows(NamedTuple):
    """Positions of the rows with one value of a column."""

    value: str
    rows: Ints
    merged_values: tuple[str, ...] = ()
    """The values of a merged group."""


def group_rows(values: Sequence[Hashable], min_rows: int = MIN_ROWS, max_groups: int | None = None) -> list[SliceRows]:
    """The rows of each value, in the order of their first rows; None is the value `(none)`.

    Values with fewer than `min_rows` rows are merged into one group of any size. So are all but the `max_groups` most
    frequent values.
    """
    names = ["(none)" if value is None else str(value) for value in values]
    counts = Counter(names)
    frequent_names = sorted(counts, key=lambda name: (-counts[name], name))[:max_groups]
    small_names = sorted(counts.keys() - {name for name in frequent_names if counts[name] >= min_rows})
    are_all_small = all(counts[name] < min_rows for name in small_names)
    title = (
        f"({len(small_names)} values with fewer than {min_rows} rows)"
        if are_all_small
        else f"(the {len(small_names)} rarest values)"
    )
    # A single small value is not merged: it keeps its name.
    inside = {name: title for name in small_names} if len(small_names) > 1 else {}
    positions_by_name: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        positions_by_name.setdefault(inside.get(name, name), []).append(position)
    return [
        SliceRows(name, np.array(positions, dtype=np.int64), tuple(small_names) if inside and name == title else ())
        for name, positions in positions_by_name.items()
    ]


def bin_by_quantile(values: npt.ArrayLike, parts: int = 4) -> list[str]:
    """Numbers (lengths, scores) to the names of about equally large ranges, such as `10 to 24`.

    Equal values stay together, so that there may be fewer ranges than `parts`; a range names its lowest and highest
    value.
    """
    numbers = np.asarray(values, dtype=np.float64)
    if not numbers.size:
        return []
    inner = np.unique(np.quantile(numbers, np.arange(1, parts) / parts, method="inverted_cdf"))
    part = np.searchsorted(inner, numbers, side="left")
    ends = {int(number): (numbers[part == number].min(), numbers[part == number].max()) for number in np.unique(part)}
    labels = {number: f"{low:g}" if low == high else f"{low:g} to {high:g}" for number, (low, high) in ends.items()}
    return [labels[int(number)] for number in part]
