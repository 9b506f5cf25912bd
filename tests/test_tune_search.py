"""The search on real Ray: what it leaves, what a thawed winner is worth, and that a disturbed one ends like another."""

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
from rtrain.verification.faults import workers_left
from tests.reports import Page
from tests.test_runs_notice import within
from tests.tiny import make_encoder
from tests.trained import settings
from tune import gate_winner, holdout_scores, search, successive_halving, trainable, trial_pool
from tune.history import read_journal
from tune.objective import Aim
from tune.report import table, verdict
from tune.successive_halving import Ladder

pytestmark = pytest.mark.ray

SEARCH = {
    "train.epochs": 3,
    "tune.trials": 6,
    "tune.space": {"optim.lr": {"low": 1e-3, "high": 1e-2, "log": True}, "train.aggregation_frequency": [1, 2, 3]},
    "tune.points": [{"optim.lr": 1e-6}],
    "tune.first_rung": 0.2,
}
LOST = 4
"""The trial whose folder is in use: it fails, and the search goes on."""


def searched(folder: Path) -> Config:
    return with_overrides(settings(folder), SEARCH)


def in_use(root: Path) -> Path:
    root = root / f"trial-{LOST:03d}"
    root.mkdir(parents=True)
    (root / "thesis.txt").touch()
    return root


@pytest.fixture(scope="module")
def found(ray_session: Path) -> search.Found:
    """A search that nothing disturbs. A user's file is in the way of one of its trials."""
    root = ray_session / "search" / "search"
    chosen = searched(ray_session / "search")

    def block(event: dict[str, Any]) -> None:
        if event["kind"] == "search" and (event["what"], event.get("trial")) == ("asked", 0):
            in_use(root)

    ended = search.run(chosen, root, on_event=block)
    within(lambda: workers_left() == [], 120)
    return ended


def told(found: search.Found) -> list[dict[str, Any]]:
    """The journal without what clocks say."""
    log = [one for one in read_journal(found.search.trials) if one["kind"] != "spent"]
    return [{name: value for name, value in one.items() if name not in ("time", "seconds")} for one in log]


def slot_processes() -> list[int]:
    found = []
    for pid in ray_internals.session_processes():
        with contextlib.suppress(psutil.Error):
            if "ImplicitFunc" in " ".join(psutil.Process(pid).cmdline()):
                found.append(pid)
    return found


def weights(run: Run, update: int) -> bytes:
    return (checkpoint_format.path_of(run.checkpoints, update) / "model.safetensors").read_bytes()


def test_every_trial_came_to_the_first_rung_at_equal_rows_and_the_better_half_went_on(found: search.Found) -> None:
    full = max(one.finished.rows for one in found.history.trials if one.finished)
    ladder, sound = Ladder.of(0.2, full), [one for one in found.history.own if one.sound]
    assert [one.number for one in found.history.own if not one.sound] == [LOST]
    assert len(sound) == 5
    for one in sound:
        recipe = config.load(str(found.search.trial(one.number).config)).recipe
        for reached in one.reached:
            assert 0 <= reached.rows - ladder.rungs[reached.rung] < recipe.rows_per_update
    survivors = successive_halving.survivors(sound, 0, Aim())
    assert [one.number for one in sound if len(one.reached) > 1] == [one.number for one in survivors]
    assert found.history.trials[1].settings == {"optim.lr": 1e-6}
    assert found.history.trials[1] not in survivors


def test_the_end_has_trial_0_and_its_winner_is_not_behind_it(found: search.Found) -> None:
    ended = {one.number: one.finished for one in found.history.own if one.finished}
    assert 0 in ended
    assert len(ended) == 3
    verdict = found.history.verdict  # by the means over the seeds that each was trained with
    assert verdict["kind"] == "default" or verdict["other"] >= verdict["first"]
    assert found.search.winner is not None
    assert found.search.winner.folder == found.winner.folder
    assert (found.winner.artifact / "artifact.json").is_file()
    assert found.winner.report.is_file()


