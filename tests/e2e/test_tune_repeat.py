"""On real Ray: a trial that is repeated with another seed while trials are asked for, and taken up by the end."""

from pathlib import Path

import pytest

from rtrain.config import with_overrides
from rtrain.core.run_folder import Run
from rtrain.trainer import evaluate
from tests.ray.test_search import SEARCH
from tests.support.trained import settings
from tune import search
from tune.history import find_trial
from tune.successive_halving import first_rung_seed_std

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_the_best_trial_is_repeated_to_its_rung_and_the_end_goes_on_from_there(ray_session: Path) -> None:
    """Nine trials, so that it is asked after eight whether a ninth is worth its cost."""
    folder = ray_session / "repeat"
    overrides = {**SEARCH, "tune.trials": 9, "tune.points_to_evaluate": [], "tune.holdout_fraction": 0.0}
    result = search.run_search(with_overrides(settings(folder), overrides), folder / "search")
    history = result.history
    second = next(trial for trial in history.trials if trial.repeat_of is not None)
    assert (second.number, second.seed) == (8, 1)
    [target_] = second.rung_results
    base = find_trial(history.trials, second.repeat_of or 0)
    assert target_.rows == base.rung_results[0].rows
    assert base.rung_results[0].score == max(
        trial.rung_results[0].score for trial in history.original_trials[:8] if trial.is_valid
    )
    assert target_.row_std is not None
    assert (first_rung_seed_std(history) or 0.0) >= target_.row_std > 0
    run = Run(result.search.folder).trial(second.number)
    assert evaluate.read_rung(run, target_.step) is not None
    same = [trial for trial in history.trials if (trial.repeat_of, trial.seed) == (second.repeat_of, second.seed)]
    assert len(same) == 1  # the end asks for no other
    assert base.final_result is not None  # the best of eight is among the two that are left, or trial 0
    assert second.final_result is not None
    assert [event["step"] for event in run.events("started")] == [0, target_.step]
