"""How many tokens fit into a GPU's memory: the decision from two peaks, and that a pass's memory is a line in them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rtrain.config import Distill
from rtrain.core import events
from rtrain.core.ragged import Tokens
from rtrain.core.run_folder import Run
from rtrain.data.store.store import Store
from rtrain.models import builder
from rtrain.parallel.watchdog import Watch
from rtrain.runs import decisions
from rtrain.trainer import batch_size, losses
from rtrain.trainer.batch_size import LEAST, MOST, Peak, fitting, longest_rows
from tests import test_training_loop
from tests.test_training_loop import TASK

ground = test_training_loop.ground  # a fixture
GB = 1 << 30


@pytest.mark.parametrize(
    ("small", "large", "usable", "tokens"),
    [
        # 1 GB whatever the pass, and 1 GB for each 2,048 tokens.
        (Peak(2048, 2 * GB), Peak(8192, 5 * GB), 9 * GB, 16384),
        (Peak(2048, 2 * GB), Peak(8192, 5 * GB), 9.1 * GB, 16384),  # a multiple of 256 below
        (Peak(2048, 2 * GB), Peak(8192, 5 * GB), 3 * GB, 4096),
        (Peak(2048, 2 * GB), Peak(8192, 5 * GB), 0.5 * GB, LEAST),
        (Peak(2048, 2 * GB), Peak(8192, 5 * GB), 500 * GB, MOST),
        (Peak(20000, 5 * GB), Peak(20000, 5 * GB), 10 * GB, 39936),  # one row is as long as both
        (Peak(2048, 5 * GB), Peak(8192, 5 * GB), 10 * GB, 16384),
        (Peak(2048, 2 * GB), Peak(8192, None), 9 * GB, 2048),
        (Peak(2048, None), Peak(8192, None), 9 * GB, 512),
        (Peak(300, None), Peak(8192, None), 9 * GB, LEAST),
    ],
)
def test_what_fits_is_on_the_line_through_both_passes(small: Peak, large: Peak, usable: float, tokens: int) -> None:
    assert fitting(small, large, usable) == tokens


@pytest.mark.parametrize(
    ("most", "tokens", "passes", "found"),
    [
        (2048, 9e9, 1, 2048),
        (2048, 10_000.5, 8, 1251),
        (2048, 9e9, 8, 2048),
        (2048, 100.0, 8, LEAST),
        (200, 100.0, 8, 200),
    ],
)
def test_an_update_is_dealt_into_enough_passes_but_not_into_tiny_ones(
    most: int, tokens: float, passes: int, found: int
) -> None:
    assert batch_size.dealt(most, tokens, passes) == found


@pytest.mark.parametrize("tokens", [1, 50, 200, 3000])
def test_a_pass_is_made_of_the_longest_rows(ground: Path, tokens: int) -> None:
    store = Store(next((ground / ".tokens").iterdir()))
    made, lengths = longest_rows(store, TASK, tokens), np.sort(store.column("train", "length"))[::-1]
    found = made.lengths_of_rows
    assert tokens <= found.sum() < tokens + lengths[0]
    assert np.array_equal(found, np.resize(lengths, len(found)))  # again from the longest, where all have fewer
    assert (tokens > lengths.sum()) == (tokens == 3000)


@pytest.mark.parametrize(("peaks", "tokens"), [((2, 2.5, 5), 10600), ((2, 2.5, None), 2048), ((None, None, None), 512)])
def test_a_gpu_s_own_figures_decide(
    ground: Path, monkeypatch: pytest.MonkeyPatch, peaks: tuple[float | None, ...], tokens: int
) -> None:
    """The passes are real; what a GPU would say of its memory is given: 7.5 GB are free for us, of which 80 % count."""
    store = Store(next((ground / ".tokens").iterdir()))
    network = builder.build(ground / "encoder", TASK, store.manifest.labels, 0)
    left, whole = list(peaks), batch_size.one_pass

    def one_pass(*arguments: Any) -> None:
        whole(*arguments)
        if left[0] is None:
            left.pop(0)
            raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(batch_size, "one_pass", one_pass)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7 * GB, 80 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: GB // 2)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: int((left.pop(0) or 0) * GB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def made(count: int) -> Tokens:
        return longest_rows(store, TASK, count)

    found = batch_size.measured(network, losses.for_run(TASK, Distill()), made, 0, "fp32")
    assert found == pytest.approx(tokens, abs=256)
    assert not left
    assert all(parameter.grad is None for parameter in network.parameters())


def test_a_run_keeps_the_size_of_its_passes(tmp_path: Path) -> None:
    watch = Watch()
    assert decisions.smallest(watch, Run(tmp_path), None) is None  # a CPU, or as the recipe says
    assert [decisions.smallest(watch, Run(tmp_path), fits) for fits in (4096, 1024)] == [4096, 4096]
    assert Run(tmp_path).decisions == {"tokens_per_pass": 4096}
    assert [(event["kind"], event["tokens"]) for event in events.read(tmp_path)] == [("pass_size", 4096)]
