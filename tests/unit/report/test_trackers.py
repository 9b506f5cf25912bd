"""Trackers with their real libraries: what is told is read back from TensorBoard's files and from MLflow's store."""

import contextlib
import importlib.util
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rtrain import config
from rtrain.config import Config
from rtrain.core import events
from rtrain.core.errors import ConfigError, UserError, redact
from rtrain.core.run_folder import Run
from rtrain.report import trackers
from rtrain.runs import prepare, run_folders as runs
from tests.conftest import labelled_rows
from tests.support.reports import make_run, settings, train

ROWS_PER_UPDATE = 24
FINAL = {"test/accuracy": [(20, 0.5)], "test/macro_f1": [(20, 0.4)], "seconds/train": [(20, 20.0)]}


def with_trackers(names: list[str], **more: Any) -> Config:
    settings = {f"report.{name}": value for name, value in more.items()}
    return config.load_config("intent", {"report.trackers": names, **settings})


def follow(chosen: Config, run: Path, said: list[str] | None = None) -> None:
    """A training that the trackers follow."""
    lines = [] if said is None else said
    with trackers.follow_run(chosen, Run(run), lambda event: lines.append(event["text"])):
        train(run, ROWS_PER_UPDATE)


def interrupt(chosen: Config, run: Path) -> None:
    """A training that Ctrl-C ends after one update."""
    with contextlib.suppress(KeyboardInterrupt), trackers.follow_run(chosen, Run(run), print):
        events.append_event(run, "progress", step=1, total_steps=20, loss=2.0)
        raise KeyboardInterrupt


@pytest.fixture(scope="module")
def mlflow_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that the tracker made in another experiment: its tables take many times as long as a run."""
    folder = tmp_path_factory.mktemp("mlflow") / "other"
    folder.mkdir()
    interrupt(with_trackers(["mlflow"], mlflow_experiment="other"), folder)
    return folder.with_name("mlflow.db")


@pytest.fixture
def run(tmp_path: Path, mlflow_store: Path) -> Path:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    shutil.copyfile(mlflow_store, folder.with_name("mlflow.db"))
    events.append_event(folder, "created", run="mine")
    return folder


def curves_of_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    result.Reload()
    return {
        name: [(event.step, round(float(event.tensor_proto.float_val[0]), 5)) for event in result.Tensors(name)]
        for name in result.Tags()["tensors"]
    }


def check(curves: Mapping[str, list[tuple[int, float]]]) -> None:
    """Every update once, though the second start repeated two of them."""
    assert curves["train/loss"] == [(update, round(2.0 / update, 5)) for update in range(1, 21)]
    assert curves["valid/accuracy"] == [(10, 0.25), (20, 0.5)]
    assert {name: curves[name] for name in FINAL} == FINAL
    assert not any(name.endswith("/rows") for name in curves)


# ------------------------------------------------------------------------------------------------------------- told


def test_tensorboard_is_told_every_update_once(run: Path) -> None:
    follow(with_trackers(["tensorboard"]), run)
    check(curves_of_tensorboard(run.parent / "tensorboard" / "mine"))


class Store:
    """MLflow's own client on a store."""

    def __init__(self, uri: str):
        from mlflow import MlflowClient

        self.client = MlflowClient(uri)

    def runs(self, experiment: str) -> list[Any]:
        result = self.client.get_experiment_by_name(experiment)
        assert result is not None
        return list(self.client.search_runs([result.experiment_id]))

    def curves(self, run: Any) -> dict[str, list[tuple[int, float]]]:
        history = self.client.get_metric_history
        return {
            name: sorted((item.step, round(item.value, 5)) for item in history(run.info.run_id, name))
            for name in run.data.metrics
        }


def test_mlflow_is_told_settings_and_every_update_once(run: Path) -> None:
    follow(with_trackers(["mlflow"]), run)
    store = Store(f"sqlite:///{run.parent / 'mlflow.db'}")
    (result,) = store.runs("intent")
    check(store.curves(result))
    assert (result.info.run_name, result.info.status) == ("mine", "FINISHED")
    assert result.data.params["optim.lr"] == "0.0003"
    assert result.data.tags["rtrain.run"] == str(run)


