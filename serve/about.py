"""What a model is for and how it is asked, in one document: for its page, and for programs that choose."""

import itertools
from typing import Any

from rtrain import engines
from rtrain.config import Serve
from rtrain.errors import UserError
from rtrain.explain import targets
from rtrain.predict import Predictor
from rtrain.tasks.base import Input, Task
from serve import abstention
from serve.schema import Closed, RequestError


class Scale(Closed):
    lowest: float
    highest: float
    step: float | None
    """Distance of neighbouring grades; null where the training scores are on no scale of grades."""


class Limits(Closed):
    inputs: int
    """Texts of one request."""
    body_bytes: int
    tokens: int
    """Tokens of one window. A longer text is cut, or read in several windows, as the artefact says."""


class Revisions(Closed):
    """Digests: each changes with what it names. Every reply has them too, in its headers."""

    model: str
    tokenizer: str
    labels: str


class About(Closed):
    name: str
    task: str
    output: str
    """Kind of the answers: classes, labels, heads, number, tags, spans, summary or tokens."""
    engine: str
    revisions: Revisions
    fields: list[str]
    """Names of the texts that a question is about: one, or two."""
    columns: dict[str, str]
    """By these names, the columns of the training rows that the texts stood in; empty where they are not known."""
    labels: list[str]
    """As the artefact has them: `head=label` of several heads, B- and I- of entities."""
    thresholds: dict[str, float] | None
    """Score from which each label is given, by label; null where the first one is the answer."""
    abstain: float | None
    """Score below which `parameters.abstain` gives no label; null where the artefact has none."""
    scale: Scale | None
    """Range of the training scores, where the answer is a number."""
    max_words: int | None
    """The longest summary, unless the request says another number."""
    explains: bool
    """Whether `parameters.explain` is answered."""
    limits: Limits
    examples: list[Any]
    """Inputs to try."""


def is_paired(predictor: Predictor) -> bool:
    """Whether the model is asked with two texts: as its task demands, or as it was trained."""
    return predictor.task.needs_pair or bool(predictor.artifact.data.get("text_pair"))


def columns(predictor: Predictor) -> dict[str, str]:
    """The columns of the training rows by the names of the texts of a question."""
    data = predictor.artifact.data
    settings = zip(predictor.task.fields, ("text", "text_pair"), strict=True)
    return {field: data[setting] for field, setting in settings if data.get(setting)}


def describe(predictor: Predictor, settings: Serve) -> dict[str, Any]:
    """The `About` of a loaded model."""
    artifact, task, facts = predictor.artifact, predictor.task, predictor.head.facts
    paired = is_paired(predictor)
    on_scale = task.output == "number" and "lowest" in facts
    return {
        "name": artifact.name,
        "task": task.name,
        "output": task.output,
        "engine": artifact.engine,
        "revisions": predictor.revisions,
        "fields": list(task.fields if paired else task.fields[:1]),
        "columns": columns(predictor),
        "labels": list(artifact.labels),
        "thresholds": task.thresholds(predictor.head),
        "abstain": _abstains_below(predictor),
        "scale": {name: facts[name] for name in ("lowest", "highest", "step")} if on_scale else None,
        "max_words": facts.get("max_words"),
        "explains": _explains(predictor),
        "limits": {
            "inputs": settings.max_inputs,
            "body_bytes": settings.max_body_bytes,
            "tokens": artifact.max_tokens,
        },
        "examples": _examples(task, predictor, paired),
    }


def _explains(predictor: Predictor) -> bool:
    try:
        targets.check(predictor.task)
    except UserError:
        return False
    return engines.get(predictor.artifact.engine).gradients


def _abstains_below(predictor: Predictor) -> float | None:
    try:
        return abstention.least(predictor.task, predictor.head)
    except RequestError:
        return None


def _examples(task: Task, predictor: Predictor, paired: bool) -> list[Input]:
    """Where a task that takes one text was trained on two, each example stands beside the next."""
    found = task.examples(predictor.head)
    if not paired or not all(isinstance(example, str) for example in found):
        return list(found)
    return [dict(zip(task.fields, pair, strict=True)) for pair in itertools.pairwise(map(str, found))]
