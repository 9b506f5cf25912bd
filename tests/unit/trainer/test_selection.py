"""The weights of the artifact: the score that selects them, the early end, kept and averaged checkpoints."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rtrain.checkpoint.format import checkpoint_path, load_checkpoint, read_state
from rtrain.core.errors import Problem
from rtrain.data.store.store import Store
from rtrain.metrics.operating_points import select_label
from rtrain.models import builder
from rtrain.trainer import selection
from tests.support.workers import joined, run
from tests.unit.checkpoint.test_remote_copy import claimed
from tests.unit.trainer import test_trainer
from tests.unit.trainer.test_trainer import (
    TASK,
    UPDATES,
    fingerprint,
    names,
    recipe_of,
    scripted,
    start,
    update_name,
    weights_digest,
)

ground = test_trainer.ground  # a fixture
EVERY: dict[str, Any] = {"evaluate_every": 1, "log_every": 1}


def store_of(ground: Path) -> Store:
    return Store(next((ground / ".tokens").iterdir()))


# ----------------------------------------------------------------------------------------------------------- best_by


@pytest.mark.parametrize("best_by", ["loss", "recall", "recall@precision"])
def test_the_weights_are_those_of_the_best_evaluation_by_that_score(ground: Path, tmp_path: Path, best_by: str) -> None:
    label = store_of(ground).manifest.labels[0]
    setting = {"recall": f"recall:{label}", "recall@precision": f"recall@precision:{label}=0.5"}.get(best_by, best_by)
    ran = start(ground, tmp_path, best_by=setting, **EVERY)
    evaluated = [event for event in ran.recorder.of("evaluated") if event["split"] == "valid"]
    name = "neg_loss" if best_by == "loss" else setting
    scores = [event["scores"][name] for event in evaluated]
    assert ran.outcome is not None
    best = max(range(UPDATES), key=lambda place: (scores[place], -evaluated[place]["loss"], -place))
    assert ran.outcome.best_step == best + 1
    assert ran.outcome.scores["valid"] == {name: scores[best]}
    assert ran.recorder.of("best")[0]["headline"] == name
    if best_by == "loss":
        assert scores == [-event["loss"] for event in evaluated]
        assert len(set(scores)) > 1
    else:
        store = store_of(ground)
        valid = ran.outcome.row_results["valid"], store.targets("valid")
        rows = select_label("classes", *valid, store.manifest.head, label)
        value = rows.score("recall") if best_by == "recall" else rows.score_at("recall", 0.5)
        assert value == pytest.approx(scores[best])


# ---------------------------------------------------------------------------------------------------------- patience


def test_a_run_without_a_better_evaluation_ends_early_and_is_finished(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, 0.2, 0.5, 0.4, 0.5 - 1e-9)
    ran = start(ground, tmp_path, patience=2, save_every=1, **EVERY)
    assert ran.outcome is not None
    assert (ran.outcome.is_finished, ran.outcome.best_step) == (True, 2)
    [stop] = ran.recorder.of("early_stop")
    assert stop == {"step": 4, "total_steps": UPDATES, "best_step": 2, "patience": 2}
    assert ran.recorder.of("trained")[0]["steps"] == 4
    assert ran.outcome.ledger == ran.recorder.of("progress")[-1]["ledger"]
    assert [event["step"] for event in ran.recorder.of("evaluated") if event["split"] == "test"] == [stop["best_step"]]


def test_an_early_end_is_the_same_after_a_kill_and_in_another_attempt(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, options = (tmp_path / "straight", tmp_path / "killed"), {"patience": 2, "keep_checkpoints": 9, **EVERY}
    scripted(monkeypatch, 0.6, 0.5, 0.4)
    straight = start(ground, runs[0], **options)
    scripted(monkeypatch, 0.6, 0.5)
    start(ground, runs[1], kill=2, **options)
    scripted(monkeypatch, 0.4)
    resumed = start(ground, runs[1], **options)
    assert straight.outcome is not None
    assert resumed.outcome is not None
    assert resumed.recorder.of("early_stop") == straight.recorder.of("early_stop")
    assert (resumed.outcome.ledger, resumed.outcome.best_step) == (straight.outcome.ledger, 1)
    assert fingerprint(runs[0], 3) == fingerprint(runs[1], 3)
    assert weights_digest(resumed.network) == weights_digest(straight.network)
    # Killed while it wrote its artifact: the next attempt trains nothing, and ends alike.
    again = start(ground, runs[1], **options)
    assert again.outcome is not None
    assert (again.outcome.is_finished, again.recorder.of("trained")[0]["rows_seen"]) == (True, 0)
    assert weights_digest(again.network) == weights_digest(straight.network)


def test_patience_and_the_score_change_the_recipe_digest_and_their_defaults_do_not(ground: Path) -> None:
    recipe = recipe_of(ground)
    assert recipe_of(ground, keep_best=3).recipe_digest() == recipe.recipe_digest()  # the files kept
    changes: list[dict[str, Any]] = [{"patience": 2}, {"best_by": "loss"}, {"average_best": True, "keep_best": 3}]
    changes.append({"average_best": True, "keep_best": 2})
    assert len({recipe.recipe_digest(), *(recipe_of(ground, **change).recipe_digest() for change in changes)}) == 5


# --------------------------------------------------------------------------------------------- kept and averaged ones


def mean_of(ground: Path, run: Path, steps: tuple[int, ...]) -> dict[str, torch.Tensor]:
    weights = []
    for step in steps:
        network = builder.build_network(ground / "encoder", TASK, store_of(ground).manifest.labels, seed=99)
        load_checkpoint(checkpoint_path(run / "checkpoints", step), network)
        weights.append({name: value.double() for name, value in network.state_dict().items()})
    return {name: torch.stack([part[name] for part in weights]).mean(dim=0) for name in weights[0]}


def test_the_best_checkpoints_are_kept_and_their_mean_survives_a_lost_disk(
    ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = f"file://{tmp_path / 'storage'}"
    options = {"keep_best": 3, "average_best": True, "keep_checkpoints": 1, **EVERY}
    scripted(monkeypatch, 0.7, 0.1, 0.6, 0.2, 0.65, 0.3, 0.8)
    ran = start(ground, tmp_path / "straight", **options)
    assert ran.outcome is not None
    assert (ran.outcome.best_step, ran.outcome.averaged_steps) == (1, (1, 5, 3))
    assert names(tmp_path / "straight") == [*map(update_name, (1, 3, 5, 6))]
    assert read_state(checkpoint_path(tmp_path / "straight" / "checkpoints", 6)).best_steps == {1, 3, 5}
    assert ran.outcome.scores["valid"] == {"accuracy": 0.8}  # of the mean
    averages = [event for event in ran.recorder.of("evaluated") if "calibration" in event]
    assert [event["calibration"] for event in averages] == [{"average_of": [1, 5, 3]}]
    expected = mean_of(ground, tmp_path / "straight", (1, 5, 3))
    for name, value in ran.network.state_dict().items():
        np.testing.assert_allclose(value.double().numpy(), expected[name].numpy(), rtol=1e-6, atol=1e-7)
    # The disk is lost before the last step: the storage has all that the mean needs.
    scripted(monkeypatch, 0.7, 0.1, 0.6, 0.2, 0.65)
    start(ground, tmp_path / "run", kill=5, replica=claimed(storage), **options)
    shutil.rmtree(tmp_path / "run")
    scripted(monkeypatch, 0.3, 0.8)
    resumed = start(ground, tmp_path / "run", replica=claimed(storage), **options)
    assert resumed.outcome is not None
    assert resumed.recorder.of("started")[0]["step"] == 5
    assert resumed.outcome.averaged_steps == (1, 5, 3)
    assert weights_digest(resumed.network) == weights_digest(ran.network)


# ------------------------------------------------------------------------------------------------------------- checks


def problems(ground: Path, settings: dict[str, Any], with_store: bool = True) -> list[Problem]:
    from rtrain import config

    recipe = config.load_config("intent", {"data.path": str(ground / "rows.csv"), **settings}).recipe
    return list(selection.check_selection(recipe, store_of(ground) if with_store else None))


def test_scores_and_labels_that_the_task_lacks_are_refused_with_those_it_has(ground: Path) -> None:
    label = store_of(ground).manifest.labels[0]
    settings = {
        "train.best_by": "recall:none",
        "metrics.operating_point": [{"label": label, "recall": 0.8}, {"label": f"{label}x", "recall": 0.8}],
        "gate.min_recall": {"nobody": 0.5, label: 0.5},
        "gate.min_precision": {"nothing": 0.5},
    }
    found = problems(ground, settings)
    assert [(problem.field, problem.value, problem.code) for problem in found] == [
        ("train.best_by", "none", "unknown_label"),
        ("metrics.operating_point", f"{label}x", "unknown_label"),
        ("gate.min_recall", "nobody", "unknown_label"),
        ("gate.min_precision", "nothing", "unknown_label"),
    ]
    assert all(problem.fix for problem in found)
    for best_by in ("accuracy", "macro_f1", "loss", f"precision:{label}", f"precision@recall:{label}=0.9"):
        assert problems(ground, {"train.best_by": best_by}) == []
    for has_store in (True, False):  # before the rows are read too
        [problem] = problems(ground, {"train.best_by": "bleu"}, has_store)
        assert (problem.code, "macro_f1" in problem.fix) == ("unknown_name", True)


def test_tasks_without_labels_of_rows_have_no_operating_point(ground: Path) -> None:
    settings = {"task": "regression", "train.best_by": "recall:a", "gate.min_recall": {"a": 0.5}}
    found = problems(ground, settings, with_store=False)
    assert {(problem.field, problem.code) for problem in found} == {
        ("train.best_by", "unsupported"),
        ("gate.min_recall", "unsupported"),
    }
    assert problems(ground, {"task": "regression", "train.best_by": "rmse"}, with_store=False) == []


# ------------------------------------------------------------------------------------------------------- two workers

WORKER_SETTINGS = {"best_by": "loss", "patience": 1, "keep_best": 2, "average_best": True, "evaluate_every": 1}


def _worker(rank: int, folder: Path) -> None:
    """A run that is killed in its third update and resumed: what each rank sees at its end."""
    joined(rank, 2, folder)
    options: dict[str, Any] = {"world": 2, "rank": rank, "workers": 2, "log_every": 1, **WORKER_SETTINGS}
    options["rules"] = {"lr": 0.3}  # so high that a later evaluation is worse
    for kill in (2, None):
        ran = start(folder / "ground", folder / "run", kill=kill, **options)
    assert ran.outcome is not None
    seen = [ran.outcome.best_step, *ran.outcome.averaged_steps, ran.outcome.ledger, weights_digest(ran.network)]
    (folder / f"{rank}.json").write_text(json.dumps([seen, ran.recorder.of("trained")[0]["steps"]]))
    dist.destroy_process_group()


@pytest.mark.slow
def test_all_workers_select_the_same_weights_and_end_at_the_same_step(ground: Path, tmp_path: Path) -> None:
    shutil.copytree(ground, tmp_path / "ground")
    run(_worker, (tmp_path,), 2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert len(first[0]) >= 4
