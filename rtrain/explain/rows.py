"""Explanations of rows of a token store, by their texts as they are written, or else as their tokens spell them.

The work is bounded by a number of tokens: a row that is explained is explained alike on every machine. A caller may
bound the time, too, which leaves out the last rows.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rtrain.batch import Encoded, Tokens, Window
from rtrain.explain import words
from rtrain.explain.explainer import Explained, Explainer, Reading
from rtrain.explain.gradients import Stopped
from rtrain.predict import Predictor
from rtrain.tasks.base import Input, Task

if TYPE_CHECKING:
    import tokenizers

STEPS = (32, 16, 8)
"""Steps of the integral, the same for all rows: the most that the budget allows."""
BUDGET = 100_000
"""Tokens that pass through the model and back: about half a minute of MiniLM on two cores; 20 short rows need a tenth
of it."""


def plan(lengths: Sequence[int], budget: int = BUDGET) -> tuple[int, int]:
    """(number of explained rows, steps). Where even the fewest steps are too many, the last rows are left out."""
    for steps in STEPS:
        if sum(lengths) * (steps + 1) <= budget:
            return len(lengths), steps
    number, total = 0, 0
    while total + lengths[number] * (STEPS[-1] + 1) <= budget:
        total += lengths[number] * (STEPS[-1] + 1)
        number += 1
    return number, STEPS[-1]


def explain(
    predictor: Predictor,
    tokens: Tokens,
    paired: bool,
    budget: int = BUDGET,
    texts: Sequence[tuple[str, str | None] | None] = (),
    stop: Callable[[], bool] = lambda: False,
    explained: Callable[[int], None] = lambda rows: None,
) -> dict[str, Any]:
    """{"steps", "rows": one per row that was explained}, as JSON; `paired`: the rows are of two texts. `texts`: those
    of the rows as they are written, as far as they are kept (`Store.texts`). No row is begun or ended once `stop()` is
    true; `explained` is told how many there are after each.

    A row is {"texts": [[field, text], ...], "answers": [{"label", "span", "value", "baseline", "completeness_error",
    "words", "sentences"}, ...]}; a word or a sentence is [number of its text, start, end, attribution]. Raises
    `UserError` where the model's answers are not explained.
    """
    explainer = Explainer(predictor)
    number, steps = plan(tokens.lengths_of_rows.tolist(), budget)
    rows = []
    for place in range(number):
        if stop():
            break
        row = tokens.pick([place])
        known = _as_written(predictor, row, texts[place]) if place < len(texts) else None
        asked, encoded = known or read(predictor, row, paired)
        [output] = predictor.run([encoded])
        try:
            answers = explainer.explain(asked, encoded, output, steps=steps, stop=stop).answers
        except Stopped:
            break
        rows.append(_row(answers, asked, predictor.task))
        explained(len(rows))
    return {"steps": steps, "rows": rows}


def _as_written(predictor: Predictor, row: Tokens, text: tuple[str, str | None] | None) -> tuple[Input, Encoded] | None:
    """A row's texts and tokens; None where its texts are not kept, or too little of them to make the row's tokens."""
    if text is None:
        return None
    fields = predictor.task.fields
    asked: Input = text[0] if text[1] is None else dict(zip(fields, (text[0], text[1]), strict=True))
    if predictor.flaw(asked) is not None:
        return None
    [encoded] = predictor.encode([asked])
    return (asked, encoded) if np.array_equal(encoded.ids, row.ids) else None


def read(predictor: Predictor, row: Tokens, paired: bool) -> tuple[Input, Encoded]:
    """The texts of one row, and its tokens with the characters that each one covers."""
    tokenizer, ids = predictor.tokenizer, row.ids.tolist()
    windows = [
        Window(int(length), int(second) if paired else int(length))
        for length, second in zip(row.lengths, row.second, strict=True)
    ]
    added = tokenizer.get_added_tokens_decoder()
    unknown = getattr(tokenizer.model, "unk_token", None)  # stands for a word, although it is a special token
    special = {number for number, token in added.items() if token.special and token.content != unknown}
    spans, texts = [(0, 0)] * len(ids), []
    sides = words.sides(Encoded(ids, windows, False, spans), [number in special for number in ids], paired)
    for side in range(1 + paired):
        sequence, owners = _merged(ids, sides, windows, side, predictor.artifact.facts.get("stride", 0))
        text, found = spelt(tokenizer, sequence)
        texts.append(text)
        for place, owner in owners:
            spans[place] = found[owner]
    asked: Input = dict(zip(predictor.task.fields, texts, strict=True)) if paired else texts[0]
    return asked, Encoded(ids, windows, False, spans)


def spelt(tokenizer: "tokenizers.Tokenizer", ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
    """The text that tokens spell, and the characters of each token; one that is spelt with the next token has none."""
    starts = [list(ids[: number + 1]) for number in range(len(ids))]
    # Every beginning is decoded: what a token spells may depend on the tokens before it.
    begun = tokenizer.decode_batch(starts, skip_special_tokens=False)
    text, end, spans = begun[-1] if begun else "", 0, []
    for part in begun:
        start = end
        if text.startswith(part):
            end = max(end, len(part))
        else:  # the next token changes it, as in "it '" and "it's"
            while end < len(part) and text[end : end + 1] == part[end]:
                end += 1
        blank = len(text[start:end]) - len(text[start:end].lstrip())
        spans.append((start + blank, end))
    return text, spans


def _merged(
    ids: Sequence[int], sides: Sequence[int], windows: Sequence[Window], side: int, stride: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """The tokens of one text, each once, and for each place of it in the windows the number of its token.

    One text of a pair is whole in every window; neighbouring windows share `stride` tokens of the other one.
    """
    begin, parts = 0, []
    for window in windows:
        parts.append([place for place in range(begin, begin + window.tokens) if sides[place] == side])
        begin += window.tokens
    whole = all([ids[place] for place in part] == [ids[place] for place in parts[0]] for part in parts)
    merged: list[int] = []
    owners: list[tuple[int, int]] = []
    for number, part in enumerate(parts):
        first = 0 if whole or not number else max(0, len(merged) - stride)
        owners += [(place, first + offset) for offset, place in enumerate(part)]
        merged += [ids[place] for place in part[len(merged) - first :]]
    return merged, owners


def _row(answers: Sequence[Explained], asked: Input, task: Task) -> dict[str, Any]:
    texts = [[task.fields[0], asked]] if isinstance(asked, str) else [[name, text] for name, text in asked.items()]
    return {"texts": texts, "answers": [_answer(answer) for answer in answers]}


def _answer(answer: Explained) -> dict[str, Any]:
    error = answer.completeness_error
    return {
        "label": answer.label,
        "span": None if answer.span is None else list(answer.span),
        "value": _rounded(answer.value),
        "baseline": _rounded(answer.baseline),
        "completeness_error": None if error is None else _rounded(error),
        "words": _parts(answer.texts, "words"),
        "sentences": _parts(answer.texts, "sentences"),
    }


def _parts(readings: Sequence[Reading], name: str) -> list[list[float]]:
    return [
        [number, part.start, part.end, _rounded(part.attribution)]
        for number, reading in enumerate(readings)
        for part in getattr(reading, name)
    ]


def _rounded(value: float) -> float:
    """The value to four digits: equal on machines whose last bits differ, and half as long in the file."""
    return float(f"{value:.4g}")
