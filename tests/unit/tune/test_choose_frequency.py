"""Choice of the aggregation frequency: length of the calibration, the decision, and a real calibration."""

import json
from pathlib import Path
from typing import Any

import pytest

from rtrain import config as configuration
from rtrain.core import events
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.data.order import RowOrder
from tests.support import trained
from tests.support.tiny import make_encoder
from tests.unit.planning.test_frequency_model import LOG
from tune import choose_frequency


@pytest.mark.parametrize(
    ("rows", "k", "expected"),
    [
        (5120, 4, 22),
        (3840, 4, 16),
        (3808, 4, None),
        (5568, 2, 16),
        (5440, 2, None),
        (5984, 1, 8),
        (5920, 1, None),
        (100_000, 4, 50),
    ],
)
def test_a_pilot_is_long_enough_to_measure_and_short_beside_a_run(rows: int, k: int, expected: int | None) -> None:
    """With 5 updates of another frequency: of one pass each, or of four beside a pilot of fewer."""
    assert choose_frequency.calibration_steps(RowOrder("digest", rows, 32, 1, 0), k) == expected


@pytest.mark.parametrize(
    ("scaling", "k", "expected"),
    [
        ("linear", 4, {}),
        ("linear", 1, {"optim.lr_scaling": "linear", "optim.lr_reference_batch_size": 64}),
        (
            *("sqrt", 1),
            {"optim.lr_scaling": "sqrt", "optim.lr_reference_batch_size": 64, "optim.beta2_scaling": "rows"},
        ),
    ],
)
def test_the_learning_rate_is_carried_as_a_search_carries_it(scaling: str, k: int, expected: dict[str, Any]) -> None:
    training = {"train.workers": 2, "train.micro_batch_size": 8, "train.aggregation_frequency": 4}
    config = configuration.load_config("intent", {**training, "tune.lr_scaling": scaling})
    frequency = {"train.aggregation_frequency": k, "train.global_batch_size": None}
    assert choose_frequency.frequency_overrides(config, k) == {**frequency, **expected}


def test_a_pilot_leaves_no_copies_under_the_name_that_every_pilot_has() -> None:
    """The next one would be refused: the storage holds a run of that name already."""
    config = configuration.load_config("intent", {"cluster.storage": "file:///copies"})
    result = choose_frequency.calibration_config(config, 4)
    assert (result.deploy.cluster.storage, result.recipe.train.aggregation_frequency) == (None, 4)


def test_a_pilot_and_updates_beside_it_decide(tmp_path: Path) -> None:
    encoder = {"model.name": str(make_encoder(tmp_path / "encoder")), "train.workers": 2}
    config, runs = configuration.load_config("intent", encoder), list[Run]()
    clock = [event | {"seconds": {"train": 2.5}, "steps": 5} if event["kind"] == "trained" else event for event in LOG]
    for k, log in ((4, LOG), (1, clock)):
        runs.append(run := Run(tmp_path / f"run-{k}"))
        run.folder.mkdir()
        run.config.write_text(configuration.to_yaml(choose_frequency.calibration_config(config, k)))
        for event in log:
            fields = {key: value for key, value in event.items() if key != "kind"}
            events.append_event(run.folder, event["kind"], **fields)
    result = choose_frequency.make_decision(config, *runs)
    assert [item["aggregation_frequency"] for item in result["options"]] == [1, 2, 4, 8]
    [best] = [item for item in result["options"] if item["aggregation_frequency"] == result["aggregation_frequency"]]
    assert result["settings"] == best["settings"]
    # As a search carries it: by the root of the rows.
    rates = [item["lr"] for item in result["options"]]
    assert rates == pytest.approx([rates[0] * k**0.5 for k in (1, 2, 4, 8)])


DOCUMENT: dict[str, Any] = {
    "noise_scale": {"rows": 200.0, "low": 150.0, "high": None, "measurements": 3},
    "calibration": {"steps": 24, "global_batch_size": 64},
    "options": [
        {
            **{"aggregation_frequency": 2, "global_batch_size": 32, "step_s": 0.25, "lr": 2e-4},
            **{"relative_time": 1.0, "relative_time_low": 1.0, "relative_time_high": None},
        }
    ],
    "aggregation_frequency": 2,
    "settings": {"train.aggregation_frequency": 2, "train.global_batch_size": None},
}


def test_a_decision_ends_with_what_to_write() -> None:
    last = choose_frequency.format_decision(DOCUMENT)[-1]
    assert "--set train.aggregation_frequency=2 --set train.global_batch_size=null" in last


@pytest.mark.slow
@pytest.mark.ray
def test_a_pilot_is_trained_and_decides(ray_session: Path) -> None:
    """40 epochs of some 200 rows: the updates of both runs are less than a seventh of them."""
    selection = {"train.workers": 2, "train.epochs": 40, "train.micro_batch_size": 2, "train.global_batch_size": None}
    config = trained.settings(ray_session / "frequency", **selection)
    folder, seen = ray_session / "frequency" / "out", list[dict[str, Any]]()
    folder.mkdir()
    result = choose_frequency.choose_frequency(config, folder, seen.append)
    assert result == json.loads((folder / choose_frequency.DECISION_FILE).read_text())
    assert [path.name for path in folder.iterdir()] == [choose_frequency.DECISION_FILE]
    assert [item["aggregation_frequency"] for item in result["options"]] == [1, 2, 4, 8]
    initial, other = (event for event in seen if event["kind"] == "started")
    ended, timed = (event for event in seen if event["kind"] == "trained")
    assert (initial["global_batch_size"], other["global_batch_size"]) == (16, 4)
    assert choose_frequency.MIN_CALIBRATION_STEPS <= ended["steps"] == result["calibration"]["steps"]
    assert timed["steps"] == choose_frequency.TIMING_STEPS
    assert ended["rows_seen"] + timed["rows_seen"] <= 0.15 * 16 * initial["total_steps"]
    assert result["noise_scale"]["measurements"] == ended["steps"] // 2
    configuration.with_overrides(config, result["settings"])


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_that_is_too_short_for_a_pilot_is_refused(ray_session: Path) -> None:
    config = trained.settings(ray_session / "short", **{"train.workers": 2, "train.global_batch_size": None})
    folder = ray_session / "short" / "out"
    folder.mkdir()
    with pytest.raises(UserError) as error:
        choose_frequency.choose_frequency(config, folder, lambda event: None)
    assert error.value.code == "too_few_rows"
    assert not any(folder.iterdir())
