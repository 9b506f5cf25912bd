"""The scores of a split by the kind of output, in float64: `METRICS` lists them.

Pure functions of all rows' outcomes and targets, in the same order on every worker, so that scores that are no sums
over rows (an area under a curve, a correlation) need no special care. The arithmetic is in the other modules of this
package; here it is chosen for a kind of output, and named.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rtrain.core.ragged import IGNORED, OUTSIDE, Head, Ragged
from rtrain.metrics import classification, entities, regression, rouge, row_correct, summary_rows, tables
from rtrain.metrics.sums import Additive, Floats, Ints, joined, means, ratio

Scores = dict[str, float]
Measured = Callable[[Ragged, Ragged, Head], Scores]
"""(outcomes, targets, head) -> scores by name."""


class Metric(NamedTuple):
    headline: str
    """Name of the score by which models are compared; larger is better."""
    additive: Callable[[Ragged, Ragged, Head], Additive]
    """Scores as a function of sums over rows, which can be resampled: the headline is one of them."""
    more: Measured | None = None
    """Figures that are measured of a finished model only."""
    tables: Callable[[Ragged, Ragged, Head], dict[str, Any]] | None = None
    """Results that are no single figure, as JSON of bounded size (`rtrain.metrics.tables`)."""
    right: Callable[[Ragged, Ragged, Head], npt.NDArray[np.bool_]] | None = None
    """Whether each row's answer is right as a whole; None where answers are nearer to the truth or farther from it."""
    later: tuple[str, ...] = ()
    """Beginnings of the names of those scores of `additive` that are given of a finished model only."""

    def scores(self, outcomes: Ragged, targets: Ragged, head: Head) -> Scores:
        """The headline and the field's main figures, few enough for a line of the log; `rows` among them."""
        found = self.additive(outcomes, targets, head).scores()
        return {**{name: one for name, one in found.items() if not name.startswith(self.later)}, "rows": len(outcomes)}

    def all(self, outcomes: Ragged, targets: Ragged, head: Head) -> Scores:
        """Every figure."""
        found = self.additive(outcomes, targets, head).scores()
        first = {name: one for name, one in found.items() if not name.startswith(self.later)}
        more = {} if self.more is None else self.more(outcomes, targets, head)
        return {**first, "rows": len(outcomes), **found, **more}


def as_read(name: str) -> tuple[str, int]:
    """A score's name as it is shown, and the sign of its value: the negative of an error is shown as the error."""
    return name.removeprefix("neg_"), -1 if name.startswith("neg_") else 1


def metric_for(output: str) -> Metric:
    return METRICS[output]


# ------------------------------------------------------------------------------------------------------------- classes

MACRO = ("macro_precision", "macro_recall", "macro_f1")
ACCURACY_WITH_REFUSALS = "accuracy_with_refusals"
"""Accuracy over all rows, those outside of the classes too, where a row may be refused."""


def additive_classes(outcomes: Ragged, targets: Ragged, head: Head) -> Additive:
    """Accuracy and macro precision, recall and F1. A target of -1 (a label without a class) is wrong for every class.

    Where rows may be outside of all classes, these are of the rows inside, none of them refused; then, once there is a
    threshold, how well the others are told from them, and the accuracy of all rows with those refused.
    """
    logits, true = outcomes.matrix(len(head.labels)), _whole(targets.values)
    predicted = classification.best(logits)
    found = _named(classification.additive(true, predicted, len(head.labels)), ("accuracy", *MACRO))
    if "outside" not in head.facts:
        return found
    outside = true == OUTSIDE
    inside = Additive(found.rows.multiply((~outside).astype(np.float64)[:, None]).tocsr(), found.score)
    if "threshold" not in head.facts:
        return inside
    refused = tables.chances_of(outcomes, head).max(axis=1) < head.facts["threshold"]
    right = np.where(outside, refused, (predicted == true) & ~refused)
    columns = (refused & outside, refused, outside, ~refused & ~outside, ~outside, right, np.ones_like(right))
    return joined(inside, Additive(np.stack(columns, axis=1).astype(np.float64), _outside))


def _outside(sums: Floats) -> dict[str, Floats]:
    both, refused, outside, kept, inside, right, rows = np.moveaxis(sums, -1, 0)
    return {
        "outside_precision": ratio(both, refused),
        "outside_recall": ratio(both, outside),
        "outside_f1": ratio(2 * both, refused + outside),
        "inside_kept": ratio(kept, inside),
        ACCURACY_WITH_REFUSALS: ratio(right, rows),
    }


def more_of_classes(outcomes: Ragged, targets: Ragged, head: Head) -> Scores:
    """One-vs-rest AUC, where a class has rows and others have too, and the expected calibration error; the AUC of
    telling the rows outside of all classes by the best class's chance."""
    chances, true = tables.chances_of(outcomes, head), _whole(targets.values)
    outside = true == OUTSIDE
    found = {"ece": tables.ece(chances[~outside], true[~outside])}
    area, _ = classification.auc(true[~outside], chances[~outside])
    told, _ = classification.auc(outside.astype(np.int64), chances.max(axis=1)[:, None] * np.array([1.0, -1.0]))
    return {**({} if area is None else {"auc": area}), **found, **({} if told is None else {"outside_auc": told})}


