"""The outcome: scores and baselines, the worst mistakes, and recommendations."""

from collections.abc import Sequence
from typing import Any

from rtrain.metrics import operating_points, per_class
from rtrain.metrics.registry import get_metric
from rtrain.report import event_messages
from rtrain.report.collect import RunData
from rtrain.report.page import Block, Note, Section, Table, Tile
from rtrain.report.sections import answers, next_steps, outputs
from rtrain.report.svg import (
    format_duration,
    format_number,
    format_rate,
    format_significant,
    humanize_score_name,
    truncate,
)

LINES_PER_KIND, HARDEST_ROWS = 3, 10
"""Lines per kind in the table of mistakes, and for the hardest rows."""
MAX_TEXT_CHARS = 160
"""Characters of a shown text."""
MAX_LOCATION_CHARS = 90
"""Characters of a shown location."""


def build_section(run: RunData) -> Section:
    blocks = [
        _build_score_table(run),
        *_build_point_table(run),
        *_build_early_stop_note(run),
        *_build_collapsed_notes(run),
        *_build_mistake_table(run),
        next_steps.build_block(run),
    ]
    return Section("outcome", "Outcome", _format_intro(run), blocks)


def _build_collapsed_notes(run: RunData) -> list[Block]:
    """Warn that almost all rows get one answer."""
    entries = (run.scores or {}).get("collapsed", ())
    return [
        Note(
            f"The model answers “{truncate(entry['answer'], 60)}” to {entry['rows']:,} of {entry['total_rows']:,} "
            f"rows, and to {entry['other_rows_with_answer']:,} of the {entry['other_rows']:,} whose right answer is "
            "another one: it hardly tells rows apart."
        )
        for entry in entries
    ]


def _build_point_table(run: RunData) -> list[Block]:
    """The labels with an operating point: recall and precision on validation and test rows."""
    rows, statements = list[Sequence[str | int]](), list[str]()
    for split, points in run.summary.get("operating_points", {}).items():
        name = answers.SPLIT_NAMES[split]
        for point in points:
            figures = [
                f"{point[score]:.3f} ({answers.format_interval(point['intervals'].get(score))})"
                for score in ("recall", "precision")
            ]
            request = f"{point['requested']} {point['requested_value']:g}"
            rows.append((name, point["label"], request, f"{point['threshold']:.4g}", *figures, point["rows"]))
            statements += [operating_points.format_operating_point(point, name)] if split == "valid" else []
    note = (
        "A text with at least this score gets the label. The threshold is chosen on the validation rows, so the test "
        f"rows alone say what to expect; 95 % bootstrap intervals. {'. '.join(statements)}."
    )
    columns = ("rows", "label", "requested", "threshold", "recall", "precision", "rows of the label")
    return [Table("Operating points", columns, rows, note, wide=True)] if rows else []


def _build_early_stop_note(run: RunData) -> list[Block]:
    return [
        Note(
            f"The training {event_messages.format_event(event)}. The learning rate followed the schedule of all steps."
        )
        for event in run.events_of_kind("early_stop")[-1:]
    ]


def build_tiles(run: RunData) -> list[Tile]:
    """Headline figures: score, status, cost."""
    summary = run.summary
    starts, best = len(run.attempts), "-" if summary["best_step"] is None else summary["best_step"]
    return [
        *_build_score_tile(run),
        Tile("status", summary["status"], f"{starts} start{'' if starts == 1 else 's'}"),
        Tile("steps", f"{summary['steps']:,}", f"best: {best}"),
        Tile(
            "rows trained on",
            f"{summary['rows_seen']:,}",
            f"{format_rate(summary['rows_per_second'])} rows/s while training",
        ),
        Tile(
            "total time",
            format_duration(summary["seconds"]["total"]),
            f"{format_duration(summary['seconds']['train'])} of it training",
        ),
        Tile("restarts", str(summary["restarts"]), _describe_restarts(run)),
    ]


def _build_score_tile(run: RunData) -> list[Tile]:
    if (split := next_steps.headline_split(run)) is None:
        return []
    (label, sign), headline = _headline_name_and_sign(run), get_metric(run.output).headline
    scores, ends = next_steps.best_metrics(run, split), _find_interval(run, split, headline, sign)
    note = "95 % interval {:.3f} to {:.3f}".format(*ends) if ends else f"{scores.get('rows', 0):,} rows"
    return [Tile(f"{answers.SPLIT_NAMES[split]} {label}", f"{sign * float(scores[headline]):.4f}", note)]


def _describe_restarts(run: RunData) -> str:
    lost = sum(event["cause"] == "node_lost" for event in run.events_of_kind("crashed"))
    crashes = f"{len(run.events_of_kind('crashed')) - lost} after a crash"
    return f"{crashes}, {lost} after a lost node" if lost else crashes


