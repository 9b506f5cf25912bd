"""Reference models on the same rows, and the transformer's gain in points per millisecond.

Texts with labels or a number: TF-IDF with a linear model. Tagged words: the most frequent tag of each word. Latency is
measured per single text, tokenizer included, on one thread. Measurements in a run's report are reused.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rtrain.core import engines
from rtrain.core.ragged import RaggedArray
from rtrain.core.run_folder import Run
from rtrain.data.store.store import Store, open_store
from rtrain.evaluation.gate_rows import AnswerPair
from rtrain.metrics.registry import get_metric
from rtrain.report import baselines

TFIDF, TAGS = baselines.TFIDF, baselines.TAGS
NOT_IN_REPORT = "the run's report has not measured it on these rows"
NO_RIVAL_REASONS = {
    "spans": "positions in a text",
    "summary": "sentences of a text",
    "tokens": "masked words",
}
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


class RivalTrainingRows(NamedTuple):
    """Texts and targets of the training rows, and of the validation rows that choose the hyperparameter."""

    train: tuple[list[str], list[Any]]
    valid: tuple[list[str], list[Any]]


def read_reported_rivals(store: Store, split: str, folders: Sequence[Path]) -> Mapping[str, Rival]:
    """Read the reference models of a run's report on all rows of a split.

    The first of `folders` (artifacts) in a run with this store provides the report.
    """
    runs = [run for run in (Run(folder.absolute().parent) for folder in folders) if run.token_store is not None]
    reporting_run = next(
        (run for run in runs if open_store(run.token_store or Path()).manifest.digest == store.manifest.digest), None
    )
    document = (
        None
        if reporting_run is None or not baselines.uses_all_rows(store, split)
        else baselines.read_baselines(reporting_run)
    )
    if document is None:
        return {}
    return {
        entry["name"]: Rival(entry["name"], entry["scores"][split], entry["ms"])
        for entry in document["baselines"]
        if split in entry["scores"] and "ms" in entry
    }


def measure_rivals(
    pair: AnswerPair,
    store: Store | None,
    baseline_folder: Path,
    reported_rivals: Mapping[str, Rival],
    *,
    trains_rivals: bool = True,
) -> list[dict[str, Any]]:
    """Measure the candidate, then the reference models.

    Args:
        store: training rows of models that are missing in `reported_rivals`.
        baseline_folder: the artifact of the baseline, with the tokenizer.
        trains_rivals: train missing models.
    """
    task, head, candidate = pair.baseline.predictor.task, pair.baseline.head, pair.candidate
    metric, texts = get_metric(task.output), [] if _explain_no_rival(pair) else pair.texts
    readable = [text for text in texts if candidate.predictor.validate_input(text) is None]
    if not readable:
        return [
            asdict(measured_rival)
            for measured_rival in (
                Rival(CANDIDATE_NAME),
                Rival(REFERENCE_MODELS, absence_reason=_explain_no_rival(pair) or NO_KNOWN_TOKENS),
            )
        ]
    score = metric.main_scores(candidate.answers.row_results, candidate.targets, candidate.head)[metric.headline]
    ms = baselines.measure_text_ms(lambda some_texts: candidate.predictor.logits(list(some_texts)), readable)

    def with_points_per_ms(rival: Rival) -> Rival:
        assert rival.score is not None
        assert rival.ms is not None
        return replace(rival, points_per_ms=points_per_ms(score - rival.score, ms - rival.ms))

    rivals = [Rival(CANDIDATE_NAME, score, ms)]
    if (name := REPORT_ONLY_RIVALS.get(task.output)) is not None:
        rival = (
            with_points_per_ms(reported_rivals[name])
            if name in reported_rivals
            else Rival(name, absence_reason=NOT_IN_REPORT)
        )
        return [asdict(measured_rival) for measured_rival in (*rivals, rival)]
    absence_reason = _explain_untrainable(pair, store)
    rows = (
        None
        if store is None or absence_reason
        else _read_training_rows(store, baseline_folder / "tokenizer.json", task.output)
    )
    if rows is not None and not baselines.has_known_tokens(rows.train[0]):
        absence_reason, rows = NO_KNOWN_TOKENS, None
    if TFIDF in reported_rivals:
        rivals.append(with_points_per_ms(reported_rivals[TFIDF]))
    elif rows is None or not trains_rivals:
        rivals.append(Rival(TFIDF, absence_reason=absence_reason or NOT_IN_REPORT))
    else:
        fit_model = baselines.fit_numbers if task.output == "number" else baselines.fit_labels
        answer: AnswerTexts = fit_model(*rows)
        predictions = answer(texts)
        outcomes = (
            RaggedArray.from_matrix(predictions)
            if task.output == "number"
            else baselines.certain_logits(predictions, head)
        )
        rival_score = metric.main_scores(outcomes, pair.baseline.targets, head)[metric.headline]
        rivals.append(with_points_per_ms(Rival(TFIDF, rival_score, baselines.measure_text_ms(answer, texts))))
    return [asdict(measured_rival) for measured_rival in rivals]


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


def _read_training_rows(store: Store, tokenizer: Path, output: str) -> RivalTrainingRows:
    parts = []
    for split in ("train", "valid"):
        texts, targets = baselines.read_rows(store, split, tokenizer)
        pairs = zip(texts, targets.values.tolist(), strict=True)
        labeled_rows = [(text, value) for text, value in pairs if output == "number" or value >= 0]
        parts.append(([text for text, _ in labeled_rows], [value for _, value in labeled_rows]))
    return RivalTrainingRows(*parts)


def points_per_ms(gain: float, ms: float) -> float | None:
    """Points per millisecond; None if the gain costs no time."""
    return 100 * gain / ms if ms > 0 else None
