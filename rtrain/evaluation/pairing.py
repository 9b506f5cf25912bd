"""The answers of each candidate, and the rows that all candidates have answered.

Equal rows have equal `row_id`: a hash of texts, label and occurrence, independent of file and line.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow.parquet

from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.data.store.store import open_store
from rtrain.evaluation.candidates import Candidate
from rtrain.inference import score
from rtrain.inference.predictor import Predictor
from rtrain.report import row_predictions
from rtrain.report.live.progress import print_message
from rtrain.report.row_predictions import SPLITS, AnswerRows
from rtrain.runs import predictions

Ints = npt.NDArray[np.int64]
SPLIT_NAMES = {"test": "test", "valid": "validation"}


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
        unanswered = [candidate for candidate in candidates if not _has_answers(candidate, split)]
        if unanswered:
            missing_reasons.append(f"{', '.join(map(str, unanswered))} have no answers to {SPLIT_NAMES[split]} rows")
            continue
        loaded_answers = [_load_answers(candidate, split) for candidate in candidates]
        if empty := [
            candidate for candidate, answers in zip(candidates, loaded_answers, strict=True) if answers is None
        ]:
            missing_reasons.append(f"{', '.join(map(str, empty))} have no {SPLIT_NAMES[split]} rows")
            continue
        answers = [loaded for loaded in loaded_answers if loaded is not None]
        positions = common_positions([candidate_answers.ids for candidate_answers in answers])
        if len(positions[0]):
            return PairedAnswers(split, answers, positions)
        counts = ", ".join(
            f"{candidate.letter} {len(candidate_answers.ids):,}"
            for candidate, candidate_answers in zip(candidates, answers, strict=True)
        )
        reason = f"the runs share no {SPLIT_NAMES[split]} row ({counts})"
        fix = "train them with one data.test file, or score one artifact on the other's rows with rtrain evaluate"
        raise UserError(f"{reason}; {fix}", code="no_common_rows")
    return "; ".join([*missing_reasons, *map(_resume_hint, filter(_is_unfinished, candidates))])


def _is_unfinished(candidate: Candidate) -> bool:
    """Whether a run is unfinished and can be resumed; trials are resumed by their search."""
    return candidate.is_run_artifact and candidate.metadata is None and not Run(candidate.run.folder.parent).is_search


def _resume_hint(candidate: Candidate) -> str:
    return f"to finish {candidate}: {candidate.run.resume_command}"


def common_positions(ids: Sequence[npt.NDArray[np.uint64]]) -> list[Ints]:
    """For each list of distinct ids, the places of the ids common to all lists, in the order of the first list."""
    shared = set.intersection(*(set(row_ids.tolist()) for row_ids in ids))
    shared_ids = [value for value in ids[0].tolist() if value in shared]
    places = [{value: place for place, value in enumerate(row_ids.tolist())} for row_ids in ids]
    return [np.array([place[value] for value in shared_ids], dtype=np.int64) for place in places]


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
    path = candidate.run.predictions(key)
    if not path.is_file() and not _write_answers(candidate, split):
        return None
    rows = row_predictions.read_answers(candidate.run, key)
    if rows is None:
        return None
    table = pyarrow.parquet.read_table(path, columns=["row_id", "position"])
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
    outcomes = score.predict_split(predictor, store, split, np.arange(count)).row_results
    path = candidate.run.predictions(_predictions_key(candidate, split))
    try:
        predictions.write_predictions(path, split, store, predictor.task, predictor.head, outcomes, predictor.tokenizer)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}); make the run's folder writable", code="not_writable"
        ) from None
    return True
