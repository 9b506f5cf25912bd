"""The comparison of runs, row by row: the data of `rtrain compare` and of its page, and the verdict in one sentence."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rtrain.core.errors import UserError
from rtrain.data.store.store import Store
from rtrain.evaluation import candidates as candidate_data, pairing, row_scores, significance
from rtrain.evaluation.candidates import Candidate, Curves, SettingDifferences, TrainingCost
from rtrain.evaluation.pairing import CandidateAnswers, PairedAnswers
from rtrain.evaluation.row_scores import RowAnswers
from rtrain.evaluation.significance import Difference, McNemarTest, RowScores, SliceDifference
from rtrain.metrics import per_class
from rtrain.metrics.bootstrap import Bools, Floats, Ints
from rtrain.metrics.scores import MIN_ROWS
from rtrain.report import stats
from rtrain.report.sections import outputs
from rtrain.report.svg import format_number

SCHEMA_VERSION = 2
MAX_ROWS_PER_GROUP = 200
"""Most rows per group."""
OUTPUTS_WITHOUT_CONFIDENCE = ("spans", "summary", "tokens")
"""Kinds of output whose confidence covers only a part of the answer."""
QUALITY_FORMATS = {"summary": "ROUGE {:.3f}", "tokens": "loss {:.3f}"}
"""Suffix with the quality of an answer."""
QUALITY_TOLERANCE = 1e-9
"""Smaller differences of quality are rounding errors."""
VERDICT_PHRASES = {1: "is better", -1: "is worse"}


@dataclass(frozen=True)
class ChangedPrediction:
    text: str
    target: str
    """Empty for masked text, which has no target in the files."""
    first: str
    other: str
    first_score: float | None
    other_score: float | None
    """Confidence of each model; None if the task has none."""
    location: str
    """File and line."""


@dataclass(frozen=True)
class ChangeGroup:
    """Rows that changed in the same direction."""

    name: str
    sort_order: str
    """Description of the order."""
    rows: int
    """Number of rows; `shown` has at most `MAX_ROWS_PER_GROUP`."""
    shown: tuple[ChangedPrediction, ...]


@dataclass(frozen=True)
class CandidateResult:
    candidate: Candidate
    headline: Difference
    """p is corrected for the number of candidates; for classes it is the larger of the bootstrap's and McNemar's."""
    scores: tuple[Difference, ...]
    """All scores with the p of the bootstrap."""
    mcnemar: McNemarTest | None
    """For classes."""
    slices: tuple[SliceDifference, ...]
    """The worst slices first."""
    change_groups: tuple[ChangeGroup, ...]
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


@dataclass(frozen=True)
class RunComparison:
    """Several models. `answer_comparison` needs each row's answers; if it is None, `missing_reason` says why."""

    candidates: tuple[Candidate, ...]
    settings: SettingDifferences
    answer_comparison: AnswerComparison | None
    missing_reason: str
    curves: tuple[Curves, ...]
    costs: tuple[TrainingCost, ...]

    @property
    def verdict(self) -> str:
        if self.answer_comparison is None:
            return f"not compared: {self.missing_reason}"
        results = self.answer_comparison.results
        corrected = f" (p by Holm for {len(results)} comparisons)" if len(results) > 1 else ""
        return "; ".join(map(format_verdict, results)) + corrected


def compare_runs(folders: Sequence[Path]) -> RunComparison:
    """Read the runs in these folders; their artifacts predict missing answers.

    Raises `UserError` if the runs cannot be compared; see `candidates.find_candidates` and `pairing.pair_answers`.
    """
    candidates = candidate_data.find_candidates(folders)
    paired = pairing.pair_answers(candidates)
    return RunComparison(
        candidates=tuple(candidates),
        settings=candidate_data.collect_settings(candidates),
        answer_comparison=compare_answers(candidates, paired) if isinstance(paired, PairedAnswers) else None,
        missing_reason="" if isinstance(paired, PairedAnswers) else paired,
        curves=tuple(map(candidate_data.read_curves, candidates)),
        costs=tuple(map(candidate_data.collect_cost, candidates)),
    )


def compare_answers(candidates: Sequence[Candidate], paired: PairedAnswers) -> AnswerComparison:
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


