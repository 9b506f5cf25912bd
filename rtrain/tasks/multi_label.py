"""Any number of labels per text, none included: each label is a yes or no of its own.

A row's labels are a list (parquet, jsonl), or a text with `data.separator` between them; an empty list is a row to
which no label applies. The probability from which each label is given is chosen on the validation rows (`calibrate`).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rtrain.core.errors import UserError
from rtrain.core.ragged import Encoded, Head, Outputs, Ragged, Tokens
from rtrain.metrics.classification import choose_label_thresholds
from rtrain.metrics.tables import thresholds_of
from rtrain.tasks.base import Column, Described, Input, ProblemType, Targets
from rtrain.tasks.classification import ranked
from rtrain.tasks.labels import flaw_of, listed, ordered
from rtrain.tasks.pooled import PooledTask, pooled

if TYPE_CHECKING:
    import tokenizers
    import torch


class MultiLabel(PooledTask):
    name = "multi_label"
    output = "labels"
    problem_type: ProblemType = "multi_label_classification"

    def flaw(self, text: str, pair: str | None, label: str) -> str | None:
        return flaw_of(labels_of, label)

    def head(self, counts: Mapping[str, int], tokenizer: "tokenizers.Tokenizer | None" = None) -> Head:
        found = {label for row in counts for label in labels_of(row)}
        if not found:
            raise UserError(
                "data.label: no training row has a label; add rows with labels, or name another column with "
                "--set data.label=COLUMN",
                code="no_labels",
            )
        return Head(tuple(ordered(found)))

    def targets(self, labels: Sequence[str], marks: Ragged | None, head: Head) -> Targets:
        """A zero or one for each label of the head."""
        index = {name: place for place, name in enumerate(head.labels)}
        found = np.zeros((len(labels), len(head.labels)), dtype=np.float32)
        unknown = np.zeros(len(labels), dtype=np.bool_)
        for row, label in enumerate(labels):
            for name in labels_of(label):
                if name in index:
                    found[row, index[name]] = 1
                else:
                    unknown[row] = True
        return Targets(Ragged.even(found), unknown)

    def stand_in(self, text: str, head: Head) -> str:
        return "[]"

    def loss(self, logits: "torch.Tensor", tokens: Tokens, head: Head) -> dict[str, "torch.Tensor"]:
        import torch

        found = pooled(logits, tokens, head)
        wanted = torch.from_numpy(tokens.targets.reshape(tuple(found.shape)).copy()).to(found)
        return {"loss": torch.nn.functional.binary_cross_entropy_with_logits(found, wanted, reduction="sum")}

    def imitation(
        self, logits: "torch.Tensor", tokens: Tokens, head: Head, temperature: float
    ) -> dict[str, "torch.Tensor"]:
        """T^2 x KL of each label's yes or no, softened by T."""
        import torch
        import torch.nn.functional as F

        found = pooled(logits, tokens, head) / temperature
        known = torch.from_numpy(tokens.teacher.copy()).to(found) / temperature
        wanted = torch.sigmoid(known)
        # The cross-entropy to the teacher less the teacher's own entropy, which has no gradient.
        cross = F.binary_cross_entropy_with_logits(found, wanted, reduction="sum")
        own = F.binary_cross_entropy_with_logits(known, wanted, reduction="sum")
        return {"loss": temperature**2 * (cross - own)}

    def calibrate(self, outcomes: Ragged, targets: Ragged, head: Head) -> dict[str, Any]:
        """The chance from which each label is given, by label."""
        size = len(head.labels)
        chosen = choose_label_thresholds(outcomes.matrix(size).astype(np.float64), targets.matrix(size) > 0)
        if chosen is None:
            return {}
        return {"thresholds": dict(zip(head.labels, sigmoid(chosen).tolist(), strict=True))}

    def describe(self, outcomes: Ragged, targets: Ragged, head: Head) -> Described:
        logits, true = outcomes.matrix(len(head.labels)), targets.matrix(len(head.labels))
        chances = sigmoid(logits)
        given = np.where(np.isnan(logits), true <= 0, chances >= thresholds_of(head))  # wrong, as it is scored
        # softplus(-z) where the label applies, softplus(z) where not
        loss = np.logaddexp(0, np.where(true > 0, -logits, logits)).mean(axis=1)
        return Described(
            target=[[head.labels[place] for place in np.flatnonzero(row)] for row in true],
            prediction=[[head.labels[place] for place in np.flatnonzero(row)] for row in given],
            score=np.where(given, chances, 1 - chances).min(axis=1, initial=1.0),
            loss=loss,
        )

    def decode(
        self,
        outputs: Outputs,
        asked: Sequence[Input],
        encoded: Sequence[Encoded],
        head: Head,
        parameters: Mapping[str, Any],
    ) -> list[Any]:
        """`[{"label", "score"}, ...]` per row, best first; the scores are chances of their own, not shares of one."""
        return ranked(sigmoid(np.asarray(outputs)), head.labels, parameters)

    def columns(self, head: Head) -> list[Column]:
        """The labels from their thresholds on, the surest first, and their scores; both may be empty."""
        thresholds = self.thresholds(head)

        def given(answer: Any, name: str) -> list[Any]:
            return [entry[name] for entry in answer if entry["score"] >= thresholds[entry["label"]]]

        return [
            Column("labels", [str], lambda answer: given(answer, "label")),
            Column("scores", [float], lambda answer: given(answer, "score")),
        ]

    def thresholds(self, head: Head) -> dict[str, float]:
        return dict(zip(head.labels, thresholds_of(head).tolist(), strict=True))


def labels_of(label: str) -> list[str]:
    """A JSON list, or a single label. Raises `BadLabel`."""
    if label.startswith("["):
        return listed(label, '["a", "b"]')
    return [label] if label else []


def sigmoid(logits: Any) -> Any:
    """Chances, float64."""
    return 1 / (1 + np.exp(-np.asarray(logits, dtype=np.float64).clip(-700, 700)))


TASK = MultiLabel()
