"""Rows that both models predict, each with its own tokenizer and engine.

Rows come from a file, or from the token stores of both runs. A model reads the tokens of its training store if its
tokenizer made that store. Rows of two stores are joined by their ids. A model without a store tokenizes the texts in
the other model's store, so that a wrong tokenizer lowers its score.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rtrain.config import DataConfig
from rtrain.core.errors import ConfigError, Problem, UserError, quote_value
from rtrain.core.ragged import EncodedRow, Head, Int32s, Ints, RaggedArray, TokenBatch, collate
from rtrain.data import contamination, row_reader
from rtrain.data.row_reader import SourceRow
from rtrain.data.sources import digests
from rtrain.data.store.store import Store
from rtrain.evaluation import significance
from rtrain.evaluation.differences import McNemarTest, SliceDifference, compare_slices, count_flips
from rtrain.evaluation.row_scores import select_scores
from rtrain.evaluation.significance import Difference
from rtrain.inference import score
from rtrain.inference.artifact import Artifact
from rtrain.inference.predictor import Predictor
from rtrain.metrics import per_class
from rtrain.metrics.registry import ACCURACY_WITH_ABSTENTIONS, get_metric
from rtrain.metrics.scores import LENGTH_COLUMN
from rtrain.metrics.slices import bin_by_quantile
from rtrain.report.stats import sample_rows
from rtrain.trainer.evaluate import SEED

MAX_ROWS = 10_000
"""Most rows of a store that are predicted; a larger split is sampled with a fixed seed."""
CachedAnswers = tuple[score.PredictedRows, score.PredictedRows]
"""Answers of the baseline and of the candidate."""


@dataclass(frozen=True, eq=False)
class ModelAnswers:
    """The rows as one model reads and predicts them."""

    predictor: Predictor
    tokens: TokenBatch
    answers: score.PredictedRows
    targets: RaggedArray
    head: Head
    """Head of the answers and targets."""
    has_unknown_label: npt.NDArray[np.bool_]

    def make_row_answerer(self, rows: Iterable[int]) -> Callable[[int], object]:
        """Make a function that predicts one row alone from its tokens: a request without tokenizer and HTTP."""
        task, head = self.predictor.task, self.predictor.head
        single_rows = {row: task.prepare(self.tokens.take([row]), head, SEED, 0) for row in rows}

        def ask(row: int) -> object:
            tokens = single_rows[row]
            return task.row_outputs(self.predictor.run_tokens(tokens), tokens, head)

        return ask


@dataclass(frozen=True, eq=False)
class AnswerPair:
    """Answers of both models to the same rows."""

    baseline: ModelAnswers
    candidate: ModelAnswers
    columns: Mapping[str, Sequence[str | None]]
    """Values of each row by column, for slices."""
    source: str
    """Source of the rows."""
    differing_rows: int = 0
    """Rows whose tokens differ between the two models."""
    excluded_rows: int | None = 0
    """Rows that were excluded because the candidate was trained on them. In a file, training rows of the baseline and
    validation rows of both are excluded too. None if the stores do not tell."""

    @property
    def lengths(self) -> Int32s:
        """Tokens of each row with the baseline's tokenizer."""
        return self.baseline.tokens.row_lengths

    @property
    def texts(self) -> list[str]:
        """Decoded tokens of the baseline."""
        tokens = self.baseline.tokens
        row_ids = [row.tolist() for row in RaggedArray(tokens.ids, tokens.row_lengths)]
        texts: list[str] = self.baseline.predictor.tokenizer.decode_batch(row_ids)
        return texts


class IncomparableModels(UserError):
    """The candidate's answers cannot be compared with the baseline's."""


# --------------------------------------------------------------------------------------------------------- answering


