"""study.html of a study of aggregation frequencies: its table, what fewer exchanges buy, and what they cost."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rtrain import documents
from rtrain.errors import UserError
from rtrain.report.drawing import charts
from rtrain.report.drawing.blocks import Block, Figure, Note, Section, Table, Tile
from rtrain.report.drawing.charts import Dot
from rtrain.report.drawing.page import render, write as write_page
from rtrain.run import Run
from tune.results import study_table
from tune.results.study_table import FIRST

PUBLISHED = {
    "trained": "BERT for SQuAD, on many GPUs",
    "time": "from nearly 7 hours to 30 minutes, with faster loading and evaluation in it",
    "score": "no loss of accuracy is told of",
}
"""What the published study tells of itself (Faster NLP with Deep Learning: Distributed Training, Determined AI, 2020).
Its figures are of other machines: what can be compared is what fewer exchanges save, and what they cost."""
CLOSE = 0.01
"""Difference of the score: a setting that loses no more is told as one that costs little."""


def write(study: Run) -> Path:
    """Make the study's study.html. Raises `UserError` for a study that has not ended."""
    kept = study.study_table
    if not kept.is_file():
        raise UserError(f"{study} is a study that has not ended; rtrain tune --resume --out {study} goes on")
    return write_page(study.study_page, page(study.name, documents.read(kept)))


def page(name: str, document: Mapping[str, Any]) -> str:
    """The page of a study's table as it was kept."""
    found, sound = study_table.of_document(document), [one for one in document["results"] if one["error"] is None]
    tables: list[Block] = [
        Table(part.title, ("", *(f"k = {k}" for k in part.frequencies)), [(at, *row) for at, row in part.rows.items()])
        for part in found.parts
    ]
    notes: list[Block] = [Note(note) for note in found.notes]
    sections = [
        Section("trade", "Score for the time", "", _trade(document["headline"], sound)),
        Section("table", "The table", "k: passes of a worker between two exchanges of gradients.", tables + notes),
    ]
    sections.append(Section("published", "Beside the published study", "", [_beside(document["headline"], sound)]))
    about = f"A study of aggregation frequencies by rtrain, {len(document['results'])} trainings"
    return render(name, about, _tiles(document["headline"], sound), sections, lead=told(document["headline"], sound))


def _beside(headline: str, results: list[Mapping[str, Any]]) -> Table:
    """The published study and this one, in the same words."""
    workers = max((one["workers"] for one in results), default=0)
    losses = [one["lost"] for one in results if one["frequency"] != FIRST and one["lost"] is not None]
    here = {
        "trained": f"{len(results)} trainings on {workers} workers",
        "time": told(headline, results),
        "score": f"{headline}: {min(losses):+.4f} to {max(losses):+.4f} lost" if losses else "-",
    }
    note = "Faster NLP with Deep Learning: Distributed Training (Determined AI, 2020), by its own summary."
    rows = [(name, published, here[name]) for name, published in PUBLISHED.items()]
    return Table("What is told of both", ("", "published", "here"), rows, note, wide=True)


def told(headline: str, results: list[Mapping[str, Any]]) -> str:
    """The finding in one sentence: the fastest of the settings that lose little."""
    others = [one for one in results if one["frequency"] != FIRST and None not in (one["lost"], one["saved"])]
    close = [one for one in others if round(one["lost"], 4) <= CLOSE]
    if not close:
        return f"No frequency above {FIRST} keeps the {headline} within {CLOSE:g} of that with k = {FIRST}."
    best = max(close, key=lambda one: one["saved"])
    word = "less" if best["saved"] >= 0 else "more"
    return (
        f"{best['optimizer']} with k = {best['frequency']} takes {abs(best['saved']):.0%} {word} time than with "
        f"k = {FIRST}, for {-best['lost']:+.4f} of {headline}."
    )


def _tiles(headline: str, results: list[Mapping[str, Any]]) -> list[Tile]:
    return [
        Tile(f"{headline}, {one['optimizer']}, k = {FIRST}", f"{one['score']:.4f}", f"{one['seconds']:,.0f} s")
        for one in results
        if one["frequency"] == FIRST
    ]


def _trade(headline: str, results: list[Mapping[str, Any]]) -> list[Block]:
    names = list(dict.fromkeys(one["optimizer"] for one in results))
    items = [
        Dot(
            *(one["seconds"], one["score"], names.index(one["optimizer"]), f"k={one['frequency']}"),
            f"{one['optimizer']}, k = {one['frequency']}: {one['score']:.4f} in {one['seconds']:,.0f} s",
        )
        for one in results
        if one["seconds"]
    ]
    if not items:
        return []
    chart = charts.dots(items, names, "seconds of training", headline)
    return [Figure(f"The {headline} on the test rows for the time", chart, "Each point is a training to its end.")]
