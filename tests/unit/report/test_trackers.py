"""Trackers with their real libraries: what is told is read back from TensorBoard's files and from MLflow's store."""

import contextlib
import importlib.util
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rtrain import config
from rtrain.config import Config
from rtrain.core import events
from rtrain.core.errors import ConfigError, UserError, redact
from rtrain.core.run_folder import Run
from rtrain.inference.artifact import read_artifact
from rtrain.inference.predictor import Predictor
from rtrain.report import push, tracker_feed, trackers
from rtrain.report.trackers import RunFacts, TrackerState
from rtrain.runs import prepare, run_folders as runs
from tests.conftest import labelled_rows
from tests.support.reports import make_run, settings, train
from tests.support.tiny import make_artifact

Event = Mapping[str, Any]
ROWS_PER_UPDATE = 24
FINAL = {"test/accuracy": [(20, 0.5)], "test/macro_f1": [(20, 0.4)], "seconds/train": [(20, 20.0)]}


def with_trackers(names: list[str], **more: Any) -> Config:
    settings = {f"report.{name}": value for name, value in more.items()}
    return config.load_config("intent", {"report.trackers": names, **settings})


def follow(chosen: Config, run: Path, said: list[str] | None = None) -> None:
    """A training that the trackers follow."""
    lines = [] if said is None else said
    with tracker_feed.follow_run(chosen, Run(run), lambda event: lines.append(event["text"])):
        train(run, ROWS_PER_UPDATE)


def interrupt(chosen: Config, run: Path) -> None:
    """A training that Ctrl-C ends after one update."""
    with contextlib.suppress(KeyboardInterrupt), tracker_feed.follow_run(chosen, Run(run), print):
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


def wait_for(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


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
    with tracker_feed.follow_run(with_trackers(["tensorboard"]), Run(run), print):
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


# ----------------------------------------------------------------------------------------------------- model registry


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("artifact"))


