"""The baselines that a fine-tuned encoder must beat, and `baselines.json` of a run: what they reach on its own rows.

Texts with one label or a number: TF-IDF of words and of characters with a linear model (scikit-learn), and the one
answer that suits the training rows best. Tagged words: the tag that each word has most often. Other kinds of answer
have none; a summary's scores hold those of the first sentences already.

{"schema_version": 2, "headline": name of the score, "trained_on": rows, "baselines": [{"name", "scores": {split: value,
larger is better}, "ms": median latency of a text asked alone, where it was measured}, ...]}. Made once, when a run has
ended, from its token store: rows past `MOST_ROWS`, and tokens past `MOST_TOKENS`, are left out by a fixed draw, so that
a large run's report takes seconds too.
"""

import hashlib
import json
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rtrain import config as configuration, drafts
from rtrain.batch import IGNORED, Head, Ragged
from rtrain.data.stores.store import Store, open_store
from rtrain.metrics.by_output import metric_for
from rtrain.report import stats
from rtrain.run import Run
from rtrain.tasks import base

SCHEMA_VERSION = 2
"""Documents of before may be by words that texts without blanks have not: measured again where the rows are there."""
NAME = "baselines.json"
TFIDF, ONE_ANSWER, TAGS = "TF-IDF and a linear model", "one answer to every text", "each word's most frequent tag"
MOST_ROWS, MOST_TOKENS = 10_000, 500_000
"""Most rows and tokens of a split that are used: it takes some ten seconds for a few labels, a minute for a hundred."""
ASKED, REPEATS = 100, 3
"""Texts that are asked alone, and how often: a text's latency is the least of these, since a moment of the machine's is
no cost of the model."""
ASKED_S, FEWEST = 3.0, 5
"""After so many seconds no more texts are asked than these few: one of 512 tokens takes a large encoder a second."""
CHOICES_OF_C = (0.1, 1.0, 10.0)
CHOICES_OF_ALPHA = (0.1, 1.0, 10.0)
WORD, BETWEEN_BLANKS = r"(?u)\b\w\w+\b", r"\S+"
"""What counts as a word of TF-IDF: scikit-learn's own two letters or more, or anything between blanks."""

Rows = tuple[Sequence[str], Sequence[str] | Sequence[int]]
"""(texts, labels or their numbers)."""
Scored = tuple[Sequence[str], Sequence[float]]
"""(texts, true values)."""
Tagged = tuple[Sequence[Hashable], Sequence[str]]
"""(words, tags) of one sentence."""


# -------------------------------------------------------------------------------------------------- what a run is told


def read(run: Run) -> dict[str, Any] | None:
    """The document above, or None where the run has none."""
    return _read(run.baselines)


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # cut off: they are measured again
        return None
    return found if found["schema_version"] <= SCHEMA_VERSION else None


def _is_current(found: dict[str, Any] | None) -> bool:
    return found is not None and found["schema_version"] == SCHEMA_VERSION


def ensure(run: Run) -> Path | None:
    """Make the file where the run has ended, its rows are still there and its kind of answer has a baseline.

    Returns the file, or None where there is nothing to measure. The figures belong to the rows alone, so they are kept
    beside the token store: other runs on the same rows, a search's winner or a student, read them there.
    """
    path, tokenizer, known = run.baselines, run.artifact / "tokenizer.json", read(run)
    if _is_current(known):
        return path
    if not tokenizer.is_file() or (place := run.store) is None:
        return None if known is None else path
    store = open_store(place)
    output = base.get(configuration.load(str(run.config)).recipe.task).output
    if output not in ("classes", "number", "tags") or "outside" in store.manifest.head.facts or not store.rows("train"):
        return None  # a row outside of all classes is told by a threshold, which these have not
    shared = place.with_name(f".{place.name}.{output}.{NAME}")
    if not _is_current(found := _read(shared)):
        head = {"schema_version": SCHEMA_VERSION, "headline": metric_for(output).headline}
        found = {**head, **_measure(store, output, tokenizer)}
        _write(shared, found)
    assert found is not None
    _write(path, found)
    return path


