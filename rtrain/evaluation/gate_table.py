"""The gate document as text: a table of both models, the reference models, and the verdict in one sentence.

`rtrain inspect` imports it, which needs the core alone.
"""

from collections.abc import Iterator
from typing import Any

from rtrain.metrics import per_class
from rtrain.metrics.registry import split_sign

MAX_SLICES = 5
"""Shown slices: those where the candidate is worst."""


def format_verdict(document: dict[str, Any]) -> str:
    """Format the document of `rtrain.evaluation.gate.run_gate` for a terminal. The verdict comes last."""
    return "\n".join(_format_lines(document))


def format_sentence(document: dict[str, Any]) -> str:
    """Format the verdict: `refuse: accuracy 0.905 against 0.925, ...`. `promote` shows only the first reason."""
    reasons = document["reasons"] or ["no reason given"]
    if document["verdict"] != "promote":
        return f"{document['verdict']}: {'; '.join(reasons)}"
    more_count = len(reasons) - 1
    rest_text = f"; {more_count} more finding{'s' if more_count > 1 else ''} for it, none against" if more_count else ""
    return f"promote: {reasons[0]}{rest_text}"


def format_brief(document: dict[str, Any]) -> list[str]:
    """Format the verdict in a sentence and a line per reference model, for the report of another command."""
    return [format_sentence(document), *(f"beside it, {line}" for line in format_rivals(document))]


def format_rivals(document: dict[str, Any]) -> Iterator[str]:
    """Yield `TF-IDF and a linear model: 0.909 at 0.85 ms; 1.2 points ahead of it, at no cost of time`.

    Yields nothing if the candidate could not be compared. Milliseconds cover texts of all lengths, with the tokenizer.
    """
    candidate, *rivals = document["rivals"] or [None]
    sign = split_sign(document["headline"]["name"] if document["headline"] else "")[1]
    for rival in rivals:
        if rival["absence_reason"]:
            yield f"{rival['name']}: not measured: {rival['absence_reason']}"
            continue
        points, points_per_ms = 100 * (candidate["score"] - rival["score"]), rival["points_per_ms"]
        relation = f"{abs(points):.1f} points {'ahead of' if points >= 0 else 'behind'} it"
        price = "at no cost of time" if points_per_ms is None else f"{points_per_ms:.2f} for each further millisecond"
        yield f"{rival['name']}: {sign * rival['score']:.3f} at {rival['ms']:.2f} ms; {relation}, {price}"


def _format_lines(document: dict[str, Any]) -> Iterator[str]:
    baseline, rows = document["baseline"], f"{document['rows']:,}"
    yield f"against {baseline['name']} {baseline['version']}, on {rows} {document['source'] or 'rows'}"
    yield ""
    yield f"{'':<34}{'baseline':>11}{'candidate':>11}"
    for entry in document["scores"]:
        name, figures, sign = _format_difference_cells(entry)
        low, high = sorted((sign * entry["low"], sign * entry["high"]))
        yield f"{name:<34}{figures} ({low:.4f} to {high:.4f})"
    for entry in document["slices"][:MAX_SLICES]:
        score, figures, _ = _format_difference_cells(entry["difference"])
        name = f"{score}, {entry['column']} {entry['value']}"[:33]
        yield f"{name:<34}{figures} ({entry['difference']['rows']:,} rows)"
    if classes := document["classes"]:
        yield from ("", *per_class.format_pairs(classes, ("base", "cand.")), "")
    for entry in document["latency"]:
        speedup_text = (
            f"  {entry['ratio']:.2f} times as fast ({entry['low']:.2f} to {entry['high']:.2f}), "
            f"{entry['calls']} calls each"
        )
        yield f"{'p50 ms, ' + entry['bucket']:<34}{entry['baseline_p50']:>11.2f}{entry['p50']:>11.2f}{speedup_text}"
        yield f"{'p99 ms, ' + entry['bucket']:<34}{entry['baseline_p99']:>11.2f}{entry['p99']:>11.2f}"
    yield f"{'MB, all files':<34}{document['baseline_megabytes']:>11.1f}{document['megabytes']:>11.1f}"
    if document["memory_mb"] is not None:
        yield f"{'MB, loaded':<34}{document['baseline_memory_mb']:>11.1f}{document['memory_mb']:>11.1f}"
    if differing_rows := document["differing_rows"]:
        yield f"{differing_rows:,} of {rows} rows have other tokens than with the baseline's tokenizer"
    if unknown := document["unknown_labels"]:
        yield f"{unknown:,} of {rows} rows have a label that the baseline lacks; they count as wrong for both"
    if (excluded := document["excluded_rows"]) is None:
        yield "unknown whether the candidate was trained on these rows: a token store or its keys are missing"
    elif excluded:
        yield f"{excluded:,} more rows are excluded: the candidate was trained on them, or one model was tuned by them"
    yield from (f"beside it, {line}" for line in format_rivals(document))
    yield ""
    yield from (f"{finding['decision']:<8} {finding['text']}" for finding in document["findings"])
    yield ""
    yield f"{format_sentence(document)} ({document['seconds']:.0f} s)"


def _format_difference_cells(difference: dict[str, Any]) -> tuple[str, str, int]:
    """Return (name of the score, its cells, sign)."""
    name, sign = split_sign(difference["name"])
    first, other, change = (sign * difference[key] for key in ("first", "other", "difference"))
    return name, f"{first:>11.4f}{other:>11.4f}  {change:+.4f}", sign
