"""The answers of the best weights, by their kind: scores with intervals, confusion, calibration, errors."""

import numpy as np

from rtrain.report import charts, stats
from rtrain.report.blocks import Block, Cell, Figure, Note, Section, Table
from rtrain.report.collect import Run
from rtrain.report.predictions import Predictions
from rtrain.report.stats import Interval
from rtrain.report.svg import score_name, short, three

SPLITS = {"test": "test", "valid": "validation"}
MOST_CLASSES = 100
"""Labels of the heat map; of more, those with the most mistakes."""
MOST_PAIRS = 15
MOST_POINTS = 1500
RARE = 5
"""Rows below which the recall of a label says nothing."""


def intervals(answers: Predictions) -> dict[str, Interval]:
    """95 % bootstrap intervals of the scores that fit the kind of answer."""
    if answers.kind == "classes":
        names = labels(answers)
        targets, found = stats.codes(answers.target, names), stats.codes(answers.prediction, names)
        flat = targets * len(names) + found
        size = len(names) ** 2

        def of_classes(rows: stats.Ints) -> dict[str, float]:
            return stats.overall(np.bincount(flat[rows], minlength=size).reshape(len(names), -1))

        return stats.bootstrap(len(answers), of_classes)
    if answers.kind == "numbers":
        return stats.bootstrap(len(answers), lambda rows: stats.errors(answers.target[rows], answers.prediction[rows]))
    right = answers.right.astype(np.float64)
    return stats.bootstrap(len(answers), lambda rows: {"rows_exactly_right": float(right[rows].mean())})


def labels(answers: Predictions) -> list[str]:
    return sorted({*answers.target.tolist(), *answers.prediction.tolist()})


def section(run: Run, found: dict[str, Interval]) -> Section:
    answers = run.predictions
    if answers is None:
        text = "The run has left no predictions-test.parquet or predictions-valid.parquet: answers cannot be looked at."
        return Section("answers", "Answers", "", [Note(text)])
    blocks: list[Block] = [_scores(run, answers, found)]
    if answers.kind == "classes":
        blocks += [*_calibration(answers), *_confusion(answers)]
    elif answers.kind == "numbers":
        blocks += _errors(answers)
    intro = f"What the best weights answered on the {len(answers):,} {SPLITS[answers.split]} rows."
    return Section("answers", "Answers", intro, blocks)


def _scores(run: Run, answers: Predictions, found: dict[str, Interval]) -> Table:
    scores = run.summary["metrics"][answers.split] or {}
    rows = [
        (score_name(name), f"{one.value:.4f}", f"{one.low:.4f} to {one.high:.4f}", _logged(scores.get(name)))
        for name, one in found.items()
    ]
    note = (
        "Bootstrap over the rows: made in this way from other rows of the same kind, 95 of 100 such intervals would "
        "hold the true score. Two models whose intervals overlap widely are not told apart by these rows."
    )
    return Table("Scores and how sure they are", ("score", "value", "95 % interval", "logged by the run"), rows, note)