def answer_file(
    baseline: Predictor, candidate: Predictor, data: DataConfig, stores: Sequence[Store] = ()
) -> AnswerPair:
    """Predict the test rows of a file with both models, without rows that one of them was trained on (by `stores`).

    Raises `ConfigError` if no row is left, or if no label of the rows is known: two models without a correct answer
    would be equal.
    """
    _check_same_task(baseline, candidate)
    rows, _ = score.read_scored_rows(row_reader.inspect_source(data), data, baseline.task)
    usable_rows = score.select_usable_rows(rows, data)
    is_training_row = _find_seen_rows((baseline.artifact, candidate.artifact), stores, usable_rows)
    if is_training_row is not None:
        usable_rows = [row for row, is_seen in zip(usable_rows, is_training_row.tolist(), strict=True) if not is_seen]
        if not usable_rows:
            reason = f"each of its {len(is_training_row):,} rows is a training or validation row of one of the models"
            fix = "name a file of new rows, or omit --data to use the run's test rows"
            raise ConfigError([Problem("data.path", data.path, reason, fix, code="no_unseen_rows")])
    columns = {name: [row.slices[place] for row in usable_rows] for place, name in enumerate(data.slices)}

    def answer_rows(predictor: Predictor) -> ModelAnswers:
        inputs = score.encode_rows(predictor, usable_rows)
        if inputs.has_unknown_label.all() and not inputs.unknown_labels:
            model_labels = " and ".join(quote_value(label) for label in predictor.head.labels[: score.MAX_EXAMPLES])
            row_labels = " and ".join(score.list_unknown_labels(usable_rows, inputs))
            reason = (
                f"each row has a label that the model lacks, e.g. {row_labels}; labels of the model are e.g. "
                f"{model_labels}"
            )
            raise ConfigError(
                [Problem("data.label", data.label, reason, "name the column of the labels", code="label_mismatch")]
            )
        answers = score.predict_rows(
            predictor, inputs.tokens.row_lengths, inputs.tokens.take, keep_outputs=_keeps_outputs(predictor)
        )
        answers = replace(answers, row_results=inputs.align_row_results(baseline.task, answers.row_results))
        return ModelAnswers(predictor, inputs.tokens, answers, inputs.targets, inputs.head, inputs.has_unknown_label)

    first, other = answer_rows(baseline), answer_rows(candidate)
    excluded_rows = None if is_training_row is None else int(is_training_row.sum())
    differing_rows = _count_differing_rows(first.tokens, other.tokens)
    return AnswerPair(first, other, columns, str(data.path), differing_rows, excluded_rows)


class TokenizationSpec(NamedTuple):
    """Everything that determines the tokens of a text. Models with equal specs have equal tokens."""

    tokenizer: str
    """Digest of tokenizer.json."""
    max_tokens: int
    stride: int | None
    max_windows: int | None

    @classmethod
    def from_artifact(cls, folder: Path, metadata: Artifact) -> "TokenizationSpec":
        return cls(
            digests.hash_tokenizer(folder),
            metadata.max_tokens,
            metadata.facts.get("stride"),
            metadata.facts.get("max_windows"),
        )


class StoreRows(NamedTuple):
    """Rows of a store as one model reads them."""

    tokens: TokenBatch
    targets: RaggedArray
    head: Head
    """Head of the targets."""


