"""SQuAD files to questions: what is read, and what each broken part says."""

import io
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rtrain.data.formats import squad
from rtrain.data.formats.squad import Answer, Question

CONTEXT = "The café opens at nine."


def answer(text: str = "nine", start: int = 18) -> dict[str, Any]:
    return {"text": text, "answer_start": start}


def question(**changes: Any) -> dict[str, Any]:
    whole = {"id": "q1", "question": "When?", "answers": [answer()]} | changes
    return {key: value for key, value in whole.items() if value is not ...}  # ... leaves a field out


def document(*questions: Any, context: Any = CONTEXT) -> dict[str, Any]:
    paragraphs = [{"context": context, "qas": list(questions)}]
    return {"version": "1.1", "data": [{"title": "Cafés", "paragraphs": paragraphs}]}


def read(content: Any) -> list[Question]:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return list(squad.read(io.BytesIO(raw)))


def reason(content: Any) -> str:
    [row] = read(content)
    assert row.reason is not None
    return row.reason


GOOD = Question(1, "data[0].paragraphs[0].qas[0]", "q1", "Cafés", CONTEXT, "When?", (Answer("nine", 18),), None)


def test_a_question_with_answers() -> None:
    assert read(document(question())) == [GOOD]


def test_a_question_without_answer() -> None:
    [row] = read(document(question(answers=[], is_impossible=True, plausible_answers=[answer()])))
    assert row == GOOD._replace(answers=())


def test_rows_are_numbered_and_placed_over_articles_and_paragraphs() -> None:
    first, second = (document(question(id=f"a{n}"), question(id=f"b{n}"))["data"][0] for n in (1, 2))
    second["paragraphs"].insert(0, {"context": "Nothing is asked here.", "qas": []})
    rows = read({"data": [first, second]})
    assert [(row.line, row.where, row.id) for row in rows] == [
        (1, "data[0].paragraphs[0].qas[0]", "a1"),
        (2, "data[0].paragraphs[0].qas[1]", "b1"),
        (3, "data[1].paragraphs[1].qas[0]", "a2"),
        (4, "data[1].paragraphs[1].qas[1]", "b2"),
    ]


@pytest.mark.parametrize("ensure_ascii", [True, False])
def test_byte_order_mark_windows_lines_and_characters_of_many_bytes(ensure_ascii: bool) -> None:
    text = json.dumps(document(question()), indent=2, ensure_ascii=ensure_ascii).replace("\n", "\r\n")
    assert read(b"\xef\xbb\xbf" + text.encode()) == [GOOD]


def test_offsets_are_characters_also_behind_an_emoji() -> None:
    context = "\N{GRINNING FACE} at nine"
    [row] = read(document(question(answers=[answer(start=5)]), context=context))
    assert row.answers == (Answer("nine", 5),)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"id": ...}, "its id is missing or no text; write one, unlike all others"),
        ({"id": ""}, "its id is missing or no text; write one, unlike all others"),
        ({"question": ...}, "question is missing or no text; write it"),
        ({"question": " \n"}, "question is empty; write a text or remove the question"),
        ({"question": 7}, "question is missing or no text; write it"),
        ({"question": "\ud800"}, "question is not UTF-8; convert the file, e.g. iconv -f latin1 -t utf-8"),
        (
            {"answers": ...},
            'answers is missing or no list; write {"text", "answer_start"} objects, or [] with is_impossible',
        ),
        ({"answers": []}, "it has no answer; write one, or is_impossible: true"),
        ({"is_impossible": True}, "is_impossible is true, but there are answers; remove one of the two"),
        ({"is_impossible": "no"}, "is_impossible is neither true nor false; correct it"),
        ({"answers": ["nine"]}, "answers[0] is not a JSON object; write its text and answer_start"),
        ({"answers": [answer(text="")]}, "answers[0].text is empty; write a text or remove the question"),
        (
            {"answers": [answer(), {"text": "nine"}]},
            "answers[1].answer_start is missing or no whole number; write the character where the answer begins",
        ),
        (
            {"answers": [{"text": "h", "answer_start": True}]},
            "answers[0].answer_start is missing or no whole number; write the character where the answer begins",
        ),
        (
            {"answers": [answer(start=19)]},
            "answers[0].text 'nine' is not at character 19 of the context, it is at 18; count characters",
        ),
        (
            {"answers": [answer(start=-5)]},
            "answers[0].text 'nine' is not at character -5 of the context, it is at 18; count characters",
        ),
        (
            {"answers": [answer(text="t\x1ben", start=18)]},
            "answers[0].text 't\\x1ben' is not at character 18 of the context, nor anywhere in it; correct the answer",
        ),
    ],
)
def test_a_bad_question_says_why_and_the_next_is_read(changes: dict[str, Any], told: str) -> None:
    bad, good = read(document(question(**changes), question(id="q2")))
    assert bad.reason == f"data[0].paragraphs[0].qas[0]: {told}"
    assert good == GOOD._replace(line=2, where="data[0].paragraphs[0].qas[1]", id="q2")


