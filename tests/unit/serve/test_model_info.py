"""What /info says of a model of each task, and that its examples are answered."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rtrain.config import ServeConfig
from rtrain.core.run_folder import Run
from rtrain.inference.drift_baseline import ABSTAIN_FACT
from rtrain.inference.predictor import Predictor
from serve.app import build_app
from serve.auth import api_keys
from serve.model_info import build_model_info
from tests.support.reports import write_predictions
from tests.support.serving import HEADS, LABELS, call, predictor_of
from tests.support.tiny import make_task_artifact


def test_a_model_says_what_it_is_for(predictor: Predictor) -> None:
    info = build_model_info(predictor, ServeConfig(max_inputs=7))
    examples = info.pop("examples")
    assert len(examples) > 1
    assert info == {
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
    app = build_app(predictor_of(tmp_path, task), ServeConfig())
    info = call(app, "GET", "/info").json()
    assert {name: info[name] for name in expected} == expected
    assert info["examples"]
    answers = call(app, "POST", "/predict", json={"inputs": info["examples"]})
    assert answers.status_code == 200, answers.text
    assert len(answers.json()) == len(info["examples"])
    if task == "masked_lm":
        assert all(mask for answer in answers.json() for mask in answer)
        pieces = [piece for answer in answers.json() for mask in answer for piece in mask]
        names = map(app.service.predictor.tokenizer.id_to_token, (piece["token"] for piece in pieces))
        # The tiny model has room for more pieces than its tokenizer has.
        tokens = [(name, piece["token_str"]) for name, piece in zip(names, pieces, strict=True) if name is not None]
        assert len(tokens) > 3
        assert all(name.removeprefix("##") in text for name, text in tokens)


def test_a_model_says_below_which_score_it_abstains(predictor: Predictor, tmp_path: Path) -> None:
    served = Predictor.__new__(Predictor)
    served.__dict__ |= predictor.__dict__
    served.head = replace(predictor.head, facts={ABSTAIN_FACT: 0.812})
    app = build_app(served, ServeConfig())
    assert call(app, "GET", "/info").json()["abstain"] == 0.812
    labels = predictor_of(tmp_path, "multi_label")
    assert build_model_info(labels, ServeConfig())["abstain"] is None  # each label has a threshold of its own


SHORT = ("could you find my parcel", "the invoice lists an item twice", "please close the account of my late aunt")
"""The shortest text of each label in the rows below."""
LABELS_BY_TEXT = {
    "nineteen characters": "a",
    SHORT[2]: "c",
    f"{SHORT[0]} and its number": "a",
    SHORT[1]: "b",
    SHORT[0]: "a",
    "a text of many words " * 8: "b",
}
"""Texts of validation rows and the model's answers."""


def make_kept(
    folder: Path, task: str = "classification", answers: dict[str, Any] = LABELS_BY_TEXT, **data: str
) -> Predictor:
    """The loaded artifact of a run whose folder has the texts of its validation rows."""
    predictor = Predictor.load(make_task_artifact(folder / "artifact", task, HEADS[task], seed=1, data=data), threads=1)
    label_values = list(answers.values())
    write_predictions(folder, label_values, label_values, text=list(answers), split="valid", measured=False)
    return predictor


def get_examples(predictor: Predictor, settings: ServeConfig, **headers: str) -> Any:
    return call(build_app(predictor, settings), "GET", "/info", headers=headers).json()["examples"]


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("classification", str),
        ("multi_label", lambda label: [label]),
        ("multi_head", lambda label: ["buy", label]),
        ("regression", ord),
        ("token_tags", lambda label: ["O", label]),
    ],
)
def test_examples_are_short_validation_texts_of_several_answers(
    task: str, answer: Callable[[str], Any], tmp_path: Path
) -> None:
    predictor = make_kept(tmp_path, task, {text: answer(label) for text, label in LABELS_BY_TEXT.items()})
    app = build_app(predictor, ServeConfig())
    examples = call(app, "GET", "/info").json()["examples"]
    assert examples == list(SHORT)
    assert len(call(app, "POST", "/predict", json={"inputs": examples}).json()) == len(examples)


def test_who_has_no_key_reads_no_text_of_a_validation_row(tmp_path: Path) -> None:
    predictor = make_kept(tmp_path / "run")
    path = tmp_path / "keys.json"
    key = api_keys.add_key(path, "shop")
    for host in ("127.0.0.1", "0.0.0.0"):
        settings = ServeConfig(host=host, keys=str(path))
        refused = call(build_app(predictor, settings), "GET", "/info")
        assert (refused.status_code, [text for text in LABELS_BY_TEXT if text in refused.text]) == (401, [])
        assert get_examples(predictor, settings, authorization=f"Bearer {key}") == list(SHORT)
    stock = predictor.task.example_inputs(predictor.head)
    for settings in (ServeConfig(host="0.0.0.0", insecure=True), ServeConfig(allowed_hosts=("models.example",))):
        app = build_app(predictor, settings)
        headers = {"host": "models.example"}
        replies = [call(app, "GET", route, headers=headers) for route in ("/info", "/", "/page.js", "/openapi.json")]
        assert [reply.status_code for reply in replies] == [200] * 4
        assert [text for text in LABELS_BY_TEXT for reply in replies if text in reply.text] == []
        assert replies[0].json()["examples"] == stock


def test_without_kept_texts_the_examples_are_the_task_s(tmp_path: Path) -> None:
    predictor = make_kept(tmp_path / "run")
    stock = predictor.task.example_inputs(predictor.head)
    copied_predictor = Predictor.load(shutil.copytree(tmp_path / "run" / "artifact", tmp_path / "copy"), threads=1)
    assert get_examples(copied_predictor, ServeConfig()) == stock
    path = Run(tmp_path / "run").predictions("valid")
    write_predictions(tmp_path / "run", ["a"], ["a"], text=["short"], split="valid", measured=False)
    assert get_examples(predictor, ServeConfig()) == stock
    for content in (b"", b"no parquet", path.read_bytes()[:-40]):
        path.write_bytes(content)
        assert get_examples(predictor, ServeConfig()) == stock
    path.unlink()
    assert get_examples(predictor, ServeConfig()) == stock


@pytest.mark.parametrize("task", ["span_qa", "extractive_summary", "masked_lm"])
def test_a_task_that_needs_more_than_a_short_text_has_its_own_examples(task: str, tmp_path: Path) -> None:
    predictor = make_kept(tmp_path, task)
    assert get_examples(predictor, ServeConfig()) == predictor.task.example_inputs(predictor.head)


def test_a_model_of_pairs_has_pairs_of_its_task_for_examples(tmp_path: Path) -> None:
    examples = get_examples(make_kept(tmp_path, text="premise", text_pair="hypothesis"), ServeConfig())
    assert all(set(example) == {"text", "text_pair"} for example in examples)
    assert [text for example in examples for text in example.values() if text in LABELS_BY_TEXT] == []
