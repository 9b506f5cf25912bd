"""SQuAD 1.1 and 2.0 JSON -> flat rows, one per question. A part that cannot be used becomes a row with its reason.

The file is one JSON object, `{"version", "data": [{"title", "paragraphs": [{"context", "qas": [...]}]}]}`.
"""

import json
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from rtrain.core.errors import quoted

UTF8_REASON = "{} is not UTF-8; convert the file, e.g. iconv -f latin1 -t utf-8"


class Answer(NamedTuple):
    """A gold answer: `text` begins at character `start` of the context (in code points, from 0)."""

    text: str
    start: int


class Question(NamedTuple):
    """One question. `reason` says why it cannot be used; then the other fields may be empty.

    `line` is the question's number in the file, from 1 and with bad ones counted; `where` is its place in the JSON.
    `title` is empty if the article has none. A question without answers is one that the context does not answer.
    """

    line: int
    where: str
    id: str
    title: str
    context: str
    question: str
    answers: tuple[Answer, ...]
    reason: str | None


class Unreadable(Exception):
    """The file is no SQuAD file, or damaged."""


class _Bad(Exception):
    """Why a part of the file cannot be used, and what to do."""


def read(file: IO[bytes], labelled: bool = True) -> Iterator[Question]:
    """The questions of a file, in order; they may lack their answers where they are not `labelled`.

    A broken article or paragraph gives one row with a reason; each question of a paragraph with a bad context gives
    one. Raises `Unreadable`.
    """
    line = 0
    seen: dict[str, int] = {}
    for where, value in _parts(file):
        line += 1
        if isinstance(value, _Bad):
            yield _refused(line, where, value)
            continue
        title, context, question = value
        try:
            row = _question(line, where, title, context, question, labelled)
            if row.id in seen:
                raise _Bad(f"its id {quoted(row.id)} is that of question {seen[row.id]} too; give each its own")
            seen[row.id] = line
            yield row
        except _Bad as bad:
            yield _refused(line, where, bad)._replace(id=_text_or_empty(question, "id"))


def _refused(line: int, where: str, bad: _Bad) -> Question:
    return Question(line, where, "", "", "", "", (), f"{where}: {bad}")


# ------------------------------------------------------------------------------------------------------------ one row


def _question(line: int, where: str, title: str, context: str, question: Any, labelled: bool) -> Question:
    if not isinstance(question, dict):
        raise _Bad("not a JSON object; a question has id, question and answers")
    identity = question.get("id")
    if isinstance(identity, int) and not isinstance(identity, bool):
        identity = str(identity)
    if not isinstance(identity, str) or not identity:
        raise _Bad("its id is missing or no text; write one, unlike all others")
    text = _string(question, "question")
    impossible = question.get("is_impossible", False)
    if not isinstance(impossible, bool):
        raise _Bad("is_impossible is neither true nor false; correct it")
    if not isinstance(found := question.get("answers", None if labelled else []), list):
        raise _Bad('answers is missing or no list; write {"text", "answer_start"} objects, or [] with is_impossible')
    answers = tuple(_answer(number, answer, context) for number, answer in enumerate(found) if labelled)
    if impossible and answers:
        raise _Bad("is_impossible is true, but there are answers; remove one of the two")
    if labelled and not impossible and not answers:
        raise _Bad("it has no answer; write one, or is_impossible: true")
    for name, value in (("id", identity), ("title", title)):
        _check_utf8(name, value)
    return Question(line, where, identity, title, context, text, answers, None)


def _answer(number: int, answer: Any, context: str) -> Answer:
    name = f"answers[{number}]"
    if not isinstance(answer, dict):
        raise _Bad(f"{name} is not a JSON object; write its text and answer_start")
    text, start = _string(answer, "text", f"{name}.text"), answer.get("answer_start")
    if not isinstance(start, int) or isinstance(start, bool):
        raise _Bad(f"{name}.answer_start is missing or no whole number; write the character where the answer begins")
    if start < 0 or context[start : start + len(text)] != text:
        place = context.find(text)
        # The usual cause is that someone counted bytes or UTF-16 units.
        hint = f"it is at {place}; count characters" if place >= 0 else "nor anywhere in it; correct the answer"
        raise _Bad(f"{name}.text {quoted(text)} is not at character {start} of the context, {hint}")
    return Answer(text, start)


def _string(document: dict[str, Any], key: str, name: str | None = None) -> str:
    value = document.get(key)
    if not isinstance(value, str):
        raise _Bad(f"{name or key} is missing or no text; write it")
    if not value.strip():
        raise _Bad(f"{name or key} is empty; write a text or remove the question")
    _check_utf8(name or key, value)
    return value


def _check_utf8(name: str, value: str) -> None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _Bad(UTF8_REASON.format(name)) from None


def _text_or_empty(document: Any, key: str) -> str:
    value = document.get(key) if isinstance(document, dict) else None
    return value if isinstance(value, str) else ""


# ----------------------------------------------------------------------------------------------------------- the file


def _parts(file: IO[bytes]) -> Iterator[tuple[str, tuple[str, str, Any] | _Bad]]:
    """(place, (title, context, question)) of every question, or (place, why) of a part that cannot be read."""
    for number, article in enumerate(_articles(file)):
        where = f"data[{number}]"
        paragraphs = article.get("paragraphs") if isinstance(article, dict) else None
        if not isinstance(paragraphs, list):
            yield where, _Bad("not an article: it has no list of paragraphs; correct it")
            continue
        title = _text_or_empty(article, "title")
        for index, paragraph in enumerate(paragraphs):
            yield from _paragraph(f"{where}.paragraphs[{index}]", title, paragraph)


def _paragraph(where: str, title: str, paragraph: Any) -> Iterator[tuple[str, tuple[str, str, Any] | _Bad]]:
    questions = paragraph.get("qas") if isinstance(paragraph, dict) else None
    if not isinstance(questions, list):
        yield where, _Bad("not a paragraph: it has no list qas; correct it")
        return
    try:
        context = _string(paragraph, "context")
    except _Bad as bad:
        # Each question counts as a bad row: they are all lost, and one row would weigh too little.
        yield from ((f"{where}.qas[{index}]", bad) for index in range(len(questions)))
        return
    for index, question in enumerate(questions):
        yield f"{where}.qas[{index}]", (title, context, question)


def _articles(file: IO[bytes]) -> list[Any]:
    """The top object's list `data`. Raises `Unreadable`."""
    # Bytes that are not UTF-8 become lone surrogates, so that their row is refused, not the file.
    text = file.read().decode("utf-8", errors="surrogateescape")
    if text.startswith(("\udcff\udcfe", "\udcfe\udcff")):
        raise Unreadable("the file is UTF-16, not UTF-8; convert it, e.g. iconv -f utf-16 -t utf-8")
    try:
        document = json.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"not JSON: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("data"), list):
        raise Unreadable('it has no list "data"; a SQuAD file is {"data": [{"title", "paragraphs"}]}')
    articles: list[Any] = document["data"]
    return articles
