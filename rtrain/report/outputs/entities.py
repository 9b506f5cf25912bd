"""Entities: scores of each type, and what kinds of mistakes there are."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rtrain.metrics.entities import Entity, entities
from rtrain.report.collect import Collected
from rtrain.report.drawing.blocks import Block, Note, Table
from rtrain.report.outputs import confusion

MISSED, INVENTED, TYPE, EDGES, BOTH = ("missed", "invented", "wrong type", "wrong edges", "wrong type and edges")
MEANING = {
    MISSED: "nothing was tagged there",
    INVENTED: "tagged where there is none",
    TYPE: "found, as another type",
    EDGES: "found, but longer or shorter",
    BOTH: "overlaps, as another type",
}
MOST_NAMED = 12
"""Entities of one row."""
Mistake = tuple[str, Entity | None, Entity | None]
"""(kind, the true entity, the one that was found)."""


def blocks(run: Collected, tables: Mapping[str, Any]) -> list[Block]:
    answers = run.answers
    assert answers is not None  # section
    found: list[Block] = [confusion.worst(tables, unit="type")]
    if (running := (run.scores or {}).get("running_text")) is not None:
        text = (
            "Requests are running text, and the scores are by the words that the rows are cut into. Of "
            f"{running['rows']:,} rows put together as running text and cut again, F1 is "
            f"{running['scores']['f1']:.3f} (precision "
            f"{running['scores']['precision']:.3f}, recall {running['scores']['recall']:.3f})."
        )
        found.append(Note(text))
    each = [mistakes(true, said) for true, said in zip(answers.target, answers.prediction, strict=True)]
    counts = Counter((kind, _type(true, said)) for row in each for kind, true, said in row)
    if not counts:
        return found
    rows = [(kind, type_, count) for (kind, type_), count in sorted(counts.items(), key=lambda item: -item[1])]
    total = sum(counts.values())
    kinds = Counter(kind for row in each for kind, _, _ in row)
    worst, number = kinds.most_common(1)[0]
    title = f"{100 * number / total:.0f} % of the {total:,} mistakes are entities that are {_said(worst)}"
    meaning = ", ".join(f"{kind}: {MEANING[kind]}" for kind in MEANING if kind in kinds)
    note = f"{meaning[0].upper()}{meaning[1:]}."
    return [*found, Table(title, ("mistake", "type", "entities"), rows[:40], note, wide=True)]


def _said(kind: str) -> str:
    return {TYPE: "of the wrong type", EDGES: "cut wrongly", BOTH: "of the wrong type and cut wrongly"}.get(kind, kind)


def _type(true: Entity | None, said: Entity | None) -> str:
    if true is None or said is None or true.type == said.type:
        return (true or said or Entity("", 0, 0)).type
    return f"{true.type} as {said.type}"


def mistakes(true: Sequence[str], said: Sequence[str]) -> list[Mistake]:
    """The wrong entities of one row, each once; a true one that overlaps a found one makes one mistake with it."""
    gold, given = entities(true), entities(said)
    lost = [one for one in gold if one not in given]
    extra = [one for one in given if one not in gold]
    found: list[Mistake] = []
    for one in lost:
        over = [other for other in extra if other.start < one.end and one.start < other.end]
        if not over:
            found.append((MISSED, one, None))
            continue
        best = max(over, key=lambda other: min(other.end, one.end) - max(other.start, one.start))
        extra.remove(best)
        same = (best.start, best.end) == (one.start, one.end)
        found.append((TYPE if same else EDGES if best.type == one.type else BOTH, one, best))
    return found + [(INVENTED, None, other) for other in extra]


def named(tags: Sequence[str]) -> str:
    """A row's entities by type and place, from 1: `Disease at word 3`."""
    found = entities(tags)
    texts = []
    for one in found[:MOST_NAMED]:
        numbers = str(one.start + 1) if one.end - one.start == 1 else f"{one.start + 1} to {one.end}"
        texts.append(f"{one.type} at word {numbers}")
    if len(found) > MOST_NAMED:
        texts.append(f"{len(found) - MOST_NAMED} more")
    return ", ".join(texts) or "no entity"
