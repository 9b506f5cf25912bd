"""A run on Ray whose workers have shares of the weights: its artefact, and how it goes on in another layout."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rtrain import config
from rtrain.checkpoints import checkpoint
from rtrain.run import Run
from rtrain.runs import driver, preparing
from tests import trained

pytestmark = pytest.mark.timeout(900)
"""Two starts of workers: on a machine that is busy otherwise each takes minutes."""


@pytest.mark.ray
def test_a_run_in_shards_is_paused_and_goes_on_in_another_layout(ray_session: Path) -> None:
    folder = ray_session / "shards"
    settings = trained.settings(folder, **{"train.epochs": 1, "train.shard": 3, "train.evaluate_every": 6})
    prepared = preparing.prepare(settings, folder / "run")
    driver.fit(prepared, until=8)
    log = Run(folder / "run")
    [sizes] = [event["state_bytes"] for event in log.events("sharded")]
    assert max(sizes) < 0.52 * sum(sizes)
    other = config.with_overrides(prepared.config, {"train.shard": 0, "train.pipeline": 2})
    resumed = preparing.prepare(other, folder / "run", "resume")
    assert resumed.config.recipe.identity() == prepared.config.recipe.identity()
    summary = driver.fit(resumed, reports=False)
    assert (summary["status"], summary["restarts"]) == ("finished", 1)
    assert [event["update"] for event in log.events("started")] == [0, 8]
    best = checkpoint.path_of(log.checkpoints, summary["best_update"]) / "model.safetensors"
    weights, artefact = load_file(best), load_file(log.artifact / "model.safetensors")
    assert weights.keys() == artefact.keys()
    assert all(torch.equal(weights[name], value) for name, value in artefact.items())
