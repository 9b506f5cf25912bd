"""The same rows, answered by both sides: each reads them by its own tokenizer and answers through its own engine.

Rows come from a file, or from the token stores of the runs that the sides are of. A store holds tokens: each side gets
those that it was trained from, as long as it still has the tokenizer that made them. Rows of two stores are joined by
their ids. A side without a store of its own reads the texts that the other one's has kept, so that a wrong tokenizer
shows in the score.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rtrain.config import Data
from rtrain.core.errors import ConfigError, Problem, UserError, quoted
from rtrain.core.ragged import Encoded, Head, Int32s, Ints, Ragged, Tokens, pack
from rtrain.data import contamination, row_reader
from rtrain.data.row_reader import Record
from rtrain.data.sources import digests
from rtrain.data.store.store import Store
from rtrain.evaluation import significance
from rtrain.evaluation.differences import Flipped, Slice, count_flips, slices
from rtrain.evaluation.row_scores import keep_scores
from rtrain.evaluation.significance import Difference
from rtrain.inference import score
from rtrain.inference.artifact import Artifact
from rtrain.inference.predictor import Predictor
from rtrain.metrics import per_class
from rtrain.metrics.registry import ACCURACY_WITH_REFUSALS, metric_for
from rtrain.metrics.scores import LENGTH
from rtrain.metrics.slices import quantiles
from rtrain.report.stats import sample
from rtrain.trainer.evaluate import SEED

MOST_ROWS = 10_000
"""Rows of a store that are answered; of more, so many are drawn, always the same ones."""
Answers = tuple[score.Answered, score.Answered]
"""The base's and the candidate's."""


@dataclass(frozen=True, eq=False)
class Side:
    """What one side made of the rows."""

    predictor: Predictor
    tokens: Tokens
    answered: score.Answered
    targets: Ragged
    head: Head
    """What outcomes and targets mean."""
    unknown: npt.NDArray[np.bool_]

    def asker(self, rows: Iterable[int]) -> Callable[[int], object]:
        """What answers one of these rows alone, from its tokens on: what a request costs without tokenizer and HTTP."""
        task, head = self.predictor.task, self.predictor.head
        alone = {row: task.prepare(self.tokens.pick([row]), head, SEED, 0) for row in rows}

        def ask(row: int) -> object:
            tokens = alone[row]
            return task.outputs(self.predictor.run_tokens(tokens), tokens, head)

        return ask


@dataclass(frozen=True, eq=False)
class Both:
    """Both sides' answers to the same rows."""

    base: Side
    candidate: Side
    columns: Mapping[str, Sequence[str | None]]
    """Values of each row by column: what slices are made of."""
    source: str
    """Where the rows come from."""
    otherwise: int = 0
    """Rows that the candidate reads as other tokens than its base does."""
    trained_on: int | None = 0
    """Rows that were left out since the candidate was trained on them, and of a file those of its base and the
    validation rows of both too; None where the stores do not tell."""

    @property
    def lengths(self) -> Int32s:
        """Tokens of each row, as the base reads it."""
        return self.base.tokens.lengths_of_rows

    @property
    def texts(self) -> list[str]:
        """The rows as the base's tokens spell them."""
        tokens = self.base.tokens
        each = [row.tolist() for row in Ragged(tokens.ids, tokens.lengths_of_rows)]
        found: list[str] = self.base.predictor.tokenizer.decode_batch(each)
        return found


class Unequal(UserError):
    """The candidate does not answer the question that its base answers, or not in a way that can be judged."""


# --------------------------------------------------------------------------------------------------------- answering


