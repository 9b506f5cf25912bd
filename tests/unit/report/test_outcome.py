"""The first part of the page: the scores, what is wrong most, what to do next, for runs in every state."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtrain.core import events
from rtrain.core.ragged import RaggedArray
from rtrain.core.run_folder import Run
from rtrain.data.store.store import open_store
from rtrain.metrics import per_class
from rtrain.report import baselines, event_messages
from rtrain.report.page import Note, RecommendationList, Table
from rtrain.report.sections import next_steps, outcome
from rtrain.runs import predictions
from rtrain.tasks import base
from tests.support.reports import (
    answers_of,
    begin,
    make_run,
    page_of,
    read,
    settings_of,
    write_predictions,
    write_scores,
)
from tests.unit.report.test_page import table

LABELS = ("login", "parcel", "refund")


def with_baselines(run: Path, rows: dict[str, int], **scores: float) -> None:
    """As `baselines.ensure_baselines` leaves them, with the same score on both splits, of so many `num_rows` each."""
    entry = [{"name": name, "scores": {"valid": value, "test": value}} for name, value in scores.items()]
    document = {"schema_version": baselines.SCHEMA_VERSION, "headline": "accuracy", "training_rows": 100, "rows": rows}
    (run / baselines.NAME).write_text(json.dumps({**document, "baselines": entry}))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """English rows are all answered `login`; the log's test accuracy is 0.5, with an interval about the true share."""
    run = make_run(tmp_path_factory.mktemp("outcome"))
    targets, result = answers_of(LABELS, 200, right=0.6)
    language = ["de" if row % 4 else "en" for row in range(200)]
    result = [("login" if code == "en" else messages) for messages, code in zip(result, language, strict=True)]
    write_predictions(run, targets, result, language=language, score=[0.95] * 200)
    write_scores(run, *answers_of(LABELS, 30, right=0.5), split="valid")
    with_baselines(run, {"valid": 30, "test": 200}, tfidf=0.3, majority=0.2)
    return run


def steps_of(run: Any) -> list[str]:
    (block,) = (block for block in outcome.build_section(run).blocks if isinstance(block, RecommendationList))
    return [step.action for step in block.recommendations]


def test_it_comes_first_and_digests_and_versions_last(finished: Path) -> None:
    text = page_of(finished).text
    order = ("Worst mistakes", "What to do next", "Rows and tokens of each split", "The training loss", "Digests")
    places = [text.index(words) for words in order]
    assert places == sorted(places)


def test_scores_of_both_splits_stand_beside_the_baselines(finished: Path) -> None:
    run = read(finished)
    result = table(outcome.build_section(run), "Test accuracy 0.500, ahead of the best baseline (tfidf: 0.300)")
    assert [row[:3] for row in result.rows] == [
        ("test", "this model", "0.5000"),
        ("test", "tfidf", "0.3000"),
        ("test", "majority", "0.2000"),
        ("validation", "this model", "0.5000"),
        ("validation", "tfidf", "0.3000"),
        ("validation", "majority", "0.2000"),
    ]
    low, high = (run.scores or {})["intervals"]["scores"]["accuracy"]
    assert result.rows[0][3] == f"{low:.4f} to {high:.4f}"
    assert result.rows[3][3] != "-"
    assert outcome.build_tiles(run)[0].name == "test accuracy"
    assert "Baselines learned from 100 of the" in result.note


