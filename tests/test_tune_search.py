"""The search on real Ray, with four logical CPUs: a stopped trial must give its workers' CPUs back to the next."""

import contextlib
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from rtrain import config, events
from rtrain.checkpoints import checkpoint
from rtrain.config import with_overrides
from rtrain.errors import ConfigError, UserError
from rtrain.proof.faults import workers_left
from rtrain.report import summary
from rtrain.report.live.progress import search_text
from rtrain.run import Run
from tests.test_runs_notice import within
from tests.trained import settings
from tune import search

pytestmark = pytest.mark.ray


SEARCH = {
    "train.evaluate_every": 5,  # each report waits for the last to be read: no trial outruns the scheduler
    "tune.trials": 3,
    "tune.points": [{"optim.lr": 1e-6}],
    "tune.lr": [5e-3],
    "tune.aggregation_frequency": [2, 3],
    "tune.budget": 0.5,
    "tune.first_rung": 0.25,
}


@pytest.fixture(scope="module")
def found(ray_session: Path) -> search.Found:
    chosen = with_overrides(settings(ray_session / "search"), SEARCH)
    ended = search.run(chosen, ray_session / "search" / "search")
    within(lambda: workers_left() == [])  # a stopped trial's workers may log one more update before they are gone
    return ended


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
    assert (found.trials[2].lr, found.trials[2].aggregation_frequency) == (5e-3, 3)
    assert found.trials[2].status in ("paused", "stopped")
    assert found.trials[2].updates > 0


def test_trials_are_written_down(found: search.Found) -> None:
    lines = (folder(found, 0).parent / "trials.jsonl").read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines] == [0, 1, 2]
    assert [json.loads(line)["score"] for line in lines] == [trial.score for trial in found.trials]
    winner = Run(folder(found, 0).parent).winner
    assert winner is not None
    assert winner.folder == Path(found.best.run)


def test_best_trial_is_not_the_stopped_one(found: search.Found) -> None:
    assert found.best.status != "stopped"
    assert found.best.score == max(trial.score or 0.0 for trial in found.trials if trial.status != "stopped")


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


def test_a_search_is_resumed_with_more_trials_and_one_that_cannot_work_ends_alone(
    found: search.Found, ray_session: Path
) -> None:
    base, root = ray_session / "search", folder(found, 0).parent
    (root / "trial-003").mkdir()
    (root / "trial-003" / "thesis.txt").touch()
    logs = [Path(one.run, "events.jsonl") for one in found.trials]
    before = [path.read_bytes() for path in logs]
    more = with_overrides(config.load("intent"), {"tune.trials": 4, "tune.lr": [5e-3]})
    with pytest.raises(ConfigError, match=r"tune\.first_rung=0\.2: the search was started with 0\.25; leave it out"):
        search.run(with_overrides(more, {"tune.first_rung": 0.2}), root, "resume", tokens_root=base)
    resumed = search.run(more, root, "resume", tokens_root=base)
    assert (resumed.trials[:3], resumed.best.number) == (found.trials, found.best.number)
    lost = resumed.trials[3]
    assert (lost.status, lost.score, lost.updates) == ("failed", None, 0)
    assert str(lost.error).endswith("trial-003 is not empty and holds no run; name a new folder")
    lines = (root / "trials.jsonl").read_text().splitlines()
    assert [json.loads(line)["status"] for line in lines] == [one.status for one in resumed.trials]
    text = search_text(resumed, json.loads((Path(resumed.trials[0].run) / "summary.json").read_text()))
    assert f"1 of 4 trials failed: trial 3: {lost.error}" in text
    assert [one["error"] for one in resumed.to_document()["trials"]] == [None, None, None, lost.error]
    assert search.run(config.load("intent"), root, "resume", tokens_root=base) == resumed
    assert [path.read_bytes() for path in logs] == before  # nothing that had come to its end was run again


DRIVER = """
import sys
from pathlib import Path
from rtrain import config
from rtrain.cluster.session import session
from tune import search
chosen, folder = config.load(sys.argv[1]), Path(sys.argv[2])
with session(chosen, folder.parent):
    search.run(chosen, folder)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_search_whose_driver_was_killed_goes_on_and_ends_like_one_that_was_not(
    found: search.Found, ray_session: Path
) -> None:
    """SIGKILL in the middle of the first trial, with a Ray of its own."""
    base, killed = ray_session / "search", ray_session / "search" / "killed"
    chosen = with_overrides(settings(base), SEARCH)
    (base / "search.yaml").write_text(config.to_yaml(chosen))
    cut_short = Run(killed).trial(0).folder
    with (
        (base / "killed.log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(base / "search.yaml"), str(killed)], stdout=log, stderr=log
        ) as driver,
    ):
        give_up = time.monotonic() + 400
        while not checkpoint.updates(cut_short / "checkpoints"):
            assert driver.poll() is None, (base / "killed.log").read_text()
            assert time.monotonic() < give_up, (base / "killed.log").read_text()
            time.sleep(0.02)
        processes = [*psutil.Process(driver.pid).children(recursive=True), psutil.Process(driver.pid)]
        for process in reversed(processes):  # its Ray too, which would train on for a moment
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    psutil.wait_procs(processes, timeout=60)
    assert summary.status(events.read(cut_short)) == "running"
    resumed = search.run(config.load("intent"), killed, "resume", tokens_root=base)

    def row(one: search.Trial) -> search.Trial:
        """How far a stopped trial came before its workers were gone is a matter of timing, in any search."""
        one = replace(one, run="")
        return replace(one, updates=0, score=None) if one.status == "stopped" else one

    assert [row(one) for one in resumed.trials] == [row(one) for one in found.trials]
    assert resumed.best.number == found.best.number
    told = events.read(cut_short)
    first, second = [event["update"] for event in told if event["kind"] == "started"]
    assert first == 0 < second < found.trials[0].updates
    updates = [event["update"] for event in told if event["kind"] == "progress"]
    assert set(updates) == set(range(1, found.trials[0].updates + 1))
    # What came after the newest checkpoint, which is written every 5 updates, was lost with the driver; no more was.
    assert len(updates) - len(set(updates)) < 10
    scored = [event["update"] for event in told if event["kind"] == "evaluated" and event["split"] == "valid"]
    assert len(scored) - len(set(scored)) <= 1


def made(number: int, score: float | None, status: str, error: str | None = None) -> search.Trial:
    return search.Trial(number, 1e-4, 4, 10, score, status, "run", error)


def test_a_failed_trial_never_wins_and_a_search_of_such_alone_is_an_error() -> None:
    failed, stopped = made(0, 0.9, "failed", "CUDA is gone"), made(1, 0.1, "stopped")
    assert search.best([failed, stopped]) is stopped
    assert search.best([failed, stopped, made(2, 0.05, "paused")]).number == 2
    with pytest.raises(UserError, match=r"no trial of the search came to a score; 2 of 2 trials failed: trial 0: CUDA"):
        search.best([failed, made(1, None, "failed", "too")])


def test_all_cpus_are_free_again(found: search.Found) -> None:
    import ray
    import ray.util

    states = {group["state"] for group in ray.util.placement_group_table().values()}
    assert states <= {"REMOVED"}
    assert ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"]
