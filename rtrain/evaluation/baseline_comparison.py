"""What the transformer buys: plain models on the same rows, and points per millisecond beside each of them.

Of texts with labels or a number: TF-IDF with linear models; of tagged words: each word's most frequent tag. Latency is
that of a text asked alone, tokenizer included, on one thread, for every model alike. What a run's report has measured
on the same rows is not measured again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rtrain.core import engines
from rtrain.core.ragged import Ragged
from rtrain.core.run_folder import Run
from rtrain.data.store.store import Store, open_store
from rtrain.evaluation.gate_rows import Both
from rtrain.metrics.registry import metric_for
from rtrain.report import baselines

TFIDF, TAGS = baselines.TFIDF, baselines.TAGS
UNMEASURED = "the run's report has not measured it on these rows"
NONE = {
    "spans": "with a place in a text, of which counts of words know nothing",
    "summary": "with sentences of a text",
    "tokens": "with words that are masked",
}
"""How models answer that have no rival, by their output."""
REPORTED = {"tags": TAGS, "labels": TFIDF, "heads": TFIDF}
"""The plain model of outputs whose rival is measured for a run's report alone."""
UNREAD = "the base knows no piece of the rows"
CANDIDATE = "this candidate"
PLAIN = "plain models"
"""In place of their names where none is asked."""

Answer = Callable[[Sequence[str]], Any]


@dataclass(frozen=True)
class Rival:
    name: str
    score: float | None = None
    ms: float | None = None
    """Median latency of a text."""
    points_per_ms: float | None = None
    """(candidate's score - this one's) / (its latency - this one's), in hundredths of a score per millisecond. None
    where the candidate is not the slower one: then its points cost nothing."""
    absent: str = ""
    """Why it was not measured."""


class Trained(NamedTuple):
    """What a rival is trained from: texts and targets of the training rows, and of those that choose its setting."""

    train: tuple[list[str], list[Any]]
    valid: tuple[list[str], list[Any]]


def of_report(store: Store, split: str, folders: Sequence[Path]) -> Mapping[str, Rival]:
    """What a run has measured of plain models on all rows of a split of its store, for its report. `folders`:
    artefacts, of which the first lies in such a run."""
    runs = [run for run in (Run(folder.absolute().parent) for folder in folders) if run.store is not None]
    own = next((run for run in runs if open_store(run.store or Path()).manifest.digest == store.manifest.digest), None)
    document = None if own is None or not baselines.uses_all(store, split) else baselines.read(own)
    if document is None:
        return {}
    return {
        one["name"]: Rival(one["name"], one["scores"][split], one["ms"])
        for one in document["baselines"]
        if split in one["scores"] and "ms" in one
    }


def measure(
    both: Both, store: Store | None, base: Path, known: Mapping[str, Rival], *, fits: bool = True
) -> list[dict[str, Any]]:
    """The candidate itself, then its rivals. Those that are not `known` are trained on the rows of `store` where `fits`
    says so; `base` is the base's folder."""
    task, head, own = both.base.predictor.task, both.base.head, both.candidate
    metric, texts = metric_for(task.output), [] if _none(both) else both.texts
    readable = [text for text in texts if own.predictor.flaw(text) is None]
    if not readable:
        return [asdict(one) for one in (Rival(CANDIDATE), Rival(PLAIN, absent=_none(both) or UNREAD))]
    score = metric.scores(own.answered.outcomes, own.targets, own.head)[metric.headline]
    ms = baselines.ms_of_a_text(lambda some: own.predictor.logits(list(some)), readable)

    def beside(one: Rival) -> Rival:
        assert one.score is not None
        assert one.ms is not None
        return replace(one, points_per_ms=points_per_ms(score - one.score, ms - one.ms))

    found = [Rival(CANDIDATE, score, ms)]
    if (name := REPORTED.get(task.output)) is not None:
        rival = beside(known[name]) if name in known else Rival(name, absent=UNMEASURED)
        return [asdict(one) for one in (*found, rival)]
    lacking = _lacking(both, store)
    rows = None if store is None or lacking else _rows(store, base / "tokenizer.json", task.output)
    if rows is not None and not baselines.is_read(rows.train[0]):
        lacking, rows = UNREAD, None
    if TFIDF in known:
        found.append(beside(known[TFIDF]))
    elif rows is None or not fits:
        found.append(Rival(TFIDF, absent=lacking or UNMEASURED))
    else:
        fitted = baselines.fitted_numbers if task.output == "number" else baselines.fitted_labels
        answer: Answer = fitted(*rows)
        said = answer(texts)
        outcomes = Ragged.even(said) if task.output == "number" else baselines.certain(said, head)
        theirs = metric.scores(outcomes, both.base.targets, head)[metric.headline]
        found.append(beside(Rival(TFIDF, theirs, baselines.ms_of_a_text(answer, texts))))
    return [asdict(one) for one in found]


def _none(both: Both) -> str:
    """Why no plain model answers as this one does, or nothing."""
    output = both.base.predictor.task.output
    if output in NONE:
        return f"none answers {NONE[output]}"
    return "none tells rows that belong to no class" if "outside" in both.base.head.facts else ""


def _lacking(both: Both, store: Store | None) -> str:
    """Why no rival can be trained, or nothing."""
    output = both.base.predictor.task.output
    if store is None:
        return "the rows that the base was trained on are not known"
    if both.base.predictor.head.labels != store.manifest.labels:
        return "the base was trained on other labels"
    if not store.rows("train") or not store.rows("valid"):
        return "the run has no training or no validation rows"
    if both.base.predictor.artifact.engine != engines.FLOAT:
        return "the base is no float model"
    return "" if output == "number" or len(np.unique(store.targets("train").values)) > 1 else "there is only one label"


def _rows(store: Store, tokenizer: Path, output: str) -> Trained:
    parts = []
    for split in ("train", "valid"):
        texts, targets = baselines.rows(store, split, tokenizer)
        pairs = zip(texts, targets.values.tolist(), strict=True)
        known = [(text, value) for text, value in pairs if output == "number" or value >= 0]
        parts.append(([text for text, _ in known], [value for _, value in known]))
    return Trained(*parts)


def points_per_ms(gain: float, ms: float) -> float | None:
    """None where the gain costs no time."""
    return 100 * gain / ms if ms > 0 else None
