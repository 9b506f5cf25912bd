"""Several answers to one text, each with its own labels: its intent and its sentiment.

`data.label` is a list of columns, one head each, named after the column. A row may lack some of its labels: it then
counts for the other heads. Each head's loss is divided by that head's number of targets; the heads are summed.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rtrain.core.errors import UserError, quote_value
from rtrain.core.ragged import IGNORE_INDEX, EncodedRow, Head, Outputs, RaggedArray, TokenBatch
from rtrain.metrics.classes import decide_classes, iter_heads
from rtrain.metrics.classification import softmax
from rtrain.tasks import base
from rtrain.tasks.base import AnswerColumn, Inputs, Losses, Parameters, RowReport, Targets
from rtrain.tasks.classification import distillation_kl, rank_labels
from rtrain.tasks.defaults import PooledTask, pool_logits
from rtrain.tasks.encode import InvalidLabel, parse_json_label, sort_labels, to_label_text, validate_label

if TYPE_CHECKING:
    import tokenizers
    import torch


class MultiHead(PooledTask):
    name = "multi_head"
    output = "heads"
    has_standard_head = False  # a softmax over the labels of all heads is not an answer of any head
    supports_label_smoothing = True
    weighting: base.Weighting = "classes"

    def validate_row(self, text: str, pair: str | None, label: str) -> str | None:
        if not label.startswith("{"):
            return "one column of labels; name several, e.g. --set data.label=[intent,sentiment]"
        return validate_label(_parse_labels, label)

    def build_head(self, counts: Mapping[str, int], tokenizer: "tokenizers.Tokenizer | None" = None) -> Head:
        """Labels are `head=label`; the facts name each head's outputs: [[head, number of labels], ...]."""
        labels_by_head: dict[str, set[str]] = {}
        for row in counts:
            for name, label in _parse_labels(row).items():
                labels_by_head.setdefault(name, set()).update([label] if label else [])
        for name, labels in labels_by_head.items():
            if len(labels) < 2:
                only = ", ".join(repr(label) for label in labels) or "none"
                raise UserError(
                    f"data.label: the training rows have one class only ({only}) in column {name!r}; a classifier "
                    "needs at least two. Add rows of another label, or leave the column out.",
                    code="one_label",
                )
        names = tuple(f"{name}={label}" for name, labels in labels_by_head.items() for label in sort_labels(labels))
        return Head(names, {"heads": [[name, len(labels)] for name, labels in labels_by_head.items()]})

    def build_targets(self, labels: Sequence[str], target_positions: RaggedArray | None, head: Head) -> Targets:
        """For each head the index among its labels; `IGNORE_INDEX` if the row has no label."""
        index = {
            name: {label: position for position, label in enumerate(head_labels)}
            for name, head_labels, _ in iter_heads(head)
        }
        label_indices = np.full((len(labels), len(index)), IGNORE_INDEX, dtype=np.float32)
        for row, row_labels in enumerate(map(_parse_labels, labels)):
            for column, (name, index_by_label) in enumerate(index.items()):
                if row_labels.get(name):
                    label_indices[row, column] = index_by_label.get(row_labels[name], -1)
        return Targets(RaggedArray.from_matrix(label_indices), (label_indices == -1).any(axis=1))

    def placeholder_label(self, text: str, head: Head) -> str:
        return json.dumps({name: head_labels[0] for name, head_labels, _ in iter_heads(head)})

    def loss_parts(self, head: Head) -> tuple[str, ...]:
        return tuple(name for name, _, _ in iter_heads(head))

    def count_targets(self, tokens: TokenBatch, head: Head) -> dict[str, int]:
        names = self.loss_parts(head)
        present = tokens.targets.reshape(len(tokens), len(names)) != IGNORE_INDEX
        return dict(zip(names, present.sum(axis=0).tolist(), strict=True))

    def loss(self, logits: "torch.Tensor", tokens: TokenBatch, head: Head) -> Losses:
        import torch

        head_logits, names = pool_logits(logits, tokens, head), self.loss_parts(head)
        targets = tokens.targets.reshape(len(tokens), len(names)).astype(np.int64)
        label_indices = torch.from_numpy(targets).to(head_logits.device)
        return {
            name: torch.nn.functional.cross_entropy(
                head_logits[:, columns], label_indices[:, position], reduction="sum", ignore_index=IGNORE_INDEX
            )
            for position, (name, _, columns) in enumerate(iter_heads(head))
        }

    def label_names(self, head: Head) -> dict[str, tuple[str, ...]]:
        return {name: tuple(f"{name}={label}" for label in labels) for name, labels, _ in iter_heads(head)}

    def target_classes(self, tokens: TokenBatch, head: Head) -> dict[str, base.TargetClasses]:
        names = self.loss_parts(head)
        targets = tokens.targets.reshape(-1, len(names)).astype(np.int64)
        rows_by_head = [np.flatnonzero(column != IGNORE_INDEX) for column in targets.T]
        return {
            name: base.TargetClasses(rows, targets[rows, position])
            for position, (name, rows) in enumerate(zip(names, rows_by_head, strict=True))
        }

    def target_losses(self, logits: "torch.Tensor", tokens: TokenBatch, head: Head, loss: base.LabelLoss) -> Losses:
        head_logits, targets = pool_logits(logits, tokens, head), self.target_classes(tokens, head)
        return {
            name: loss.choose_one(head_logits[targets[name].rows.tolist()][:, columns], targets[name].classes)
            for name, _, columns in iter_heads(head)
        }

    def distillation_loss(self, logits: "torch.Tensor", tokens: TokenBatch, head: Head, temperature: float) -> Losses:
        """As in classification, head by head, over the rows that have the head's label."""
        head_logits, targets = pool_logits(logits, tokens, head), tokens.targets.reshape(len(tokens), -1)
        sums = {}
        for head_index, (name, _, columns) in enumerate(iter_heads(head)):
            rows = np.flatnonzero(targets[:, head_index] != IGNORE_INDEX)
            student, teacher = head_logits[rows.tolist()][:, columns], tokens.teacher_logits[rows][:, columns]
            sums[name] = distillation_kl(student, teacher, temperature)
        return sums

    def explain_rows(self, row_results: RaggedArray, targets: RaggedArray, head: Head) -> RowReport:
        logits = row_results.to_matrix(len(head.labels))
        true = targets.to_matrix(len(head.facts["heads"])).astype(np.int64)
        best, score = np.zeros(true.shape, dtype=np.int64), np.ones(len(true))
        loss, present = np.zeros(true.shape), true != IGNORE_INDEX
        labels = []
        for head_index, (name, head_labels, columns) in enumerate(iter_heads(head)):
            probabilities = softmax(logits[:, columns])
            decided = np.maximum(decide_classes(logits[:, columns], head_labels, head, name), 0)
            best[:, head_index] = decided
            score = np.minimum(score, probabilities[np.arange(len(true)), decided])
            with np.errstate(divide="ignore"):
                target_probability = probabilities[np.arange(len(true)), np.maximum(0, true[:, head_index])]
                head_loss = -np.log(np.where(true[:, head_index] >= 0, target_probability, 0.0))
            loss[:, head_index] = np.where(present[:, head_index], head_loss, 0.0)
            labels.append([*head_labels, ""])  # -1 and IGNORE_INDEX: the head has no such label
        return RowReport(
            target=[[names[max(-1, index)] for names, index in zip(labels, row, strict=True)] for row in true],
            prediction=[[names[index] for names, index in zip(labels, row, strict=True)] for row in best],
            score=score,
            loss=loss.sum(axis=1) / np.maximum(1, present.sum(axis=1)),
        )

    def decode(
        self, outputs: Outputs, inputs: Inputs, encoded: Sequence[EncodedRow], head: Head, parameters: Parameters
    ) -> list[Any]:
        """For each input an object with the ranked labels of each head; a label that is decided by an operating point
        comes first."""
        logits, answers = np.asarray(outputs), {}
        for name, head_labels, columns in iter_heads(head):
            first = decide_classes(logits[:, columns], head_labels, head, name)
            answers[name] = rank_labels(softmax(logits[:, columns]), head_labels, parameters, first)
        return [{name: rows[row] for name, rows in answers.items()} for row in range(len(logits))]

    def answer_columns(self, head: Head) -> list[AnswerColumn]:
        """For each head its best label, in a column of the head's name, and that label's score."""
        columns = []
        for name, _, _ in iter_heads(head):
            columns.append(AnswerColumn(name, str, partial(_best_entry, name, "label")))
            columns.append(AnswerColumn(f"{name} score", float, partial(_best_entry, name, "score")))
        return columns


def _best_entry(head: str, entry: str, answer: Any) -> Any:
    return answer[head][0][entry]


def _parse_labels(label: str) -> dict[str, str]:
    """Label by the name of its head; empty or null if the row has none. Raises `InvalidLabel`."""
    example = '{"intent": "buy", "mood": "good"}'
    label_by_head = {
        to_label_text(name, label, example): "" if value is None else to_label_text(value, label, example).strip()
        for name, value in parse_json_label(label, example).items()
    }
    if not any(label_by_head.values()):
        raise InvalidLabel(f"the label {quote_value(label)} is empty; write {example}")
    return label_by_head


TASK = MultiHead()