def test_an_id_that_comes_twice_is_refused_the_second_time() -> None:
    first, second, third = read(document(question(), question(), question(id=7)))
    assert first.reason is None
    assert second.id == "q1"
    assert second.reason == "data[0].paragraphs[0].qas[1]: its id 'q1' is that of question 1 too; give each its own"
    assert third.id == "7"


@pytest.mark.parametrize("context", ["", None, "\ud800"])
def test_each_question_of_a_bad_context_is_a_bad_row(context: Any) -> None:
    rows = read(document(question(), question(id="q2"), context=context))
    assert [row.where for row in rows] == ["data[0].paragraphs[0].qas[0]", "data[0].paragraphs[0].qas[1]"]
    assert all("context" in (row.reason or "") for row in rows)


def test_parts_that_are_none_are_named_and_the_rest_is_read() -> None:
    whole = document(question())
    whole["data"][0]["paragraphs"].insert(0, {"context": "x"})
    whole["data"].insert(0, {"title": "no paragraphs"})
    whole["data"].insert(0, "text")
    article, untitled, paragraph, good = read(whole)
    assert article.reason == "data[0]: not an article: it has no list of paragraphs; correct it"
    assert untitled.reason == "data[1]: not an article: it has no list of paragraphs; correct it"
    assert paragraph.reason == "data[2].paragraphs[0]: not a paragraph: it has no list qas; correct it"
    assert (good.id, good.line) == ("q1", 4)
    assert reason(document(None)) == (
        "data[0].paragraphs[0].qas[0]: not a JSON object; a question has id, question and answers"
    )


def test_bytes_that_are_not_utf8_refuse_their_row_only() -> None:
    raw = json.dumps(document(question(question="caf\u00e9?"), question(id="q2")), ensure_ascii=False)
    bad, good = read(raw.replace("caf\u00e9?", "caf#?").encode().replace(b"#", b"\xe9"))
    assert bad.reason == (
        "data[0].paragraphs[0].qas[0]: question is not UTF-8; convert the file, e.g. iconv -f latin1 -t utf-8"
    )
    assert good.id == "q2"


