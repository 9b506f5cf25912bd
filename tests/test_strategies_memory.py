"""What each strategy takes of a worker's memory, on an encoder of 109 million weights and two workers."""

import gc
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtrain.batch import Tokens, single
from tests.test_exchange_transport import joined, run

LAYOUTS: dict[str, dict[str, Any]] = {
    "shard 0": {},
    "shard 1": {"shard": 1},
    "shard 2": {"shard": 2},
    "shard 3": {"shard": 3},
    "tensor 2": {"tensor": 2},
}
ROWS, TOKENS = 4, 128
"""Texts of a worker's update, and tokens of each."""
MIB = 1 << 20


def anonymous() -> int:
    """Bytes of this process that are no file's."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


class Peak:
    """The most bytes since it was made, looked at every few milliseconds."""

    def __init__(self) -> None:
        self.bytes, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.is_set():
            self.bytes = max(self.bytes, anonymous())
            time.sleep(0.002)

    def end(self) -> int:
        self._ended.set()
        self._thread.join()
        return self.bytes


def rows(seed: int) -> Tokens:
    random, lengths = np.random.default_rng(seed), np.full(ROWS, TOKENS, dtype=np.int32)
    ids = random.integers(5, 30_000, ROWS * TOKENS).astype(np.int32)
    return single(ids, lengths, lengths, random.integers(0, 3, ROWS), np.arange(ROWS, dtype=np.uint64))


def _worker(rank: int, folder: Path, name: str) -> None:
    import transformers

    from rtrain.config import load
    from rtrain.network import packed
    from rtrain.strategies import choose
    from rtrain.training import optim, step
    from tests.test_training_step import LOSS

    joined(rank, 2, folder)
    shape = transformers.BertConfig()
    shape.num_labels = 3
    network = transformers.BertForSequenceClassification(shape)
    packed.enable(network, "first")
    settings = {f"train.{key}": value for key, value in LAYOUTS[name].items()}
    recipe = load("intent", {"train.transport": "stock", **settings}).recipe
    exchange = choose.build(network, recipe.train)
    optimizer = optim.of_run(exchange, recipe)
    for number in range(3):
        if number == 1:
            peak = Peak()
        step.run_update(exchange, optimizer, LOSS, [rows(10 * number + exchange.rank)], pad_id=0, clip_norm=1.0)
    most = peak.end()
    gc.collect()
    (folder / f"{name}-{rank}.json").write_text(json.dumps({"rest": anonymous(), "peak": most}))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """MiB by layout, of the worker that takes more."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = "65536"  # freed memory goes back
    found = {}
    try:
        for name in LAYOUTS:
            folder = tmp_path_factory.mktemp("memory")
            run(_worker, (folder, name), 2, within=600.0)
            each = [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(2)]
            found[name] = {what: max(one[what] for one in each) / MIB for what in ("rest", "peak")}
    finally:
        del os.environ["MALLOC_MMAP_THRESHOLD_"], os.environ["MALLOC_TRIM_THRESHOLD_"]
    return found


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_each_strategy_takes_less_than_the_one_before(measured: dict[str, dict[str, float]]) -> None:
    peaks = [measured[name]["peak"] for name in LAYOUTS]
    assert peaks == sorted(peaks, reverse=True)
    # Weights, gradient and two moments are 1,670 MiB of a whole model's: in shares, half of them.
    assert measured["shard 3"]["rest"] < 0.6 * measured["shard 0"]["rest"]
    assert measured["tensor 2"]["peak"] < 0.6 * measured["shard 0"]["peak"]
