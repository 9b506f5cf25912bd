"""The scores of a split by the kind of output, in float64: `METRICS` lists them.

Pure functions of all rows' results and targets, in the same order on every worker, so scores that are not sums over
rows (an area under a curve, a correlation) need no special case. The arithmetic is in the other modules of this
package; this module selects it by the kind of output, and names it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rtrain.core.ragged import IGNORE_INDEX, OUT_OF_SCOPE, Head, RaggedArray
from rtrain.metrics import classification, entities, regression, rouge, row_correct, summary_rows, tables
from rtrain.metrics.sums import Floats, Ints, SumMetric, combine_metrics, make_mean_metric, ratio

Scores = dict[str, float]
ScoreFunction = Callable[[RaggedArray, RaggedArray, Head], Scores]
"""(row results, targets, head) -> scores by name."""


class Metric(NamedTuple):
    headline: str
    """Name of the score that ranks models; larger is better."""
    make_sum_metric: Callable[[RaggedArray, RaggedArray, Head], SumMetric]
    """Scores as a function of sums over rows, which can be resampled: the headline is one of them."""
    compute_extra_scores: ScoreFunction | None = None
    """Scores that are computed for a finished model only."""
    build_tables: Callable[[RaggedArray, RaggedArray, Head], dict[str, Any]] | None = None
    """Results that are not single numbers, as JSON of bounded size (`rtrain.metrics.tables`)."""
    mark_correct: Callable[[RaggedArray, RaggedArray, Head], npt.NDArray[np.bool_]] | None = None
    """Whether each row's answer is right as a whole; None if answers are right by degrees."""
    final_only_prefixes: tuple[str, ...] = ()
    """Prefixes of the scores of `make_sum_metric` that are reported for a finished model only."""

    def main_scores(self, row_results: RaggedArray, targets: RaggedArray, head: Head) -> Scores:
        """The headline and the field's main figures, few enough for a line of the log; `rows` among them."""
        scores = self.make_sum_metric(row_results, targets, head).scores()
        return {
            **{name: score for name, score in scores.items() if not name.startswith(self.final_only_prefixes)},
            "rows": len(row_results),
        }

    def all_scores(self, row_results: RaggedArray, targets: RaggedArray, head: Head) -> Scores:
        """All scores."""
        sum_scores = self.make_sum_metric(row_results, targets, head).scores()
        first_scores = {
            name: score for name, score in sum_scores.items() if not name.startswith(self.final_only_prefixes)
        }
        extra_scores = (
            {} if self.compute_extra_scores is None else self.compute_extra_scores(row_results, targets, head)
        )
        return {**first_scores, "rows": len(row_results), **sum_scores, **extra_scores}


def split_sign(name: str) -> tuple[str, int]:
    """A score's name as it is shown, and the sign of its value: the negative of an error is shown as the error."""
    return name.removeprefix("neg_"), -1 if name.startswith("neg_") else 1


def get_metric(output: str) -> Metric:
    return METRICS[output]


# ------------------------------------------------------------------------------------------------------------- classes

MACRO_SCORES = ("macro_precision", "macro_recall", "macro_f1")
ACCURACY_WITH_ABSTENTIONS = "accuracy_with_abstentions"
"""Accuracy over all rows, out-of-scope rows included; the model may abstain."""


def make_classes_metric(row_results: RaggedArray, targets: RaggedArray, head: Head) -> SumMetric:
    """Accuracy and macro precision, recall and F1. A target of -1 (a label without a class) is wrong for every class.

    With an out-of-scope label, these are scores of the in-scope rows without abstentions. With a threshold, scores of
    detecting out-of-scope rows and the accuracy with abstentions are added.
    """
    logits, true = row_results.to_matrix(len(head.labels)), _to_int64(targets.values)
    predicted = classification.predict_classes(logits)
    class_metric = _select_scores(
        classification.make_sum_metric(true, predicted, len(head.labels)), ("accuracy", *MACRO_SCORES)
    )
    if "out_of_scope_label" not in head.facts:
        return class_metric
    is_out_of_scope = true == OUT_OF_SCOPE
    in_scope_metric = SumMetric(
        class_metric.rows.multiply((~is_out_of_scope).astype(np.float64)[:, None]).tocsr(), class_metric.score
    )
    if "threshold" not in head.facts:
        return in_scope_metric
    is_abstained = tables.class_probabilities(row_results, head).max(axis=1) < head.facts["threshold"]
    is_correct = np.where(is_out_of_scope, is_abstained, (predicted == true) & ~is_abstained)
    columns = (
        is_abstained & is_out_of_scope,
        is_abstained,
        is_out_of_scope,
        ~is_abstained & ~is_out_of_scope,
        ~is_out_of_scope,
        is_correct,
        np.ones_like(is_correct),
    )
    return combine_metrics(
        in_scope_metric, SumMetric(np.stack(columns, axis=1).astype(np.float64), _compute_out_of_scope_scores)
    )


