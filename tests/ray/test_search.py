"""A search on real Ray: its files, its resumed winner, and equal results after a disturbance."""

import contextlib
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from rtrain import config, ray_internals
from rtrain.checkpoint import format as checkpoint_format
from rtrain.config import Config, with_overrides
from rtrain.core.errors import ConfigError, UserError
from rtrain.core.run_folder import Run
from rtrain.data.store.store import Store
from rtrain.inference import artifact
from rtrain.report import baselines
from rtrain.runs import controller, prepare
from rtrain.verification.drill import find_leftover_workers
from tests.support.reports import Page
from tests.support.tiny import make_encoder
from tests.support.trained import settings
from tests.unit.runs.test_stop_request import within
from tune import holdout_scores, search, successive_halving, trainable, trial_pool
from tune.history import read_journal
from tune.report import table
from tune.successive_halving import Objective, RungSchedule

pytestmark = pytest.mark.ray

SEARCH = {
    "train.epochs": 3,
    "tune.trials": 6,
    "tune.space": {"optim.lr": {"low": 1e-3, "high": 1e-2, "log": True}, "train.aggregation_frequency": [1, 2, 3]},
    "tune.points_to_evaluate": [{"optim.lr": 1e-6}],
    "tune.min_resource_fraction": 0.2,
}
LOST = 4
"""The trial whose folder is in use: it fails, and the search continues."""


def searched(folder: Path) -> Config:
    return with_overrides(settings(folder), SEARCH)


def in_use(root: Path) -> Path:
    root = root / f"trial-{LOST:03d}"
    root.mkdir(parents=True)
    (root / "thesis.txt").touch()
    return root


@pytest.fixture(scope="module")
def result(ray_session: Path) -> search.SearchResult:
    """A search that nothing disturbs. A user's file is in the way of one of its trials."""
    root = ray_session / "search" / "search"
    selection = searched(ray_session / "search")

    def block(event: dict[str, Any]) -> None:
        if event["kind"] == "search" and (event["what"], event.get("trial")) == ("created", 0):
            in_use(root)

    ended = search.run_search(selection, root, on_event=block)
    within(lambda: find_leftover_workers() == [], 120)
    return ended


def messages(result: search.SearchResult) -> list[dict[str, Any]]:
    """The journal without times."""
    log = [event for event in read_journal(result.search.trials) if event["kind"] != "usage"]
    return [{name: value for name, value in event.items() if name not in ("time", "seconds")} for event in log]


def slot_processes() -> list[int]:
    result = []
    for pid in ray_internals.list_session_pids():
        with contextlib.suppress(psutil.Error):
            if "ImplicitFunc" in " ".join(psutil.Process(pid).cmdline()):
                result.append(pid)
    return result


def weights(run: Run, update: int) -> bytes:
    return (checkpoint_format.checkpoint_path(run.checkpoints, update) / "model.safetensors").read_bytes()


def test_every_trial_came_to_the_first_rung_at_equal_rows_and_the_better_half_went_on(
    result: search.SearchResult,
) -> None:
    trials = result.history.original_trials
    full = max(trial.final_result.rows for trial in trials if trial.final_result)
    ladder, sound = RungSchedule.from_first_rung(0.2, full), [trial for trial in trials if trial.is_valid]
    assert [trial.number for trial in trials if not trial.is_valid] == [LOST]
    assert len(sound) == 5
    for element in sound:
        recipe = config.load_config(str(result.search.trial(element.number).config)).recipe
        for rung_result in element.rung_results:
            assert 0 <= rung_result.rows - ladder.rungs[rung_result.rung] < recipe.global_batch_size
    survivors = successive_halving.select_survivors(sound, 0, Objective())
    assert [item.number for item in sound if len(item.rung_results) > 1] == [survivor.number for survivor in survivors]
    assert trials[1].settings == {"optim.lr": 1e-6}
    assert trials[1] not in survivors


def test_the_end_has_trial_0_and_its_winner_is_not_behind_it(result: search.SearchResult) -> None:
    ended = {trial.number: trial.final_result for trial in result.history.original_trials if trial.final_result}
    assert 0 in ended
    assert len(ended) == 3
    verdict = result.history.verdict  # by the means over the seeds that each was trained with
    assert verdict["kind"] == "default" or verdict["candidate_score"] >= verdict["baseline_score"]
    assert result.search.winner is not None
    assert result.search.winner.folder == result.winner.folder
    assert (result.winner.artifact / "artifact.json").is_file()
    assert result.winner.report.is_file()