def test_a_finished_run_becomes_a_version_that_mlflow_loads_and_answers_like_rtrain(
    run: Path, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow.pyfunc
    import pandas as pd

    monkeypatch.chdir(tmp_path)
    (run / "artifact").symlink_to(artifact)
    (run / "config.yaml").touch()  # it makes the folder a run
    config = with_trackers(["mlflow"], mlflow_register="support")
    follow(config, run)
    tracker_feed.send_missing(config, Run(run), print, always=True)  # the same artifact is no second version
    uri = f"sqlite:///{run.parent / 'mlflow.db'}"
    client, facts = Store(uri).client, read_artifact(artifact)
    versions: list[Any] = list(client.search_model_versions("name = 'support'"))
    (version,) = versions
    assert (version.version, version.tags["rtrain.version"], version.tags["rtrain.gate"]) == (1, facts.version, "none")
    model = mlflow.pyfunc.load_model(version.source)
    texts = ["where is my parcel", "please cancel my subscription"]
    answers = [answer[0] for answer in Predictor.load(artifact)(texts)]
    table = model.predict(pd.DataFrame({"text": texts}))
    assert table["label"].tolist() == [answer["label"] for answer in answers]
    assert table["score"].tolist() == pytest.approx([answer["score"] for answer in answers], abs=1e-6)
    assert [column.name for column in model.metadata.get_input_schema().inputs] == ["text", "text_pair"]
    assert len(model.predict(model.input_example)) == len(model.input_example)
    assert not [path for path in Path(version.source).rglob("*.pkl")]
    assert not [path for path in tmp_path.iterdir() if path.name == "mlruns"]

    run_id = TrackerState(run, "mlflow").values["run_id"]
    assert push.push_to_mlflow(run / "artifact", "support") == (uri, "1")
    other = make_artifact(tmp_path / "other", seed=1)
    assert push.push_to_mlflow(other, "support", uri) == (uri, "2")
    (run / "artifact-int8").symlink_to(make_artifact(tmp_path / "smaller", seed=2))  # of the same run
    assert push.push_to_mlflow(run / "artifact-int8", "support") == (uri, "3")
    by_version = {str(item.version): item.run_id for item in client.search_model_versions("name = 'support'")}
    assert by_version["1"] == by_version["3"] == run_id != by_version["2"]
    assert mlflow.pyfunc.load_model(version.source).predict(pd.DataFrame({"text": texts})).equals(table)


def test_a_trial_of_a_search_is_no_version(run: Path, artifact: Path) -> None:
    trial = run / "trial-000"
    trial.mkdir()
    (run / "trials.jsonl").write_text("")
    (trial / "artifact").symlink_to(artifact)
    shutil.copyfile(run.with_name("mlflow.db"), run / "mlflow.db")
    events.append_event(trial, "created", run="trial-000")
    follow(with_trackers(["mlflow"], mlflow_register="support"), trial)
    store = Store(f"sqlite:///{run / 'mlflow.db'}")
    assert [result.info.status for result in store.runs("intent")] == ["FINISHED"]
    assert list(store.client.search_model_versions()) == []


def test_a_registry_that_does_not_answer_is_named(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(UserError) as raised:
        push.push_to_mlflow(artifact, "support", "http://user:secret@127.0.0.1:9")
    assert (raised.value.code, "secret" in str(raised.value)) == ("unreachable", False)


# ---------------------------------------------------------------------------------------------------- what goes wrong


class Unreliable(trackers.MLflowTracker):
    """MLflow whose server is away for the calls of `away`, counted over all of these trackers."""

    away: Any = ()
    calls = 0

    def log(self, event: Event) -> None:
        if event["values"]:
            Unreliable.calls += 1
            if Unreliable.calls - 1 in self.away:
                raise ConnectionError("gone\nand more")
        super().log(event)


class Recorder:
    """A tracker of the user: it keeps what it gets."""

    calls: ClassVar[list[tuple[str, Any]]] = []

    def start(self, run: RunFacts) -> None:
        self.calls.append(("start", (run.name, run.settings["optim.lr"], dict(run.state.values))))
        run.state.values["id"] = "mine-1"

    def log(self, event: Event) -> None:
        self.calls.append(("log", event))

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.calls.append(("finish", (summary["status"], summary["best_step"])))

    def close(self) -> None:
        self.calls.append(("close", None))


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces trackers by name, and the waits between attempts by none."""

    def replace(**classes: Any) -> None:
        monkeypatch.setattr(tracker_feed, "TRACKERS", {**trackers.TRACKERS, **classes})
        monkeypatch.setattr(Recorder, "calls", [])
        monkeypatch.setattr(tracker_feed, "MAX_RETRY_S", 0.0)
        monkeypatch.setattr(tracker_feed, "LAST_WAITS_S", (0.0, 0.0))

    return replace


def test_a_users_tracker_gets_each_event_once_and_keeps_its_state(use: Callable[..., None], run: Path) -> None:
    use(tensorboard=Recorder)
    config = with_trackers(["tensorboard"])
    interrupt(config, run)
    with tracker_feed.follow_run(config, Run(run), print):
        train(run, ROWS_PER_UPDATE)
    log = Run(run).events()
    calls = Recorder.calls
    assert [name for name, _ in calls if name != "log"] == ["start", "finish", "close"] * 2
    assert [fact for name, fact in calls if name == "finish"] == [("interrupted", None), ("finished", 20)]
    starts = [fact for name, fact in calls if name == "start"]
    assert starts == [("mine", 0.0003, {}), ("mine", 0.0003, starts[1][2])]
    assert starts[1][2] == {"id": "mine-1", "sent_events": 2, "is_finished": False, "is_open": False}
    events_of_tracker = [fact for name, fact in calls if name == "log"]
    assert [event["kind"] for event in events_of_tracker] == [event["kind"] for event in log]
    losses = [event["values"]["train/loss"] for event in events_of_tracker if "train/loss" in event["values"]]
    assert losses == [2.0, *(2.0 / update for update in range(2, 21))]  # the first command had update 1


def test_the_test_score_by_the_threshold_that_the_end_has_chosen_is_told_too(
    use: Callable[..., None], run: Path
) -> None:
    """It is the run's; the one before it is by the threshold that the training began with."""
    before = {"split": "test", "step": 20, "scores": {"micro_f1": 0.25}}
    after = {**before, "scores": {"micro_f1": 0.75}, "calibration": {"threshold": 0.2}}
    last = {**after, "split": "valid", "calibration": None}
    use(tensorboard=Recorder)
    with tracker_feed.follow_run(with_trackers(["tensorboard"]), Run(run), print):
        for fields in (last, before, {**after, "split": "valid", "step": 10}, after, after):
            events.append_event(run, "evaluated", **fields)
    assert [fact["values"] for name, fact in Recorder.calls if name == "log" and fact["values"]] == [
        {"valid/micro_f1": 0.75},
        {"test/micro_f1": 0.25},
        {"test/micro_f1": 0.75},
    ]


def test_where_a_tracker_cannot_start_a_new_run_those_before_it_are_closed(use: Callable[..., None], run: Path) -> None:
    """An MLflow run would be said to be running for ever."""

    class Refused(Recorder):
        def start(self, run: RunFacts) -> None:
            raise ConnectionError("no such server")

    use(tensorboard=Refused)
    with pytest.raises(UserError) as raised:
        follow(with_trackers(["mlflow", "tensorboard"]), run)
    assert raised.value.code == "unreachable"
    (result,) = Store(f"sqlite:///{run.parent / 'mlflow.db'}").runs("intent")
    assert result.info.status == "FAILED"


def test_a_resumed_run_goes_on_without_its_tracker_and_fills_the_gap(use: Callable[..., None], run: Path) -> None:
    class Late(Recorder):
        starts: ClassVar[list[str]] = []

        def start(self, run: RunFacts) -> None:
            self.starts.append(run.name)
            if len(self.starts) < 3:
                raise ConnectionError("still starting")
            super().start(run)

    use(tensorboard=Late)
    train(run, ROWS_PER_UPDATE)
    messages: list[str] = []
    follow(with_trackers(["tensorboard"]), run, messages)
    assert len(messages) == 2
    assert sum(name == "log" for name, _ in Recorder.calls) == len(Run(run).events())


@pytest.mark.parametrize("away", [range(1, 2), range(1, 4)])
def test_a_tracker_that_fails_for_a_while_gets_all_figures(
    use: Callable[..., None], away: range, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(mlflow=Unreliable)
    monkeypatch.setattr(Unreliable, "away", away)
    monkeypatch.setattr(Unreliable, "calls", 0)
    messages: list[str] = []
    with tracker_feed.follow_run(
        with_trackers(["mlflow", "tensorboard"]), Run(run), lambda event: messages.append(event["text"])
    ):
        train(run, ROWS_PER_UPDATE)
        wait_for(lambda: len(messages) == 2)  # that it failed, and that it has all again
    assert len(messages) == 2
    store = Store(f"sqlite:///{run.parent / 'mlflow.db'}")
    (result,) = store.runs("intent")
    check(store.curves(result))
    assert result.info.status == "FINISHED"
    check(curves_of_tensorboard(run.parent / "tensorboard" / "mine"))


def test_what_a_tracker_lacks_at_the_end_is_sent_by_the_next_command(
    use: Callable[..., None], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And once: a third one sends nothing."""
    use(mlflow=Unreliable)
    config, messages = with_trackers(["mlflow"]), list[str]()
    monkeypatch.setattr(Unreliable, "away", range(3, 10**9))
    monkeypatch.setattr(Unreliable, "calls", 0)
    follow(config, run, messages)
    assert len(messages) == 2
    store = Store(f"sqlite:///{run.parent / 'mlflow.db'}")
    assert len(store.curves(store.runs("intent")[0])["train/loss"]) == 3
    monkeypatch.setattr(Unreliable, "away", ())
    tracker_feed.send_missing(config, Run(run), lambda event: messages.append(event["text"]))
    (result,) = store.runs("intent")
    check(store.curves(result))
    assert (result.info.status, len(messages)) == ("FINISHED", 2)
    calls = Unreliable.calls
    tracker_feed.send_missing(config, Run(run), print)
    assert Unreliable.calls == calls


def test_a_tracker_that_hangs_holds_up_neither_the_training_nor_the_others(
    use: Callable[..., None], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    class Hanging(Recorder):
        def log(self, event: Event) -> None:
            released.wait(60)

    use(wandb=Hanging)
    monkeypatch.setattr(tracker_feed, "FINISH_DEADLINE_S", 1.0)
    messages: list[str] = []
    started = time.monotonic()
    follow(with_trackers(["wandb", "tensorboard"]), run, messages)
    assert (time.monotonic() - started < 30, len(messages)) == (True, 1)
    check(curves_of_tensorboard(run.parent / "tensorboard" / "mine"))
    released.set()
    use(wandb=Recorder)
    wait_for(lambda: not any(thread.name == "tracker wandb" for thread in threading.enumerate()))


def test_an_event_that_is_sent_twice_is_one_point_in_mlflow(run: Path) -> None:
    """A process that was killed between the event and its record leaves a count that is too low."""
    config = with_trackers(["mlflow"])
    follow(config, run)
    state = TrackerState(run, "mlflow")
    state.values.update(sent_events=4, is_finished=False)
    state.save()
    tracker_feed.send_missing(config, Run(run), print)
    store = Store(f"sqlite:///{run.parent / 'mlflow.db'}")
    (result,) = store.runs("intent")
    check(store.curves(result))


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
        tracker_feed.follow_run(with_trackers(["mlflow"], mlflow_uri=uri), Run(run), print),
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


def test_an_unknown_tracker_and_a_registration_without_mlflow_are_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        with_trackers(["aim"])
    assert [problem.field for problem in raised.value.problems] == ["report.trackers.0"]
    with pytest.raises(ConfigError) as raised:
        with_trackers(["wandb"], mlflow_register="intent")
    found = [(problem.field, problem.code) for problem in raised.value.problems]
    assert found == [("report.mlflow_register", "conflicting_settings")]


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