def _score_candidates(candidates: Sequence[Candidate], paired: PairedAnswers) -> tuple[list[RowScores], list[Ints]]:
    """Score each candidate's rows: (scores, positions of the scored rows in each file)."""
    output = candidates[0].output
    targets = [answers.rows.target[at] for answers, at in zip(paired.answers, paired.positions, strict=True)]
    target, is_same = row_scores.merge_targets(output, targets)
    positions = [places[is_same] for places in paired.positions]
    sheets = [
        _make_row_answers(candidate, paired.split, answers, places, target[is_same])
        for candidate, answers, places in zip(candidates, paired.answers, positions, strict=True)
    ]
    if output == "number":
        for candidate, sheet in zip(candidates, sheets, strict=True):
            if not np.isfinite(sheet.prediction.astype(np.float64)).all():
                reason = "has predictions that are not finite, since its training diverged"
                raise UserError(f"{candidate} {reason}; compare other runs", code="not_finite")
        # One scale for all, so that scores are comparable.
        sheets = [sheet._replace(facts=sheets[0].facts) for sheet in sheets]
    if any(sheet.store is None for sheet in sheets):
        # A summary without its store is scored by its loss, and then all are.
        sheets = [sheet._replace(store=None) for sheet in sheets]
    if any("out_of_scope_label" in sheet.facts for sheet in sheets):
        # A model without an out-of-scope label is wrong on all out-of-scope rows.
        sheets = [sheet._replace(facts={"out_of_scope_label": "", **sheet.facts}) for sheet in sheets]
    return [row_scores.score_rows(output, sheet) for sheet in sheets], positions


def _make_row_answers(
    candidate: Candidate, split: str, answers: CandidateAnswers, positions: Ints, target: row_scores.AnswerColumn
) -> RowAnswers:
    # Only summaries need the token store for scoring.
    store_path = candidate.run.token_store if candidate.output == "summary" else None
    return RowAnswers(
        target=target,
        prediction=answers.rows.prediction[positions],
        loss=answers.rows.loss[positions],
        facts={} if candidate.metadata is None else candidate.metadata.facts,
        store=None if store_path is None else Store(store_path),
        split=split,
        positions=answers.positions[positions],
    )


def _compare_candidate(
    candidates: Sequence[Candidate],
    paired: PairedAnswers,
    positions: Sequence[Ints],
    scored_rows: Sequence[RowScores],
    place: int,
) -> CandidateResult:
    first, other, output = scored_rows[0], scored_rows[place], candidates[0].output
    rows = paired.answers[0].rows
    columns = {name: [values[row] for row in positions[0]] for name, values in rows.slices.items()}
    measured = significance.compare_models(output, first, other, columns, rows.tokens[positions[0]])
    assert measured.headline is not None  # `row_scores` has finite headlines
    models = [
        _ScoredRows(candidates[at].letter, paired.answers[at], positions[at], scored_rows[at]) for at in (0, place)
    ]
    return CandidateResult(
        candidate=candidates[place],
        headline=measured.headline,
        scores=measured.scores,
        mcnemar=measured.mcnemar if output == "classes" else None,
        slices=measured.slices,
        change_groups=tuple(_group_changes(output, *models)),
        classes=measured.classes,
    )


# -------------------------------------------------------------------------------------------------- changed predictions


@dataclass(frozen=True)
class _ScoredRows:
    """One model's answers to the compared rows."""

    letter: str
    answers: CandidateAnswers
    positions: Ints
    """Places of the compared rows in `answers`."""
    scores: RowScores

    @property
    def loss(self) -> Floats:
        return self.answers.rows.loss[self.positions]

    @property
    def prediction(self) -> npt.NDArray[Any]:
        return self.answers.rows.prediction[self.positions]


def _group_changes(output: str, first: _ScoredRows, other: _ScoredRows) -> list[ChangeGroup]:
    """Group rows by change: lost, won, and wrong in both; for graded answers: worse and better.

    Lost rows are sorted by the loss of the other model, won rows by the loss of the first. Graded answers are sorted by
    the size of the change.
    """
    a, b = first.letter, other.letter
    quality_change = other.scores.quality - first.scores.quality
    first_correct, other_correct = first.scores.is_correct, other.scores.is_correct
    groups: list[tuple[str, Bools, Floats]]
    if first_correct is not None and other_correct is not None:
        pairs = zip(first.prediction, other.prediction, strict=True)
        differs = np.fromiter((bool(x != y) for x, y in pairs), dtype=np.bool_, count=len(quality_change))
        order = "the worst first"
        groups = [
            (f"right in {a}, wrong in {b}", first_correct & ~other_correct, other.loss),
            (f"wrong in {a}, right in {b}", ~first_correct & other_correct, first.loss),
            ("wrong in both, differently", ~first_correct & ~other_correct & differs, other.loss),
        ]
    else:
        order = "the largest change first"
        groups = [
            (f"worse in {b} than in {a}", quality_change < -QUALITY_TOLERANCE, -quality_change),
            (f"better in {b} than in {a}", quality_change > QUALITY_TOLERANCE, quality_change),
        ]
    change_groups = []
    for name, selected, severity in groups:
        rows = np.flatnonzero(selected)
        rows = rows[np.argsort(-np.nan_to_num(severity[rows], nan=-np.inf), kind="stable")]
        shown = _list_changes(output, first, other, rows[:MAX_ROWS_PER_GROUP])
        change_groups.append(ChangeGroup(name, order, len(rows), tuple(shown)))
    return change_groups


