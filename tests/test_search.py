"""The search on real Ray, with four logical CPUs: a stopped trial must give its workers' CPUs back to the next."""

import json
from pathlib import Path

import pytest

from rtrain import config
from rtrain.config import with_overrides
from rtrain.errors import ConfigError, UserError
from rtrain.report import events
from rtrain.report.progress import search_text
from tests.test_driver import settings
from tune import search

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def found(ray_session: Path) -> search.Found:
    chosen = with_overrides(
        settings(ray_session / "search"),
        {
            "train.evaluate_every": 5,  # each report waits for the last to be read: no trial outruns the scheduler
            "tune.trials": 3,
            "tune.points": [{"optim.lr": 1e-6}],
            "tune.lr": [5e-3],
            "tune.aggregation_frequency": [2],
            "tune.budget": 0.5,
            "tune.first_rung": 0.25,
        },
    )
    return search.run(chosen, ray_session / "search" / "search")


def folder(found: search.Found, number: int) -> Path:
    return Path(found.trials[number].run)


def test_default_recipe_is_trained_to_the_end(found: search.Found) -> None:
    assert (found.trials[0].number, found.trials[0].status) == (0, "finished")
    assert found.trials[0].lr == 3e-3
    assert (folder(found, 0) / "artifact" / "artifact.json").is_file()


def test_hopeless_trial_is_stopped_at_the_first_rung(found: search.Found) -> None:
    assert (found.trials[1].lr, found.trials[1].status) == (1e-6, "stopped")
    rung, budget = -(-found.trials[0].updates // 4), -(-found.trials[0].updates // 2)
    assert rung <= found.trials[1].updates < budget
    assert json.loads((folder(found, 1) / "summary.json").read_text())["status"] == "stopped"


def test_trial_after_the_stopped_one_gets_its_workers(found: search.Found) -> None:
    """It would wait for ever for the CPUs that the stopped trial's placement group holds."""
    assert (found.trials[2].lr, found.trials[2].aggregation_frequency) == (5e-3, 2)
    assert found.trials[2].status in ("paused", "stopped")
    assert found.trials[2].updates > 0


def test_trials_are_written_down(found: search.Found) -> None:
    lines = (folder(found, 0).parent / "trials.jsonl").read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines] == [0, 1, 2]
    assert [json.loads(line)["score"] for line in lines] == [trial.score for trial in found.trials]


def test_best_trial_is_not_the_stopped_one(found: search.Found) -> None:
    assert found.best.status != "stopped"
    assert found.best.score == max(trial.score for trial in found.trials if trial.status != "stopped")


def test_winner_is_continued_to_its_full_budget(found: search.Found) -> None:
    challenger = found.trials[2] if found.trials[2].status == "paused" else found.trials[0]
    chosen = search.Found(found.trials, challenger)
    before = len(events.read(Path(challenger.run)))
    ended = search.continue_best(chosen, tokens_root=Path(challenger.run).parents[1])
    recipe = config.load(str(Path(challenger.run) / "config.yaml")).recipe
    rows = next(event["rows"]["train"] for event in events.read(Path(challenger.run)) if "rows" in event)
    assert ended["status"] == "finished"
    assert ended["updates"] == recipe.train.epochs * -(-rows // recipe.rows_per_update)
    assert (Path(challenger.run) / "artifact" / "artifact.json").is_file()
    started = [event for event in events.read(Path(challenger.run))[before:] if event["kind"] == "started"]
    assert [event["update"] for event in started] == ([challenger.updates] if challenger.status == "paused" else [])
    assert "<- best" in search_text(chosen, ended)


@pytest.mark.parametrize(
    ("rows", "refused"), [({}, True), ({"data.valid": "v.csv"}, False), ({"data.split": "s"}, False)]
)
def test_a_search_without_validation_rows_is_refused(rows: dict[str, str], refused: bool, tmp_path: Path) -> None:
    chosen = config.load("intent", {"data.path": "rows.csv", "data.valid_share": 0, **rows})
    if not refused:
        search.check(chosen)
        return
    with pytest.raises(ConfigError, match="trials are compared on validation rows, and there are none"):
        search.check(chosen)


def test_search_folder_in_use_is_refused(found: search.Found, ray_session: Path) -> None:
    with pytest.raises(UserError, match="holds a run already"):
        search.run(settings(ray_session / "search"), ray_session / "search" / "search")


def test_all_cpus_are_free_again(found: search.Found) -> None:
    import ray
    import ray.util

    states = {group["state"] for group in ray.util.placement_group_table().values()}
    assert states <= {"REMOVED"}
    assert ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"]
