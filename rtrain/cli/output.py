"""What verbs print on stdout."""

import json
import re
from collections.abc import Mapping
from typing import Any

_APART = re.compile(r"[\t\r\n]+")
"""What parts the columns and the lines that are printed."""


def show(document: Any, as_json: bool, *lines: str) -> None:
    """What a verb has found: as one JSON object, else as text, whose last line says what to do next."""
    print(unicode(json.dumps(document, ensure_ascii=False) if as_json else "\n".join(lines)))


def unicode(text: str) -> str:
    """`text` with the code of each half character, of which a file's name that is not UTF-8 has some, as JSON escapes
    it. A terminal in a UTF-8 locale takes none."""
    return re.sub(r"[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text)


def answer_text(answer: Any) -> str:
    """Labels and scores of a text, those of each head behind its name, a number, or an answer in words: tab-separated,
    on one line."""
    if isinstance(answer, float):
        return f"{answer:.4f}"
    if isinstance(answer, list):
        return "\t".join(answer_text(entry) for entry in answer)
    if isinstance(answer, dict):
        heads = all(isinstance(value, list) for value in answer.values())
        parts = ((f"{name}\t" if heads else "", answer_text(value)) for name, value in answer.items())
        return "\t".join(name + text for name, text in parts)
    return _APART.sub(" ", str(answer))


def given(answer: Any, thresholds: Mapping[str, float] | None, top: int | None) -> Any:
    """What is shown of an answer with several entries: those that count (`Task.thresholds`). With `top` that many, each
    of which then says whether it counts."""
    if thresholds is None or not isinstance(answer, list):
        return answer
    if top is None:
        return [entry for entry in answer if entry["score"] >= thresholds[entry["label"]]]
    return [{**entry, "given": entry["score"] >= thresholds[entry["label"]]} for entry in answer]


def given_text(answer: Any, thresholds: Mapping[str, float] | None) -> str:
    """A line for what `given` returns."""
    if thresholds is None or not isinstance(answer, list):
        return answer_text(answer)
    if not answer:
        return "(no label)"
    return "\t".join(
        f"{entry['label']}\t{entry['score']:.4f}"
        + ("" if entry.get("given", True) else f" (below {thresholds[entry['label']]:.4g})")
        for entry in answer
    )


def batch_text(report: dict[str, Any]) -> str:
    """What became of the rows of files."""
    counts = (
        f"{report['rows']:,} rows: {report['answered']:,} answered, {report['empty']:,} empty, {report['bad']:,} bad"
    )
    reused = f", {report['reused_rows']:,} of them before" if report["reused_rows"] else ""
    return f"{counts}{reused}; {report['seconds']:.1f} s, {report['texts_per_second']:,.0f} texts/s"
