"""Blocks of the answers for each kind of output: labels, entities, questions, numbers, masked text, summaries."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rtrain.metrics import per_class, summaries
from rtrain.metrics.entities import Entity, extract_entities
from rtrain.report import charts, stats
from rtrain.report.charts import LineSeries, VerticalMark
from rtrain.report.collect import RunData
from rtrain.report.page import Block, Cell, Figure, Note, Table
from rtrain.report.svg import format_number, format_significant, humanize_score_name, truncate

MAX_CLASSES = 100
"""Most labels of the heat map: those with the most mistakes."""
MAX_NARROW_LABELS = 14
"""Most labels of a heat map of normal width."""
MAX_PAIRS = 15


def build_confusion_blocks(tables: Mapping[str, Any], head: str = "", unit: str = "label") -> list[Block]:
    """Pairs, worst labels and matrix from a `classes` table of `rtrain.metrics.classes`; `head` begins the titles."""
    confusion_blocks: list[Block] = []
    if tables["confused"]:
        confusion_blocks.append(_build_pairs_table(tables, head))
    if "per_class" in tables:
        confusion_blocks.append(build_worst_table(tables, head))
    if "confusion" in tables:
        confusion_blocks.append(_build_matrix(tables["confusion"], head, unit))
    return confusion_blocks


def build_worst_table(tables: Mapping[str, Any], head: str = "", unit: str = "label") -> Table:
    few, enough = per_class.split_by_support(tables["per_class"])
    rows: list[list[Cell]] = [
        [
            *(truncate(label_scores["class"], 40), label_scores["support"]),
            *(f"{label_scores[name]:.2f}" for name in per_class.SCORES),
            per_class.TOO_FEW_ROWS if label_scores in few else "",
        ]
        for label_scores in (*few[:MAX_PAIRS], *enough[:MAX_PAIRS])
    ]
    note = (
        f"Precision: share of correct predictions of this {unit}; recall: share of its true rows that were found; "
        f"F1: their harmonic mean. Entries with fewer than {per_class.MIN_SUPPORT} true rows come first."
    )
    title = f"{head}The {unit}s with the lowest F1"
    columns = [unit, "true", "precision", "recall", "F1", ""]
    if not few:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return Table(title, tuple(columns), rows, note)


def _build_pairs_table(tables: Mapping[str, Any], head: str) -> Table:
    pairs = tables["confused"][:MAX_PAIRS]
    rows = [(truncate(pair["true"], 40), truncate(pair["predicted"], 40), pair["rows"]) for pair in pairs]
    note = f"The {len(rows)} pairs with the most rows."
    if "confusion" in tables:
        counts = np.array(tables["confusion"]["counts"])
        share = sum(pair["rows"] for pair in pairs) / (counts.sum() - np.trace(counts))
        subject = f"These {len(rows)} pairs hold" if len(rows) > 1 else "This pair holds"
        note = f"{subject} {100 * share:.0f} % of all wrong answers."
    title = f"{head}Most confused: {rows[0][0]} predicted as {rows[0][1]}"
    return Table(title, ("true", "predicted", "rows"), rows, note)


def _build_matrix(confusion: Mapping[str, Any], head: str, unit: str) -> Figure:
    names, counts = confusion["labels"], np.array(confusion["counts"], dtype=np.int64)
    wrong = counts - np.diag(np.diag(counts))
    if unit == "label":
        mistakes = wrong.sum(axis=0) + wrong.sum(axis=1)
        codes = np.sort(np.argsort(-mistakes, kind="stable")[:MAX_CLASSES])
        order = codes[stats.confusion_order(counts[np.ix_(codes, codes)])]
        order_note = "both in the same order: confused labels are neighbors"
    else:
        order, order_note = np.arange(len(names))[:MAX_CLASSES], f"both by {unit}"
    chart = charts.draw_heatmap(counts[np.ix_(order, order)], [names[code] for code in order], unit)
    note = (
        f"A row per true {unit}, a column per predicted one, {order_note}. Blue, on the diagonal: right; orange: "
        "wrong; the "
        "darker, the larger the share of the row. Numbers are rows, if there is room; wide charts scroll sideways."
    )
    if len(order) < len(names):
        note += f" Drawn are {len(order)} of {len(names)}, those with the most mistakes."
    title = f"{head}{int(wrong.sum()):,} of {int(counts.sum()):,} predictions are wrong"
    return Figure(title, chart, note, wide=len(order) > MAX_NARROW_LABELS)


MISSED, INVENTED, TYPE, EDGES, TYPE_AND_EDGES = (
    "missed",
    "invented",
    "wrong type",
    "wrong edges",
    "wrong type and edges",
)
MISTAKE_MEANINGS = {
    MISSED: "no prediction",
    INVENTED: "no true entity",
    TYPE: "predicted with another type",
    EDGES: "predicted longer or shorter",
    TYPE_AND_EDGES: "overlaps, with another type",
}
MAX_LISTED_ENTITIES = 12
"""Most listed entities of a row."""
EntityMistake = tuple[str, Entity | None, Entity | None]
"""(kind, true entity, predicted entity)."""


def build_entity_blocks(run: RunData, tables: Mapping[str, Any]) -> list[Block]:
    answers = run.answers
    assert answers is not None  # by `answers.build_section`
    entity_blocks: list[Block] = [build_worst_table(tables, unit="type")]
    if (running_scores := (run.scores or {}).get("running_text")) is not None:
        text = (
            f"Requests are running text; the other scores use the words of the rows. On {running_scores['rows']:,} "
            f"rows that were joined to running text and split again, F1 is {running_scores['scores']['f1']:.3f} "
            f"(precision {running_scores['scores']['precision']:.3f}, recall {running_scores['scores']['recall']:.3f})."
        )
        entity_blocks.append(Note(text))
    mistakes_by_row = [
        find_mistakes(true, predicted) for true, predicted in zip(answers.target, answers.prediction, strict=True)
    ]
    counts = Counter(
        (kind, _describe_type(true, predicted)) for row in mistakes_by_row for kind, true, predicted in row
    )
    if not counts:
        return entity_blocks
    rows = [(kind, type_, count) for (kind, type_), count in sorted(counts.items(), key=lambda item: -item[1])]
    total = sum(counts.values())
    kinds = Counter(kind for row in mistakes_by_row for kind, _, _ in row)
    worst, number = kinds.most_common(1)[0]
    title = f"{100 * number / total:.0f} % of the {total:,} mistakes are entities that are {_describe_kind(worst)}"
    meaning = ", ".join(f"{kind}: {MISTAKE_MEANINGS[kind]}" for kind in MISTAKE_MEANINGS if kind in kinds)
    note = f"{meaning[0].upper()}{meaning[1:]}."
    return [*entity_blocks, Table(title, ("mistake", "type", "entities"), rows[:40], note, wide=True)]


def _describe_kind(kind: str) -> str:
    return {TYPE: "of the wrong type", EDGES: "cut wrongly", TYPE_AND_EDGES: "of the wrong type and cut wrongly"}.get(
        kind, kind
    )


def _describe_type(true: Entity | None, predicted: Entity | None) -> str:
    if true is None or predicted is None or true.type == predicted.type:
        return (true or predicted or Entity("", 0, 0)).type
    return f"{true.type} as {predicted.type}"


def find_mistakes(true: Sequence[str], predicted: Sequence[str]) -> list[EntityMistake]:
    """List the mistakes of one row. A true entity that overlaps a predicted one forms a single mistake with it."""
    true_entities, predicted_entities = extract_entities(true), extract_entities(predicted)
    missed_entities = [true_entity for true_entity in true_entities if true_entity not in predicted_entities]
    unmatched = [predicted_entity for predicted_entity in predicted_entities if predicted_entity not in true_entities]
    row_mistakes: list[EntityMistake] = []
    for entity in missed_entities:
        overlapping = [other for other in unmatched if other.start < entity.end and entity.start < other.end]
        if not overlapping:
            row_mistakes.append((MISSED, entity, None))
            continue
        best = max(overlapping, key=lambda other: min(other.end, entity.end) - max(other.start, entity.start))
        unmatched.remove(best)
        is_same_span = (best.start, best.end) == (entity.start, entity.end)
        row_mistakes.append(
            (TYPE if is_same_span else EDGES if best.type == entity.type else TYPE_AND_EDGES, entity, best)
        )
    return row_mistakes + [(INVENTED, None, other) for other in unmatched]


def describe_entities(tags: Sequence[str]) -> str:
    """Format a row's entities by type and word, counted from 1: `Disease at word 3`."""
    row_entities = extract_entities(tags)
    texts = []
    for entity in row_entities[:MAX_LISTED_ENTITIES]:
        numbers = str(entity.start + 1) if entity.end - entity.start == 1 else f"{entity.start + 1} to {entity.end}"
        texts.append(f"{entity.type} at word {numbers}")
    if len(row_entities) > MAX_LISTED_ENTITIES:
        texts.append(f"{len(row_entities) - MAX_LISTED_ENTITIES} more")
    return ", ".join(texts) or "no entity"


