"""Scores of an artifact through the path of requests, on a token store's split or on a file."""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rtrain.config import DataConfig, parse_config
from rtrain.core.errors import ConfigError, Problem, quote_value
from rtrain.core.ragged import EncodedRow, Floats, Head, Int32s, Ints, RaggedArray, TokenBatch, collate, iter_batches
from rtrain.core.run_folder import Run
from rtrain.core.text_segmentation import join_words
from rtrain.data import checks, row_reader, sources, splits
from rtrain.data.row_reader import SourceRow
from rtrain.data.store.store import Store, open_store
from rtrain.inference.artifact import Artifact
from rtrain.inference.predictor import DEFAULT_BATCH_SIZE, MAX_TOKENS_PER_CALL, Predictor
from rtrain.metrics.entities import extract_entities
from rtrain.metrics.registry import get_metric
from rtrain.metrics.scores import measure_split, score_unseen_rows
from rtrain.tasks.base import Input, Task, validate_task_row
from rtrain.tasks.token_tags import parse_tags
from rtrain.trainer.evaluate import SEED

MISSING_LABEL_LOGIT = -100.0
"""Logit of a label that a model lacks."""
MAX_MASKED_TOKENS_PER_CALL = 1 << 11
"""Most tokens of an engine call on masked text: one of XLM-R's 250,000 pieces takes a megabyte for each of them."""
MAX_RUNNING_TEXT_ROWS = 2000
"""Most rows that are also predicted as running text."""
MAX_EXAMPLES = 3
"""Most examples of unknown labels and of bad rows in a report."""


@dataclass(frozen=True)
class PredictedRows:
    """Predictions in the order of the requested rows."""

    outputs: list[Floats]
    """Empty without `keep_outputs`."""
    row_results: RaggedArray


def predict_split(
    predictor: Predictor,
    store: Store,
    split: str,
    rows: Ints,
    batch_size: int = DEFAULT_BATCH_SIZE,
    *,
    keep_outputs: bool = True,
) -> PredictedRows:
    """Predict the rows at the positions `rows`; rows of similar length share a batch. `keep_outputs`: see
    `predict_rows`."""
    lengths = store.column(split, "length")[rows]
    return predict_rows(
        predictor, lengths, lambda places: store.read_tokens(split, rows[places]), batch_size, keep_outputs=keep_outputs
    )


def compute_scores(
    predictor: Predictor, predicted_rows: PredictedRows, store: Store, split: str = "test"
) -> dict[str, float]:
    """Return the scores of predictions for all rows of a split, in index order."""
    return get_metric(predictor.task.output).main_scores(
        predicted_rows.row_results, store.targets(split), predictor.head
    )


def predict_rows(
    predictor: Predictor,
    lengths: Int32s,
    read_tokens: Callable[[Ints], TokenBatch],
    batch_size: int = DEFAULT_BATCH_SIZE,
    *,
    keep_outputs: bool = True,
) -> PredictedRows:
    """Predict rows of these lengths; `read_tokens` returns the tokens of the rows at some positions. Without
    `keep_outputs` outputs are dropped: a row of masked text has one for each piece of the vocabulary and each mask, a
    megabyte and more."""
    task, head = predictor.task, predictor.head
    outputs_by_row: dict[int, Floats] = {}
    results_by_row: dict[int, Any] = {}
    max_tokens = MAX_TOKENS_PER_CALL if keep_outputs else MAX_MASKED_TOKENS_PER_CALL
    for row_indices in iter_batches(lengths, np.argsort(lengths, kind="stable"), batch_size, max_tokens):
        tokens = task.prepare(read_tokens(row_indices), head, SEED, 0)
        batch_outputs = task.row_outputs(predictor.run_tokens(tokens), tokens, head)
        if keep_outputs:
            outputs_by_row.update(zip(row_indices.tolist(), batch_outputs, strict=True))
        results_by_row.update(zip(row_indices.tolist(), task.row_results(batch_outputs, tokens, head), strict=True))
    rows = range(len(lengths))
    return PredictedRows(
        [outputs_by_row[row] for row in rows] if keep_outputs else [],
        RaggedArray.from_rows([results_by_row[row] for row in rows], np.float64),
    )


def resolve_data_settings(artifact: Artifact, overrides: Mapping[str, Any]) -> DataConfig:
    """Return the settings for reading a file: those of the artifact's training rows, changed by `overrides` and by the
    file's suffix."""
    data = dict(artifact.data)
    if sources.has_format_suffix(str(overrides.get("data.path", ""))):
        data["format"] = None
    data["split_column"] = data["group_column"] = None  # nothing is split
    document = {"name": artifact.name, "task": artifact.task, "data": data}
    return parse_config(document, overrides).recipe.data


