"""One training on real Ray that several test files look at, and the settings of others like it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtrain import config
from rtrain.config import Config
from rtrain.runs import controller, prepare
from tests.conftest import labelled_rows, write_rows
from tests.support.tiny import make_encoder

ROWS = 403  # with 20 test rows apart: odd, so that every epoch ends in a short update that one worker may sit out
TEST_ROWS = 20
EPOCHS = 6


@dataclass(frozen=True)
class Trained:
    run: Path
    config: Config
    summary: dict[str, Any]
    events: list[dict[str, Any]]


def settings(folder: Path, **overrides: Any) -> Config:
    folder.mkdir(parents=True, exist_ok=True)
    rows = labelled_rows(ROWS + TEST_ROWS)
    base = {
        "data.path": str(write_rows(folder / "train.csv", rows[:ROWS])),
        "data.test": str(write_rows(folder / "test.csv", rows[ROWS:])),
        "data.max_bad_rows": 0.1,
        "model.name": str(make_encoder(folder / "encoder")),
        "gate.latency_seconds": 0.5,
        "optim.lr": 3e-3,
        "train.epochs": EPOCHS,
        "train.precision": "fp32",
        "train.log_every": 1,
        "train.global_batch_size": 24,
    }
    return config.load_config("intent", {**base, **overrides})


def train(folder: Path) -> Trained:
    config = settings(folder)
    seen: list[dict[str, Any]] = []
    prepared = prepare.prepare_run(config, folder / "run")
    summary = controller.fit(prepared, on_event=seen.append)
    return Trained(folder / "run", prepared.config, summary, seen)