def _logged(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "-"


# -------------------------------------------------------------------------------------------------------------- classes


def _calibration(answers: Predictions) -> list[Block]:
    known = np.isfinite(answers.score) & (answers.score >= 0) & (answers.score <= 1)
    if not known.any():
        return []
    right = answers.right[known]
    found = stats.calibration(answers.score[known], right)
    off = float(answers.score[known].mean() - right.mean())
    mood = (
        "about as sure as it is right"
        if abs(off) < 0.02
        else "too sure of itself"
        if off > 0
        else "less sure than it may be"
    )
    chart = charts.reliability(found.confidence, found.accuracy, found.rows.tolist())
    note = (
        "On the dashed line confidence and accuracy are equal; below it the model is too sure. Dots are bins of "
        "answers, their "
        f"area the number of rows. Mean distance from the line (expected calibration error): {found.error:.3f}."
    )
    title = f"The model is {mood}: {100 * answers.score[known].mean():.0f} % sure, {100 * right.mean():.0f} % right"
    return [Figure(title, chart, note)]


def _confusion(answers: Predictions) -> list[Block]:
    names = labels(answers)
    counts = stats.confusion(stats.codes(answers.target, names), stats.codes(answers.prediction, names), len(names))
    wrong = counts - np.diag(np.diag(counts))
    blocks: list[Block] = []
    if wrong.any():
        blocks.append(_pairs(counts, wrong, names))
    blocks.append(_worst(counts, names))
    mistakes = wrong.sum(axis=0) + wrong.sum(axis=1)
    kept = np.sort(np.argsort(-mistakes, kind="stable")[:MOST_CLASSES])
    order = kept[stats.chain(counts[np.ix_(kept, kept)])]
    chart = charts.heat(counts[np.ix_(order, order)], [names[code] for code in order])
    note = (
        "A row per true label, a column per predicted one, both in the same order: labels that are confused are "
        "neighbours. Blue, on the diagonal: right; orange: wrong; the darker, the larger the share of the row. Point "
        "at a cell for its rows; scroll sideways where it is cut."
    )
    if len(order) < len(names):
        note += f" Drawn are the {len(order)} labels with the most mistakes, of {len(names)}."
    title = f"{int(wrong.sum()):,} of {int(counts.sum()):,} answers are wrong; here is what was taken for what"
    return [*blocks, Figure(title, chart, note, wide=True)]


def _pairs(counts: stats.Ints, wrong: stats.Ints, names: list[str]) -> Table:
    order = np.argsort(-wrong, axis=None, kind="stable")[:MOST_PAIRS]
    pairs = [(int(place) // len(names), int(place) % len(names)) for place in order]
    rows = [
        (
            short(names[true], 40),
            short(names[said], 40),
            int(wrong[true, said]),
            f"{100 * wrong[true, said] / counts[true].sum():.0f} %",
        )
        for true, said in pairs
        if wrong[true, said]
    ]
    share = sum(row[2] for row in rows) / wrong.sum()
    note = f"These {len(rows)} pairs hold {100 * share:.0f} % of all wrong answers. Share: of the true label's rows."
    title = f"Most confused: {rows[0][0]} taken for {rows[0][1]}"
    return Table(title, ("true label", "answered", "rows", "share"), rows, note)


def _worst(counts: stats.Ints, names: list[str]) -> Table:
    scores, true = stats.class_scores(counts), counts.sum(axis=1)
    enough = np.flatnonzero(true >= RARE)
    order = enough[np.argsort(scores["f1"][enough], kind="stable")][:MOST_PAIRS]
    rows: list[list[Cell]] = [
        [short(names[code], 40), int(true[code]), *(f"{scores[name][code]:.2f}" for name in scores)] for code in order
    ]
    note = (
        "Precision: share of the answers with this label that are right; recall: share of its rows that were found; "
        f"F1: their harmonic mean. Labels with {RARE} rows or more."
    )
    return Table("The labels with the lowest F1", ("label", "rows", "precision", "recall", "F1"), rows, note)


# -------------------------------------------------------------------------------------------------------------- numbers


def _errors(answers: Predictions) -> list[Block]:
    chosen = stats.sample(len(answers), MOST_POINTS)
    target, found = answers.target, answers.prediction
    off, tokens = found - target, answers.tokens.astype(np.float64)
    edges = stats.edges(off)
    counts = np.histogram(off, edges)[0].tolist()
    drawn = f"{len(chosen):,} of {len(answers):,} rows are drawn." if len(chosen) < len(answers) else "A point per row."
    lean = "too high" if off.mean() > 0 else "too low"
    by_length, true_by_length = stats.pearson(tokens, found), stats.pearson(tokens, target)
    return [
        Figure(
            f"Predicted against true: correlation {_figure(stats.pearson(target, found))}",
            charts.scatter(target[chosen], found[chosen], "true score", "predicted score", diagonal=True),
            f"On the dashed line the prediction is right. {drawn}",
        ),
        Figure(
            f"Half of the predictions are off by {three(float(np.median(np.abs(off))))} or less",
            charts.histogram(edges.tolist(), {"error": counts}, "predicted minus true score", "rows", (0.0, "right")),
            f"On average the predictions are {abs(float(off.mean())):.3g} {lean}.",
        ),
        Figure(
            f"Length and predicted score: correlation {_figure(by_length)}",
            charts.scatter(tokens[chosen], found[chosen], "length (tokens)", "predicted score"),
            f"For the true scores it is {_figure(true_by_length)}; a much stronger one means that length was learned "
            "instead.",
        ),
    ]


def _figure(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.2f}"
