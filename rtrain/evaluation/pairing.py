"""The row answers of each side, and the rows that all sides have answered.

Rows are the same where their `row_id` is: a hash of texts, label and occurrence, whatever file or place they come from.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow.parquet

from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.data.store.store import open_store
from rtrain.evaluation.candidates import Side
from rtrain.inference import score
from rtrain.inference.predictor import Predictor
from rtrain.report import row_predictions
from rtrain.report.live.progress import say
from rtrain.report.row_predictions import SPLITS, AnswerRows
from rtrain.runs import predictions

Ints = npt.NDArray[np.int64]
NAMES = {"test": "test", "valid": "validation"}


@dataclass(frozen=True, eq=False)
class Answers:
    """What a side answered to all rows of a split."""

    rows: AnswerRows
    ids: npt.NDArray[np.uint64]
    position: Ints
    """Places of the rows in the token store's split."""


@dataclass(frozen=True, eq=False)
class Paired:
    """The rows of a split that all sides have answered, in the order of the first side's file."""

    split: str
    answers: Sequence[Answers]
    """One entry per side."""
    at: Sequence[Ints]
    """For each side, the places of the common rows in its answers."""

    def __len__(self) -> int:
        return len(self.at[0])


def paired(sides: Sequence[Side], splits: Sequence[str] = SPLITS) -> Paired | str:
    """The common rows of the first of `splits` that all sides have answered; or why rows cannot be compared one by one.

    Raises `UserError` where none of these is a row of all sides: rows of another split, which have chosen the weights,
    would say less than they seem to.
    """
    lacking = []
    for split in splits:
        without = [side for side in sides if not _known(side, split)]
        if without:
            lacking.append(f"{', '.join(map(str, without))} left no answers to {NAMES[split]} rows")
            continue
        found = [_answers(side, split) for side in sides]
        if empty := [side for side, answers in zip(sides, found, strict=True) if answers is None]:
            lacking.append(f"{', '.join(map(str, empty))} had no {NAMES[split]} rows")
            continue
        answers = [one for one in found if one is not None]
        at = common([one.ids for one in answers])
        if len(at[0]):
            return Paired(split, answers, at)
        counts = ", ".join(f"{side.letter} {len(one.ids):,}" for side, one in zip(sides, answers, strict=True))
        reason = f"none of the {NAMES[split]} rows is common to all ({counts})"
        fix = "train them with one data.test file, or score one artefact on the other's rows with rtrain evaluate"
        raise UserError(f"{reason}, and only answers to the same rows can be compared; {fix}", code="no_common_rows")
    return "; ".join([*lacking, *map(_way_on, filter(_is_open, sides))])


def _is_open(side: Side) -> bool:
    """Whether the training of a run has not ended. A trial is its search's to go on with."""
    return side.own and side.made is None and not Run(side.run.folder.parent).is_search


def _way_on(side: Side) -> str:
    return f"to end the training of {side}: {side.run.resumed_by}"


def common(ids: Sequence[npt.NDArray[np.uint64]]) -> list[Ints]:
    """For each list of distinct ids, the places of those that are in all lists, in the order of the first."""
    shared = set.intersection(*(set(one.tolist()) for one in ids))
    kept = [value for value in ids[0].tolist() if value in shared]
    places = [{value: place for place, value in enumerate(one.tolist())} for one in ids]
    return [np.array([place[value] for value in kept], dtype=np.int64) for place in places]


def _key(side: Side, split: str) -> str:
    """What the file of answers is called by. An artefact that is made anew has another version, and another file."""
    if side.own or side.made is None:
        return split
    return f"{split}-{side.folder.name}-{side.made.version}"


def _known(side: Side, split: str) -> bool:
    return side.run.predictions(_key(side, split)).is_file() or (side.made is not None and side.run.store is not None)


def _answers(side: Side, split: str) -> Answers | None:
    """The side's answers, asked for where the run has none in a file; None for a split without rows."""
    key = _key(side, split)
    path = side.run.predictions(key)
    if not path.is_file() and not _ask(side, split):
        return None
    rows = row_predictions.read(side.run, key)
    if rows is None:
        return None
    table = pyarrow.parquet.read_table(path, columns=["row_id", "position"])
    return Answers(rows, table["row_id"].to_numpy(), table["position"].to_numpy())


def _ask(side: Side, split: str) -> bool:
    """Write the answers of the side's artefact to a split; False where the split has no rows."""
    where = side.run.store
    assert where is not None  # _known
    store = open_store(where)
    count = store.rows(split)
    if not count:
        return False
    say(f"{side} answers {count:,} {NAMES[split]} rows")
    predictor = Predictor.load(side.folder)
    outcomes = score.on_split(predictor, store, split, np.arange(count)).outcomes
    path = side.run.predictions(_key(side, split))
    try:
        predictions.write(path, split, store, predictor.task, predictor.head, outcomes, predictor.tokenizer)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}); make the run's folder writable", code="not_writable"
        ) from None
    return True
