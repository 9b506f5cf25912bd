"""Which values of a model an answer rests on: a label's logit, a number, the tags of an entity."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rtrain.core.errors import UserError
from rtrain.core.ragged import Encoded, Floats, Head, Tokens
from rtrain.metrics.tables import thresholds_of
from rtrain.tasks.base import Input, Task
from rtrain.tasks.multi_head import heads
from rtrain.tasks.multi_label import sigmoid
from rtrain.tasks.pooled import pooled
from rtrain.tasks.token_tags import located

if TYPE_CHECKING:
    import torch

MOST_TARGETS = 8
"""Targets of one answer: each costs a backward pass of its own. Of more labels or entities they are the surest, of more
heads the first."""


class LabelError(UserError):
    """The model does not have the label, or did not give it to the text."""


class Target(NamedTuple):
    label: str
    columns: tuple[int, ...]
    """Outputs whose mean is the value."""
    tokens: tuple[int, ...] | None = None
    """At which token each column is read, where each token is answered."""
    scale: float = 1.0
    shift: float = 0.0
    """Value = scale x output + shift, in the unit of the training scores."""
    span: tuple[int, int] | None = None
    """Characters that are labelled, where it is not the whole text."""

    def value(self, output: Floats) -> float:
        """The target's value in a row's output, which is [outputs] or [tokens, outputs]."""
        columns = list(self.columns)
        read = output[columns] if self.tokens is None else output[list(self.tokens), columns]
        return float(np.mean(read, dtype=np.float64)) * self.scale + self.shift


def choose(
    task: Task, head: Head, asked: Input, encoded: Encoded, output: Floats, label: str | None = None
) -> list[Target]:
    """What is explained: the answer to a row, or the label that is named instead; nothing where no word was tagged.

    That is a class by its logit, each label that was given (or else the likeliest one), the class of each head, each
    entity by the mean logit of its words' tags, or a number in the unit of the training scores.
    """
    return KINDS[task.output](head, asked, encoded, output, label)[:MOST_TARGETS]


def check(task: Task) -> None:
    if task.output not in KINDS:
        known = ", ".join(KINDS)
        raise UserError(
            f"answers of kind {task.output!r} (task {task.name}) are not explained, only {known}",
            code="not_explainable",
        )


def check_label(task: Task, head: Head, label: str) -> None:
    """Raise a LabelError with the nearest names where the model has no such label."""
    _place(label, _types(head) if task.output == "tags" else head.labels)


def values(logits: "torch.Tensor", rows: Tokens, task: Task, head: Head, targets: Sequence[Target]) -> "torch.Tensor":
    """Values of the targets [rows, targets], with a gradient, from logits of rows that are equally long."""
    import torch

    if task.by_token:
        logits = logits.unflatten(0, (len(rows), -1))
        read = [logits[:, list(target.tokens or ()), list(target.columns)] for target in targets]
    else:
        of_rows = pooled(logits, rows, head)
        read = [of_rows[:, list(target.columns)] for target in targets]
    means = [column.mean(dim=1) * target.scale + target.shift for column, target in zip(read, targets, strict=True)]
    return torch.stack(means, dim=1)


# ------------------------------------------------------------------------------------------------- by kind of output


def _classes(head: Head, asked: Input, encoded: Encoded, output: Floats, label: str | None) -> list[Target]:
    place = int(np.argmax(output)) if label is None else _place(label, head.labels)
    return [Target(head.labels[place], (place,))]


def _labels(head: Head, asked: Input, encoded: Encoded, output: Floats, label: str | None) -> list[Target]:
    if label is not None:
        return _classes(head, asked, encoded, output, label)
    order = np.argsort(-output, kind="stable")
    chances, least = sigmoid(output), thresholds_of(head)
    given = [int(place) for place in order if chances[place] >= least[place]]
    return [Target(head.labels[place], (place,)) for place in given or [int(order[0])]]


def _heads(head: Head, asked: Input, encoded: Encoded, output: Floats, label: str | None) -> list[Target]:
    if label is not None:
        return _classes(head, asked, encoded, output, label)
    best = [columns.start + int(np.argmax(output[columns])) for _, _, columns in heads(head)]
    return [Target(head.labels[place], (place,)) for place in best]


def _number(head: Head, asked: Input, encoded: Encoded, output: Floats, label: str | None) -> list[Target]:
    if label is not None:
        _place(label, head.labels)
    return [Target(head.labels[0], (0,), scale=float(head.facts["std"]), shift=float(head.facts["mean"]))]


def _tags(head: Head, asked: Input, encoded: Encoded, output: Floats, label: str | None) -> list[Target]:
    found = located(asked, output, encoded, head)
    if label is not None:
        _place(label, _types(head))
        types = sorted({group["entity_group"] for group, _, _ in found})
        found = [one for one in found if one[0]["entity_group"] == label]
        if not found:
            raise LabelError(
                f"no entity of type {label!r} was found in the text; found: {', '.join(types) or 'none'}",
                code="label_not_given",
            )
    surest = sorted(range(len(found)), key=lambda place: -found[place][0]["score"])[:MOST_TARGETS]
    return [
        Target(group["entity_group"], tuple(columns), tuple(tokens), span=(group["start"], group["end"]))
        for group, tokens, columns in (found[place] for place in sorted(surest))  # as they stand in the text
    ]


def _types(head: Head) -> list[str]:
    """Types of entities."""
    return sorted({name.partition("-")[2] for name in head.labels} - {""})


def _place(label: str, known: Sequence[str]) -> int:
    if label in known:
        return list(known).index(label)
    near = difflib.get_close_matches(label, known, n=3, cutoff=0.5)
    near += [name for name in known if label.lower() in name.lower() and name not in near][:3]
    first = ", ".join(known[:10]) + (f" and {len(known) - 10} more" if len(known) > 10 else "")
    fix = f"did you mean {' or '.join(near)}?" if near else f"known: {first}"
    raise LabelError(f"the model has no label {label!r}; {fix}", code="unknown_label")


KINDS: Mapping[str, Callable[[Head, Input, Encoded, Floats, str | None], list[Target]]] = {
    "classes": _classes,
    "labels": _labels,
    "heads": _heads,
    "number": _number,
    "tags": _tags,
}
