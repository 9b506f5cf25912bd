"""A candidate against the first one: scores with intervals, McNemar's test, slices, changed predictions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rtrain.core.errors import UserError
from rtrain.data.store.store import Store
from rtrain.evaluation import changed_predictions, row_scores, significance
from rtrain.evaluation.candidates import Candidate
from rtrain.evaluation.pairing import PairedAnswers
from rtrain.evaluation.row_scores import RowAnswers, RowScores
from rtrain.evaluation.significance import Difference
from rtrain.metrics import per_class
from rtrain.metrics.scores import LENGTH_COLUMN, MAX_SLICES
from rtrain.metrics.slices import MIN_ROWS, SliceRows, bin_by_quantile, group_rows
from rtrain.metrics.sums import Bools, Ints, SumMetric
from rtrain.report import stats

MIN_SLICE_REPLICATES = 1000
"""Fewest resamples of a slice."""
REPLICATES_PER_SLICE = 80
"""Resamples of each slice, times the number of slices. The least p, 2 / resamples, is below 0.05 after Holm's
correction."""


@dataclass(frozen=True)
class SliceDifference:
    column: str
    value: str
    difference: Difference
    """p is corrected for the number of slices by Holm's method."""

    @property
    def verdict(self) -> int:
        """1: the other model is better, -1: worse, 0: not significant."""
        return self.difference.verdict


@dataclass(frozen=True)
class McNemarTest:
    """McNemar's test: rows that only the first model has right, rows that only the other has right, and the exact p."""

    lost: int
    won: int
    p: float


@dataclass(frozen=True)
class CandidateResult:
    """Results of one candidate against the first one."""

    candidate: Candidate
    headline: Difference
    """p is corrected for the number of candidates; for classes it is the larger of the bootstrap's and McNemar's."""
    scores: tuple[Difference, ...]
    """All scores with the p of the bootstrap."""
    mcnemar: McNemarTest | None
    slices: tuple[SliceDifference, ...]
    """The worst slices first."""
    change_groups: tuple[changed_predictions.ChangeGroup, ...]
    classes: Sequence[per_class.ClassResult] = ()
    """Scores of each class by both models."""


@dataclass(frozen=True)
class AnswerComparison:
    split: str
    rows: int
    split_rows: tuple[int, ...]
    """Rows of each candidate's file."""
    excluded_rows: int
    """Common rows that were truncated to different lengths."""
    results: tuple[CandidateResult, ...]


def compare_answers(candidates: Sequence[Candidate], paired: PairedAnswers) -> AnswerComparison:
    """Compare each candidate with the first one on the common rows."""
    scored_rows, positions = _score_candidates(candidates, paired)
    if not len(positions[0]):
        raise UserError(
            f"none of the {len(paired):,} common rows has comparable targets: texts were truncated to different "
            "lengths, or the heads differ; compare runs with the same data.max_tokens and heads",
            code="no_common_rows",
        )
    results = [
        _compare_candidate(candidates, paired, positions, scored_rows, place) for place in range(1, len(candidates))
    ]
    corrected = stats.holm_correction([result.headline.p for result in results])
    return AnswerComparison(
        split=paired.split,
        rows=len(positions[0]),
        split_rows=tuple(len(answers.rows) for answers in paired.answers),
        excluded_rows=len(paired) - len(positions[0]),
        results=tuple(
            replace(result, headline=replace(result.headline, p=p))
            for result, p in zip(results, corrected, strict=True)
        ),
    )


def compare_headline(candidates: Sequence[Candidate], paired: PairedAnswers) -> Difference:
    """Compare the headline score of two candidates."""
    (first, other), _ = _score_candidates(candidates, paired)
    return _compare_headline_scores(candidates[0].output, first, other)[0]


def _score_candidates(candidates: Sequence[Candidate], paired: PairedAnswers) -> tuple[list[RowScores], list[Ints]]:
    """Score each candidate's rows: (scores, positions of the scored rows in each file)."""
    output = candidates[0].output
    targets = [answers.rows.target[at] for answers, at in zip(paired.answers, paired.positions, strict=True)]
    target, is_same = row_scores.merge_targets(output, targets)
    positions = [places[is_same] for places in paired.positions]
    row_answers = [
        _make_row_answers(side, paired, place, positions[place], target[is_same])
        for place, side in enumerate(candidates)
    ]
    if output == "number":
        for candidate, entry in zip(candidates, row_answers, strict=True):
            if not np.isfinite(entry.prediction.astype(np.float64)).all():
                reason = "has predictions that are not finite, since its training diverged"
                raise UserError(f"{candidate} {reason}; compare other runs", code="not_finite")
        # One scale for all, so that scores are comparable.
        row_answers = [sheet._replace(facts=row_answers[0].facts) for sheet in row_answers]
    if any(sheet.store is None for sheet in row_answers):
        # A summary without its store is scored by its loss, and then all are.
        row_answers = [sheet._replace(store=None) for sheet in row_answers]
    if any("out_of_scope_label" in sheet.facts for sheet in row_answers):
        # A model without an out-of-scope label is wrong on all out-of-scope rows.
        row_answers = [sheet._replace(facts={"out_of_scope_label": "", **sheet.facts}) for sheet in row_answers]
    return [row_scores.score_rows(output, sheet) for sheet in row_answers], positions


