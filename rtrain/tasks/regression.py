"""One number per text: the score of an essay, a rating, a price. The model learns it in standard deviations."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rtrain.core.errors import UserError, quote_value
from rtrain.core.ragged import EncodedRow, Head, Outputs, RaggedArray, TokenBatch
from rtrain.tasks import base
from rtrain.tasks.base import AnswerColumn, Input, Inputs, Losses, Parameters, ProblemType, RowReport, Targets
from rtrain.tasks.defaults import PooledTask, pool_logits

if TYPE_CHECKING:
    import tokenizers
    import torch

MIN_SCORE_RANGE, MAX_ABS_SCORE = 1e-30, 1e37
"""Bounds of scores and of their differences: models square them in float32."""
EXAMPLE_TEXTS = (
    "Computers help us to learn, since they bring a library to every village. They also take time: a pupil who chats "
    "all evening reads no book. I believe that the gain is larger, if parents and schools set hours for both.",
    "i like computers they are good and fun you can play on them and they are good",
)
MAX_SCALE_STEPS = 100
"""Training scores with more steps than this do not make a scale of grades."""
MAX_ROUNDING_STD = 1e-3
"""Largest rounding error of a score in float32, the type of targets, as a part of the standard deviation."""
STEP_TOLERANCE = 1e-5
"""Largest deviation of a grade from its position on the scale, as a part of a step: float32 has 7 digits, and the scale
takes 2."""


class Regression(PooledTask):
    name = "regression"
    output = "number"
    problem_type: ProblemType = "regression"
    weighting: base.Weighting = "rows"

    def validate_row(self, text: str, pair: str | None, label: str) -> str | None:
        try:
            value = math.nan if "_" in label else float(label)  # Python reads 1_000 as a thousand
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            return f"the score {quote_value(label)} is not a number; correct it or remove the row"
        if abs(value) > MAX_ABS_SCORE:
            return (
                f"the score {quote_value(label)} is larger than a model can compute with; give the scores in a "
                "larger unit"
            )
        return None

    def build_head(self, counts: Mapping[str, int], tokenizer: "tokenizers.Tokenizer | None" = None) -> Head:
        """Mean and standard deviation of the training rows' scores, and the scale that they are on, if any."""
        rows: dict[float, int] = {}
        for label, count in counts.items():
            rows[float(label)] = rows.get(float(label), 0) + count
        if not rows or max(rows) - min(rows) < MIN_SCORE_RANGE:
            score_list = ", ".join(str(value) for value in sorted(rows)[:5]) or "none"
            raise UserError(
                f"data.label: the training rows have one score only ({score_list}); there is nothing to learn. "
                "Add rows of another score, or name another column with --set data.label=COLUMN.",
                code="one_label",
            )
        values, weights = np.array(sorted(rows)), np.array([rows[value] for value in sorted(rows)], dtype=np.float64)
        mean = float(np.average(values, weights=weights))
        std = float(np.sqrt(np.average((values - mean) ** 2, weights=weights)))
        if np.abs(values.astype(np.float32).astype(np.float64) - values).max() > MAX_ROUNDING_STD * std:
            raise UserError(
                f"data.label: the training rows' scores, {values[0]:.15g} to {values[-1]:.15g}, differ too little "
                f"for their size: float32 cannot represent the difference. Subtract {values[0]:.15g} from "
                "each, in the test rows too.",
                code="scores_too_close",
            )
        scale = {"lowest": float(values[0]), "highest": float(values[-1]), "step": _find_step(values)}
        return Head(("score",), {"mean": mean, "std": std, **scale})

    def build_targets(self, labels: Sequence[str], target_positions: RaggedArray | None, head: Head) -> Targets:
        values = np.fromiter(map(float, labels), dtype=np.float32, count=len(labels))
        return Targets(RaggedArray.from_matrix(values), np.zeros(len(labels), dtype=np.bool_))

    def placeholder_label(self, text: str, head: Head) -> str:
        return str(head.facts["mean"])

    def loss(self, logits: "torch.Tensor", tokens: TokenBatch, head: Head) -> Losses:
        """Squared error in standard deviations, so that learning rates do not depend on the scale of the scores."""
        return {"loss": _squared_errors(logits, tokens, head).sum()}

    def target_classes(self, tokens: TokenBatch, head: Head) -> dict[str, base.TargetClasses]:
        rows = np.arange(len(tokens))
        return {"loss": base.TargetClasses(rows, np.zeros_like(rows))}

    def target_losses(self, logits: "torch.Tensor", tokens: TokenBatch, head: Head, loss: base.LabelLoss) -> Losses:
        return {"loss": _squared_errors(logits, tokens, head)}

    def distillation_loss(self, logits: "torch.Tensor", tokens: TokenBatch, head: Head, temperature: float) -> Losses:
        """Squared error to the teacher's number. A number has no temperature."""
        import torch

        predicted = pool_logits(logits, tokens, head)
        return {"loss": ((predicted - torch.from_numpy(tokens.teacher_logits.copy()).to(predicted)) ** 2).sum()}

    def row_results(self, outputs: Outputs, tokens: TokenBatch, head: Head) -> RaggedArray:
        """The number itself, in the unit of the targets."""
        return RaggedArray.from_matrix(_to_target_unit(outputs, head))

    def explain_rows(self, row_results: RaggedArray, targets: RaggedArray, head: Head) -> RowReport:
        predicted, true = row_results.values, targets.values.astype(np.float64)
        return RowReport(
            target=true.tolist(),
            prediction=predicted.tolist(),
            score=np.full(len(predicted), np.nan),
            loss=((predicted - true) / head.facts["std"]) ** 2,
        )

    def decode(
        self, outputs: Outputs, inputs: Inputs, encoded: Sequence[EncodedRow], head: Head, parameters: Parameters
    ) -> list[Any]:
        """A number for each input, in the unit of the training scores."""
        return [float(value) for value in _to_target_unit(outputs, head)]

    def example_inputs(self, head: Head) -> list[Input]:
        return list(EXAMPLE_TEXTS)

    def answer_columns(self, head: Head) -> list[AnswerColumn]:
        return [AnswerColumn("value", float, lambda answer: answer)]


def _squared_errors(logits: "torch.Tensor", tokens: TokenBatch, head: Head) -> "torch.Tensor":
    """Squared error of each row in squared standard deviations."""
    import torch

    predicted = pool_logits(logits, tokens, head)[:, 0]
    targets = torch.from_numpy(tokens.targets.copy()).to(predicted)
    errors: torch.Tensor = predicted - (targets - head.facts["mean"]) / head.facts["std"]
    return errors**2


def _to_target_unit(outputs: Outputs, head: Head) -> Any:
    """Standard deviations to the unit of the targets."""
    return np.asarray(outputs, dtype=np.float64)[:, 0] * head.facts["std"] + head.facts["mean"]


def _find_step(values: Any) -> float | None:
    """The distance of adjacent grades if all scores are on one scale, else None."""
    width, gap = float(values[-1] - values[0]), float(np.diff(values).min())
    if width > (MAX_SCALE_STEPS + 1) * gap:  # not as a quotient, which may overflow
        return None
    # The mean gap: the rounding of the smallest one adds up over the scale, a fifth being 0.2 or 0.20000000298.
    count = round(width / gap)
    steps = (values - values[0]) / (width / count)
    return width / count if np.abs(steps - np.rint(steps)).max() < STEP_TOLERANCE and count <= MAX_SCALE_STEPS else None


TASK = Regression()
