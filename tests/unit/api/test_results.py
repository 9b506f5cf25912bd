"""Results: paths for any verb, figures, and the card of a notebook."""

import os
from pathlib import Path

import pytest

import rtrain
from rtrain.api.results import GateResult, TrainResult, TuneResult
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.report.summary import summarize
from tests.support import stock
from tests.support.searches import make_search
from tests.support.tiny import make_artifact
from tune.history import Journal
from tune.report import table


def result_of(run: Run) -> TrainResult:
    return TrainResult.from_run(run, summarize(run))


def test_a_run_has_scores_an_artifact_and_is_a_path(tmp_path: Path) -> None:
    result = result_of(stock.make(tmp_path / "run", test=0.6))
    assert result.metrics["test"]["accuracy"] == 0.6
    assert os.fspath(result) == str(tmp_path / "run")
    assert os.fspath(result.artifact) == str(tmp_path / "run" / "artifact")
    assert "accuracy=0.6" in repr(result)
    assert str(tmp_path / "run") in str(result)
    assert result.verdict is None


def test_a_card_has_scores_the_curve_and_a_link_and_escapes_names(tmp_path: Path) -> None:
    run = stock.make(tmp_path / "a <b>", test=0.6)
    run.report.write_text("page")
    card = result_of(run)._repr_html_()
    assert "0.6000" in card
    assert "<polyline" in card
    assert f'href="{run.report.as_uri()}"' in card
    assert "a <b>" not in card


def test_a_verdict_has_its_reasons(tmp_path: Path) -> None:
    result = GateResult(tmp_path, {"verdict": "refuse", "reasons": ["a", "b"]}, "text", True)
    assert (result.verdict, result.reasons) == ("refuse", ["a", "b"])
    assert "refuse" in result._repr_html_()


def test_a_search_has_ray_tune_s_columns(tmp_path: Path) -> None:
    run = make_search(tmp_path, [0.5, 0.7, 0.6])
    history = Journal(run.trials).history
    winner = stock.make(tmp_path / "winner")
    result = TuneResult(run.folder, {}, "", result_of(winner), table.describe_search(run), history, "accuracy")
    frame = result.dataframe
    assert list(frame["trial_id"]) == [f"{trial.number:03d}" for trial in history.trials]
    searched = {f"config/{name}" for trial in history.trials for name in trial.settings}
    assert searched
    assert {*searched, "accuracy", "training_iteration", "time_total_s", "done", "logdir"} <= {*frame.columns}
    assert result.dataframe is frame
    assert result.metrics["test"]["accuracy"] == 0.6
    assert result.verdict in repr(result)


@pytest.mark.parametrize("address", ["missing", "s3-typo://bucket/artifact"])
def test_load_refuses_an_address_without_an_artifact(address: str, tmp_path: Path) -> None:
    name = address if "://" in address else str(tmp_path / address)
    with pytest.raises(UserError):
        rtrain.load(name)


def test_a_model_answers_with_the_best_label_or_with_several(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "artifact", labels=("a", "b", "c"))
    model = rtrain.load(folder)
    assert model.labels == ("a", "b", "c")
    texts = ["where is my parcel", "money back"]
    best, ranked = model.predict(texts), model.predict(texts, top=3)
    assert [answer["label"] for answer in best] == [entries[0]["label"] for entries in ranked]
    assert [len(entries) for entries in ranked] == [3, 3]
    logits = model.logits(texts)
    assert [model.labels[int(row.argmax())] for row in logits] == [answer["label"] for answer in best]
    assert model.predict([]) == []