def _compute_out_of_scope_scores(sums: Floats) -> dict[str, Floats]:
    true_positives, num_abstained, out_of_scope, kept_in_scope, in_scope, num_correct, rows = np.moveaxis(sums, -1, 0)
    return {
        "out_of_scope_precision": ratio(true_positives, num_abstained),
        "out_of_scope_recall": ratio(true_positives, out_of_scope),
        "out_of_scope_f1": ratio(2 * true_positives, num_abstained + out_of_scope),
        "in_scope_recall": ratio(kept_in_scope, in_scope),
        ACCURACY_WITH_ABSTENTIONS: ratio(num_correct, rows),
    }


def compute_extra_class_scores(row_results: RaggedArray, targets: RaggedArray, head: Head) -> Scores:
    """One-vs-rest AUC, where a class has rows and others have too, and the expected calibration error; the AUC of
    telling the rows outside of all classes by the best class's chance."""
    probabilities, true = tables.class_probabilities(row_results, head), _to_int64(targets.values)
    is_out_of_scope = true == OUT_OF_SCOPE
    scores = {"ece": tables.compute_ece(probabilities[~is_out_of_scope], true[~is_out_of_scope])}
    area, _ = classification.compute_auc(true[~is_out_of_scope], probabilities[~is_out_of_scope])
    out_of_scope_auc, _ = classification.compute_auc(
        is_out_of_scope.astype(np.int64), probabilities.max(axis=1)[:, None] * np.array([1.0, -1.0])
    )
    return {
        **({} if area is None else {"auc": area}),
        **scores,
        **({} if out_of_scope_auc is None else {"out_of_scope_auc": out_of_scope_auc}),
    }


# -------------------------------------------------------------------------------------------------------------- labels


def make_labels_metric(row_results: RaggedArray, targets: RaggedArray, head: Head) -> SumMetric:
    """Micro and macro precision, recall and F1 of labels given or not, and the share of rows with all labels right.

    A label is predicted if its probability is at least its threshold (default 0.5).
    """
    true, predicted = tables.predict_labels(row_results, targets, head)
    label_metric = classification.make_multilabel_metric(true, predicted)
    names = ("micro_f1", "micro_precision", "micro_recall", "macro_f1", "macro_precision", "macro_recall")
    return _select_scores(label_metric, (*names, "subset_accuracy"))


def compute_extra_label_scores(row_results: RaggedArray, targets: RaggedArray, head: Head) -> Scores:
    """Mean average precision, if a label has rows; it needs no threshold. It is undefined for NaN logits."""
    size = len(head.labels)
    if np.isnan(row_results.values).any():
        return {}
    average_precision = classification.mean_average_precision(targets.to_matrix(size) > 0, row_results.to_matrix(size))
    return {} if average_precision is None else {"mean_average_precision": average_precision}


# --------------------------------------------------------------------------------------------------------------- heads


def make_heads_metric(row_results: RaggedArray, targets: RaggedArray, head: Head) -> SumMetric:
    """Accuracy and macro F1 of each head, over the rows that have its label, and the mean accuracy of the heads that
    have a labeled row."""
    parts, names, presence = [], [], []
    for name, head_labels, logits, true in tables.iter_heads(row_results, targets, head):
        part = classification.make_sum_metric(
            np.maximum(true, -1), classification.predict_classes(logits), len(head_labels)
        )
        present = part.rows.multiply((true != IGNORE_INDEX).astype(np.float64)[:, None]).tocsr()
        parts.append(_select_scores(SumMetric(present, part.score), ("accuracy", "macro_f1"), f"{name}_"))
        names.append(f"{name}_accuracy")
        presence.append(true != IGNORE_INDEX)
    return add_mean_score(combine_metrics(*parts), "mean_accuracy", names, np.stack(presence, axis=1))


# -------------------------------------------------------------------------------------------------------------- number