def test_scores_without_rows_that_are_training_rows_stand_below_the_scores(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    run = Run(tmp_path / "run")
    places = "more.csv:7 and 4 more rows"
    run.append_event("overlap", split="test", rows=40, trained_rows=5, row_places=places)
    run.append_event("unseen", split="test", in_training_set=5, rows=35, scores={"accuracy": 0.4, "rows": 35})
    run.append_event("best", step=10, num_evaluations=2, score=0.5, loss=0.25, reason="loss", headline="accuracy")
    context = read(run)
    result = table(outcome.build_section(context), "Test accuracy 0.500")
    expected = ("test", "this model, without the 5 rows that are training rows too", "0.4000", "-")
    assert list(result.rows)[1] == expected
    text = page_of(run.folder).text
    assert f"5 of 40 test rows are training rows too, but for case, blanks and punctuation: {places}." in text
    assert "Best of 2: step 10, a tie by accuracy 0.5000, of the lower loss." in text


@pytest.mark.parametrize(("reached", "said"), [(0.9, "NOT ahead of"), (0.1, "ahead of")])
def test_the_title_says_which_is_ahead(reached: float, said: str, finished: Path) -> None:
    run = read(finished)
    (first, *_) = run.baselines["baselines"]
    changed = {**run.baselines, "baselines": [{**first, "scores": {"test": reached, "valid": reached}}]}
    result = outcome.build_section(replace(run, baselines=changed)).blocks[0]
    assert isinstance(result, Table)
    assert f", {said} the best baseline" in result.title


def test_only_scores_of_the_same_rows_are_compared(finished: Path) -> None:
    """The baselines are of 50 of the 200 rows: the model's score on these is known, or nothing is said."""
    run = read(finished)
    run = replace(run, baselines={**run.baselines, "rows": {"valid": 30, "test": 50}})
    assert outcome.build_section(run).blocks[0].title == "Test accuracy 0.500"  # type: ignore[union-attr]
    assert next_steps.collect_facts(run).baseline_comparison is None
    sample = {"rows": 50, "scores": {"accuracy": 0.1}, "intervals": {}}
    run = replace(run, scores={**(run.scores or {}), "sample": sample})
    result = outcome.build_section(run).blocks[0]
    assert isinstance(result, Table)
    assert ", NOT ahead of the best baseline" in result.title
    assert ("test", "this model, on the 50 rows of the baselines", "0.1000", "-") in list(result.rows)


@pytest.mark.parametrize("task", ["classification", "multi_label", "multi_head", "regression"])
def test_one_answer_to_almost_all_rows_is_told(task: str, tmp_path: Path) -> None:
    """Not that of a model of random answers, however wrong they are."""
    folder = Run(begin(tmp_path, settings_of(task, tmp_path)))
    assert folder.token_store is not None
    store = open_store(folder.token_store)
    head, rows = store.manifest.head, store.num_rows("test")
    width = 1 if task == "regression" else len(head.labels)
    random = np.random.default_rng(0).normal(0, 3, (rows, width))
    for outcomes, is_told in ((random, False), (np.tile(random[:1], (rows, 1)), True)):
        document = predictions.measure_scores(
            store, "test", base.get_task(task), head, RaggedArray.from_matrix(outcomes)
        )
        assert ("collapsed" in document) is is_told
    for one in document["collapsed"]:
        assert (one["rows"], one["total_rows"], one["other_rows_with_answer"]) == (
            one["total_rows"],
            rows,
            one["other_rows"],
        )
        assert "WARNING" in str(event_messages.format_event({"kind": "collapsed", "split": "test", **one}))
    found = outcome.build_section(replace(read(folder), scores=document))
    assert any(isinstance(block, Note) and "hardly tells rows apart" in block.text for block in found.blocks)


def test_the_worst_of_each_kind_in_one_glance(finished: Path) -> None:
    run = read(finished)
    rows = table(outcome.build_section(run), "Worst mistakes").rows
    assert rows[0][:2] == ("slice", "language: en")
    kinds = [row[0] for row in rows]
    assert kinds == sorted(kinds, key=("slice", "label", "confusion", "hardest row").index)
    assert {"slice", "label", "confusion", "hardest row"} == set(kinds)
    wrong = [row for row in run.answers.hardest_rows(200).tolist() if not run.answers.is_correct[row]]
    assert f"rows.csv:{wrong[0] + 2}" in str(rows[kinds.index("hardest row")][1])
    limit = next_steps.confused_pairs(run)[0]
    assert rows[kinds.index("confusion")][1:] == (f"{limit[0]} → {limit[1]}", f"{limit[2]} rows")


def test_a_label_with_too_few_rows_is_named_before_another_is_called_the_worst(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_predictions(run, ["no"] * 147 + ["yes"] * 3, ["no"] * 145 + ["yes"] * 2 + ["no", "no", "yes"])
    rows = [row for row in table(outcome.build_section(read(run)), "Worst mistakes").rows if "label" in row]
    assert [row[1] for row in rows] == ["yes", "no"]
    assert str(rows[0][2]).startswith(per_class.TOO_FEW_ROWS)
    assert per_class.TOO_FEW_ROWS not in str(rows[1][2])


def test_facts_call_for_their_steps(finished: Path) -> None:
    run = read(finished)
    result: Any = next_steps.collect_facts(run)
    assert (result.weak_slice.column, result.weak_slice.value) == ("language", "en")
    assert len(result.suspect_rows) >= 2  # wrong answers with a confidence of 0.95
    assert result.train_loss == pytest.approx(sum(2.0 / update for update in range(11, 21)) / 10)
    assert (result.baseline_comparison.baseline_name, result.baseline_comparison.baseline_score) == ("tfidf", 0.3)
    assert [value for _, value in result.validation_scores] == [0.25, 0.5]
    loaded = " ".join(steps_of(run))
    assert "Check the labels of rows.csv:" in loaded
    assert "Add training rows of language “en”, or start from a multilingual encoder" in loaded


def test_a_run_without_a_score_says_so_and_how_it_goes_on(tmp_path: Path) -> None:
    run = read(make_run(tmp_path, trained=False))
    first, *remaining_items = outcome.build_section(run).blocks
    assert isinstance(first, Note)
    assert "There is no score yet" in first.text
    assert not any(isinstance(block, Table) for block in remaining_items)
    assert steps_of(run) == ["Wait for its end, or resume if its process is gone"]
    assert outcome.build_tiles(run)[0].name == "status"


def test_a_run_that_goes_on_shows_its_newest_validation(tmp_path: Path) -> None:
    run = make_run(tmp_path, trained=False)
    events.append_event(run, "started", step=0, total_steps=20, workers=2, precision="fp32")
    for update, accuracy in ((5, 0.25), (10, 0.75)):
        events.append_event(run, "evaluated", split="valid", step=update, scores={"accuracy": accuracy, "rows": 30})
    result = table(outcome.build_section(read(run)), "Validation accuracy 0.750")
    assert result.rows == [("validation", "this model", "0.7500", "-")]
    assert "No baseline was measured" in result.note


def test_operating_points_and_an_early_end_stand_in_summary_and_page_once(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_predictions(run, *answers_of(LABELS, 60, right=0.6))
    shares: dict[str, Any] = {"recall": 0.75, "precision": 0.5, "intervals": {"recall": [0.5, 1.0]}}
    point = {"label": "parcel", "requested": "recall", "requested_value": 0.8, "threshold": 0.125, **shares}
    point |= {"rows": 12, "predicted": 18, "is_reached": True, "exact_interval": [0.43, 0.95]}
    stop = {"step": 12, "total_steps": 20, "patience": 2, "best_step": 8}
    for _ in range(2):  # a worker that was killed as it wrote its artifact does so again
        events.append_event(run, "early_stop", **stop)
        for split in ("valid", "test"):
            events.append_event(run, "operating_point", split=split, **point)
    data = read(run)
    assert data.summary["early_stop"] == stop
    assert data.summary["operating_points"] == {"valid": [point], "test": [point]}
    result = table(outcome.build_section(data), "Operating points")
    assert [row[:4] for row in result.rows] == [
        ("validation", "parcel", "recall 0.8", "0.125"),
        ("test", "parcel", "recall 0.8", "0.125"),
    ]
    [note] = [
        block.text for block in outcome.build_section(data).blocks if isinstance(block, Note) and "12" in block.text
    ]
    assert "20" in note
    assert not {"early_stop", "operating_points"} & read(make_run(tmp_path / "other")).summary.keys()
