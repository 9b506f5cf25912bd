"""Scores of an artefact through the path that answers requests, on a token store's split or on a file."""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rtrain.config import Data, parse
from rtrain.core.errors import ConfigError, Problem, quoted
from rtrain.core.ragged import Encoded, Floats, Head, Int32s, Ints, Ragged, Tokens, batches, pack
from rtrain.core.run_folder import Run
from rtrain.core.text_segmentation import join_words
from rtrain.data import contamination, quarantine, row_reader
from rtrain.data.row_reader import Record
from rtrain.data.sources import find
from rtrain.data.store.store import Store, open_store
from rtrain.inference.artifact import Artifact
from rtrain.inference.predictor import BATCH_ROWS, MOST_TOKENS, Predictor
from rtrain.metrics.entities import entities
from rtrain.metrics.registry import metric_for
from rtrain.metrics.scores import measure, without
from rtrain.tasks.base import Input, Task, flaw_of
from rtrain.tasks.token_tags import tags_of
from rtrain.trainer.evaluate import SEED

ABSENT = -100.0
"""Logit of a label that a side lacks."""
MASKED_TOKENS = 1 << 11
"""Most tokens of an engine call on masked text: one of XLM-R's 250,000 pieces takes a megabyte for each of them."""
RUNNING_ROWS = 2000
"""Most rows that are answered a second time, as running text."""
EXAMPLES = 3
"""Most labels that are named of those that an artefact lacks, and most bad rows."""


@dataclass(frozen=True)
class Answered:
    """Rows in the order that was asked for."""

    outputs: list[Floats]
    """Empty where they were not to be kept."""
    outcomes: Ragged


def on_split(
    predictor: Predictor, store: Store, split: str, rows: Ints, batch_rows: int = BATCH_ROWS, *, keep: bool = True
) -> Answered:
    """The answers to the rows at the positions `rows`; neighbours in length share a batch. `keep` as `answer` has
    it."""
    lengths = store.column(split, "length")[rows]
    return answer(predictor, lengths, lambda places: store.read(split, rows[places]), batch_rows, keep=keep)


def scores(predictor: Predictor, answered: Answered, store: Store, split: str = "test") -> dict[str, float]:
    """The scores of answers to all rows of a split, in index order."""
    return metric_for(predictor.task.output).scores(answered.outcomes, store.targets(split), predictor.head)


def answer(
    predictor: Predictor,
    lengths: Int32s,
    read: Callable[[Ints], Tokens],
    batch_rows: int = BATCH_ROWS,
    *,
    keep: bool = True,
) -> Answered:
    """The answers to rows of these lengths; `read` gives the tokens of those at some places. Outputs are not kept
    without `keep`: of masked text a row has one for each piece of the vocabulary and each mask, a megabyte and more."""
    task, head = predictor.task, predictor.head
    outputs: dict[int, Floats] = {}
    outcomes: dict[int, Any] = {}
    most = MOST_TOKENS if keep else MASKED_TOKENS
    for places in batches(lengths, np.argsort(lengths, kind="stable"), batch_rows, most):
        tokens = task.prepare(read(places), head, SEED, 0)
        found = task.outputs(predictor.run_tokens(tokens), tokens, head)
        if keep:
            outputs.update(zip(places.tolist(), found, strict=True))
        outcomes.update(zip(places.tolist(), task.outcomes(found, tokens, head), strict=True))
    rows = range(len(lengths))
    return Answered(
        [outputs[row] for row in rows] if keep else [], Ragged.of([outcomes[row] for row in rows], np.float64)
    )


def settings(made: Artifact, overrides: Mapping[str, Any]) -> Data:
    """How a file is read for an artefact: as its own training rows were, but for what `overrides` and its name say."""
    data = dict(made.data)
    if find.tells_format(str(overrides.get("data.path", ""))):
        data["format"] = None
    data["split"] = data["split_by"] = None  # nothing is split
    document = {"name": made.name, "task": made.task, "data": data}
    return parse(document, overrides).recipe.data


def settings_for_scores(made: Artifact, overrides: Mapping[str, Any]) -> Data:
    """As `settings`, for rows that are scored: where the file has the column that split the training run, it says here
    too which rows are test rows."""
    data, column = settings(made, overrides), made.data.get("split")
    if column is None or "data.split" in overrides or column not in row_reader.inspect(data).columns:
        return data
    return data.model_copy(update={"split": column})