def of_file(base: Predictor, candidate: Predictor, data: Data, stores: Sequence[Store] = ()) -> Both:
    """Both sides on the test rows of a file without those that one of them has learned from, as far as `stores` tell.
    Raises `ConfigError` where no row is left, or none can be judged: of two models without one right answer, none
    would be worse."""
    _same_task(base, candidate)
    rows, _ = score.rows_of(row_reader.inspect(data), data, base.task)
    good = score.sound_rows(rows, data)
    seen = _seen((base.artifact, candidate.artifact), stores, good)
    if seen is not None:
        good = [row for row, is_seen in zip(good, seen.tolist(), strict=True) if not is_seen]
        if not good:
            reason = f"each of its {len(seen):,} rows is a training or validation row of the two models"
            fix = "name rows that neither has seen, or leave --data out to take the run's test rows"
            raise ConfigError([Problem("data.path", data.path, reason, fix, code="no_unseen_rows")])
    columns = {name: [row.slices[place] for row in good] for place, name in enumerate(data.slices)}

    def side(predictor: Predictor) -> Side:
        asked = score.ask(predictor, good)
        if asked.unknown.all() and not asked.strange:
            known = " and ".join(quoted(label) for label in predictor.head.labels[: score.EXAMPLES])
            theirs = " and ".join(score.examples(good, asked))
            reason = f"each row has a label that the model lacks, such as {theirs}; the model's are such as {known}"
            raise ConfigError(
                [Problem("data.label", data.label, reason, "name the column that has them", code="other_labels")]
            )
        answered = score.answer(predictor, asked.tokens.lengths_of_rows, asked.tokens.pick, keep=_keeps(predictor))
        answered = replace(answered, outcomes=asked.outcomes(base.task, answered.outcomes))
        return Side(predictor, asked.tokens, answered, asked.targets, asked.head, asked.unknown)

    first, other = side(base), side(candidate)
    trained_on = None if seen is None else int(seen.sum())
    otherwise = _otherwise(first.tokens, other.tokens)
    return Both(first, other, columns, str(data.path), otherwise, trained_on)


class Reading(NamedTuple):
    """What decides which tokens a text becomes; sides of which it is equal read alike."""

    tokenizer: str
    """Digest of tokenizer.json."""
    max_tokens: int
    stride: int | None
    max_windows: int | None

    @classmethod
    def of(cls, folder: Path, made: Artifact) -> "Reading":
        return cls(
            digests.tokenizer_digest(folder), made.max_tokens, made.facts.get("stride"), made.facts.get("max_windows")
        )


class Rows(NamedTuple):
    """Rows of a store as a side reads them."""

    tokens: Tokens
    targets: Ragged
    head: Head
    """What the targets mean."""


def of_store(
    base: Predictor,
    candidate: Predictor,
    stores: Sequence[Store],
    split: str,
    readings: tuple[Reading, Reading],
    known: Answers | None = None,
    among: Ints | None = None,
) -> Both:
    """Both sides on the rows of a split. The first of `stores` says which rows these are; the others hold the same rows
    as other tokenizers read them. `readings`: the base's and the candidate's.

    `known`: the base's and the candidate's answers to all rows of the split; they are asked anew where rows are drawn.
    `among`: positions, in the first store, of the rows that count; else all do.

    Rows on which the candidate alone was trained are left out (`_unseen`). Raises `Unequal` where its
    labels, or its tokens, cannot be set beside those of the rows.
    """
    _same_task(base, candidate)
    store, alike = stores[0], readings[0] == readings[1]
    every = np.arange(store.rows(split), dtype=np.int64) if among is None else among
    left, trained_on = _unseen(candidate.artifact, stores, split, every)
    positions = left[sample(len(left), MOST_ROWS)]
    asked = len(positions)
    own = [_own(side, reading, stores) for side, reading in zip((base, candidate), readings, strict=True)]
    numbers: Ints | None = None
    if alike:
        rows = (_rows(store, split, positions),) * 2
    elif joined := _joined(split, positions, store, own):
        rows, positions = joined
        numbers = _numbers(candidate, base)  # each has the numbers of its own vocabulary
    else:
        rows, positions = _read_anew((base, candidate), split, positions, store, own)
    usable = known if alike and known and len(known[0].outputs) == len(positions) == store.rows(split) else None

    def side(predictor: Predictor, mine: Rows) -> Side:
        if usable is None:
            answered = score.answer(predictor, mine.tokens.lengths_of_rows, mine.tokens.pick, keep=_keeps(predictor))
        else:
            answered = usable[0 if predictor is base else 1]
        head, answered = _by_name(predictor, answered, mine.head, (base, candidate))
        return Side(predictor, mine.tokens, answered, mine.targets, head, np.zeros(len(positions), dtype=np.bool_))

    columns = {name: values.take(positions).to_pylist() for name, values in store.slices(split).items()}
    otherwise = 0 if alike else _otherwise(rows[0].tokens, rows[1].tokens, numbers)
    source = f"{split} rows of the run" if among is None else f"held-back {split} rows"
    fewer = f", of {asked:,}: both sides' stores have these" if len(positions) < asked else ""
    return Both(side(base, rows[0]), side(candidate, rows[1]), columns, source + fewer, otherwise, trained_on)


