"""Output of verbs on stdout."""

import json
import re
from collections.abc import Mapping
from typing import Any

_COLUMN_SEPARATORS = re.compile(r"[\t\r\n]+")
"""Separators of printed columns and lines."""


def print_result(document: Any, as_json: bool, *lines: str) -> None:
    """Print a verb's result: as one JSON object, else as text, with the next command in the last line."""
    print(escape_surrogates(json.dumps(document, ensure_ascii=False) if as_json else "\n".join(lines)))


def escape_surrogates(text: str) -> str:
    """Escape lone surrogates like JSON: file names that are not UTF-8 have them, and a UTF-8 terminal rejects them."""
    return re.sub(r"[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text)


def format_answer(answer: Any) -> str:
    """Format an answer (labels and scores, also by head, a number or a text) on one tab-separated line."""
    if isinstance(answer, float):
        return f"{answer:.4f}"
    if isinstance(answer, list):
        return "\t".join(format_answer(entry) for entry in answer)
    if isinstance(answer, dict):
        has_heads = all(isinstance(value, list) for value in answer.values())
        labeled_texts = ((f"{name}\t" if has_heads else "", format_answer(value)) for name, value in answer.items())
        return "\t".join(name + text for name, text in labeled_texts)
    return _COLUMN_SEPARATORS.sub(" ", str(answer))


def select_entries(answer: Any, thresholds: Mapping[str, float] | None, top: int | None) -> Any:
    """Select the shown entries of an answer: those above their threshold (`Task.label_thresholds`), or all with
    `is_selected` when `top` is set."""
    if thresholds is None or not isinstance(answer, list):
        return answer
    if top is None:
        return [entry for entry in answer if entry["score"] >= thresholds[entry["label"]]]
    return [{**entry, "is_selected": entry["score"] >= thresholds[entry["label"]]} for entry in answer]


def format_entries(answer: Any, thresholds: Mapping[str, float] | None) -> str:
    """Format the entries of `select_entries` on one line."""
    if thresholds is None or not isinstance(answer, list):
        return format_answer(answer)
    if not answer:
        return "(no label)"
    return "\t".join(
        f"{entry['label']}\t{entry['score']:.4f}"
        + ("" if entry.get("is_selected", True) else f" (below {thresholds[entry['label']]:.4g})")
        for entry in answer
    )


def format_batch_report(report: dict[str, Any]) -> str:
    """Format the counts of rows of a batch prediction."""
    count_text = (
        f"{report['rows']:,} rows: {report['answered']:,} answered, {report['empty']:,} empty, "
        f"{report['unusable']:,} unusable"
    )
    reuse_text = f", {report['reused_rows']:,} of them before" if report["reused_rows"] else ""
    return f"{count_text}{reuse_text}; {report['seconds']:.1f} s, {report['texts_per_second']:,.0f} texts/s"
