"""Targets of explanations: a label's logit, a number, or the tags of an entity."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rtrain.core.errors import UserError
from rtrain.core.ragged import EncodedRow, Floats, Head, TokenBatch
from rtrain.metrics.tables import label_thresholds
from rtrain.tasks.base import Input, Task
from rtrain.tasks.multi_head import iter_heads
from rtrain.tasks.multi_label import sigmoid
from rtrain.tasks.pooled import pool_logits
from rtrain.tasks.token_tags import locate_entities

if TYPE_CHECKING:
    import torch

MAX_TARGETS = 8
"""Maximum targets of a prediction: each costs a backward pass. The most certain labels or entities, or the first heads,
are kept."""


class LabelError(UserError):
    """The model does not have the label, or did not predict it."""


class ExplainedTarget(NamedTuple):
    label: str
    columns: tuple[int, ...]
    """The value is the mean of these outputs."""
    tokens: tuple[int, ...] | None = None
    """The token of each column, for token-level tasks."""
    scale: float = 1.0
    shift: float = 0.0
    """Value = scale x output + shift, in the unit of the training scores."""
    span: tuple[int, int] | None = None
    """Characters of the labeled part; None for the whole text."""

    def compute_value(self, output: Floats) -> float:
        """Return the target's value from a row's output, [outputs] or [tokens, outputs]."""
        columns = list(self.columns)
        values = output[columns] if self.tokens is None else output[list(self.tokens), columns]
        return float(np.mean(values, dtype=np.float64)) * self.scale + self.shift


def choose_targets(
    task: Task, head: Head, row_input: Input, encoded: EncodedRow, output: Floats, label: str | None = None
) -> list[ExplainedTarget]:
    """Return the targets of the prediction of a row, or of `label`; empty without tagged words.

    Targets are the logit of the class, of each predicted label (or the likeliest one) or of each head's class, the mean
    logit of the tags of each entity, or a number in the unit of the training scores.

    """
    return CHOOSER_BY_OUTPUT[task.output](head, row_input, encoded, output, label)[:MAX_TARGETS]


def check_explainable(task: Task) -> None:
    if task.output not in CHOOSER_BY_OUTPUT:
        kinds = ", ".join(CHOOSER_BY_OUTPUT)
        raise UserError(
            f"answers of kind {task.output!r} (task {task.name}) cannot be explained, only {kinds}",
            code="not_explainable",
        )


def check_label(task: Task, head: Head, label: str) -> None:
    """Raise a LabelError with similar names if the model lacks the label."""
    _label_index(label, _entity_types(head) if task.output == "tags" else head.labels)


def target_values(
    logits: "torch.Tensor", rows: TokenBatch, task: Task, head: Head, targets: Sequence[ExplainedTarget]
) -> "torch.Tensor":
    """Return differentiable values [rows, targets] from logits of rows of equal length."""
    import torch

    if task.is_token_level:
        logits = logits.unflatten(0, (len(rows), -1))
        target_logits = [logits[:, list(target.tokens or ()), list(target.columns)] for target in targets]
    else:
        row_logits = pool_logits(logits, rows, head)
        target_logits = [row_logits[:, list(target.columns)] for target in targets]
    means = [
        column.mean(dim=1) * target.scale + target.shift for column, target in zip(target_logits, targets, strict=True)
    ]
    return torch.stack(means, dim=1)


# ------------------------------------------------------------------------------------------------- by kind of output


def _class_targets(
    head: Head, row_input: Input, encoded: EncodedRow, output: Floats, label: str | None
) -> list[ExplainedTarget]:
    index = int(np.argmax(output)) if label is None else _label_index(label, head.labels)
    return [ExplainedTarget(head.labels[index], (index,))]


def _label_targets(
    head: Head, row_input: Input, encoded: EncodedRow, output: Floats, label: str | None
) -> list[ExplainedTarget]:
    if label is not None:
        return _class_targets(head, row_input, encoded, output, label)
    order = np.argsort(-output, kind="stable")
    probabilities, thresholds = sigmoid(output), label_thresholds(head)
    predicted = [int(place) for place in order if probabilities[place] >= thresholds[place]]
    return [ExplainedTarget(head.labels[place], (place,)) for place in predicted or [int(order[0])]]


def _head_targets(
    head: Head, row_input: Input, encoded: EncodedRow, output: Floats, label: str | None
) -> list[ExplainedTarget]:
    if label is not None:
        return _class_targets(head, row_input, encoded, output, label)
    best_columns = [columns.start + int(np.argmax(output[columns])) for _, _, columns in iter_heads(head)]
    return [ExplainedTarget(head.labels[place], (place,)) for place in best_columns]


def _number_targets(
    head: Head, row_input: Input, encoded: EncodedRow, output: Floats, label: str | None
) -> list[ExplainedTarget]:
    if label is not None:
        _label_index(label, head.labels)
    return [ExplainedTarget(head.labels[0], (0,), scale=float(head.facts["std"]), shift=float(head.facts["mean"]))]


def _tag_targets(
    head: Head, row_input: Input, encoded: EncodedRow, output: Floats, label: str | None
) -> list[ExplainedTarget]:
    entities = locate_entities(row_input, output, encoded, head)
    if label is not None:
        _label_index(label, _entity_types(head))
        types = sorted({group["entity_group"] for group, _, _ in entities})
        entities = [entity for entity in entities if entity[0]["entity_group"] == label]
        if not entities:
            raise LabelError(
                f"no entity of type {label!r} was predicted; predicted: {', '.join(types) or 'none'}",
                code="label_not_given",
            )
    most_certain = sorted(range(len(entities)), key=lambda place: -entities[place][0]["score"])[:MAX_TARGETS]
    return [
        ExplainedTarget(group["entity_group"], tuple(columns), tuple(tokens), span=(group["start"], group["end"]))
        for group, tokens, columns in (entities[place] for place in sorted(most_certain))  # in the order of the text
    ]


def _entity_types(head: Head) -> list[str]:
    """Return the entity types."""
    return sorted({name.partition("-")[2] for name in head.labels} - {""})


def _label_index(label: str, labels: Sequence[str]) -> int:
    if label in labels:
        return list(labels).index(label)
    similar_labels = difflib.get_close_matches(label, labels, n=3, cutoff=0.5)
    similar_labels += [name for name in labels if label.lower() in name.lower() and name not in similar_labels][:3]
    first_labels = ", ".join(labels[:10]) + (f" and {len(labels) - 10} more" if len(labels) > 10 else "")
    fix = f"did you mean {' or '.join(similar_labels)}?" if similar_labels else f"known: {first_labels}"
    raise LabelError(f"the model has no label {label!r}; {fix}", code="unknown_label")


CHOOSER_BY_OUTPUT: Mapping[str, Callable[[Head, Input, EncodedRow, Floats, str | None], list[ExplainedTarget]]] = {
    "classes": _class_targets,
    "labels": _label_targets,
    "heads": _head_targets,
    "number": _number_targets,
    "tags": _tag_targets,
}
