"""A user's own Tuner over runs of a recipe: its table, its loggers, its run folders, and trials that were paused."""

import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.tune

from rtrain import config as configuration, ray_internals
from rtrain.core import env
from rtrain.core.run_folder import Run
from rtrain.evaluation import compare
from rtrain.inference.predictor import Predictor
from rtrain.verification.drill import find_leftover_workers
from tests.conftest import labelled_rows, write_rows
from tests.support.root import ROOT
from tests.support.tiny import make_encoder
from tests.support.trained import Trained
from tests.unit.runs.test_stop_request import within
from tune import FreezeThaw, OptunaAskSearch, RecipeTrainable

pytestmark = pytest.mark.ray

PAGE = ROOT / "docs" / "search.md"
LR, BATCH_SIZE = "optim.lr", "train.global_batch_size"
POINTS = [{LR: 3e-3, BATCH_SIZE: 24}, {LR: 1e-3, BATCH_SIZE: 48}]
"""The first has the settings of the run that `trained` has trained in one go."""


def make_trainable(trained: Trained, folder: Path, **settings: Any) -> type[RecipeTrainable]:
    """Trials like the run, in a folder beside it, with its rows."""
    settings = {"tune.max_concurrent_trials": 1, **settings}
    return RecipeTrainable.for_recipe(str(trained.run / "config.yaml"), folder, settings)


@pytest.fixture(scope="module")
def grid(trained: Trained) -> Any:
    space = {LR: ray.tune.loguniform(1e-4, 1e-2), BATCH_SIZE: ray.tune.choice([24, 48])}
    search = OptunaAskSearch(points_to_evaluate=POINTS)
    tuner = ray.tune.Tuner(
        make_trainable(trained, trained.run.parent / "tuned", **{"tune.min_resource_fraction": 0.4}),
        param_space=space,
        tune_config=ray.tune.TuneConfig(
            metric="score", mode="max", num_samples=2, search_alg=search, scheduler=FreezeThaw(), reuse_actors=True
        ),
        run_config=ray.tune.RunConfig(name="freeze", storage_path=str(trained.run.parent / "ray-results"), verbose=0),
    )
    return tuner.fit()


def test_the_table_has_the_settings_and_the_scores_of_each_trial(grid: Any) -> None:
    table = grid.get_dataframe()
    assert grid.num_errors == 0
    assert sorted(table[f"config/{LR}"]) == [1e-3, 3e-3]
    assert set(table[f"config/{BATCH_SIZE}"]) == {24, 48}
    assert list(table["training_iteration"]) == [3, 3]
    assert list(table["rung"]) == list(table["rungs"]) == [2, 2]
    assert list(table["score"]) == list(table["accuracy"])
    assert grid.get_best_result().metrics is not None


def test_a_trial_that_was_paused_ends_like_a_run_that_was_not(grid: Any, trained: Trained) -> None:
    [result] = [result for result in grid if result.config == POINTS[0]]
    run = Run(Path(result.metrics["run"]))
    lines = [json.loads(line) for line in (Path(result.path) / "result.json").read_text().splitlines()]
    assert [line["training_iteration"] for line in lines] == [1, 2, 3]
    assert [line["iterations_since_restore"] for line in lines] == [1, 1, 2]  # Tune has paused and restored it
    assert len(run.events("paused")) == 2
    name = "model.safetensors"
    assert (run.artifact / name).read_bytes() == (trained.run / "artifact" / name).read_bytes()


def test_both_trials_had_the_same_process_and_the_same_workers(grid: Any) -> None:
    lines = [line for result in grid for line in (Path(result.path) / "result.json").read_text().splitlines()]
    assert len({json.loads(line)["pid"] for line in lines}) == 1
    search = Path(next(iter(grid)).metrics["run"]).parent
    assert len(list((search / "ray").iterdir())) == 1


def test_a_result_leads_to_a_run_that_predicts_and_compares(grid: Any, trained: Trained) -> None:
    for result in grid:
        run = Run(Path(result.metrics["run"]))
        assert json.loads((Path(result.path) / "result.json").read_text().splitlines()[-1])["run"] == str(run)
        assert (run.artifact, run.is_finished) == (Path(result.metrics["artifact"]), True)
        stored = configuration.flatten_config(configuration.load_config(str(run.config)))
        assert {name: stored[name] for name in POINTS[0]} == result.config
        [answer] = Predictor.load(run.artifact)(["where is my parcel"])
        assert answer
    paused = [result for result in grid if result.checkpoint]
    assert paused
    with paused[0].checkpoint.as_directory() as folder:
        assert json.loads((Path(folder) / "run.json").read_text())["run"] == paused[0].metrics["run"]
    runs = [trained.run, *(Path(result.metrics["run"]) for result in grid)]
    assert [candidate.run.folder for candidate in compare.compare_runs(runs).candidates] == runs


def test_tune_s_own_loggers_write(grid: Any) -> None:
    """rtrain's environment is set in this process."""
    assert env.ENV_DEFAULTS.keys() <= os.environ.keys()
    for result in grid:
        names = {path.name.partition(".")[0] for path in Path(result.path).iterdir()}
        assert {"result", "progress", "events", "params"} <= names


