"""Reference models on the same rows, and the transformer's gain in points per millisecond.

Texts with labels or a number: TF-IDF with a linear model. Tagged words: the most frequent tag of each word. Latency is
measured per single text, tokenizer included, on one thread. Measurements in a run's report are reused.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rtrain.core import engines
from rtrain.core.ragged import RaggedArray
from rtrain.core.run_folder import Run
from rtrain.data.store.store import Store, open_store
from rtrain.evaluation.pairing import AnswerPair
from rtrain.metrics.registry import get_metric
from rtrain.report import baselines

TFIDF, TAGS = baselines.TFIDF, baselines.TAGS
NOT_IN_REPORT = "the run's report has not measured it on these rows"
NO_RIVAL_REASONS = {"spans": "positions in a text", "summary": "sentences of a text", "tokens": "masked words"}
"""Kinds of output without a reference model, with the end of the reason."""
REPORT_ONLY_RIVALS = {"tags": TAGS, "labels": TFIDF, "heads": TFIDF}
"""Reference models that only a run's report measures, by kind of output."""
NO_KNOWN_TOKENS = "the baseline's vocabulary has no token of the rows"
CANDIDATE_NAME = "this candidate"
REFERENCE_MODELS = "reference models"
"""Name of the entry if no reference model is measured."""

AnswerTexts = Callable[[Sequence[str]], Any]


@dataclass(frozen=True)
class Rival:
    name: str
    score: float | None = None
    ms: float | None = None
    """Median latency of a text."""
    points_per_ms: float | None = None
    """(score of the candidate - this score) / (latency of the candidate - this latency), in points per millisecond.
    None if the candidate is not slower."""
    absence_reason: str = ""
    """Reason for a missing measurement."""


def read_reported_rivals(store: Store, split: str, folders: Sequence[Path]) -> Mapping[str, Rival]:
    """Read the reference models of a run's report on all rows of a split.

    The first of `folders` (artifacts) in a run with this store provides the report.
    """
    if not baselines.uses_all_rows(store, split):
        return {}
    for run in (Run(folder.absolute().parent) for folder in folders):
        if run.token_store is not None and open_store(run.token_store).manifest.digest == store.manifest.digest:
            document = baselines.read_baselines(run) or {"baselines": []}
            return {
                entry["name"]: Rival(entry["name"], entry["scores"][split], entry["ms"])
                for entry in document["baselines"]
                if split in entry["scores"] and "ms" in entry
            }
    return {}


def measure_rivals(
    pair: AnswerPair, store: Store | None, reported_rivals: Mapping[str, Rival], trains_rivals: bool = True
) -> list[dict[str, Any]]:
    """Measure the candidate, then the reference models.

    Args:
        store: training rows of models that are missing in `reported_rivals`.
        trains_rivals: train missing models.
    """
    task, candidate = pair.baseline.predictor.task, pair.candidate
    metric, no_rival_reason = get_metric(task.output), _explain_no_rival(pair)
    texts = [] if no_rival_reason else pair.texts
    readable = [text for text in texts if candidate.predictor.validate_input(text) is None]
    if not readable:
        no_rival = Rival(REFERENCE_MODELS, absence_reason=no_rival_reason or NO_KNOWN_TOKENS)
        return [asdict(Rival(CANDIDATE_NAME)), asdict(no_rival)]
    score = metric.main_scores(candidate.answers.row_results, candidate.targets, candidate.head)[metric.headline]
    ms = baselines.measure_text_ms(lambda some_texts: candidate.predictor.logits(list(some_texts)), readable)
    name = REPORT_ONLY_RIVALS.get(task.output, TFIDF)
    if name in reported_rivals:
        rival = reported_rivals[name]
    elif task.output in REPORT_ONLY_RIVALS:
        rival = Rival(name, absence_reason=NOT_IN_REPORT)
    else:
        rival = _train_rival(pair, store, texts, trains_rivals)
    if rival.score is not None and rival.ms is not None:
        rival = replace(rival, points_per_ms=points_per_ms(score - rival.score, ms - rival.ms))
    return [asdict(Rival(CANDIDATE_NAME, score, ms)), asdict(rival)]


def _train_rival(pair: AnswerPair, store: Store | None, texts: Sequence[str], trains_rivals: bool) -> Rival:
    """Train and measure TF-IDF with a linear model, or explain why it is not measured."""
    task, head = pair.baseline.predictor.task, pair.baseline.head
    absence_reason = _explain_untrainable(pair, store)
    if store is None or absence_reason:
        return Rival(TFIDF, absence_reason=absence_reason)
    tokenizer = pair.baseline.predictor.folder / "tokenizer.json"
    train, valid = (_read_training_rows(store, split, tokenizer, task.output) for split in ("train", "valid"))
    if not baselines.has_known_tokens(train[0]):
        return Rival(TFIDF, absence_reason=NO_KNOWN_TOKENS)
    if not trains_rivals:
        return Rival(TFIDF, absence_reason=NOT_IN_REPORT)
    is_number = task.output == "number"
    answer: AnswerTexts = (baselines.fit_numbers if is_number else baselines.fit_labels)(train, valid)
    predictions = answer(texts)
    results = RaggedArray.from_matrix(predictions) if is_number else baselines.certain_logits(predictions, head)
    metric = get_metric(task.output)
    score = metric.main_scores(results, pair.baseline.targets, head)[metric.headline]
    return Rival(TFIDF, score, baselines.measure_text_ms(answer, texts))


def _explain_no_rival(pair: AnswerPair) -> str:
    """Explain why this output has no reference model; empty if it has one."""
    output = pair.baseline.predictor.task.output
    if output in NO_RIVAL_REASONS:
        return f"none predicts {NO_RIVAL_REASONS[output]}"
    return "none detects out-of-scope rows" if "out_of_scope_label" in pair.baseline.head.facts else ""


def _explain_untrainable(pair: AnswerPair, store: Store | None) -> str:
    """Explain why no reference model can be trained; empty if one can."""
    output = pair.baseline.predictor.task.output
    if store is None:
        return "the training rows of the baseline are unknown"
    if pair.baseline.predictor.head.labels != store.manifest.labels:
        return "the baseline was trained on other labels"
    if not store.num_rows("train") or not store.num_rows("valid"):
        return "the run has no training or no validation rows"
    if pair.baseline.predictor.artifact.engine != engines.FLOAT_ENGINE:
        return "the baseline is not a float model"
    return "" if output == "number" or len(np.unique(store.targets("train").values)) > 1 else "there is only one label"


def _read_training_rows(store: Store, split: str, tokenizer: Path, output: str) -> tuple[list[str], list[Any]]:
    texts, targets = baselines.read_rows(store, split, tokenizer)
    pairs = zip(texts, targets.values.tolist(), strict=True)
    labeled_rows = [(text, value) for text, value in pairs if output == "number" or value >= 0]
    return [text for text, _ in labeled_rows], [value for _, value in labeled_rows]


def points_per_ms(gain: float, ms: float) -> float | None:
    """Points per millisecond; None if the gain costs no time."""
    return 100 * gain / ms if ms > 0 else None