def answer_store(
    baseline: Predictor,
    candidate: Predictor,
    stores: Sequence[Store],
    split: str,
    tokenizations: tuple[TokenizationSpec, TokenizationSpec],
    cached_answers: CachedAnswers | None = None,
    subset: Ints | None = None,
) -> AnswerPair:
    """Predict the rows of a split with both models.

    Rows that only the candidate was trained on are excluded (`_exclude_trained_rows`).

    Args:
        stores: the first defines the rows; the others hold the same rows with other tokenizers.
        tokenizations: of the baseline and of the candidate.
        cached_answers: answers to all rows of the split; unused if rows are sampled.
        subset: positions in the first store; None for all rows.

    Raises:
        IncomparableModels: labels or tokens of the candidate do not match those of the rows.
    """
    _check_same_task(baseline, candidate)
    store, is_same_tokenization = stores[0], tokenizations[0] == tokenizations[1]
    all_positions = np.arange(store.num_rows(split), dtype=np.int64) if subset is None else subset
    remaining, excluded_rows = _exclude_trained_rows(candidate.artifact, stores, split, all_positions)
    positions = remaining[sample_rows(len(remaining), MAX_ROWS)]
    requested_rows = len(positions)
    model_stores = [
        _find_training_store(model, reading, stores)
        for model, reading in zip((baseline, candidate), tokenizations, strict=True)
    ]
    token_ids: Ints | None = None
    if is_same_tokenization:
        rows = (_read_rows(store, split, positions),) * 2
    elif joined_rows := _join_rows(split, positions, store, model_stores):
        rows, positions = joined_rows
        token_ids = _map_token_ids(candidate, baseline)  # the vocabularies have different ids
    else:
        rows, positions = _retokenize_rows((baseline, candidate), split, positions, store, model_stores)
    reusable_answers = (
        cached_answers
        if is_same_tokenization
        and cached_answers
        and len(cached_answers[0].outputs) == len(positions) == store.num_rows(split)
        else None
    )

    def answer_rows(predictor: Predictor, model_rows: StoreRows) -> ModelAnswers:
        if reusable_answers is None:
            answers = score.predict_rows(
                predictor, model_rows.tokens.row_lengths, model_rows.tokens.take, keep_outputs=_keeps_outputs(predictor)
            )
        else:
            answers = reusable_answers[0 if predictor is baseline else 1]
        head, answers = _align_labels(predictor, answers, model_rows.head, (baseline, candidate))
        return ModelAnswers(
            predictor, model_rows.tokens, answers, model_rows.targets, head, np.zeros(len(positions), dtype=np.bool_)
        )

    columns = {name: values.take(positions).to_pylist() for name, values in store.slices(split).items()}
    differing_rows = 0 if is_same_tokenization else _count_differing_rows(rows[0].tokens, rows[1].tokens, token_ids)
    source = f"{split} rows of the run" if subset is None else f"holdout {split} rows"
    missing_note = f", of {requested_rows:,}: these are in both stores" if len(positions) < requested_rows else ""
    return AnswerPair(
        answer_rows(baseline, rows[0]),
        answer_rows(candidate, rows[1]),
        columns,
        source + missing_note,
        differing_rows,
        excluded_rows,
    )


def _keeps_outputs(predictor: Predictor) -> bool:
    """Whether outputs stay in memory. A masked token has one logit per vocabulary token, and only row results are
    scored."""
    return predictor.task.output != "tokens"


def _check_same_task(baseline: Predictor, candidate: Predictor) -> None:
    if baseline.artifact.task != candidate.artifact.task:
        raise IncomparableModels(
            f"its task is {candidate.artifact.task}, the task of the baseline is {baseline.artifact.task}",
            code="task_mismatch",
        )


def _count_differing_rows(left: TokenBatch, right: TokenBatch, token_ids: Ints | None = None) -> int:
    """Count rows with different tokens; `token_ids` maps ids of the right vocabulary to ids of the left one."""
    ids = right.ids if token_ids is None else token_ids[right.ids]
    pairs = zip(RaggedArray(left.ids, left.row_lengths), RaggedArray(ids, right.row_lengths), strict=True)
    return sum(not np.array_equal(a, b) for a, b in pairs)


def _map_token_ids(predictor: Predictor, other: Predictor) -> Ints:
    """Map token ids of one vocabulary to ids of another; -1 for missing tokens."""
    vocab, other_vocab = predictor.tokenizer.get_vocab(), other.tokenizer.get_vocab()
    token_ids = np.full(max(vocab.values()) + 1, -1, dtype=np.int64)
    for piece, number in vocab.items():
        token_ids[number] = other_vocab.get(piece, -1)
    return token_ids


# ------------------------------------------------------------------------------------------------------------ reading


def _read_rows(store: Store, split: str, positions: Ints) -> StoreRows:
    return StoreRows(store.read_tokens(split, positions), store.targets(split, positions), store.manifest.head)