# -------------------------------------------------------------------------------------------------------------- labels


def additive_labels(outcomes: Ragged, targets: Ragged, head: Head) -> Additive:
    """Micro and macro precision, recall and F1 of labels given or not, and the share of rows with all labels right.

    A chance of the label's threshold or more gives it (0.5 where none was chosen).
    """
    true, given = tables.labels_given(outcomes, targets, head)
    found = classification.additive_multilabel(true, given)
    names = ("micro_f1", "micro_precision", "micro_recall", "macro_f1", "macro_precision", "macro_recall")
    return _named(found, (*names, "subset_accuracy"))


def more_of_labels(outcomes: Ragged, targets: Ragged, head: Head) -> Scores:
    """Mean average precision, where a label has rows; it needs no threshold. Answers that are no number have no order,
    and none."""
    size = len(head.labels)
    if np.isnan(outcomes.values).any():
        return {}
    found = classification.mean_average_precision(targets.matrix(size) > 0, outcomes.matrix(size))
    return {} if found is None else {"mean_average_precision": found}


# --------------------------------------------------------------------------------------------------------------- heads


def additive_heads(outcomes: Ragged, targets: Ragged, head: Head) -> Additive:
    """Accuracy and macro F1 of each head, over the rows that have its label, and the mean of the accuracies of those
    heads of which some row has one."""
    parts, names, presence = [], [], []
    for name, own, logits, true in tables.of_heads(outcomes, targets, head):
        part = classification.additive(np.maximum(true, -1), classification.best(logits), len(own))
        present = part.rows.multiply((true != IGNORED).astype(np.float64)[:, None]).tocsr()
        parts.append(_named(Additive(present, part.score), ("accuracy", "macro_f1"), f"{name}_"))
        names.append(f"{name}_accuracy")
        presence.append(true != IGNORED)
    return with_mean(joined(*parts), "mean_accuracy", names, np.stack(presence, axis=1))


# -------------------------------------------------------------------------------------------------------------- number


def additive_number(outcomes: Ragged, targets: Ragged, head: Head) -> Additive:
    """Errors in the targets' own unit; Pearson's r; and, where the training scores are steps of a scale, quadratic
    weighted kappa of predictions rounded to that scale.

    The headline is the negative RMSE: it is defined for any targets and predictions, also for the constant ones of a
    model that has learned nothing yet, and sees a wrong scale or offset, to which a correlation is blind.
    """
    found, true = outcomes.values.astype(np.float64), targets.values.astype(np.float64)
    parts = [regression.additive(true, found)]
    if step := head.facts.get("step"):
        low, high = head.facts["lowest"], head.facts["highest"]
        # A score between or beyond the steps of the training scores counts as the nearest step.
        rated = low + step * regression.ratings(true, low, high, step)
        parts.append(regression.additive_kappa(rated, found, low, high, step))
    every = joined(*parts)

    def score(sums: Floats) -> dict[str, Floats]:
        scores = every.score(sums)
        return {"neg_rmse": -scores["rmse"], **scores}

    return Additive(every.rows, score)


def more_of_number(outcomes: Ragged, targets: Ragged, head: Head) -> Scores:
    """Spearman's rank correlation."""
    return {"spearman": regression.spearman(targets.values.astype(np.float64), outcomes.values.astype(np.float64))}


# ---------------------------------------------------------------------------------------------------------------- tags


def additive_tags(outcomes: Ragged, targets: Ragged, head: Head) -> Additive:
    """Precision, recall and F1 of whole entities (type, start and end right), and the share of words that are."""
    true, found = tables.tags_of(outcomes, targets)
    named = [tables.names_of(side, head) for side in (true, found)]
    right = [(one == other).sum() for one, other in zip(true, found, strict=True)]
    sums = np.stack([np.asarray(right, dtype=np.float64), np.array([float(len(row)) for row in true])], axis=1)
    words = Additive(sums, lambda total: {"word_accuracy": ratio(total[..., 0], total[..., 1])})
    return joined(entities.additive(*named), words)


# ------------------------------------------------------------------------------------------------------------- summary


