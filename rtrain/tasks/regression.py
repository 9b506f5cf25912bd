"""One number per text: the score of an essay, a rating, a price. The model learns it in standard deviations."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rtrain.core.errors import UserError, quoted
from rtrain.core.ragged import Encoded, Head, Outputs, Ragged, Tokens
from rtrain.tasks.base import Column, Described, Input, ProblemType, Targets
from rtrain.tasks.pooled import PooledTask, pooled

if TYPE_CHECKING:
    import tokenizers
    import torch

SMALLEST, LARGEST = 1e-30, 1e37
"""Bounds of scores and of their differences: models square them in float32."""
EXAMPLES = (
    "Computers help us to learn, since they bring a library to every village. They also take time: a pupil who chats "
    "all evening reads no book. I believe that the gain is larger, if parents and schools set hours for both.",
    "i like computers they are good and fun you can play on them and they are good",
)
MOST_STEPS = 100
"""Training scores with more steps than this are no scale of grades."""
FINEST = 1e-3
"""Largest part of a standard deviation by which float32, in which targets are kept, may round a score."""
ROUNDING = 1e-5
"""Part of a step by which a grade may lie beside its place: float32 has 7 digits, of which the scale takes 2."""


class Regression(PooledTask):
    name = "regression"
    output = "number"
    problem_type: ProblemType = "regression"

    def flaw(self, text: str, pair: str | None, label: str) -> str | None:
        try:
            value = math.nan if "_" in label else float(label)  # Python reads 1_000 as a thousand
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            return f"the score {quoted(label)} is not a number; correct it or remove the row"
        if abs(value) > LARGEST:
            return (
                f"the score {quoted(label)} is larger than a model can compute with; give the scores in a larger unit"
            )
        return None

    def head(self, counts: Mapping[str, int], tokenizer: "tokenizers.Tokenizer | None" = None) -> Head:
        """Mean and standard deviation of the training rows' scores, and the scale that they are on, if any."""
        rows: dict[float, int] = {}
        for label, count in counts.items():
            rows[float(label)] = rows.get(float(label), 0) + count
        if not rows or max(rows) - min(rows) < SMALLEST:
            found = ", ".join(str(value) for value in sorted(rows)[:5]) or "none"
            raise UserError(
                f"data.label: the training rows have one score only ({found}); there is nothing to learn. "
                "Add rows of another score, or name another column with --set data.label=COLUMN.",
                code="one_label",
            )
        values, weights = np.array(sorted(rows)), np.array([rows[value] for value in sorted(rows)], dtype=np.float64)
        mean = float(np.average(values, weights=weights))
        std = float(np.sqrt(np.average((values - mean) ** 2, weights=weights)))
        if np.abs(values.astype(np.float32).astype(np.float64) - values).max() > FINEST * std:
            raise UserError(
                f"data.label: the training rows' scores, {values[0]:.15g} to {values[-1]:.15g}, differ by too little "
                f"beside their size: rounded to float32 they are no longer the same. Subtract {values[0]:.15g} from "
                "each, in the test rows too.",
                code="too_close",
            )
        scale = {"lowest": float(values[0]), "highest": float(values[-1]), "step": _step(values)}
        return Head(("score",), {"mean": mean, "std": std, **scale})

    def targets(self, labels: Sequence[str], marks: Ragged | None, head: Head) -> Targets:
        values = np.fromiter(map(float, labels), dtype=np.float32, count=len(labels))
        return Targets(Ragged.even(values), np.zeros(len(labels), dtype=np.bool_))

    def stand_in(self, text: str, head: Head) -> str:
        return str(head.facts["mean"])

    def loss(self, logits: "torch.Tensor", tokens: Tokens, head: Head) -> dict[str, "torch.Tensor"]:
        """Squared error in standard deviations, so that learning rates do not depend on the scale of the scores."""
        import torch

        found = pooled(logits, tokens, head)[:, 0]
        wanted = (torch.from_numpy(tokens.targets.copy()).to(found) - head.facts["mean"]) / head.facts["std"]
        return {"loss": ((found - wanted) ** 2).sum()}

    def imitation(
        self, logits: "torch.Tensor", tokens: Tokens, head: Head, temperature: float
    ) -> dict[str, "torch.Tensor"]:
        """Squared error to the teacher's number. A number has no temperature."""
        import torch

        found = pooled(logits, tokens, head)
        return {"loss": ((found - torch.from_numpy(tokens.teacher.copy()).to(found)) ** 2).sum()}

    def outcomes(self, outputs: Outputs, tokens: Tokens, head: Head) -> Ragged:
        """The number itself, in the unit of the targets."""
        return Ragged.even(_unit(outputs, head))

    def describe(self, outcomes: Ragged, targets: Ragged, head: Head) -> Described:
        found, true = outcomes.values, targets.values.astype(np.float64)
        return Described(
            target=true.tolist(),
            prediction=found.tolist(),
            score=np.full(len(found), np.nan),
            loss=((found - true) / head.facts["std"]) ** 2,
        )

    def decode(
        self,
        outputs: Outputs,
        asked: Sequence[Input],
        encoded: Sequence[Encoded],
        head: Head,
        parameters: Mapping[str, Any],
    ) -> list[Any]:
        """A number for each input, in the unit of the training scores."""
        return [float(value) for value in _unit(outputs, head)]

    def examples(self, head: Head) -> list[Input]:
        return list(EXAMPLES)

    def columns(self, head: Head) -> list[Column]:
        return [Column("value", float, lambda answer: answer)]


def _unit(outputs: Outputs, head: Head) -> Any:
    """Standard deviations to the unit of the targets."""
    return np.asarray(outputs, dtype=np.float64)[:, 0] * head.facts["std"] + head.facts["mean"]


def _step(values: Any) -> float | None:
    """The distance of neighbouring grades where all scores lie on one scale."""
    width, gap = float(values[-1] - values[0]), float(np.diff(values).min())
    if width > (MOST_STEPS + 1) * gap:  # not as a quotient, which may exceed what a float holds
        return None
    # The mean gap: the rounding of the smallest one adds up over the scale, a fifth being 0.2 or 0.20000000298.
    count = round(width / gap)
    steps = (values - values[0]) / (width / count)
    return width / count if np.abs(steps - np.rint(steps)).max() < ROUNDING and count <= MOST_STEPS else None


TASK = Regression()
