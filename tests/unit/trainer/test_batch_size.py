"""How many tokens fit into a GPU's memory: the decision from two peaks, and that a pass's memory is a line in them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rtrain.config import DistillConfig
from rtrain.core import events
from rtrain.core.ragged import TokenBatch
from rtrain.core.run_folder import Run
from rtrain.data.store.store import Store
from rtrain.models import builder
from rtrain.parallel.watchdog import Watchdog
from rtrain.runs import worker
from rtrain.trainer import batch_size, losses
from rtrain.trainer.batch_size import MAX_TOKENS, MIN_TOKENS, MemoryPeak, longest_rows, tokens_from_peaks
from tests.unit.trainer import test_trainer
from tests.unit.trainer.test_trainer import TASK

ground = test_trainer.ground  # a fixture
GB = 1 << 30


@pytest.mark.parametrize(
    ("small", "large", "usable", "tokens"),
    [
        # 1 GB whatever the pass, and 1 GB for each 2,048 tokens.
        (MemoryPeak(2048, 2 * GB), MemoryPeak(8192, 5 * GB), 9 * GB, 16384),
        (MemoryPeak(2048, 2 * GB), MemoryPeak(8192, 5 * GB), 9.1 * GB, 16384),  # a multiple of 256 below
        (MemoryPeak(2048, 2 * GB), MemoryPeak(8192, 5 * GB), 3 * GB, 4096),
        (MemoryPeak(2048, 2 * GB), MemoryPeak(8192, 5 * GB), 0.5 * GB, MIN_TOKENS),
        (MemoryPeak(2048, 2 * GB), MemoryPeak(8192, 5 * GB), 500 * GB, MAX_TOKENS),
        (MemoryPeak(20000, 5 * GB), MemoryPeak(20000, 5 * GB), 10 * GB, 39936),  # one row is as long as both
        (MemoryPeak(2048, 5 * GB), MemoryPeak(8192, 5 * GB), 10 * GB, 16384),
        (MemoryPeak(2048, 2 * GB), MemoryPeak(8192, None), 9 * GB, 2048),
        (MemoryPeak(2048, None), MemoryPeak(8192, None), 9 * GB, 512),
        (MemoryPeak(300, None), MemoryPeak(8192, None), 9 * GB, MIN_TOKENS),
    ],
)
def test_what_fits_is_on_the_line_through_both_passes(
    small: MemoryPeak, large: MemoryPeak, usable: float, tokens: int
) -> None:
    assert tokens_from_peaks(small, large, usable) == tokens


@pytest.mark.parametrize(
    ("most", "tokens", "passes", "found"),
    [
        (2048, 9e9, 1, 2048),
        (2048, 10_000.5, 8, 1251),
        (2048, 9e9, 8, 2048),
        (2048, 100.0, 8, MIN_TOKENS),
        (200, 100.0, 8, 200),
    ],
)
def test_an_update_is_dealt_into_enough_passes_but_not_into_tiny_ones(
    most: int, tokens: float, passes: int, found: int
) -> None:
    assert batch_size.cap_for_pipeline(most, tokens, passes) == found


@pytest.mark.parametrize("tokens", [1, 50, 200, 3000])
def test_a_pass_is_made_of_the_longest_rows(ground: Path, tokens: int) -> None:
    store = Store(next((ground / ".tokens").iterdir()))
    instance, lengths = longest_rows(store, TASK, tokens), np.sort(store.column("train", "length"))[::-1]
    actual = instance.row_lengths
    assert tokens <= actual.sum() < tokens + lengths[0]
    assert np.array_equal(actual, np.resize(lengths, len(actual)))  # again from the longest, where all have fewer
    assert (tokens > lengths.sum()) == (tokens == 3000)


@pytest.mark.parametrize(("peaks", "tokens"), [((2, 2.5, 5), 10600), ((2, 2.5, None), 2048), ((None, None, None), 512)])
def test_a_gpu_s_own_figures_decide(
    ground: Path, monkeypatch: pytest.MonkeyPatch, peaks: tuple[float | None, ...], tokens: int
) -> None:
    """The passes are real; what a GPU would say of its memory is given: 7.5 GB are free for us, of which 80 % count."""
    store = Store(next((ground / ".tokens").iterdir()))
    network = builder.build_network(ground / "encoder", TASK, store.manifest.labels, 0)
    left, complete = list(peaks), batch_size.forward_backward

    def forward_backward(*arguments: Any) -> None:
        complete(*arguments)
        if left[0] is None:
            left.pop(0)
            raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(batch_size, "forward_backward", forward_backward)
    figures: dict[str, Callable[..., Any]] = {
        "mem_get_info": lambda device: (7 * GB, 80 * GB),
        "memory_reserved": lambda device: GB // 2,
        "get_per_process_memory_fraction": lambda device: 1.0,
        "reset_peak_memory_stats": lambda device: None,
        "max_memory_allocated": lambda device: int((left.pop(0) or 0) * GB),
        "empty_cache": lambda: None,
    }
    for name, value in figures.items():
        monkeypatch.setattr(torch.cuda, name, value)

    def made(count: int) -> TokenBatch:
        return longest_rows(store, TASK, count)

    actual = batch_size.probe(network, losses.make_loss(TASK, DistillConfig()), made, 0, "fp32")
    assert actual == pytest.approx(tokens, abs=256)
    assert not left
    assert all(parameter.grad is None for parameter in network.parameters())


def test_a_run_keeps_the_size_of_its_passes(tmp_path: Path) -> None:
    watch = Watchdog()
    assert worker.decide_micro_batch_tokens(watch, Run(tmp_path), None) is None  # a CPU, or as the recipe says
    assert [worker.decide_micro_batch_tokens(watch, Run(tmp_path), fits) for fits in (4096, 1024)] == [4096, 4096]
    assert Run(tmp_path).decisions == {worker.MICRO_BATCH_TOKENS_KEY: 4096}
    assert [(event["kind"], event["tokens"]) for event in events.read_events(tmp_path)] == [
        ("micro_batch_size_decided", 4096)
    ]
