"""Two models or more on the same rows.

`pair_answers` pairs the rows of files of predictions, for a comparison. `answer_file` and `answer_store` predict rows
with both models, for the gate, each with its own tokenizer and engine: rows of a file, or of the token stores of both
runs. A model reads the tokens of its training store if its tokenizer made that store. A model without a store tokenizes
the texts in the other model's store, so that a wrong tokenizer lowers its score.

Equal rows have equal `row_id`: a hash of texts, label and occurrence, independent of file and line. It joins the rows
of two files or stores (`common_positions`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.parquet

from rtrain.config import DataConfig
from rtrain.core.errors import ConfigError, Problem, UserError, quote_value
from rtrain.core.ragged import EncodedRow, Head, Int32s, Ints, RaggedArray, TokenBatch, collate
from rtrain.core.run_folder import Run
from rtrain.data import row_reader, sources, splits
from rtrain.data.row_reader import SourceRow
from rtrain.data.store.store import Store, open_store
from rtrain.evaluation.candidates import Candidate
from rtrain.inference import score
from rtrain.inference.artifact import Artifact
from rtrain.inference.predictor import Predictor
from rtrain.report import collect
from rtrain.report.collect import SPLITS, AnswerRows
from rtrain.report.progress import print_message
from rtrain.report.stats import sample_rows
from rtrain.runs import predictions
from rtrain.trainer.evaluate import SEED

SPLIT_NAMES = {"test": "test", "valid": "validation"}
MAX_ROWS = 10_000
"""Most rows of a store that are predicted; a larger split is sampled with a fixed seed."""
CachedAnswers = tuple[score.PredictedRows, score.PredictedRows]
"""Answers of the baseline and of the candidate."""


@dataclass(frozen=True, eq=False)
class CandidateAnswers:
    """One candidate's answers to all rows of a split."""

    rows: AnswerRows
    ids: npt.NDArray[np.uint64]
    positions: Ints
    """Positions of the rows in the split of the token store."""


@dataclass(frozen=True, eq=False)
class PairedAnswers:
    """The rows of a split that all candidates have answered, in the order of the first candidate's file."""

    split: str
    answers: Sequence[CandidateAnswers]
    """One entry per candidate."""
    positions: Sequence[Ints]
    """For each candidate, the places of the common rows in its answers."""

    def __len__(self) -> int:
        return len(self.positions[0])


def pair_answers(candidates: Sequence[Candidate], splits: Sequence[str] = SPLITS) -> PairedAnswers | str:
    """Pair the common rows of the first of `splits` that all candidates have answered, or return a reason.

    Raises `UserError` if the candidates share no row of that split. Rows of another split chose the weights, so they
    would be biased.
    """
    missing_reasons = []
    for split in splits:
        if unanswered := [candidate for candidate in candidates if not _has_answers(candidate, split)]:
            missing_reasons.append(f"{', '.join(map(str, unanswered))} have no answers to {SPLIT_NAMES[split]} rows")
            continue
        loaded = [(candidate, _load_answers(candidate, split)) for candidate in candidates]
        if empty := [candidate for candidate, candidate_answers in loaded if candidate_answers is None]:
            missing_reasons.append(f"{', '.join(map(str, empty))} have no {SPLIT_NAMES[split]} rows")
            continue
        answers = [candidate_answers for _, candidate_answers in loaded if candidate_answers is not None]
        positions = common_positions([candidate_answers.ids for candidate_answers in answers])
        if len(positions[0]):
            return PairedAnswers(split, answers, positions)
        pairs = zip(candidates, answers, strict=True)
        counts = ", ".join(
            f"{candidate.letter} {len(candidate_answers.ids):,}" for candidate, candidate_answers in pairs
        )
        raise UserError(
            f"the runs share no {SPLIT_NAMES[split]} row ({counts}); train them with one data.test file, or score one "
            "artifact on the other's rows with rtrain evaluate",
            code="no_common_rows",
        )
    # Trials are resumed by their search.
    resume_hints = [
        f"to finish {candidate}: {candidate.run.resume_command}"
        for candidate in candidates
        if candidate.is_run_artifact and candidate.metadata is None and not Run(candidate.run.folder.parent).is_search
    ]
    return "; ".join([*missing_reasons, *resume_hints])