def test_a_resumed_run_goes_on_in_the_same_mlflow_run(run: Path, tmp_path: Path) -> None:
    shutil.copyfile(run.with_name("mlflow.db"), tmp_path / "store.db")
    config = with_trackers(["mlflow"], mlflow_uri=f"sqlite:///{tmp_path / 'store.db'}", mlflow_experiment="tries")
    interrupt(config, run)
    store = Store(f"sqlite:///{tmp_path / 'store.db'}")
    assert [result.info.status for result in store.runs("tries")] == ["KILLED"]
    follow(config, run)
    (result,) = store.runs("tries")
    assert result.info.status == "FINISHED"
    check(store.curves(result))


def test_a_tracker_that_comes_late_is_told_the_past(run: Path) -> None:
    train(run, ROWS_PER_UPDATE)
    with trackers.follow_run(with_trackers(["tensorboard"]), Run(run), print):
        pass
    check(curves_of_tensorboard(run.parent / "tensorboard" / "mine"))


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        ({"kind": "started", "step": 0}, ({}, 0)),
        ({"kind": "progress", "step": 3, "loss": float("nan")}, ({}, 3)),
        (
            {"kind": "evaluated", "split": "valid", "step": 4, "scores": {"f1 <b>": 0.5, "rows": 9, "per_label": {}}},
            ({"valid/f1 _b_": 0.5}, 4),
        ),
    ],
)
def test_only_plain_finite_figures_are_told(event: dict[str, Any], expected: tuple[dict[str, float], int]) -> None:
    assert trackers.extract_values(event) == expected


# ---------------------------------------------------------------------------------------------------- what goes wrong


class Away(trackers.MLflowTracker):
    """MLflow whose server is away for the calls of `away`, counted over all of these trackers."""

    away = range(1, 4)
    calls = 0

    def log(self, values: Mapping[str, float], step: int, time: float) -> None:
        Away.calls += 1
        if Away.calls - 1 in self.away:
            raise ConnectionError("gone\nand more")
        super().log(values, step, time)


class Kept:
    """A tracker that keeps what it is told."""

    is_new = True

    def __init__(self) -> None:
        self.told: list[tuple[dict[str, float], int]] = []

    def log(self, values: Mapping[str, float], step: int, time: float) -> None:
        self.told.append((dict(values), step))

    def close(self, outcome: trackers.RunOutcome) -> None: ...


def test_the_test_score_by_the_threshold_that_the_end_has_chosen_is_told_too(run: Path) -> None:
    """It is the run's; the one before it is by the threshold that the training began with."""
    before = {"kind": "evaluated", "time": 1.0, "split": "test", "step": 20, "scores": {"micro_f1": 0.25}}
    after = {**before, "time": 2.0, "scores": {"micro_f1": 0.75}, "calibration": {"threshold": 0.2}}
    valid = {**after, "split": "valid", "step": 10}
    last = {**valid, "step": 20, "calibration": None}
    remaining = Kept()
    feed = trackers.TrackerFeed("kept", remaining, Run(run), [], print)
    for event in (last, before, valid, after, after):
        feed(event)
    assert remaining.told == [
        ({"valid/micro_f1": 0.75}, 20),
        ({"test/micro_f1": 0.25}, 20),
        ({"test/micro_f1": 0.75}, 20),
    ]


def test_where_a_tracker_cannot_be_opened_those_before_it_are_closed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An MLflow run would be said to be running for ever."""

    def refused(config: Config, run: Run) -> trackers.Tracker:
        raise UserError("no such folder", code="not_found")

    monkeypatch.setattr(trackers, "TRACKERS", {"mlflow": trackers.MLflowTracker, "tensorboard": refused})
    with pytest.raises(UserError) as raised:
        follow(with_trackers(["mlflow", "tensorboard"]), run)
    assert raised.value.code == "not_found"
    (result,) = Store(f"sqlite:///{run.parent / 'mlflow.db'}").runs("intent")
    assert result.info.status == "FAILED"


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> type[Away]:
    monkeypatch.setattr(trackers, "TRACKERS", {"mlflow": Away, "tensorboard": trackers.TensorBoardTracker})
    monkeypatch.setattr(Away, "calls", 0)
    return Away


@pytest.mark.parametrize("retry_s", [0.0, 1e9])
def test_a_tracker_that_fails_for_a_while_gets_all_figures(
    away: type[Away], retry_s: float, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the next update, or at the end where the time for another try has not come."""
    monkeypatch.setattr(away, "away", range(1, 4 if retry_s == 0 else 2))
    monkeypatch.setattr(trackers, "RETRY_S", retry_s)
    messages: list[str] = []
    follow(with_trackers(["mlflow", "tensorboard"]), run, messages)
    assert len(messages) == 2  # that it failed, and that it has all again
    store = Store(f"sqlite:///{run.parent / 'mlflow.db'}")
    (result,) = store.runs("intent")
    check(store.curves(result))
    assert result.info.status == "FINISHED"
    check(curves_of_tensorboard(run.parent / "tensorboard" / "mine"))


