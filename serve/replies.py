"""JSON of replies: the answers of `Task.decode` and the results of routes as bytes."""

import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from starlette.responses import Response

MAX_CACHED_LABELS = 1 << 16
_ABSTAINED_SUFFIX = ',"abstained":true}'
"""End of a label that says that the model abstains."""


def to_json(document: object) -> str:
    """Serialize without whitespace. Raises `ValueError` for NaN and infinity, which no JSON parser reads."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def labels_to_json(answers: Sequence[Sequence[dict[str, Any]]]) -> str:
    """`to_json` of a list of `[{"label", "score"}, ...]`, some of them `abstained`. Parts are made once for each label:
    `json.dumps` takes four times as long for a model of many labels."""
    if not math.isfinite(sum(entry["score"] for answer in answers for entry in answer)):
        raise ValueError("a score is NaN or infinite")
    label_lists = [
        ",".join(
            [
                f"{_label_prefix(entry['label'])}{entry['score']!r}{_ABSTAINED_SUFFIX if 'abstained' in entry else '}'}"
                for entry in answer
            ]
        )
        for answer in answers
    ]
    return f"[[{'],['.join(label_lists)}]]" if label_lists else "[]"


@functools.lru_cache(MAX_CACHED_LABELS)
def _label_prefix(label: str) -> str:
    return f'{{"label":{to_json(label)},"score":'


def json_reply(
    document: Any, status: int = 200, headers: dict[str, str] | None = None, serialize: Callable[[Any], str] = to_json
) -> Response:
    """A NaN or infinity in the answer makes `serialize` raise, which becomes status 500."""
    return Response(serialize(document).encode(), status, headers, media_type="application/json")
