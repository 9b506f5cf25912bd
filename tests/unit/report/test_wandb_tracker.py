"""Weights & Biases with its real library, offline: what it got is read back from its own files."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rtrain import config
from rtrain.config import Config
from rtrain.core import events
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.report import tracker_feed
from rtrain.report.trackers import TrackerState
from tests.support.reports import train, write_predictions
from tests.support.root import ROOT
from tests.support.tiny import make_artifact
from tests.support.wandb_files import read_run
from tests.unit.report.test_trackers import ROWS_PER_UPDATE, curves_of_tensorboard, wait_for

FOLLOWED_RUN = """
import sys, time
from pathlib import Path
from rtrain import config
from rtrain.core import events
from rtrain.core.run_folder import Run
from rtrain.report import tracker_feed
run, last = Path(sys.argv[1]), int(sys.argv[2])
first = max((event.get("step", 0) for event in events.read_events(run)), default=0)
settings = config.load_config("intent", {"report.trackers": ["tensorboard", "wandb"]})
with tracker_feed.follow_run(settings, Run(run), print):
    events.append_event(run, "started", step=first, total_steps=last, workers=1, precision="fp32")
    for step in range(max(0, first - 20) + 1, last + 1):
        events.append_event(run, "progress", step=step, total_steps=last, loss=2.0 / step)
        time.sleep(0.01)
"""


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    import wandb

    wandb.teardown()  # it reads its variables once
    for name in ("WANDB_PROJECT", "WANDB_ENTITY", "WANDB_API_KEY", "WANDB_DIR", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name in ("DATA", "CACHE", "CONFIG", "ARTIFACT"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    yield monkeypatch
    wandb.teardown()


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("artifact"))


@pytest.fixture
def run(tmp_path: Path, artifact: Path) -> Path:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "artifact").symlink_to(artifact)
    write_predictions(folder, ["a"] * 30, ["b"] * 6 + ["a"] * 24, text=[f"secret {row}" for row in range(30)])
    events.append_event(folder, "created", run="mine")
    return folder


def with_wandb(**more: Any) -> Config:
    settings = {f"report.{name}": value for name, value in more.items()}
    return config.load_config("intent", {"report.trackers": ["wandb"], **settings})


def read_ended(folder: Path, ends: int) -> dict[str, Any]:
    """The files, once wandb's own process has closed them."""
    wait_for(lambda: len(read_run(folder)["exits"]) == ends)
    return read_run(folder)


def test_a_resumed_run_is_one_run_with_its_figures_settings_rows_and_artifact(
    offline: pytest.MonkeyPatch, run: Path
) -> None:
    settings = with_wandb(wandb_project="tries", wandb_hardest_rows=4)
    with contextlib.suppress(KeyboardInterrupt), tracker_feed.follow_run(settings, Run(run), print):
        events.append_event(run, "progress", step=1, total_steps=20, loss=2.0)
        raise KeyboardInterrupt
    with tracker_feed.follow_run(settings, Run(run), print):
        train(run, ROWS_PER_UPDATE)
    found = read_ended(run.parent, 2)
    (identity,) = {*found["ids"]}
    assert (identity[0], identity[2]) == ("tries", "mine")
    assert identity[1] == TrackerState(run, "wandb").values["run_id"]
    assert found["exits"] == [1, 0]
    assert found["config"]["optim.lr"] == 0.0003
    losses = {step: values["train/loss"] for step, values in found["history"].items() if "train/loss" in values}
    assert losses == {step: 2.0 / step for step in range(1, 21)}
    scores = {step: values["valid/accuracy"] for step, values in found["history"].items() if "valid/accuracy" in values}
    assert scores == {10: 0.25, 20: 0.5}
    assert (found["summary"]["test/accuracy"], found["summary"]["best_step"]) == (0.5, 20)
    model = found["artifacts"]["tiny"]
    assert {entry.path for entry in model.manifest.contents} == {path.name for path in (run / "artifact").iterdir()}
    (table,) = run.parent.rglob("*.table.json")
    rows = json.loads(table.read_text())["data"]
    assert [row[2:4] for row in rows] == [["a", "b"]] * 4
    assert {row[1] for row in rows} <= {f"secret {row}" for row in range(6)}


def test_no_text_of_a_row_is_sent_where_no_hardest_rows_are_asked_for(offline: pytest.MonkeyPatch, run: Path) -> None:
    train(run, ROWS_PER_UPDATE)
    tracker_feed.send_missing(with_wandb(wandb_hardest_rows=0), Run(run), print)
    found = read_ended(run.parent, 1)
    assert found["ids"][0][0] == "intent"  # the recipe's name
    assert not any(b"secret" in path.read_bytes() for path in (run.parent / "wandb").rglob("*") if path.is_file())


def test_without_a_key_a_new_run_does_not_begin(offline: pytest.MonkeyPatch, run: Path) -> None:
    offline.setenv("WANDB_MODE", "online")
    offline.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(UserError) as raised, tracker_feed.follow_run(with_wandb(), Run(run), print):
        raise AssertionError("nothing may start")
    assert raised.value.code == "missing"


@pytest.mark.slow
def test_processes_that_are_killed_leave_each_step_once(offline: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """wandb's own process loses what it had not written; the next command sends it again."""
    run, last = tmp_path / "runs" / "mine", 400
    run.mkdir(parents=True)
    events.append_event(run, "created", run="mine")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", FOLLOWED_RUN, str(run), str(last)]
    for killed_at in (150, 300):
        with subprocess.Popen(command, env=environment) as process:
            wait_for(lambda count=killed_at: len(Run(run).events("progress")) >= count)  # type: ignore[misc]
            process.kill()
    subprocess.run(command, env=environment, check=True, timeout=120)
    found = read_ended(run.parent, 1)
    losses = {step: values["train/loss"] for step, values in found["history"].items() if "train/loss" in values}
    assert losses == {step: 2.0 / step for step in range(1, last + 1)}
    assert len({*found["ids"]}) == 1
    curves = curves_of_tensorboard(run.parent / "tensorboard" / "mine")
    assert [step for step, _ in curves["train/loss"]] == list(range(1, last + 1))