def make_number_metric(row_results: RaggedArray, targets: RaggedArray, head: Head) -> SumMetric:
    """Errors in the targets' own unit; Pearson's r; and, where the training scores are steps of a scale, quadratic
    weighted kappa of predictions rounded to that scale.

    The headline is the negative RMSE: it is defined for any targets and predictions, also for the constant ones of a
    model that has learned nothing yet, and sees a wrong scale or offset, to which a correlation is blind.
    """
    predicted, true = row_results.values.astype(np.float64), targets.values.astype(np.float64)
    parts = [regression.make_sum_metric(true, predicted)]
    if step := head.facts.get("step"):
        low, high = head.facts["lowest"], head.facts["highest"]
        # A score between or beyond the steps of the training scores counts as the nearest step.
        rated = low + step * regression.to_ratings(true, low, high, step)
        parts.append(regression.make_kappa_metric(rated, predicted, low, high, step))
    combined_metric = combine_metrics(*parts)

    def score(sums: Floats) -> dict[str, Floats]:
        scores = combined_metric.score(sums)
        return {"neg_rmse": -scores["rmse"], **scores}

    return SumMetric(combined_metric.rows, score)


def compute_extra_number_scores(row_results: RaggedArray, targets: RaggedArray, head: Head) -> Scores:
    """Spearman's rank correlation."""
    return {
        "spearman": regression.compute_spearman(
            targets.values.astype(np.float64), row_results.values.astype(np.float64)
        )
    }


# ---------------------------------------------------------------------------------------------------------------- tags


def make_tags_metric(row_results: RaggedArray, targets: RaggedArray, head: Head) -> SumMetric:
    """Precision, recall and F1 of whole entities (type, start and end right), and the share of words that are."""
    true, predicted = tables.collect_tags(row_results, targets)
    tag_names = [tables.to_tag_names(side, head) for side in (true, predicted)]
    num_correct = [(tags == predicted_tags).sum() for tags, predicted_tags in zip(true, predicted, strict=True)]
    sums = np.stack([np.asarray(num_correct, dtype=np.float64), np.array([float(len(row)) for row in true])], axis=1)
    words = SumMetric(sums, lambda total: {"word_accuracy": ratio(total[..., 0], total[..., 1])})
    return combine_metrics(entities.make_sum_metric(*tag_names), words)


# ------------------------------------------------------------------------------------------------------------- summary


def make_summary_metric(row_results: RaggedArray, targets: RaggedArray, head: Head) -> SumMetric:
    """ROUGE-1, 2 and L (mean F1, 0 to 1), their mean, and BLEU (of the corpus, 0 to 100) of the summaries under the
    head's budget; of the first sentences under the same one, which a model must beat; and ROUGE of the oracle's
    sentences, which are learned, however long they are. The difference to the first sentences has an interval of its
    own, for a document is hard or easy for both."""
    rows = np.array([row[: summary_rows.NUM_FIGURES] for row in row_results]).reshape(-1, summary_rows.NUM_FIGURES)
    size, width = len(rouge.ROUGE_NAMES), len(rouge.ROUGE_NAMES) + rouge.BLEU_COUNTS
    (rouge_scores, bleu_sums), (lead, lead_counts) = (
        (rows[:, start : start + size], rows[:, start + size : start + width]) for start in (0, width)
    )
    return combine_metrics(
        _make_rouge_metric("", rouge_scores),
        SumMetric(bleu_sums, lambda sums: {"bleu": rouge.compute_bleu(sums)}),
        _make_rouge_metric("lead_", lead),
        SumMetric(lead_counts, lambda sums: {"lead_bleu": rouge.compute_bleu(sums)}),
        _make_rouge_metric("oracle_", rows[:, 2 * width : 2 * width + size]),
        _make_rouge_metric("over_lead_", rouge_scores - lead),
        SumMetric(np.concatenate([bleu_sums, lead_counts], axis=1), _bleu_over_lead),
    )


def _make_rouge_metric(prefix: str, columns: Floats) -> SumMetric:
    """`columns` is [rows, ROUGES]. The mean of each column, and the mean of all."""
    column_by_name = {name: column for name, column in zip(rouge.ROUGE_NAMES, columns.T, strict=True)}
    return make_mean_metric(
        {f"{prefix}{name}": column for name, column in {"rouge": columns.mean(axis=1), **column_by_name}.items()}
    )


def _bleu_over_lead(sums: Floats) -> dict[str, Floats]:
    summary_sums, lead_sums = np.split(sums, 2, axis=-1)
    return {"over_lead_bleu": rouge.compute_bleu(summary_sums) - rouge.compute_bleu(lead_sums)}


