"""SQuAD 1.1 and 2.0 JSON -> flat rows, one per question. A part that cannot be used becomes a row with its reason.

The file is one JSON object, `{"version", "data": [{"title", "paragraphs": [{"context", "qas": [...]}]}]}`.
"""

import json
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from rtrain.core.errors import quote_value

UTF8_REASON = "{} is not UTF-8; convert the file, e.g. iconv -f latin1 -t utf-8"


class GoldAnswer(NamedTuple):
    """A gold answer: `text` begins at character `start` of the context (in code points, from 0)."""

    text: str
    start: int


class SquadQuestion(NamedTuple):
    """One question. `reason` says why it cannot be used; then the other fields may be empty.

    `line` is the question's number in the file, from 1, bad questions included; `json_path` is its position in the
    JSON. `title` is empty if the article has none. A question without answers is unanswerable from its context.
    """

    line: int
    json_path: str
    id: str
    title: str
    context: str
    question: str
    answers: tuple[GoldAnswer, ...]
    reason: str | None

    def columns(self) -> dict[str, Any]:
        """The question's row."""
        answers = [answer._asdict() for answer in self.answers]
        texts = {"id": self.id, "title": self.title, "question": self.question, "context": self.context}
        return {**texts, "answers": answers}


class InvalidSquadFile(Exception):
    """The file is not a SQuAD file, or is damaged."""


class _InvalidEntry(Exception):
    """Why a part of the file cannot be used, and what to do."""


def read_questions(file: IO[bytes], labeled: bool = True) -> Iterator[SquadQuestion]:
    """The questions of a file, in order; without `labeled`, answers are optional.

    A broken article or paragraph gives one row with a reason; each question of a paragraph with a bad context gives
    one. Raises `InvalidSquadFile`.
    """
    line = 0
    seen: dict[str, int] = {}
    for json_path, value in _iter_questions(file):
        line += 1
        if isinstance(value, _InvalidEntry):
            yield _reject(line, json_path, value)
            continue
        title, context, question = value
        try:
            row = _parse_question(line, json_path, title, context, question, labeled)
            if row.id in seen:
                raise _InvalidEntry(
                    f"its id {quote_value(row.id)} is that of question {seen[row.id]} too; give each question its "
                    "own id"
                )
            seen[row.id] = line
            yield row
        except _InvalidEntry as bad:
            yield _reject(line, json_path, bad)._replace(id=_text_or_empty(question, "id"))


def _reject(line: int, json_path: str, bad: _InvalidEntry) -> SquadQuestion:
    return SquadQuestion(line, json_path, "", "", "", "", (), f"{json_path}: {bad}")


# ------------------------------------------------------------------------------------------------------------ one row


def _parse_question(line: int, json_path: str, title: str, context: str, question: Any, labeled: bool) -> SquadQuestion:
    if not isinstance(question, dict):
        raise _InvalidEntry("not a JSON object; a question has id, question and answers")
    identity = question.get("id")
    if isinstance(identity, int) and not isinstance(identity, bool):
        identity = str(identity)
    if not isinstance(identity, str) or not identity:
        raise _InvalidEntry("its id is missing or no text; write one, unlike all others")
    text = _require_text(question, "question")
    impossible = question.get("is_impossible", False)
    if not isinstance(impossible, bool):
        raise _InvalidEntry("is_impossible is neither true nor false; correct it")
    if not isinstance(raw_answers := question.get("answers", None if labeled else []), list):
        raise _InvalidEntry(
            'answers is missing or no list; write {"text", "answer_start"} objects, or [] with is_impossible'
        )
    answers = tuple(_parse_answer(number, answer, context) for number, answer in enumerate(raw_answers) if labeled)
    if impossible and answers:
        raise _InvalidEntry("is_impossible is true, but there are answers; remove one of the two")
    if labeled and not impossible and not answers:
        raise _InvalidEntry("it has no answer; write one, or is_impossible: true")
    for name, value in (("id", identity), ("title", title)):
        _check_utf8(name, value)
    return SquadQuestion(line, json_path, identity, title, context, text, answers, None)


