"""Numbers: the predicted against the true ones. Masked text: the loss of each block."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rtrain.report import stats
from rtrain.report.collect import Collected
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Figure
from rtrain.report.drawing.svg import number, three
from rtrain.report.outputs import confusion

MOST_POINTS = 1500
MOST_STEPS = 25
"""Steps of a scale up to which its confusion matrix is drawn."""


def blocks(run: Collected, tables: Mapping[str, Any]) -> list[Block]:
    answers = run.answers
    assert answers is not None  # section
    chosen = stats.sample(len(answers), MOST_POINTS)
    target, found = answers.target, answers.prediction
    off = found - target
    drawn = f"{len(chosen):,} of {len(answers):,} rows are drawn." if len(chosen) < len(answers) else "A point per row."
    lean = "too high" if off.mean() > 0 else "too low"
    residuals, correlation = tables["residuals"], stats.pearson(target, found)
    figures: list[Block] = [
        Figure(
            f"Predicted against true: correlation {'undefined' if correlation is None else f'{correlation:.2f}'}",
            charts.scatter(target[chosen], found[chosen], "true score", "predicted score", diagonal=True),
            f"On the dashed line the prediction is right. {drawn}",
        ),
        Figure(
            f"Half of the predictions are off by {three(float(np.median(np.abs(off))))} or less",
            charts.histogram(
                residuals["edges"], {"error": residuals["rows"]}, "predicted minus true score", "rows", (0.0, "right")
            ),
            f"On average the predictions are {abs(float(off.mean())):.3g} {lean}.",
        ),
    ]
    scale = tables.get("scale", {})
    # On a finer scale hardly a prediction is right to the step, and the scatter says more.
    if len(scale.get("confusion", {}).get("labels", ())) in range(1, MOST_STEPS + 1):
        figures += confusion.blocks(scale, "On the scale of the scores: ", "score")
    return figures


def losses(run: Collected, tables: Mapping[str, Any]) -> list[Block]:
    """The losses of blocks of masked text, which has no other answer to look at."""
    answers = run.answers
    assert answers is not None  # section
    known = answers.loss[np.isfinite(answers.loss)]
    if not len(known):
        return []
    edges = stats.edges(known)
    counts = np.histogram(known, edges)[0].tolist()
    middle, high = np.percentile(known, (50, 95))
    title = f"Half of the blocks have a perplexity of {number(round(float(np.exp(middle)), 1))} or less"
    hard = number(round(float(np.exp(high)), 1))
    note = (
        f"Mean loss of a block's masked tokens; perplexity is its exponential. One block in twenty has more than {hard}"
        ": they are often lists, tables or another language."
    )
    return [Figure(title, charts.histogram(edges.tolist(), {"blocks": counts}, "loss of a block", "blocks"), note)]