def compute_extra_summary_scores(row_results: RaggedArray, targets: RaggedArray, head: Head) -> Scores:
    """The AUC of telling the oracle's sentences from the others by their chance, over all that were read."""
    in_oracle, _, probabilities, _ = tables.collect_sentences(row_results, targets)
    in_oracle, probabilities = in_oracle[probabilities >= 0], probabilities[probabilities >= 0]
    area, _ = classification.compute_auc(in_oracle.astype(np.int64), probabilities[:, None] * np.array([-1.0, 1.0]))
    return {} if area is None else {"auc": area}


# --------------------------------------------------------------------------------------------------- spans and tokens


def make_spans_metric(row_results: RaggedArray, targets: RaggedArray, head: Head) -> SumMetric:
    """Exact match and F1 of the answers' tokens, 0 to 1: an answer is given where its margin over none is above the
    head's threshold. (`rtrain evaluate` gives SQuAD's own scores, which are of the texts.)"""
    f1, exact, is_answered, _ = tables.score_spans(row_results, head)
    return make_mean_metric({"f1": f1, "exact_match": exact, "answered": is_answered})


def make_tokens_metric(row_results: RaggedArray, targets: RaggedArray, head: Head) -> SumMetric:
    """Perplexity and accuracy of masked tokens, over all of them: rows weigh by their tokens."""

    def score(sums: Floats) -> dict[str, Floats]:
        num_targets, num_correct, losses = np.moveaxis(sums, -1, 0)
        mean = ratio(losses, num_targets)
        with np.errstate(over="ignore"):  # of a model that has learned nothing
            perplexity = np.where(num_targets > 0, np.exp(mean), 0.0)
        return {"neg_loss": -mean, "perplexity": perplexity, "masked_accuracy": ratio(num_correct, num_targets)}

    return SumMetric(row_results.to_matrix(3).astype(np.float64), score)


# -------------------------------------------------------------------------------------------------------------- shared


def _to_int64(values: Any) -> Ints:
    return np.asarray(values, dtype=np.int64)


def add_mean_score(metric: SumMetric, mean_name: str, names: Sequence[str], present: npt.ArrayLike) -> SumMetric:
    """`metric`, and before its scores the mean of those in `names` that have rows; `present` says, [rows, names], which
    rows count for which."""
    counts = SumMetric(np.asarray(present, dtype=np.float64), lambda sums: {})
    combined_metric, num_scores = combine_metrics(metric, counts), len(names)

    def score(sums: Floats) -> dict[str, Floats]:
        scores, has_rows = metric.score(sums[..., :-num_scores]), sums[..., -num_scores:] > 0
        values = np.stack([scores[name] for name in names], axis=-1)
        return {mean_name: ratio((values * has_rows).sum(axis=-1), has_rows.sum(axis=-1)), **scores}

    return SumMetric(combined_metric.rows, score)


def _select_scores(sum_metric: SumMetric, names: tuple[str, ...], prefix: str = "") -> SumMetric:
    """Only the scores in `names`, each with `prefix` before its name."""

    def score(sums: Floats) -> dict[str, Floats]:
        scores = sum_metric.score(sums)
        return {prefix + name: scores[name] for name in names}

    return SumMetric(sum_metric.rows, score)


METRICS: Mapping[str, Metric] = {
    "classes": Metric(
        "accuracy",
        make_classes_metric,
        compute_extra_class_scores,
        tables.build_class_tables,
        row_correct.mark_correct_classes,
    ),
    "labels": Metric(
        "micro_f1",
        make_labels_metric,
        compute_extra_label_scores,
        tables.build_label_tables,
        row_correct.mark_correct_labels,
    ),
    "heads": Metric("mean_accuracy", make_heads_metric, None, tables.build_head_tables, row_correct.mark_correct_heads),
    "number": Metric("neg_rmse", make_number_metric, compute_extra_number_scores, tables.build_number_tables),
    "tags": Metric("f1", make_tags_metric, None, tables.build_tag_tables, row_correct.mark_correct_tags),
    "spans": Metric("f1", make_spans_metric, None, tables.build_span_tables, row_correct.mark_correct_spans),
    "tokens": Metric("neg_loss", make_tokens_metric),
    "summary": Metric(
        "rouge",
        make_summary_metric,
        compute_extra_summary_scores,
        tables.build_summary_tables,
        None,
        ("oracle_", "over_lead_"),
    ),
}