def _keeps(side: Predictor) -> bool:
    """Whether its outputs are kept: a masked word's are a number for each piece of the vocabulary, and what is judged
    are their outcomes."""
    return side.task.output != "tokens"


def _same_task(base: Predictor, candidate: Predictor) -> None:
    if base.artifact.task != candidate.artifact.task:
        raise Unequal(
            f"it answers by the task {candidate.artifact.task}, its base by {base.artifact.task}", code="other_task"
        )


def _otherwise(one: Tokens, other: Tokens, numbers: Ints | None = None) -> int:
    """Rows that are other tokens; `numbers`: what those of the other side are called by the first one's vocabulary."""
    ids = other.ids if numbers is None else numbers[other.ids]
    pairs = zip(Ragged(one.ids, one.lengths_of_rows), Ragged(ids, other.lengths_of_rows), strict=True)
    return sum(not np.array_equal(a, b) for a, b in pairs)


def _numbers(side: Predictor, other: Predictor) -> Ints:
    """The number that each piece of a side's vocabulary has in another one's; -1 where it has none."""
    own, known = side.tokenizer.get_vocab(), other.tokenizer.get_vocab()
    found = np.full(max(own.values()) + 1, -1, dtype=np.int64)
    for piece, number in own.items():
        found[number] = known.get(piece, -1)
    return found


# ------------------------------------------------------------------------------------------------------------ reading


def _rows(store: Store, split: str, positions: Ints) -> Rows:
    return Rows(store.read(split, positions), store.targets(split, positions), store.manifest.head)


def _own(side: Predictor, reading: Reading, stores: Sequence[Store]) -> Store | None:
    """The store that a side was trained from, where its tokenizer is the one that made it."""
    for one in stores:
        trained = side.artifact.lineage.get("data_digest") == one.manifest.digest
        if trained and reading.tokenizer in one.manifest.sources.get("tokenizer", {}).values():
            return one
    return None


def _joined(
    split: str, positions: Ints, store: Store, own: Sequence[Store | None]
) -> tuple[tuple[Rows, Rows], Ints] | None:
    """(the rows of both sides, each by its own store; their positions in `store`). None where a side has no store of
    its own, or these hold none of the rows."""
    first, other = own
    if first is None or other is None:
        return None
    wanted = store.column(split, "row_id")[positions]
    places = [_places(one.column(split, "row_id"), wanted) for one in (first, other)]
    found = (places[0] >= 0) & (places[1] >= 0)
    if not found.any():
        return None
    return (_rows(first, split, places[0][found]), _rows(other, split, places[1][found])), positions[found]


def _places(ids: npt.NDArray[np.uint64], wanted: npt.NDArray[np.uint64]) -> Ints:
    """Where each of `wanted` stands in `ids`; -1 where it does not."""
    if not len(ids):
        return np.full(len(wanted), -1, dtype=np.int64)
    order = np.argsort(ids, kind="stable")
    places = order[np.minimum(np.searchsorted(ids[order], wanted), len(ids) - 1)]
    return np.where(ids[places] == wanted, places, -1)