def build_question_blocks(run: RunData, tables: Mapping[str, Any]) -> list[Block]:
    question_blocks: list[Block] = []
    if tables["by_length"]:
        question_blocks.append(_build_length_table(tables["by_length"]))
    if "no_answer" in tables:
        assert run.scores is not None  # by `answers.build_section`
        question_blocks.append(_build_no_answer_chart(tables["no_answer"], run.scores["scores"]["f1"]))
    return question_blocks


def _build_length_table(groups: list[dict[str, Any]]) -> Table:
    names = [
        str(group["low"]) if group["low"] == group["high"] else f"{group['low']} to {group['high']}" for group in groups
    ]
    return Table(
        "Scores by the length of the answer",
        ("tokens", "questions", "F1", "exact match"),
        [
            (name, group["rows"], f"{group['f1']:.3f}", f"{group['exact_match']:.3f}")
            for name, group in zip(names, groups, strict=True)
        ],
        "F1 of tokens, 0 to 1. Partial answers count in F1 but not in exact match.",
    )


def _build_no_answer_chart(no_answer: Mapping[str, Any], f1: float) -> Figure:
    curve = no_answer["curve"]
    xs = [point["threshold"] for point in curve]
    series = [
        LineSeries(name, xs, [point[key] for point in curve])
        for name, key in (("F1", "f1"), ("exact match", "exact_match"), ("answered", "answered"))
    ]
    best = max(curve, key=lambda point: float(point["f1"]))
    # The threshold was chosen on other rows and may lie outside of the curve.
    place = min(max(no_answer["threshold"], min(xs)), max(xs))
    chart = charts.draw_lines(series, "threshold", "share", [VerticalMark(place, "chosen", "best")])
    unanswered_note = (
        ""
        if no_answer["unanswered_share"] is None
        else f" {100 * no_answer['unanswered_share']:.0f} % of them got no answer."
    )
    note = (
        "An answer is given if it beats the score of no answer by more than the threshold, which was chosen on the "
        f"validation rows (green line: {no_answer['threshold']:.2f}). {no_answer['rows']:,} questions have no "
        f"answer.{unanswered_note} The best F1 of any threshold here is {best['f1']:.3f}, at {best['threshold']:.2f}."
    )
    return Figure(f"F1 {f1:.3f} at the chosen threshold for no answer", chart, note)