def common_positions(ids: Sequence[npt.NDArray[np.uint64]]) -> list[Ints]:
    """For each list of distinct ids, the places of the ids common to all lists, in the order of the first list."""
    places = [_find_positions(row_ids, ids[0]) for row_ids in ids]
    in_all = np.logical_and.reduce([at >= 0 for at in places])
    return [at[in_all] for at in places]


def _find_positions(ids: npt.NDArray[np.uint64], lookup_ids: npt.NDArray[np.uint64]) -> Ints:
    """Position of each of `lookup_ids` in `ids`; -1 if missing."""
    if not len(ids):
        return np.full(len(lookup_ids), -1, dtype=np.int64)
    order = np.argsort(ids, kind="stable")
    places = order[np.minimum(np.searchsorted(ids[order], lookup_ids), len(ids) - 1)]
    return np.where(ids[places] == lookup_ids, places, -1)


def _predictions_key(candidate: Candidate, split: str) -> str:
    """Name of the candidate's predictions file. Another version of a derived artifact has another file."""
    if candidate.is_run_artifact or candidate.metadata is None:
        return split
    return f"{split}-{candidate.folder.name}-{candidate.metadata.version}"


def _has_answers(candidate: Candidate, split: str) -> bool:
    return candidate.run.predictions(_predictions_key(candidate, split)).is_file() or (
        candidate.metadata is not None and candidate.run.token_store is not None
    )


def _load_answers(candidate: Candidate, split: str) -> CandidateAnswers | None:
    """Read the candidate's answers, or predict them if the file is missing; None for a split without rows."""
    key = _predictions_key(candidate, split)
    if not candidate.run.predictions(key).is_file() and not _write_answers(candidate, split):
        return None
    return read_answer_file(candidate.run, key)


def read_answer_file(run: Run, key: str) -> CandidateAnswers | None:
    """Read a file of predictions; None if it is missing or has no rows."""
    rows = collect.read_answers(run, key)
    if rows is None:
        return None
    table = pyarrow.parquet.read_table(run.predictions(key), columns=["row_id", "position"])
    return CandidateAnswers(rows, table["row_id"].to_numpy(), table["position"].to_numpy())


