"""On real Ray: a trial that is repeated with another seed while trials are asked for, and taken up by the end."""

from pathlib import Path

import pytest

from rtrain.config import with_overrides
from rtrain.core.run_folder import Run
from rtrain.trainer import rung_predictions
from tests.test_tune_search import SEARCH
from tests.trained import settings
from tune import search
from tune.history import numbered
from tune.objective import spread_at_first_rung

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_the_best_trial_is_repeated_to_its_rung_and_the_end_goes_on_from_there(ray_session: Path) -> None:
    """Nine trials, so that it is asked after eight whether a ninth is worth its cost."""
    folder = ray_session / "repeat"
    asked = {**SEARCH, "tune.trials": 9, "tune.points": [], "tune.held_back": 0.0}
    found = search.run(with_overrides(settings(folder), asked), folder / "search")
    history = found.history
    again = next(trial for trial in history.trials if trial.of is not None)
    assert (again.number, again.seed) == (8, 1)
    [there] = again.reached
    base = numbered(history.trials, again.of or 0)
    assert there.rows == base.reached[0].rows
    assert base.reached[0].score == max(trial.reached[0].score for trial in history.own[:8] if trial.sound)
    assert there.luck is not None
    assert (spread_at_first_rung(history) or 0.0) >= there.luck > 0
    run = Run(found.search.folder).trial(again.number)
    assert rung_predictions.read(run, there.update) is not None
    same = [trial for trial in history.trials if (trial.of, trial.seed) == (again.of, again.seed)]
    assert len(same) == 1  # the end asks for no other
    assert base.finished is not None  # the best of eight is among the two that are left, or trial 0
    assert again.finished is not None
    assert [event["update"] for event in run.events("started")] == [0, there.update]
