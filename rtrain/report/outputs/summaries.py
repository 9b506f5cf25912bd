"""Summaries: beside the first sentences and the oracle's, how long they are, and where their sentences stand."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rtrain.metrics import rouge
from rtrain.report.collect import Collected
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Figure, Table
from rtrain.report.drawing.svg import score_name

COMPARED = (("", "summary"), ("lead_", "first sentences"), ("over_lead_", "difference"), ("oracle_", "oracle"))
BESIDE = ("lead_", "oracle_", "over_lead_")
"""Beginnings of the names of scores that are shown beside the model's own."""
SCORES = (*rouge.ROUGES, "rouge", "bleu")


def blocks(run: Collected, tables: Mapping[str, Any]) -> list[Block]:
    assert run.scores is not None  # answers.section
    ends: Mapping[str, Sequence[float]] = run.scores.get("intervals", {}).get("scores", {})
    return [
        *(_lengths(tables["lengths"]), _positions(tables["positions"])),
        _beside(run.scores, ends, tables["beside_lead"]),
    ]


# ------------------------------------------------------------------------------------------------------------- figures


def _beside(document: Mapping[str, Any], ends: Mapping[str, Sequence[float]], sides: Mapping[str, int]) -> Table:
    scores, rows = document["scores"], []
    for name in SCORES:
        digits = 2 if name == "bleu" else 4
        for prefix, who in COMPARED:
            if (own := f"{prefix}{name}") in scores:
                interval = " to ".join(_fixed(end, digits) for end in ends[own]) if own in ends else "-"
                sign = "+" if prefix == "over_lead_" else ""
                rows.append((score_name(name), who, _fixed(scores[own], digits, sign), interval))
    note = (
        "95 % bootstrap intervals over the documents. The difference is the summary's score less that of the first "
        "sentences, on the same documents: where its interval holds 0, these documents do not tell the two apart. "
        "ROUGE is 0 to 1 (without a number: the mean of the three), BLEU 0 to 100. By ROUGE "
        f"{sides['better']:,} of the summaries are better than the first sentences, {sides['worse']:,} worse and "
        f"{sides['same']:,} the same."
    )
    return Table(_verdict(document, ends), ("score", "of", "value", "95 % interval"), rows, note)


def _verdict(document: Mapping[str, Any], ends: Mapping[str, Sequence[float]]) -> str:
    own, lead = document["scores"]["rouge"], document["scores"]["lead_rouge"]
    title = f"ROUGE {own:.3f} against {lead:.3f} of the first sentences"
    if "over_lead_rouge" not in ends:
        return title
    low, high = ends["over_lead_rouge"]
    if low > 0 or high < 0:
        return f"{title}: {'better' if low > 0 else 'worse'}, beyond chance"
    return f"{title}: {document['rows']:,} documents do not tell them apart"


def _fixed(value: float, digits: int, sign: str = "") -> str:
    return format(round(value, digits) + 0.0, f"{sign}.{digits}f")  # no -0.00


def _lengths(found: Mapping[str, Any]) -> Table:
    names = {"picked": "summary", "oracle": "oracle's sentences", "document": "whole document"}
    rows = [(name, f"{found[key]['sentences']:.1f}", f"{found[key]['words']:.1f}") for key, name in names.items()]
    picked = found["picked"]
    title = (
        f"A summary has {picked['sentences']:.1f} sentences and {picked['words']:.0f} words; the budget is "
        f"{found['budget']:,} words"
    )
    note = (
        "Means over the documents; words are counted by blanks. Sentences are taken, the best first, until the next "
        f"does not fit; {found['over_budget']:,} summaries are longer than the budget, for a first sentence is taken "
        "whatever its length."
    )
    return Table(title, ("", "sentences", "words"), rows, note)


def _positions(found: Mapping[str, Any]) -> Figure:
    edges = [100 * place / found["tenths"] for place in range(found["tenths"] + 1)]
    shares = {}
    for name, key in (("summary", "picked"), ("oracle", "oracle")):
        counts = np.array(found[key], dtype=np.float64)
        shares[name] = (100 * counts / max(1.0, counts.sum())).tolist()
    title = (
        f"{shares['summary'][0]:.0f} % of the summaries' sentences are in the first tenth of their document, of the "
        f"oracle's {shares['oracle'][0]:.0f} %"
    )
    note = (
        "Filled: the sentences of the summaries; outline: those of the oracle, which are learned. Places are by "
        "sentences: the only sentence of a document stands at its beginning."
    )
    return Figure(title, charts.histogram(edges, shares, "place in the document (%)", "sentences (%)"), note)