def _write_answers(candidate: Candidate, split: str) -> bool:
    """Predict a split with the candidate's artifact and write the answers; False for a split without rows."""
    store_path = candidate.run.token_store
    assert store_path is not None  # by `_has_answers`
    store = open_store(store_path)
    count = store.num_rows(split)
    if not count:
        return False
    print_message(f"{candidate} predicts {count:,} {SPLIT_NAMES[split]} rows")
    predictor = Predictor.load(candidate.folder)
    results = score.predict_split(predictor, store, split, np.arange(count)).row_results
    path = candidate.run.predictions(_predictions_key(candidate, split))
    try:
        predictions.write_predictions(path, split, store, predictor.task, predictor.head, results, predictor.tokenizer)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}); make the run's folder writable", code="not_writable"
        ) from None
    return True


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
            reason = f"each row has a label that the model lacks, e.g. {row_labels}; the model has e.g. {model_labels}"
            fix = "name the column of the labels"
            raise ConfigError([Problem("data.label", data.label, reason, fix, code="label_mismatch")])
        answers = _predict_tokens(predictor, inputs.tokens)
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
    def from_predictor(cls, predictor: Predictor) -> "TokenizationSpec":
        metadata = predictor.artifact
        facts = (metadata.facts.get(name) for name in ("stride", "max_windows"))
        return cls(sources.hash_tokenizer(predictor.folder), metadata.max_tokens, *facts)


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
    cached_answers: CachedAnswers | None = None,
    subset: Ints | None = None,
) -> AnswerPair:
    """Predict the rows of a split with both models.

    Rows that only the candidate was trained on are excluded (`_exclude_trained_rows`).

    Args:
        stores: the first defines the rows; the others hold the same rows with other tokenizers.
        cached_answers: answers to all rows of the split; unused if rows are sampled.
        subset: positions in the first store; None for all rows.

    Raises:
        IncomparableModels: labels or tokens of the candidate do not match those of the rows.
    """
    _check_same_task(baseline, candidate)
    store, models = stores[0], (baseline, candidate)
    tokenizations = [TokenizationSpec.from_predictor(model) for model in models]
    is_same_tokenization = tokenizations[0] == tokenizations[1]
    all_positions = np.arange(store.num_rows(split), dtype=np.int64) if subset is None else subset
    remaining, excluded_rows = _exclude_trained_rows(candidate.artifact, stores, split, all_positions)
    positions = remaining[sample_rows(len(remaining), MAX_ROWS)]
    requested_rows = len(positions)
    model_stores = [
        _find_training_store(model, tokenization.tokenizer, stores)
        for model, tokenization in zip(models, tokenizations, strict=True)
    ]
    token_ids: Ints | None = None
    if is_same_tokenization:
        rows = (_read_rows(store, split, positions),) * 2
    elif joined_rows := _join_rows(split, positions, store, model_stores):
        rows, positions = joined_rows
        token_ids = _map_token_ids(candidate, baseline)  # the vocabularies have different ids
    else:
        rows, positions = _retokenize_rows(models, split, positions, store, model_stores)
    if not (
        is_same_tokenization
        and cached_answers
        and len(cached_answers[0].outputs) == len(positions) == store.num_rows(split)
    ):
        cached_answers = _predict_tokens(baseline, rows[0].tokens), _predict_tokens(candidate, rows[1].tokens)
    no_unknown_labels = np.zeros(len(positions), dtype=np.bool_)

    def align_answers(place: int) -> ModelAnswers:
        model_rows = rows[place]
        head, answers = _align_labels(models[place], cached_answers[place], model_rows.head, models)
        return ModelAnswers(models[place], model_rows.tokens, answers, model_rows.targets, head, no_unknown_labels)

    columns = {name: values.take(positions).to_pylist() for name, values in store.slices(split).items()}
    differing_rows = 0 if is_same_tokenization else _count_differing_rows(rows[0].tokens, rows[1].tokens, token_ids)
    source = f"{split} rows of the run" if subset is None else f"holdout {split} rows"
    missing_note = f", of {requested_rows:,}: these are in both stores" if len(positions) < requested_rows else ""
    return AnswerPair(align_answers(0), align_answers(1), columns, source + missing_note, differing_rows, excluded_rows)


def _predict_tokens(predictor: Predictor, tokens: TokenBatch) -> score.PredictedRows:
    # A masked token has one logit per vocabulary token, and only row results are scored.
    keep_outputs = predictor.task.output != "tokens"
    return score.predict_rows(predictor, tokens.row_lengths, tokens.take, keep_outputs=keep_outputs)


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


def _find_training_store(predictor: Predictor, tokenizer: str, stores: Sequence[Store]) -> Store | None:
    """Find the training store of a model, if the model's tokenizer (a digest) made it."""
    for store in stores:
        is_trained_on = predictor.artifact.lineage.get("data_digest") == store.manifest.digest
        if is_trained_on and tokenizer in store.manifest.sources.get("tokenizer", {}).values():
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
    row_ids = [store.column(split, "row_id")[positions], first.column(split, "row_id"), other.column(split, "row_id")]
    places, first_rows, other_rows = common_positions(row_ids)
    if not len(places):
        return None
    return (_read_rows(first, split, first_rows), _read_rows(other, split, other_rows)), positions[places]