MAX_POINTS = 1500
MAX_SCALE_STEPS = 25
"""Steps of a scale up to which its confusion matrix is drawn."""


def build_number_blocks(run: RunData, tables: Mapping[str, Any]) -> list[Block]:
    answers = run.answers
    assert answers is not None  # section
    positions = stats.sample_rows(len(answers), MAX_POINTS)
    target, predictions = answers.target, answers.prediction
    errors = predictions - target
    points_note = (
        f"{len(positions):,} of {len(answers):,} rows are drawn."
        if len(positions) < len(answers)
        else "A point per row."
    )
    direction = "too high" if errors.mean() > 0 else "too low"
    residuals, correlation = tables["residuals"], stats.pearson_correlation(target, predictions)
    figures: list[Block] = [
        Figure(
            f"Predicted against true: correlation {'undefined' if correlation is None else f'{correlation:.2f}'}",
            charts.draw_scatter(
                target[positions], predictions[positions], "true score", "predicted score", diagonal=True
            ),
            f"On the dashed line the prediction is right. {points_note}",
        ),
        Figure(
            f"Half of the predictions are off by {format_significant(float(np.median(np.abs(errors))))} or less",
            charts.draw_histogram(
                residuals["edges"], {"error": residuals["rows"]}, "predicted minus true score", "rows", (0.0, "right")
            ),
            f"On average the predictions are {abs(float(errors.mean())):.3g} {direction}.",
        ),
    ]
    scale = tables.get("scale", {})
    # On a finer scale hardly a prediction is right to the step, and the scatter says more.
    if len(scale.get("confusion", {}).get("labels", ())) in range(1, MAX_SCALE_STEPS + 1):
        figures += build_confusion_blocks(scale, "On the scale of the scores: ", "score")
    return figures


def build_loss_blocks(run: RunData, tables: Mapping[str, Any]) -> list[Block]:
    """The losses of blocks of masked text, which has no other answer to look at."""
    answers = run.answers
    assert answers is not None  # section
    finite_losses = answers.loss[np.isfinite(answers.loss)]
    if not len(finite_losses):
        return []
    edges = stats.bin_edges(finite_losses)
    counts = np.histogram(finite_losses, edges)[0].tolist()
    median_loss, high_loss = np.percentile(finite_losses, (50, 95))
    title = f"Half of the blocks have a perplexity of {format_number(round(float(np.exp(median_loss)), 1))} or less"
    hard_perplexity = format_number(round(float(np.exp(high_loss)), 1))
    note = (
        "Mean loss of a block's masked tokens; perplexity is its exponential. One block in twenty has more than "
        f"{hard_perplexity}: they are often lists, tables or another language."
    )
    return [Figure(title, charts.draw_histogram(edges.tolist(), {"blocks": counts}, "loss of a block", "blocks"), note)]


