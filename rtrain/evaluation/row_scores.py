"""Scores of each row by kind of output, from the targets and predictions in a run's files.

The scores are those of `rtrain.metrics.registry` on the common rows, with two exceptions. Spans are compared with the
first true answer, since the files hold no other. If there are out-of-scope rows, the accuracy covers all rows, rejected
ones too.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rtrain.core.ragged import Head, RaggedArray
from rtrain.data.store.store import Store
from rtrain.evaluation.significance import RowScores
from rtrain.metrics import classes, classification, entities, per_class, registry, regression, spans, summaries
from rtrain.metrics.bootstrap import Bools, Floats, Ints, SumMetric, combine_metrics, make_mean_metric, ratio
from rtrain.metrics.classes import ACCURACY_WITH_ABSTENTIONS, MACRO_SCORES

AnswerColumn = npt.NDArray[Any]


class RowAnswers(NamedTuple):
    """One model's predictions; strings, floats or lists, as `rtrain.report.collect` reads them."""

    target: AnswerColumn
    prediction: AnswerColumn
    loss: Floats
    facts: Mapping[str, Any]
    """Facts of the head: names of heads, the scale of numbers, the out-of-scope label."""
    store: Store | None
    split: str
    positions: Ints
    """Positions of the rows in the store's split."""


def score_rows(output: str, answers: RowAnswers) -> RowScores:
    """Score predictions; kinds of output without a scorer are scored by their loss."""
    row_scores = SCORERS[output](answers) if output in SCORERS else None
    if row_scores is None:
        return _score_losses(answers)
    heads = _head_names(answers) if output == "heads" else ()
    return replace(row_scores, classes=per_class.score_answers(output, answers.target, answers.prediction, heads))


def merge_targets(output: str, targets: Sequence[AnswerColumn]) -> tuple[AnswerColumn, Bools]:
    """Merge the targets of all models: (one target per row, whether the targets match).

    A label that is missing in one model's training rows is taken from another model's file. Tags of a truncated text
    cannot be compared.
    """
    merged = targets[0].copy()
    is_same = np.ones(len(merged), dtype=np.bool_)
    if output not in LABEL_OUTPUTS:
        return merged, is_same
    for row, row_targets in enumerate(zip(*targets, strict=True)):
        if isinstance(row_targets[0], str):
            merged[row] = next((label for label in row_targets if label), "")
        elif output == "labels":
            merged[row] = sorted(set().union(*row_targets))
        elif len({len(tags) for tags in row_targets}) > 1:
            is_same[row] = False
        else:
            empty = ("", "O")
            merged[row] = [
                next((tag for tag in part if tag not in empty), part[0]) for part in zip(*row_targets, strict=True)
            ]
    return merged, is_same


LABEL_OUTPUTS = ("classes", "labels", "heads", "tags")
"""Kinds of output whose targets are labels."""


def _find_correct(answers: RowAnswers) -> Bools:
    pairs = zip(answers.target, answers.prediction, strict=True)
    return np.array([bool(target == prediction) for target, prediction in pairs], dtype=np.bool_)


def select_scores(additive: SumMetric, names: tuple[str, ...]) -> SumMetric:
    """Select scores by name, since slices are resampled hundreds of times."""

    def score(sums: Floats) -> dict[str, Floats]:
        all_scores = additive.score(sums)
        return {name: all_scores[name] for name in names}

    return SumMetric(additive.rows, score)


def _score_classes(answers: RowAnswers) -> RowScores:
    is_correct = _find_correct(answers) & (answers.target != "")
    if "out_of_scope_label" in answers.facts:
        name = ACCURACY_WITH_ABSTENTIONS
        scores = accuracy = make_mean_metric({name: is_correct})
    else:
        name = "accuracy"
        accuracy = make_mean_metric({name: is_correct})
        metric = classification.make_sum_metric(*_encode_labels(answers.target, answers.prediction))
        scores = select_scores(metric, (name, *MACRO_SCORES))
    return RowScores(scores, name, is_correct, accuracy)


def _encode_labels(target: AnswerColumn, prediction: AnswerColumn) -> tuple[Ints, Ints, int]:
    """Encode labels as numbers, -1 for none: (targets, predictions, number of labels)."""
    names = sorted({*target, *prediction} - {""})
    number = {name: place for place, name in enumerate(names)}
    true, predicted = (
        np.array([number.get(label, -1) for label in side], dtype=np.int64) for side in (target, prediction)
    )
    # A row without a predicted label gets an extra label that no target has.
    return true, np.where(predicted < 0, len(names), predicted), len(names) + 1


def _score_labels(answers: RowAnswers) -> RowScores:
    sides = (answers.target, answers.prediction)
    names = sorted({name for side in sides for row in side for name in row})
    number = {name: place for place, name in enumerate(names)}
    true, predicted = (np.zeros((len(answers.target), len(names)), dtype=np.bool_) for _ in sides)
    for indicator, rows in zip((true, predicted), sides, strict=True):
        for place, row in enumerate(rows):
            indicator[place, [number[name] for name in row]] = True
    score_names = ("micro_f1", "micro_precision", "micro_recall", "macro_f1", "subset_accuracy")
    scores = select_scores(classification.make_multilabel_metric(true, predicted), score_names)
    # Terms of micro F1 per row: true positives, true labels, predicted labels.
    sums = np.stack([part.sum(axis=1) for part in (true & predicted, true, predicted)], axis=1)
    main = SumMetric(sums.astype(np.float64), lambda t: {"micro_f1": ratio(2 * t[..., 0], t[..., 1] + t[..., 2])})
    return RowScores(scores, "micro_f1", np.all(true == predicted, axis=1), main)


