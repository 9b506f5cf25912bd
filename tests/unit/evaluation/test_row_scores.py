"""What answers are worth: over all rows of a run the same scores as the run's own, for every task."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtrain.config.recipe import TASKS
from rtrain.core.run_folder import Run
from rtrain.data.store.store import Store
from rtrain.evaluation import row_scores
from rtrain.evaluation.row_scores import RowAnswers
from rtrain.inference import artifact
from rtrain.metrics import per_class, scores
from rtrain.metrics.registry import get_metric
from rtrain.report import collect
from rtrain.tasks import base
from tests.support.reports import make_answered

BY_WORDS = ("span_qa",)
"""Their files keep the words of one true answer; the run's own scores are of places, and of every true answer."""


def sheet(run: Run) -> RowAnswers:
    rows = collect.read_answers(run, "test")
    assert rows is not None
    assert run.token_store is not None
    return RowAnswers(
        rows.target,
        rows.prediction,
        rows.loss,
        artifact.read_artifact(run.artifact).facts,
        Store(run.token_store),
        "test",
        np.arange(len(rows)),
    )


@pytest.mark.parametrize("task", TASKS)
def test_over_all_rows_the_scores_are_those_of_the_run(task: str, tmp_path: Path) -> None:
    run, output = Run(make_answered(tmp_path, task)), base.get_task(task).output
    result = row_scores.score_rows(output, sheet(run))
    assert result.headline == get_metric(output).headline
    measured = scores.read_scores(run.scores("test"))
    assert measured is not None
    values = result.scores.scores()
    assert len(result.quality) == len(result.scores) == measured["rows"] > 0
    assert result.slice_scores.scores()[result.headline] == pytest.approx(values[result.headline])
    if task in BY_WORDS:
        assert set(values) == {"f1", "exact_match"}
        return
    common = values.keys() & measured["scores"].keys()
    assert result.headline in common
    assert {name: values[name] for name in common} == pytest.approx({name: measured["scores"][name] for name in common})
    # So are those of each class, of classes that occur in truth or answers.
    ours, theirs = (
        {item["class"]: {name: item[name] for name in (*per_class.SCORES, "support", "predicted")} for item in side}
        for side in (result.classes, per_class.collect_classes(measured["tables"]))
    )
    theirs = {name: item for name, item in theirs.items() if item["support"] + item["predicted"]}
    assert ours == {name: pytest.approx(item) for name, item in theirs.items()}
    assert bool(ours) == (output in ("classes", "labels", "heads", "tags"))


def answers(target: list[Any], prediction: list[Any], **facts: Any) -> RowAnswers:
    rows = np.arange(len(target))
    return RowAnswers(column(target), column(prediction), np.ones(len(target)), facts, None, "test", rows)


def column(values: list[Any]) -> row_scores.AnswerColumn:
    result = np.empty(len(values), dtype=object)
    result[:] = values
    return result


def test_words_of_answers() -> None:
    result = row_scores.score_rows("spans", answers(["in Paris", "two", ""], ["Paris", "", ""]))
    assert result.quality.tolist() == pytest.approx([2 / 3, 0.0, 1.0])  # nothing is right where nothing is to be found
    assert result.is_correct is not None
    assert result.is_correct.tolist() == [False, False, True]


def test_rows_outside_of_all_classes_are_right_where_they_are_refused() -> None:
    result = row_scores.score_rows(
        "classes", answers(["a", "none", "b"], ["a", "none", "none"], out_of_scope_label="none")
    )
    assert result.headline == "accuracy_with_abstentions"
    assert result.scores.scores() == pytest.approx({"accuracy_with_abstentions": 2 / 3})


def test_a_label_that_training_lacked_is_wrong_whatever_is_answered() -> None:
    result = row_scores.score_rows("classes", answers(["", "b"], ["", "b"]))
    assert result.is_correct is not None
    assert result.is_correct.tolist() == [False, True]


def test_an_answer_of_an_unknown_kind_is_worth_its_loss() -> None:
    odd = answers(["x", "y"], ["x", "y"])._replace(loss=np.array([0.5, np.inf]))
    result = row_scores.score_rows("verdict", odd)
    assert result.headline == "neg_loss"
    assert result.quality.tolist() == [-0.5, -0.5]
    assert row_scores.score_rows("tokens", odd).headline == "neg_loss"  # answers that no version has written
    assert row_scores.score_rows("summary", answers([["1"]], [["1"]])).headline == "neg_loss"  # without its token store


@pytest.mark.parametrize(
    ("output", "first", "other", "merged", "same"),
    [
        ("classes", ["a", ""], ["a", "b"], ["a", "b"], [True, True]),
        ("labels", [["a"], []], [["a", "c"], []], [["a", "c"], []], [True, True]),
        ("heads", [["a", ""]], [["", "good"]], [["a", "good"]], [True]),
        ("tags", [["O", "B-X"], ["O"]], [["B-Y", "B-X"], ["O", "O"]], [["B-Y", "B-X"], ["O"]], [True, False]),
        ("spans", ["in paris"], ["In Paris"], ["in paris"], [True]),
    ],
)
def test_targets_that_one_side_does_not_know_are_had_from_the_other(
    output: str, first: list[Any], other: list[Any], merged: list[Any], same: list[bool]
) -> None:
    result, remaining = row_scores.merge_targets(output, [column(first), column(other)])
    assert (result.tolist(), remaining.tolist()) == (merged, same)
