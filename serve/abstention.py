"""`parameters.abstain`: answer "none" where the score is below the threshold chosen on the validation rows."""

from collections.abc import Sequence
from typing import Any

from rtrain.core.ragged import Head
from rtrain.inference.drift_baseline import ABSTAIN_FACT, NO_LABEL
from rtrain.tasks.base import Task
from serve.schemas.predict import RequestError


def check_can_abstain(task: Task, head: Head) -> None:
    """Raise `RequestError` where the model has no threshold to abstain by."""
    if task.label_thresholds(head) is None:
        abstain_threshold(task, head)


def abstain_threshold(task: Task, head: Head) -> float:
    """Minimum score of an accepted class. Raises `RequestError` if the model has no threshold."""
    if task.output != "classes":
        raise RequestError(422, "this model's answers are not labels of a text", "parameters.abstain")
    threshold = head.facts.get("threshold" if "out_of_scope_label" in head.facts else ABSTAIN_FACT)
    if threshold is None:
        reason = "this artifact has no threshold that was chosen on validation rows; train the model again to have one"
        raise RequestError(422, reason, "parameters.abstain")
    return float(threshold)


def check_labels(labels: Sequence[str]) -> None:
    """Raise `RequestError` where tensors of labels could not tell an abstention from a label of the model."""
    if NO_LABEL in labels:
        reason = f"this model has a label {NO_LABEL!r}, which says here that it abstains; send the text to /predict"
        raise RequestError(422, reason, "parameters.abstain")


def apply_abstention(answers: list[list[dict[str, Any]]], task: Task, head: Head, top_k: int | None) -> list[Any]:
    """Prepend "none" to answers whose best score is below the threshold. `answers`: from `Task.decode`, with all
    labels. The score of "none" is 1 minus the best score. `abstained` distinguishes it from a label of that name. In a
    multi-label answer, accepted labels come first; each label has its own threshold."""
    thresholds, out_of_scope_label = task.label_thresholds(head), head.facts.get("out_of_scope_label")
    min_score = abstain_threshold(task, head) if thresholds is None else 0.0
    results = []
    for answer in answers:
        best = answer[0]
        none = {"label": NO_LABEL, "score": 1 - best["score"], "abstained": True}
        if thresholds is not None:
            accepted_labels = [entry for entry in answer if entry["score"] >= thresholds[entry["label"]]]
            answer = [*(accepted_labels or [none]), *(entry for entry in answer if entry not in accepted_labels)]
        elif (
            best["label"] == out_of_scope_label
        ):  # by the same threshold, under the name that the training rows have for it
            answer = [{**best, "label": NO_LABEL, "abstained": True}, *answer[1:]]
        elif best["score"] < min_score:
            answer = [none, *answer]
        results.append(answer[:top_k])
    return results