def _list_changes(output: str, first: _ScoredRows, other: _ScoredRows, rows: Ints) -> list[ChangedPrediction]:
    places, other_places = first.positions[rows].tolist(), other.positions[rows].tolist()
    first_rows, other_rows = first.answers.rows, other.answers.rows

    def target(place: int, other_place: int) -> str:
        if output == "tokens":
            return ""
        value = first_rows.target[place]
        # A label that the first model lacks is taken from the other model's file.
        return format_answer(output, value if isinstance(value, float) else value or other_rows.target[other_place])

    def prediction(model: _ScoredRows, place: int, row: int) -> str:
        answer = format_answer(output, model.answers.rows.prediction[place])
        quality = QUALITY_FORMATS.get(output)
        return answer if quality is None else f"{answer}, {quality.format(abs(float(model.scores.quality[row])))}"

    def confidence(model: _ScoredRows, place: int) -> float | None:
        score = float(model.answers.rows.score[place])
        return score if np.isfinite(score) and output not in OUTPUTS_WITHOUT_CONFIDENCE else None

    return [
        ChangedPrediction(
            text,
            target(place, other_place),
            prediction(first, place, row),
            prediction(other, other_place, row),
            confidence(first, place),
            confidence(other, other_place),
            first_rows.format_location(place),
        )
        for text, place, other_place, row in zip(
            first_rows.read_texts(places), places, other_places, rows.tolist(), strict=True
        )
    ]


def format_answer(output: str, value: Any) -> str:
    if isinstance(value, float):
        return format_number(value)
    if isinstance(value, str):
        return value or "nothing"
    if output == "tags":
        return outputs.describe_entities(value)
    if output == "summary":
        return f"sentences {', '.join(value)}" if value else "no sentence"
    return ", ".join(str(part) or "-" for part in value) or "nothing"


# ------------------------------------------------------------------------------------------------------------- verdict


def format_verdict(result: CandidateResult) -> str:
    """`B (wide) is better: accuracy 0.927 against 0.915, +1.2 points (0.4 to 2.0), p 0.003, on 3,080 rows`."""
    headline, figures = result.headline, significance.format_difference(result.headline)
    rows = f"{headline.rows:,} row{'' if headline.rows == 1 else 's'}"
    if headline.verdict:
        return f"{result.candidate} {VERDICT_PHRASES[headline.verdict]}: {figures}, on {rows}"
    return f"{result.candidate} is not significantly different on {rows}: {figures}{_format_required_rows(headline)}"


def _format_required_rows(difference: Difference) -> str:
    """Format the required number of rows, or the reason why it is unknown."""
    if difference.rows < MIN_ROWS:
        return f"; at least {MIN_ROWS} rows are needed"
    detectable = significance.minimum_detectable_effect(difference)
    if detectable == 0:
        return "; both predict all rows equally well"
    # A tiny difference would need millions of rows, so use a point instead.
    effect = max(abs(difference.difference), 0.01 if significance.is_share(difference) else 0.0)
    detectable_size = significance.format_size(difference, detectable)
    if effect == 0 or effect >= detectable:
        return f"; these rows can detect a difference of {detectable_size}"
    rows = f"{significance.required_sample_size(difference, effect):,}"
    size = significance.format_size(difference, effect)
    return f"; a difference below {detectable_size} needs more rows, one of {size} about {rows}"


# ------------------------------------------------------------------------------------------------------------ document


def build_document(comparison: RunComparison) -> dict[str, Any]:
    """Build the JSON document; docs/compare.md describes it."""
    answers = comparison.answer_comparison
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": comparison.verdict,
        "candidates": [_candidate_fields(candidate) for candidate in comparison.candidates],
        "settings": asdict(comparison.settings),
        "answers": None if answers is None else _answer_fields(answers),
        "missing_reason": comparison.missing_reason or None,
        "training": [
            {"candidate": candidate.letter, "cost": asdict(cost), "curves": asdict(curves)}
            for candidate, cost, curves in zip(comparison.candidates, comparison.costs, comparison.curves, strict=True)
        ],
    }


def _candidate_fields(candidate: Candidate) -> dict[str, Any]:
    return {
        "candidate": candidate.letter,
        "name": candidate.name,
        "run": str(candidate.run),
        "artifact": str(candidate.folder),
        "version": None if candidate.metadata is None else candidate.metadata.version,
        "task": candidate.config.recipe.task,
        "recipe": candidate.config.recipe.name,
        "recipe_digest": candidate.config.recipe.recipe_digest(),
    }


def _answer_fields(answers: AnswerComparison) -> dict[str, Any]:
    return {
        "split": answers.split,
        "common_rows": answers.rows,
        "split_rows": list(answers.split_rows),
        "excluded_rows": answers.excluded_rows,
        "results": [
            {
                "candidate": result.candidate.letter,
                "headline": {**asdict(result.headline), "verdict": result.headline.verdict},
                "scores": [asdict(score) for score in result.scores],
                "mcnemar": None if result.mcnemar is None else asdict(result.mcnemar),
                "slices": [{**asdict(slice_), "verdict": slice_.verdict} for slice_ in result.slices],
                "classes": list(result.classes),
                "change_groups": [asdict(group) for group in result.change_groups],
            }
            for result in answers.results
        ],
    }
