"""What /info says of a model of each task, and that its own examples are answered."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rtrain.config import Serve
from rtrain.predict import Predictor
from rtrain.reference import ABSTAIN
from serve.about import describe
from serve.app import build_app
from tests import serving
from tests.serving import HEADS, LABELS, call, predictor_of

predictor = serving.predictor  # fixture


def test_a_model_says_what_it_is_for(predictor: Predictor) -> None:
    found = describe(predictor, Serve(max_inputs=7))
    examples = found.pop("examples")
    assert len(examples) > 1
    assert found == {
        "name": "tiny",
        "task": "classification",
        "output": "classes",
        "engine": "torch",
        "revisions": predictor.revisions,
        "fields": ["text"],
        "columns": {},
        "labels": list(LABELS),
        "thresholds": None,
        "abstain": None,
        "scale": None,
        "max_words": None,
        "explains": True,
        "limits": {"inputs": 7, "body_bytes": 1_000_000, "tokens": 64},
    }
    assert predictor.revisions["model"] == predictor.artifact.version
    assert {len(digest) for digest in predictor.revisions.values()} == {12}


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("multi_label", {"thresholds": {"a": 0.5, "b": 0.5, "c": 0.5}, "explains": True}),
        ("multi_head", {"labels": list(HEADS["multi_head"].labels), "explains": True}),
        ("regression", {"scale": {"lowest": 1.0, "highest": 9.0, "step": 0.5}, "explains": True}),
        ("token_tags", {"fields": ["text"], "explains": True}),
        ("span_qa", {"fields": ["question", "context"], "explains": False}),
        ("extractive_summary", {"max_words": 30, "explains": False}),
        ("masked_lm", {"labels": [], "explains": False}),
    ],
)
def test_each_task_has_what_its_page_needs_and_examples_that_are_answered(
    task: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    app = build_app(predictor_of(tmp_path, task), Serve())
    found = call(app, "GET", "/info").json()
    assert {name: found[name] for name in expected} == expected
    assert found["examples"]
    answers = call(app, "POST", "/predict", json={"inputs": found["examples"]})
    assert answers.status_code == 200, answers.text
    assert len(answers.json()) == len(found["examples"])
    if task == "masked_lm":
        assert all(mask for answer in answers.json() for mask in answer)
        pieces = [piece for answer in answers.json() for mask in answer for piece in mask]
        names = map(app.state.service.predictor.tokenizer.id_to_token, (piece["token"] for piece in pieces))
        # The tiny model has room for more pieces than its tokenizer has.
        known = [(name, piece["token_str"]) for name, piece in zip(names, pieces, strict=True) if name is not None]
        assert len(known) > 3
        assert all(name.removeprefix("##") in text for name, text in known)


def test_a_model_of_pairs_asks_for_two_texts(predictor: Predictor) -> None:
    paired = Predictor.__new__(Predictor)
    paired.__dict__ |= predictor.__dict__
    paired.artifact = replace(predictor.artifact, data={"text": "premise", "text_pair": "hypothesis"})
    found = describe(paired, Serve())
    assert found["fields"] == ["text", "text_pair"]
    assert found["columns"] == {"text": "premise", "text_pair": "hypothesis"}
    described = call(build_app(paired, Serve()), "GET", "/openapi.json").json()["info"]["description"]
    assert all(name in described for pair in found["columns"].items() for name in pair)
    assert all(set(example) == {"text", "text_pair"} for example in found["examples"])
    answers = call(build_app(paired, Serve()), "POST", "/predict", json={"inputs": found["examples"]})
    assert len(answers.json()) == len(found["examples"]) > 0


def test_an_int8_model_does_not_explain(predictor: Predictor) -> None:
    int8 = Predictor.__new__(Predictor)
    int8.__dict__ |= predictor.__dict__
    int8.artifact = replace(predictor.artifact, engine="openvino")
    assert describe(int8, Serve())["explains"] is False


def test_a_model_says_below_which_score_it_abstains(predictor: Predictor, tmp_path: Path) -> None:
    served = Predictor.__new__(Predictor)
    served.__dict__ |= predictor.__dict__
    served.head = replace(predictor.head, facts={ABSTAIN: 0.812})
    app = build_app(served, Serve())
    assert call(app, "GET", "/info").json()["abstain"] == 0.812
    labels = predictor_of(tmp_path, "multi_label")
    assert describe(labels, Serve())["abstain"] is None  # each label has a threshold of its own
