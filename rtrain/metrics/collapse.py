"""A model that gives almost all rows one answer, though their targets are not as one-sided."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from rtrain.core.ragged import Head

COLLAPSE_SHARE, MIN_COLLAPSE_ROWS = 0.95, 10
"""A model counts as collapsed if at least this share of the rows with other targets gets the most frequent answer; and
the minimum number of such rows."""
COLLAPSE_STD_RATIO = 0.05
"""For numbers: maximum ratio of the answers' standard deviation to the targets'."""


def find_collapsed_answers(
    output: str, head: Head, target: Sequence[Any], prediction: Sequence[Any]
) -> list[dict[str, Any]]:
    """Return the answer that almost all rows get, for each head; usually empty. `output`: the kind of the answers.

    Keys: `answer`, `rows` (rows with this answer), `total_rows`, `other_rows` (rows with another target),
    `other_rows_with_answer` (rows among these with this answer).
    """
    if output == "number":
        numbers, values = np.asarray(prediction, dtype=np.float64), np.asarray(target, dtype=np.float64)
        if len(values) < MIN_COLLAPSE_ROWS or not numbers.std() < COLLAPSE_STD_RATIO * values.std():
            return []
        counts = ("rows", "total_rows", "other_rows", "other_rows_with_answer")
        return [{"answer": f"{numbers.mean():.4g}", **dict.fromkeys(counts, len(values))}]
    if output not in ("classes", "labels", "heads", "tags", "spans"):
        return []
    answers_by_head: list[tuple[str, list[Any], list[Any]]] = [("", list(target), list(prediction))]
    if output == "heads":
        names = [name for name, _ in head.facts["heads"]]
        answers_by_head = [
            (f"{name}=", [row[n] for row in target], [row[n] for row in prediction]) for n, name in enumerate(names)
        ]
    collapsed = []
    for prefix, head_targets, head_answers in answers_by_head:
        # A row without a target for this head is skipped.
        pairs = [
            (_answer_key(a), _answer_key(b))
            for a, b in zip(head_targets, head_answers, strict=True)
            if output != "heads" or a
        ]
        if not pairs:
            continue
        answer, rows = Counter(value for _, value in pairs).most_common(1)[0]
        is_collapsed = [entry == answer for value, entry in pairs if value != answer]
        if len(is_collapsed) >= MIN_COLLAPSE_ROWS and np.mean(is_collapsed) >= COLLAPSE_SHARE:
            description = prefix + (", ".join(sorted(answer)) if isinstance(answer, frozenset) else str(answer))
            collapsed.append(
                {
                    "answer": description or "nothing",
                    "rows": rows,
                    "total_rows": len(pairs),
                    "other_rows": len(is_collapsed),
                    "other_rows_with_answer": sum(is_collapsed),
                }
            )
    return collapsed


def _answer_key(answer: Any) -> Any:
    """Key of equal answers: the set of labels or tags, or the string. Spans are never equal."""
    return frozenset(answer) if isinstance(answer, list) else answer if isinstance(answer, str) else object()