def _write(path: Path, found: dict[str, Any]) -> None:
    drafts.write_text(path, json.dumps(found, allow_nan=False) + "\n")


def _measure(store: Store, output: str, tokenizer: Path) -> dict[str, Any]:
    head, metric = store.manifest.head, metric_for(output)
    chosen = {split: _chosen(store, split) for split in ("train", "valid", "test") if store.rows(split)}
    targets = {split: store.targets(split).take(rows) for split, rows in chosen.items()}
    answers: dict[str, dict[str, Ragged]] = {}
    ms: dict[str, float] = {}
    if output == "tags":
        answers[TAGS], ms[TAGS] = _tags(store, chosen, targets, head, tokenizer)
    else:
        train = targets["train"]
        answers[ONE_ANSWER] = {split: _one_answer(train, len(rows), output, head) for split, rows in chosen.items()}
        texts = {split: _texts(store, split, rows, tokenizer) for split, rows in chosen.items()}
        varied = output == "number" or len(np.unique(train.values)) > 1
        if "valid" in chosen and varied and is_read(texts["train"]):
            answers[TFIDF], ms[TFIDF] = _linear(texts, targets, output, head)
    baselines = [
        {
            "name": name,
            "scores": {
                split: float(metric.scores(outcomes, targets[split], head)[metric.headline])
                for split, outcomes in of_split.items()
                if split != "train"
            },
            **({"ms": ms[name]} if name in ms else {}),
        }
        for name, of_split in answers.items()
    ]
    return {"trained_on": len(chosen["train"]), "baselines": baselines}


def rows(store: Store, split: str, tokenizer: Path) -> tuple[list[str], Ragged]:
    """The rows of a split that are used: what the encoder read of their texts, and their targets."""
    chosen = _chosen(store, split)
    return _texts(store, split, chosen, tokenizer), store.targets(split).take(chosen)


def uses_all(store: Store, split: str) -> bool:
    """Whether the scores of a split are those of all of its rows."""
    return len(_chosen(store, split)) == store.rows(split)


def ms_of_a_text(answer: Callable[[Sequence[str]], Any], texts: Sequence[str]) -> float:
    """Median latency of a text that is asked alone, in milliseconds; texts are drawn evenly, and fewer of them where
    they take long."""
    asked = [texts[place] for place in np.unique(np.linspace(0, len(texts) - 1, min(ASKED, len(texts))).astype(int))]
    answer(asked[:1])
    least: list[float] = []
    until = time.perf_counter() + ASKED_S
    # In an order that a few of them are spread over all, too.
    for text in sorted(asked, key=lambda one: hashlib.sha256(one.encode()).digest()):
        if len(least) >= FEWEST and time.perf_counter() > until:
            break
        times = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            answer([text])
            times.append(time.perf_counter() - started)
        least.append(min(times))
    return 1000 * statistics.median(least)


def is_read(texts: Sequence[str]) -> bool:
    """Whether the encoder knew a piece of any text, which TF-IDF needs too: of emoji it may know none."""
    return any(text.strip() for text in texts)


def certain(places: npt.NDArray[Any], head: Head) -> Ragged:
    """Certain answers, as logits [rows, labels]."""
    return Ragged.even(10.0 * np.eye(len(head.labels))[places.astype(np.int64)])


def _chosen(store: Store, split: str) -> stats.Ints:
    """Positions of the rows that are used, ascending."""
    mean = float(np.mean(store.column(split, "length"))) or 1.0
    return stats.sample(store.labelled(split), max(1, min(MOST_ROWS, int(MOST_TOKENS / mean))))


