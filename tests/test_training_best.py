"""Which evaluation has the best weights: by score, of equals by loss, and the same after a resume."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rtrain.core.ragged import Ragged
from rtrain.data.store.store import Store
from rtrain.tasks import base
from rtrain.trainer import best_checkpoint
from rtrain.trainer.best_checkpoint import Evaluated
from tests import test_training_loop
from tests.test_training_loop import UPDATES, start, weights_digest
from tests.test_training_loop_resume import weights_of

ground = test_training_loop.ground  # a fixture


@pytest.mark.parametrize(
    ("new", "old", "wins"),
    [
        (Evaluated(4, 0.5, 9.0), None, True),
        (Evaluated(4, 0.5, 9.0), Evaluated(2, 0.4, 0.1), True),  # the score comes first
        (Evaluated(4, 0.4, 0.1), Evaluated(2, 0.5, 9.0), False),
        (Evaluated(4, 0.5, 0.1), Evaluated(2, 0.5, 0.2), True),
        (Evaluated(4, 0.5, 0.2), Evaluated(2, 0.5, 0.2), False),  # the earlier of what is equal
        (Evaluated(4, 0.5, 0.1), Evaluated(2, 0.5, None), False),  # chosen by a version that knew no loss
        (Evaluated(4, 0.5, None), Evaluated(2, 0.5, 0.1), False),
        (Evaluated(4, math.nan, 0.1), Evaluated(2, 0.5, 0.1), False),
    ],
)
def test_which_of_two_is_better(new: Evaluated, old: Evaluated | None, wins: bool) -> None:
    assert best_checkpoint.better(new, old) is wins


SCORES = st.sampled_from([0.25, 0.5, 0.75])
LOSSES = st.sampled_from([0.1, 0.2, 0.3])


@given(st.lists(st.tuples(SCORES, LOSSES), min_size=1, max_size=8))
def test_taken_one_after_another_the_best_is_the_best_of_all(pairs: list[tuple[float, float]]) -> None:
    every = [Evaluated(update, *pair) for update, pair in enumerate(pairs)]
    chosen: Evaluated | None = None
    for one in every:
        chosen = one if best_checkpoint.better(one, chosen) else chosen
    assert chosen == min(every, key=lambda one: (-one.score, one.loss, one.update))
    told = best_checkpoint.said(chosen, {one.update: one for one in every})
    tied = [one for one in every if one.score == chosen.score]
    lowest = [one for one in tied if one.loss == chosen.loss]
    assert told["of"] == len(every)
    assert told["why"] == ("score" if len(tied) == 1 else "loss" if len(lowest) == 1 else "first")


def test_a_better_one_whose_checkpoint_was_lost_is_not_counted() -> None:
    every = {2: Evaluated(2, 0.9, 0.1), 4: Evaluated(4, 0.1, 0.2), 6: Evaluated(6, 0.3, 0.2)}
    assert best_checkpoint.said(every[6], every) == {"update": 6, "score": 0.3, "loss": 0.2, "of": 2, "why": "score"}


def test_the_loss_is_the_mean_log_loss_of_the_rows_and_an_endless_one_is_bounded(ground: Path) -> None:
    store, task = Store(next((ground / ".tokens").iterdir())), base.get("classification")
    size, true = len(store.manifest.labels), store.targets("valid").values.astype(np.int64)
    logits = np.random.default_rng(0).normal(size=(len(true), size))
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    wanted = -np.log(shares[np.arange(len(true)), true])
    assert best_checkpoint.mean_loss(task, Ragged.even(logits), store) == pytest.approx(wanted.mean())
    logits[0] = -1e6
    logits[0, (true[0] + 1) % size] = 1e6
    found = best_checkpoint.mean_loss(task, Ragged.even(logits), store)
    assert found == pytest.approx((wanted[1:].sum() + best_checkpoint.ENDLESS) / len(true))
    assert 700 < best_checkpoint.ENDLESS < 710


@pytest.mark.parametrize("kill", [None, 1, 3, 5])
def test_of_equal_scores_the_lower_loss_is_chosen_also_after_a_resume(
    kill: int | None, ground: Path, tmp_path: Path
) -> None:
    """At this rate updates 2 to 6 have one accuracy, and the third the lowest loss."""
    rates = {"evaluate_every": 1, "save_every": 1, "rules": {"lr": 0.02}}
    if kill is not None:
        start(ground, tmp_path, kill=kill, **rates)  # type: ignore[arg-type]
    ran = start(ground, tmp_path, **rates)  # type: ignore[arg-type]
    assert ran.outcome is not None
    evaluated = [event for event in ran.recorder.of("evaluated") if event["split"] == "valid"]
    assert len(evaluated) == UPDATES - (kill or 0)
    [told] = ran.recorder.of("best")
    assert (told["update"], ran.outcome.best_update) == (3, 3)
    assert weights_digest(ran.network) == weights_of(ground, tmp_path, 3)
    if kill is None:
        losses = {event["update"]: event["loss"] for event in evaluated}
        tied = [event["update"] for event in evaluated if event["scores"]["accuracy"] == told["score"]]
        assert tied == [2, 3, 4, 5, 6]
        assert told == {
            **{"headline": "accuracy", "update": 3, "of": 6, "why": "loss"},
            **{"score": told["score"], "loss": min(losses[update] for update in tied)},
        }
