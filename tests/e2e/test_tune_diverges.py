"""On real Ray: a trial with a hopeless learning rate is frozen before its rung, and the search continues without it."""

from pathlib import Path

import pytest

from rtrain.config import with_overrides
from tests.ray.test_search import SEARCH
from tests.support.trained import settings
from tune import search
from tune.trainable import FIRST_LOSSES, NEWEST_LOSSES

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_trial_that_diverges_is_frozen_at_once(ray_session: Path) -> None:
    """Its first rung is at half of a run, some 25 updates of 51. Ten lie between two lines of a run's log by default:
    a trial's has one for each."""
    folder, lr = ray_session / "diverges", 0.9
    overrides = {
        **SEARCH,
        "tune.trials": 3,
        "tune.points_to_evaluate": [{"optim.lr": lr}],
        "tune.min_resource_fraction": 0.5,
    }
    config = with_overrides(settings(folder), {**overrides, "tune.final_budget_rows": 0, "train.log_every": 10})
    result = search.run_search(config, folder / "search")
    lost, rest = result.history.trials[1], [trial for trial in result.history.original_trials if trial.number != 1]
    assert (lost.settings["optim.lr"], lost.status, lost.rung_results) == (lr, "diverged", ())
    assert lost.divergence is not None
    trained = result.search.trial(1).events("progress")[-1]["step"]
    rung = rest[0].rung_results[0].step
    assert FIRST_LOSSES + NEWEST_LOSSES <= trained < rung
    assert all(other.is_valid for other in rest)
    assert result.history.winner != 1