def run(folder: Path, data: Data) -> dict[str, Any]:
    """Answer the rows of a file, and score the answers. A label that the artefact lacks is one that it never gives: the
    row is wrong, whatever is answered.

    The report is as `rtrain.metrics.scores` has it of a run's splits, `unseen` where rows are training or validation
    rows; `seen`: how many of the rows are `train` and `valid` rows of the artefact, None where that is not known;
    `left_out`: rows of other splits than the test, by split; `bad_rows`, which could not be read, and
    `bad_row_examples` of them; `cut_rows`, which are longer than what the artefact reads; `unknown_labels`: how many
    `rows` have a label that the artefact lacks, and `examples` of such labels; `rows_per_second`.
    """
    source = row_reader.inspect(data)
    predictor = Predictor.load(folder)
    task = predictor.task
    rows, left_out = rows_of(source, data, task)
    good = sound_rows(rows, data)
    seen = find_seen_rows(trained_from(folder, predictor.artifact), good)
    start = time.perf_counter()
    asked = ask(predictor, good)
    tokens, targets = asked.tokens, asked.targets
    lengths, has_answers = tokens.lengths_of_rows, task.output != "tokens"
    answered = answer(predictor, lengths, tokens.pick, keep=has_answers)
    seconds = time.perf_counter() - start
    columns = {name: [row.slices[place] for row in good] for place, name in enumerate(data.slices)}
    outcomes = asked.outcomes(task, answered.outcomes)
    found = measure(task, asked.head, "file", outcomes, targets, lengths, columns)
    if has_answers:
        answers = task.decode(answered.outputs, asked.inputs, asked.encoded, predictor.head, {})
        found["scores"] |= task.judge(answers, [row.label for row in good])
    if task.output == "tags":
        some = good[:RUNNING_ROWS]
        words = [row.text.split(" ") for row in some]
        own = score_running_text(predictor, words, [tags_of(row.label) for row in some])
        found["scores"] |= {f"running_text_{name}": value for name, value in own.items()}
    if seen is not None and seen.either.any():
        found["unseen"] = without(task, asked.head, outcomes, targets, seen.either)
    flaws = (f"line {row.line}: {row.reason}" for row in rows if row.reason is not None)
    return {
        **found,
        "seen": None if seen is None else seen.counts(),
        "left_out": left_out,
        "bad_rows": len(rows) - len(good),
        "bad_row_examples": list(itertools.islice(flaws, EXAMPLES)),
        "cut_rows": sum(row.truncated for row in asked.encoded),
        "unknown_labels": {"rows": int(asked.unknown.sum()), "examples": examples(good, asked)},
        "rows_per_second": round(len(good) / seconds, 1),
    }


