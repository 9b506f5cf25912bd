"""Attributions of a run's hardest rows: made once by its artefact, kept, and drawn; and what stands in their way."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rtrain import events
from rtrain.batch import Head, Tokens, Window, pack
from rtrain.cli import app as cli
from rtrain.data.stores.store import open_store
from rtrain.errors import UserError
from rtrain.explain import rows
from rtrain.explain.explainer import Explainer
from rtrain.predict import Predictor
from rtrain.report import answer_rows, attributions, html
from rtrain.report.kinds import marked
from rtrain.run import Run
from rtrain.runs import driver
from tests.reports import answers_of, make_run, write_predictions
from tests.tiny import CORPUS, make_artifact, make_task_artifact

LABELS = ("login", "parcel", "refund")
ESSAY = "First, the card was declined! Then nobody came to the door! Who can explain the fee? Thank you!"


def stored(predictor: Predictor, asked: Any) -> Tokens:
    """The row's tokens as a store has them: without the characters that they are of."""
    [encoded] = predictor.encode([asked])
    return pack([encoded._replace(spans=[(0, 0)] * len(encoded.ids))])


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    return Predictor.load(make_artifact(tmp_path_factory.mktemp("classes"), LABELS), threads=1)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished classifier with its artefact, and answers to all rows of its test split."""
    made = make_run(tmp_path)
    make_artifact(made / "artifact", LABELS)
    store = open_store(Path(next(event["store"] for event in events.read(made) if "store" in event)))
    write_predictions(made, *answers_of(LABELS, store.rows("test"), 0.5))
    return made


# ------------------------------------------------------------------------------------------------- tokens to their text


@pytest.mark.parametrize("text", [*CORPUS, "it's not done , is it ?", "[UNK] 東京 and 5.50 eur"])
def test_tokens_spell_a_text_that_gives_the_same_tokens(classes: Predictor, text: str) -> None:
    [encoded] = classes.encode([text])
    asked, found = rows.read(classes, stored(classes, text), paired=False)
    assert isinstance(asked, str)
    assert found.ids == encoded.ids
    assert found.spans[0] == found.spans[-1] == (0, 0)
    inner = found.spans[1:-1]
    assert [start for start, _ in inner] == sorted(start for start, _ in inner)
    assert "".join(asked[start:end] for start, end in inner) == "".join(asked.split())


def test_words_of_both_texts_of_a_pair_are_told_apart(classes: Predictor) -> None:
    pair = {"text": "where is my parcel", "text_pair": "my invoice shows a fee"}
    asked, found = rows.read(classes, stored(classes, pair), paired=True)
    assert asked == pair
    second = found.windows[0].second
    assert found.spans[second - 1] == (0, 0)  # the separator between them
    assert pair["text"][slice(*found.spans[second - 2])] == "parcel"
    assert pair["text_pair"][slice(*found.spans[second])] == "my"


def test_windows_that_overlap_spell_their_text_once(tmp_path: Path) -> None:
    text = " ".join(CORPUS[:4])
    facts = {"pooling": "mean", "stride": 6, "max_windows": 9}
    made = make_task_artifact(tmp_path, "classification", Head(LABELS, facts), max_tokens=16)
    predictor = Predictor.load(made, threads=1)
    [encoded] = predictor.encode([text])
    assert len(encoded.windows) > 3
    asked, found = rows.read(predictor, stored(predictor, text), paired=False)
    assert str(asked).replace(" ", "") == text.replace(" ", "")
    words = [str(asked)[start:end] for start, end in found.spans]
    assert words == [text[start:end] for start, end in encoded.spans]


def test_a_stored_row_is_explained_like_its_text(classes: Predictor) -> None:
    """The artefact, asked with the text itself, gives the same shares to the same words."""
    text = CORPUS[5]
    document = rows.explain(classes, stored(classes, text), paired=False)
    [[answer]] = [row["answers"] for row in document["rows"]]
    [explained] = Explainer(classes)([text], steps=document["steps"])
    expected = explained.answers[0].to_document()
    assert answer["label"] == expected["label"]
    [[_, spelt]] = document["rows"][0]["texts"]
    assert [spelt[start:end] for _, start, end, _ in answer["words"]] == [part["word"] for part in expected["words"]]
    shares = [part["attribution"] for part in expected["words"]]
    assert [part[3] for part in answer["words"]] == pytest.approx(shares, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("text", ["Where is MY parcel?", "Viele Grüße, Jörg 🙂 </a>"])
def test_a_text_that_is_kept_is_explained_as_it_is_written(classes: Predictor, text: str) -> None:
    known: list[tuple[str, str | None] | None] = [(text, None)]
    document = rows.explain(classes, stored(classes, text), paired=False, texts=known)
    assert document["rows"][0]["texts"] == [["text", text]]
    spelt = rows.explain(classes, stored(classes, text), paired=False)
    values = [one["rows"][0]["answers"][0]["value"] for one in (document, spelt)]
    assert values[0] == pytest.approx(values[1])
    # A text that was cut does not make the row's tokens, which then spell it.
    assert rows.explain(classes, stored(classes, text), paired=False, texts=[(text[:9], None)]) == spelt


def test_the_work_is_bounded_by_tokens() -> None:
    assert rows.plan([10] * 20, budget=33 * 200) == (20, 32)
    assert rows.plan([10] * 20, budget=33 * 200 - 1) == (20, 16)
    assert rows.plan([10] * 20, budget=9 * 200) == (20, 8)
    assert rows.plan([10] * 20, budget=9 * 200 - 1) == (19, 8)
    assert rows.plan([10_000], budget=100) == (0, 8)
    assert rows.plan([]) == (0, 32)


def test_a_shared_stretch_is_as_long_as_the_stride() -> None:
    """Windows 1 2 3 4 | 3 4 5: two tokens are shared; the places of both are of one token."""
    ids = [1, 2, 3, 4, 3, 4, 5]
    merged, owners = rows._merged(ids, [0] * 7, [Window(4, 4), Window(3, 3)], 0, 2)
    assert merged == [1, 2, 3, 4, 5]
    assert owners == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 2), (5, 3), (6, 4)]


# ----------------------------------------------------------------------------------------------------- of a whole run


def test_the_hardest_rows_are_explained_once_and_kept(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = attributions.ensure(Run(run))
    assert path == run / "attributions-test.json"
    found = json.loads(path.read_text())
    answers = answer_rows.read(Run(run), "test")
    assert answers is not None
    assert [row["row"] for row in found["rows"]] == answers.hardest(20).tolist()
    for row in found["rows"]:
        [answer] = row["answers"]
        moved = answer["value"] - answer["baseline"]
        assert sum(part[3] for part in answer["words"]) == pytest.approx(
            moved, abs=answer["completeness_error"] * abs(moved) + 2e-3
        )
    monkeypatch.setattr(Predictor, "load", lambda *_: pytest.fail("loaded a model although the file is there"))
    assert attributions.ensure(Run(run)) == path
    page = html.make(Run(run)).read_text(encoding="utf-8")
    assert page.count('<article class="card">') == 20
    assert page.count("completeness error ") >= 20
    assert re.search(r'<mark class="(for|against) l4" title="[+-]', page)


def test_the_verb_makes_them_where_they_lack(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["report", str(run)])
    assert Run(run).attributions("test").is_file()
    *lines, last = capsys.readouterr().err.splitlines()
    assert last == f"next: rtrain serve {run / 'artifact'}"
    assert any(line.startswith("explaining the 20 hardest rows") for line in lines)


def test_rows_are_explained_when_all_else_is_there_and_for_a_limited_time(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    driver.report(Run(run), lambda event: said.append(event["text"]))
    assert not Run(run).attributions("test").exists()
    assert (run / "report.html").is_file()
    now, each = [0.0], 1.0
    monkeypatch.setattr("rtrain.report.attributions.time.monotonic", lambda: now[0])
    explain = Explainer.explain

    def slow(self: Explainer, *arguments: Any, **named: Any) -> Any:
        now[0] += each
        return explain(self, *arguments, **named)

    monkeypatch.setattr(Explainer, "explain", slow)
    said.clear()
    driver.explain(Run(run), lambda event: said.append(event["text"]))
    found = json.loads(Run(run).attributions("test").read_text())
    assert (len(found["rows"]), found["asked"]) == (attributions.SECONDS, 20)
    assert [found["rows"][0]["row"]] == answer_rows.newest(Run(run)).hardest(1).tolist()  # type: ignore[union-attr]
    assert len(said) == 1 + attributions.SECONDS / attributions.EVERY_S + 1
    assert "Only the first 15 are explained" in (run / "report.html").read_text(encoding="utf-8")


def test_those_of_other_weights_are_made_anew(run: Path) -> None:
    attributions.ensure(Run(run))
    before = json.loads(Run(run).attributions("test").read_text())
    for path in (run / "artifact").iterdir():
        path.unlink()
    make_artifact(run / "artifact", LABELS, seed=1)
    assert "speaks" not in html.write(Run(run)).read_text(encoding="utf-8")  # not those of the other weights
    attributions.ensure(Run(run))
    after = json.loads(Run(run).attributions("test").read_text())
    assert after["artifact"] != before["artifact"]
    assert after["rows"] != before["rows"]


def test_none_are_asked_for_or_possible(run: Path, tmp_path: Path) -> None:
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("attributions: 20", "attributions: 0"))
    assert attributions.ensure(Run(run)) is None
    (run / "config.yaml").write_text(text)
    (run / "artifact" / "artifact.json").unlink()
    assert attributions.ensure(Run(run)) is None
    make_task_artifact(run / "artifact", "masked_lm", Head((), {"mask": "[MASK]", "mask_id": 4}))
    assert attributions.ensure(Run(run)) is None
    assert not Run(run).attributions("test").exists()


def test_a_failure_is_said_and_costs_neither_run_nor_page(run: Path) -> None:
    (run / "artifact" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match="damaged"):
        attributions.ensure(Run(run))
    said: list[str] = []
    driver.report(Run(run), lambda event: said.append(event["text"]))
    driver.explain(Run(run), lambda event: said.append(event["text"]))
    assert said[-1].startswith("no attributions: ")
    assert len(list(run.glob("attributions-*.txt"))) == 1
    assert (run / "report.html").is_file()


# -------------------------------------------------------------------------------------------------------------- drawing

WORDS = [[0, 0, 4, 0.5], [0, 5, 9, -1.0], [0, 10, 14, 0.01], [0, 14, 15, 0.04]]
ANSWER = {"label": "login", "span": None, "value": 2.0, "baseline": 2.5, "completeness_error": 0.02, "words": WORDS}


def test_strength_and_sign_of_marks() -> None:
    row = {"texts": [["text", "open door here!"]], "answers": [{**ANSWER, "sentences": [[0, 0, 15, -0.49]]}]}
    [drawn] = marked.answers(row, numbers=False)
    [pieces] = drawn.texts
    assert "".join(piece.text for piece in pieces) == "open door here!"
    assert [(piece.text, piece.css, piece.hint) for piece in pieces if piece.css] == [
        ("open", "for l3", "+0.5"),
        ("door", "against l4", "-1"),
    ]
    assert drawn.named == [("for it", "open +0.5, here +0.01"), ("against it", "door -1")]  # the mark is not named
    assert drawn.note == "logit 2.00 = 2.50 without words, -0.5 from these words; completeness error 2 %"


def test_sentences_of_an_essay_are_marked(tmp_path: Path) -> None:
    facts = {"mean": 6.0, "std": 1.5}
    predictor = Predictor.load(make_task_artifact(tmp_path, "regression", Head(("score",), facts)), threads=1)
    document = rows.explain(predictor, stored(predictor, ESSAY), paired=False)
    [drawn] = marked.answers(document["rows"][0], numbers=True)
    [pieces] = drawn.texts
    assert len([piece for piece in pieces if piece.text.strip()]) == 4
    assert "sentences" in drawn.note


def test_the_entity_that_is_explained_is_named() -> None:
    entity = {**ANSWER, "label": "PLACE", "span": [5, 9], "completeness_error": 2e-5, "sentences": []}
    [drawn] = marked.answers({"texts": [["text", "open door here!"]], "answers": [entity]}, numbers=False)
    assert drawn.head == "PLACE “door”"
    assert "completeness error under 0.01 %" in drawn.note


def test_a_long_text_is_drawn_near_its_entity_and_by_its_words() -> None:
    before, after = "word " * 200, " next" * 200
    text, start = f"{before}Rome{after}", len(before)
    parts = [[0, start - 5, start - 1, 0.5], [0, start, start + 4, 2.0]]
    halves = [[0, 0, start, 1.0], [0, start, len(text), 1.5]]
    many = [*parts, *([0, 5 * place, 5 * place + 4, 0.0] for place in range(marked.MANY_WORDS))]
    entity = {**ANSWER, "span": [start, start + 4], "words": sorted(many), "sentences": halves}
    [drawn] = marked.answers({"texts": [["text", text]], "answers": [entity]}, numbers=False)
    shown = "".join(piece.text for piece in drawn.texts[0])
    assert "Rome" in shown
    assert len(shown) <= 2 * marked.NEAR + 20
    assert shown.startswith("… ")
    assert shown.endswith(" …")
    assert [piece.text for piece in drawn.texts[0] if piece.css] == ["word", "Rome"]


def test_parts_of_a_number_raise_or_lower_it() -> None:
    row = {"texts": [["text", "open door here!"]], "answers": [{**ANSWER, "sentences": [[0, 0, 15, -0.49]]}]}
    [drawn] = marked.answers(row, numbers=True)
    assert [name for name, _ in drawn.named] == ["raise it", "lower it"]
    assert " raises the score; " in [piece.text for piece in marked.legend(numbers=True)]


def test_nothing_is_marked_where_words_change_nothing() -> None:
    still = {**ANSWER, "completeness_error": None, "words": [[0, 0, 4, 0.0]], "sentences": [[0, 0, 4, 0.0]]}
    [drawn] = marked.answers({"texts": [["text", "open"]], "answers": [still]}, numbers=False)
    assert [[piece.css for piece in text] for text in drawn.texts] == [[""]]
    assert drawn.named == []
    assert "the words change nothing" in drawn.note


def test_a_very_long_text_ends_with_an_ellipsis() -> None:
    text = "word " * 4000
    parts = [[0, start, start + 4, 1.0] for start in range(0, len(text), 5)]
    long = {**ANSWER, "words": parts, "sentences": [[0, 0, len(text) - 1, 1.0]]}
    [drawn] = marked.answers({"texts": [["text", text]], "answers": [long]}, numbers=False)
    assert sum(len(piece.text) for piece in drawn.texts[0]) <= marked.LONGEST + 10
    assert drawn.texts[0][-1].text == " …"


def test_hostile_words_stay_text(run: Path) -> None:
    attributions.ensure(Run(run))
    path = Run(run).attributions("test")
    document = json.loads(path.read_text())
    hostile = "<img src=x onerror=alert(1)>\u202e"
    for row in document["rows"]:
        row["texts"] = [["text", hostile]]
        row["answers"] = [{**ANSWER, "label": hostile, "words": [[0, 0, 28, 1.0]], "sentences": [[0, 0, 28, 1.0]]}]
    path.write_text(json.dumps(document))
    page = html.write(Run(run)).read_text(encoding="utf-8")
    assert "<img" not in page
    assert "\u202e" not in page
    assert page.count("&lt;img src=x onerror") >= 20
