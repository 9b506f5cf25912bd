"""Answers as JSON, without blanks. Labels with scores, which a model of many labels has many of, are written from parts
that are made once for each label: `json.dumps` takes four times as long for them."""

import functools
import json
import math
from collections.abc import Sequence
from typing import Any

LABELLED = ("classes", "labels")
"""The outputs of tasks (`Task.output`) whose answers are labels with scores."""
MOST_LABELS = 1 << 16
_ABSTAINED = ',"abstained":true}'
"""End of a label that says that the model abstains."""


def text(document: object) -> str:
    """Raises `ValueError` for a number that is none, or endless: no JSON parser reads it."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def labelled(answers: Sequence[Sequence[dict[str, Any]]]) -> str:
    """What `text` makes of a list of `[{"label", "score"}, ...]`, some of them `abstained`, and as it raises."""
    if not math.isfinite(sum(one["score"] for answer in answers for one in answer)):
        raise ValueError("a score is no number")
    rows = [
        ",".join(
            [f"{_begun(one['label'])}{one['score']!r}{_ABSTAINED if 'abstained' in one else '}'}" for one in answer]
        )
        for answer in answers
    ]
    return f"[[{'],['.join(rows)}]]" if rows else "[]"


@functools.lru_cache(MOST_LABELS)
def _begun(label: str) -> str:
    return f'{{"label":{text(label)},"score":'
