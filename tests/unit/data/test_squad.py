"""SQuAD files to questions: good questions, and the reason of each broken part."""

import contextlib
import io
import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rtrain.data.readers import squad
from rtrain.data.readers.squad import GoldAnswer, SquadQuestion

CONTEXT = "The café opens at nine."


def answer(text: str = "nine", start: int = 18) -> dict[str, Any]:
    return {"text": text, "answer_start": start}


def question(**changes: Any) -> dict[str, Any]:
    full = {"id": "q1", "question": "When?", "answers": [answer()]} | changes
    return {key: value for key, value in full.items() if value is not ...}  # ... leaves a field out


def document(*questions: Any, context: Any = CONTEXT) -> dict[str, Any]:
    paragraphs = [{"context": context, "qas": list(questions)}]
    return {"version": "1.1", "data": [{"title": "Cafés", "paragraphs": paragraphs}]}


def read(content: Any) -> list[SquadQuestion]:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return list(squad.read_questions(io.BytesIO(raw)))


GOOD = SquadQuestion(
    1, "data[0].paragraphs[0].qas[0]", "q1", "Cafés", CONTEXT, "When?", (GoldAnswer("nine", 18),), None
)


def test_a_question_with_answers() -> None:
    assert read(document(question())) == [GOOD]


def test_a_question_without_answer() -> None:
    [row] = read(document(question(answers=[], is_impossible=True, plausible_answers=[answer()])))
    assert row == GOOD._replace(answers=())


def test_rows_are_numbered_and_placed_over_articles_and_paragraphs() -> None:
    first, second = (document(question(id=f"a{n}"), question(id=f"b{n}"))["data"][0] for n in (1, 2))
    second["paragraphs"].insert(0, {"context": "Nothing is asked here.", "qas": []})
    rows = read({"data": [first, second]})
    assert [(row.line, row.json_path, row.id) for row in rows] == [
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
    assert row.answers == (GoldAnswer("nine", 5),)


@pytest.mark.parametrize(
    "changes",
    [
        {"id": ...},
        {"id": ""},
        {"question": ...},
        {"question": " \n"},
        {"question": 7},
        {"question": "\ud800"},
        {"answers": ...},
        {"answers": []},
        {"is_impossible": True},
        {"is_impossible": "no"},
        {"answers": ["nine"]},
        {"answers": [answer(text="")]},
        {"answers": [answer(), {"text": "nine"}]},
        {"answers": [{"text": "h", "answer_start": True}]},
        {"answers": [answer(start=19)]},
        {"answers": [answer(start=-5)]},
        {"answers": [answer(text="t\x1ben", start=18)]},
    ],
)
def test_a_bad_question_has_a_reason_and_the_next_is_read(changes: dict[str, Any]) -> None:
    bad, good = read(document(question(**changes), question(id="q2")))
    assert (bad.json_path, bad.question) == (GOOD.json_path, "")
    assert bad.reason is not None
    assert "\x1b" not in bad.reason
    assert good == GOOD._replace(line=2, json_path="data[0].paragraphs[0].qas[1]", id="q2")


def test_an_id_that_comes_twice_is_refused_the_second_time() -> None:
    first, second, third = read(document(question(), question(), question(id=7)))
    assert (first.reason is None, second.reason is None, third.reason is None) == (True, False, True)
    assert (second.id, third.id) == ("q1", "7")


@pytest.mark.parametrize("context", ["", None, "\ud800"])
def test_each_question_of_a_bad_context_is_a_bad_row(context: Any) -> None:
    rows = read(document(question(), question(id="q2"), context=context))
    assert [(row.json_path, row.reason is None) for row in rows] == [
        ("data[0].paragraphs[0].qas[0]", False),
        ("data[0].paragraphs[0].qas[1]", False),
    ]


def test_parts_that_are_none_are_named_and_the_rest_is_read() -> None:
    full = document(question())
    full["data"][0]["paragraphs"].insert(0, {"context": "x"})
    full["data"].insert(0, {"title": "no paragraphs"})
    full["data"].insert(0, "text")
    *bad, good = read(full)
    assert [row.json_path for row in bad if row.reason] == ["data[0]", "data[1]", "data[2].paragraphs[0]"]
    assert (good.id, good.line, good.reason) == ("q1", 4, None)
    assert read(document(None))[0].reason


def test_bytes_that_are_not_utf8_refuse_their_row_only() -> None:
    raw = json.dumps(document(question(question="caf\u00e9?"), question(id="q2")), ensure_ascii=False)
    bad, good = read(raw.replace("caf\u00e9?", "caf#?").encode().replace(b"#", b"\xe9"))
    assert (bad.reason is None, good.reason) == (False, None)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"version": 2}',
        b'{"data": 5}',
        b'{"data": []',
        b'{"data": []} {}',
        b'{"data": [' + b"[" * 200_000,
        b'{"data": [' + b"1" * 5_000 + b"]}",
        json.dumps(document(question())).encode("utf-16"),
        b"\xfe\xff" + json.dumps(document(question())).encode("utf-16-be"),
        json.dumps(document(question())).encode()[:-20],
    ],
)
def test_a_file_that_is_no_squad_file_or_is_cut_off_is_refused(content: bytes) -> None:
    with pytest.raises(squad.InvalidSquadFile):
        read(content)


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=60), st.integers(0, 300))
def test_no_bytes_crash_it(noise: bytes, place: int) -> None:
    content = json.dumps(document(question(), question(id="q2"))).encode()
    with contextlib.suppress(squad.InvalidSquadFile):
        for row in read(content[:place] + noise + content[place + len(noise) :]):
            assert (row.reason is None) == bool(row.question)


def test_answers_of_questions_that_are_to_be_answered_are_not_looked_at() -> None:
    content = json.dumps(document(question(answers=[answer(start=7)]))).encode()
    assert [row.reason for row in squad.read_questions(io.BytesIO(content), False)] == [None]
    assert [row.reason is None for row in squad.read_questions(io.BytesIO(content), True)] == [False]
