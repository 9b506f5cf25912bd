"""A search as an Optuna study: Optuna opens it and finds the same trials."""

from pathlib import Path
from typing import Any

import pytest

from rtrain import config
from rtrain.config import Config
from tune import space
from tune.history import History, replay_journal
from tune.report import optuna_export

K = "train.aggregation_frequency"
SPACE = {
    "optim.lr": {"low": 5e-5, "high": 1e-3, "log": True},
    K: [1, 2, 4],
    "optim.max_grad_norm": {"low": 0.5, "high": 2.0},
    "optim.name": ["adamw", "radam"],
}
CONFIG = config.load_config("intent", {"tune.space": SPACE})


def rung(number: int, rows: int, score: float) -> dict[str, Any]:
    return {"kind": "rung_result", "rung": number, "step": rows // 64, "rows": rows, "score": score}


def overrides(trial: int, point: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"kind": "created", "trial": trial, "settings": space.trial_overrides(CONFIG, point), **fields}


def ended(score: float, to_target: float | None = None) -> dict[str, Any]:
    end = {"step": 60, "rows": 3840, "score": score, "holdout_score": score - 0.01, "holdout_rows": 90}
    return {"kind": "finished", "seconds": 30.0, "seconds_to_target": to_target, **end}


EVENTS = [
    overrides(0, {}),
    {"trial": 0, **rung(0, 768, 0.5)},
    {"trial": 0, **rung(1, 1536, 0.6)},
    {"trial": 0, **ended(0.7, 12.5)},
    overrides(1, {"optim.lr": 1e-4, K: 1}, proposed_by="spread"),
    {"trial": 1, **rung(0, 768, 0.4)},
    overrides(2, {"optim.lr": 9e-4, K: 2}, proposed_by="gp"),
    {"kind": "failed", "trial": 2, "error": "out of memory", "seconds": 1.0},
    overrides(3, {"optim.lr": 8e-4, "optim.name": "radam"}, proposed_by="gp"),
    {"trial": 3, **rung(0, 768, 0.1)},
    {"kind": "diverged", "trial": 3, "reason": "its loss is infinite", "seconds": 1.0},
    # Outside of the space: the learning rate and k are, and null is not in a range.
    overrides(4, {"optim.lr": 1e-6, K: 8, "optim.max_grad_norm": None}, proposed_by="points"),
    overrides(5, {"optim.lr": 1e-4, K: 1}, proposed_by="seed", repeat_of=1, seed=7),
    {"trial": 5, **ended(0.65)},
]
HISTORY = replay_journal(EVENTS)


def opened(folder: Path, selection: Config = CONFIG, history: History = HISTORY) -> Any:
    """The study, as Optuna reads it."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    path = optuna_export.export_study(folder, selection, history)
    assert [entry.name for entry in folder.iterdir()] == [path.name] == ["optuna.journal"]
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(path)))
    [summary] = optuna.get_all_study_summaries(storage)
    assert summary.study_name == folder.name
    return optuna.load_study(study_name=summary.study_name, storage=storage)


def test_optuna_finds_the_trials_with_their_settings_rungs_and_ends(tmp_path: Path) -> None:
    study = opened(tmp_path)
    assert study.direction.name == "MAXIMIZE"
    recipe = {"optim.lr": 3e-4, K: 4, "optim.max_grad_norm": 1.0, "optim.name": "adamw"}
    assert [(trial.state.name, trial.params, trial.intermediate_values, trial.values) for trial in study.trials] == [
        ("COMPLETE", recipe, {768: 0.5, 1536: 0.6}, [0.7]),
        ("PRUNED", {**recipe, "optim.lr": 1e-4, K: 1}, {768: 0.4}, None),
        ("FAIL", {**recipe, "optim.lr": 9e-4, K: 2}, {}, None),
        ("FAIL", {**recipe, "optim.lr": 8e-4, "optim.name": "radam"}, {768: 0.1}, None),
        ("RUNNING", {"optim.lr": 1e-6, K: 8, "optim.name": "adamw"}, {}, None),
        ("COMPLETE", {**recipe, "optim.lr": 1e-4, K: 1}, {}, [0.65]),
    ]
    assert study.best_trial.number == 0
    distribution = study.trials[0].distributions["optim.lr"]
    assert (distribution.log, distribution.low) == (True, 1e-6)  # the trial outside is shown as well


@pytest.mark.parametrize(
    ("objective", "directions", "values"),
    [
        ({"tune.objective": "time_to_target", "tune.target": 0.6}, ["MINIMIZE"], {0: [12.5], 5: None}),
        ({"tune.objective": "pareto"}, ["MAXIMIZE", "MINIMIZE"], {0: [0.7, 30.0], 5: [0.65, 30.0]}),
    ],
)
def test_values_are_those_of_the_objective(
    tmp_path: Path, objective: dict[str, Any], directions: list[str], values: dict[int, list[float] | None]
) -> None:
    """Trial 5 finished without reaching the target: it has no time."""
    study = opened(tmp_path, config.with_overrides(CONFIG, objective))
    assert [direction.name for direction in study.directions] == directions
    assert {number: study.trials[number].values for number in values} == values
    assert study.trials[5].state.name == ("PRUNED" if values[5] is None else "COMPLETE")


def test_it_is_written_anew_each_time_also_over_a_torn_one(tmp_path: Path) -> None:
    assert len(opened(tmp_path, history=replay_journal(EVENTS[:6])).trials) == 2
    path = tmp_path / "optuna.journal"
    path.write_bytes(path.read_bytes()[:-20])
    study = opened(tmp_path)
    assert len(study.trials) == 6
    study.tell(study.ask(), 0.9)  # Optuna can continue the study
    assert len(opened(tmp_path).trials) == 6
