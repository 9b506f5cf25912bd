"""All that is measured on a split: `scores-<split>.json` of a finished run, and what `rtrain evaluate` prints.

{
  "schema_version": 1, "split": "test", "task": "classification", "output": "classes", "rows": 300,
  "headline": "accuracy",            the score by which models are compared; larger is better
  "scores": {"accuracy": 0.93, ...}, every figure of all rows
  "intervals": {"confidence": 0.95, "replicates": 1000, "scores": {"accuracy": [0.90, 0.95], ...}},
  "slices": {"language": [...], "length": [...]},
  "tables": {...}                    what is no single figure, by the kind of output: see rtrain.metrics.tables
  "unseen": {"seen": 10, "rows": 290, "scores": {...}}   where 10 rows are training rows too: the scores without them
  "sample": {"rows": 9000, "scores": {...}, "intervals": {...}}   where baselines are scored on fewer rows: on the same
  "collapsed": [{"answer": "billing", "rows": 290, "of": 300, "others": 140, "given": 138}]   where almost all rows, and
                                     those with another target too, get one answer; the last two are in runs alone
}

A slice is {"value", "rows", "scores", "interval": of its headline, "merged": how many values are in it, "examples":
some of them}. The worst headline is first; values with few rows are one slice (`rtrain.metrics.slices`), and so are all
but the `MOST_SLICES` most frequent. `length` has the quarters of the rows by tokens, where no column has that name. The
intervals are bootstrap percentiles of the figures that are sums over rows; rows are taken to be independent. The file
is bounded: by the number of classes and columns, never by the number of rows. Numbers are finite.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rtrain.core import atomic_write
from rtrain.core.errors import UserError
from rtrain.core.ragged import OUTSIDE, Head, Int32s, Ragged
from rtrain.metrics import bootstrap, per_class, slices
from rtrain.metrics.registry import Metric, metric_for
from rtrain.metrics.sums import Additive

SCHEMA_VERSION = 1
MOST_SLICES = 50
"""Most values of a column that get scores of their own."""
EXAMPLES = 10
"""Most values that are named of a merged slice."""
LENGTH = "length"
CONFIDENCE = 0.95
MOST_DRAWS = 50_000_000
"""Most rows x resamples: 1,000 resamples of up to 50,000 rows, and fewer resamples of more rows."""
SLICE_REPLICATES = 400
"""Resamples of a slice; fewer than of the split, since there are many slices."""


class Task(Protocol):
    """The part of a task on which its scores depend."""

    name: str
    output: str


def measure(
    task: Task,
    head: Head,
    split: str,
    outcomes: Ragged,
    targets: Ragged,
    lengths: npt.NDArray[Any] | Int32s,
    columns: Mapping[str, Sequence[str]],
    alive: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """The document above. All rows in one order: outcomes, targets, `lengths` (tokens) and `columns` (a value each).
    `alive` is called before each slice is scored, which may take as long as the whole. Raises `UserError` where answers
    that are no finite numbers leave the headline none either."""
    metric, rows = metric_for(task.output), len(outcomes)
    document = {
        "schema_version": SCHEMA_VERSION,
        "split": split,
        "task": task.name,
        "output": task.output,
        "rows": rows,
        "headline": metric.headline,
    }
    if not rows:
        return {**document, "scores": metric.scores(outcomes, targets, head), "slices": {}, "tables": {}}
    found = _finite(metric.all(outcomes, targets, head))
    if metric.headline not in found:
        raise UserError(
            f"the {metric.headline} of {rows:,} {split} rows is no finite number, nor are some of the answers: the "
            "model's training has gone astray; train it with a lower optim.lr",
            code="diverged",
        )
    additive = metric.additive(outcomes, targets, head)
    sliced = {
        name: _slices(metric, values, outcomes, targets, head, additive, alive) for name, values in columns.items()
    }
    if LENGTH not in columns:
        quarters = slices.quantiles(lengths)
        sliced[LENGTH] = _slices(metric, quarters, outcomes, targets, head, additive, alive, least=1)
    return {
        **document,
        "scores": found,
        "intervals": _intervals(additive),
        "slices": sliced,
        "tables": {} if metric.tables is None else metric.tables(outcomes, targets, head),
    }


def without(task: Task, head: Head, outcomes: Ragged, targets: Ragged, seen: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """The main scores without the rows that are training rows too; none where all are."""
    rest = np.flatnonzero(~seen)
    found = metric_for(task.output).scores(outcomes.take(rest), targets.take(rest), head) if len(rest) else {}
    return {"seen": int(seen.sum()), "rows": len(rest), "scores": _finite(found)}


def sampled(task: Task, head: Head, outcomes: Ragged, targets: Ragged, rows: npt.NDArray[np.int64]) -> dict[str, Any]:
    """The main scores of some of the rows, those that baselines are scored on, and their intervals."""
    metric, some = metric_for(task.output), (outcomes.take(rows), targets.take(rows), head)
    return {"rows": len(rows), "scores": _finite(metric.scores(*some)), "intervals": _intervals(metric.additive(*some))}


def write(path: Path, document: dict[str, Any]) -> None:
    """Write the file, whole or not at all."""
    atomic_write.write_text(path, json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n")


def read(path: Path) -> dict[str, Any] | None:
    """The document; None where the run is not finished. Raises `UserError` where the file is cut off."""
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            f"{path} cannot be read ({error}); copy it again, or remove it and go without it", code="unreadable"
        ) from None
    return found


def headlines(document: Mapping[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """Column -> value -> headline and rows: short enough for the log. The worst first."""
    name = document["headline"]
    return {
        column: {one["value"]: {name: one["scores"][name], "rows": one["rows"]} for one in every}
        for column, every in document["slices"].items()
    }


def text(document: Mapping[str, Any]) -> str:
    """The document as a terminal shows it: figures with intervals, then classes and slices, the worst first."""
    spread = document.get("intervals", {}).get("scores", {})
    lines = []
    for name, value in document["scores"].items():
        interval = "  [{:.4f}, {:.4f}]".format(*spread[name]) if name in spread else ""
        lines.append(f"{name:>24}  {value:.4f}{interval}" if isinstance(value, float) else f"{name:>24}  {value}")
    if missing := document["tables"].get("words_without_tokens"):
        lines.append(f"{missing:,} words have no token of the model's tokenizer: each counts as answered O")
    if classes := per_class.collect_classes(document["tables"]):
        lines += ["", *per_class.format_classes(classes)]
    headline = document["headline"]
    for column, every in document["slices"].items():
        lines.append(f"\n{column}: {headline} (rows), the worst first")
        lines += [f"{one['value']:>24}  {one['scores'][headline]:.4f}  ({one['rows']})" for one in every]
    return "\n".join(lines)


def _intervals(additive: Additive) -> dict[str, Any]:
    replicates = max(100, min(bootstrap.REPLICATES, MOST_DRAWS // len(additive)))
    found = bootstrap.intervals(additive, replicates=replicates, confidence=CONFIDENCE)
    ends = {name: [one.low, one.high] for name, one in found.items() if np.isfinite([one.low, one.high]).all()}
    return {"confidence": CONFIDENCE, "replicates": replicates, "scores": ends}


def _slices(
    metric: Metric,
    values: Sequence[str],
    outcomes: Ragged,
    targets: Ragged,
    head: Head,
    additive: Additive,
    alive: Callable[[], None],
    least: int = slices.LEAST,
) -> list[dict[str, Any]]:
    found = []
    for group in slices.groups(values, least, MOST_SLICES):
        own = targets.take(group.rows)
        if "outside" in head.facts and (own.values == OUTSIDE).all():
            continue  # the headline is of the rows inside of the classes, of which there are none
        alive()
        scores = _finite(metric.all(outcomes.take(group.rows), own, head))
        if metric.headline not in scores:
            raise UserError(
                f"the {metric.headline} of the rows with {group.value!r} is no finite number", code="diverged"
            )
        document = {"value": group.value, "rows": len(group.rows), "scores": scores}
        document["interval"] = _interval(additive, group.rows, metric.headline)
        if group.merged:
            document |= {"merged": len(group.merged), "examples": list(group.merged[:EXAMPLES])}
        found.append(document)
    return sorted(found, key=lambda one: (one["scores"][metric.headline], -one["rows"], one["value"]))


def _interval(additive: Additive, rows: npt.NDArray[np.int64], headline: str) -> list[float]:
    """The interval of a slice's headline."""
    replicates = max(100, min(SLICE_REPLICATES, MOST_DRAWS // len(additive)))
    one = bootstrap.intervals(Additive(additive.rows[rows], additive.score), 0, replicates, CONFIDENCE)[headline]
    return [one.low, one.high]


def _finite(scores: Mapping[str, float]) -> dict[str, float]:
    """Only the finite scores: JSON cannot hold, say, the endless perplexity of a model that has learned nothing."""
    return {name: value for name, value in scores.items() if np.isfinite(value)}
