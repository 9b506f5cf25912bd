"""Description of a model in one document: purpose, request format, limits. For its page and for programs."""

import itertools
from pathlib import Path
from typing import Any

from rtrain.config import ServeConfig
from rtrain.core import engines
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.inference import explainer
from rtrain.inference.predictor import Predictor
from rtrain.tasks.base import Input
from serve import model
from serve.auth.preflight import is_private
from serve.model import is_paired
from serve.schemas.predict import RequestError, StrictModel

SHORT_TEXT_OUTPUTS = ("classes", "labels", "heads", "number", "tags")
"""Kinds of answers that a short text alone can have. A summary needs a document, and other kinds a mask or a second
text."""
MAX_EXAMPLES = 3
MIN_EXAMPLE_CHARACTERS, MAX_EXAMPLE_CHARACTERS = 20, 160
MAX_EXAMPLE_BATCHES, EXAMPLE_BATCH_ROWS = 40, 250
"""Bound of the search for examples: 10,000 validation rows; a batch holds at most 500,000 characters."""


class NumberScale(StrictModel):
    lowest: float
    highest: float
    step: float | None
    """Distance of neighbouring grades; null where the training scores are on no scale of grades."""


class RequestLimits(StrictModel):
    inputs: int
    """Texts of one request."""
    body_bytes: int
    tokens: int
    """Tokens of one window. A longer text is cut, or read in several windows, as the artifact says."""


class ModelRevisions(StrictModel):
    """Digests of model and tokenizer. Every reply has them in its headers."""

    model: str
    tokenizer: str
    labels: str


class ModelInfo(StrictModel):
    name: str
    task: str
    output: str
    """Kind of the answers: classes, labels, heads, number, tags, spans, summary or tokens."""
    engine: str
    revisions: ModelRevisions
    fields: list[str]
    """Names of the texts that a question is about: one, or two."""
    columns: dict[str, str]
    """Column of the training rows for each field of a request; empty if unknown."""
    labels: list[str]
    """As the artifact has them: `head=label` of several heads, B- and I- of entities."""
    thresholds: dict[str, float] | None
    """Score from which each label is given, by label; null where the first one is the answer."""
    abstain: float | None
    """Score below which `parameters.abstain` gives no label; null where the artifact has none."""
    scale: NumberScale | None
    """Range of the training scores, where the answer is a number."""
    max_words: int | None
    """The longest summary, unless the request says another number."""
    explains: bool
    """Whether `parameters.explain` is answered."""
    limits: RequestLimits
    examples: list[Any]
    """Inputs to try: short texts of validation rows, where the model's run has kept them and strangers cannot read
    them; else the task's own."""


def text_columns(predictor: Predictor) -> dict[str, str]:
    """The columns of the training rows by the names of the texts of a question."""
    data = predictor.artifact.data
    settings = zip(predictor.task.fields, ("text", "text_pair"), strict=True)
    columns = {field: data[setting] for field, setting in settings if data.get(setting)}
    return {field: name if isinstance(name, str) else " and ".join(name) for field, name in columns.items()}


def build_model_info(predictor: Predictor, settings: ServeConfig) -> dict[str, Any]:
    """The `ModelInfo` of a loaded model."""
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
        "columns": text_columns(predictor),
        "labels": list(artifact.labels),
        "thresholds": task.label_thresholds(predictor.head),
        "abstain": _find_abstain_threshold(predictor),
        "scale": {name: facts[name] for name in ("lowest", "highest", "step")} if on_scale else None,
        "max_words": facts.get("max_words"),
        "explains": _supports_explain(predictor),
        "limits": {"inputs": settings.max_inputs, "body_bytes": settings.max_body_bytes, "tokens": artifact.max_tokens},
        "examples": _collect_examples(predictor, settings, paired),
    }


def _supports_explain(predictor: Predictor) -> bool:
    try:
        explainer.check_explainable(predictor.task)
    except UserError:
        return False
    return engines.get_engine(predictor.artifact.engine).has_gradients


def _find_abstain_threshold(predictor: Predictor) -> float | None:
    try:
        return model.abstain_threshold(predictor.task, predictor.head)
    except RequestError:
        return None


def _collect_examples(predictor: Predictor, settings: ServeConfig, paired: bool) -> list[Input]:
    """Kept texts of validation rows, else the task's examples. Where a task that takes one text was trained on two,
    each of its examples stands beside the next."""
    task = predictor.task
    if is_private(settings) and not paired and task.output in SHORT_TEXT_OUTPUTS:
        texts = _read_short_texts(Run(predictor.folder.parent).predictions("valid"))
        if texts:
            return list(texts)
    examples = task.example_inputs(predictor.head)
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
        import pyarrow.parquet  # the extra `standalone` lacks it

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
