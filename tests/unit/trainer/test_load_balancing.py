"""How fast workers are beside each other."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rtrain import config as configuration
from rtrain.core.ragged import single_window_batch
from rtrain.runs import worker
from rtrain.trainer import batch_size
from tests.unit.trainer.test_step import LOSS, make_network, make_still_encoder


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([2.0, 1.0, 4.0], [0.5, 1.0, 0.25]),
        ([1.0, 1.03], [1.0, 1.0]),  # equal workers, and a little noise
        ([1.0, 1.07], [1.0, 15 / 16]),
        ([1.0, 100.0], [1.0, 1 / 16]),
        ([3.0], [1.0]),
    ],
)
def test_speeds_are_parts_of_the_fastest(seconds: list[float], expected: list[float]) -> None:
    assert batch_size.relative_speeds(seconds) == expected


def test_passes_are_timed_and_leave_no_gradient(tmp_path: Path) -> None:
    make_still_encoder(tmp_path / "encoder")
    network, lengths = make_network(tmp_path / "encoder"), np.full(8, 16, dtype=np.int32)
    ids = np.random.default_rng(0).integers(5, 200, 8 * 16).astype(np.int32)
    tokens = single_window_batch(ids, lengths, lengths, np.zeros(8), np.arange(8, dtype=np.uint64))
    before = [item.detach().clone() for item in network.parameters()]
    assert 0 < batch_size.time_micro_batches(network, LOSS, tokens, 0, "fp32") < 60
    assert all(item.grad is None for item in network.parameters())
    assert all(bool((item == other).all()) for item, other in zip(before, network.parameters(), strict=True))


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        (
            "domain-adapt",
            {"distill.teacher": "v1", "distill.relation_loss_weight": 1.0},
        ),  # learns from what is inside of it
        ("intent", {"distill.teacher": "v1", "distill.co_teachers": ["v2"]}),
        ("intent", {"distill.teacher": "v1"}),
        ("intent", {}),
    ],
)
def test_passes_that_are_timed_have_the_answers_that_the_store_has(
    monkeypatch: pytest.MonkeyPatch, recipe: str, settings: dict[str, Any]
) -> None:
    """Where a student has none of its teacher, or those of several as one, the store has no answers of that name."""
    config, asked = configuration.load_config(recipe, {**settings, "train.load_balancing": "auto"}), list[str | None]()
    monkeypatch.setattr(batch_size, "longest_rows", lambda store, task, tokens, teacher: asked.append(teacher))
    monkeypatch.setattr(worker, "decide_speeds", lambda watchdog, run, measure_seconds: (1.0, 0.5))
    started: Any = SimpleNamespace(world_size=2, watchdog=None, run=None)
    context: Any = SimpleNamespace(recipe=config.recipe, store=None, task=None, loss=None, pad_id=0, precision="fp32")
    network: Any = None
    assert worker.measure_speeds(started, context, network) == (1.0, 0.5)
    assert asked == [config.recipe.teacher_logits_key]
