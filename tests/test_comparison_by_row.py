"""What answers are worth: over all rows of a run the same scores as the run's own, for every task."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtrain.config.recipe import TASKS
from rtrain.core.run_folder import Run
from rtrain.data.store.store import Store
from rtrain.evaluation import row_scores
from rtrain.evaluation.row_scores import Sheet
from rtrain.inference import artifact
from rtrain.metrics import per_class, scores
from rtrain.metrics.registry import metric_for
from rtrain.report import row_predictions
from rtrain.tasks import base
from tests.reports import make_answered

BY_WORDS = ("span_qa",)
"""Their files keep the words of one true answer; the run's own scores are of places, and of every true answer."""


def sheet(run: Run) -> Sheet:
    rows = row_predictions.read(run, "test")
    assert rows is not None
    assert run.store is not None
    return Sheet(
        rows.target,
        rows.prediction,
        rows.loss,
        artifact.read(run.artifact).facts,
        Store(run.store),
        "test",
        np.arange(len(rows)),
    )


@pytest.mark.parametrize("task", TASKS)
def test_over_all_rows_the_scores_are_those_of_the_run(task: str, tmp_path: Path) -> None:
    run, output = Run(make_answered(tmp_path, task)), base.get(task).output
    found = row_scores.judge(output, sheet(run))
    assert found.headline == metric_for(output).headline
    measured = scores.read(run.scores("test"))
    assert measured is not None
    own = found.scores.scores()
    assert len(found.worth) == len(found.scores) == measured["rows"] > 0
    assert found.main.scores()[found.headline] == pytest.approx(own[found.headline])
    if task in BY_WORDS:
        assert set(own) == {"f1", "exact_match"}
        return
    common = own.keys() & measured["scores"].keys()
    assert found.headline in common
    assert {name: own[name] for name in common} == pytest.approx({name: measured["scores"][name] for name in common})
    # So are those of each class, of classes that occur in truth or answers.
    ours, theirs = (
        {one["class"]: {name: one[name] for name in (*per_class.SCORES, "support", "predicted")} for one in side}
        for side in (found.classes, per_class.collect_classes(measured["tables"]))
    )
    theirs = {name: one for name, one in theirs.items() if one["support"] + one["predicted"]}
    assert ours == {name: pytest.approx(one) for name, one in theirs.items()}
    assert bool(ours) == (output in ("classes", "labels", "heads", "tags"))


def answers(target: list[Any], prediction: list[Any], **facts: Any) -> Sheet:
    rows = np.arange(len(target))
    return Sheet(column(target), column(prediction), np.ones(len(target)), facts, None, "test", rows)


def column(values: list[Any]) -> row_scores.Column:
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found


def test_words_of_answers() -> None:
    found = row_scores.judge("spans", answers(["in Paris", "two", ""], ["Paris", "", ""]))
    assert found.worth.tolist() == pytest.approx([2 / 3, 0.0, 1.0])  # nothing is right where nothing is to be found
    assert found.right is not None
    assert found.right.tolist() == [False, False, True]


def test_rows_outside_of_all_classes_are_right_where_they_are_refused() -> None:
    found = row_scores.judge("classes", answers(["a", "none", "b"], ["a", "none", "none"], outside="none"))
    assert found.headline == "accuracy_with_refusals"
    assert found.scores.scores() == pytest.approx({"accuracy_with_refusals": 2 / 3})


def test_a_label_that_training_lacked_is_wrong_whatever_is_answered() -> None:
    found = row_scores.judge("classes", answers(["", "b"], ["", "b"]))
    assert found.right is not None
    assert found.right.tolist() == [False, True]


def test_an_answer_of_an_unknown_kind_is_worth_its_loss() -> None:
    odd = answers(["x", "y"], ["x", "y"])._replace(loss=np.array([0.5, np.inf]))
    found = row_scores.judge("verdict", odd)
    assert found.headline == "neg_loss"
    assert found.worth.tolist() == [-0.5, -0.5]
    assert row_scores.judge("tokens", odd).headline == "neg_loss"  # answers that no version has written
    assert row_scores.judge("summary", answers([["1"]], [["1"]])).headline == "neg_loss"  # without its token store


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
    found, kept = row_scores.reconciled(output, [column(first), column(other)])
    assert (found.tolist(), kept.tolist()) == (merged, same)
