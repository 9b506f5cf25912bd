"""Facts from the log of a trial, and its assignments. Without Ray."""

import errno
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rtrain import config
from rtrain.checkpoint.remote_copy import StorageUnreachableError
from rtrain.cluster import preflight
from rtrain.core.errors import ConfigError, TemporaryFailureError, UserError
from rtrain.core.run_folder import Run
from rtrain.runs import run_folders, worker_pool
from tests.support.histories import configured
from tune import search, space, trainable
from tune.search_log import SearchLog
from tune.trainable import SearchTask

K, ROWS = "train.aggregation_frequency", "train.global_batch_size"


def train(run: Run, begin: int, updates: int, every: int, *, ends: bool = True) -> None:
    """A start of updates of half a second. The score grows by 0.01 with each; evaluations, and the time before the
    first rows, are no training."""
    run.folder.mkdir(exist_ok=True)
    run.append_event("started", step=begin, total_steps=100)
    for update in range(begin + 1, updates + 1):
        seconds = 0.5 * (update - begin)
        run.append_event("progress", step=update, loss=1.0, train_s=seconds)
        if update % every == 0:
            scores = {"accuracy": update / 100}
            run.append_event("evaluated", split="valid", step=update, scores=scores, train_s=seconds)
    if ends:
        seconds_of = {"first_batch": 7.0, "train": 0.5 * (updates - begin), "evaluate": 60.0 / every, "checkpoint": 3.0}
        run.append_event("trained", steps=updates, seconds=seconds_of)
        run.append_event("paused", step=updates)


def test_trials_of_equal_training_take_equal_seconds_however_often_they_are_evaluated_or_frozen(tmp_path: Path) -> None:
    straight, thawed = Run(tmp_path / "straight"), Run(tmp_path / "thawed")
    train(straight, 0, 60, every=10)
    for begin, end in ((0, 12), (12, 24), (24, 60)):
        train(thawed, begin, end, every=2)
    for run in (straight, thawed):
        assert trainable.training_seconds(run) == 30.0
        assert trainable.seconds_to_target(run, "accuracy", 0.4) == 20.0
        assert trainable.seconds_to_target(run, "accuracy", 0.61) is None


def test_what_a_crash_has_lost_is_no_time_to_a_score(tmp_path: Path) -> None:
    run = Run(tmp_path)
    train(run, 0, 35, every=10, ends=False)
    run.append_event("crashed", resumes_from=20)
    train(run, 20, 60, every=10)
    assert (trainable.training_seconds(run), trainable.seconds_to_target(run, "accuracy", 0.4)) == (30.0, 20.0)


def every(selection: config.Config, settings: dict[str, Any], folder: Path) -> tuple[int | None, int]:
    """Updates and rows between two evaluations of a trial."""
    task = SearchTask(config.to_document(selection), frozenset(), folder, folder)
    train = (instance := task.config_for(space.trial_overrides(selection, settings)).recipe).train
    return train.evaluate_every, (train.evaluate_every or 0) * instance.global_batch_size


@pytest.mark.parametrize(("objective", "k"), [("score", 1), ("pareto", 2), ("time_to_target", 4), ("score", 8)])
def test_trials_are_read_after_equal_rows(objective: str, k: int, tmp_path: Path) -> None:
    """Updates of 16, 32, 64 and 128 rows; the recipe has 64, and is read every 5 of them, or 320 rows."""
    target = {"tune.target": 0.9} if objective == "time_to_target" else {}
    training = {"train.workers": 2, "train.micro_batch_size": 8, "train.evaluate_every": 5, K: 4}
    overrides: dict[str, Any] = {**training, "tune.objective": objective, **target}
    assert every(configured(tmp_path, **overrides), {K: k}, tmp_path)[1] == 256
    by_epoch = configured(tmp_path, **{**overrides, "train.evaluate_every": None})
    assert every(by_epoch, {K: k}, tmp_path)[0] is None
    assert every(configured(tmp_path, **overrides, **{"tune.study": "aggregation"}), {K: k}, tmp_path)[0] == 5


