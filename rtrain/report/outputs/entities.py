"""Entities: scores by type, and kinds of mistakes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rtrain.metrics.entities import Entity, extract_entities
from rtrain.report.collect import RunData
from rtrain.report.drawing.blocks import Block, Note, Table
from rtrain.report.outputs import confusion

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


def build_blocks(run: RunData, tables: Mapping[str, Any]) -> list[Block]:
    answers = run.answers
    assert answers is not None  # by `answers.build_section`
    entity_blocks: list[Block] = [confusion.build_worst_table(tables, unit="type")]
    if (running_scores := (run.scores or {}).get("running_text")) is not None:
        text = (
            "Requests are running text; the other scores use the words of the rows. On "
            f"{running_scores['rows']:,} rows that were joined to running text and split again, F1 is "
            f"{running_scores['scores']['f1']:.3f} (precision "
            f"{running_scores['scores']['precision']:.3f}, recall {running_scores['scores']['recall']:.3f})."
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
