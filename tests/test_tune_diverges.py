"""On real Ray: a trial with a hopeless learning rate is frozen before its rung, and the search goes on without it."""

from pathlib import Path

import pytest

from rtrain.config import with_overrides
from tests.test_tune_search import SEARCH
from tests.trained import settings
from tune import search
from tune.trainable import FIRST, LAST

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_trial_that_diverges_is_frozen_at_once(ray_session: Path) -> None:
    """Its first rung is at half of a run, some 25 updates of 51. Ten lie between two lines of a run's log by default:
    a trial's has one for each."""
    folder, lr = ray_session / "diverges", 0.9
    asked = {**SEARCH, "tune.trials": 3, "tune.points": [{"optim.lr": lr}], "tune.first_rung": 0.5}
    chosen = with_overrides(settings(folder), {**asked, "tune.final_rows": 0, "train.log_every": 10})
    found = search.run(chosen, folder / "search")
    lost, others = found.history.trials[1], [one for one in found.history.own if one.number != 1]
    assert (lost.settings["optim.lr"], lost.status, lost.reached) == (lr, "diverged", ())
    assert lost.diverged is not None
    trained = found.search.trial(1).events("progress")[-1]["update"]
    rung = others[0].reached[0].update
    assert FIRST + LAST <= trained < rung
    assert all(one.sound for one in others)
    assert found.history.chosen != 1