def _texts(store: Store, split: str, rows: stats.Ints, tokenizer: Path) -> list[str]:
    """The rows as their tokens spell them: what the encoder read, and no more."""
    import tokenizers

    tokens = store.read(split, rows)
    each = [row.tolist() for row in Ragged(tokens.ids, tokens.lengths_of_rows)]
    found: list[str] = tokenizers.Tokenizer.from_file(str(tokenizer)).decode_batch(each)
    return found


def _one_answer(train: Ragged, rows: int, output: str, head: Head) -> Ragged:
    """The mean of the training values, or the most frequent label, as the model's outcomes would be."""
    if output == "number":
        return Ragged.even(np.full(rows, float(np.mean(train.values)), dtype=np.float64))
    known = train.values.astype(np.int64)
    most = int(np.bincount(known[known >= 0], minlength=len(head.labels)).argmax())
    return certain(np.full(rows, most), head)


def _linear(
    texts: dict[str, list[str]], targets: dict[str, Ragged], output: str, head: Head
) -> tuple[dict[str, Ragged], float]:
    """(outcomes by split, milliseconds of a text)"""
    every = {split: own.values.tolist() for split, own in targets.items()}
    train, valid = (texts["train"], every["train"]), (texts["valid"], every["valid"])
    held_out = [split for split in texts if split != "train"]
    if output == "number":
        model = fitted_numbers(train, valid)
        found = {split: Ragged.even(model(texts[split])) for split in held_out}
        return found, ms_of_a_text(model, texts[held_out[-1]])
    known = [place for place, label in enumerate(every["train"]) if label >= 0]
    train = ([texts["train"][place] for place in known], [every["train"][place] for place in known])
    asked = [text for split in held_out for text in texts[split]]
    machine = fitted_labels(train, valid)
    said = np.split(machine(asked), np.cumsum([len(texts[split]) for split in held_out])[:-1])
    outcomes = {split: certain(own, head) for split, own in zip(held_out, said, strict=True)}
    return outcomes, ms_of_a_text(machine, texts[held_out[-1]])


def _tags(
    store: Store, chosen: dict[str, stats.Ints], targets: dict[str, Ragged], head: Head, tokenizer: Path
) -> tuple[dict[str, Ragged], float]:
    """(outcomes by split, milliseconds of a text). Outcomes of words are [tag, how sure, loss] each; a word is known by
    its tokens."""
    import tokenizers

    words = {split: _words(store, split, rows) for split, rows in chosen.items()}
    known = {split: [row[row != IGNORED].astype(np.int64).tolist() for row in own] for split, own in targets.items()}
    train = [
        (own, [head.labels[tag] if tag >= 0 else "O" for tag in numbered])
        for own, numbered in zip(words["train"], known["train"], strict=True)
        if len(own) == len(numbered)
    ]
    found = {}
    for split in words:
        said = tags(train, words[split])
        rows = [
            [(head.labels.index(tag), 1.0, 0.0) for tag in (own + ["O"] * len(true))[: len(true)]]
            for own, true in zip(said, known[split], strict=True)
        ]
        found[split] = Ragged.of(rows, np.float64)
    last = next(reversed(chosen))
    reads, most = tokenizers.Tokenizer.from_file(str(tokenizer)), most_frequent(train)
    words_of = dict(zip(texts := _texts(store, last, chosen[last], tokenizer), words[last], strict=True))

    def answer(asked: Sequence[str]) -> Any:
        return [(reads.encode(text), [most.get(word, "O") for word in words_of[text]]) for text in asked]

    return found, ms_of_a_text(answer, texts)


def _words(store: Store, split: str, rows: stats.Ints) -> list[list[tuple[int, ...]]]:
    """The token numbers of each word; a word is answered at its first token."""
    tokens, found = store.read(split, rows), []
    for place in range(len(rows)):
        one = tokens.pick([place])
        starts = np.flatnonzero(one.targets >= -1)
        found.append([tuple(part.tolist()) for part in np.split(one.ids, starts)[1:]])
    return found


# ------------------------------------------------------------------------------------------------------- the baselines