def _find_training_store(predictor: Predictor, tokenization: TokenizationSpec, stores: Sequence[Store]) -> Store | None:
    """Find the training store of a model, if the model's tokenizer made it."""
    for store in stores:
        trained = predictor.artifact.lineage.get("data_digest") == store.manifest.digest
        if trained and tokenization.tokenizer in store.manifest.sources.get("tokenizer", {}).values():
            return store
    return None


def _join_rows(
    split: str, positions: Ints, store: Store, model_stores: Sequence[Store | None]
) -> tuple[tuple[StoreRows, StoreRows], Ints] | None:
    """Read the rows of both models from their own stores: (rows, positions in `store`).

    None if a model has no store, or if no row is in both stores.
    """
    first, other = model_stores
    if first is None or other is None:
        return None
    row_ids = store.column(split, "row_id")[positions]
    places = [_find_positions(model_store.column(split, "row_id"), row_ids) for model_store in (first, other)]
    in_both = (places[0] >= 0) & (places[1] >= 0)
    if not in_both.any():
        return None
    return (_read_rows(first, split, places[0][in_both]), _read_rows(other, split, places[1][in_both])), positions[
        in_both
    ]


def _find_positions(ids: npt.NDArray[np.uint64], lookup_ids: npt.NDArray[np.uint64]) -> Ints:
    """Position of each of `lookup_ids` in `ids`; -1 if missing."""
    if not len(ids):
        return np.full(len(lookup_ids), -1, dtype=np.int64)
    order = np.argsort(ids, kind="stable")
    places = order[np.minimum(np.searchsorted(ids[order], lookup_ids), len(ids) - 1)]
    return np.where(ids[places] == lookup_ids, places, -1)


def _retokenize_rows(
    predictors: tuple[Predictor, Predictor],
    split: str,
    positions: Ints,
    store: Store,
    model_stores: Sequence[Store | None],
) -> tuple[tuple[StoreRows, StoreRows], Ints]:
    """Read the rows of one model from its store and tokenize their texts for the other: (rows, positions in
    `store`)."""
    is_maker = [model.artifact.lineage.get("data_digest") == store.manifest.digest for model in predictors]
    maker = 0 if model_stores[0] is not None or (model_stores[1] is None and is_maker[0]) else 1
    if (maker_store := model_stores[maker]) is not None and maker_store is not store:
        places = _find_positions(maker_store.column(split, "row_id"), store.column(split, "row_id")[positions])
        positions, store, places = positions[places >= 0], maker_store, places[places >= 0]
    else:
        places = positions
    maker_rows = _read_rows(store, split, places)
    retokenized, kept_positions = _tokenize_texts(
        predictors[1 - maker], predictors[maker], store.kept_texts(split, places), maker_rows.tokens
    )
    kept_rows = maker_rows._replace(
        tokens=maker_rows.tokens.take(kept_positions), targets=maker_rows.targets.take(kept_positions)
    )
    pair = (kept_rows, kept_rows._replace(tokens=retokenized))
    return (pair if maker == 0 else pair[::-1]), positions[kept_positions]


def _tokenize_texts(
    predictor: Predictor, store_predictor: Predictor, texts: Sequence[tuple[str, str | None] | None], tokens: TokenBatch
) -> tuple[TokenBatch, Ints]:
    """Tokenize texts with `predictor`: (rows, places of the rows with a complete text).

    A text is complete if the store's own tokenizer reproduces the store's tokens from it.
    """
    kept_positions, encoded = [], []
    for place, text in enumerate(texts):
        if text is None:
            continue
        first, second = text
        model_input = first if second is None else dict(zip(predictor.task.fields, (first, second), strict=True))
        if store_predictor.validate_input(model_input) is None and np.array_equal(
            store_predictor.encode([model_input])[0].ids, tokens.take([place]).ids
        ):
            kept_positions.append(place)
            encoded += predictor.encode([model_input])
    if not kept_positions:
        raise IncomparableModels(
            "its tokenizer differs from the baseline's, and the token store has no complete text; write --data with "
            "a file of rows",
            code="tokenizer_mismatch",
        )
    kept_tokens = tokens.take(kept_positions)
    _check_alignment(predictor, encoded, kept_tokens)
    packed = collate(encoded)
    return replace(
        packed, targets=kept_tokens.targets, targets_per_row=kept_tokens.targets_per_row, row_ids=kept_tokens.row_ids
    ), np.array(kept_positions)


