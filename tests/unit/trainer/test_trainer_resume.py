"""Checkpoints: which are kept, and that a killed and resumed run is the undisturbed run, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rtrain.checkpoint.format import WrongRunError, checkpoint_path, list_steps, load_checkpoint
from rtrain.core.run_folder import Run
from rtrain.data.store.store import Store
from rtrain.models import builder
from rtrain.report import summary
from tests.unit.trainer import test_trainer
from tests.unit.trainer.test_step_workers import WORLDS, on_workers
from tests.unit.trainer.test_trainer import (
    TASK,
    UPDATES,
    Ran,
    fingerprint,
    names,
    scripted,
    start,
    update_name,
    weights_digest,
)

ground, straight = test_trainer.ground, test_trainer.straight  # fixtures


# --------------------------------------------------------------------------------------------------------- checkpoints


def test_the_best_checkpoint_is_restored_at_the_end(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, 0.1, 0.7, 0.6, 0.7, 0.2, 0.3)
    ran = start(ground, tmp_path, evaluate_every=1)
    assert ran.outcome is not None
    assert ran.outcome.best_step == 2  # of equals the first
    assert ran.outcome.scores["valid"] == {"accuracy": 0.7}
    assert ran.recorder.of("trained")[0]["best_step"] == 2
    assert ran.recorder.of("evaluated")[-1]["step"] == 2  # the test rows are answered by the best weights
    assert weights_digest(ran.network) == weights_of(ground, tmp_path, 2)
    assert weights_of(ground, tmp_path, 2) != weights_of(ground, tmp_path, 6)


def weights_of(ground: Path, run: Path, update: int) -> str:
    """Digest of the weights of a checkpoint."""
    store = Store(next((ground / ".tokens").iterdir()))
    network: torch.nn.Module = builder.build_network(ground / "encoder", TASK, store.manifest.labels, seed=99)
    load_checkpoint(checkpoint_path(run / "checkpoints", update), network)
    return weights_digest(network)


@pytest.mark.parametrize("kill", [0, 3, 5, *(pytest.param(kill, marks=pytest.mark.slow) for kill in (1, 2, 4))])
def test_a_killed_run_resumes_to_the_undisturbed_run_bit_for_bit(
    ground: Path, straight: tuple[Ran, Path], tmp_path: Path, kill: int
) -> None:
    undisturbed, run = straight
    killed = start(ground, tmp_path, save_every=1, kill=kill)
    assert killed.outcome is None
    resumed = start(ground, tmp_path, save_every=1)
    assert resumed.recorder.of("started")[0]["step"] == kill
    assert resumed.outcome == undisturbed.outcome
    assert weights_digest(resumed.network) == weights_digest(undisturbed.network)
    assert names(tmp_path) == names(run)
    assert fingerprint(tmp_path, UPDATES) == fingerprint(run, UPDATES)


RULES: dict[str, Any] = {
    "name": "radam",
    "schedule": "cosine",
    "lr_scaling": "sqrt",
    "lr_reference_batch_size": 76,  # 4 x 19: the learning rate is half of what it would be
    "beta2_scaling": "rows",
    "layerwise_lr_decay": 0.5,
}


def test_a_killed_run_by_other_rules_resumes_to_the_undisturbed_run_bit_for_bit(ground: Path, tmp_path: Path) -> None:
    undisturbed = start(ground, tmp_path / "straight", save_every=1, rules=RULES)
    assert undisturbed.recorder.of("started")[0]["lr"] == 2.5e-3
    # The sixth update is the first one that RAdam adapts.
    assert start(ground, tmp_path / "killed", save_every=1, kill=5, rules=RULES).outcome is None
    resumed = start(ground, tmp_path / "killed", save_every=1, rules=RULES)
    assert resumed.recorder.of("started")[0]["step"] == 5
    assert fingerprint(tmp_path / "killed", UPDATES) == fingerprint(tmp_path / "straight", UPDATES)


def test_each_rule_alone_changes_the_weights(ground: Path, tmp_path: Path) -> None:
    """After three updates, of which the third one is the first that a schedule changes."""
    ends = {weights_digest(start(ground, tmp_path / "none", until=3).network)}
    for name in RULES.keys() - {"lr_reference_batch_size"}:
        rule = {name: RULES[name], **({"lr_reference_batch_size": 76} if name.endswith("_scaling") else {})}
        ends.add(weights_digest(start(ground, tmp_path / name, rules=rule, until=3).network))
    assert len(ends) == 6


def test_updates_after_the_last_checkpoint_are_trained_again(
    ground: Path, straight: tuple[Ran, Path], tmp_path: Path
) -> None:
    undisturbed, run = straight
    start(ground, tmp_path, save_every=4, kill=5)  # checkpoints after 3 (evaluation) and 4
    resumed = start(ground, tmp_path, save_every=4)
    assert resumed.recorder.of("started")[0]["step"] == 4
    assert resumed.recorder.of("trained")[0]["rows_seen"] == 19 + (undisturbed_rows(ground) - 38)
    assert resumed.outcome == undisturbed.outcome
    assert fingerprint(tmp_path, UPDATES) == fingerprint(run, UPDATES)


def undisturbed_rows(ground: Path) -> int:
    return Store(next((ground / ".tokens").iterdir())).num_rows("train")


def test_a_run_without_any_sound_checkpoint_starts_anew(
    ground: Path, straight: tuple[Ran, Path], tmp_path: Path
) -> None:
    undisturbed, _ = straight
    start(ground, tmp_path, save_every=1, kill=1)
    (tmp_path / "checkpoints" / update_name(1) / "optim.safetensors").unlink()
    resumed = start(ground, tmp_path, save_every=1)
    assert resumed.recorder.of("started")[0]["step"] == 0
    assert resumed.outcome == undisturbed.outcome


def test_until_pauses_and_continuing_is_the_straight_run(
    ground: Path, straight: tuple[Ran, Path], tmp_path: Path
) -> None:
    undisturbed, run = straight
    paused = start(ground, tmp_path, save_every=1, until=3)
    assert paused.outcome is not None
    assert not paused.outcome.is_finished
    assert set(paused.outcome.scores) == {"valid"}
    trained = paused.recorder.of("trained")[0]
    assert (trained["steps"], trained["finished"], trained["rows_seen"]) == (3, False, undisturbed_rows(ground))
    assert [fields["split"] for fields in paused.recorder.of("evaluated")] == ["valid"]
    resumed = start(ground, tmp_path, save_every=1)
    assert resumed.outcome == undisturbed.outcome
    assert weights_digest(resumed.network) == weights_digest(undisturbed.network)
    assert fingerprint(tmp_path, UPDATES) == fingerprint(run, UPDATES)


def test_a_pause_before_the_first_evaluation_has_no_best_step_and_no_score(ground: Path, tmp_path: Path) -> None:
    paused = start(ground, tmp_path, evaluate_every=4, until=2)
    assert paused.outcome is not None
    assert (paused.outcome.best_step, paused.outcome.scores) == (None, {})
    trained = paused.recorder.of("trained")[0]
    assert trained["best_step"] is None
    Run(tmp_path).append_event("trained", **trained)
    run_summary = summary.summarize(Run(tmp_path))
    assert (run_summary["best_step"], run_summary["metrics"]["valid"]) == (None, None)


def test_a_pause_reads_no_best_weights_and_continues_from_the_newest(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, 0.9, 0.1)  # after update 2, and at the pause
    paused = start(ground, tmp_path, evaluate_every=2, until=3)
    assert weights_digest(paused.network) == weights_of(ground, tmp_path, 3)
    assert paused.recorder.of("trained")[0]["best_step"] == 2
    scripted(monkeypatch, 0.2, 0.3)
    resumed = start(ground, tmp_path, evaluate_every=2)
    assert resumed.recorder.of("started")[0]["step"] == 3
    assert [fields["step"] for fields in resumed.recorder.scores] == [4, 6]
    assert resumed.outcome is not None
    assert resumed.outcome.best_step == 2


@pytest.mark.parametrize(
    "changed",
    [{"rules": {"lr": 0.02}}, {"evaluate_every": 2}, {"global_batch_size": 20}],
    ids=["lr", "evaluate_every", "global_batch_size"],
)
def test_a_checkpoint_of_other_settings_is_refused(ground: Path, tmp_path: Path, changed: dict[str, Any]) -> None:
    start(ground, tmp_path, save_every=1, kill=3)
    with pytest.raises(WrongRunError):
        start(ground, tmp_path, save_every=1, **changed)
    assert list_steps(tmp_path / "checkpoints")[-1] == 3


# -------------------------------------------------------------------------------------------------------- more workers


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
    # Not its state: in a process that has run many other tests the loss on the validation rows is rounded otherwise.
    reference = fingerprint(run, UPDATES)
    assert all(
        (undisturbed[name] == reference[name]) == (world == 1) for name in ("model.safetensors", "optim.safetensors")
    )