def test_no_process_of_the_trials_is_left(grid: Any) -> None:
    within(lambda: find_leftover_workers() == [], 60)


# ---------------------------------------------------------------------------------------------------------- the page


@pytest.fixture(scope="module")
def page_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: rows, an encoder, and the program of the page, for both."""
    folder = tmp_path_factory.mktemp("page")
    write_rows(folder / "messages.csv", labelled_rows(420), ("text", "category"))
    make_encoder(folder / "encoder")
    [block] = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    label, small = '"data.label": "category",', '"model.name": "encoder", "train.epochs": 6, "train.precision": "fp32",'
    space, higher = "loguniform(1e-5, 1e-3)", "loguniform(1e-4, 1e-2)"  # the encoder is untrained
    assert (block.count(label), block.count(space)) == (1, 1)
    (folder / "program.py").write_text(block.replace(label, f"{label} {small}").replace(space, higher))
    return folder


OWN_PARTS = {
    "import ray.tune": "import tune, ray.tune",
    "OptunaSearch(seed=0)": "tune.OptunaAskSearch()",
    "ASHAScheduler(grace_period=1, reduction_factor=2)": "tune.FreezeThaw()",
}
"""Ray's searcher and scheduler on the page, and rtrain's in their place."""
PRINT_TABLE = """
print("JSON " + results.get_dataframe().to_json(orient="records"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("parts", ["stock", "own"])
def test_the_program_of_the_page_runs(page_folder: Path, parts: str) -> None:
    """With Ray's searcher and scheduler as it stands, and with rtrain's; both log to MLflow too."""
    tracking = page_folder / f"{parts}.db"
    callback = f"MLflowLoggerCallback(tracking_uri='sqlite:///{tracking}', experiment_name='tuned')"
    program = (page_folder / "program.py").read_text().replace("runs/", f"{parts}/")
    changes = {'RunConfig(name="tuned",': f'RunConfig(name="tuned", callbacks=[{callback}],'}
    for old, new in (changes | (OWN_PARTS if parts == "own" else {})).items():
        assert program.count(old) == 1
        program = program.replace(old, new)
    header = "from ray.air.integrations.mlflow import MLflowLoggerCallback\n"
    (page_folder / f"{parts}.py").write_text(header + program + PRINT_TABLE)
    environment = {name: value for name, value in os.environ.items() if name not in env.ENV_DEFAULTS}
    words = [sys.executable, f"{parts}.py"]
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(words, cwd=page_folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("JSON ")]
    rows = json.loads(line.removeprefix("JSON "))
    assert len(rows) == 4
    assert len({row["config/optim.lr"] for row in rows}) == 4
    assert {row["config/train.aggregation_frequency"] for row in rows} <= {1, 2, 4}
    finished = [row for row in rows if row["done"] and row["rung"] == row["rungs"]]
    assert len(finished) == 2 if parts == "own" else finished
    assert all(Predictor.load(Path(row["run"]) / "artifact")(["where is my parcel"]) for row in finished)
    assert not any(Run(Path(row["run"])).is_finished for row in rows if row not in finished)
    experiment = page_folder / parts / "ray" / "tuned"
    assert len(list(experiment.glob("*/events.out.tfevents.*"))) >= 4
    with contextlib.closing(sqlite3.connect(tracking)) as database:
        logged = database.execute("select value from params where key = 'optim.lr'").fetchall()
    assert sorted(float(value) for (value,) in logged) == pytest.approx(sorted(row["config/optim.lr"] for row in rows))


@pytest.mark.slow
def test_a_trial_whose_process_is_killed_ends_like_an_undisturbed_run(trained: Trained) -> None:
    """Tune has no checkpoint of the trial: it starts at its first rung again, and nothing is trained twice."""

    class Kill(ray.tune.Callback):
        killed = 0

        def on_trial_result(
            self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
        ) -> None:
            if not self.killed and result["training_iteration"] == 2:
                self.killed = result["pid"]
                os.kill(self.killed, signal.SIGKILL)

    kill = Kill()
    trainable = make_trainable(trained, trained.run.parent / "killed", **{"tune.min_resource_fraction": 0.4})
    results: Any = ray.tune.Tuner(
        ray.tune.with_resources(trainable, {"CPU": 0, ray_internals.HEAD_RESOURCE: 0.01}),
        param_space=POINTS[0],
        tune_config=ray.tune.TuneConfig(metric="score", mode="max"),
        run_config=ray.tune.RunConfig(
            storage_path=str(trained.run.parent / "ray-results"),
            failure_config=ray.tune.FailureConfig(max_failures=1),
            callbacks=[kill],
            verbose=0,
        ),
    ).fit()
    [result] = results
    assert kill.killed
    assert result.error is None
    assert result.metrics["pid"] != kill.killed
    name, run = "model.safetensors", Run(Path(result.metrics["run"]))
    assert (run.artifact / name).read_bytes() == (trained.run / "artifact" / name).read_bytes()
    assert len(run.events("paused")) == 2
    within(lambda: find_leftover_workers() == [], 60)