def _check_alignment(predictor: Predictor, encoded: Sequence[EncodedRow], kept_tokens: TokenBatch) -> None:
    """Refuse different tokens if targets are token positions."""
    if predictor.task.is_token_level or predictor.task.output == "spans":
        lengths = [window.num_tokens for row in encoded for window in row.windows]
        if not np.array_equal(lengths, kept_tokens.window_lengths):
            raise IncomparableModels(
                "its tokens differ from the baseline's, and answers are token positions",
                code="tokenizer_mismatch",
            )


def _align_labels(
    predictor: Predictor, answered: score.PredictedRows, head: Head, predictors: Sequence[Predictor]
) -> tuple[Head, score.PredictedRows]:
    """Reorder labels to the store's order, followed by labels that only one model has: (head, answers)."""
    model_head = predictor.head
    if predictor.task.output != "classes":  # for classes, each label is a column that can be reordered
        if model_head.labels != head.labels:
            raise IncomparableModels(
                "its labels, or their order, differ from those of the rows: "
                f"{_describe_label_mismatch(model_head, head)}",
                code="label_mismatch",
            )
        return Head(model_head.labels, model_head.facts), answered
    names = [*head.labels, *sorted({name for model in predictors for name in model.head.labels} - set(head.labels))]
    if list(model_head.labels) == names:
        return Head(model_head.labels, model_head.facts), answered
    table = answered.row_results.to_matrix(len(model_head.labels))
    aligned = np.full((len(table), len(names)), score.MISSING_LABEL_LOGIT)
    aligned[:, [names.index(name) for name in model_head.labels]] = table
    return Head(tuple(names), model_head.facts), replace(answered, row_results=RaggedArray.from_matrix(aligned))


def _describe_label_mismatch(model_head: Head, head: Head) -> str:
    pairs = (
        (model_label, row_label)
        for model_label, row_label in zip(model_head.labels, head.labels, strict=False)
        if model_label != row_label
    )
    mismatch = next(pairs, None)
    if mismatch is None:
        return f"{len(model_head.labels)} in place of {len(head.labels)}"
    return f"{mismatch[0]} in place of {mismatch[1]}"


# ----------------------------------------------------------------------------------------------- excluded training rows


def _exclude_trained_rows(
    candidate: Artifact, stores: Sequence[Store], split: str, positions: Ints
) -> tuple[Ints, int | None]:
    """Exclude rows that only the candidate was trained on: (remaining positions, number of excluded rows).

    A candidate with another split of the same texts (e.g. another `data.fold`) may have been trained on the baseline's
    test rows. Rows of the candidate's own store stay, and so do rows that both were trained on. The number is None if
    the stores do not tell.

    Args:
        stores: the first has the rows; the candidate's store is among them if it exists.

    Raises:
        UserError: no row is left.
    """
    store, digest = stores[0], candidate.lineage.get("data_digest")
    if digest in (None, store.manifest.digest):
        return positions, 0
    candidate_store = next((other_store for other_store in stores if other_store.manifest.digest == digest), None)
    if candidate_store is None or not all(
        _has_keys(checked_store, checked_split)
        for checked_store, checked_split in ((store, split), (store, "train"), (candidate_store, "train"))
    ):
        return positions, None
    keys = store.text_keys(split)[positions]
    in_baseline_training, in_candidate_training = (
        contamination.find_in_training_set([training_store.text_keys("train")], keys)
        for training_store in (store, candidate_store)
    )
    remaining = positions[in_baseline_training | ~in_candidate_training]
    if len(positions) and not len(remaining):
        raise UserError(
            f"the candidate was trained on each of the {len(positions):,} {split} rows of {store.folder}, since its "
            "split differs from the baseline's; write --data with a file of new rows, or train both with one split "
            "(data.fold, data.test)",
            code="no_unseen_rows",
        )
    return remaining, len(positions) - len(remaining)