def test_a_point_or_a_range_of_rows_may_have_the_largest_updates(tmp_path: Path) -> None:
    read = {"train.evaluate_every": 1, "train.global_batch_size": 64}
    points = configured(tmp_path, **read, **{"tune.points_to_evaluate": [{K: 32}], "train.micro_batch_size": 8})
    assert space.evaluation_interval_rows(points) == 32 * 8 * points.recipe.train.workers
    searched = {"optim.lr": [1e-4, 2e-4], ROWS: {"low": 16, "high": 1024}}
    assert space.evaluation_interval_rows(configured(tmp_path, **read, **{"tune.space": searched})) == 1024


@pytest.mark.parametrize("reuse", ["refuse", "resume"])
def test_a_search_of_whose_trials_alone_there_are_copies_is_refused_with_the_reason(
    reuse: run_folders.Reuse, tmp_path: Path
) -> None:
    """As an earlier version left it: its trials are copied, and its journal is not."""
    copy = tmp_path / "mounted" / "search" / "trial-000"
    copy.mkdir(parents=True)
    (copy / "config.yaml").touch()
    selection = configured(tmp_path, **{"cluster.storage": (tmp_path / "mounted").as_uri()})
    with pytest.raises(UserError), trainable.open_search(selection, tmp_path / "search", reuse, None):
        pass
    with trainable.open_search(selection, tmp_path / "another", "refuse", None):
        pass


def test_a_search_with_an_edited_configuration_is_refused_by_name(tmp_path: Path) -> None:
    selection = configured(tmp_path)
    with trainable.open_search(selection, tmp_path / "search", "refuse", None):
        pass
    file = tmp_path / "search" / "config.yaml"
    full = file.read_text()
    file.write_text(full.replace(f"weight_decay: {selection.recipe.optim.weight_decay}", "weight_decay: 0.5"))
    with pytest.raises(ConfigError) as caught, trainable.open_search(selection, tmp_path / "search", "resume", None):
        pass
    assert [(problem.field, problem.value) for problem in caught.value.problems] == [("optim.weight_decay", 0.5)]
    file.write_text(full)
    with trainable.open_search(selection, tmp_path / "search", "resume", None):
        pass


def ordered(folder: Path, monkeypatch: pytest.MonkeyPatch, prepared: Callable[..., Any], rung: int | None = 0) -> Any:
    """Outcomes of an assignment of 12 steps; `prepared` prepares its run."""
    monkeypatch.setattr(SearchTask, "prepare_trial", prepared)
    task = SearchTask(config.to_document(configured(folder)), frozenset(), folder, folder)
    return trainable.run_assignment(trainable.Assignment(1, {}, rung, 768), task, worker_pool.FreshWorkerGroup())