def _retokenize_rows(
    predictors: tuple[Predictor, Predictor],
    split: str,
    positions: Ints,
    store: Store,
    model_stores: Sequence[Store | None],
) -> tuple[tuple[StoreRows, StoreRows], Ints]:
    """Read the rows of one model from its store and tokenize their texts for the other: (rows, positions in
    `store`)."""
    is_maker = predictors[0].artifact.lineage.get("data_digest") == store.manifest.digest
    maker = 0 if model_stores[0] is not None or (model_stores[1] is None and is_maker) else 1
    places = positions
    if (maker_store := model_stores[maker]) is not None and maker_store is not store:
        row_ids = [store.column(split, "row_id")[positions], maker_store.column(split, "row_id")]
        in_both, places = common_positions(row_ids)
        positions, store = positions[in_both], maker_store
    rows, texts = _read_rows(store, split, places), store.kept_texts(split, places)
    retokenized, kept_positions = _tokenize_texts(predictors[1 - maker], predictors[maker], texts, rows.tokens)
    kept_rows = rows._replace(tokens=rows.tokens.take(kept_positions), targets=rows.targets.take(kept_positions))
    pair = (kept_rows, kept_rows._replace(tokens=retokenized))
    return (pair if maker == 0 else pair[::-1]), positions[kept_positions]


def _tokenize_texts(
    predictor: Predictor, store_predictor: Predictor, texts: Sequence[tuple[str, str | None] | None], tokens: TokenBatch
) -> tuple[TokenBatch, Ints]:
    """Tokenize texts with `predictor`: (rows, places of the rows with a complete text).

    A text is complete if the store's own tokenizer reproduces the store's tokens from it.
    """
    kept_positions, encoded = [], list[EncodedRow]()
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
    if predictor.task.is_token_level or predictor.task.output == "spans":  # targets are token positions
        lengths = [window.num_tokens for row in encoded for window in row.windows]
        if not np.array_equal(lengths, kept_tokens.window_lengths):
            raise IncomparableModels(
                "its tokens differ from the baseline's, and answers are token positions", code="tokenizer_mismatch"
            )
    targets = {name: getattr(kept_tokens, name) for name in ("targets", "targets_per_row", "row_ids")}
    return replace(collate(encoded), **targets), np.array(kept_positions)


def _align_labels(
    predictor: Predictor, answered: score.PredictedRows, head: Head, predictors: Sequence[Predictor]
) -> tuple[Head, score.PredictedRows]:
    """Reorder labels to the store's order, followed by labels that only one model has: (head, answers)."""
    labels, names = tuple(predictor.head.labels), tuple(head.labels)
    if predictor.task.output == "classes":  # each label is a column that can be reordered
        names = (*names, *sorted({name for model in predictors for name in model.head.labels} - set(names)))
    elif labels != names:
        mismatches = [f"{a} in place of {b}" for a, b in zip(labels, names, strict=False) if a != b]
        mismatch = (*mismatches, f"{len(labels)} in place of {len(names)}")[0]
        raise IncomparableModels(
            f"its labels, or their order, differ from those of the rows: {mismatch}", code="label_mismatch"
        )
    if labels != names:
        table = answered.row_results.to_matrix(len(labels))
        aligned = np.full((len(table), len(names)), score.MISSING_LABEL_LOGIT)
        aligned[:, [names.index(name) for name in labels]] = table
        answered = replace(answered, row_results=RaggedArray.from_matrix(aligned))
    return Head(names, predictor.head.facts), answered


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
    if candidate_store is None:
        return positions, None
    keyed_splits = ((store, split), (store, "train"), (candidate_store, "train"))
    if any(len(keyed.text_keys(name)) != keyed.num_rows(name) for keyed, name in keyed_splits):
        return positions, None
    keys = store.text_keys(split)[positions]
    in_baseline_training, in_candidate_training = (
        splits.find_in_training_set([training_store.text_keys("train")], keys)
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
        training_store = next((store for store in stores if store.manifest.digest == digest), None)
        if (seen_rows := score.find_seen_rows(training_store, rows)) is None:
            return None
        is_seen |= seen_rows.in_train_or_valid
    return is_seen
