"""The comparison of runs: the data of `rtrain compare` and of its page."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rtrain.evaluation import compare_summary, differences, pairing, settings_diff, training_curves
from rtrain.evaluation.candidates import Candidate, find_candidates
from rtrain.evaluation.differences import AnswerComparison
from rtrain.evaluation.settings_diff import SettingDifferences
from rtrain.evaluation.training_curves import Curves, TrainingCost

SCHEMA_VERSION = 2


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
        """The outcome in one sentence."""
        if self.answer_comparison is None:
            return f"not compared: {self.missing_reason}"
        return compare_summary.format_verdicts(self.answer_comparison)


def compare_runs(folders: Sequence[Path]) -> RunComparison:
    """Read the runs in these folders; their artifacts predict missing answers.

    Raises `UserError` if the runs cannot be compared; see `candidates.find_candidates` and `pairing.pair_answers`.
    """
    candidates = find_candidates(folders)
    paired = pairing.pair_answers(candidates)
    answer_comparison = None if isinstance(paired, str) else differences.compare_answers(candidates, paired)
    return RunComparison(
        candidates=tuple(candidates),
        settings=settings_diff.collect_settings(candidates),
        answer_comparison=answer_comparison,
        missing_reason=paired if isinstance(paired, str) else "",
        curves=tuple(
            training_curves.read_curves(candidate.run, candidate.config.recipe.global_batch_size, candidate.output)
            for candidate in candidates
        ),
        costs=tuple(training_curves.collect_cost(candidate) for candidate in candidates),
    )


def build_document(comparison: RunComparison) -> dict[str, Any]:
    """Build the JSON document; docs/compare.md describes it."""
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": comparison.verdict,
        "candidates": [_candidate_fields(candidate) for candidate in comparison.candidates],
        "settings": asdict(comparison.settings),
        "answers": None if comparison.answer_comparison is None else _answer_fields(comparison.answer_comparison),
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


def _answer_fields(answer_comparison: AnswerComparison) -> dict[str, Any]:
    return {
        "split": answer_comparison.split,
        "common_rows": answer_comparison.rows,
        "split_rows": list(answer_comparison.split_rows),
        "excluded_rows": answer_comparison.excluded_rows,
        "results": [
            {
                "candidate": result.candidate.letter,
                "headline": {**asdict(result.headline), "verdict": result.headline.verdict},
                "scores": [asdict(score) for score in result.scores],
                "mcnemar": None if result.mcnemar is None else asdict(result.mcnemar),
                "slices": [{**asdict(slice_), "verdict": slice_.verdict} for slice_ in result.slices],
                "classes": list(result.classes),
                "change_groups": [asdict(kind) for kind in result.change_groups],
            }
            for result in answer_comparison.results
        ],
    }
