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
from rtrain.parallel.layout import ParallelLayout
from rtrain.planning import memory_estimate
from rtrain.planning.memory_estimate import WorkerMemory
from rtrain.runs import controller, prepare
from rtrain.runs.worker_pool import ReusableWorkerGroup
from rtrain.verification import drill
from tests.support import trained

pytestmark = pytest.mark.timeout(900)
"""Two starts of workers: on a machine that is busy otherwise each takes minutes."""


@pytest.mark.ray
def test_a_run_in_shards_that_memory_chose_is_paused_and_goes_on_in_another_layout(
    ray_session: Path, kept_workers: ReusableWorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = memory_estimate.first_fitting_layout

    def tight(
        needs: Iterable[tuple[ParallelLayout, WorkerMemory]], room: memory_estimate.MemoryLimit
    ) -> memory_estimate.LayoutChoice:
        """As if the machine had room for the second stage, and none for the first."""
        assert (room.sharing_workers, room.limit_bytes > 100e6) == (2, True)
        every = dict(needs)
        between = (room.used_bytes(every[ParallelLayout(1)]) + room.used_bytes(every[ParallelLayout(2)])) / 2
        return choose(every.items(), memory_estimate.MemoryLimit(between, 2))

    monkeypatch.setattr(memory_estimate, "first_fitting_layout", tight)
    folder = ray_session / "shards"
    asked = {"train.epochs": 1, "train.strategy": "auto", "train.evaluate_every": 6}
    settings = trained.settings(folder, **asked)
    prepared = prepare.prepare_run(settings, folder / "run")
    assert (prepared.config.recipe.train.strategy, prepared.config.recipe.train.zero_stage) == ("manual", 2)
    log, ranks = Run(folder / "run"), dict[int, int]()

    def look(event: dict[str, Any]) -> None:
        if event["kind"] == "progress" and not ranks:
            ranks.update({rank: drill.find_process(prepared.run, rank) for rank in range(2)})

    controller.fit(prepared, end_step=8, on_event=look, workers=kept_workers)
    assert len(set(ranks.values())) == 2  # what a drill of workers that share a model kills
    [output] = log.events("strategy")
    assert output["settings"]["train.zero_stage"] == 2
    assert output["used_bytes"] < output["limit_bytes"]
    [sizes] = [event["state_bytes"] for event in log.events("optimizer_sharding")]
    assert max(sizes) < 0.52 * sum(sizes)
    other = config.with_overrides(prepared.config, {"train.zero_stage": 0, "train.pipeline_parallel_size": 2})
    resumed = prepare.prepare_run(other, folder / "run", "resume")
    assert resumed.config.recipe.recipe_digest() == prepared.config.recipe.recipe_digest()
    summary = controller.fit(resumed, write_reports=False, workers=kept_workers)
    assert (summary["status"], summary["restarts"]) == ("finished", 1)
    assert [event["step"] for event in log.events("started")] == [0, 8]
    best = checkpoint_format.checkpoint_path(log.checkpoints, summary["best_step"]) / "model.safetensors"
    weights, artefact = load_file(best), load_file(log.artifact / "model.safetensors")
    assert weights.keys() == artefact.keys()
    assert all(torch.equal(weights[name], value) for name, value in artefact.items())
