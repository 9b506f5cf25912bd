"""What the transformer buys: two plain models on the same rows, and points per millisecond beside each of them.

TF-IDF with a linear model, and a static student (`rtrain.gate.static`) with a linear model. Latency is that of a text
asked alone, tokenizer included, on one thread, for every model alike.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rtrain import engines
from rtrain.batch import Ragged
from rtrain.data.stores.store import Store
from rtrain.gate import static
from rtrain.gate.rows import Both
from rtrain.metrics.by_output import metric_for
from rtrain.report import baseline

TFIDF, STATIC = baseline.TFIDF, "static embeddings and a linear model"
ASKED = 100
"""Texts that are asked alone."""
REPEATS = 3
"""A text's latency is the least of so many, since a moment of the machine's is no cost of the model."""

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


def measure(both: Both, store: Store | None, base: Path) -> list[dict[str, Any]]:
    """The candidate itself, then its rivals, which are trained on the rows of `store`; `base` is the base's folder."""
    task, head = both.base.predictor.task, both.base.head
    metric = metric_for(task.output)
    texts, own = both.texts, both.candidate
    asked = [texts[row] for row in np.unique(np.linspace(0, len(texts) - 1, min(ASKED, len(texts))).astype(int))]
    score = metric.scores(own.answered.outcomes, own.targets, own.head)[metric.headline]
    ms = _ms(lambda some: own.predictor.logits(list(some)), asked)
    found = [Rival("this candidate", score, ms)]
    lacking = _lacking(both, store)
    if store is None or lacking:
        return [asdict(one) for one in (*found, *(Rival(name, absent=lacking) for name in (TFIDF, STATIC)))]
    rows = _rows(store, base / "tokenizer.json", task.output)
    if not baseline.is_read(rows.train[0]):
        unread = "the base knows no piece of the training rows"
        return [asdict(one) for one in (*found, *(Rival(name, absent=unread) for name in (TFIDF, STATIC)))]
    for name, fit in ((TFIDF, _tfidf), (STATIC, _static)):
        if name == STATIC and not static.is_installed():
            found.append(Rival(name, absent=f"{static.PACKAGE} is not installed (the extra bench has it)"))
            continue
        answer = fit(both, rows)
        said = answer(texts)
        outcomes = Ragged.even(said) if task.output == "number" else baseline.certain(said, head)
        theirs, took = metric.scores(outcomes, both.base.targets, head)[metric.headline], _ms(answer, asked)
        found.append(Rival(name, theirs, took, points_per_ms(score - theirs, ms - took)))
    return [asdict(one) for one in found]


def _lacking(both: Both, store: Store | None) -> str:
    """Why no rival can be trained, or nothing."""
    output, head = both.base.predictor.task.output, both.base.head
    if store is None:
        return "the rows that the candidate was trained on are not known"
    if output not in ("classes", "number") or "outside" in head.facts:
        return f"none answers like this model ({output})"
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
        texts, targets = baseline.rows(store, split, tokenizer)
        pairs = zip(texts, targets.values.tolist(), strict=True)
        known = [(text, value) for text, value in pairs if output == "number" or value >= 0]
        parts.append(([text for text, _ in known], [value for _, value in known]))
    return Trained(*parts)


def _tfidf(both: Both, rows: Trained) -> Answer:
    fitted = baseline.fitted_numbers if both.base.predictor.task.output == "number" else baseline.fitted_labels
    return fitted(*rows)


def _static(both: Both, rows: Trained) -> Answer:
    model = static.distil(both.base.predictor)
    train, valid = (model.encode(texts) for texts, _ in rows)
    if both.base.predictor.task.output == "number":
        from sklearn.linear_model import Ridge

        models = [Ridge(alpha=alpha).fit(train, rows.train[1]) for alpha in baseline.CHOICES_OF_ALPHA]
        best = max(models, key=lambda one: one.score(valid, rows.valid[1]))
    else:
        best = baseline.best_machine(train, rows.train[1], valid, rows.valid[1])
    return lambda texts: np.asarray(best.predict(model.encode(list(texts))), dtype=np.float64)


def points_per_ms(gain: float, ms: float) -> float | None:
    """None where the gain costs no time."""
    return 100 * gain / ms if ms > 0 else None


def _ms(answer: Answer, texts: Sequence[str]) -> float:
    """Median latency of a text, milliseconds."""
    answer(texts[:1])
    least = []
    for text in texts:
        times = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            answer([text])
            times.append(time.perf_counter() - started)
        least.append(min(times))
    return 1000 * statistics.median(least)
