"""Answers as JSON: byte for byte as the standard library writes them."""

import json
import math

import pytest
from hypothesis import given, strategies as st

from rtrain.config import Serve
from rtrain.predict import Predictor
from serve import writing
from serve.app import build_app
from tests import serving
from tests.serving import TEXT, call

predictor = serving.predictor  # fixture

LABELS = st.text(st.characters(exclude_categories=["Cs"]))
SCORES = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300)
ANSWER = st.tuples(LABELS, SCORES).map(lambda one: {"label": one[0], "score": one[1]})
ANSWERS = st.lists(st.lists(ANSWER, max_size=4), max_size=4)


@given(ANSWERS)
def test_labels_with_scores_are_written_as_any_json(answers: list[list[dict[str, object]]]) -> None:
    assert writing.labelled(answers) == writing.text(answers)
    assert json.loads(writing.labelled(answers)) == answers


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_is_not_written(score: float) -> None:
    for write in (writing.text, writing.labelled):
        with pytest.raises(ValueError, match=r"number|JSON"):
            write([[{"label": "a", "score": 0.5}, {"label": "b", "score": score}]])


def test_the_endpoint_writes_labels_so(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_begun", lambda label: f'{{ "label": {writing.text(label)}, "score": ')
    response = call(build_app(predictor, Serve()), "POST", "/predict", json={"inputs": [TEXT, "?"]})
    assert response.json()[0][0].keys() == {"label", "score"}
    assert b'{ "label": ' in response.content