def labels(train: Rows, valid: Rows, texts: Sequence[str]) -> npt.NDArray[Any]:
    """The label for each of `texts` by `fitted_labels`."""
    return fitted_labels(train, valid)(texts)


def fitted_labels(train: Rows, valid: Rows) -> Callable[[Sequence[str]], npt.NDArray[Any]]:
    """A linear support vector machine on TF-IDF, which labels texts; C as in `best_machine`."""
    features = _features(train[0])
    matrix = features.fit_transform(train[0])
    best = best_machine(matrix, train[1], features.transform(valid[0]), valid[1])
    return lambda texts: np.asarray(best.predict(features.transform(texts)))


def best_machine(train: Any, labels: Sequence[Any], valid: Any, valid_labels: Sequence[Any]) -> Any:
    """The linear support vector machine on these features, [rows, features] each, with the C of `CHOICES_OF_C` that is
    best on the validation rows (of equals the smallest)."""
    from sklearn.svm import LinearSVC

    models = [LinearSVC(C=c, random_state=0).fit(train, labels) for c in CHOICES_OF_C]
    return max(models, key=lambda model: model.score(valid, valid_labels))


def accuracy(train: Rows, valid: Rows, test: Rows) -> float:
    """Share of the test texts whose label is what `labels` says."""
    return float(np.mean(labels(train, valid, test[0]) == np.asarray(test[1])))


def numbers(train: Scored, valid: Scored, texts: Sequence[str]) -> npt.NDArray[np.float64]:
    """The value for each of `texts` by `fitted_numbers`."""
    return fitted_numbers(train, valid)(texts)


def fitted_numbers(train: Scored, valid: Scored) -> Callable[[Sequence[str]], npt.NDArray[np.float64]]:
    """Ridge regression on TF-IDF, which gives texts values; alpha is the one of `CHOICES_OF_ALPHA` that is best on
    `valid`.

    Best is the smallest squared error, of equals the largest alpha. It takes about 2 ms per 1,000 characters.
    """
    from sklearn.linear_model import Ridge

    features = _features(train[0])
    matrix = features.fit_transform(train[0])
    held_out, true = features.transform(valid[0]), np.asarray(valid[1], dtype=np.float64)
    # The conjugate-gradient solver draws nothing at random and needs no dense matrix.
    models = [
        Ridge(alpha=alpha, solver="sparse_cg", tol=1e-6).fit(matrix, train[1]) for alpha in reversed(CHOICES_OF_ALPHA)
    ]
    best = min(models, key=lambda model: float(((model.predict(held_out) - true) ** 2).sum()))
    return lambda texts: np.asarray(best.predict(features.transform(texts)), dtype=np.float64)


def tags(train: Iterable[Tagged], sentences: Iterable[Sequence[Hashable]]) -> list[list[str]]:
    """The tag that each word has most often in `train` (of equals the first by name); O where it does not occur."""
    most = most_frequent(train)
    return [[most.get(word, "O") for word in words] for words in sentences]


def most_frequent(train: Iterable[Tagged]) -> dict[Hashable, str]:
    """The tag that each word has most often; of equals the first by name."""
    counts: dict[Hashable, Counter[str]] = defaultdict(Counter)
    for words, own in train:
        for word, tag in zip(words, own, strict=True):
            counts[word][tag] += 1
    return {word: min(found, key=lambda tag: (-found[tag], tag)) for word, found in counts.items()}


def _features(texts: Sequence[str]) -> Any:
    """TF-IDF of words and of characters. Where most texts have no word of two letters, each character is one: the
    tokenizers of BERT's kin put blanks between those of Chinese."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.pipeline import make_union

    having = sum(re.search(WORD, text) is not None for text in texts)
    pattern = WORD if 2 * having >= len(texts) else BETWEEN_BLANKS
    return make_union(
        TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=pattern),
        TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), sublinear_tf=True),
    )