def _format_intro(run: RunData) -> str:
    recipe = run.config.recipe
    workers = run.summary["workers"] or recipe.train.workers
    device_text = f" on {run.summary['device']}" if run.summary["device"] else ""
    rows = f"{run.store.num_rows('train'):,} training rows" if run.store else "its training rows"
    strategy_text = [
        f" The forecast of memory chose {event['reason']}." for event in run.events_of_kind("strategy")[-1:]
    ]
    return (
        f"The recipe {recipe.name} fine-tunes the encoder {truncate(recipe.model.name, 60)} for {recipe.train.epochs} "
        f"epoch{'' if recipe.train.epochs == 1 else 's'} of {rows}, {recipe.global_batch_size} rows per step, on "
        f"{workers} worker{'' if workers == 1 else 's'}{device_text} in "
        f"{run.summary['precision'] or recipe.train.precision}.{''.join(strategy_text)}"
    )


# -------------------------------------------------------------------------------------------------------------- scores


def _headline_name_and_sign(run: RunData) -> tuple[str, int]:
    """Return (display name of the headline, sign): -1 for a negated error."""
    name = get_metric(run.output).headline
    return humanize_score_name(name.removeprefix("neg_")), -1 if name.startswith("neg_") else 1


def _find_interval(run: RunData, split: str, headline: str, sign: int) -> tuple[float, float] | None:
    """Ends of the bootstrap interval; None if all rows are equal, since the interval is then empty."""
    ends = (next_steps.find_scores(run, split) or {}).get("intervals", {}).get("scores", {}).get(headline)
    if not ends or ends[0] == ends[1]:
        return None
    low, high = sorted(sign * float(end) for end in ends)
    return low, high


def _build_score_table(run: RunData) -> Block:
    headline, (score_label, sign) = get_metric(run.output).headline, _headline_name_and_sign(run)
    rows: list[Sequence[str | int]] = []
    for split, name in answers.SPLIT_NAMES.items():
        scores = next_steps.best_metrics(run, split)
        if headline not in scores:
            continue
        ends = _find_interval(run, split, headline, sign)
        interval_text = "{:.4f} to {:.4f}".format(*ends) if ends else "-"
        rows.append((name, "this model", f"{sign * scores[headline]:.4f}", interval_text))
        overlap = run.summary["overlap"].get(split) or {}
        if headline in (overlap.get("scores_without") or {}):
            overlap_label = f"this model, without the {overlap['training_rows']:,} rows that are training rows too"
            rows.append((name, overlap_label, f"{sign * overlap['scores_without'][headline]:.4f}", "-"))
        sample_scores = next_steps.scores_on_baseline_rows(run, split)
        if (
            sample_scores is not None
            and sample_scores is not next_steps.find_scores(run, split)
            and headline in sample_scores["scores"]
        ):
            sample_label = f"this model, on the {sample_scores['rows']:,} rows of the baselines"
            rows.append((name, sample_label, f"{sign * sample_scores['scores'][headline]:.4f}", "-"))
        rows += [
            (name, other, f"{sign * value:.4f}", "-")
            for other, value in sorted(next_steps.list_baselines(run, split), key=lambda baseline: -baseline[1])
        ]
    if (title_split := next_steps.headline_split(run)) is None:
        return Note("There is no score yet: the run has no evaluation.")
    direction = "smaller is better" if sign < 0 else "larger is better"
    note = f"The headline score ({direction}). The validation rows choose the weights; the test rows do not."
    if run.baselines is None and run.output != "summary":
        note += " No baseline was measured. Finished runs with labels, numbers, tags or spans have baselines."
    elif run.baselines is not None and run.store is not None:
        training_rows, labeled_rows = run.baselines["training_rows"], run.store.num_labeled("train")
        note += (
            f" Baselines learned from {training_rows:,} of the {labeled_rows:,} training rows."
            if training_rows < labeled_rows
            else ""
        )
    return Table(
        _format_verdict(run, title_split, score_label, sign),
        ("rows", "model", score_label, "95 % interval"),
        rows,
        note,
        wide=True,
    )


def _format_verdict(run: RunData, split: str, score_label: str, sign: int) -> str:
    value = sign * float(next_steps.best_metrics(run, split)[get_metric(run.output).headline])
    title = f"{answers.SPLIT_NAMES[split].capitalize()} {score_label} {format_significant(value)}"
    comparison = next_steps.compare_with_baseline(run, split)
    if comparison is None:
        return title
    relation = {True: "ahead of", False: "NOT ahead of", None: "not significantly different from"}[comparison.is_ahead]
    is_sample = next_steps.scores_on_baseline_rows(run, split) is not next_steps.find_scores(run, split)
    sample_text = f", {format_significant(sign * comparison.score)} of the model on the same rows" if is_sample else ""
    return (
        f"{title}, {relation} the best baseline ({comparison.baseline_name}: "
        f"{format_significant(sign * comparison.baseline_score)}{sample_text})"
    )


# ------------------------------------------------------------------------------------------------------------ mistakes