def _read_anew(
    sides: tuple[Predictor, Predictor], split: str, positions: Ints, store: Store, own: Sequence[Store | None]
) -> tuple[tuple[Rows, Rows], Ints]:
    """(the rows of both sides, their positions in `store`): one side has the tokens of its store, the other one reads
    the texts that are kept there."""
    made = [side.artifact.lineage.get("data_digest") == store.manifest.digest for side in sides]
    maker = 0 if own[0] is not None or (own[1] is None and made[0]) else 1
    if (theirs := own[maker]) is not None and theirs is not store:
        places = _places(theirs.column(split, "row_id"), store.column(split, "row_id")[positions])
        positions, store, places = positions[places >= 0], theirs, places[places >= 0]
    else:
        places = positions
    whole = _rows(store, split, places)
    anew, kept = _reread(sides[1 - maker], sides[maker], store.texts(split, places), whole.tokens)
    mine = whole._replace(tokens=whole.tokens.pick(kept), targets=whole.targets.take(kept))
    both = (mine, mine._replace(tokens=anew))
    return (both if maker == 0 else both[::-1]), positions[kept]


def _reread(
    side: Predictor, maker: Predictor, texts: Sequence[tuple[str, str | None] | None], tokens: Tokens
) -> tuple[Tokens, Ints]:
    """(the rows as `side` reads their texts, places of those whose text is whole). Text is known to be whole where the
    store's maker makes the store's tokens of it."""
    kept, mine = [], []
    for place, text in enumerate(texts):
        if text is None:
            continue
        first, second = text
        asked = first if second is None else dict(zip(side.task.fields, (first, second), strict=True))
        if maker.flaw(asked) is None and np.array_equal(maker.encode([asked])[0].ids, tokens.pick([place]).ids):
            kept.append(place)
            mine += side.encode([asked])
    if not kept:
        raise Unequal(
            "it reads texts otherwise than its base, and the run keeps no whole text; name rows by --data",
            code="other_tokenizer",
        )
    rest = tokens.pick(kept)
    _aligned(side, mine, rest)
    made = pack(mine)
    return replace(made, targets=rest.targets, counts=rest.counts, row_ids=rest.row_ids), np.array(kept)


def _aligned(side: Predictor, mine: Sequence[Encoded], rest: Tokens) -> None:
    """Refuse tokens at other places where the targets are places."""
    if side.task.by_token or side.task.output == "spans":
        lengths = [window.tokens for row in mine for window in row.windows]
        if not np.array_equal(lengths, rest.lengths):
            raise Unequal(
                "it cuts texts into other tokens than its base, and answers are places in them", code="other_tokenizer"
            )


def _by_name(
    predictor: Predictor, answered: score.Answered, head: Head, sides: Sequence[Predictor]
) -> tuple[Head, score.Answered]:
    """(head, answers) with labels in the store's order, and behind them those that only one of the sides has."""
    own = predictor.head
    if predictor.task.output != "classes":  # of classes each label is a column, so that another order can be undone
        if own.labels != head.labels:
            raise Unequal(
                f"its labels, or their order, are others than those of the rows: {_apart(own, head)}",
                code="other_labels",
            )
        return Head(own.labels, own.facts), answered
    names = [*head.labels, *sorted({name for side in sides for name in side.head.labels} - set(head.labels))]
    if list(own.labels) == names:
        return Head(own.labels, own.facts), answered
    table = answered.outcomes.matrix(len(own.labels))
    wide = np.full((len(table), len(names)), score.ABSENT)
    wide[:, [names.index(name) for name in own.labels]] = table
    return Head(tuple(names), own.facts), replace(answered, outcomes=Ragged.even(wide))


def _apart(own: Head, head: Head) -> str:
    pairs = ((one, other) for one, other in zip(own.labels, head.labels, strict=False) if one != other)
    first = next(pairs, None)
    if first is None:
        return f"{len(own.labels)} in place of {len(head.labels)}"
    return f"{first[0]} in place of {first[1]}"


# ------------------------------------------------------------------------------------ rows that neither has learned of


