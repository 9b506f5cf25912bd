"""Numbers: the predicted against the true ones. Masked text: the loss of each block."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rtrain.report import stats
from rtrain.report.collect import RunData
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Figure
from rtrain.report.drawing.svg import format_number, format_significant
from rtrain.report.outputs import confusion

MAX_POINTS = 1500
MAX_SCALE_STEPS = 25
"""Steps of a scale up to which its confusion matrix is drawn."""


def build_blocks(run: RunData, tables: Mapping[str, Any]) -> list[Block]:
    answers = run.answers
    assert answers is not None  # section
    positions = stats.sample_rows(len(answers), MAX_POINTS)
    target, predictions = answers.target, answers.prediction
    errors = predictions - target
    points_note = (
        f"{len(positions):,} of {len(answers):,} rows are drawn."
        if len(positions) < len(answers)
        else "A point per row."
    )
    direction = "too high" if errors.mean() > 0 else "too low"
    residuals, correlation = tables["residuals"], stats.pearson_correlation(target, predictions)
    figures: list[Block] = [
        Figure(
            f"Predicted against true: correlation {'undefined' if correlation is None else f'{correlation:.2f}'}",
            charts.draw_scatter(
                target[positions], predictions[positions], "true score", "predicted score", diagonal=True
            ),
            f"On the dashed line the prediction is right. {points_note}",
        ),
        Figure(
            f"Half of the predictions are off by {format_significant(float(np.median(np.abs(errors))))} or less",
            charts.draw_histogram(
                residuals["edges"], {"error": residuals["rows"]}, "predicted minus true score", "rows", (0.0, "right")
            ),
            f"On average the predictions are {abs(float(errors.mean())):.3g} {direction}.",
        ),
    ]
    scale = tables.get("scale", {})
    # On a finer scale hardly a prediction is right to the step, and the scatter says more.
    if len(scale.get("confusion", {}).get("labels", ())) in range(1, MAX_SCALE_STEPS + 1):
        figures += confusion.build_blocks(scale, "On the scale of the scores: ", "score")
    return figures


def build_loss_blocks(run: RunData, tables: Mapping[str, Any]) -> list[Block]:
    """The losses of blocks of masked text, which has no other answer to look at."""
    answers = run.answers
    assert answers is not None  # section
    finite_losses = answers.loss[np.isfinite(answers.loss)]
    if not len(finite_losses):
        return []
    edges = stats.bin_edges(finite_losses)
    counts = np.histogram(finite_losses, edges)[0].tolist()
    median_loss, high_loss = np.percentile(finite_losses, (50, 95))
    title = f"Half of the blocks have a perplexity of {format_number(round(float(np.exp(median_loss)), 1))} or less"
    hard_perplexity = format_number(round(float(np.exp(high_loss)), 1))
    note = (
        "Mean loss of a block's masked tokens; perplexity is its exponential. One block in twenty has more than "
        f"{hard_perplexity}"
        ": they are often lists, tables or another language."
    )
    return [Figure(title, charts.draw_histogram(edges.tolist(), {"blocks": counts}, "loss of a block", "blocks"), note)]