def test_a_trial_is_gated_beside_trial_0_on_the_rows_that_were_held_back(result: search.SearchResult) -> None:
    selection, message = config.load_config(str(result.search.config)), list[dict[str, Any]]()
    assert holdout_scores.gate_winner(result.search, 0, selection, message.append) is None  # beside itself
    other = next(trial for trial in result.history.original_trials if trial.final_result and trial.number)
    run, base = result.search.trial(other.number), result.search.trial(0)
    document = holdout_scores.gate_winner(result.search, other.number, selection, message.append)
    remaining = artifact.read_artifact(run.artifact).gate
    assert document is not None
    assert remaining == document
    assert result.best_trial.number == 0 or result.gate_verdict is not None
    assert base.token_store is not None
    holdout = holdout_scores.holdout_rows(Store(base.token_store), selection.deploy.tune.holdout_fraction)
    assert (document["rows"], document["source"]) == (len(holdout), "holdout valid rows")
    assert document["headline"]["rows"] == len(holdout)
    assert document["baseline"]["version"] == artifact.read_artifact(base.artifact).version
    [plain] = [item for item in document["rivals"] if item["name"] == baselines.TFIDF]
    assert plain["score"] is not None, plain  # the rows that trial 0 was trained on are known
    assert document["latency"] == []  # the two differ in their weights alone
    message.clear()
    second = holdout_scores.gate_winner(result.search, other.number, selection, message.append)
    assert (second, message) == (document, [])  # stored costs are not measured again


def test_frozen_trials_have_a_checkpoint_of_their_rung_and_no_artefact(result: search.SearchResult) -> None:
    frozen = [trial for trial in result.history.original_trials if trial.status == "frozen"]
    assert frozen
    for element in frozen:
        run = result.search.trial(element.number)
        assert max(checkpoint_format.list_steps(run.checkpoints)) == element.rung_results[-1].step
        assert not run.is_finished


def test_best_yaml_is_what_the_winner_was_trained_by(result: search.SearchResult) -> None:
    best, winner, own = (
        config.load_config(str(path)).recipe.recipe_digest()
        for path in (result.search.best_config, result.winner.config, result.search.config)
    )
    assert best == winner
    assert (best == own) == (result.best_trial.number == 0)


@pytest.mark.slow
def test_best_yaml_trains_the_winner_again_and_it_is_the_same_to_the_last_bit(
    result: search.SearchResult, ray_session: Path
) -> None:
    """The winner was frozen at rungs and thawed in processes that other trials used; this run never paused."""
    straight = Run(ray_session / "search" / "straight")
    summary = controller.fit(prepare.prepare_run(config.load_config(str(result.search.best_config)), straight.folder))
    last = summary["steps"]
    assert len([event for event in result.winner.events("started")]) > 1
    assert weights(result.winner, last) == weights(straight, last)
    model = "model.safetensors"
    assert (result.winner.artifact / model).read_bytes() == (straight.artifact / model).read_bytes()
    assert summary["order_digest"] == (result.winner.last_event("trained") or {})["order_digest"]


def test_what_a_search_leaves(result: search.SearchResult) -> None:
    page = Page(result.search.search_page.read_text())
    assert table.describe_search(result.search)[1:] in page.text
    assert (result.search.folder / "optuna.journal").is_file()
    headline = trainable.headline_metric(config.load_config(str(result.search.config)))
    text = table.format_table(result.history, headline, config.load_config(str(result.search.config)).deploy.tune)
    assert f"trial {LOST}" in text
    assert result.history.trials[LOST].error


def test_a_search_that_has_ended_is_left_as_it_is(result: search.SearchResult) -> None:
    logs = [result.search.trials, *(result.search.trial(trial.number).log for trial in result.history.trials)]
    before = [path.read_bytes() for path in logs if path.is_file()]
    second = search.run_search(config.load_config("intent"), result.search.folder, "resume")
    assert second.history == result.history
    assert [path.read_bytes() for path in logs if path.is_file()] == before


@pytest.mark.slow
def test_a_search_that_loses_its_folder_and_then_a_slot_ends_like_one_that_was_not_disturbed(
    result: search.SearchResult, ray_session: Path
) -> None:
    """Interrupted in the second rung, its folder lost but for the copy; then the process of its slot is killed in the
    middle of an order."""
    root = ray_session / "search" / "disturbed"
    mounted = (ray_session / "search" / "mounted").as_uri()
    selection = with_overrides(searched(ray_session / "search"), {"cluster.storage": mounted})
    seen: list[str] = []

    def interrupt(event: dict[str, Any]) -> None:
        if event["kind"] != "search":
            return
        seen.append(event["what"])
        if (event["what"], event.get("trial")) == ("created", 0):
            in_use(root)
        if seen.count("rung_result") == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search.run_search(selection, root, on_event=interrupt)
    assert read_journal(root / "trials.jsonl")[-1]["kind"] == "usage"
    within(lambda: slot_processes() == [])
    shutil.rmtree(root)
    killed: list[int] = []

    def kill(event: dict[str, Any]) -> None:
        if event["kind"] == "progress" and not killed:
            killed.extend(slot_processes())
            os.kill(killed[0], signal.SIGKILL)

    ended = search.run_search(selection, root, "resume", on_event=kill)
    assert killed
    assert [event["rung"] for event in ended.search.events("assignment_lost")] != []

    def without_time(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {name: str(value).replace(str(root), str(result.search)) for name, value in event.items()} for event in log
        ]

    assert without_time(messages(ended)) == without_time(messages(result))
    for element in result.history.original_trials:
        pair = [run.events("rung") for run in (result.search.trial(element.number), ended.search.trial(element.number))]
        updates = [[event["step"] for event in log] for log in pair]
        assert sorted(set(updates[1])) == updates[0]
        assert len(updates[1]) <= len(updates[0]) + 1  # of the order that was lost with its slot


