"""Which evaluation has the best weights: by score, of equals by loss, and the same after a resume."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rtrain.core.ragged import RaggedArray
from rtrain.data.store.store import Store
from rtrain.tasks import base
from rtrain.trainer import evaluate
from rtrain.trainer.evaluate import Evaluation
from tests.unit.trainer import test_trainer
from tests.unit.trainer.test_trainer import UPDATES, start, weights_digest
from tests.unit.trainer.test_trainer_resume import weights_of

ground = test_trainer.ground  # a fixture


@pytest.mark.parametrize(
    ("new", "old", "wins"),
    [
        (Evaluation(4, 0.5, 9.0), None, True),
        (Evaluation(4, 0.5, 9.0), Evaluation(2, 0.4, 0.1), True),  # the score comes first
        (Evaluation(4, 0.4, 0.1), Evaluation(2, 0.5, 9.0), False),
        (Evaluation(4, 0.5, 0.1), Evaluation(2, 0.5, 0.2), True),
        (Evaluation(4, 0.5, 0.2), Evaluation(2, 0.5, 0.2), False),  # the earlier of what is equal
        (Evaluation(4, 0.5, 0.1), Evaluation(2, 0.5, None), False),  # chosen by a version that knew no loss
        (Evaluation(4, 0.5, None), Evaluation(2, 0.5, 0.1), False),
        (Evaluation(4, math.nan, 0.1), Evaluation(2, 0.5, 0.1), False),
    ],
)
def test_which_of_two_is_better(new: Evaluation, old: Evaluation | None, wins: bool) -> None:
    assert evaluate.is_better(new, old) is wins


SCORES = st.sampled_from([0.25, 0.5, 0.75])
LOSSES = st.sampled_from([0.1, 0.2, 0.3])


@given(st.lists(st.tuples(SCORES, LOSSES), min_size=1, max_size=8))
def test_taken_one_after_another_the_best_is_the_best_of_all(pairs: list[tuple[float, float]]) -> None:
    every = [Evaluation(update, *pair) for update, pair in enumerate(pairs)]
    options: Evaluation | None = None
    for one in every:
        options = one if evaluate.is_better(one, options) else options
    assert options == min(every, key=lambda one: (-one.score, one.loss, one.step))
    output = evaluate.best_event(options, {one.step: one for one in every})
    tied = [one for one in every if one.score == options.score]
    lowest = [one for one in tied if one.loss == options.loss]
    assert output["num_evaluations"] == len(every)
    assert output["reason"] == ("score" if len(tied) == 1 else "loss" if len(lowest) == 1 else "first")


def test_a_better_one_whose_checkpoint_was_lost_is_not_counted() -> None:
    every = {2: Evaluation(2, 0.9, 0.1), 4: Evaluation(4, 0.1, 0.2), 6: Evaluation(6, 0.3, 0.2)}
    assert evaluate.best_event(every[6], every) == {
        "step": 6,
        "score": 0.3,
        "loss": 0.2,
        "num_evaluations": 2,
        "reason": "score",
    }


def test_the_loss_is_the_mean_log_loss_of_the_rows_and_an_endless_one_is_bounded(ground: Path) -> None:
    store, task = Store(next((ground / ".tokens").iterdir())), base.get_task("classification")
    size, true = len(store.manifest.labels), store.targets("valid").values.astype(np.int64)
    logits = np.random.default_rng(0).normal(size=(len(true), size))
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    requested = -np.log(shares[np.arange(len(true)), true])
    assert evaluate.mean_row_loss(task, RaggedArray.from_matrix(logits), store) == pytest.approx(requested.mean())
    logits[0] = -1e6
    logits[0, (true[0] + 1) % size] = 1e6
    actual = evaluate.mean_row_loss(task, RaggedArray.from_matrix(logits), store)
    assert actual == pytest.approx((requested[1:].sum() + evaluate.INFINITE_LOSS) / len(true))
    assert 700 < evaluate.INFINITE_LOSS < 710


@pytest.mark.parametrize("kill", [None, 3, *(pytest.param(kill, marks=pytest.mark.slow) for kill in (1, 5))])
def test_of_equal_scores_the_lower_loss_is_chosen_also_after_a_resume(
    kill: int | None, ground: Path, tmp_path: Path
) -> None:
    """At this rate five steps have one accuracy, and the second of them the lowest loss."""
    rates = {"evaluate_every": 1, "save_every": 1, "rules": {"lr": 0.015}}
    if kill is not None:
        start(ground, tmp_path, kill=kill, **rates)  # type: ignore[arg-type]
    ran = start(ground, tmp_path, **rates)  # type: ignore[arg-type]
    assert ran.outcome is not None
    evaluated = [event for event in ran.recorder.of("evaluated") if event["split"] == "valid"]
    assert len(evaluated) == UPDATES - (kill or 0)
    [output] = ran.recorder.of("best")
    assert (output["step"], ran.outcome.best_step) == (2, 2)
    assert weights_digest(ran.network) == weights_of(ground, tmp_path, 2)
    if kill is None:
        losses = {event["step"]: event["loss"] for event in evaluated}
        tied = [event["step"] for event in evaluated if event["scores"]["accuracy"] == output["score"]]
        assert len(tied) > 1
        assert output == {
            **{"headline": "accuracy", "step": 2, "num_evaluations": 6, "reason": "loss"},
            **{"score": output["score"], "loss": min(losses[update] for update in tied)},
        }
