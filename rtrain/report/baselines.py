"""Baselines of a run, measured on its own rows and stored in `baselines.json`.

Texts with labels or a number: TF-IDF of words and characters with linear models (scikit-learn), and the best constant
answer. Tagged words: the most frequent tag of each word. Questions: the tokens near those of the question, and no
answer. Other outputs have no baseline; scores of summaries include those of the first sentences.

{"schema_version": 4, "headline": name of the score, "training_rows": rows, "rows": {split: scored rows}, "baselines":
[{"name", "scores": {split: value, larger is better}, "ms": median latency of a single text, if measured}, ...]}. A
finished run's token store is the source. At most `MAX_ROWS` rows and `MAX_TOKENS` tokens are sampled with a fixed seed,
so that the report of a large run takes seconds. scores-<split>.json (`sample`) has the model's scores on the same rows.
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
from rtrain.core.ragged import Floats, Head, RaggedArray, TokenBatch
from rtrain.core.run_folder import Run
from rtrain.data.store.store import Store, open_store
from rtrain.metrics.classification import choose_label_thresholds
from rtrain.metrics.entities import decode_true_tags
from rtrain.metrics.registry import get_metric
from rtrain.report import stats
from rtrain.tasks import base

SCHEMA_VERSION = 4
NAME = "baselines.json"
TFIDF, CONSTANT_ANSWER, TAGS = "TF-IDF and a linear model", "one answer to every text", "each word's most frequent tag"
NEARBY_WORDS, NO_ANSWER = "the words beside those of the question", "no answer to every question"
MAX_ROWS, MAX_TOKENS = 10_000, 500_000
"""Most rows and tokens per split: some ten seconds for a few labels, a minute for a hundred."""
MAX_LABELS = 100
"""Most frequent labels of a multi-label task that have a linear model; others are never predicted."""
CONTEXT_RADIUS = 10
"""Tokens on each side of an answer that are compared with the question."""
LATENCY_TEXTS, LATENCY_REPEATS = 100, 3
"""Texts for the latency and repeats per text; the minimum counts, to exclude noise of the machine."""
LATENCY_BUDGET_S, MIN_LATENCY_TEXTS = 3.0, 5
"""After these seconds, only the minimum number of texts is measured: 512 tokens take a large encoder a second."""
C_VALUES = (0.1, 1.0, 10.0)
ALPHA_VALUES = (0.1, 1.0, 10.0)
WORD_PATTERN, NON_BLANK_PATTERN = r"(?u)\b\w\w+\b", r"\S+"
"""Words of TF-IDF: two letters or more (scikit-learn's default), or anything between blanks."""
LabeledTexts = tuple[Sequence[str], Sequence[str] | Sequence[int]]
"""(texts, labels or their numbers)."""
ScoredTexts = tuple[Sequence[str], Sequence[float]]
"""(texts, true values)."""
TaggedSentence = tuple[Sequence[Hashable], Sequence[str]]
"""(words, tags) of one sentence."""


# ------------------------------------------------------------------------------------------------------ baselines.json


def read_baselines(run: Run) -> dict[str, Any] | None:
    """Read the document above; None if missing or of another version."""
    return _read_document(run.baselines)


def _read_document(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # a truncated file is measured again
        return None
    return document if document["schema_version"] == SCHEMA_VERSION else None


def ensure_baselines(run: Run) -> Path | None:
    """Measure the baselines if the run has ended, its token store exists and its output has a baseline.

    Returns the file, or None. The figures depend only on the rows, so a copy beside the token store serves other runs
    on the same rows.
    """
    path, tokenizer = run.baselines, run.artifact / "tokenizer.json"
    if read_baselines(run) is not None:
        return path
    if not tokenizer.is_file() or (store_path := run.token_store) is None:
        return None
    store = open_store(store_path)
    task = base.get_task(configuration.load_config(str(run.config)).recipe.task)
    if (
        task.output not in SUPPORTED_OUTPUTS
        or "out_of_scope_label" in store.manifest.head.facts
        or not store.num_rows("train")
    ):
        return None  # baselines have no threshold for out-of-scope rows
    shared_path = store_path.with_name(f".{store_path.name}.{task.output}.{NAME}")
    if (document := _read_document(shared_path)) is None:
        header = {"schema_version": SCHEMA_VERSION, "headline": get_metric(task.output).headline}
        document = {**header, **_measure_baselines(store, task, tokenizer)}
        _write_document(shared_path, document)
    _write_document(path, document)
    return path


def _write_document(path: Path, document: dict[str, Any]) -> None:
    atomic_write.write_text(path, json.dumps(document, allow_nan=False) + "\n")


def _measure_baselines(store: Store, task: base.Task, tokenizer: Path) -> dict[str, Any]:
    head, output = store.manifest.head, task.output
    positions = {split: choose_rows(store, split) for split in ("train", "valid", "test") if store.num_rows(split)}
    targets = {split: store.targets(split).take(rows) for split, rows in positions.items()}
    baselines = []
    if output == "tags":
        outcomes, ms = _measure_tags(store, positions, targets, head, tokenizer)
        baselines.append(_score_baseline(TAGS, outcomes, targets, output, head, ms))
    elif output == "spans":
        baselines += _measure_spans(store, task, positions, targets)
    else:
        constant = _constant_outcome(targets["train"], output, head)
        outcomes = {
            split: RaggedArray.from_matrix(np.repeat(constant, len(rows), axis=0)) for split, rows in positions.items()
        }
        baselines.append(_score_baseline(CONSTANT_ANSWER, outcomes, targets, output, head))
        texts = {split: _decode_texts(store, split, rows, tokenizer) for split, rows in positions.items()}
        has_variation = output == "number" or len(np.unique(targets["train"].values)) > 1
        if "valid" in positions and has_variation and has_known_tokens(texts["train"]):
            outcomes, ms = _fit_linear(texts, targets, output, head)
            baselines.append(_score_baseline(TFIDF, outcomes, targets, output, head, ms))
    row_counts = {split: len(rows) for split, rows in positions.items() if split != "train"}
    return {"training_rows": len(positions["train"]), "rows": row_counts, "baselines": baselines}


def _score_baseline(
    name: str,
    outcomes: dict[str, RaggedArray],
    targets: dict[str, RaggedArray],
    output: str,
    head: Head,
    ms: float | None = None,
) -> dict[str, Any]:
    """Build a baseline of the document from the outcomes of each split."""
    metric = get_metric(output)
    scores = {
        split: float(metric.main_scores(rows, targets[split], head)[metric.headline])
        for split, rows in outcomes.items()
        if split != "train"
    }
    return {"name": name, "scores": scores, **({} if ms is None else {"ms": ms})}


def read_rows(store: Store, split: str, tokenizer: Path) -> tuple[list[str], RaggedArray]:
    """Read the sampled rows of a split: their decoded tokens and their targets."""
    positions = choose_rows(store, split)
    return _decode_texts(store, split, positions, tokenizer), store.targets(split).take(positions)


def uses_all_rows(store: Store, split: str) -> bool:
    return len(choose_rows(store, split)) == store.num_rows(split)


def measure_text_ms(answer: Callable[[Sequence[str]], Any], texts: Sequence[str]) -> float:
    """Median latency of a single text in milliseconds, over evenly spread texts; slow models measure fewer."""
    sampled_texts = [
        texts[place] for place in np.unique(np.linspace(0, len(texts) - 1, min(LATENCY_TEXTS, len(texts))).astype(int))
    ]
    answer(sampled_texts[:1])
    min_times: list[float] = []
    deadline = time.perf_counter() + LATENCY_BUDGET_S
    # A hash order spreads the first few texts evenly too.
    for text in sorted(sampled_texts, key=lambda sampled_text: hashlib.sha256(sampled_text.encode()).digest()):
        if len(min_times) >= MIN_LATENCY_TEXTS and time.perf_counter() > deadline:
            break
        times = []
        for _ in range(LATENCY_REPEATS):
            started_at = time.perf_counter()
            answer([text])
            times.append(time.perf_counter() - started_at)
        min_times.append(min(times))
    return 1000 * statistics.median(min_times)


def has_known_tokens(texts: Sequence[str]) -> bool:
    """Whether any text has a known token. Emoji may have none."""
    return any(text.strip() for text in texts)


def certain_logits(labels: npt.NDArray[Any], head: Head) -> RaggedArray:
    """Logits [rows, labels] of certain answers."""
    return RaggedArray.from_matrix(10.0 * np.eye(len(head.labels))[labels.astype(np.int64)])


SUPPORTED_OUTPUTS = ("classes", "labels", "heads", "number", "tags", "spans")
"""Kinds of output that have baselines."""


def choose_rows(store: Store, split: str) -> stats.Ints:
    """Positions of the sampled rows, ascending."""
    mean = float(np.mean(store.column(split, "length"))) or 1.0
    return stats.sample_rows(store.num_labeled(split), max(1, min(MAX_ROWS, int(MAX_TOKENS / mean))))


def _decode_texts(store: Store, split: str, rows: stats.Ints, tokenizer: Path) -> list[str]:
    import tokenizers

    tokens = store.read_tokens(split, rows)
    row_ids = [row.tolist() for row in RaggedArray(tokens.ids, tokens.row_lengths)]
    texts: list[str] = tokenizers.Tokenizer.from_file(str(tokenizer)).decode_batch(row_ids)
    return texts


def _constant_outcome(train: RaggedArray, output: str, head: Head) -> npt.NDArray[np.float64]:
    """Outcome of the best constant answer, [1, outputs]: the mean value, the most frequent label, or the labels with
    the best micro F1."""
    if output == "number":
        return np.full((1, 1), float(np.mean(train.values)))
    if output == "labels":
        support = (train.to_matrix(len(head.labels)) > 0).sum(axis=0)
        order = np.argsort(-support, kind="stable")
        f1 = 2 * np.cumsum(support[order]) / (np.arange(1, len(order) + 1) * len(train) + support.sum())
        has_label = np.isin(np.arange(len(order)), order[: int(f1.argmax()) + 1])
        return np.where(has_label, 10.0, -10.0)[None]
    columns = [train.values] if output == "classes" else list(train.to_matrix(len(head.facts["heads"])).T)
    sizes = [len(head.labels)] if output == "classes" else [size for _, size in head.facts["heads"]]
    best = []
    for column, size in zip(columns, sizes, strict=True):
        codes = column.astype(np.int64)
        best.append(10.0 * np.eye(size)[np.bincount(codes[codes >= 0], minlength=size).argmax()])
    return np.concatenate(best)[None]


def _fit_linear(
    texts: dict[str, list[str]], targets: dict[str, RaggedArray], output: str, head: Head
) -> tuple[dict[str, RaggedArray], float]:
    """Return (outcomes by split, milliseconds per text)."""
    held_out = [split for split in texts if split != "train"]
    if output == "number":
        values = {split: split_targets.values.tolist() for split, split_targets in targets.items()}
        predict: Callable[[Sequence[str]], Any] = fit_numbers(
            (texts["train"], values["train"]), (texts["valid"], values["valid"])
        )
    elif output == "labels":
        predict = _fit_multilabel(
            texts, {split: split_targets.to_matrix(len(head.labels)) > 0 for split, split_targets in targets.items()}
        )
    elif output == "heads":
        predict = _fit_heads(texts, targets, head)
    else:
        label = _fit_head(
            texts, {split: split_targets.values for split, split_targets in targets.items()}, len(head.labels)
        )

        def predict(inputs: Sequence[str]) -> Any:
            return 10.0 * np.eye(len(head.labels))[label(inputs)]

    answers = predict([text for split in held_out for text in texts[split]])
    parts = np.split(np.asarray(answers), np.cumsum([len(texts[split]) for split in held_out])[:-1])
    outcomes = {split: RaggedArray.from_matrix(part) for split, part in zip(held_out, parts, strict=True)}
    return outcomes, measure_text_ms(predict, texts[held_out[-1]])


def _fit_head(
    texts: dict[str, list[str]], targets: dict[str, npt.NDArray[Any]], size: int
) -> Callable[[Sequence[str]], npt.NDArray[np.int64]]:
    """Fit `fit_labels` on the labeled rows; with a single label, predict it always."""
    parts = []
    for split in ("train", "valid"):
        labeled_rows = np.flatnonzero(targets[split] >= 0).tolist()
        parts.append(
            ([texts[split][place] for place in labeled_rows], targets[split][labeled_rows].astype(np.int64).tolist())
        )
    train, valid = parts
    if len(set(train[1])) < 2 or not valid[0] or not has_known_tokens(train[0]):
        most_frequent_label = int(np.bincount(train[1], minlength=size).argmax())
        return lambda inputs: np.full(len(inputs), most_frequent_label)
    return fit_labels(train, valid)


def _fit_heads(
    texts: dict[str, list[str]], targets: dict[str, RaggedArray], head: Head
) -> Callable[[Sequence[str]], npt.NDArray[np.float64]]:
    """Fit a model per head; it predicts certain logits [rows, labels of all heads]."""
    heads: list[list[Any]] = head.facts["heads"]
    columns = {split: split_targets.to_matrix(len(heads)) for split, split_targets in targets.items()}
    machines = [
        (_fit_head(texts, {split: matrix[:, place] for split, matrix in columns.items()}, size), size)
        for place, (_, size) in enumerate(heads)
    ]
    return lambda inputs: np.concatenate([10.0 * np.eye(size)[label(inputs)] for label, size in machines], axis=1)


def _fit_multilabel(
    texts: dict[str, list[str]], targets: dict[str, npt.NDArray[np.bool_]]
) -> Callable[[Sequence[str]], npt.NDArray[np.float64]]:
    """A linear support vector machine for each label, with thresholds as the model's, chosen on the validation rows;
    10 where a label is given and -10 where not, [rows, labels]. C is the one of the best micro F1 on these rows."""
    from sklearn.svm import LinearSVC

    train, valid = targets["train"], targets["valid"]
    support = train.sum(axis=0)
    label_indices = [
        int(place)
        for place in np.argsort(-support, kind="stable")[:MAX_LABELS]
        if 0 < support[place] < len(train)  # else there is nothing to part
    ]
    features = _make_features(texts["train"])
    matrix, held_out = features.fit_transform(texts["train"]), features.transform(texts["valid"])
    best: tuple[float, list[Any], npt.NDArray[np.float64]] = (-1.0, [], np.zeros(len(label_indices)))
    for c in C_VALUES:
        machines = [LinearSVC(C=c, random_state=0).fit(matrix, train[:, place]) for place in label_indices]
        margins = np.stack([machine.decision_function(held_out) for machine in machines], axis=1)
        thresholds = choose_label_thresholds(margins, valid[:, label_indices])
        thresholds = np.zeros(len(label_indices)) if thresholds is None else thresholds
        predicted = margins >= thresholds
        f1 = 2 * (predicted & valid[:, label_indices]).sum() / max(1, predicted.sum() + valid.sum())
        best = max(best, (float(f1), machines, thresholds), key=lambda candidate: candidate[0])
    _, machines, thresholds = best
    constant_logits = np.where(support == len(train), 10.0, -10.0)

    def predict(inputs: Sequence[str]) -> npt.NDArray[np.float64]:
        rows, logits = features.transform(inputs), np.tile(constant_logits, (len(inputs), 1))
        for place, machine, threshold in zip(label_indices, machines, thresholds, strict=True):
            logits[:, place] = np.where(machine.decision_function(rows) >= threshold, 10.0, -10.0)
        return logits

    return predict


def _measure_spans(
    store: Store, task: base.Task, positions_by_split: dict[str, stats.Ints], targets: dict[str, RaggedArray]
) -> list[dict[str, Any]]:
    """Baselines of questions. `NEARBY_WORDS` chooses the span with the most tokens of the question around it, the rare
    and the near ones above all, and none in it (Rajpurkar et al. 2016, section 5, have a sliding window of this kind).
    It is as long as the median training answer."""
    head, rows = (
        store.manifest.head,
        {split: store.read_tokens(split, positions) for split, positions in positions_by_split.items()},
    )
    train = rows["train"]
    places = train.targets.reshape(-1, 2)
    lengths = (places[:, 1] - places[:, 0] + 1)[places[:, 1] > 0]
    size = int(np.median(lengths)) if len(lengths) else 1
    counts = np.bincount(train.ids)
    rarity = {token: float(np.log(len(train.ids) / counts[token])) for token in np.flatnonzero(counts).tolist()}
    max_rarity = float(np.log(len(train.ids)))
    proximity = 1 - np.abs(np.arange(-CONTEXT_RADIUS, CONTEXT_RADIUS + 1)) / (CONTEXT_RADIUS + 1)

    def predict(tokens: TokenBatch, gives_answer: bool) -> list[Floats]:
        """Logits of each row, [tokens, 2]."""
        outputs = []
        for row in range(len(tokens)):
            row_tokens = tokens.take([row])
            logits, window_start = np.zeros((len(row_tokens.ids), 2), dtype=np.float32), 0
            for length, second in zip(row_tokens.window_lengths.tolist(), row_tokens.pair_start.tolist(), strict=True):
                ids = row_tokens.ids[window_start : window_start + length].tolist()
                if second >= length - 1:  # no token of the context
                    window_start += length
                    continue
                question_tokens = set(ids[1 : second - 1])
                weights = np.array(
                    [rarity.get(token, max_rarity) * (token in question_tokens) for token in ids[second:-1]]
                )
                window_scores = (
                    np.convolve(weights, proximity)[CONTEXT_RADIUS : CONTEXT_RADIUS + len(weights)] - 3 * weights
                )
                sums = np.concatenate([[0.0], np.cumsum(window_scores)])
                starts = np.arange(max(1, len(weights) - size + 1))
                ends = np.minimum(starts + size, len(weights))
                value = (sums[ends] - sums[starts]) / (ends - starts)
                best = int(value.argmax())
                logits[window_start + second + best, 0] = logits[window_start + second + ends[best] - 1, 1] = 1 + max(
                    0, value[best]
                )
                window_start += length
            outputs.append(logits if gives_answer else np.zeros_like(logits))
        return outputs

    held_out = {split: questions for split, questions in rows.items() if split != "train"}
    outcomes = {
        split: task.row_results(predict(questions, gives_answer=True), questions, head)
        for split, questions in held_out.items()
    }
    facts = task.calibrate(outcomes["valid"], targets["valid"], head) if "valid" in outcomes else {}
    baselines = [
        _score_baseline(NEARBY_WORDS, outcomes, targets, task.output, Head(head.labels, {**head.facts, **facts}))
    ]
    if head.facts["no_answer"]:
        unanswered = {
            split: task.row_results(predict(questions, gives_answer=False), questions, head)
            for split, questions in held_out.items()
        }
        no_answer_head = Head(head.labels, {**head.facts, "threshold": 1.0})
        baselines.append(_score_baseline(NO_ANSWER, unanswered, targets, task.output, no_answer_head))
    return baselines


def _measure_tags(
    store: Store,
    positions_by_split: dict[str, stats.Ints],
    targets: dict[str, RaggedArray],
    head: Head,
    tokenizer: Path,
) -> tuple[dict[str, RaggedArray], float]:
    """(outcomes by split, milliseconds of a text). Outcomes of words are [tag, how sure, loss] each; a word is known by
    its tokens."""
    import tokenizers

    words = {split: _split_words(store, split, rows) for split, rows in positions_by_split.items()}
    tags_by_split = {
        split: [decode_true_tags(row) for row in split_targets] for split, split_targets in targets.items()
    }
    train = [
        (row_words, [head.labels[tag] if tag >= 0 else "O" for tag in np.delete(row_tags, untokenized)])
        for row_words, (row_tags, untokenized) in zip(words["train"], tags_by_split["train"], strict=True)
        if len(row_words) == len(row_tags) - len(untokenized)
    ]
    outcomes = {}
    for split in words:
        predicted_tags = predict_tags(train, words[split])
        rows = []
        for sentence_tags, (true, untokenized_words) in zip(predicted_tags, tags_by_split[split], strict=True):
            answers, untokenized = iter(sentence_tags), set(untokenized_words.tolist())
            row_tags = ["O" if place in untokenized else next(answers, "O") for place in range(len(true))]
            rows.append([(head.labels.index(tag), 1.0, 0.0) for tag in row_tags])
        outcomes[split] = RaggedArray.from_rows(rows, np.float64)
    last_split = next(reversed(positions_by_split))
    tokenizer_model, frequent_tags = tokenizers.Tokenizer.from_file(str(tokenizer)), most_frequent_tags(train)
    words_by_text = dict(
        zip(
            texts := _decode_texts(store, last_split, positions_by_split[last_split], tokenizer),
            words[last_split],
            strict=True,
        )
    )

    def predict(inputs: Sequence[str]) -> Any:
        return [
            (tokenizer_model.encode(text), [frequent_tags.get(word, "O") for word in words_by_text[text]])
            for text in inputs
        ]

    return outcomes, measure_text_ms(predict, texts)


def _split_words(store: Store, split: str, rows: stats.Ints) -> list[list[tuple[int, ...]]]:
    """The token numbers of each word; a word is answered at its first token."""
    tokens, words = store.read_tokens(split, rows), []
    for place in range(len(rows)):
        row_tokens = tokens.take([place])
        starts = np.flatnonzero(row_tokens.targets >= -1)
        words.append([tuple(part.tolist()) for part in np.split(row_tokens.ids, starts)[1:]])
    return words


# ------------------------------------------------------------------------------------------------------- the baselines


def fit_labels(train: LabeledTexts, valid: LabeledTexts) -> Callable[[Sequence[str]], npt.NDArray[Any]]:
    """Fit a linear support vector machine on TF-IDF, with the C of `C_VALUES` that is best on `valid` (of equals the
    smallest). Returns a function from texts to labels."""
    from sklearn.svm import LinearSVC

    features = _make_features(train[0])
    matrix, held_out = features.fit_transform(train[0]), features.transform(valid[0])
    models = [LinearSVC(C=c, random_state=0).fit(matrix, train[1]) for c in C_VALUES]
    best = max(models, key=lambda model: model.score(held_out, valid[1]))
    return lambda texts: np.asarray(best.predict(features.transform(texts)))


def measure_accuracy(train: LabeledTexts, valid: LabeledTexts, test: LabeledTexts) -> float:
    """Accuracy of `fit_labels` on the test texts."""
    return float(np.mean(fit_labels(train, valid)(test[0]) == np.asarray(test[1])))


def fit_numbers(train: ScoredTexts, valid: ScoredTexts) -> Callable[[Sequence[str]], npt.NDArray[np.float64]]:
    """Ridge regression on TF-IDF, which gives texts values; alpha is the one of `ALPHA_VALUES` that is best on
    `valid`.

    Best is the smallest squared error, of equals the largest alpha. It takes about 2 ms per 1,000 characters.
    """
    from sklearn.linear_model import Ridge

    features = _make_features(train[0])
    matrix = features.fit_transform(train[0])
    held_out, true = features.transform(valid[0]), np.asarray(valid[1], dtype=np.float64)
    # The conjugate-gradient solver draws nothing at random and needs no dense matrix.
    models = [
        Ridge(alpha=alpha, solver="sparse_cg", tol=1e-6).fit(matrix, train[1]) for alpha in reversed(ALPHA_VALUES)
    ]
    best = min(models, key=lambda model: float(((model.predict(held_out) - true) ** 2).sum()))
    return lambda texts: np.asarray(best.predict(features.transform(texts)), dtype=np.float64)


def predict_tags(train: Iterable[TaggedSentence], sentences: Iterable[Sequence[Hashable]]) -> list[list[str]]:
    """The tag that each word has most often in `train` (of equals the first by name); O where it does not occur."""
    frequent_tags = most_frequent_tags(train)
    return [[frequent_tags.get(word, "O") for word in words] for words in sentences]


def most_frequent_tags(train: Iterable[TaggedSentence]) -> dict[Hashable, str]:
    """The tag that each word has most often; of equals the first by name."""
    counts: dict[Hashable, Counter[str]] = defaultdict(Counter)
    for words, sentence_tags in train:
        for word, tag in zip(words, sentence_tags, strict=True):
            counts[word][tag] += 1
    return {word: min(tag_counts, key=lambda tag: (-tag_counts[tag], tag)) for word, tag_counts in counts.items()}


def _make_features(texts: Sequence[str]) -> Any:
    """TF-IDF of words and of characters. Where most texts have no word of two letters, each character is one: the
    tokenizers of BERT's kin put blanks between those of Chinese."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.pipeline import make_union

    having = sum(re.search(WORD_PATTERN, text) is not None for text in texts)
    pattern = WORD_PATTERN if 2 * having >= len(texts) else NON_BLANK_PATTERN
    return make_union(
        TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=pattern),
        TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), sublinear_tf=True),
    )