def test_no_process_group_or_cpu_is_left(result: search.SearchResult) -> None:
    import ray
    import ray.util

    within(lambda: find_leftover_workers() == [], 120)
    assert {group["state"] for group in ray.util.placement_group_table().values()} <= {"REMOVED"}
    within(lambda: ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"])


def test_more_trials_at_once_than_fit_are_refused_with_the_nearest_number_that_does(ray_session: Path) -> None:
    """The session has four logical CPUs: two workers and the data tasks of one trial."""
    many = with_overrides(searched(ray_session / "many"), {"tune.max_concurrent_trials": 3})
    with pytest.raises(ConfigError) as refused:
        trial_pool.count_slots(many, "cpu")
    assert [(problem.field, problem.code) for problem in refused.value.problems] == [
        ("tune.max_concurrent_trials", "too_large")
    ]
    assert trial_pool.count_slots(searched(ray_session / "many"), "cpu") == 1
    before = sorted((ray_session / "many").iterdir())
    with pytest.raises(ConfigError):
        search.run_search(many, ray_session / "many" / "search")
    assert sorted((ray_session / "many").iterdir()) == before  # no folder was made, and no row was read


@pytest.mark.parametrize(
    ("recipe", "overrides", "refusal"),
    [
        ("intent", {"data.valid_share": 0}, ("data.valid_share", "no_rows")),
        ("intent", {"data.valid_share": 0, "data.valid": "v.csv"}, None),
        ("intent", {"data.valid_share": 0, "data.split_column": "s"}, None),
        ("intent", {"data.validation_fold": 1}, ("data.validation_fold", "unsupported")),
        ("essay", {"tune.objective": "time_to_target", "tune.target": 0.15}, ("tune.target", "out_of_range")),
        ("essay", {"tune.objective": "time_to_target", "tune.target": -0.15}, None),
        ("intent", {"tune.objective": "time_to_target", "tune.target": 0.9}, None),
    ],
)
def test_what_the_end_could_not_judge_by_is_refused(
    recipe: str, overrides: dict[str, Any], refusal: tuple[str, str] | None
) -> None:
    selection = config.load_config(recipe, {"data.path": "rows.csv", **overrides})
    if refusal is None:
        search.check_search(selection)
        return
    with pytest.raises(ConfigError) as caught:
        search.check_search(selection)
    assert [(problem.field, problem.code) for problem in caught.value.problems] == [refusal]


def test_a_search_in_a_used_folder_and_another_search_in_an_old_one_are_refused(
    result: search.SearchResult, ray_session: Path
) -> None:
    with pytest.raises(UserError):
        search.run_search(searched(ray_session / "search"), result.search.folder)
    other = with_overrides(config.load_config("intent"), {"tune.min_resource_fraction": 0.3})
    with pytest.raises(ConfigError) as caught:
        search.run_search(other, result.search.folder, "resume")
    assert [(problem.field, problem.code) for problem in caught.value.problems] == [
        ("tune.min_resource_fraction", "changed_setting")
    ]


@pytest.mark.parametrize(
    ("tune", "field"),
    [
        ({"tune.space": {"data.max_tokens": [16, 100_000]}}, "tune.space.data.max_tokens"),
        ({"tune.space": {"data.max_tokens": {"low": 16, "high": 100_000}}}, "tune.space.data.max_tokens"),
        ({"tune.points_to_evaluate": [{"data.max_tokens": 100_000}]}, "tune.points_to_evaluate.0"),
        ({"tune.space": {"data.max_tokens": [16, 32]}}, None),
    ],
)
def test_values_that_the_model_cannot_read_are_refused_before_any_trial(
    tune: dict[str, Any], field: str | None, tmp_path: Path
) -> None:
    """Each trial with one would fail, and count."""
    encoder = make_encoder(tmp_path / "encoder")
    selection = config.load_config("intent", {"data.path": "rows.csv", "model.name": str(encoder), **tune})
    if field is None:
        search.check_model(selection, encoder)
        return
    with pytest.raises(ConfigError) as caught:
        search.check_model(selection, encoder)
    assert {problem.field for problem in caught.value.problems} == {field}