def _compare_headline_scores(
    output: str, first: RowScores, other: RowScores
) -> tuple[Difference, McNemarTest | None, list[Difference]]:
    """Return (headline with its deciding p, McNemar's test of classes, all scores)."""
    scores = significance.compare_scores(first.scores, other.scores)
    headline = next(score for score in scores if score.name == first.headline)
    mcnemar = count_flips(first.is_correct, other.is_correct) if output == "classes" else None
    return (headline if mcnemar is None else replace(headline, p=max(headline.p, mcnemar.p))), mcnemar, scores


def _make_row_answers(
    candidate: Candidate, paired: PairedAnswers, index: int, positions: Ints, target: row_scores.AnswerColumn
) -> RowAnswers:
    # Only summaries need the token store for scoring.
    answers, store_path = paired.answers[index], candidate.run.token_store if candidate.output == "summary" else None
    return RowAnswers(
        target=target,
        prediction=answers.rows.prediction[positions],
        loss=answers.rows.loss[positions],
        facts={} if candidate.metadata is None else candidate.metadata.facts,
        store=None if store_path is None else Store(store_path),
        split=paired.split,
        positions=answers.positions[positions],
    )


def _compare_candidate(
    candidates: Sequence[Candidate],
    paired: PairedAnswers,
    positions: Sequence[Ints],
    scored_rows: Sequence[RowScores],
    index: int,
) -> CandidateResult:
    first, other = scored_rows[0], scored_rows[index]
    headline, mcnemar, scores = _compare_headline_scores(candidates[0].output, first, other)
    rows = paired.answers[0].rows
    columns = {name: [values[row] for row in positions[0]] for name, values in rows.slices.items()}
    if LENGTH_COLUMN not in columns:
        columns[LENGTH_COLUMN] = bin_by_quantile(rows.tokens[positions[0]])
    letters = (candidates[0].letter, candidates[index].letter)
    answer_pair = (paired.answers[0], paired.answers[index])
    return CandidateResult(
        candidate=candidates[index],
        headline=headline,
        scores=tuple(scores),
        mcnemar=mcnemar,
        slices=tuple(compare_slices(first.slice_scores, other.slice_scores, first.headline, columns)),
        change_groups=tuple(
            changed_predictions.group_changes(
                candidates[0].output, first, other, answer_pair, (positions[0], positions[index]), letters
            )
        ),
        classes=per_class.pair_classes(first.classes, other.classes),
    )


def count_flips(first: Bools | None, other: Bools | None) -> McNemarTest | None:
    """Count correct answers lost and won; None for answers that are not right or wrong."""
    if first is None or other is None:
        return None
    lost, won = int((first & ~other).sum()), int((~first & other).sum())
    return McNemarTest(lost, won, significance.mcnemar_p_value(lost, won))


def compare_slices(
    first: SumMetric, other: SumMetric, headline: str, columns: Mapping[str, Sequence[str]], min_rows: int = MIN_ROWS
) -> list[SliceDifference]:
    """Compare the rows of each slice, the worst slice first.

    Rare values, and values beyond the `MAX_SLICES` most frequent, are merged into one slice. Columns with a single
    value and slices below `MIN_ROWS` rows are omitted.
    """
    parts: list[tuple[str, SliceRows]] = []
    for column, values in columns.items():
        value_groups = group_rows(values, 1 if column == LENGTH_COLUMN else min_rows, MAX_SLICES)
        parts += (
            [(column, value_group) for value_group in value_groups if len(value_group.rows) >= MIN_ROWS]
            if len(value_groups) > 1
            else []
        )
    replicates, differences = max(MIN_SLICE_REPLICATES, REPLICATES_PER_SLICE * len(parts)), list[Difference]()
    for _, part in parts:
        a, b = (SumMetric(candidate.rows[part.rows], candidate.score) for candidate in (first, other))
        differences.append(
            next(score for score in significance.compare_scores(a, b, replicates) if score.name == headline)
        )
    corrected = stats.holm_correction([difference.p for difference in differences])
    slice_differences = [
        SliceDifference(column, part.value, replace(one, p=p))
        for (column, part), one, p in zip(parts, differences, corrected, strict=True)
    ]
    return sorted(slice_differences, key=lambda slice_difference: slice_difference.difference.difference)