def additive_summary(outcomes: Ragged, targets: Ragged, head: Head) -> Additive:
    """ROUGE-1, 2 and L (mean F1, 0 to 1), their mean, and BLEU (of the corpus, 0 to 100) of the summaries under the
    head's budget; of the first sentences under the same one, which a model must beat; and ROUGE of the oracle's
    sentences, which are learned, however long they are. The difference to the first sentences has an interval of its
    own, for a document is hard or easy for both."""
    rows = np.array([row[: summary_rows.FIGURES] for row in outcomes]).reshape(-1, summary_rows.FIGURES)
    size, wide = len(rouge.ROUGES), len(rouge.ROUGES) + rouge.BLEU_COUNTS
    (own, own_counts), (lead, lead_counts) = (
        (rows[:, start : start + size], rows[:, start + size : start + wide]) for start in (0, wide)
    )
    return joined(
        _rouges("", own),
        Additive(own_counts, lambda sums: {"bleu": rouge.bleu(sums)}),
        _rouges("lead_", lead),
        Additive(lead_counts, lambda sums: {"lead_bleu": rouge.bleu(sums)}),
        _rouges("oracle_", rows[:, 2 * wide : 2 * wide + size]),
        _rouges("over_lead_", own - lead),
        Additive(np.concatenate([own_counts, lead_counts], axis=1), _bleu_over),
    )


def _rouges(prefix: str, columns: Floats) -> Additive:
    """`columns` is [rows, ROUGES]. The mean of each column, and the mean of all."""
    named = {name: column for name, column in zip(rouge.ROUGES, columns.T, strict=True)}
    return means({f"{prefix}{name}": column for name, column in {"rouge": columns.mean(axis=1), **named}.items()})


def _bleu_over(sums: Floats) -> dict[str, Floats]:
    own, lead = np.split(sums, 2, axis=-1)
    return {"over_lead_bleu": rouge.bleu(own) - rouge.bleu(lead)}


def more_of_summary(outcomes: Ragged, targets: Ragged, head: Head) -> Scores:
    """The AUC of telling the oracle's sentences from the others by their chance, over all that were read."""
    taken, _, chances, _ = tables.sentences_of(outcomes, targets)
    taken, chances = taken[chances >= 0], chances[chances >= 0]
    area, _ = classification.auc(taken.astype(np.int64), chances[:, None] * np.array([-1.0, 1.0]))
    return {} if area is None else {"auc": area}


# --------------------------------------------------------------------------------------------------- spans and tokens


def additive_spans(outcomes: Ragged, targets: Ragged, head: Head) -> Additive:
    """Exact match and F1 of the answers' tokens, 0 to 1: an answer is given where its margin over none is above the
    head's threshold. (`rtrain evaluate` gives SQuAD's own scores, which are of the texts.)"""
    f1, exact, given, _ = tables.answers_of(outcomes, head)
    return means({"f1": f1, "exact_match": exact, "answered": given})


def additive_tokens(outcomes: Ragged, targets: Ragged, head: Head) -> Additive:
    """Perplexity and accuracy of masked tokens, over all of them: rows weigh by their tokens."""

    def score(sums: Floats) -> dict[str, Floats]:
        guessed, right, losses = np.moveaxis(sums, -1, 0)
        mean = ratio(losses, guessed)
        with np.errstate(over="ignore"):  # of a model that has learned nothing
            perplexity = np.where(guessed > 0, np.exp(mean), 0.0)
        return {"neg_loss": -mean, "perplexity": perplexity, "masked_accuracy": ratio(right, guessed)}

    return Additive(outcomes.matrix(3).astype(np.float64), score)


# -------------------------------------------------------------------------------------------------------------- shared


def _whole(values: Any) -> Ints:
    return np.asarray(values, dtype=np.int64)


def with_mean(every: Additive, mean: str, names: Sequence[str], present: npt.ArrayLike) -> Additive:
    """`every`, and before its scores the mean of those in `names` that have rows; `present` says, [rows, names], which
    rows count for which."""
    counts = Additive(np.asarray(present, dtype=np.float64), lambda sums: {})
    both, wide = joined(every, counts), len(names)

    def score(sums: Floats) -> dict[str, Floats]:
        found, there = every.score(sums[..., :-wide]), sums[..., -wide:] > 0
        values = np.stack([found[name] for name in names], axis=-1)
        return {mean: ratio((values * there).sum(axis=-1), there.sum(axis=-1)), **found}

    return Additive(both.rows, score)


def _named(additive: Additive, names: tuple[str, ...], prefix: str = "") -> Additive:
    """Only the scores in `names`, each with `prefix` before its name."""

    def score(sums: Floats) -> dict[str, Floats]:
        found = additive.score(sums)
        return {prefix + name: found[name] for name in names}

    return Additive(additive.rows, score)


METRICS: Mapping[str, Metric] = {
    "classes": Metric("accuracy", additive_classes, more_of_classes, tables.classes, row_correct.classes),
    "labels": Metric("micro_f1", additive_labels, more_of_labels, tables.labels, row_correct.labels),
    "heads": Metric("mean_accuracy", additive_heads, None, tables.heads, row_correct.heads),
    "number": Metric("neg_rmse", additive_number, more_of_number, tables.number),
    "tags": Metric("f1", additive_tags, None, tables.tags, row_correct.tags),
    "spans": Metric("f1", additive_spans, None, tables.spans, row_correct.spans),
    "tokens": Metric("neg_loss", additive_tokens),
    "summary": Metric("rouge", additive_summary, more_of_summary, tables.summary, None, ("oracle_", "over_lead_")),
}
