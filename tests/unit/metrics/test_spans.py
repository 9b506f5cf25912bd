"""SQuAD's exact match and F1 against arithmetic by hand, and against the published predictions of real systems."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rtrain.metrics import spans


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("The Cat", "cat"),
        ("  a  cat\tand an\nowl ", "cat and owl"),
        ("theatre, anthem", "theatre anthem"),  # articles are whole words
        ("U.S.A.", "usa"),
        ("the-cat", "thecat"),  # punctuation goes first, and joins
        ("10\u201312", "10\u201312"),  # a dash outside ASCII is no punctuation
        ("the", ""),
    ],
)
def test_normalise(text: str, form: str) -> None:
    assert spans.normalize_answer(text) == form


@pytest.mark.parametrize(
    ("predicted", "gold", "exact", "f1"),
    [
        ("the cat", ["cat."], 1, 1),
        ("big cat", ["cat"], 0, 2 / 3),  # 1 shared of 2 and 1
        ("cat cat", ["cat"], 0, 2 / 3),  # a shared word counts as often as in both
        ("cat", ["dog", "black cat", "a cat"], 1, 1),  # the best of the gold answers
        ("dog", ["cat"], 0, 0),
        ("", ["cat"], 0, 0),
        ("", [], 1, 1),  # no answer, none given
        ("the", [], 1, 1),  # nothing is left of it
        ("cat", [], 0, 0),
        ("", ["the", "cat"], 0, 0),  # an empty normalized gold answer counts only if there is no other
        ("", ["the"], 1, 1),
    ],
)
def test_one_question_by_hand(predicted: str, gold: list[str], exact: float, f1: float) -> None:
    assert spans.compute_exact_match(predicted, gold) == exact
    assert spans.compute_f1(predicted, gold) == pytest.approx(f1)


def load(name: str) -> Any:
    root = os.environ.get("RTRAIN_DATA")
    if root is None:
        pytest.skip("RTRAIN_DATA does not name the folder of the real data sets")
    path = Path(root) / name
    return json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())


def gold_answers(name: str) -> dict[str, list[str]]:
    return {
        question["id"]: [answer["text"] for answer in question["answers"]]
        for article in load(name)["data"]
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    }


@pytest.mark.slow
@pytest.mark.parametrize("system", ["bert_ensemble", "logistic_regression", "match_lstm"])
def test_squad_1_scores_of_published_predictions(system: str) -> None:
    expected = load("squad_v1_dev/expected_scores.json")[system]
    gold = gold_answers("squad_v1_dev/dev-v1.1.json.gz")
    predicted = load(f"squad_v1_dev/predictions_{system}.json.gz")
    result = spans.make_sum_metric([predicted.get(question) for question in gold], list(gold.values())).scores()
    assert len(gold) == 10_570
    assert result["exact_match"] == pytest.approx(expected["exact_match"], abs=0.01)
    assert result["f1"] == pytest.approx(expected["f1"], abs=0.01)


@pytest.mark.slow
def test_squad_2_scores_of_published_predictions() -> None:
    expected = load("squad_v2_dev/expected_scores.json")["bert_single"]
    gold = gold_answers("squad_v2_dev/dev-v2.0.json.gz")
    predicted = load("squad_v2_dev/predictions_bert_single.json.gz")
    result = spans.make_sum_metric([predicted.get(question) for question in gold], list(gold.values())).scores()
    assert sum(not answers for answers in gold.values()) == 5_945
    for part, prefix in (("overall", ""), ("has_ans", "has_answer_"), ("no_ans", "no_answer_")):
        assert result[f"{prefix}exact_match"] == pytest.approx(expected[part]["exact"], abs=0.01)
        assert result[f"{prefix}f1"] == pytest.approx(expected[part]["f1"], abs=0.01)
