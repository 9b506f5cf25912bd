"""Entities: scores of each type, and what kinds of mistakes there are, with examples in their words."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rtrain.metrics.entities import Entity, entities
from rtrain.report.collect import Collected
from rtrain.report.drawing.blocks import Block, Note, Table
from rtrain.report.drawing.svg import short
from rtrain.report.kinds import confusion

MISSED, INVENTED, TYPE, EDGES, BOTH = ("missed", "invented", "wrong type", "wrong edges", "wrong type and edges")
MEANING = {
    MISSED: "nothing was tagged there",
    INVENTED: "tagged where there is none",
    TYPE: "found, as another type",
    EDGES: "found, but longer or shorter",
    BOTH: "overlaps, as another type",
}
MOST_EXAMPLES = 3
MOST_NAMED = 12
"""Entities of one row."""
EXAMPLE_ROWS = 300
"""Hardest rows among which examples are looked for."""
AROUND = 3
"""Words on either side of an example."""
Mistake = tuple[str, Entity | None, Entity | None]
"""(kind, the true entity, the one that was found)."""


def blocks(run: Collected, tables: Mapping[str, Any]) -> list[Block]:
    answers = run.answers
    assert answers is not None  # section
    found: list[Block] = [confusion.bars(tables, "By type of entity.", "type"), confusion.worst(tables, unit="type")]
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
    order = [int(row) for row in answers.hardest(EXAMPLE_ROWS) if each[int(row)]]
    named = examples(each, words(run, order), order)
    rows = [
        (kind, type_, count, "; ".join(named.get((kind, type_), ())) or "-")
        for (kind, type_), count in sorted(counts.items(), key=lambda item: -item[1])
    ]
    total = sum(counts.values())
    kinds = Counter(kind for row in each for kind, _, _ in row)
    worst, number = kinds.most_common(1)[0]
    title = f"{100 * number / total:.0f} % of the {total:,} mistakes are entities that are {_said(worst)}"
    meaning = ", ".join(f"{kind}: {MEANING[kind]}" for kind in MEANING if kind in kinds)
    note = (
        f"{meaning[0].upper()}{meaning[1:]}. Examples are from the hardest rows, [the words in question] in "
        "brackets; an arrow leads to what was tagged instead."
    )
    return [*found, Table(title, ("mistake", "type", "entities", "examples"), rows[:40], note, wide=True)]


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


def examples(
    each: Sequence[Sequence[Mistake]], words: Mapping[int, Sequence[str]], order: Sequence[int]
) -> dict[tuple[str, str], list[str]]:
    """A few mistakes of each kind and type in their words, looked for among the rows in that order."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in order:
        for kind, true, said in each[row]:
            known = found.setdefault((kind, _type(true, said)), [])
            if row in words and len(known) < MOST_EXAMPLES:
                known.append(_example(words[row], true or said, said if true else None))
    return found


def _example(words: Sequence[str], entity: Entity | None, said: Entity | None) -> str:
    assert entity is not None  # a mistake has one of the two
    before = " ".join(words[max(0, entity.start - AROUND) : entity.start])
    inner = " ".join(words[entity.start : entity.end])
    after = " ".join(words[entity.end : entity.end + AROUND])
    text = f"{before} [{short(inner, 60)}] {after}".strip()
    if said is not None and (said.start, said.end) != (entity.start, entity.end):
        text += f" → {short(' '.join(words[said.start : said.end]), 60)}"
    return short(text, 160)


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


def words(run: Collected, rows: Sequence[int]) -> dict[int, list[str]]:
    """The words of each row as they are written; where these are not kept whole, as its tokens spell them. Then rows
    of several windows are left out; without a store, all."""
    answers = run.answers
    if answers is None or run.store is None or run.tokenizer is None or not rows:
        return {}
    import tokenizers

    spelling = tokenizers.Tokenizer.from_file(str(run.tokenizer))
    positions = np.array(rows, dtype=np.int64)
    tokens, texts = run.store.read(answers.split, positions), run.store.texts(answers.split, positions)
    found = {}
    for place, row in enumerate(rows):
        written = texts[place]
        if written is not None and len(kept := written[0].split(" ")) == len(answers.target[row]):
            found[row] = kept
            continue
        one = tokens.pick([place])
        starts = np.flatnonzero(one.targets >= -1)  # a word is answered at its first token
        ends = [*starts[1:].tolist(), len(one.ids)]
        pieces = [one.ids[start:end].tolist() for start, end in zip(starts.tolist(), ends, strict=True)]
        if len(one.lengths) == 1 and len(pieces) == len(answers.target[row]):
            found[row] = [word.removeprefix("##") for word in spelling.decode_batch(pieces, skip_special_tokens=True)]
    return found
