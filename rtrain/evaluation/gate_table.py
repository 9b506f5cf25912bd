"""The gate's document for a person: a table of both sides, the plain rivals, and the verdict in one sentence."""

from collections.abc import Iterator
from typing import Any

from rtrain.metrics import per_class
from rtrain.metrics.registry import as_read

MOST_SLICES = 5
"""Slices that are shown: those where the candidate is worst."""


def text(found: dict[str, Any]) -> str:
    """What `rtrain.evaluation.gate.run` returns, as a terminal shows it. The verdict comes last."""
    return "\n".join(_lines(found))


def sentence(found: dict[str, Any]) -> str:
    """`refuse: accuracy 0.905 against 0.925, ...`. A promoted one needs only what comes first."""
    reasons = found["reasons"] or ["no reason given"]
    if found["verdict"] != "promote":
        return f"{found['verdict']}: {'; '.join(reasons)}"
    more = len(reasons) - 1
    rest = f"; {more} more finding{'s' if more > 1 else ''} for it, none against" if more else ""
    return f"promote: {reasons[0]}{rest}"


def brief(found: dict[str, Any]) -> list[str]:
    """The verdict in a sentence, and a line for each plain model: for the end of another command's report."""
    return [sentence(found), *(f"beside it, {line}" for line in rivals(found))]


def rivals(found: dict[str, Any]) -> Iterator[str]:
    """`TF-IDF and a linear model: 0.909 at 0.85 ms; 1.2 points ahead of it, at no cost of time`. Nothing where the
    candidate could not be asked. Milliseconds are of texts of all lengths, with the tokenizer."""
    own, *others = found["rivals"] or [None]
    sign = as_read(found["headline"]["name"] if found["headline"] else "")[1]
    for one in others:
        if one["absent"]:
            yield f"{one['name']}: not measured: {one['absent']}"
            continue
        ahead = 100 * (own["score"] - one["score"])
        each = one["points_per_ms"]
        price = "at no cost of time" if each is None else f"{each:.2f} for each further millisecond"
        side = "ahead of" if ahead >= 0 else "behind"
        score = sign * one["score"]
        yield f"{one['name']}: {score:.3f} at {one['ms']:.2f} ms; {abs(ahead):.1f} points {side} it, {price}"


def _lines(found: dict[str, Any]) -> Iterator[str]:
    against = found["against"]
    yield f"against {against['name']} {against['version']}, on {found['rows']:,} {found['source'] or 'rows'}"
    yield ""
    yield f"{'':<34}{'base':>11}{'candidate':>11}"
    for one in found["scores"]:
        name, sign = as_read(one["name"])
        first, other, difference = (sign * one[key] for key in ("first", "other", "difference"))
        low, high = sorted((sign * one["low"], sign * one["high"]))
        yield f"{name:<34}{first:>11.4f}{other:>11.4f}  {difference:+.4f} ({low:.4f} to {high:.4f})"
    for one in found["slices"][:MOST_SLICES]:
        own, (score, sign) = one["difference"], as_read(one["difference"]["name"])
        first, other, difference = (sign * own[key] for key in ("first", "other", "difference"))
        name = f"{score}, {one['column']} {one['value']}"[:33]
        yield f"{name:<34}{first:>11.4f}{other:>11.4f}  {difference:+.4f} ({own['rows']:,} rows)"
    if classes := found["classes"]:
        yield ""
        yield from per_class.format_pairs(classes, ("base", "cand."))
        yield ""
    for one in found["latency"]:
        faster = (
            f"  {one['ratio']:.2f} times as fast ({one['low']:.2f} to {one['high']:.2f}), {one['calls']} calls each"
        )
        yield f"{'p50 ms, ' + one['bucket']:<34}{one['base_p50']:>11.2f}{one['p50']:>11.2f}{faster}"
        yield f"{'p99 ms, ' + one['bucket']:<34}{one['base_p99']:>11.2f}{one['p99']:>11.2f}"
    yield f"{'MB, all files':<34}{found['base_megabytes']:>11.1f}{found['megabytes']:>11.1f}"
    if found["memory_mb"] is not None:
        yield f"{'MB, loaded':<34}{found['base_memory_mb']:>11.1f}{found['memory_mb']:>11.1f}"
    if found["read_otherwise"]:
        yield f"{found['read_otherwise']:,} of {found['rows']:,} rows are read as other tokens than the base reads"
    if unknown := found["unknown_labels"]:
        yield f"{unknown:,} of {found['rows']:,} rows have a label that the base lacks, and count as wrong for both"
    if (trained_on := found["trained_on"]) is None:
        yield "whether the candidate was trained on these rows is not known: a token store or its keys are gone"
    elif trained_on:
        yield f"{trained_on:,} more rows are left out: the candidate was trained on them, or one side was tuned by them"
    yield from (f"beside it, {line}" for line in rivals(found))
    yield ""
    yield from (f"{one['word']:<8} {one['text']}" for one in found["findings"])
    yield ""
    yield f"{sentence(found)} ({found['seconds']:.0f} s)"
