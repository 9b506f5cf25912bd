"""Next steps: the facts of a run for `rtrain.report.advice`, and the block of its recommendations."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow.parquet

from rtrain.config import Recipe
from rtrain.core.run_folder import Run
from rtrain.inference import artifact
from rtrain.metrics import per_class
from rtrain.metrics.registry import get_metric
from rtrain.report import advice
from rtrain.report.advice import BaselineComparison, RunFacts, WeakSlice, WorstLabel
from rtrain.report.collect import RunData
from rtrain.report.page import Block, Note, RecommendationList
from rtrain.report.sections import answers, run_details
from rtrain.tasks.base import get_task

MIN_SUSPECT_CONFIDENCE = 0.9
"""Least confidence of a wrong answer with a suspect label."""
MIN_PAIR_SHARE = 0.1
"""Least share of all mistakes of a confused pair that gets a recommendation."""
MIN_PAIR_ROWS = 5
HARDEST_ROWS = 20
"""Rows with the largest loss that are checked for wrong labels."""


def build_block(run: RunData) -> Block:
    steps = advice.list_recommendations(collect_facts(run))
    if not steps:
        return Note("No recommendations: the run has no artifact yet, and no rule applies.")
    note = (
        "Fixed rules derive these hints from this run's figures. Replace NEW_FOLDER, RECIPE, FILE and TEACHER (the run "
        "of the student's teacher)."
    )
    return RecommendationList("What to do next", steps, note)


def collect_facts(run: RunData) -> RunFacts:
    name, split = get_metric(run.output).headline, headline_split(run) or "test"
    train_loss, held_out_loss = _epoch_losses(run)
    return RunFacts(
        folder=str(run.folder),
        status=run.summary["status"],
        output=run.output,
        score=best_metrics(run, split).get(name),
        baseline_comparison=compare_with_baseline(run, split),
        train_loss=train_loss,
        held_out_loss=held_out_loss,
        validation_scores=tuple(_validation_scores(run, name)),
        best_step=run.summary["best_step"],
        steps=run.summary["steps"],
        epochs=run.config.recipe.train.epochs,
        rows=sum(run.store.manifest.rows.values()) if run.store else 0,
        labeled_rows=run.store.num_source_rows if run.store else 0,
        truncated_rows=run.store.manifest.truncated if run.store else 0,
        max_tokens=run.reading.max_tokens,
        uses_windows=run.reading.max_windows > 1,
        max_windows=run.reading.max_windows,
        quarantined_rows=run.store.manifest.quarantined if run.store else 0,
        quarantine_reason=_top_quarantine_reason(run),
        weak_slice=_find_weak_slice(run),
        worst_label=_find_worst_label(run),
        confused_pair=_find_confused_pair(run),
        collapsed_answer=next((entry["answer"] for entry in (run.scores or {}).get("collapsed", ())), ""),
        peak_lr=run.config.recipe.peak_lr,
        has_class_weights=_has_class_weights(run.config.recipe),
        suspect_rows=tuple(_find_suspect_rows(run)),
        has_student=bool(run.config.recipe.distill.teacher)
        or run.folder.with_name(f"{run.folder.name}-student").is_dir(),
        has_artifact=run.artifact is not None,
        has_int8=Run(run.folder).int8_artifact.joinpath(artifact.FILE_NAME).is_file(),
        rejection_reason=_find_refusal(Run(run.folder)),
        is_student=bool(run.config.recipe.distill.teacher),
    )


def _has_class_weights(recipe: Recipe) -> bool | None:
    """`RunFacts.has_class_weights`; None for students too, whose labels are not weighed."""
    can_weigh = get_task(recipe.task).weighting == "classes" and recipe.distill.teacher is None
    return recipe.train.class_weights != "none" if can_weigh else None


def _find_refusal(run: Run) -> str:
    """Why the gate refused the artifact to serve; empty if it did not."""
    artifact_folder = next(
        (place for place in (run.int8_artifact, run.artifact) if (place / artifact.FILE_NAME).is_file()), None
    )
    if artifact_folder is None:
        return ""
    metadata = artifact.read_artifact(artifact_folder, verify=False)
    return artifact.rejection_reason(metadata.gate, metadata.version) or ""


def list_baselines(run: RunData, split: str) -> list[tuple[str, float]]:
    """List (name, headline score) of each baseline on a split; for summaries also the first sentences."""
    scored_baselines = [
        (entry["name"], float(entry["scores"][split]))
        for entry in (run.baselines or {"baselines": []})["baselines"]
        if split in entry["scores"]
    ]
    document = find_scores(run, split)
    if run.output == "summary" and document is not None and "lead_rouge" in document["scores"]:
        scored_baselines.append(("the first sentences", float(document["scores"]["lead_rouge"])))
    return scored_baselines


def best_baseline(run: RunData, split: str) -> tuple[str, float] | None:
    return max(list_baselines(run, split), key=lambda baseline: baseline[1], default=None)


def scores_on_baseline_rows(run: RunData, split: str) -> Mapping[str, Any] | None:
    """{"rows", "scores", "intervals"} of the model on the rows of the baselines; None if unknown."""
    document = find_scores(run, split)
    if document is None:
        return None
    rows = document["rows"] if run.output == "summary" else (run.baselines or {}).get("rows", {}).get(split)
    return next(
        (scored for scored in (document, document.get("sample")) if scored is not None and scored["rows"] == rows), None
    )


def compare_with_baseline(run: RunData, split: str) -> BaselineComparison | None:
    """Compare the model with the best baseline on the same rows; None if one of the two is unknown."""
    name, best, document = (
        get_metric(run.output).headline,
        best_baseline(run, split),
        scores_on_baseline_rows(run, split),
    )
    if best is None or document is None or name not in document["scores"]:
        return None
    ends = document.get("intervals", {}).get("scores", {}).get(name)
    return BaselineComparison(float(document["scores"][name]), (ends[0], ends[1]) if ends else None, *best)


def find_scores(run: RunData, split: str) -> dict[str, Any] | None:
    """Return scores-<split>.json."""
    return next(
        (scores for scores in (run.scores, run.validation_scores) if scores is not None and scores["split"] == split),
        None,
    )


def best_metrics(run: RunData, split: str) -> Mapping[str, Any]:
    """Return the logged scores of the best weights, else of the newest evaluation, else nothing."""
    if logged_scores := run.summary["metrics"][split]:
        return dict(logged_scores)
    evaluated = [event["scores"] for event in run.events_of_kind("evaluated") if event["split"] == split]
    return dict(evaluated[-1]) if evaluated else {}


def headline_split(run: RunData) -> str | None:
    """The split of the headline score: test, else valid; None without a score."""
    name = get_metric(run.output).headline
    return next((split for split in ("test", "valid") if name in best_metrics(run, split)), None)


def _epoch_losses(run: RunData) -> tuple[float | None, float | None]:
    """Return (training loss of the last epoch, mean loss of the held-out rows) if both are the plain loss of a text."""
    recipe, answers = run.config.recipe, run.answers
    is_plain = not (recipe.train.label_smoothing or recipe.distill.teacher or recipe.has_weighted_loss)
    if run.output != "classes" or not is_plain or answers is None:
        return None, None
    finite_losses = answers.loss[np.isfinite(answers.loss)]
    per_epoch, progress = run.steps_per_epoch() or 1, run_details.last_event_per_step(run.events_of_kind("progress"))
    last_losses = [event["loss"] for event in progress if event["step"] > run.summary["steps"] - per_epoch]
    return (
        (float(np.mean(last_losses)), float(finite_losses.mean()))
        if last_losses and len(finite_losses)
        else (None, None)
    )


def _validation_scores(run: RunData, name: str) -> list[tuple[int, float]]:
    evaluations = run_details.last_event_per_step(
        [event for event in run.events_of_kind("evaluated") if event["split"] == "valid"]
    )
    return [(event["step"], float(event["scores"][name])) for event in evaluations if name in event["scores"]]


def _top_quarantine_reason(run: RunData) -> str:
    path = None if run.store is None else run.store.folder / "quarantine.parquet"
    if path is None or not path.is_file():
        return ""
    reasons = Counter(pyarrow.parquet.read_table(path, columns=["reason"])["reason"].to_pylist())
    return str(reasons.most_common(1)[0][0]) if reasons else ""


def _find_weak_slice(run: RunData) -> WeakSlice | None:
    """Find the worst slice that is significantly worse than all rows."""
    if not (worse := answers.worse_slices(run)):
        return None
    column, _, value = worse[0].name.partition(": ")
    return WeakSlice(column, value, worse[0].rows, worse[0].value)


def label_tables(run: RunData) -> list[tuple[str, Mapping[str, Any]]]:
    """List (prefix of label names, tables): one entry per head, else a single one."""
    if run.scores is None:
        return []
    score_tables = run.scores["tables"]
    return (
        [(f"{name}: ", head_tables) for name, head_tables in score_tables["heads"].items()]
        if "heads" in score_tables
        else [("", score_tables)]
    )


def worst_labels(run: RunData) -> list[tuple[str, Mapping[str, Any]]]:
    """List (name, scores) of the frequent labels or entity types, the lowest F1 first."""
    return sorted(
        ((label_scores["class"], label_scores) for label_scores in _split_labels(run)[1]),
        key=lambda item: float(item[1]["f1"]),
    )


def rare_labels(run: RunData) -> list[per_class.ClassResult]:
    """List labels or entity types with too few rows, the rarest first."""
    return _split_labels(run)[0]


def _split_labels(run: RunData) -> tuple[list[per_class.ClassResult], list[per_class.ClassResult]]:
    return per_class.split_by_support([] if run.scores is None else per_class.collect_classes(run.scores["tables"]))


def confused_pairs(run: RunData) -> list[tuple[str, str, int]]:
    """List (true, predicted, rows), the most frequent first."""
    pairs = [
        (f"{head}{pair['true']}", f"{head}{pair['predicted']}", int(pair["rows"]))
        for head, tables in label_tables(run)
        for pair in tables.get("confused", ())
    ]
    return sorted(pairs, key=lambda item: -item[2])


def _find_worst_label(run: RunData) -> WorstLabel | None:
    worst = next(iter(worst_labels(run)), None)
    codes = run.class_codes()
    if worst is None or codes is None or run.store is None:
        return None
    names: Sequence[str] = run.store.manifest.labels
    rows = int((codes == names.index(worst[0])).sum()) if worst[0] in names else None
    return WorstLabel(worst[0], float(worst[1]["f1"]), rows)


def _find_confused_pair(run: RunData) -> tuple[str, str, int] | None:
    pairs = confused_pairs(run)
    total = sum(rows for _, _, rows in pairs)
    return pairs[0] if pairs and pairs[0][2] >= max(MIN_PAIR_ROWS, MIN_PAIR_SHARE * total) else None


def _find_suspect_rows(run: RunData) -> list[str]:
    """List file:line of the hardest rows with a confident wrong answer, for texts with a single label."""
    answers = run.answers
    if answers is None or run.output != "classes":
        return []
    is_correct = answers.is_correct
    rows = [
        int(row)
        for row in answers.hardest_rows(HARDEST_ROWS)
        if not is_correct[row] and answers.score[row] >= MIN_SUSPECT_CONFIDENCE
    ]
    return [answers.format_location(row) for row in rows]
