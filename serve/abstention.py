"""`parameters.abstain`: the label "none" where the model is less sure than what was chosen on its validation rows."""

from collections.abc import Sequence
from typing import Any

from rtrain.core.ragged import Head
from rtrain.inference.drift_baseline import ABSTAIN, NONE
from rtrain.tasks.base import Task
from serve.schemas.predict import RequestError


def check(task: Task, head: Head) -> None:
    """Raise `RequestError` where the model has no threshold to abstain by."""
    if task.thresholds(head) is None:
        least(task, head)


def least(task: Task, head: Head) -> float:
    """The score from which a class counts. Raises `RequestError` where there is none."""
    if task.output != "classes":
        raise RequestError(422, "this model's answers are not labels of a text", "parameters.abstain")
    found = head.facts.get("threshold" if "outside" in head.facts else ABSTAIN)
    if found is None:
        reason = "this artefact has no threshold that was chosen on validation rows; train the model again to have one"
        raise RequestError(422, reason, "parameters.abstain")
    return float(found)


def refuse_label(labels: Sequence[str]) -> None:
    """Raise `RequestError` where tensors of labels could not tell an abstention from a label of the model."""
    if NONE in labels:
        reason = f"this model has a label {NONE!r}, which says here that it abstains; send the text to /predict"
        raise RequestError(422, reason, "parameters.abstain")


def abstain(answers: list[list[dict[str, Any]]], task: Task, head: Head, top_k: int | None) -> list[Any]:
    """The answers of `Task.decode` with all labels, with "none" in front of those that do not count: its score is what
    the best label lacks. It is marked `abstained`, since a model may have a label of that name. Of several labels the
    given ones come first: each has a threshold of its own."""
    thresholds, outside = task.thresholds(head), head.facts.get("outside")
    lowest = least(task, head) if thresholds is None else 0.0
    found = []
    for answer in answers:
        best = answer[0]
        none = {"label": NONE, "score": 1 - best["score"], "abstained": True}
        if thresholds is not None:
            given = [entry for entry in answer if entry["score"] >= thresholds[entry["label"]]]
            answer = [*(given or [none]), *(entry for entry in answer if entry not in given)]
        elif best["label"] == outside:  # by the same threshold, under the name that the training rows have for it
            answer = [{**best, "label": NONE, "abstained": True}, *answer[1:]]
        elif best["score"] < lowest:
            answer = [none, *answer]
        found.append(answer[:top_k])
    return found
