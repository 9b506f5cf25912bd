"""Any number of labels per text, or none: a binary decision for each label.

A row's labels are a list (parquet, jsonl), or a text with `data.separator` between them; an empty list is a row to
which no label applies. The probability from which each label is given is chosen on the validation rows (`calibrate`).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rtrain.core.errors import UserError
from rtrain.core.ragged import EncodedRow, Head, Outputs, RaggedArray, TokenBatch
from rtrain.metrics.classes import label_thresholds, sigmoid
from rtrain.metrics.classification import choose_label_thresholds
from rtrain.tasks import base
from rtrain.tasks.base import AnswerColumn, Inputs, Losses, Parameters, ProblemType, RowReport, Targets
from rtrain.tasks.classification import rank_labels
from rtrain.tasks.defaults import PooledTask, pool_logits
from rtrain.tasks.encode import parse_label_list, sort_labels, validate_label

if TYPE_CHECKING:
    import tokenizers
    import torch


class MultiLabel(PooledTask):
    name = "multi_label"
    output = "labels"
    problem_type: ProblemType = "multi_label_classification"
    weighting: base.Weighting = "classes"
    has_independent_labels = True

    def validate_row(self, text: str, pair: str | None, label: str) -> str | None:
        return validate_label(parse_labels, label)

    def build_head(self, counts: Mapping[str, int], tokenizer: "tokenizers.Tokenizer | None" = None) -> Head:
        label_set = {label for row in counts for label in parse_labels(row)}
        if not label_set:
            raise UserError(
                "data.label: no training row has a label; add rows with labels, or name another column with "
                "--set data.label=COLUMN",
                code="no_labels",
            )
        return Head(tuple(sort_labels(label_set)))

    def build_targets(self, labels: Sequence[str], target_positions: RaggedArray | None, head: Head) -> Targets:
        """A zero or one for each label of the head."""
        index = {name: position for position, name in enumerate(head.labels)}
        has_label = np.zeros((len(labels), len(head.labels)), dtype=np.float32)
        has_unknown_label = np.zeros(len(labels), dtype=np.bool_)
        for row, label in enumerate(labels):
            for name in parse_labels(label):
                if name in index:
                    has_label[row, index[name]] = 1
                else:
                    has_unknown_label[row] = True
        return Targets(RaggedArray.from_matrix(has_label), has_unknown_label)

    def placeholder_label(self, text: str, head: Head) -> str:
        return "[]"

    def loss(self, logits: "torch.Tensor", tokens: TokenBatch, head: Head) -> Losses:
        import torch

        row_logits = pool_logits(logits, tokens, head)
        has_label = torch.from_numpy(tokens.targets.reshape(tuple(row_logits.shape)).copy()).to(row_logits)
        return {"loss": torch.nn.functional.binary_cross_entropy_with_logits(row_logits, has_label, reduction="sum")}

    def target_classes(self, tokens: TokenBatch, head: Head) -> dict[str, base.TargetClasses]:
        has_label, labels = tokens.targets.reshape(-1, len(head.labels)) > 0, np.arange(len(head.labels))
        rows = np.repeat(np.arange(len(has_label)), len(labels))
        return {"loss": base.TargetClasses(rows, np.where(has_label, labels, len(labels)).reshape(-1))}

    def target_losses(self, logits: "torch.Tensor", tokens: TokenBatch, head: Head, loss: base.LabelLoss) -> Losses:
        row_logits = pool_logits(logits, tokens, head)
        return {"loss": loss.decide_each(row_logits, tokens.targets.reshape(tuple(row_logits.shape))).flatten()}

    def distillation_loss(self, logits: "torch.Tensor", tokens: TokenBatch, head: Head, temperature: float) -> Losses:
        """T^2 x KL of each label's binary decision, softened by T."""
        import torch
        import torch.nn.functional as F

        student_logits = pool_logits(logits, tokens, head) / temperature
        teacher_logits = torch.from_numpy(tokens.teacher_logits.copy()).to(student_logits) / temperature
        teacher_probabilities = torch.sigmoid(teacher_logits)
        # The cross-entropy to the teacher minus the teacher's entropy, which has no gradient.
        cross_entropy = F.binary_cross_entropy_with_logits(student_logits, teacher_probabilities, reduction="sum")
        teacher_entropy = F.binary_cross_entropy_with_logits(teacher_logits, teacher_probabilities, reduction="sum")
        return {"loss": temperature**2 * (cross_entropy - teacher_entropy)}

    def calibrate(self, row_results: RaggedArray, targets: RaggedArray, head: Head) -> dict[str, Any]:
        """Choose the minimum probability of each label."""
        size = len(head.labels)
        logits, true = row_results.to_matrix(size).astype(np.float64), targets.to_matrix(size) > 0
        logit_thresholds = choose_label_thresholds(logits, true)
        if logit_thresholds is None:
            return {}
        return {"thresholds": dict(zip(head.labels, sigmoid(logit_thresholds).tolist(), strict=True))}

    def explain_rows(self, row_results: RaggedArray, targets: RaggedArray, head: Head) -> RowReport:
        logits, true = row_results.to_matrix(len(head.labels)), targets.to_matrix(len(head.labels))
        probabilities = sigmoid(logits)
        # A NaN logit is wrong, as in the scores.
        predicted = np.where(np.isnan(logits), true <= 0, probabilities >= label_thresholds(head))
        # softplus(-z) where the label applies, softplus(z) where not
        loss = np.logaddexp(0, np.where(true > 0, -logits, logits)).mean(axis=1)
        return RowReport(
            target=[[head.labels[position] for position in np.flatnonzero(row)] for row in true],
            prediction=[[head.labels[position] for position in np.flatnonzero(row)] for row in predicted],
            score=np.where(predicted, probabilities, 1 - probabilities).min(axis=1, initial=1.0),
            loss=loss,
        )

    def decode(
        self, outputs: Outputs, inputs: Inputs, encoded: Sequence[EncodedRow], head: Head, parameters: Parameters
    ) -> list[Any]:
        """`[{"label", "score"}, ...]` per row, best first; each score is an independent probability."""
        return rank_labels(sigmoid(np.asarray(outputs)), head.labels, parameters)

    def answer_columns(self, head: Head) -> list[AnswerColumn]:
        """The labels at or above their thresholds, the highest score first, and their scores; both may be empty."""
        thresholds = self.label_thresholds(head)

        def list_entries(answer: Any, name: str) -> list[Any]:
            return [entry[name] for entry in answer if entry["score"] >= thresholds[entry["label"]]]

        return [
            AnswerColumn("labels", [str], lambda answer: list_entries(answer, "label")),
            AnswerColumn("scores", [float], lambda answer: list_entries(answer, "score")),
        ]

    def label_thresholds(self, head: Head) -> dict[str, float]:
        return dict(zip(head.labels, label_thresholds(head).tolist(), strict=True))


def parse_labels(label: str) -> list[str]:
    """A JSON list, or a single label. Raises `InvalidLabel`."""
    if label.startswith("["):
        return parse_label_list(label, '["a", "b"]')
    return [label] if label else []


TASK = MultiLabel()