def _parse_answer(number: int, answer: Any, context: str) -> GoldAnswer:
    name = f"answers[{number}]"
    if not isinstance(answer, dict):
        raise _InvalidEntry(f"{name} is not a JSON object; write its text and answer_start")
    text, start = _require_text(answer, "text", f"{name}.text"), answer.get("answer_start")
    if not isinstance(start, int) or isinstance(start, bool):
        raise _InvalidEntry(
            f"{name}.answer_start is missing or no whole number; write the character where the answer begins"
        )
    if start < 0 or context[start : start + len(text)] != text:
        actual_start = context.find(text)
        # Usual cause: offsets counted in bytes or UTF-16 units.
        hint = (
            f"it is at {actual_start}; count characters"
            if actual_start >= 0
            else "nor anywhere in it; correct the answer"
        )
        raise _InvalidEntry(f"{name}.text {quote_value(text)} is not at character {start} of the context, {hint}")
    return GoldAnswer(text, start)


def _require_text(document: dict[str, Any], key: str, name: str | None = None) -> str:
    value = document.get(key)
    if not isinstance(value, str):
        raise _InvalidEntry(f"{name or key} is missing or no text; write it")
    if not value.strip():
        raise _InvalidEntry(f"{name or key} is empty; write a text or remove the question")
    _check_utf8(name or key, value)
    return value


def _check_utf8(name: str, value: str) -> None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _InvalidEntry(UTF8_REASON.format(name)) from None


def _text_or_empty(document: Any, key: str) -> str:
    value = document.get(key) if isinstance(document, dict) else None
    return value if isinstance(value, str) else ""


# ----------------------------------------------------------------------------------------------------------- the file


def _iter_questions(file: IO[bytes]) -> Iterator[tuple[str, tuple[str, str, Any] | _InvalidEntry]]:
    """(JSON path, (title, context, question)) of every question, or (JSON path, error) of an unreadable part."""
    for number, article in enumerate(_read_articles(file)):
        json_path = f"data[{number}]"
        paragraphs = article.get("paragraphs") if isinstance(article, dict) else None
        if not isinstance(paragraphs, list):
            yield json_path, _InvalidEntry("not an article: it has no list of paragraphs; correct it")
            continue
        title = _text_or_empty(article, "title")
        for index, paragraph in enumerate(paragraphs):
            yield from _iter_paragraph(f"{json_path}.paragraphs[{index}]", title, paragraph)


def _iter_paragraph(
    json_path: str, title: str, paragraph: Any
) -> Iterator[tuple[str, tuple[str, str, Any] | _InvalidEntry]]:
    questions = paragraph.get("qas") if isinstance(paragraph, dict) else None
    if not isinstance(questions, list):
        yield json_path, _InvalidEntry("not a paragraph: it has no list qas; correct it")
        return
    try:
        context = _require_text(paragraph, "context")
    except _InvalidEntry as bad:
        # Each question counts as a bad row: one row would understate the loss.
        yield from ((f"{json_path}.qas[{index}]", bad) for index in range(len(questions)))
        return
    for index, question in enumerate(questions):
        yield f"{json_path}.qas[{index}]", (title, context, question)


def _read_articles(file: IO[bytes]) -> list[Any]:
    """The top object's list `data`. Raises `InvalidSquadFile`."""
    # Bytes that are not UTF-8 become lone surrogates, so their row is bad, not the file.
    text = file.read().decode("utf-8", errors="surrogateescape")
    if text.startswith(("\udcff\udcfe", "\udcfe\udcff")):
        raise InvalidSquadFile("the file is UTF-16, not UTF-8; convert it, e.g. iconv -f utf-16 -t utf-8")
    try:
        document = json.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise InvalidSquadFile(f"not JSON: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("data"), list):
        raise InvalidSquadFile('it has no list "data"; a SQuAD file is {"data": [{"title", "paragraphs"}]}')
    articles: list[Any] = document["data"]
    return articles
