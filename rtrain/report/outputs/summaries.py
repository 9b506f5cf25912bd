"""Summaries: beside the first sentences and the oracle's, how long they are, and where their sentences stand."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rtrain.metrics import rouge
from rtrain.report.collect import RunData
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Figure, Table
from rtrain.report.drawing.svg import humanize_score_name

COMPARED_SUMMARIES = (
    ("", "summary"),
    ("lead_", "first sentences"),
    ("over_lead_", "difference"),
    ("oracle_", "oracle"),
)
REFERENCE_PREFIXES = ("lead_", "oracle_", "over_lead_")
"""Beginnings of the names of scores that are shown beside the model's own."""
SCORES = (*rouge.ROUGE_NAMES, "rouge", "bleu")


def build_blocks(run: RunData, tables: Mapping[str, Any]) -> list[Block]:
    assert run.scores is not None  # answers.section
    ends: Mapping[str, Sequence[float]] = run.scores.get("intervals", {}).get("scores", {})
    return [
        *(_build_length_table(tables["lengths"]), _build_position_chart(tables["positions"])),
        _build_score_table(run.scores, ends, tables["compared_with_lead"]),
    ]


# ------------------------------------------------------------------------------------------------------------- figures


def _build_score_table(
    document: Mapping[str, Any], ends: Mapping[str, Sequence[float]], outcomes: Mapping[str, int]
) -> Table:
    scores, rows = document["scores"], []
    for name in SCORES:
        digits = 2 if name == "bleu" else 4
        for prefix, who in COMPARED_SUMMARIES:
            if (score_key := f"{prefix}{name}") in scores:
                interval = (
                    " to ".join(_format_fixed(end, digits) for end in ends[score_key]) if score_key in ends else "-"
                )
                sign = "+" if prefix == "over_lead_" else ""
                rows.append((humanize_score_name(name), who, _format_fixed(scores[score_key], digits, sign), interval))
    note = (
        "95 % bootstrap intervals over the documents. The difference is the summary's score less that of the first "
        "sentences, on the same documents: where its interval holds 0, these documents do not tell the two apart. "
        "ROUGE is 0 to 1 (without a number: the mean of the three), BLEU 0 to 100. By ROUGE "
        f"{outcomes['better']:,} of the summaries are better than the first sentences, {outcomes['worse']:,} worse and "
        f"{outcomes['same']:,} the same."
    )
    return Table(_format_verdict(document, ends), ("score", "of", "value", "95 % interval"), rows, note)


def _format_verdict(document: Mapping[str, Any], ends: Mapping[str, Sequence[float]]) -> str:
    rouge_scores, lead = document["scores"]["rouge"], document["scores"]["lead_rouge"]
    title = f"ROUGE {rouge_scores:.3f} against {lead:.3f} of the first sentences"
    if "over_lead_rouge" not in ends:
        return title
    low, high = ends["over_lead_rouge"]
    if low > 0 or high < 0:
        return f"{title}: {'better' if low > 0 else 'worse'}, beyond chance"
    return f"{title}: {document['rows']:,} documents do not tell them apart"


def _format_fixed(value: float, digits: int, sign: str = "") -> str:
    return format(round(value, digits) + 0.0, f"{sign}.{digits}f")  # no -0.00


def _build_length_table(lengths: Mapping[str, Any]) -> Table:
    names = {"picked": "summary", "oracle": "oracle's sentences", "document": "whole document"}
    rows = [(name, f"{lengths[key]['sentences']:.1f}", f"{lengths[key]['words']:.1f}") for key, name in names.items()]
    picked = lengths["picked"]
    title = (
        f"A summary has {picked['sentences']:.1f} sentences and {picked['words']:.0f} words; the budget is "
        f"{lengths['budget']:,} words"
    )
    note = (
        "Means over the documents; words are counted by blanks. Sentences are taken, the best first, until the next "
        f"does not fit; {lengths['over_budget']:,} summaries are longer than the budget, for a first sentence is taken "
        "whatever its length."
    )
    return Table(title, ("", "sentences", "words"), rows, note)


def _build_position_chart(positions: Mapping[str, Any]) -> Figure:
    edges = [100 * place / positions["tenths"] for place in range(positions["tenths"] + 1)]
    shares = {}
    for name, key in (("summary", "picked"), ("oracle", "oracle")):
        counts = np.array(positions[key], dtype=np.float64)
        shares[name] = (100 * counts / max(1.0, counts.sum())).tolist()
    title = (
        f"{shares['summary'][0]:.0f} % of the summaries' sentences are in the first tenth of their document, of the "
        f"oracle's {shares['oracle'][0]:.0f} %"
    )
    note = (
        "Filled: the sentences of the summaries; outline: those of the oracle, which are learned. Places are by "
        "sentences: the only sentence of a document stands at its beginning."
    )
    return Figure(title, charts.draw_histogram(edges, shares, "place in the document (%)", "sentences (%)"), note)
