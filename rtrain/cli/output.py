"""What verbs print on stdout."""

import json
from typing import Any


def show(document: Any, as_json: bool, *lines: str) -> None:
    """What a verb has found: as one JSON object, else as text, whose last line says what to do next."""
    print(json.dumps(document, ensure_ascii=False) if as_json else "\n".join(lines))


def answer_text(answer: Any) -> str:
    """Labels and scores of a text, a number, or an answer in words, tab-separated."""
    if isinstance(answer, float):
        return f"{answer:.4f}"
    if isinstance(answer, list):
        return "\t".join(answer_text(entry) for entry in answer)
    return "\t".join(f"{value:.4f}" if isinstance(value, float) else str(value) for value in answer.values())
