"""The scores of a split by the kind of output, in float64: `METRICS` lists them.

Pure functions of all rows' results and targets, in the same order on every worker, so scores that are not sums over
rows (an area under a curve, a correlation) need no special case. A module of this package has the functions of a kind,
and the names of the columns of its row results.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from rtrain.core import plugins
from rtrain.core.errors import UserError
from rtrain.core.ragged import Head, RaggedArray
from rtrain.metrics import classes, entities, regression, spans, summaries
from rtrain.metrics.bootstrap import Bools, Floats, SumMetric, combine_metrics, make_mean_metric, ratio

Scores = dict[str, float]


class Metric(NamedTuple):
    """The functions of a kind of output. Each maps (row results, targets, head) of a split."""

    headline: str
    """Name of the score that ranks models; larger is better."""
    make_sum_metric: Callable[[RaggedArray, RaggedArray, Head], SumMetric]
    """Scores as a function of sums over rows, which can be resampled: the headline is one of them."""
    compute_extra_scores: Callable[[RaggedArray, RaggedArray, Head], Scores] | None = None
    """Scores that are computed for a finished model only."""
    build_tables: Callable[[RaggedArray, RaggedArray, Head], dict[str, Any]] | None = None
    """Results that are not single numbers, as JSON of bounded size (`rtrain.metrics.scores`)."""
    mark_correct: Callable[[RaggedArray, RaggedArray, Head], Bools] | None = None
    """Whether each row's answer is right as a whole; None if answers are right by degrees."""
    make_plugin_metric: Callable[[RaggedArray, RaggedArray, Head], SumMetric] | None = None
    """Scores of plug-ins, which may take long to resample."""
    final_only_prefixes: tuple[str, ...] = ()
    """Prefixes of the scores of `make_sum_metric` that are reported for a finished model only."""

    def main_scores(self, row_results: RaggedArray, targets: RaggedArray, head: Head) -> Scores:
        """The headline and the field's main figures, few enough for a line of the log; `rows` among them."""
        scores = self.make_sum_metric(row_results, targets, head).scores()
        main = {name: score for name, score in scores.items() if not name.startswith(self.final_only_prefixes)}
        return self._add_plugin_scores({**main, "rows": len(row_results)}, row_results, targets, head)

    def _add_plugin_scores(self, scores: Scores, row_results: RaggedArray, targets: RaggedArray, head: Head) -> Scores:
        make = self.make_plugin_metric
        plugin_scores = make(row_results, targets, head).scores() if make and len(row_results) else {}
        if clashes := plugin_scores.keys() & scores.keys():
            text = f"the metric {min(clashes)} of a plug-in has the name of a score of rtrain; choose another"
            raise UserError(text, code="already_registered")
        return {**scores, **plugin_scores}

    def all_scores(self, row_results: RaggedArray, targets: RaggedArray, head: Head) -> Scores:
        """All scores, the main scores first."""
        scores = self.make_sum_metric(row_results, targets, head).scores()
        main = {name: score for name, score in scores.items() if not name.startswith(self.final_only_prefixes)}
        extra = self.compute_extra_scores(row_results, targets, head) if self.compute_extra_scores else {}
        all_scores = {**main, "rows": len(row_results), **scores, **extra}
        return self._add_plugin_scores(all_scores, row_results, targets, head)


def split_sign(name: str) -> tuple[str, int]:
    """A score's name as it is shown, and the sign of its value: the negative of an error is shown as the error."""
    return name.removeprefix("neg_"), -1 if name.startswith("neg_") else 1


def get_metric(output: str) -> Metric:
    """The metric of a kind of output, with the scores of plug-ins. Raises `UserError` for an unknown kind."""
    metric, registered = METRICS.get(output), plugins.list_metrics(output)
    if metric is None and not registered:
        fix = f"write one of {', '.join(METRICS)}, or a metric with @rtrain.register_metric(NAME, output={output!r})"
        raise UserError(f"the output {output!r} of the task has no metric; {fix}", code="unknown_metric")
    if metric is None:
        metric = Metric(registered[0][0], partial(_make_plugin_metric, registered[:1]))
        registered = registered[1:]
    return metric._replace(make_plugin_metric=partial(_make_plugin_metric, registered)) if registered else metric