def test_a_title_that_is_not_utf8_is_told() -> None:
    whole = document(question())
    whole["data"][0]["title"] = "\ud800"
    assert reason(whole).startswith("data[0].paragraphs[0].qas[0]: title is not UTF-8")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_a_file_of_utf16_is_named(encoding: str) -> None:
    mark = b"" if encoding == "utf-16" else b"\xfe\xff"
    content = mark + json.dumps(document(question())).encode(encoding)
    assert reason(content) == "the file: the file is UTF-16, not UTF-8; convert it, e.g. iconv -f utf-16 -t utf-8"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", 'not JSON at character 0 (a JSON object {"data": [...]} is expected)'),
        (b"[]", 'not JSON at character 1 (a JSON object {"data": [...]} is expected)'),
        (b'{"version": 2}', 'it has no list "data"; a SQuAD file is {"data": [{"title", "paragraphs"}]}'),
        (b'{"data": 5}', "not JSON at character 10 (data is no list of articles)"),
        (b'{"data": []', "not JSON at character 11 (the file is cut off or goes on after its end)"),
        (b'{"data": []} {}', "not JSON at character 14 (the file is cut off or goes on after its end)"),
        (b'{"data": [{"a": nope}]}', "not JSON at character 16 (Expecting value)"),
        (b'{"data": [' + b"[" * 200_000, "(a number is too long or the nesting too deep)"),
        (b'{"data": [' + b"1" * 5_000 + b"]}", "(a number is too long or the nesting too deep)"),
    ],
)
def test_a_file_that_is_no_squad_file_is_one_bad_row(content: bytes, told: str) -> None:
    [row] = read(content)
    assert row.where == squad.WHOLE_FILE
    assert told in (row.reason or "")


def test_a_file_that_is_cut_off_gives_the_questions_before_the_cut() -> None:
    whole = {"data": [document(question(id=f"q{n}"))["data"][0] for n in range(3)]}
    rows = read(json.dumps(whole).encode()[:-20])
    assert [row.id for row in rows] == ["q0", "q1", ""]
    assert rows[-1].where == squad.WHOLE_FILE


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=60), st.integers(0, 300), st.integers(1, 40))
def test_no_bytes_crash_it_whatever_the_chunk(noise: bytes, place: int, chunk: int) -> None:
    content = json.dumps(document(question(), question(id="q2"))).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(squad, "_CHUNK", chunk)
        for row in read(content[:place] + noise + content[place + len(noise) :]):
            assert (row.reason is None) == bool(row.question)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
def test_chunks_do_not_change_what_is_read(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps({"number": 12345, "x": {"data": [1]}} | document(question()) | {"end": [1.5, "]"]}, indent=1)
    content = text.replace("\\u00e9", "é").encode()
    monkeypatch.setattr(squad, "_CHUNK", chunk)
    assert read(content) == [GOOD]


def test_only_one_article_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 articles of about 5,000 characters, read in pieces of 1,000: never more than three articles' worth held."""
    source = random.Random(0)
    articles = []
    for number in range(60):
        context = " ".join(source.choices(["red", "blue", "green"], k=1000))
        articles.append(document(question(id=str(number), answers=[], is_impossible=True), context=context)["data"][0])
    held: list[int] = []
    more = squad._Text.more

    def measured(text: squad._Text, size: int) -> None:
        more(text, size)
        held.append(len(text.buffer))

    monkeypatch.setattr(squad, "_CHUNK", 1000)
    monkeypatch.setattr(squad._Text, "more", measured)
    assert len(read({"data": articles})) == 60
    assert max(held) < 3 * max(len(json.dumps(article)) for article in articles)


def test_a_large_article_is_tried_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try decodes from the article's start: with 10,000 tries of 100 bytes the work would grow as the square."""
    tries: list[int] = []
    more = squad._Text.more

    def counted(text: squad._Text, size: int) -> None:
        more(text, size)
        tries.append(size)

    monkeypatch.setattr(squad, "_CHUNK", 100)
    monkeypatch.setattr(squad._Text, "more", counted)
    assert len(read(document(question(answers=[], is_impossible=True), context="x" * 1_000_000))) == 1
    assert len(tries) < 25


def test_answers_of_questions_that_are_to_be_answered_are_not_looked_at() -> None:
    document = {"data": [{"title": "t", "paragraphs": [{"context": "hello world", "qas": [
        {"id": "1", "question": "who", "answers": [{"text": "world", "answer_start": 7}]}
    ]}]}]}  # fmt: skip
    content = json.dumps(document).encode()
    assert [row.reason for row in squad.read(io.BytesIO(content), False)] == [None]
    [row] = squad.read(io.BytesIO(content), True)
    assert row.reason is not None