def _build_mistake_table(run: RunData) -> list[Block]:
    rows = [
        *_worst_slices(run),
        *_worst_labels(run),
        *_confused_pairs(run),
        *_output_specific_mistakes(run),
        *_hardest_rows(run),
    ]
    if not rows:
        return []
    note = "The worst of each kind. The sections below have all of them."
    return [Table("Worst mistakes", ("kind", "where", "how bad"), rows, note, wide=True)]


def _worst_slices(run: RunData) -> list[tuple[str, str, str]]:
    if run.scores is None or not run.scores["rows"]:
        return []
    headline = answers.measure_headline(run.scores)
    return [
        (
            "slice",
            truncate(score_slice.name, 60),
            f"{headline.name} {format_significant(score_slice.value)} on {score_slice.rows:,} rows, "
            f"{format_significant(headline.overall_value)} on all",
        )
        for score_slice in answers.worse_slices(run)[:LINES_PER_KIND]
    ]


def _worst_labels(run: RunData) -> list[tuple[str, str, str]]:
    kind, rare = "type of entity" if run.output == "tags" else "label", next_steps.rare_labels(run)
    label_rows = [
        (
            kind,
            truncate(score_slice["class"], 60),
            f"{per_class.TOO_FEW_ROWS}: {score_slice['support']:,}, recall {score_slice['recall']:.2f}",
        )
        for score_slice in rare[:LINES_PER_KIND]
    ]
    if len(rare) > LINES_PER_KIND:
        label_rows.append((kind, f"{len(rare) - LINES_PER_KIND:,} more", per_class.TOO_FEW_ROWS))
    return label_rows + [
        (
            kind,
            truncate(name, 60),
            f"F1 {label_scores['f1']:.2f} (precision {label_scores['precision']:.2f}, recall "
            f"{label_scores['recall']:.2f}) on {label_scores['support']:,}",
        )
        for name, label_scores in next_steps.worst_labels(run)[:LINES_PER_KIND]
        if label_scores["f1"] < 1
    ]


def _confused_pairs(run: RunData) -> list[tuple[str, str, str]]:
    return [
        ("confusion", f"{truncate(true, 40)} → {truncate(predicted, 40)}", f"{rows:,} row{'' if rows == 1 else 's'}")
        for true, predicted, rows in next_steps.confused_pairs(run)[:LINES_PER_KIND]
    ]


def _output_specific_mistakes(run: RunData) -> list[tuple[str, str, str]]:
    """Mistakes that only questions and summaries have."""
    tables: dict[str, Any] = (run.scores or {"tables": {}})["tables"]
    rows = []
    if run.output == "spans" and tables.get("by_length"):
        worst = min(tables["by_length"], key=lambda length_bucket: float(length_bucket["f1"]))
        length = " to ".join(str(end) for end in sorted({worst["low"], worst["high"]})) + " tokens"
        rows.append(("length of the answer", length, f"F1 {worst['f1']:.2f} on {worst['rows']:,} questions"))
    if run.output == "summary" and "compared_with_lead" in tables:
        outcomes = tables["compared_with_lead"]
        total = sum(outcomes.values())
        rows.append(("summaries", "worse than the first sentences", f"{outcomes['worse']:,} of {total:,}"))
    return rows


def _hardest_rows(run: RunData) -> list[tuple[str, str, str]]:
    answer_rows = run.answers
    if answer_rows is None:
        return []
    rows = [int(row) for row in answer_rows.hardest_rows(4 * HARDEST_ROWS)]
    if run.output not in ("number", "tokens", "summary"):  # a correct answer is no mistake
        rows = [row for row in rows if not answer_rows.is_correct[row]]
    rows, lines = rows[:HARDEST_ROWS], list[tuple[str, str, str]]()
    for row, text in zip(rows, answer_rows.read_texts(rows), strict=True):
        place = answer_rows.format_location(row)
        place = (
            place if len(place) <= MAX_LOCATION_CHARS else f"...{place[3 - MAX_LOCATION_CHARS :]}"
        )  # the end has file and line
        lines.append(("hardest row", f"{truncate(text, MAX_TEXT_CHARS)} ({place})", _describe_mistake(run, row)))
    return lines


def _describe_mistake(run: RunData, row: int) -> str:
    answer_rows = run.answers
    assert answer_rows is not None  # by `_hardest_rows`
    loss = f"loss {format_number(float(answer_rows.loss[row]))}"
    if run.output in ("tokens", "summary"):
        return loss
    if run.output == "tags":
        answer_texts = [outputs.describe_entities(side[row]) for side in (answer_rows.target, answer_rows.prediction)]
    else:
        answer_texts = [_format_answer(side[row]) for side in (answer_rows.target, answer_rows.prediction)]
    return f"{truncate(answer_texts[0], 80)} predicted as {truncate(answer_texts[1], 80)}, {loss}"


def _format_answer(value: Any) -> str:
    if isinstance(value, float):
        return format_number(value)
    return value or "nothing" if isinstance(value, str) else ", ".join(str(part) or "-" for part in value) or "nothing"