def test_a_trial_is_gated_beside_trial_0_on_the_rows_that_were_held_back(found: search.Found) -> None:
    chosen, said = config.load(str(found.search.config)), list[dict[str, Any]]()
    assert gate_winner.run(found.search, 0, chosen, said.append) is None  # beside itself
    other = next(one for one in found.history.own if one.finished and one.number)
    run, base = found.search.trial(other.number), found.search.trial(0)
    document = gate_winner.run(found.search, other.number, chosen, said.append)
    kept = artifact.read(run.artifact).gate
    assert document is not None
    assert kept == document
    assert found.best.number == 0 or found.gate is not None
    assert base.store is not None
    held = holdout_scores.held(Store(base.store), chosen.deploy.tune.held_back)
    assert (document["rows"], document["source"]) == (len(held), "held-back valid rows")
    assert document["headline"]["rows"] == len(held)
    assert document["against"]["version"] == artifact.read(base.artifact).version
    [plain] = [one for one in document["rivals"] if one["name"] == baselines.TFIDF]
    assert plain["score"] is not None, plain  # the rows that trial 0 was trained on are known
    assert document["latency"] == []  # the two differ in their weights alone
    said.clear()
    again = gate_winner.run(found.search, other.number, chosen, said.append)
    assert (again, said) == (document, [])  # what is known is not measured again


def test_frozen_trials_have_a_checkpoint_of_their_rung_and_no_artefact(found: search.Found) -> None:
    frozen = [one for one in found.history.own if one.status == "frozen"]
    assert frozen
    for one in frozen:
        run = found.search.trial(one.number)
        assert max(checkpoint_format.updates(run.checkpoints)) == one.reached[-1].update
        assert not run.finished


def test_best_yaml_is_what_the_winner_was_trained_by(found: search.Found) -> None:
    best, made = (config.load(str(path)).recipe for path in (found.search.best, found.winner.config))
    assert best.identity() == made.identity()
    assert best.identity() != config.load(str(found.search.config)).recipe.identity() or found.best.number == 0


@pytest.mark.slow
def test_best_yaml_trains_the_winner_again_and_it_is_the_same_to_the_last_bit(
    found: search.Found, ray_session: Path
) -> None:
    """The winner was frozen at rungs and thawed in processes that other trials used; this run never paused."""
    straight = Run(ray_session / "search" / "straight")
    summary = controller.fit(prepare.prepare(config.load(str(found.search.best)), straight.folder))
    last = summary["updates"]
    assert len([event for event in found.winner.events("started")]) > 1
    assert weights(found.winner, last) == weights(straight, last)
    model = "model.safetensors"
    assert (found.winner.artifact / model).read_bytes() == (straight.artifact / model).read_bytes()
    assert summary["order_digest"] == (found.winner.last("trained") or {})["order_digest"]


def test_what_a_search_leaves(found: search.Found) -> None:
    page = Page(found.search.search_page.read_text())
    assert verdict.of(found.search)[1:] in page.text
    assert (found.search.folder / "optuna.journal").is_file()
    headline = trainable.headline_of(config.load(str(found.search.config)))
    text = table.text(found.history, headline, config.load(str(found.search.config)).deploy.tune)
    assert f"trial {LOST}" in text
    assert found.history.trials[LOST].error


def test_a_search_that_has_ended_is_left_as_it_is(found: search.Found) -> None:
    logs = [found.search.trials, *(found.search.trial(one.number).log for one in found.history.trials)]
    before = [path.read_bytes() for path in logs if path.is_file()]
    again = search.run(config.load("intent"), found.search.folder, "resume")
    assert again.history == found.history
    assert [path.read_bytes() for path in logs if path.is_file()] == before


@pytest.mark.slow
def test_a_search_that_loses_its_folder_and_then_a_slot_ends_like_one_that_was_not_disturbed(
    found: search.Found, ray_session: Path
) -> None:
    """Interrupted in the second rung, its folder lost but for the copy; then the process of its slot is killed in the
    middle of an order."""
    root = ray_session / "search" / "disturbed"
    mounted = (ray_session / "search" / "mounted").as_uri()
    chosen = with_overrides(searched(ray_session / "search"), {"cluster.storage": mounted})
    seen: list[str] = []

    def interrupt(event: dict[str, Any]) -> None:
        if event["kind"] != "search":
            return
        seen.append(event["what"])
        if (event["what"], event.get("trial")) == ("asked", 0):
            in_use(root)
        if seen.count("reached") == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search.run(chosen, root, on_event=interrupt)
    assert read_journal(root / "trials.jsonl")[-1]["kind"] == "spent"
    within(lambda: slot_processes() == [])
    shutil.rmtree(root)
    killed: list[int] = []

    def kill(event: dict[str, Any]) -> None:
        if event["kind"] == "progress" and not killed:
            killed.extend(slot_processes())
            os.kill(killed[0], signal.SIGKILL)

    ended = search.run(chosen, root, "resume", on_event=kill)
    assert killed
    assert [event["rung"] for event in ended.search.events("lost")] != []

    def named(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{name: str(value).replace(str(root), str(found.search)) for name, value in one.items()} for one in log]

    assert named(told(ended)) == named(told(found))
    for one in found.history.own:
        both = [run.events("rung") for run in (found.search.trial(one.number), ended.search.trial(one.number))]
        updates = [[event["update"] for event in log] for log in both]
        assert sorted(set(updates[1])) == updates[0]
        assert len(updates[1]) <= len(updates[0]) + 1  # of the order that was lost with its slot