def _find_seen_rows(
    artifacts: Sequence[Artifact], stores: Sequence[Store], rows: Sequence[SourceRow]
) -> npt.NDArray[np.bool_] | None:
    """Mark rows of a file that are training or validation rows of a model; None if a store or its text keys are
    missing."""
    is_seen = np.zeros(len(rows), dtype=np.bool_)
    for digest in {model.lineage.get("data_digest") for model in artifacts}:
        seen_rows = score.find_seen_rows(
            next((store for store in stores if store.manifest.digest == digest), None),
            rows,
        )
        if seen_rows is None:
            return None
        is_seen |= seen_rows.in_train_or_valid
    return is_seen


def _has_keys(store: Store, split: str) -> bool:
    return len(store.text_keys(split)) == store.num_rows(split)


# ------------------------------------------------------------------------------------------------------------- judging


@dataclass(frozen=True)
class CandidateScores:
    """The candidate's answers beside its base's. `headline` is None where `unscored_reason` says why."""

    headline: Difference | None
    scores: tuple[Difference, ...]
    mcnemar: McNemarTest | None
    baseline_correct: int
    slices: tuple[SliceDifference, ...]
    unscored_reason: str = ""
    classes: Sequence[per_class.ClassResult] = ()
    """Scores of each class by the baseline (`first`) and the candidate (`other`)."""


def score_candidate(pair: AnswerPair) -> CandidateScores:
    """Compute scores with paired intervals, answers lost and won, and slices.

    For classes, p is the larger of the bootstrap's and McNemar's, as in `rtrain compare`.
    """
    metric = get_metric(pair.baseline.predictor.task.output)
    models = (pair.baseline, pair.candidate)
    first, other = (metric.make_sum_metric(model.answers.row_results, model.targets, model.head) for model in models)
    rights: tuple[npt.NDArray[np.bool_] | None, ...] = (None, None)
    if metric.mark_correct is not None:
        rights = tuple(
            metric.mark_correct(model.answers.row_results, model.targets, model.head) & ~model.has_unknown_label
            for model in models
        )
    scores = {difference.name: difference for difference in significance.compare_scores(first, other)}
    # If both models reject out-of-scope rows, score the rows that McNemar's test counts.
    name = ACCURACY_WITH_ABSTENTIONS if ACCURACY_WITH_ABSTENTIONS in scores else metric.headline
    if name not in scores:
        return CandidateScores(None, tuple(scores.values()), None, 0, (), f"{name} is not finite")
    headline = scores[name]
    mcnemar = count_flips(rights[0], rights[1])
    if mcnemar is not None and pair.baseline.predictor.task.output == "classes":
        headline = replace(headline, p=max(headline.p, mcnemar.p))
    columns = {name: [value or "" for value in values] for name, values in pair.columns.items()}
    if LENGTH_COLUMN not in columns:
        columns[LENGTH_COLUMN] = bin_by_quantile(pair.lengths)
    headline_scores = [select_scores(model, (name,)) for model in (first, other)]
    classes: list[dict[str, Any]] = []
    if metric.build_tables is not None:
        tables = (metric.build_tables(model.answers.row_results, model.targets, model.head) for model in models)
        classes = per_class.pair_classes(*map(per_class.collect_classes, tables))
    return CandidateScores(
        headline,
        tuple(scores.values()),
        mcnemar,
        0 if rights[0] is None else int(rights[0].sum()),
        tuple(compare_slices(headline_scores[0], headline_scores[1], name, columns)),
        classes=classes,
    )
