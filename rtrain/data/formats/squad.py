"""SQuAD 1.1 and 2.0 JSON -> flat rows, one per question. A part that cannot be used becomes a row with its reason.

The file is one JSON object, `{"version", "data": [{"title", "paragraphs": [{"context", "qas": [...]}]}]}`, often on
one line of tens of megabytes. It is decoded article by article: only the article being read is in memory. Python's
`json` decodes each article. ijson (3.6 was tried) would find them, but its yajl2_c backend refuses a whole file for one
byte that is not UTF-8, turns half a character into "?", and ends the process (SIGSEGV) at a number of 5,000 digits.
"""

import codecs
import json
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from rtrain.errors import quoted

WHOLE_FILE = "the file"
"""`where` of the row that says that a file broke off; nobody knows how many questions are lost."""

_CHUNK = 1 << 20
_BLANKS = " \t\r\n"
UTF16_REASON = "the file is UTF-16, not UTF-8; convert it, e.g. iconv -f utf-16 -t utf-8"
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


class _Bad(Exception):
    """Why a part of the file cannot be used, and what to do."""


def read(file: IO[bytes], labelled: bool = True) -> Iterator[Question]:
    """The questions of a file, in order; they may lack their answers where they are not `labelled`.

    A broken part (an article, a paragraph, the rest of the file) gives one row with a reason; each question of a
    paragraph with a bad context gives one.
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
    try:
        for number, article in enumerate(_articles(file)):
            where = f"data[{number}]"
            paragraphs = article.get("paragraphs") if isinstance(article, dict) else None
            if not isinstance(paragraphs, list):
                yield where, _Bad("not an article: it has no list of paragraphs; correct it")
                continue
            title = _text_or_empty(article, "title")
            for index, paragraph in enumerate(paragraphs):
                yield from _paragraph(f"{where}.paragraphs[{index}]", title, paragraph)
    except _Bad as bad:
        yield WHOLE_FILE, bad


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


def _articles(file: IO[bytes]) -> Iterator[Any]:
    """The elements of the top object's list `data`, one at a time. Raises `_Bad` if the file breaks off."""
    text = _Text(file)
    if text.next() != "{":
        raise text.broken('a JSON object {"data": [...]} is expected')
    found = False
    while (mark := text.next()) == "," or mark == '"':
        key = text.value(mark if mark == '"' else "")
        if text.next() != ":":
            raise text.broken("a colon is expected")
        if key != "data":
            text.value()
            continue
        found = True
        if text.next() != "[":
            raise text.broken("data is no list of articles")
        while (mark := text.next()) not in ("]", ""):
            yield text.value("" if mark == "," else mark)
    if mark != "}" or text.next():
        raise text.broken("the file is cut off or goes on after its end")
    if not found:
        raise _Bad('it has no list "data"; a SQuAD file is {"data": [{"title", "paragraphs"}]}')


class _Text:
    """The decoded text of a file. It holds no more of it than the JSON value being read needs."""

    def __init__(self, file: IO[bytes]):
        self.file = file
        # Bytes that are not UTF-8 become lone surrogates, so that their row is refused, not the file.
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")
        self.json = json.JSONDecoder()
        self.buffer, self.at, self.before, self.ended = "", 0, 0, False
        self.more(_CHUNK)
        if self.buffer.startswith(("\udcff\udcfe", "\udcfe\udcff")):
            raise _Bad(UTF16_REASON)
        self.buffer = self.buffer.removeprefix("\ufeff")

    def more(self, size: int) -> None:
        """Read `size` bytes more, and let go of the text that was consumed."""
        chunk = self.file.read(size)
        self.ended = not chunk
        self.before += self.at
        self.buffer, self.at = self.buffer[self.at :] + self.decoder.decode(chunk, final=self.ended), 0

    def next(self) -> str:
        """Consume the next character that is no blank, and return it; empty at the file's end."""
        while True:
            while self.at < len(self.buffer):
                character = self.buffer[self.at]
                self.at += 1
                if character not in _BLANKS:
                    return character
            if self.ended:
                return ""
            self.more(_CHUNK)

    def value(self, first: str = "") -> Any:
        """The JSON value that begins here; `first` is its first character if that was consumed already."""
        self.at -= len(first)
        if not first and self.next():
            self.at -= 1
        while True:
            try:
                found, end = self.json.raw_decode(self.buffer, self.at)
            except json.JSONDecodeError as error:
                if self.ended:
                    raise self.broken(error.msg, error.pos) from None
            except (ValueError, RecursionError):  # a number of thousands of digits, thousands of brackets
                raise self.broken("a number is too long or the nesting too deep") from None
            else:
                # A number at the buffer's end may go on in the next chunk.
                if end < len(self.buffer) or self.ended:
                    self.at = end
                    return found
            # The text held is doubled each time, so that a large article is decoded a few times only.
            self.more(max(_CHUNK, len(self.buffer) - self.at))

    def broken(self, what: str, position: int | None = None) -> _Bad:
        place = self.before + (self.at if position is None else position)
        return _Bad(
            f"not JSON at character {place} ({what}); the questions behind it are lost, mend or export it again"
        )