def resolve_scoring_settings(artifact: Artifact, overrides: Mapping[str, Any]) -> DataConfig:
    """`resolve_data_settings` for rows to score: where the file has the split column of the training run, only its test
    rows are scored."""
    data, split_column = resolve_data_settings(artifact, overrides), artifact.data.get("split_column")
    if (
        split_column is None
        or "data.split_column" in overrides
        or split_column not in row_reader.inspect_source(data).columns
    ):
        return data
    return data.model_copy(update={"split_column": split_column})


def score_file(folder: Path, data: DataConfig) -> dict[str, Any]:
    """Predict the rows of a file, and score the predictions. A row with a label unknown to the artifact is always
    wrong.

    The report has the keys of a run's splits (`rtrain.metrics.scores`), `unseen` where rows are training or validation
    rows, and:
      seen_rows: number of `train` and `valid` rows of the artifact among the rows; None where unknown
      excluded_rows: rows of splits other than test, by split
      left_out_rows: rows that `data.where` leaves out, if any
      bad_rows, bad_row_examples: rows that could not be read
      truncated_rows: rows longer than the artifact reads
      unknown_labels: number of `rows` with a label that the artifact lacks, and `examples` of these labels
      rows_per_second
    """
    source = row_reader.inspect_source(data)
    predictor = Predictor.load(folder)
    task = predictor.task
    counts = row_reader.ReadCounts()
    rows, excluded_rows = read_scored_rows(source, data, task, counts)
    usable_rows = select_usable_rows(rows, data)
    seen_rows = find_seen_rows(find_training_store(folder, predictor.artifact), usable_rows)
    start_time = time.perf_counter()
    encoded_rows = encode_rows(predictor, usable_rows)
    tokens, targets = encoded_rows.tokens, encoded_rows.targets
    lengths, has_answers = tokens.row_lengths, task.output != "tokens"
    predicted_rows = predict_rows(predictor, lengths, tokens.take, keep_outputs=has_answers)
    seconds = time.perf_counter() - start_time
    slice_columns = {name: [row.slices[place] for row in usable_rows] for place, name in enumerate(data.slices)}
    row_results = encoded_rows.align_row_results(task, predicted_rows.row_results)
    report = measure_split(task, encoded_rows.head, "file", row_results, targets, lengths, slice_columns)
    if has_answers:
        answers = task.decode(predicted_rows.outputs, encoded_rows.inputs, encoded_rows.encoded, predictor.head, {})
        report["scores"] |= task.reference_scores(answers, [row.label for row in usable_rows])
    if task.output == "tags":
        running_rows = usable_rows[:MAX_RUNNING_TEXT_ROWS]
        words = [row.text.split(" ") for row in running_rows]
        running_text_scores = score_running_text(predictor, words, [parse_tags(row.label) for row in running_rows])
        report["scores"] |= {f"running_text_{name}": value for name, value in running_text_scores.items()}
    if seen_rows is not None and seen_rows.in_train_or_valid.any():
        report["unseen"] = score_unseen_rows(task, encoded_rows.head, row_results, targets, seen_rows.in_train_or_valid)
    row_problems = (f"line {row.line}: {row.reason}" for row in rows if row.reason is not None)
    return {
        **report,
        "seen_rows": None if seen_rows is None else seen_rows.count_by_split(),
        "excluded_rows": excluded_rows,
        **({"left_out_rows": counts.left_out} if counts.left_out else {}),
        "bad_rows": len(rows) - len(usable_rows),
        "bad_row_examples": list(itertools.islice(row_problems, MAX_EXAMPLES)),
        "truncated_rows": sum(row.is_truncated for row in encoded_rows.encoded),
        "unknown_labels": {
            "rows": int(encoded_rows.has_unknown_label.sum()),
            "examples": list_unknown_labels(usable_rows, encoded_rows),
        },
        "rows_per_second": round(len(usable_rows) / seconds, 1),
    }