def _score_heads(answers: RowAnswers) -> RowScores:
    names = _head_names(answers)
    score_names = [f"{name}_accuracy" for name in names]
    present, correct = (np.zeros((len(answers.target), len(names))) for _ in range(2))
    for row, (targets, predictions) in enumerate(zip(answers.target, answers.prediction, strict=True)):
        for place, (target, prediction) in enumerate(zip(targets, predictions, strict=True)):
            present[row, place], correct[row, place] = bool(target), bool(target) and target == prediction
    parts = [_make_share(name, correct[:, place], present[:, place]) for place, name in enumerate(score_names)]
    scores = classes.add_mean_score(combine_metrics(*parts), "mean_accuracy", score_names, present)
    return RowScores(scores, "mean_accuracy", np.asarray((correct == present).all(axis=1)), scores)


def _head_names(answers: RowAnswers) -> list[str]:
    width = max((len(row) for row in answers.target), default=0)
    names = [name for name, _ in answers.facts.get("heads", ())]
    return names if len(names) == width else [f"head_{place + 1}" for place in range(width)]


def _make_share(name: str, part: Floats, total: Floats) -> SumMetric:
    return SumMetric(np.stack([part, total], axis=1), lambda sums: {name: ratio(sums[..., 0], sums[..., 1])})


def _score_numbers(answers: RowAnswers) -> RowScores:
    true, predicted = (np.asarray(side, dtype=np.float64) for side in (answers.target, answers.prediction))
    rows = RaggedArray.from_matrix(predicted), RaggedArray.from_matrix(true)
    scores = regression.make_number_metric(*rows, Head((), answers.facts))
    return RowScores(scores, "neg_rmse", None, scores, -np.abs(predicted - true))


def _score_tags(answers: RowAnswers) -> RowScores:
    pairs = zip(answers.target, answers.prediction, strict=True)
    correct_words = [sum(a == b for a, b in zip(*pair, strict=True)) for pair in pairs]
    shares = (np.array(counts, dtype=np.float64) for counts in (correct_words, [len(row) for row in answers.target]))
    entity_scores = entities.make_sum_metric(list(answers.target), list(answers.prediction))
    scores = combine_metrics(entity_scores, _make_share("word_accuracy", *shares))
    return RowScores(scores, "f1", _find_correct(answers), entity_scores)


def _score_spans(answers: RowAnswers) -> RowScores:
    pairs = [
        (prediction, [target] if target else [])
        for target, prediction in zip(answers.target, answers.prediction, strict=True)
    ]
    exact, f1 = (np.array([score(*pair) for pair in pairs]) for score in (spans.compute_exact_match, spans.compute_f1))
    scores = make_mean_metric({"f1": f1, "exact_match": exact})
    return RowScores(scores, "f1", exact > 0, scores, f1)


def _score_summaries(answers: RowAnswers) -> RowScores | None:
    """Score summaries by ROUGE; None without the token store, which holds the words."""
    if answers.store is None:
        return None
    rows, targets = [], answers.store.targets(answers.split, answers.positions)
    for places, numbers in zip(targets, answers.prediction, strict=True):
        words, _ = summaries.decode_words(places)
        rows.append(summaries.compute_rouge(words.select_words(int(number) - 1 for number in numbers), words.reference))
    table = np.array(rows, dtype=np.float64).reshape(-1, len(summaries.ROUGE_NAMES))
    columns = dict(zip(summaries.ROUGE_NAMES, table.T, strict=True))
    scores = make_mean_metric({"rouge": table.mean(axis=1), **columns})
    return RowScores(scores, "rouge", None, scores, table.mean(axis=1))


GUESSED_PATTERN = re.compile(r"(\d+) of (\d+) ")


def _score_tokens(answers: RowAnswers) -> RowScores | None:
    """Score masked tokens; a row's prediction says `3 of 5`."""
    matches = [GUESSED_PATTERN.match(answer) for answer in answers.prediction]
    if not all(matches) or not np.isfinite(answers.loss).all():
        return None
    counts = [[int(match[1]), int(match[2])] for match in matches if match]
    correct, guessed = np.array(counts, dtype=np.float64).reshape(-1, 2).T
    rows = RaggedArray.from_matrix(np.stack([guessed, correct, answers.loss * guessed], axis=1))
    scores = registry.make_tokens_metric(rows, rows, Head())
    return RowScores(scores, "neg_loss", None, scores, -answers.loss)


def _score_losses(answers: RowAnswers) -> RowScores:
    is_finite = np.isfinite(answers.loss)
    loss = np.where(is_finite, answers.loss, answers.loss[is_finite].max(initial=0.0))  # an infinite loss has no mean
    scores = make_mean_metric({"neg_loss": -loss})
    return RowScores(scores, "neg_loss", None, scores, -loss)


SCORERS: Mapping[str, Callable[[RowAnswers], RowScores | None]] = {
    "classes": _score_classes,
    "labels": _score_labels,
    "heads": _score_heads,
    "number": _score_numbers,
    "tags": _score_tags,
    "spans": _score_spans,
    "summary": _score_summaries,
    "tokens": _score_tokens,
}