def _make_plugin_metric(
    registered: Sequence[tuple[str, Callable[..., Any]]], row_results: RaggedArray, targets: RaggedArray, head: Head
) -> SumMetric:
    arrays, parts, rows = [_to_array(targets), _to_array(row_results)], list[SumMetric](), len(row_results)
    for name, function in registered if rows else ():
        result = function(*arrays, np.ones(rows))
        is_sum = isinstance(result, SumMetric)
        parts.append(result if is_sum else _make_weighted_metric(name, partial(function, *arrays), rows))
    names = [name for name, _ in registered]
    return combine_metrics(*parts) if rows else make_mean_metric(dict.fromkeys(names, np.empty(0)))


def _make_weighted_metric(name: str, function: Callable[[Floats], float], rows: int) -> SumMetric:
    """A function of the rows' weights as a function of sums: the sums are the weights, [rows]."""
    from scipy.sparse import eye_array

    def score(sums: Floats) -> dict[str, Floats]:
        values = [float(function(weights)) for weights in sums.reshape(-1, rows)]
        return {name: np.array(values).reshape(sums.shape[:-1])}

    return SumMetric(eye_array(rows, format="csr"), score)


def _to_array(values: RaggedArray) -> Any:
    """[rows] or [rows, n]; the ragged array if rows have several lengths."""
    widths = set(values.counts.tolist())
    if len(widths) != 1:
        return values
    return values.values if widths == {1} else values.values.reshape(len(values), -1)


class TokenResults(NamedTuple):
    """Results of rows with masked tokens, [rows] each: the columns of their row results."""

    num_targets: Any
    num_correct: Any
    loss: Any
    """Sum over the row's targets."""


def make_tokens_metric(row_results: RaggedArray, targets: RaggedArray, head: Head) -> SumMetric:
    """Perplexity and accuracy of masked tokens, over all of them: rows weigh by their tokens."""

    def score(sums: Floats) -> dict[str, Floats]:
        total = TokenResults(*np.moveaxis(sums, -1, 0))
        mean = ratio(total.loss, total.num_targets)
        with np.errstate(over="ignore"):  # of a model that has learned nothing
            perplexity = np.where(total.num_targets > 0, np.exp(mean), 0.0)
        accuracy = ratio(total.num_correct, total.num_targets)
        return {"neg_loss": -mean, "perplexity": perplexity, "masked_accuracy": accuracy}

    return SumMetric(row_results.to_matrix(len(TokenResults._fields)).astype(np.float64), score)


METRICS: Mapping[str, Metric] = {
    "classes": Metric(
        "accuracy",
        classes.make_classes_metric,
        classes.compute_extra_class_scores,
        classes.build_class_tables,
        classes.mark_correct_classes,
    ),
    "labels": Metric(
        "micro_f1",
        classes.make_labels_metric,
        classes.compute_extra_label_scores,
        classes.build_label_tables,
        classes.mark_correct_labels,
    ),
    "heads": Metric(
        "mean_accuracy", classes.make_heads_metric, None, classes.build_head_tables, classes.mark_correct_heads
    ),
    "number": Metric(
        "neg_rmse",
        regression.make_number_metric,
        regression.compute_extra_number_scores,
        regression.build_number_tables,
    ),
    "tags": Metric("f1", entities.make_tags_metric, None, entities.build_tag_tables, entities.mark_correct_tags),
    "spans": Metric("f1", spans.make_spans_metric, None, spans.build_span_tables, spans.mark_correct_spans),
    "tokens": Metric("neg_loss", make_tokens_metric),
    "summary": Metric(
        "rouge",
        summaries.make_summary_metric,
        summaries.compute_extra_summary_scores,
        summaries.build_summary_tables,
        final_only_prefixes=("oracle_", "over_lead_"),
    ),
}
