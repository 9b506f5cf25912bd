"""Damaged checkpoints and failed saves: what a run says, keeps and does next, on one worker and on more."""

import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rtrain.checkpoint import format as checkpoint_format
from rtrain.checkpoint.saver import CheckpointSaver, CheckpointWriteError
from rtrain.data.store.store import Store
from rtrain.parallel.ddp import DDPStrategy
from rtrain.trainer import evaluate
from tests.unit.checkpoint.test_saver import full
from tests.unit.trainer import test_trainer
from tests.unit.trainer.test_step_workers import WORLDS, on_workers
from tests.unit.trainer.test_trainer import UPDATES, fingerprint, names, scripted, start, update_name, weights_digest
from tests.unit.trainer.test_trainer_resume import weights_of

ground = test_trainer.ground  # fixture


# ------------------------------------------------------------------------------------------------- damaged checkpoints


def test_a_damaged_newest_checkpoint_is_set_aside_and_the_one_before_is_used(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete, broken = tmp_path / "whole", tmp_path / "broken"
    scripted(monkeypatch, 0.6, 0.5, 0.4)
    undisturbed = start(ground, complete, evaluate_every=2)
    scripted(monkeypatch, 0.6, 0.5)
    start(ground, broken, evaluate_every=2, kill=4)
    assert names(broken) == [update_name(2), update_name(4)]
    weights = broken / "checkpoints" / update_name(4) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    scripted(monkeypatch, 0.5, 0.4)
    resumed = start(ground, broken, evaluate_every=2)
    assert resumed.recorder.of("started")[0]["step"] == 2
    assert resumed.outcome == undisturbed.outcome
    assert fingerprint(broken, UPDATES) == fingerprint(complete, UPDATES)
    [aside] = (broken / "checkpoints" / "quarantine").iterdir()
    assert aside.name.startswith(update_name(4) + "-")
    assert (aside / "model.safetensors").read_bytes() == bytes(content)


def test_a_damaged_best_checkpoint_is_never_loaded_and_the_best_sought_anew(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, 0.9, 0.1)
    start(ground, tmp_path, evaluate_every=2, kill=4)
    assert names(tmp_path) == [update_name(2), update_name(4)]
    weights = tmp_path / "checkpoints" / update_name(2) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    scripted(monkeypatch, 0.3)
    resumed = start(ground, tmp_path, evaluate_every=2)
    assert resumed.recorder.of("started")[0]["step"] == 4
    assert resumed.outcome is not None
    assert (resumed.outcome.best_step, resumed.outcome.scores["valid"]) == (6, {"accuracy": 0.3})
    assert resumed.recorder.of("best_lost") == [{"step": 2}]
    assert names(tmp_path) == ["quarantine", update_name(4), update_name(6)]
    assert weights_digest(resumed.network) == weights_of(ground, tmp_path, 6)


def damaging(run: Path, *accuracies: float, after: int) -> Any:
    """A `score_rows` that gives these accuracies, and damages the checkpoint after update 2 when `after` are given."""
    given: list[float] = []

    def score_rows(exchange: DDPStrategy, task: Any, store: Store, split: str, *_: Any) -> dict[str, float]:
        if split == "test":
            return {"accuracy": 0.25}
        given.append(accuracies[len(given)])
        if len(given) == after and exchange.replica_rank == 0:
            weights = run / "checkpoints" / update_name(2) / "model.safetensors"
            while not weights.is_file():  # it is written in the background
                time.sleep(0.01)
            flip(weights)
        return {"accuracy": given[-1]}

    return score_rows


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_best_checkpoint_that_is_damaged_in_mid_run_is_never_loaded(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "score_rows", damaging(tmp_path, 0.9, 0.1, 0.2, 0.3, after=3))
    ran = start(ground, tmp_path, evaluate_every=2)
    assert ran.outcome is not None
    assert ran.recorder.of("best_lost") == [{"step": 2}]
    # The weights as they stand, with their own score.
    assert weights_digest(ran.network) == weights_of(ground, tmp_path, 6)
    assert (ran.outcome.best_step, ran.outcome.scores["valid"]) == (6, {"accuracy": 0.3})
    assert ran.recorder.of("trained")[0]["best_step"] == 6
    assert [(actual["split"], actual["step"]) for actual in ran.recorder.of("evaluated")][-2:] == [
        ("valid", 6),
        ("test", 6),
    ]
    assert names(tmp_path) == ["quarantine", update_name(4), update_name(6)]


# ------------------------------------------------------------------------------------------------------ the background


def failing(saver: CheckpointSaver, **_: Any) -> None:
    raise CheckpointWriteError(f"saving {saver.folder} failed: disk full")


def test_a_failed_save_ends_the_run_with_its_own_error(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(ground, tmp_path, save_every=1, until=2)
    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(CheckpointWriteError):
        start(ground, tmp_path, save_every=1)
    monkeypatch.undo()
    resumed = start(ground, tmp_path, save_every=1)
    assert resumed.recorder.of("started")[0]["step"] == 2


# -------------------------------------------------------------------------------------------------------- more workers


def faults_on_workers(ground: Path, world: int, rank: int) -> dict[str, Any]:
    """For worker processes: a run that loses its best checkpoint, one whose save fails, one that is refused."""
    run = ground / f"{world}-lost"
    with mock.patch.object(evaluate, "score_rows", damaging(run, 0.9, 0.1, 0.2, 0.3, after=3)):
        lost = start(ground, run, evaluate_every=2, world=world, rank=rank)
    assert lost.outcome is not None
    errors = []
    for target, run in ((CheckpointSaver, ground / f"{world}-full"), (checkpoint_format, ground / f"{world}-lost")):
        name, fault = ("flush", failing) if target is CheckpointSaver else ("find_latest", refusing)
        with mock.patch.object(target, name, fault):
            try:
                start(ground, run, world=world, rank=rank)
            except Exception as error:
                errors.append(type(error).__name__)
    return {
        "best": lost.outcome.best_step,
        "score": lost.outcome.scores["valid"],
        "events": lost.recorder.of("best_lost"),
        "weights": weights_digest(lost.network),
        "errors": errors,
    }


def refusing(*_: Any) -> int:
    raise checkpoint_format.UnsupportedVersionError("of another version")


@pytest.mark.parametrize("world", WORLDS)
def test_workers_agree_that_the_best_is_lost_and_none_waits_for_a_failed_save(world: int) -> None:
    results, _ = on_workers()
    reports = [results[world, rank]["faults"] for rank in range(world)]
    assert {(report["best"], report["score"]["accuracy"]) for report in reports} == {(6, 0.3)}
    assert [report["events"] for report in reports] == [[{"step": 2}]] * world
    assert len({report["weights"] for report in reports}) == 1
    assert reports[0]["errors"] == ["CheckpointWriteError", "UnsupportedVersionError"]
    assert [report["errors"] for report in reports[1:]] == [["OtherRankFailed", "OtherRankFailed"]] * (world - 1)