def test_what_a_tracker_lacks_at_the_end_is_sent_by_the_next_command(
    away: type[Away], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And once: a third one sends nothing."""
    config, messages = with_trackers(["mlflow"]), list[str]()
    monkeypatch.setattr(away, "away", range(3, 10**9))
    follow(config, run, messages)
    assert len(messages) == 2
    store = Store(f"sqlite:///{run.parent / 'mlflow.db'}")
    assert len(store.curves(store.runs("intent")[0])["train/loss"]) == 3
    monkeypatch.setattr(away, "away", ())
    trackers.send_missing(config, Run(run), lambda event: messages.append(event["text"]))
    (result,) = store.runs("intent")
    check(store.curves(result))
    assert (result.info.status, len(messages)) == ("FINISHED", 3)
    calls = away.calls
    trackers.send_missing(config, Run(run), print)
    assert away.calls == calls


def test_a_server_that_does_not_answer_ends_the_start_with_what_to_do(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    uri = f"http://user:secret@127.0.0.1:{port}"
    with (
        pytest.raises(UserError) as raised,
        trackers.follow_run(with_trackers(["mlflow"], mlflow_uri=uri), Run(run), print),
    ):
        raise AssertionError("nothing may start")
    assert raised.value.code == "unreachable"
    assert "secret" not in str(raised.value)


def test_a_library_that_is_missing_is_named_with_its_command_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = importlib.util.find_spec
    hidden = ("tensorboard", "mlflow", "alembic")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *remainder: None if name in hidden else result(name, *remainder)
    )
    config = settings(tmp_path, labelled_rows(40), **{"report.trackers": ["mlflow", "tensorboard"]})
    with pytest.raises(ConfigError) as raised:
        prepare.check_run(config)
    found_problems = [(problem.field, problem.value, problem.code) for problem in raised.value.problems]
    assert found_problems == [("report.trackers", name, "not_installed") for name in ("mlflow", "tensorboard")]


def test_an_unknown_tracker_is_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        with_trackers(["wandb"])
    assert [problem.field for problem in raised.value.problems] == ["report.trackers.0"]


def test_a_resumed_run_keeps_its_trackers_unless_others_are_asked_for(tmp_path: Path) -> None:
    trackers_on: dict[str, Any] = {"report.trackers": ["tensorboard"]}
    run = make_run(tmp_path, trained=False, **trackers_on)
    saved = config.load_config(str(run / "config.yaml"))
    plain = config.load_config(saved.recipe.name)
    assert runs.choose_folder(run, plain, "resume")[1].deploy.report.trackers == ("tensorboard",)
    for inputs in (["mlflow"], []):
        other = config.with_overrides(saved, {"report.trackers": inputs})
        assert runs.choose_folder(run, other, "resume")[1].deploy.report.trackers == tuple(inputs)


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("postgresql://me:pa/s+s=@db:5432/ml", "postgresql://***@db:5432/ml"),
        (
            "postgresql://db/ml?user=me&password=secret&sslmode=require",
            "postgresql://db/ml?user=me&password=***&sslmode=require",
        ),
        ("https://me:secret@host/rows.csv?sig=ab", "https://***@host/rows.csv?***"),
        ("https://token@host/rows.csv", "https://***@host/rows.csv"),
        ("http://127.0.0.1:5000/a", "http://127.0.0.1:5000/a"),
        ("s3://bucket/part-?.csv", "s3://bucket/part-?.csv"),
        ("sqlite:////home/me@work/mlflow.db", "sqlite:////home/me@work/mlflow.db"),
    ],
)
def test_passwords_of_addresses_are_hidden(address: str, shown: str) -> None:
    assert redact(address) == shown
