"""Exports of annotation tools -> flat rows: Label Studio, doccano and Prodigy, of labels of texts and of entities.

A row has the columns `text`, `label` (one label, or a list), `tokens` and `tags` (the words of the text, and a BIO tag
of each), `answer`, and all others of the export. Entities have character offsets there; here they are placed on the
words that rtrain cuts in requests too. An entity that begins or ends inside a word takes the complete word.

`answer` is `accept` for a finished annotation; rows of training files with another answer are left out and counted.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any, NamedTuple

from rtrain.core.errors import quote_value
from rtrain.core.text_segmentation import find_word_spans
from rtrain.data.readers.tabular import iter_json_rows

FORMATS = ("label_studio", "doccano", "prodigy")
ANSWER, ACCEPTED = "answer", "accept"
FORM_HINTS = {
    "label_studio": 'export JSON: [{"data": {"text": "..."}, "annotations": [...]}]',
    "doccano": 'export JSONL: {"text": "...", "label": [[0, 5, "PER"]]}',
    "prodigy": 'export JSONL: {"text": "...", "spans": [...], "answer": "accept"}',
}


class InvalidExport(Exception):
    """The file is not an export of the tool."""


class _InvalidRow(Exception):
    """Why a row cannot be used, and what to do."""


class _Span(NamedTuple):
    start: int
    end: int
    label: str


def read_annotations(file: IO[bytes], format: str) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """(line, columns by name), or (line, reason) of each row, in order; the line is the row's number in a list of JSON.
    Raises `InvalidExport`."""
    convert = {"label_studio": _convert_label_studio, "doccano": _convert_doccano, "prodigy": _convert_prodigy}[format]
    for line, document in _read_list(file) if format == "label_studio" else iter_json_rows(file):
        try:
            if not isinstance(document, dict):
                raise _InvalidRow(f"not an object; {FORM_HINTS[format]}")
            yield line, convert(document)
        except _InvalidRow as bad:
            yield line, str(bad)


def _read_list(file: IO[bytes]) -> Iterator[tuple[int, Any]]:
    text = file.read().decode("utf-8", errors="surrogateescape").removeprefix("\ufeff")
    try:
        documents = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidExport(f"not JSON: {error}") from None
    if not isinstance(documents, list):
        raise InvalidExport(f"it is no list; {FORM_HINTS['label_studio']}")
    return enumerate(documents, start=1)


# ----------------------------------------------------------------------------------------------------------- the tools


def _convert_label_studio(task: dict[str, Any]) -> dict[str, Any]:
    """A task of the format JSON, or of JSON-MIN, which has the result under the names of its tags."""
    annotations = task.get("annotations", task.get("completions"))
    if annotations is None:
        spans = [span for value in task.values() for span in _list_objects(value) if "labels" in span]
        choices = {
            name: value["choices"] for name, value in task.items() if isinstance(value, dict) and "choices" in value
        }
        columns = {**task, **{name: _unwrap(labels) for name, labels in choices.items()}}
        return _make_row(columns, task.get("text"), columns.get("label"), spans)
    data = task.get("data")
    if not isinstance(data, dict):
        raise _InvalidRow(f"no object `data`; {FORM_HINTS['label_studio']}")
    finished = [entry for entry in _list_objects(annotations) if not entry.get("was_cancelled")]
    values = [result["value"] for result in _list_objects((finished or [{}])[0].get("result")) if "value" in result]
    values = [value for value in values if isinstance(value, dict)]
    labels: list[Any] = [label for value in values for label in value.get("choices", [])]
    labels += [value[name] for value in values for name in ("rating", "number") if name in value]
    text = data.get("text", next((value for value in data.values() if isinstance(value, str)), None))
    answer = ACCEPTED if finished else "unlabeled"
    row = _make_row({"id": task.get("id"), **data}, text, _unwrap(labels), [v for v in values if "labels" in v])
    return {**row, ANSWER: answer}


def _convert_doccano(row: dict[str, Any]) -> dict[str, Any]:
    """A row of JSONL: entities are [start, end, label], or objects in `entities`."""
    label = row.get("label", row.get("labels"))
    entries = [entry for entry in label or [] if isinstance(entry, list)] if isinstance(label, list) else []
    spans: list[dict[str, Any]] = [dict(zip(("start", "end", "label"), entry, strict=False)) for entry in entries]
    spans += [
        {"start": entity.get("start_offset"), "end": entity.get("end_offset"), "label": entity.get("label")}
        for entity in _list_objects(row.get("entities"))
    ]
    return _make_row(row, row.get("text"), None if spans else _unwrap(label), spans)


def _convert_prodigy(row: dict[str, Any]) -> dict[str, Any]:
    """A row of JSONL: entities are `spans`; the label is `label`, or the options in `accept`."""
    label = _unwrap(row["accept"]) if isinstance(row.get("accept"), list) else row.get("label")
    is_accepted = row.get(ANSWER, ACCEPTED) == ACCEPTED
    return _make_row(row, row.get("text"), label, _list_objects(row.get("spans")) if is_accepted else [])


def _list_objects(value: Any) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _unwrap(labels: Any) -> Any:
    """The label of a list of one; None for an empty list."""
    if not isinstance(labels, list):
        return labels
    return labels[0] if len(labels) == 1 else labels or None


# -------------------------------------------------------------------------------------------------------------- a row


def _make_row(columns: Mapping[str, Any], text: Any, label: Any, spans: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    if not isinstance(text, str):
        raise _InvalidRow("no text; name the text of the export text")
    tokens, tags = place_spans(text, [_parse_span(span, text) for span in spans])
    answer = columns.get(ANSWER, ACCEPTED)
    return {**columns, "text": text, "label": label, "tokens": tokens, "tags": tags, ANSWER: answer}


def _parse_span(span: Mapping[str, Any], text: str) -> _Span:
    start, end, label = span.get("start"), span.get("end"), _unwrap(span.get("labels", span.get("label")))
    if not isinstance(start, int) or not isinstance(end, int) or not isinstance(label, str) or not label:
        raise _InvalidRow("an entity lacks its start, its end or its one label; correct it in the tool")
    if not 0 <= start < end <= len(text) or not text[start:end].strip():
        raise _InvalidRow(f"the entity {start}-{end} has no characters of the text; count characters, not bytes")
    if isinstance(expected := span.get("text"), str) and expected != text[start:end]:
        actual = quote_value(text[start:end])
        raise _InvalidRow(f"the entity {quote_value(expected)} is {actual} at {start}-{end}; export the rows again")
    return _Span(start, end, label)


def place_spans(text: str, spans: Iterable[_Span]) -> tuple[list[str], list[str]]:
    """The words of a text, and the BIO tag of each."""
    words = find_word_spans(text)
    tags = ["O"] * len(words)
    for span in sorted(spans):
        places = [place for place, (start, end) in enumerate(words) if start < span.end and end > span.start]
        if any(tags[place] != "O" for place in places):
            word = quote_value(text[slice(*words[places[0]])])
            raise _InvalidRow(f"two entities share the word {word}; a word has one tag: remove one of the two")
        for place in places:
            tags[place] = f"{'I' if place != places[0] else 'B'}-{span.label}"
    return [text[start:end] for start, end in words], tags