def test_no_process_group_or_cpu_is_left(found: search.Found) -> None:
    import ray
    import ray.util

    within(lambda: workers_left() == [], 120)
    assert {group["state"] for group in ray.util.placement_group_table().values()} <= {"REMOVED"}
    within(lambda: ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"])


def test_more_trials_at_once_than_fit_are_refused_with_the_nearest_number_that_does(ray_session: Path) -> None:
    """The session has four logical CPUs: two workers and the data tasks of one trial."""
    many = with_overrides(searched(ray_session / "many"), {"tune.concurrent": 3})
    with pytest.raises(ConfigError) as refused:
        trial_pool.number(many, "cpu")
    assert [(one.field, one.code) for one in refused.value.problems] == [("tune.concurrent", "too_large")]
    assert trial_pool.number(searched(ray_session / "many"), "cpu") == 1
    before = sorted((ray_session / "many").iterdir())
    with pytest.raises(ConfigError):
        search.run(many, ray_session / "many" / "search")
    assert sorted((ray_session / "many").iterdir()) == before  # no folder was made, and no row was read


@pytest.mark.parametrize(
    ("rows", "refused"), [({}, True), ({"data.valid": "v.csv"}, False), ({"data.split": "s"}, False)]
)
def test_a_search_without_validation_rows_is_refused(rows: dict[str, str], refused: bool) -> None:
    chosen = config.load("intent", {"data.path": "rows.csv", "data.valid_share": 0, **rows})
    if not refused:
        search.check(chosen)
        return
    with pytest.raises(ConfigError) as caught:
        search.check(chosen)
    assert [(one.field, one.code) for one in caught.value.problems] == [("data.valid_share", "no_rows")]


def test_what_the_end_could_not_judge_by_is_refused() -> None:
    rows = {"data.path": "rows.csv"}
    with pytest.raises(ConfigError) as caught:
        search.check(config.load("intent", {**rows, "data.valid_part": 1}))
    assert [(one.field, one.code) for one in caught.value.problems] == [("data.valid_part", "unsupported")]
    timed = {**rows, "tune.objective": "time", "tune.target": 0.15}
    with pytest.raises(ConfigError) as caught:
        search.check(config.load("essay", timed))
    assert [(one.field, one.code) for one in caught.value.problems] == [("tune.target", "out_of_range")]
    search.check(config.load("essay", {**timed, "tune.target": -0.15}))
    search.check(config.load("intent", {**timed, "tune.target": 0.9}))


def test_a_search_in_a_used_folder_and_another_search_in_an_old_one_are_refused(
    found: search.Found, ray_session: Path
) -> None:
    with pytest.raises(UserError):
        search.run(searched(ray_session / "search"), found.search.folder)
    other = with_overrides(config.load("intent"), {"tune.first_rung": 0.3})
    with pytest.raises(ConfigError) as caught:
        search.run(other, found.search.folder, "resume")
    assert [(one.field, one.code) for one in caught.value.problems] == [("tune.first_rung", "changed_setting")]


def test_values_that_the_model_cannot_read_are_refused_before_any_trial(tmp_path: Path) -> None:
    """Each trial with one would fail, and count."""
    encoder = make_encoder(tmp_path / "encoder")
    base = {"data.path": "rows.csv", "model.name": str(encoder)}
    for searched in ([16, 100_000], {"low": 16, "high": 100_000}):
        chosen = config.load("intent", {**base, "tune.space": {"data.max_tokens": searched}})
        with pytest.raises(ConfigError) as caught:
            search.check_model(chosen, encoder)
        assert {one.field for one in caught.value.problems} == {"tune.space.data.max_tokens"}
    points = config.load("intent", {**base, "tune.points": [{"data.max_tokens": 100_000}]})
    with pytest.raises(ConfigError) as caught:
        search.check_model(points, encoder)
    assert {one.field for one in caught.value.problems} == {"tune.points.0"}
    search.check_model(config.load("intent", {**base, "tune.space": {"data.max_tokens": [16, 32]}}), encoder)