def _unseen(candidate: Artifact, stores: Sequence[Store], split: str, positions: Ints) -> tuple[Ints, int | None]:
    """(those of the positions, in the first of `stores`, whose rows say something of the candidate; how many others
    there are, or None where the stores do not tell). `stores`: the candidate's own is among them, where it is there.

    A candidate of another split of the same texts, as of another `data.fold`, was trained on rows that its base has
    held out: it has learned their answers, which say nothing of other rows. Rows of its own store are all left, and so
    are those on which both sides were trained: neither has an advantage.
    Raises `UserError` where no row is left.
    """
    store, digest = stores[0], candidate.lineage.get("data_digest")
    if digest in (None, store.manifest.digest):
        return positions, 0
    own = next((one for one in stores if one.manifest.digest == digest), None)
    if own is None or not all(_has_keys(one, of) for one, of in ((store, split), (store, "train"), (own, "train"))):
        return positions, None
    keys = store.keys(split)[positions]
    both, mine = (contamination.seen([one.keys("train")], keys) for one in (store, own))
    left = positions[both | ~mine]
    if len(positions) and not len(left):
        raise UserError(
            f"the candidate was trained on each of the {len(positions):,} {split} rows of {store.folder}, by another "
            "split than its base's; write --data with a file of rows that neither has seen, or train both by one "
            "split (data.fold, data.test)",
            code="no_unseen_rows",
        )
    return left, len(positions) - len(left)


def _seen(sides: Sequence[Artifact], stores: Sequence[Store], rows: Sequence[Record]) -> npt.NDArray[np.bool_] | None:
    """Which rows of a file are training or validation rows of a side; None where the store of one is not among
    `stores`, or kept no keys of texts."""
    found = np.zeros(len(rows), dtype=np.bool_)
    for digest in {side.lineage.get("data_digest") for side in sides}:
        seen = score.find_seen_rows(next((one for one in stores if one.manifest.digest == digest), None), rows)
        if seen is None:
            return None
        found |= seen.either
    return found


def _has_keys(store: Store, split: str) -> bool:
    return len(store.keys(split)) == store.rows(split)


# ------------------------------------------------------------------------------------------------------------- judging


@dataclass(frozen=True)
class Judged:
    """The candidate's answers beside its base's. `headline` is None where `unscored` says why."""

    headline: Difference | None
    scores: tuple[Difference, ...]
    flipped: Flipped | None
    right: int
    slices: tuple[Slice, ...]
    unscored: str = ""
    classes: Sequence[per_class.Class] = ()
    """Scores of each class by the base (`first`) and the candidate (`other`)."""


def judge(both: Both) -> Judged:
    """Scores with paired intervals, answers lost and won, slices. For classes p is the larger one of the bootstrap's
    and of McNemar's test, as in `rtrain compare`."""
    metric = metric_for(both.base.predictor.task.output)
    sides = (both.base, both.candidate)
    first, other = (metric.additive(side.answered.outcomes, side.targets, side.head) for side in sides)
    rights: tuple[npt.NDArray[np.bool_] | None, ...] = (None, None)
    if metric.right is not None:
        rights = tuple(metric.right(side.answered.outcomes, side.targets, side.head) & ~side.unknown for side in sides)
    scores = {one.name: one for one in significance.differences(first, other)}
    # Where both sides refuse rows, the score of the rows that McNemar's test counts: those outside of all classes too.
    name = ACCURACY_WITH_REFUSALS if ACCURACY_WITH_REFUSALS in scores else metric.headline
    if name not in scores:
        return Judged(None, tuple(scores.values()), None, 0, (), f"{name} is no finite number")
    headline = scores[name]
    flipped = count_flips(rights[0], rights[1])
    if flipped is not None and both.base.predictor.task.output == "classes":
        headline = replace(headline, p=max(headline.p, flipped.p))
    columns = {name: [value or "" for value in values] for name, values in both.columns.items()}
    if LENGTH not in columns:
        columns[LENGTH] = quantiles(both.lengths)
    only = [keep_scores(side, (name,)) for side in (first, other)]
    classes: list[dict[str, Any]] = []
    if metric.tables is not None:
        tables = (metric.tables(side.answered.outcomes, side.targets, side.head) for side in sides)
        classes = per_class.pair_classes(*map(per_class.collect_classes, tables))
    return Judged(
        headline,
        tuple(scores.values()),
        flipped,
        0 if rights[0] is None else int(rights[0].sum()),
        tuple(slices(only[0], only[1], name, columns)),
        classes=classes,
    )
