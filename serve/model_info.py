"""What a model is for and how it is asked, in one document: for its page, and for programs that choose."""

import itertools
from pathlib import Path
from typing import Any

from rtrain.config import Serve
from rtrain.core import engines
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.inference.explain import targets
from rtrain.inference.predictor import Predictor
from rtrain.tasks.base import Input
from serve import abstention
from serve.auth.preflight import is_private
from serve.schemas.predict import Closed, RequestError

SHORT_TEXT_OUTPUTS = ("classes", "labels", "heads", "number", "tags")
"""Kinds of answers that a short text alone can have. A summary needs a document, and other kinds a mask or a second
text."""
MAX_EXAMPLES = 3
MIN_EXAMPLE_CHARACTERS, MAX_EXAMPLE_CHARACTERS = 20, 160
MAX_EXAMPLE_BATCHES, EXAMPLE_BATCH_ROWS = 40, 250
"""Bound of the search for examples: 10,000 validation rows, of which a batch holds at most 500,000 characters."""


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
    """Inputs to try: short texts of validation rows, where the model's run has kept them and strangers cannot read
    them; else the task's own."""


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
        "examples": _collect_examples(predictor, settings, paired),
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


def _collect_examples(predictor: Predictor, settings: Serve, paired: bool) -> list[Input]:
    """Kept texts of validation rows, else the task's examples. Where a task that takes one text was trained on two,
    each of its examples stands beside the next."""
    task = predictor.task
    if is_private(settings) and not paired and task.output in SHORT_TEXT_OUTPUTS:
        texts = _read_short_texts(Run(predictor.folder.parent).predictions("valid"))
        if texts:
            return list(texts)
    examples = task.examples(predictor.head)
    if not paired or not all(isinstance(example, str) for example in examples):
        return list(examples)
    return [dict(zip(task.fields, pair, strict=True)) for pair in itertools.pairwise(map(str, examples))]


def _read_short_texts(path: Path) -> list[str]:
    """The shortest texts of a file of predictions, each with another answer. Empty if the file is missing or
    unreadable, or if pyarrow is not installed."""
    shortest: dict[Any, tuple[int, str]] = {}
    try:
        if not path.is_file():
            return []
        import pyarrow.parquet  # the extra `alone` lacks it

        with pyarrow.parquet.ParquetFile(path) as file:
            batches = file.iter_batches(EXAMPLE_BATCH_ROWS, columns=["text", "prediction"], use_threads=False)
            for batch in itertools.islice(batches, MAX_EXAMPLE_BATCHES):
                for text, prediction in zip(batch["text"].to_pylist(), batch["prediction"].to_pylist(), strict=True):
                    if not text or not MIN_EXAMPLE_CHARACTERS <= len(text.strip()) <= MAX_EXAMPLE_CHARACTERS:
                        continue
                    answer = frozenset(prediction) if isinstance(prediction, list) else prediction
                    candidate = (len(text), text)
                    shortest[answer] = min(shortest.get(answer, candidate), candidate)
        pyarrow.default_memory_pool().release_unused()  # of long texts it keeps 30 MB
    except (ImportError, OSError, ValueError, KeyError):
        return []
    return [text for _, text in sorted(set(shortest.values()))[:MAX_EXAMPLES]]