COMPARED_SUMMARIES = (
    ("", "summary"),
    ("lead_", "first sentences"),
    ("over_lead_", "difference"),
    ("oracle_", "oracle"),
)
REFERENCE_PREFIXES = ("lead_", "oracle_", "over_lead_")
"""Beginnings of the names of scores that are shown beside the model's own."""
SCORES = (*summaries.ROUGE_NAMES, "rouge", "bleu")


def build_summary_blocks(run: RunData, tables: Mapping[str, Any]) -> list[Block]:
    assert run.scores is not None  # answers.section
    ends: Mapping[str, Sequence[float]] = run.scores.get("intervals", {}).get("scores", {})
    return [
        *(_build_summary_length_table(tables["lengths"]), _build_position_chart(tables["positions"])),
        _build_rouge_table(run.scores, ends, tables["compared_with_lead"]),
    ]


# ------------------------------------------------------------------------------------------------------------- figures


def _build_rouge_table(
    document: Mapping[str, Any], ends: Mapping[str, Sequence[float]], outcomes: Mapping[str, int]
) -> Table:
    scores, rows = document["scores"], []
    for name in SCORES:
        digits = 2 if name == "bleu" else 4
        for prefix, who in COMPARED_SUMMARIES:
            if (score_key := f"{prefix}{name}") in scores:
                interval = (
                    " to ".join(_format_fixed(end, digits) for end in ends[score_key]) if score_key in ends else "-"
                )
                sign = "+" if prefix == "over_lead_" else ""
                rows.append((humanize_score_name(name), who, _format_fixed(scores[score_key], digits, sign), interval))
    note = (
        "95 % bootstrap intervals over the documents. The difference is the summary's score less that of the first "
        "sentences, on the same documents: where its interval holds 0, these documents do not tell the two apart. "
        "ROUGE is 0 to 1 (without a number: the mean of the three), BLEU 0 to 100. By ROUGE "
        f"{outcomes['better']:,} of the summaries are better than the first sentences, {outcomes['worse']:,} worse and "
        f"{outcomes['same']:,} the same."
    )
    return Table(_format_rouge_verdict(document, ends), ("score", "of", "value", "95 % interval"), rows, note)


def _format_rouge_verdict(document: Mapping[str, Any], ends: Mapping[str, Sequence[float]]) -> str:
    rouge_scores, lead = document["scores"]["rouge"], document["scores"]["lead_rouge"]
    title = f"ROUGE {rouge_scores:.3f} against {lead:.3f} of the first sentences"
    if "over_lead_rouge" not in ends:
        return title
    low, high = ends["over_lead_rouge"]
    if low > 0 or high < 0:
        return f"{title}: {'better' if low > 0 else 'worse'}, beyond chance"
    return f"{title}: {document['rows']:,} documents do not tell them apart"


def _format_fixed(value: float, digits: int, sign: str = "") -> str:
    return format(round(value, digits) + 0.0, f"{sign}.{digits}f")  # no -0.00


def _build_summary_length_table(lengths: Mapping[str, Any]) -> Table:
    names = {"picked": "summary", "oracle": "oracle's sentences", "document": "whole document"}
    rows = [(name, f"{lengths[key]['sentences']:.1f}", f"{lengths[key]['words']:.1f}") for key, name in names.items()]
    picked = lengths["picked"]
    title = (
        f"A summary has {picked['sentences']:.1f} sentences and {picked['words']:.0f} words; the budget is "
        f"{lengths['budget']:,} words"
    )
    note = (
        "Means over the documents; words are counted by blanks. Sentences are taken, the best first, until the next "
        f"does not fit; {lengths['over_budget']:,} summaries are longer than the budget, for a first sentence is taken "
        "whatever its length."
    )
    return Table(title, ("", "sentences", "words"), rows, note)


def _build_position_chart(positions: Mapping[str, Any]) -> Figure:
    edges = [100 * place / positions["tenths"] for place in range(positions["tenths"] + 1)]
    shares = {}
    for name, key in (("summary", "picked"), ("oracle", "oracle")):
        counts = np.array(positions[key], dtype=np.float64)
        shares[name] = (100 * counts / max(1.0, counts.sum())).tolist()
    title = (
        f"{shares['summary'][0]:.0f} % of the summaries' sentences are in the first tenth of their document, of the "
        f"oracle's {shares['oracle'][0]:.0f} %"
    )
    note = (
        "Filled: the sentences of the summaries; outline: those of the oracle, which are learned. Places are by "
        "sentences: the only sentence of a document stands at its beginning."
    )
    return Figure(title, charts.draw_histogram(edges, shares, "place in the document (%)", "sentences (%)"), note)
