"""The section `metrics`, the form of `train.best_by`, and the conflicts among the settings that select weights and
decide for a label."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from rtrain.config.data import (
    ConfigSection,
    DataConfig,
    conflict_problem,
    missing_problem,
    out_of_range_problem,
)
from rtrain.core.errors import Problem

LABEL_SCORES = ("recall", "precision")
"""Scores of one label."""
LABEL_FORMS = "loss, recall:LABEL, precision:LABEL, recall@precision:LABEL=0.9, precision@recall:LABEL=0.9"
EXAMPLE = "{label: P1, recall: 0.8}"
_LABEL_FORM = re.compile(r"(recall|precision|recall@precision|precision@recall):(.+)", re.DOTALL)


Share = Annotated[float, Field(gt=0, le=1)]


class OperatingPoint(ConfigSection):
    label: Annotated[str, Field(min_length=1)]
    """The label, `HEAD/LABEL` for a task of several heads."""
    recall: Share | None = None
    """Requested recall of the label, or:"""
    precision: Share | None = None
    """Requested precision of the label."""


def _to_list(value: Any) -> Any:
    if value is not None and not isinstance(value, dict | OperatingPoint | list | tuple):
        raise PydanticCustomError(
            "point", "neither a mapping such as {example} nor a list of them", {"example": EXAMPLE}
        )
    return [value] if isinstance(value, dict | OperatingPoint) else value


class MetricsConfig(ConfigSection):
    operating_point: Annotated[tuple[OperatingPoint, ...] | None, BeforeValidator(_to_list)] = None
    """Label whose threshold of the score is chosen on the validation rows for a recall, e.g. {label: P1, recall: 0.8},
    or for a precision, e.g. {label: P1, precision: 0.9}; a list for several labels. A text with at least this score
    gets the label, before any other label is compared; of several such labels, the first of the list. null: the label
    with the highest score is the answer."""


class BestBy(NamedTuple):
    """A parsed `train.best_by`."""

    score: str
    """`loss`, a score of the task, or one of `LABEL_SCORES`."""
    label: str = ""
    """The label of `score`; empty for a score over all labels."""
    fixed_value: float | None = None
    """Value of the other one of `LABEL_SCORES`, where the label's threshold is moved to it."""


def parse_best_by(text: str) -> BestBy:
    """Parse `train.best_by`. Raises `ValueError` for another form."""
    match = _LABEL_FORM.fullmatch(text)
    if match is None:
        if not re.fullmatch(r"[^:@=]+", text):
            raise ValueError(text)
        return BestBy(text)
    kind, label = match.groups()
    if "@" not in kind:
        return BestBy(kind, label)
    label, separator, value = label.rpartition("=")
    if not (label and separator and 0 < float(value) <= 1):  # float: `ValueError` for another text
        raise ValueError(text)
    return BestBy(kind.partition("@")[0], label, float(value))


def find_selection_problems(metrics: MetricsConfig, train: Any, data: DataConfig) -> Iterator[Problem]:
    """Yield problems that need neither the task nor its labels. `train`: a `TrainConfig`, whose module imports this."""
    if train.best_by is not None:
        try:
            parse_best_by(train.best_by)
        except ValueError:
            fix = f"write a score of the task, or one of: {LABEL_FORMS}"
            yield Problem("train.best_by", train.best_by, "not a score", fix, code="wrong_form")
    if train.average_best and train.keep_best < 2:
        fix = "write train.keep_best=3, or train.average_best=false"
        yield out_of_range_problem("train.keep_best", train.keep_best, "train.average_best needs 2 or more", fix)
    if data.valid_share == 0 and not (data.valid or data.split_column):
        requests = {
            **{f"train.{name}": getattr(train, name) for name in ("best_by", "patience", "average_best")},
            "metrics.operating_point": None if not metrics.operating_point else "a list",
        }
        for field, value in requests.items():
            if value:
                reason, fix = "data.valid_share=0 leaves no validation row", "write a share, e.g. 0.1, or leave it out"
                yield conflict_problem(field, value, reason, fix)
    yield from _find_point_problems(metrics.operating_point or (), data)


def _find_point_problems(points: tuple[OperatingPoint, ...], data: DataConfig) -> Iterator[Problem]:
    field, labels = "metrics.operating_point", [point.label for point in points]
    for point in points:
        if point.recall is None and point.precision is None:
            fix = f"write {{label: {point.label}, recall: 0.8}}, or a precision"
            yield missing_problem(field, point.label, "neither a recall nor a precision", fix)
        if point.recall is not None and point.precision is not None:
            fix = "write one of them: the threshold decides the other"
            yield conflict_problem(field, point.label, "both a recall and a precision", fix)
    if repeated := sorted({label for label in labels if labels.count(label) > 1}):
        yield Problem(field, repeated[0], "written twice", "write each label once", code="duplicate")
    if points and data.out_of_scope_label is not None:
        reason = "data.out_of_scope_label has a threshold that decides too"
        yield conflict_problem(field, labels[0], reason, "leave out one of the two")
