"""Checkpoints: which are kept, and that a killed and resumed run is the undisturbed run, bit for bit."""

import json
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from rtrain import manifest
from rtrain.data.order import Order
from rtrain.data.store import Store
from rtrain.training import checkpoint, loop, model
from rtrain.training.exchange import Exchange
from rtrain.training.saver import Saver, Unwritten
from tests import test_loop
from tests.test_loop import (
    TASK,
    UPDATES,
    Ran,
    Recorder,
    fingerprint,
    names,
    scripted,
    start,
    update_name,
    weights_digest,
)
from tests.test_saver import full
from tests.test_step_workers import WORLDS, on_workers

ground, straight = test_loop.ground, test_loop.straight  # fixtures


# --------------------------------------------------------------------------------------------------------- checkpoints


def test_the_best_checkpoint_is_restored_at_the_end(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, 0.1, 0.7, 0.6, 0.7, 0.2, 0.3)
    ran = start(ground, tmp_path, evaluate_every=1)
    assert ran.outcome is not None
    assert ran.outcome.best_update == 2  # of equals the first
    assert ran.outcome.scores["valid"] == {"accuracy": 0.7}
    assert ran.recorder.of("trained")[0]["best_update"] == 2
    assert ran.recorder.of("evaluated")[-1]["update"] == 2  # the test rows are answered by the best weights
    assert weights_digest(ran.network) == weights_of(ground, tmp_path, 2)
    assert weights_of(ground, tmp_path, 2) != weights_of(ground, tmp_path, 6)


