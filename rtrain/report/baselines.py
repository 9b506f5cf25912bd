"""The baselines that a fine-tuned encoder must beat, and `baselines.json` of a run: what they reach on its own rows.

Texts with labels or a number: TF-IDF of words and of characters with linear models (scikit-learn), and the one answer
that suits the training rows best. Tagged words: the tag that each word has most often. Questions: the tokens beside
those of the question, and no answer at all. Other kinds of answer have none; a summary's scores hold those of the first
sentences already.

{"schema_version": 3, "headline": name of the score, "trained_on": rows, "rows": {split: scored rows}, "baselines":
[{"name", "scores": {split: value, larger is better}, "ms": median latency of a text asked alone, where it was
measured}, ...]}. Made once, when a run has ended, from its token store: rows past `MOST_ROWS`, and tokens past
`MOST_TOKENS`, are left out by a fixed draw, so that a large run's report takes seconds too. The scores of the model on
the same rows are in scores-<split>.json (`sample`).
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

from rtrain import config as configuration
from rtrain.core import atomic_write
from rtrain.core.ragged import Floats, Head, Ragged, Tokens
from rtrain.core.run_folder import Run
from rtrain.data.store.store import Store, open_store
from rtrain.metrics.classification import choose_label_thresholds
from rtrain.metrics.entities import true_tags
from rtrain.metrics.registry import metric_for
from rtrain.report import stats
from rtrain.tasks import base

SCHEMA_VERSION = 3
NAME = "baselines.json"
TFIDF, ONE_ANSWER, TAGS = "TF-IDF and a linear model", "one answer to every text", "each word's most frequent tag"
BESIDE, NO_ANSWER = "the words beside those of the question", "no answer to every question"
MOST_ROWS, MOST_TOKENS = 10_000, 500_000
"""Most rows and tokens of a split that are used: it takes some ten seconds for a few labels, a minute for a hundred."""
MOST_LABELS = 100
"""Labels of several that have a linear model, the most frequent ones; others are never given."""
REACH = 10
"""Tokens on each side of an answer in which tokens of the question count for it."""
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
    return found if found["schema_version"] == SCHEMA_VERSION else None


def ensure(run: Run) -> Path | None:
    """Make the file where the run has ended, its rows are still there and its kind of answer has a baseline.

    Returns the file, or None where there is nothing to measure. The figures belong to the rows alone, so they are kept
    beside the token store: other runs on the same rows, a search's winner or a student, read them there.
    """
    path, tokenizer = run.baselines, run.artifact / "tokenizer.json"
    if read(run) is not None:
        return path
    if not tokenizer.is_file() or (place := run.store) is None:
        return None
    store = open_store(place)
    task = base.get(configuration.load(str(run.config)).recipe.task)
    if task.output not in MEASURED or "outside" in store.manifest.head.facts or not store.rows("train"):
        return None  # a row outside of all classes is told by a threshold, which these have not
    shared = place.with_name(f".{place.name}.{task.output}.{NAME}")
    if (found := _read(shared)) is None:
        head = {"schema_version": SCHEMA_VERSION, "headline": metric_for(task.output).headline}
        found = {**head, **_measure(store, task, tokenizer)}
        _write(shared, found)
    _write(path, found)
    return path


def _write(path: Path, found: dict[str, Any]) -> None:
    atomic_write.write_text(path, json.dumps(found, allow_nan=False) + "\n")


def _measure(store: Store, task: base.Task, tokenizer: Path) -> dict[str, Any]:
    head, output = store.manifest.head, task.output
    chosen = {split: chosen_rows(store, split) for split in ("train", "valid", "test") if store.rows(split)}
    targets = {split: store.targets(split).take(rows) for split, rows in chosen.items()}
    measured = []
    if output == "tags":
        found, ms = _tags(store, chosen, targets, head, tokenizer)
        measured.append(_scored(TAGS, found, targets, output, head, ms))
    elif output == "spans":
        measured += _spans(store, task, chosen, targets)
    else:
        constant = _one_answer(targets["train"], output, head)
        found = {split: Ragged.even(np.repeat(constant, len(rows), axis=0)) for split, rows in chosen.items()}
        measured.append(_scored(ONE_ANSWER, found, targets, output, head))
        texts = {split: _texts(store, split, rows, tokenizer) for split, rows in chosen.items()}
        varied = output == "number" or len(np.unique(targets["train"].values)) > 1
        if "valid" in chosen and varied and is_read(texts["train"]):
            found, ms = _linear(texts, targets, output, head)
            measured.append(_scored(TFIDF, found, targets, output, head, ms))
    scored = {split: len(rows) for split, rows in chosen.items() if split != "train"}
    return {"trained_on": len(chosen["train"]), "rows": scored, "baselines": measured}


def _scored(
    name: str,
    outcomes: dict[str, Ragged],
    targets: dict[str, Ragged],
    output: str,
    head: Head,
    ms: float | None = None,
) -> dict[str, Any]:
    """A baseline of the document, from the outcomes of each split."""
    metric = metric_for(output)
    scores = {
        split: float(metric.scores(rows, targets[split], head)[metric.headline])
        for split, rows in outcomes.items()
        if split != "train"
    }
    return {"name": name, "scores": scores, **({} if ms is None else {"ms": ms})}


def rows(store: Store, split: str, tokenizer: Path) -> tuple[list[str], Ragged]:
    """The rows of a split that are used: what the encoder read of their texts, and their targets."""
    chosen = chosen_rows(store, split)
    return _texts(store, split, chosen, tokenizer), store.targets(split).take(chosen)


def uses_all(store: Store, split: str) -> bool:
    """Whether the scores of a split are those of all of its rows."""
    return len(chosen_rows(store, split)) == store.rows(split)


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


MEASURED = ("classes", "labels", "heads", "number", "tags", "spans")
"""Kinds of output that have baselines."""


def chosen_rows(store: Store, split: str) -> stats.Ints:
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


def _one_answer(train: Ragged, output: str, head: Head) -> npt.NDArray[np.float64]:
    """The mean of the training values, or the most frequent label of each question, as the model's outcomes of a row
    would be: [1, outputs]. Of several labels, those that give the best micro F1 if all rows have them."""
    if output == "number":
        return np.full((1, 1), float(np.mean(train.values)))
    if output == "labels":
        support = (train.matrix(len(head.labels)) > 0).sum(axis=0)
        order = np.argsort(-support, kind="stable")
        f1 = 2 * np.cumsum(support[order]) / (np.arange(1, len(order) + 1) * len(train) + support.sum())
        given = np.isin(np.arange(len(order)), order[: int(f1.argmax()) + 1])
        return np.where(given, 10.0, -10.0)[None]
    columns = [train.values] if output == "classes" else list(train.matrix(len(head.facts["heads"])).T)
    sizes = [len(head.labels)] if output == "classes" else [size for _, size in head.facts["heads"]]
    best = []
    for column, size in zip(columns, sizes, strict=True):
        known = column.astype(np.int64)
        best.append(10.0 * np.eye(size)[np.bincount(known[known >= 0], minlength=size).argmax()])
    return np.concatenate(best)[None]


def _linear(
    texts: dict[str, list[str]], targets: dict[str, Ragged], output: str, head: Head
) -> tuple[dict[str, Ragged], float]:
    """(outcomes by split, milliseconds of a text)"""
    held_out = [split for split in texts if split != "train"]
    if output == "number":
        every = {split: own.values.tolist() for split, own in targets.items()}
        machine: Callable[[Sequence[str]], Any] = fitted_numbers(
            (texts["train"], every["train"]), (texts["valid"], every["valid"])
        )
    elif output == "labels":
        machine = _fitted_several(texts, {split: own.matrix(len(head.labels)) > 0 for split, own in targets.items()})
    elif output == "heads":
        machine = _fitted_heads(texts, targets, head)
    else:
        label = _fitted_head(texts, {split: own.values for split, own in targets.items()}, len(head.labels))

        def machine(asked: Sequence[str]) -> Any:
            return 10.0 * np.eye(len(head.labels))[label(asked)]

    answers = machine([text for split in held_out for text in texts[split]])
    parts = np.split(np.asarray(answers), np.cumsum([len(texts[split]) for split in held_out])[:-1])
    outcomes = {split: Ragged.even(part) for split, part in zip(held_out, parts, strict=True)}
    return outcomes, ms_of_a_text(machine, texts[held_out[-1]])


def _fitted_head(
    texts: dict[str, list[str]], targets: dict[str, npt.NDArray[Any]], size: int
) -> Callable[[Sequence[str]], npt.NDArray[np.int64]]:
    """`fitted_labels` of the rows that have one of the labels; the most frequent label where there is only one."""
    parts = []
    for split in ("train", "valid"):
        known = np.flatnonzero(targets[split] >= 0).tolist()
        parts.append(([texts[split][place] for place in known], targets[split][known].astype(np.int64).tolist()))
    train, valid = parts
    if len(set(train[1])) < 2 or not valid[0] or not is_read(train[0]):
        most = int(np.bincount(train[1], minlength=size).argmax())
        return lambda asked: np.full(len(asked), most)
    return fitted_labels(train, valid)


def _fitted_heads(
    texts: dict[str, list[str]], targets: dict[str, Ragged], head: Head
) -> Callable[[Sequence[str]], npt.NDArray[np.float64]]:
    """Certain answers of each head, [rows, labels of all heads]."""
    heads: list[list[Any]] = head.facts["heads"]
    columns = {split: own.matrix(len(heads)) for split, own in targets.items()}
    machines = [
        (_fitted_head(texts, {split: matrix[:, place] for split, matrix in columns.items()}, size), size)
        for place, (_, size) in enumerate(heads)
    ]
    return lambda asked: np.concatenate([10.0 * np.eye(size)[label(asked)] for label, size in machines], axis=1)


def _fitted_several(
    texts: dict[str, list[str]], targets: dict[str, npt.NDArray[np.bool_]]
) -> Callable[[Sequence[str]], npt.NDArray[np.float64]]:
    """A linear support vector machine for each label, with thresholds as the model's, chosen on the validation rows;
    10 where a label is given and -10 where not, [rows, labels]. C is the one of the best micro F1 on these rows."""
    from sklearn.svm import LinearSVC

    train, valid = targets["train"], targets["valid"]
    support = train.sum(axis=0)
    fitted = [
        int(place)
        for place in np.argsort(-support, kind="stable")[:MOST_LABELS]
        if 0 < support[place] < len(train)  # else there is nothing to part
    ]
    features = _features(texts["train"])
    matrix, held_out = features.fit_transform(texts["train"]), features.transform(texts["valid"])
    best: tuple[float, list[Any], npt.NDArray[np.float64]] = (-1.0, [], np.zeros(len(fitted)))
    for c in CHOICES_OF_C:
        machines = [LinearSVC(C=c, random_state=0).fit(matrix, train[:, place]) for place in fitted]
        margins = np.stack([machine.decision_function(held_out) for machine in machines], axis=1)
        thresholds = choose_label_thresholds(margins, valid[:, fitted])
        thresholds = np.zeros(len(fitted)) if thresholds is None else thresholds
        given = margins >= thresholds
        f1 = 2 * (given & valid[:, fitted]).sum() / max(1, given.sum() + valid.sum())
        best = max(best, (float(f1), machines, thresholds), key=lambda one: one[0])
    _, machines, thresholds = best
    always = np.where(support == len(train), 10.0, -10.0)

    def answer(asked: Sequence[str]) -> npt.NDArray[np.float64]:
        rows, found = features.transform(asked), np.tile(always, (len(asked), 1))
        for place, machine, least in zip(fitted, machines, thresholds, strict=True):
            found[:, place] = np.where(machine.decision_function(rows) >= least, 10.0, -10.0)
        return found

    return answer


def _spans(
    store: Store, task: base.Task, chosen: dict[str, stats.Ints], targets: dict[str, Ragged]
) -> list[dict[str, Any]]:
    """Baselines of questions. `BESIDE` chooses the span with the most tokens of the question around it, the rare and
    the near ones above all, and none in it (Rajpurkar et al. 2016, section 5, have a sliding window of this kind). It
    is as long as the median training answer."""
    head, rows = store.manifest.head, {split: store.read(split, positions) for split, positions in chosen.items()}
    train = rows["train"]
    places = train.targets.reshape(-1, 2)
    lengths = (places[:, 1] - places[:, 0] + 1)[places[:, 1] > 0]
    size = int(np.median(lengths)) if len(lengths) else 1
    counts = np.bincount(train.ids)
    rarity = {token: float(np.log(len(train.ids) / counts[token])) for token in np.flatnonzero(counts).tolist()}
    most = float(np.log(len(train.ids)))
    near = 1 - np.abs(np.arange(-REACH, REACH + 1)) / (REACH + 1)

    def answer(tokens: Tokens, gives: bool) -> list[Floats]:
        """Logits of each row, [tokens, 2]."""
        outputs = []
        for row in range(len(tokens)):
            one = tokens.pick([row])
            logits, begin = np.zeros((len(one.ids), 2), dtype=np.float32), 0
            for length, second in zip(one.lengths.tolist(), one.second.tolist(), strict=True):
                ids = one.ids[begin : begin + length].tolist()
                if second >= length - 1:  # no token of the context
                    begin += length
                    continue
                asked = set(ids[1 : second - 1])
                weights = np.array([rarity.get(token, most) * (token in asked) for token in ids[second:-1]])
                around = np.convolve(weights, near)[REACH : REACH + len(weights)] - 3 * weights
                sums = np.concatenate([[0.0], np.cumsum(around)])
                starts = np.arange(max(1, len(weights) - size + 1))
                ends = np.minimum(starts + size, len(weights))
                value = (sums[ends] - sums[starts]) / (ends - starts)
                best = int(value.argmax())
                logits[begin + second + best, 0] = logits[begin + second + ends[best] - 1, 1] = 1 + max(0, value[best])
                begin += length
            outputs.append(logits if gives else np.zeros_like(logits))
        return outputs

    held_out = {split: one for split, one in rows.items() if split != "train"}
    outcomes = {split: task.outcomes(answer(one, gives=True), one, head) for split, one in held_out.items()}
    facts = task.calibrate(outcomes["valid"], targets["valid"], head) if "valid" in outcomes else {}
    found = [_scored(BESIDE, outcomes, targets, task.output, Head(head.labels, {**head.facts, **facts}))]
    if head.facts["no_answer"]:
        silent = {split: task.outcomes(answer(one, gives=False), one, head) for split, one in held_out.items()}
        never = Head(head.labels, {**head.facts, "threshold": 1.0})
        found.append(_scored(NO_ANSWER, silent, targets, task.output, never))
    return found


def _tags(
    store: Store, chosen: dict[str, stats.Ints], targets: dict[str, Ragged], head: Head, tokenizer: Path
) -> tuple[dict[str, Ragged], float]:
    """(outcomes by split, milliseconds of a text). Outcomes of words are [tag, how sure, loss] each; a word is known by
    its tokens."""
    import tokenizers

    words = {split: _words(store, split, rows) for split, rows in chosen.items()}
    known = {split: [true_tags(row) for row in own] for split, own in targets.items()}
    train = [
        (own, [head.labels[tag] if tag >= 0 else "O" for tag in np.delete(numbered, without)])
        for own, (numbered, without) in zip(words["train"], known["train"], strict=True)
        if len(own) == len(numbered) - len(without)
    ]
    found = {}
    for split in words:
        said = tags(train, words[split])
        rows = []
        for own, (true, without) in zip(said, known[split], strict=True):
            answers, silent = iter(own), set(without.tolist())
            each = ["O" if place in silent else next(answers, "O") for place in range(len(true))]
            rows.append([(head.labels.index(tag), 1.0, 0.0) for tag in each])
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