def score_running_text(
    predictor: Predictor, words: Sequence[Sequence[str]], tags: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Precision, recall and F1 of entities in rows whose words are joined as running text.

    The text is cut again as requests are (`rtrain.core.text_segmentation.join_words`). An entity is right if its type
    and both its characters, first and last, are."""
    joined = [join_words(row) for row in words]
    answers = predictor([text for text, _ in joined])
    right = given = true = 0
    for (_, spans), row, answer in zip(joined, tags, answers, strict=True):
        wanted = {(one.type, spans[one.start][0], spans[one.end - 1][1]) for one in entities(row)}
        have = {(one["entity_group"], one["start"], one["end"]) for one in answer}
        right, given, true = right + len(wanted & have), given + len(have), true + len(wanted)
    parts = {"precision": (right, given), "recall": (right, true), "f1": (2 * right, given + true)}
    return {name: above / below if below else 0.0 for name, (above, below) in parts.items()}


def describe_rows(report: Mapping[str, Any], data: Data, labels: Sequence[str]) -> Iterator[str]:
    """Lines about the rows behind a report's scores: left out, seen in training, bad, with unknown labels. `labels`:
    the artifact's."""
    if left := report["left_out"]:
        splits = " and ".join(f"{rows:,} {split}" for split, rows in left.items())
        every = "; --set data.split=null scores all" if data.split else ""
        yield f"{splits} rows are left out: the test rows alone are scored{every}"
    seen = report["seen"]
    if seen is None:
        yield "whether the model was trained on these rows is not known: its run's token store is not here"
    elif "unseen" in report:
        unseen, headline = report["unseen"], report["headline"]
        yield (
            f"WARNING: {seen['train']:,} of the {report['rows']:,} rows are training rows of the model, and "
            f"{seen['valid']:,} are validation rows: the scores above say little about new rows"
        )
        score = f"{headline} {unseen['scores'][headline]:.4f}" if headline in unseen["scores"] else "no score"
        yield f"the {unseen['rows']:,} rows that the model has not seen: {score}"
    bad = "".join(f"; {example}" for example in report["bad_row_examples"])
    cut = f", {report['cut_rows']:,} cut rows" if report["cut_rows"] else ""
    yield f"{report['bad_rows']} bad rows{bad}{cut}, {report['rows_per_second']} rows/s"
    if rows := report["unknown_labels"]["rows"]:
        examples = " and ".join(report["unknown_labels"]["examples"])
        where = f"{rows} row{'' if rows == 1 else 's'}"
        known = quarantine.list_labels(labels)
        yield f"labels that the artefact lacks, in {where}, such as {examples}; it has {known}"


def rows_of(source: row_reader.Source, data: Data, task: Task) -> tuple[list[Record], dict[str, int]]:
    """(rows of a file, how many good ones are left out by split). A row that the task cannot use has the reason. Where
    the file or a column names splits, good rows of other splits than the test are left out.

    Raises `ConfigError` where splits are named and no row is a test row.
    """
    named = data.split is not None or source.has_test
    rows: list[Record] = []
    left_out: Counter[str] = Counter()
    for piece in source.pieces:
        for record in (_with_flaw(record, task) for record in row_reader.read(piece, data)):
            split = record.split or piece.role
            if named and record.reason is None and split != "test":
                left_out[split] += 1
            else:
                rows.append(record)
    if left_out and all(record.reason is not None for record in rows):
        reason, fix = "no row is a test row", "name another file, or write --set data.split=null to score all rows"
        raise ConfigError([Problem("data.split", data.split, reason, fix, code="no_test_rows")])
    return rows, dict(left_out)


def trained_from(folder: Path, made: Artifact, beside: Store | None = None) -> Store | None:
    """The token store that an artefact was trained from, where its run lies around it and the store is still there; or
    where it lies beside another one."""
    run, digest = Run(folder.parent), made.lineage.get("data_digest")
    places = [run.store if run.exists else None, None if beside is None else beside.folder.with_name(str(digest))]
    for place in places:
        if place is not None and (place / "manifest.json").is_file() and open_store(place).manifest.digest == digest:
            return open_store(place)
    return None


class Seen(NamedTuple):
    """Which of some rows a model has learned from: it was trained on `train`, and its weights and thresholds were
    chosen by `valid`. No row is both."""

    train: npt.NDArray[np.bool_]
    valid: npt.NDArray[np.bool_]

    @property
    def either(self) -> npt.NDArray[np.bool_]:
        return self.train | self.valid

    def counts(self) -> dict[str, int]:
        return {split: int(mask.sum()) for split, mask in self._asdict().items()}


def find_seen_rows(store: Store | None, rows: Sequence[Record]) -> Seen | None:
    """Rows whose texts are training or validation rows of a store; None where it is gone, or kept no keys of texts."""
    if store is None or not all(len(store.keys(split)) == store.rows(split) for split in Seen._fields):
        return None
    keys = np.array([contamination.key(row) for row in rows], np.uint64)
    train, valid = (contamination.seen([store.keys(split)], keys) for split in Seen._fields)
    return Seen(train, valid & ~train)


def sound_rows(rows: Sequence[Record], data: Data) -> list[Record]:
    """The rows that can be used. Raises `ConfigError` where there are none, with what is wrong with the first."""
    sound = [row for row in rows if row.reason is None]
    if not sound:
        first = f" (line {rows[0].line}: {rows[0].reason})" if rows else ""
        problem = Problem(
            "data.path",
            data.path,
            f"no row can be used{first}",
            "give rows with text and label",
            code="no_rows",
        )
        raise ConfigError([problem])
    return sound


class Asked(NamedTuple):
    """Rows as an artefact reads them."""

    inputs: list[Input]
    encoded: list[Encoded]
    tokens: Tokens
    """With their targets, as far as the artefact has them."""
    targets: Ragged
    """By `head`."""
    unknown: npt.NDArray[np.bool_]
    """Rows with a label that the artefact lacks."""
    head: Head
    """The artefact's. Where an answer is several labels, or tags, those that the rows alone have stand behind its own:
    what is missing of a row's answer must count."""
    strange: tuple[str, ...]
    """Those labels."""

    def outcomes(self, task: Task, outcomes: Ragged) -> Ragged:
        """Outcomes by `head`."""
        if task.output != "labels":
            return outcomes
        own = outcomes.matrix(len(self.head.labels) - len(self.strange))
        return Ragged.even(np.pad(own, ((0, 0), (0, len(self.strange))), constant_values=ABSENT))


def ask(predictor: Predictor, rows: Sequence[Record]) -> Asked:
    """Tokens and targets of rows without flaw, by the artefact's own tokenizer and labels."""
    task = predictor.task
    inputs: list[Input] = [
        dict(zip(task.fields, (row.text, row.pair), strict=True)) if row.pair is not None else row.text for row in rows
    ]
    encoded = predictor.encode(inputs)
    marks = [task.marks(row.text, row.pair, row.label, one) for row, one in zip(rows, encoded, strict=True)]
    labels, at = [row.label for row in rows], Ragged.of(marks, np.int32)
    targets, unknown = task.targets(labels, at, predictor.head)
    tokens = replace(pack(encoded), targets=targets.values, counts=targets.counts)
    head, strange = predictor.head, tuple[str, ...]()
    if task.output in ("labels", "tags") and unknown.any():
        every = task.head(Counter(labels), predictor.tokenizer).labels
        strange = tuple(name for name in every if name not in head.labels)
        head = replace(head, labels=(*head.labels, *strange))
        targets = task.targets(labels, at, head).values
    return Asked(inputs, encoded, tokens, targets, unknown, head, strange)


def examples(rows: Sequence[Record], asked: Asked) -> list[str]:
    """Labels that the artefact lacks; whole labels of rows where an answer has one label, or one for each head."""
    found = asked.strange or dict.fromkeys(rows[row].label for row in np.flatnonzero(asked.unknown).tolist())
    return [quoted(label) for label in itertools.islice(found, EXAMPLES)]


def _with_flaw(record: Record, task: Task) -> Record:
    """The record; with the task's reason where the task cannot use it."""
    if record.reason is not None:
        return record
    return record._replace(reason=flaw_of(task, record.text, record.pair, record.label))