def weights_of(ground: Path, run: Path, update: int) -> str:
    """Digest of the weights of a checkpoint."""
    store = Store(next((ground / ".tokens").iterdir()))
    network: torch.nn.Module = model.build(ground / "encoder", TASK, store.manifest.labels, seed=99)
    checkpoint.load(checkpoint.path_of(run / "checkpoints", update), network)
    return weights_digest(network)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every checkpoint is on the disk before the next update."""
    whole = Saver.save

    def save(saver: Saver, *rest: Any) -> None:
        whole(saver, *rest)
        saver.flush()

    monkeypatch.setattr(Saver, "save", save)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (1, [[1], [2], [2, 3], [4], [4, 5], [4, 6]]),
        (2, [[1], [1, 2], [2, 3], [2, 3, 4], [4, 5], [4, 5, 6]]),  # 2 is the best as long as a resume from 3 may be
        (9, [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]]),
    ],
)
def test_the_newest_checkpoints_and_the_best_are_kept(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int, kept: list[list[int]]
) -> None:
    scripted(monkeypatch, 0.1, 0.7, 0.6)  # after updates 2, 4 and 6
    ran = start(ground, tmp_path, evaluate_every=2, save_every=1, keep=keep)
    assert ran.folders == [[], *([update_name(update) for update in updates] for updates in kept)]


@pytest.mark.usefixtures("at_once")
def test_without_save_every_checkpoints_come_with_evaluations(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, 0.9, 0.5)
    ran = start(ground, tmp_path)
    first, last = update_name(3), update_name(6)
    assert ran.folders == [[], [], [], [first], [first], [first], [first, last]]


@pytest.mark.parametrize("kill", range(UPDATES))
def test_a_killed_run_resumes_to_the_undisturbed_run_bit_for_bit(
    ground: Path, straight: tuple[Ran, Path], tmp_path: Path, kill: int
) -> None:
    undisturbed, run = straight
    killed = start(ground, tmp_path, save_every=1, kill=kill)
    assert killed.outcome is None
    resumed = start(ground, tmp_path, save_every=1)
    assert resumed.recorder.of("started")[0]["update"] == kill
    assert resumed.outcome == undisturbed.outcome
    assert weights_digest(resumed.network) == weights_digest(undisturbed.network)
    assert names(tmp_path) == names(run)
    assert fingerprint(tmp_path, UPDATES) == fingerprint(run, UPDATES)


def test_updates_after_the_last_checkpoint_are_trained_again(
    ground: Path, straight: tuple[Ran, Path], tmp_path: Path
) -> None:
    undisturbed, run = straight
    start(ground, tmp_path, save_every=4, kill=5)  # checkpoints after 3 (evaluation) and 4
    resumed = start(ground, tmp_path, save_every=4)
    assert resumed.recorder.of("started")[0]["update"] == 4
    assert resumed.recorder.of("trained")[0]["rows_seen"] == 19 + (undisturbed_rows(ground) - 38)
    assert resumed.outcome == undisturbed.outcome
    assert fingerprint(tmp_path, UPDATES) == fingerprint(run, UPDATES)


def undisturbed_rows(ground: Path) -> int:
    return Store(next((ground / ".tokens").iterdir())).rows("train")


def test_a_run_that_is_killed_at_every_update_still_ends_the_same(
    ground: Path, straight: tuple[Ran, Path], tmp_path: Path
) -> None:
    undisturbed, run = straight
    for kill in range(1, UPDATES):
        start(ground, tmp_path, save_every=1, kill=kill)
    resumed = start(ground, tmp_path, save_every=1)
    assert resumed.outcome == undisturbed.outcome
    assert fingerprint(tmp_path, UPDATES) == fingerprint(run, UPDATES)


def test_a_damaged_newest_checkpoint_is_set_aside_and_the_one_before_is_used(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    scripted(monkeypatch, 0.6, 0.5, 0.4)
    undisturbed = start(ground, whole, evaluate_every=2)
    scripted(monkeypatch, 0.6, 0.5)
    start(ground, broken, evaluate_every=2, kill=4)
    assert names(broken) == [update_name(2), update_name(4)]
    weights = broken / "checkpoints" / update_name(4) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    scripted(monkeypatch, 0.5, 0.4)
    resumed = start(ground, broken, evaluate_every=2)
    assert resumed.recorder.of("started")[0]["update"] == 2
    assert resumed.outcome == undisturbed.outcome
    assert fingerprint(broken, UPDATES) == fingerprint(whole, UPDATES)
    [aside] = (broken / "checkpoints" / "damaged").iterdir()
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
    assert resumed.recorder.of("started")[0]["update"] == 4
    assert resumed.outcome is not None
    assert (resumed.outcome.best_update, resumed.outcome.scores["valid"]) == (6, {"accuracy": 0.3})
    assert resumed.recorder.of("best_lost") == [{"update": 2}]
    assert names(tmp_path) == ["damaged", update_name(4), update_name(6)]
    assert weights_digest(resumed.network) == weights_of(ground, tmp_path, 6)


def damaging(run: Path, *accuracies: float, after: int) -> Any:
    """An `evaluate` that gives these accuracies, and damages the checkpoint after update 2 when `after` are given."""
    given: list[float] = []

    def evaluate(exchange: Exchange, task: Any, store: Store, split: str, **_: Any) -> dict[str, float]:
        if split == "test":
            return {"accuracy": 0.25}
        given.append(accuracies[len(given)])
        if len(given) == after and exchange.rank == 0:
            flip(run / "checkpoints" / update_name(2) / "model.safetensors")
        return {"accuracy": given[-1]}

    return evaluate


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_best_checkpoint_that_is_damaged_in_mid_run_is_never_loaded(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "evaluate", damaging(tmp_path, 0.9, 0.1, 0.2, 0.3, after=3))
    ran = start(ground, tmp_path, evaluate_every=2)
    assert ran.outcome is not None
    assert ran.recorder.of("best_lost") == [{"update": 2}]
    # The weights as they stand, with their own score.
    assert weights_digest(ran.network) == weights_of(ground, tmp_path, 6)
    assert (ran.outcome.best_update, ran.outcome.scores["valid"]) == (6, {"accuracy": 0.3})
    assert ran.recorder.of("trained")[0]["best_update"] == 6
    assert [(found["split"], found["update"]) for found in ran.recorder.of("evaluated")][-2:] == [
        ("valid", 6),
        ("test", 6),
    ]
    assert names(tmp_path) == ["damaged", update_name(4), update_name(6)]


def test_a_pause_without_its_best_checkpoint_goes_on_and_seeks_it_anew(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "evaluate", damaging(tmp_path, 0.9, 0.1, after=2))
    paused = start(ground, tmp_path, evaluate_every=2, until=4)
    assert paused.outcome is not None
    assert (paused.outcome.best_update, paused.recorder.of("best_lost")) == (-1, [{"update": 2}])
    monkeypatch.setattr(loop, "evaluate", damaging(tmp_path, 0.4, after=9))
    resumed = start(ground, tmp_path, evaluate_every=2)
    assert resumed.recorder.of("best_lost") == [{"update": 2}]
    assert resumed.outcome is not None
    assert (resumed.outcome.best_update, resumed.outcome.scores["valid"]) == (6, {"accuracy": 0.4})


# ------------------------------------------------------------------------------------------------------ the background


def failing(saver: Saver, *_: Any) -> None:
    raise Unwritten(f"saving {saver.folder} failed: disk full")


def test_a_failed_save_ends_the_run_with_its_own_error(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(ground, tmp_path, save_every=1, until=2)
    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(Unwritten, match=r"saving .*update-00000003 failed: .*No space left"):
        start(ground, tmp_path, save_every=1)
    monkeypatch.undo()
    resumed = start(ground, tmp_path, save_every=1)
    assert resumed.recorder.of("started")[0]["update"] == 2


def test_a_failed_last_save_ends_the_run_too(ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(Unwritten, match="update-00000006 failed"):
        start(ground, tmp_path, evaluate_every=100)


def test_a_run_has_ended_only_when_its_last_checkpoint_is_on_the_disk(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, save, event = [], checkpoint._save_tensors, Recorder.event

    def slow(*rest: Any) -> None:
        time.sleep(0.2)
        save(*rest)

    def seen(recorder: Recorder, kind: str, **fields: Any) -> None:
        if kind == "trained":
            found.append(names(tmp_path))
        event(recorder, kind, **fields)

    monkeypatch.setattr(checkpoint, "_save_tensors", slow)
    monkeypatch.setattr(Recorder, "event", seen)
    start(ground, tmp_path, evaluate_every=100)
    assert found == [[update_name(6)]]


def test_what_a_killed_save_left_is_removed_at_the_next_start(ground: Path, tmp_path: Path) -> None:
    draft = tmp_path / "checkpoints" / ".update-00000003.0123abcd"
    draft.mkdir(parents=True)
    (draft / "model.safetensors").write_bytes(b"half")
    start(ground, tmp_path, kill=0)
    assert names(tmp_path) == []


def test_another_run_s_checkpoints_are_not_taken_up(ground: Path, tmp_path: Path) -> None:
    start(ground, tmp_path / "other", save_every=1, kill=2, rows_per_update=20)
    other = start(ground, tmp_path / "other", kill=2, rows_per_update=20)
    assert other.recorder.of("started")[0]["update"] == 2
    own = start(ground, tmp_path / "other", kill=0)
    assert own.recorder.of("started")[0]["update"] == 0
    assert names(tmp_path / "other") == ["damaged"]


def test_another_version_s_checkpoint_stops_the_start(ground: Path, tmp_path: Path) -> None:
    start(ground, tmp_path, save_every=1, kill=1)
    path = tmp_path / "checkpoints" / update_name(1)
    text = (path / "state.json").read_text().replace('"schema_version": 2', '"schema_version": 7')
    (path / "state.json").write_text(text)
    (path / "MANIFEST.json").unlink()
    manifest.write(path)
    with pytest.raises(checkpoint.OtherVersion, match="checkpoint format 7; this one reads 2"):
        start(ground, tmp_path)
    assert names(tmp_path) == [update_name(1)]


def test_a_run_without_any_sound_checkpoint_starts_anew(
    ground: Path, straight: tuple[Ran, Path], tmp_path: Path
) -> None:
    undisturbed, _ = straight
    start(ground, tmp_path, save_every=1, kill=1)
    (tmp_path / "checkpoints" / update_name(1) / "optim.safetensors").unlink()
    resumed = start(ground, tmp_path, save_every=1)
    assert resumed.recorder.of("started")[0]["update"] == 0
    assert resumed.outcome == undisturbed.outcome


def test_until_pauses_and_continuing_is_the_straight_run(
    ground: Path, straight: tuple[Ran, Path], tmp_path: Path
) -> None:
    undisturbed, run = straight
    paused = start(ground, tmp_path, save_every=1, until=3)
    assert paused.outcome is not None
    assert not paused.outcome.finished
    assert set(paused.outcome.scores) == {"valid"}
    assert paused.recorder.of("trained")[0] | {"seconds": {}} == {
        "updates": 3,
        "best_update": 3,
        "order_digest": paused.outcome.ledger,
        "rows_seen": undisturbed_rows(ground),
        "real_tokens": undisturbed.recorder.of("trained")[0]["real_tokens"] // 2,
        "padded_tokens": paused.recorder.of("trained")[0]["padded_tokens"],
        "passes_per_update": undisturbed.recorder.of("trained")[0]["passes_per_update"],
        "seconds": {},
        "finished": False,
    }
    assert [fields["split"] for fields in paused.recorder.of("evaluated")] == ["valid"]
    resumed = start(ground, tmp_path, save_every=1)
    assert resumed.outcome == undisturbed.outcome
    assert weights_digest(resumed.network) == weights_digest(undisturbed.network)
    assert fingerprint(tmp_path, UPDATES) == fingerprint(run, UPDATES)


def test_a_pause_holds_the_best_weights_but_continues_from_the_newest(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, 0.9, 0.1)  # after update 2, and at the pause
    paused = start(ground, tmp_path, evaluate_every=2, until=3)
    assert weights_digest(paused.network) == weights_of(ground, tmp_path, 2)
    scripted(monkeypatch, 0.2, 0.3)
    resumed = start(ground, tmp_path, evaluate_every=2)
    assert resumed.recorder.of("started")[0]["update"] == 3
    assert [fields["update"] for fields in resumed.recorder.scores] == [4, 6]
    assert resumed.outcome is not None
    assert resumed.outcome.best_update == 2


def test_a_finished_run_that_starts_again_trains_nothing(
    ground: Path, straight: tuple[Ran, Path], tmp_path: Path
) -> None:
    undisturbed, _ = straight
    start(ground, tmp_path, save_every=1)
    before = fingerprint(tmp_path, UPDATES)
    again = start(ground, tmp_path, save_every=1)
    assert again.outcome == undisturbed.outcome
    assert weights_digest(again.network) == weights_digest(undisturbed.network)
    assert again.recorder.of("trained")[0]["rows_seen"] == 0
    assert fingerprint(tmp_path, UPDATES) == before


def test_the_state_in_a_checkpoint(ground: Path, straight: tuple[Ran, Path]) -> None:
    ran, run = straight
    assert ran.outcome is not None
    store = Store(next((ground / ".tokens").iterdir()))
    state = json.loads((run / "checkpoints" / update_name(UPDATES) / "state.json").read_text())
    assert state == {
        "update": UPDATES,
        "ledger": ran.outcome.ledger,
        "best_update": ran.outcome.best_update,
        "best_score": ran.outcome.scores["valid"]["accuracy"],
        "run": loop.identity(Order(store.manifest.digest, store.rows("train"), 19, 2, 3)),
        "schema_version": 2,
    }


# -------------------------------------------------------------------------------------------------------- more workers


def faults_on_workers(ground: Path, world: int, rank: int) -> dict[str, Any]:
    """For worker processes: a run that loses its best checkpoint, one whose save fails, one that is refused."""
    run = ground / f"{world}-lost"
    with mock.patch.object(loop, "evaluate", damaging(run, 0.9, 0.1, 0.2, 0.3, after=3)):
        lost = start(ground, run, evaluate_every=2, world=world, rank=rank)
    assert lost.outcome is not None
    errors = []
    for target, run in ((Saver, ground / f"{world}-full"), (checkpoint, ground / f"{world}-lost")):
        name, fault = ("save", failing) if target is Saver else ("select", refusing)
        with mock.patch.object(target, name, fault):
            try:
                start(ground, run, world=world, rank=rank)
            except Exception as error:
                errors.append(type(error).__name__)
    return {
        "best": lost.outcome.best_update,
        "score": lost.outcome.scores["valid"],
        "events": lost.recorder.of("best_lost"),
        "weights": weights_digest(lost.network),
        "errors": errors,
    }


def refusing(*_: Any) -> int:
    raise checkpoint.OtherVersion("of another version")


@pytest.mark.parametrize("world", WORLDS)
def test_workers_agree_that_the_best_is_lost_and_none_waits_for_a_failed_save(world: int) -> None:
    results, _ = on_workers()
    reports = [results[world, rank]["faults"] for rank in range(world)]
    assert {(report["best"], report["score"]["accuracy"]) for report in reports} == {(6, 0.3)}
    assert [report["events"] for report in reports] == [[{"update": 2}]] * world
    assert len({report["weights"] for report in reports}) == 1
    assert reports[0]["errors"] == ["Unwritten", "OtherVersion"]
    assert [report["errors"] for report in reports[1:]] == [["RuntimeError", "RuntimeError"]] * (world - 1)


@pytest.mark.parametrize("world", WORLDS)
def test_killed_and_resumed_workers_end_bit_for_bit(world: int, ground: Path, straight: tuple[Ran, Path]) -> None:
    results, _ = on_workers()
    reports = [results[world, rank]["loop"] for rank in range(world)]
    undisturbed, resumed = reports[0]["files"]
    assert undisturbed == resumed
    assert {report["from"] for report in reports} == {2}
    assert len({report["weights"] for report in reports}) == 1
    ran, run = straight
    assert ran.outcome is not None
    assert {report["ledger"] for report in reports} == {ran.outcome.ledger}  # the same rows on any number of workers
    assert (undisturbed == fingerprint(run, UPDATES)) == (world == 1)
