"""Whether two versions of a model give a text the same answer: what a client would act on, not how sure it is."""

from typing import Any

from rtrain.batch import Head
from rtrain.tasks.base import Task

NEAR = 0.1
"""Two numbers are the same within this share of the training scores' standard deviation."""


def same(task: Task, head: Head, first: Any, other: Head, second: Any) -> bool:
    """`first`, `second`: answers to one text, by `Predictor.decode`; `head`, `other`: those of the versions that gave
    them. Of several labels each version has given those from its own thresholds on."""
    if task.output == "number":
        return bool(abs(first - second) <= NEAR * head.facts.get("std", 1.0))
    return bool(_essence(task, head, first) == _essence(task, other, second))


def _essence(task: Task, head: Head, answer: Any) -> Any:
    output = task.output
    if output == "classes":
        return answer[0]["label"]
    if output == "labels":
        thresholds = task.thresholds(head) or {}
        return {entry["label"] for entry in answer if entry["score"] >= thresholds.get(entry["label"], 0.0)}
    if output == "heads":
        return {head: entries[0]["label"] for head, entries in answer.items()}
    if output == "tags":
        return {(entity["entity_group"], entity["start"], entity["end"]) for entity in answer}
    if output == "spans":
        return (answer["start"], answer["end"])
    if output == "summary":
        return [(sentence["start"], sentence["end"]) for sentence in answer["sentences"]]
    # Not its number: in a trimmed vocabulary the same word has another.
    return [mask[0]["token_str"] for mask in answer]
