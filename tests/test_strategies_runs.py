"""A run on Ray whose workers have shares of the weights: how they are chosen, its artefact, and how it goes on in
another layout."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rtrain import config
from rtrain.checkpoint import format as checkpoint_format
from rtrain.core.run_folder import Run
from rtrain.parallel.layout import Way
from rtrain.planning import memory_fit
from rtrain.planning.memory_needs import Need
from rtrain.runs import controller, prepare
from rtrain.runs.worker_pool import Kept
from rtrain.verification import faults
from tests import trained

pytestmark = pytest.mark.timeout(900)
"""Two starts of workers: on a machine that is busy otherwise each takes minutes."""


@pytest.mark.ray
def test_a_run_in_shards_that_memory_chose_is_paused_and_goes_on_in_another_layout(
    ray_session: Path, kept_workers: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = memory_fit.first

    def tight(needs: Iterable[tuple[Way, Need]], room: memory_fit.Room) -> memory_fit.Choice:
        """As if the machine had room for the second stage, and none for the first."""
        assert (room.workers, room.bytes > 100e6) == (2, True)
        every = dict(needs)
        between = (room.taken(every[Way(1)]) + room.taken(every[Way(2)])) / 2
        return choose(every.items(), memory_fit.Room(between, 2))

    monkeypatch.setattr(memory_fit, "first", tight)
    folder = ray_session / "shards"
    asked = {"train.epochs": 1, "train.strategy": "auto", "train.evaluate_every": 6}
    settings = trained.settings(folder, **asked)
    prepared = prepare.prepare(settings, folder / "run")
    assert (prepared.config.recipe.train.strategy, prepared.config.recipe.train.shard) == ("manual", 2)
    log, ranks = Run(folder / "run"), dict[int, int]()

    def look(event: dict[str, Any]) -> None:
        if event["kind"] == "progress" and not ranks:
            ranks.update({rank: faults.process_of(prepared.run, rank) for rank in range(2)})

    controller.fit(prepared, until=8, on_event=look, workers=kept_workers)
    assert len(set(ranks.values())) == 2  # what a drill of workers that share a model kills
    [told] = log.events("strategy")
    assert told["settings"]["train.shard"] == 2
    assert told["bytes"] < told["room"]
    [sizes] = [event["state_bytes"] for event in log.events("sharded")]
    assert max(sizes) < 0.52 * sum(sizes)
    other = config.with_overrides(prepared.config, {"train.shard": 0, "train.pipeline": 2})
    resumed = prepare.prepare(other, folder / "run", "resume")
    assert resumed.config.recipe.identity() == prepared.config.recipe.identity()
    summary = controller.fit(resumed, reports=False, workers=kept_workers)
    assert (summary["status"], summary["restarts"]) == ("finished", 1)
    assert [event["update"] for event in log.events("started")] == [0, 8]
    best = checkpoint_format.path_of(log.checkpoints, summary["best_update"]) / "model.safetensors"
    weights, artefact = load_file(best), load_file(log.artifact / "model.safetensors")
    assert weights.keys() == artefact.keys()
    assert all(torch.equal(weights[name], value) for name, value in artefact.items())
