"""Which aggregation frequency to take: how long a pilot is, what it says, and one by the real path."""

import json
from pathlib import Path
from typing import Any

import pytest

from rtrain import config as configuration
from rtrain.core import events
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.data.order import Order
from tests import trained
from tests.test_forecast_choose_k import LOG
from tests.tiny import make_encoder
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
    assert choose_frequency.updates(Order("digest", rows, 32, 1, 0), k) == expected


def test_the_learning_rate_is_carried_as_a_search_carries_it() -> None:
    given = {"train.workers": 2, "train.micro_batch": 8, "train.aggregation_frequency": 4}
    linear = configuration.load("intent", {**given, "tune.lr_scaling": "linear"})
    assert choose_frequency.settings(linear, 4) == {"train.aggregation_frequency": 4, "train.rows_per_update": None}
    carried = {"optim.lr_scaling": "linear", "optim.lr_rows": 64}
    assert choose_frequency.settings(linear, 1) == {
        "train.aggregation_frequency": 1,
        "train.rows_per_update": None,
        **carried,
    }
    root = choose_frequency.settings(configuration.load("intent", given), 1)
    assert (root["optim.lr_scaling"], root["optim.beta2_scaling"]) == ("sqrt", "rows")


def test_a_pilot_leaves_no_copies_under_the_name_that_every_pilot_has() -> None:
    """The next one would be refused: the storage holds a run of that name already."""
    found = choose_frequency.piloted(configuration.load("intent", {"cluster.storage": "file:///copies"}), 4)
    assert (found.deploy.cluster.storage, found.recipe.train.aggregation_frequency) == (None, 4)


def test_a_pilot_and_updates_beside_it_decide(tmp_path: Path) -> None:
    config = configuration.load("intent", {"model.name": str(make_encoder(tmp_path / "encoder")), "train.workers": 2})
    clock = [
        event | {"seconds": {"train": 2.5}, "updates": 5} if event["kind"] == "trained" else event for event in LOG
    ]
    runs = list[Run]()
    for k, log in ((4, LOG), (1, clock)):
        runs.append(run := Run(tmp_path / f"run-{k}"))
        run.folder.mkdir()
        run.config.write_text(configuration.to_yaml(choose_frequency.piloted(config, k)))
        for event in log:
            events.append(run.folder, event["kind"], **{key: value for key, value in event.items() if key != "kind"})
    found = choose_frequency.decided(config, *runs)
    assert [one["k"] for one in found["options"]] == [1, 2, 4, 8]
    [best] = [one for one in found["options"] if one["k"] == found["aggregation_frequency"]]
    assert found["settings"] == best["settings"]
    # As a search carries it: by the root of the rows.
    rates = [one["lr"] for one in found["options"]]
    assert rates == pytest.approx([rates[0] * k**0.5 for k in (1, 2, 4, 8)])


DOCUMENT: dict[str, Any] = {
    "noise_scale": {"rows": 200.0, "low": 150.0, "high": None, "measurements": 3},
    "pilot": {"updates": 24, "rows_per_update": 64},
    "options": [
        {"k": 2, "rows_per_update": 32, "update_s": 0.25, "relative": 1.0, "low": 1.0, "high": None, "lr": 2e-4},
    ],
    "aggregation_frequency": 2,
    "settings": {"train.aggregation_frequency": 2, "train.rows_per_update": None},
}


def test_a_decision_ends_with_what_to_write() -> None:
    last = choose_frequency.text(DOCUMENT)[-1]
    assert "--set train.aggregation_frequency=2 --set train.rows_per_update=null" in last


@pytest.mark.slow
@pytest.mark.ray
def test_a_pilot_is_trained_and_decides(ray_session: Path) -> None:
    """40 epochs of some 200 rows: the updates of both runs are less than a seventh of them."""
    chosen = {"train.workers": 2, "train.epochs": 40, "train.micro_batch": 2, "train.rows_per_update": None}
    config = trained.settings(ray_session / "frequency", **chosen)
    folder, seen = ray_session / "frequency" / "out", list[dict[str, Any]]()
    folder.mkdir()
    found = choose_frequency.run(config, folder, seen.append)
    assert found == json.loads((folder / choose_frequency.JSON).read_text())
    assert [path.name for path in folder.iterdir()] == [choose_frequency.JSON]
    assert [one["k"] for one in found["options"]] == [1, 2, 4, 8]
    begun, other = (event for event in seen if event["kind"] == "started")
    ended, timed = (event for event in seen if event["kind"] == "trained")
    assert (begun["rows_per_update"], other["rows_per_update"]) == (16, 4)
    assert choose_frequency.FEWEST <= ended["updates"] == found["pilot"]["updates"]
    assert timed["updates"] == choose_frequency.CLOCK
    assert ended["rows_seen"] + timed["rows_seen"] <= 0.15 * 16 * begun["of"]
    assert found["noise_scale"]["measurements"] == ended["updates"] // 2
    configuration.with_overrides(config, found["settings"])


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_that_is_too_short_for_a_pilot_is_refused(ray_session: Path) -> None:
    config = trained.settings(ray_session / "short", **{"train.workers": 2, "train.rows_per_update": None})
    folder = ray_session / "short" / "out"
    folder.mkdir()
    with pytest.raises(UserError) as error:
        choose_frequency.run(config, folder, lambda event: None)
    assert error.value.code == "too_few_rows"
    assert not any(folder.iterdir())