def score_running_text(
    predictor: Predictor, words: Sequence[Sequence[str]], tags: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Precision, recall and F1 of entities in rows whose words are joined as running text.

    The text is split again like requests (`rtrain.core.text_segmentation.join_words`). An entity is right if its type
    and its first and last character are."""
    joined_rows = [join_words(row) for row in words]
    answers = predictor([text for text, _ in joined_rows])
    num_correct = num_predicted = num_expected = 0
    for (_, spans), row, answer in zip(joined_rows, tags, answers, strict=True):
        expected_entities = {
            (entity.type, spans[entity.start][0], spans[entity.end - 1][1]) for entity in extract_entities(row)
        }
        predicted_entities = {(entity["entity_group"], entity["start"], entity["end"]) for entity in answer}
        num_correct += len(expected_entities & predicted_entities)
        num_predicted += len(predicted_entities)
        num_expected += len(expected_entities)
    ratios = {
        "precision": (num_correct, num_predicted),
        "recall": (num_correct, num_expected),
        "f1": (2 * num_correct, num_predicted + num_expected),
    }
    return {name: above / below if below else 0.0 for name, (above, below) in ratios.items()}


def describe_rows(report: Mapping[str, Any], data: DataConfig, labels: Sequence[str]) -> Iterator[str]:
    """Yield lines about a report's rows: excluded, seen in training, bad, with unknown labels. `labels`: the
    artifact's."""
    if excluded_rows := report["excluded_rows"]:
        splits = " and ".join(f"{rows:,} {split}" for split, rows in excluded_rows.items())
        hint = "; --set data.split_column=null scores all" if data.split_column else ""
        yield f"{splits} rows are excluded: only test rows are scored{hint}"
    if left_out_rows := report.get("left_out_rows"):
        yield f"{left_out_rows:,} rows are left out by data.where; --set data.where=null scores them too"
    seen_rows = report["seen_rows"]
    if seen_rows is None:
        yield "unknown whether the model was trained on these rows: its run's token store is missing"
    elif "unseen" in report:
        unseen_report, headline = report["unseen"], report["headline"]
        yield (
            f"WARNING: {seen_rows['train']:,} of the {report['rows']:,} rows are training rows of the model, and "
            f"{seen_rows['valid']:,} are validation rows: the scores above say little about new rows"
        )
        score = (
            f"{headline} {unseen_report['scores'][headline]:.4f}" if headline in unseen_report["scores"] else "no score"
        )
        yield f"the {unseen_report['rows']:,} rows that the model has not seen: {score}"
    bad_examples = "".join(f"; {example}" for example in report["bad_row_examples"])
    truncated_text = f", {report['truncated_rows']:,} truncated rows" if report["truncated_rows"] else ""
    yield f"{report['bad_rows']} bad rows{bad_examples}{truncated_text}, {report['rows_per_second']} rows/s"
    if num_unknown := report["unknown_labels"]["rows"]:
        examples = " and ".join(report["unknown_labels"]["examples"])
        row_text = f"{num_unknown} row{'' if num_unknown == 1 else 's'}"
        label_list = checks.format_labels(labels)
        yield f"labels that the artifact lacks, in {row_text}, such as {examples}; it has {label_list}"


def read_scored_rows(
    source: row_reader.DataSource, data: DataConfig, task: Task, counts: row_reader.ReadCounts | None = None
) -> tuple[list[SourceRow], dict[str, int]]:
    """Return (rows of a file, number of excluded rows by split). A row that the task cannot use has a reason. Where the
    file or a column names splits, valid rows of splits other than test are excluded. `counts` counts the rows read.

    Raises `ConfigError` if splits are named and no row is a test row.
    """
    has_splits = data.split_column is not None or source.has_test
    rows: list[SourceRow] = []
    excluded_rows: Counter[str] = Counter()
    for source_file in source.files:
        for record in (
            _validate_record(record, task) for record in row_reader.read_rows(source_file, data, counts=counts)
        ):
            split = record.split or source_file.role
            if has_splits and record.reason is None and split != "test":
                excluded_rows[split] += 1
            else:
                rows.append(record)
    if excluded_rows and all(record.reason is not None for record in rows):
        fix = "name another file, or write --set data.split_column=null to score all rows"
        problem = Problem("data.split_column", data.split_column, "no row is a test row", fix, code="no_test_rows")
        raise ConfigError([problem])
    return rows, dict(excluded_rows)


def find_training_store(folder: Path, artifact: Artifact, sibling_store: Store | None = None) -> Store | None:
    """Return the token store that an artifact was trained from, if its run folder and the store still exist, or if the
    store lies beside `sibling_store`."""
    run, digest = Run(folder.parent), artifact.lineage.get("data_digest")
    candidate_folders = [
        run.token_store if run.exists else None,
        None if sibling_store is None else sibling_store.folder.with_name(str(digest)),
    ]
    for candidate in candidate_folders:
        if (
            candidate is not None
            and (candidate / "manifest.json").is_file()
            and open_store(candidate).manifest.digest == digest
        ):
            return open_store(candidate)
    return None


class SeenRows(NamedTuple):
    """Masks of rows that a model has seen: `train` rows for training, `valid` rows for choosing weights and thresholds.
    No row is both."""

    train: npt.NDArray[np.bool_]
    valid: npt.NDArray[np.bool_]

    @property
    def in_train_or_valid(self) -> npt.NDArray[np.bool_]:
        return self.train | self.valid

    def count_by_split(self) -> dict[str, int]:
        return {split: int(mask.sum()) for split, mask in self._asdict().items()}


def find_seen_rows(store: Store | None, rows: Sequence[SourceRow]) -> SeenRows | None:
    """Return the rows whose texts are training or validation rows of a store; None without the store or its text
    keys."""
    if store is None or not all(len(store.text_keys(split)) == store.num_rows(split) for split in SeenRows._fields):
        return None
    keys = np.array([splits.compute_text_key(row) for row in rows], np.uint64)
    train, valid = (splits.find_in_training_set([store.text_keys(split)], keys) for split in SeenRows._fields)
    return SeenRows(train, valid & ~train)


def select_usable_rows(rows: Sequence[SourceRow], data: DataConfig) -> list[SourceRow]:
    """Return the valid rows. Raises `ConfigError` without any, with the problem of the first row."""
    usable_rows = [row for row in rows if row.reason is None]
    if not usable_rows:
        first_problem = f" (line {rows[0].line}: {rows[0].reason})" if rows else ""
        reason, fix = f"no row can be used{first_problem}", "give rows with text and label"
        raise ConfigError([Problem("data.path", data.path, reason, fix, code="no_rows")])
    return usable_rows


def make_input(task: Task, row: SourceRow) -> Input:
    """Return the input of a row: its text, or its two texts by name."""
    return row.text if row.pair is None else dict(zip(task.fields, (row.text, row.pair), strict=True))


class EncodedRows(NamedTuple):
    """Rows encoded for an artifact."""

    inputs: list[Input]
    encoded: list[EncodedRow]
    tokens: TokenBatch
    """Tokens with the targets known to the artifact."""
    targets: RaggedArray
    """Targets by `head`."""
    has_unknown_label: npt.NDArray[np.bool_]
    """Rows with a label unknown to the artifact."""
    head: Head
    """The artifact's head. For answers of several labels or tags, labels of the rows alone are appended, so that
    missing labels count as wrong."""
    unknown_labels: tuple[str, ...]
    """The appended labels."""

    def align_row_results(self, task: Task, row_results: RaggedArray) -> RaggedArray:
        """Return the row results by `head`."""
        if task.output != "labels":
            return row_results
        known_results = row_results.to_matrix(len(self.head.labels) - len(self.unknown_labels))
        return RaggedArray.from_matrix(
            np.pad(known_results, ((0, 0), (0, len(self.unknown_labels))), constant_values=MISSING_LABEL_LOGIT)
        )


def encode_rows(predictor: Predictor, rows: Sequence[SourceRow]) -> EncodedRows:
    """Tokens and targets of rows without flaw, by the artifact's own tokenizer and labels."""
    task = predictor.task
    inputs = [make_input(task, row) for row in rows]
    encoded = predictor.encode(inputs)
    target_positions = [
        task.target_positions(row.text, row.pair, row.label, one) for row, one in zip(rows, encoded, strict=True)
    ]
    labels, ragged_positions = [row.label for row in rows], RaggedArray.from_rows(target_positions, np.int32)
    targets, has_unknown_label = task.build_targets(labels, ragged_positions, predictor.head)
    tokens = replace(collate(encoded), targets=targets.values, targets_per_row=targets.counts)
    head, unknown_labels = predictor.head, tuple[str, ...]()
    if task.output in ("labels", "tags") and has_unknown_label.any():
        all_labels = task.build_head(Counter(labels), predictor.tokenizer).labels
        unknown_labels = tuple(name for name in all_labels if name not in head.labels)
        head = replace(head, labels=(*head.labels, *unknown_labels))
        targets = task.build_targets(labels, ragged_positions, head).values
    return EncodedRows(inputs, encoded, tokens, targets, has_unknown_label, head, unknown_labels)


def list_unknown_labels(rows: Sequence[SourceRow], encoded_rows: EncodedRows) -> list[str]:
    """Labels that the artifact lacks; whole labels of rows where an answer has one label, or one for each head."""
    unknown_labels = encoded_rows.unknown_labels or dict.fromkeys(
        rows[row].label for row in np.flatnonzero(encoded_rows.has_unknown_label).tolist()
    )
    return [quote_value(label) for label in itertools.islice(unknown_labels, MAX_EXAMPLES)]


def _validate_record(record: SourceRow, task: Task) -> SourceRow:
    """The record; with the task's reason where the task cannot use it."""
    if record.reason is not None:
        return record
    return record._replace(reason=validate_task_row(task, record.text, record.pair, record.label))