def test_a_trial_whose_answers_cannot_be_read_has_failed_and_its_slot_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path).trial(1)
    train(run, 0, 12, every=12)
    instance = SimpleNamespace(run=run, order=SimpleNamespace(step_at=lambda rows: 12))  # no rows, no answers
    [came] = ordered(tmp_path, monkeypatch, lambda *arguments: instance)
    assert (came["kind"], came["seconds"]) == ("failed", 6.0)
    assert "(traceback in " in came["error"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (preflight.InsufficientDiskSpace("the disk has 1 MB free"), "retry"),
        (StorageUnreachableError("cluster.storage: s3://runs fails"), "retry"),
        (TemporaryFailureError("it is finished, and its copy is not whole"), "retry"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "retry"),
        (UserError("training failed: safetensors: No space left on device (os error 28)"), "retry"),
        (UserError("model.name: no such model"), "failed"),
        (ValueError("no"), "failed"),
    ],
)
def test_what_is_wrong_with_the_machine_is_no_failure_of_a_trial(
    error: Exception, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that are still to come would be told as failed for ever, within a minute."""

    def refuse(*arguments: Any) -> None:
        raise error

    [came] = ordered(tmp_path, monkeypatch, refuse)
    assert came["kind"] == kind
    messages = SearchLog(Run(tmp_path), None)
    messages.write("created", trial=1, settings={}, proposed_by="gp")
    answer: Any = SimpleNamespace(wait=lambda *_: (trainable.Assignment(1, {}, 0, 768), (came,)))
    stopped = pytest.raises(TemporaryFailureError) if kind == "retry" else nullcontext()
    with stopped as raised:
        messages.receive(answer)
    assert raised is None or raised.value.code == "machine_failed"
    [trial] = SearchLog(Run(tmp_path), None).history.trials
    assert trial.status == ("created" if kind == "retry" else kind)


UNTAUGHT = [4.3, 4.2, 4.3]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([*UNTAUGHT, 9.0, 8.0, 30.0, 12.0, 7.0], True),
        ([4.3, 80.0, 300.0, 250.0, 270.0, 40.0, 33.0, 35.0], True),  # thrown up by the first step
        ([*UNTAUGHT, 9.0, 8.0, 4.1, 12.0, 7.0], False),  # it is not lost
        ([*UNTAUGHT, 4.1, 30.0, 4.2, 4.0, 4.1], False),  # one bad update
        ([*UNTAUGHT, 4.6, 4.5, 4.7, 4.8, 4.6], False),
        ([*UNTAUGHT, 9.0, 9.0, 9.0, 9.0], False),  # too few to tell
        ([0.010, 0.011, 0.010, 0.012, 0.016, 0.016, 0.02, 0.02], False),  # a model that has learnt its task wavers
        ([0.010, 0.011, 0.010, 0.4, 0.5, 0.01, 0.3, 0.6], False),  # rows that are wrongly labelled
        ([0.010, 0.011, 0.010, 0.7, 0.6, 0.8, 0.7, 0.7], True),  # it has forgotten it
        ([], False),
    ],
)
def test_when_a_trial_is_seen_to_diverge(losses: list[float], expected: bool) -> None:
    assert trainable.has_diverged(losses) is expected


@pytest.mark.parametrize("paused", [True, False])
def test_a_trial_that_a_killed_search_has_seen_to_diverge_is_not_trained_on(
    paused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was paused at its rung, or in the midst; the journal knows nothing yet."""
    run = Run(tmp_path).trial(1)
    run.folder.mkdir()
    run.append_event("started", step=0, total_steps=100)
    for update, loss in enumerate([*UNTAUGHT, 9.0, 8.0, 30.0, 12.0, 7.0, 6.9, 6.8, 6.7, 1.0], 1):
        run.append_event("progress", step=update, loss=loss, train_s=0.5 * update)
    if paused:
        run.append_event("paused", step=12)
    instance = SimpleNamespace(run=run, order=SimpleNamespace(step_at=lambda rows: 12))
    [came] = ordered(tmp_path, monkeypatch, lambda *arguments: instance)
    why = "the training loss rose from 4.2 to 7 and more by step 8"  # the same reason as live
    assert came == {"kind": "diverged", "reason": why, "seconds": trainable.training_seconds(run)}
    assert not run.stop_request.exists()


def test_a_trial_is_given_notice_once_as_it_is_seen_to_diverge(tmp_path: Path) -> None:
    run = Run(tmp_path)
    watch = trainable.DivergenceDetector(run)
    for update, loss in enumerate([*UNTAUGHT, 9.0, 8.0, 30.0, 12.0], 1):
        watch({"kind": "progress", "step": update, "loss": loss})
    assert (watch.reason, run.stop_request.exists()) == ("", False)
    watch({"kind": "progress", "step": 8, "loss": 7.0})
    assert run.stop_request.exists()
    run.stop_request.unlink()
    watch({"kind": "progress", "step": 9, "loss": 7.0})
    assert not run.stop_request.exists()
    assert watch.reason.endswith("by step 8")


@pytest.mark.parametrize("every_setting", [False, True])
@pytest.mark.parametrize(("arguments", "expected"), [({}, 1), ({"train.log_every": 7}, 7)])
def test_trials_log_every_update_unless_another_number_was_given_also_on_a_resume(
    arguments: dict[str, int], expected: int, every_setting: bool, tmp_path: Path
) -> None:
    """A resume that names no recipe reads the search's own configuration, where every setting is named."""
    selection = configured(tmp_path, **arguments)
    names = frozenset(config.flatten_config(selection) if every_setting else arguments)
    instance = SearchTask(config.to_document(selection), names, tmp_path, tmp_path).config_for({})
    assert instance.recipe.train.log_every == expected
    replayed = search.make_replay_config(instance, selection)
    assert replayed.recipe.train.log_every == selection.recipe.train.log_every
