"""Whether two versions of a model give a text the same answer: what a client would act on, not how sure it is."""

from collections.abc import Mapping
from typing import Any

from rtrain.tasks.base import Task

NEAR = 0.1
"""Two numbers are the same within this share of the training scores' standard deviation."""


def same(task: Task, facts: Mapping[str, Any], first: Any, second: Any) -> bool:
    """`first`, `second`: answers to one text, by `Task.decode`. `facts`: those of the head."""
    if task.output == "number":
        return bool(abs(first - second) <= NEAR * facts.get("std", 1.0))
    least = facts.get("threshold", 0.5)
    return bool(_essence(task.output, least, first) == _essence(task.output, least, second))


def _essence(output: str, least: float, answer: Any) -> Any:
    if output == "classes":
        return answer[0]["label"]
    if output == "labels":
        return {entry["label"] for entry in answer if entry["score"] >= least}
    if output == "heads":
        return {head: entries[0]["label"] for head, entries in answer.items()}
    if output == "tags":
        return {(entity["entity_group"], entity["start"], entity["end"]) for entity in answer}
    if output == "spans":
        return (answer["start"], answer["end"])
    if output == "summary":
        return [(sentence["start"], sentence["end"]) for sentence in answer["sentences"]]
    return [mask[0]["token"] for mask in answer]
