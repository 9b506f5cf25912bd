"""What each strategy takes of a worker's memory: of a small encoder whose weights are most of it, and of one of 109
million weights, beside the forecast."""

import ctypes
import gc
import json
import os
import re
import threading
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from rtrain.batch import Tokens, single
from rtrain.config import Recipe, load
from rtrain.doctor.forecast import memory, trace
from rtrain.exchange.exchange import Exchange
from rtrain.strategies.ways import Way
from rtrain.tasks import base
from tests.tiny import make_encoder, make_tokenizer
from tests.workers import joined, run

LAYOUTS: dict[str, Way] = {
    "shard 0": Way(),
    "shard 1": Way(1),
    "shard 2": Way(2),
    "shard 3": Way(3),
    "tensor 2": Way(tensor=2),
}
CUT = ("shard 3", "tensor 2")
"""Those in which a worker has a share of the weights."""
SMALL: dict[str, int] = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 4000}
"""25 million weights, nearly all of them in the layers."""
ROWS = 4
"""Texts of a worker's update."""
TOKENS, FEW_TOKENS = 128, 8
"""One for each."""
MIB = 1 << 20
TASK, LABELS = base.get("classification"), ("a", "b", "c")


def anonymous() -> int:
    """Bytes of this process that are no file's."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def of_files(suffix: str) -> int:
    """Bytes of mapped files with such names that are in memory."""
    found, counted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            counted = line.endswith(suffix)
        elif counted and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


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


def rows(seed: int, tokens: int, words: int) -> Tokens:
    random, lengths = np.random.default_rng(seed), np.full(ROWS, tokens, dtype=np.int32)
    ids = random.integers(5, words, ROWS * tokens).astype(np.int32)
    return single(ids, lengths, lengths, random.integers(0, 3, ROWS), np.arange(ROWS, dtype=np.uint64))


def recipe_of(way: Way) -> Recipe:
    return load("intent", way.settings).recipe


def _worker(rank: int, folder: Path, names: tuple[str, ...], tokens: int) -> None:
    joined(rank, 2, folder)
    for name in names:
        _trained(folder / "tiny", name, 8)  # what is loaded late is there then
        gc.collect()
        before, found = anonymous(), _trained(folder / "model", name, tokens)
        told = {what: size - before for what, size in found.items()}
        (folder / f"{name}-{rank}.json").write_text(json.dumps(told))


def _builder(rank: int, folder: Path) -> None:
    joined(rank, 2, folder)
    libc = ctypes.CDLL(None)
    assert all(libc.mallopt(what, 65536) for what in (-1, -3))  # freed memory goes back: M_TRIM_, M_MMAP_THRESHOLD
    for name in CUT:
        _built(folder / "tiny", name)
        gc.collect()
        before = anonymous()
        _, most = _built(folder / "model", name)
        told = {"built": most - before, "read": of_files("model.safetensors")}
        (folder / f"{name}-{rank}.json").write_text(json.dumps(told))


def _built(model: Path, name: str) -> tuple[Exchange, int]:
    """And the bytes at most until it is there."""
    from rtrain.network import model as networks
    from rtrain.strategies import choose

    building = Peak()
    exchange = choose.build(networks.build(model, TASK, LABELS, 0), recipe_of(LAYOUTS[name]).train)
    return exchange, building.end()


def _trained(model: Path, name: str, tokens: int) -> dict[str, int]:
    """Bytes at most until the exchange is there, after the last of three updates, and at most since the first."""
    from rtrain.training import optim, step
    from tests.test_training_step import LOSS

    exchange, built = _built(model, name)
    words: int = cast(Any, exchange.module).config.vocab_size
    optimizer = optim.of_run(exchange, recipe_of(LAYOUTS[name]))
    for number in range(3):
        if number == 1:
            peak = Peak()
        passes = [rows(10 * number + exchange.rank, tokens, words)]
        step.run_update(exchange, optimizer, LOSS, passes, pad_id=0, clip_norm=1.0)
    most = peak.end()
    gc.collect()
    return {"built": built, "rest": anonymous(), "peak": most}


def measured(folder: Path, together: tuple[tuple[str, ...], ...], tokens: int) -> dict[str, dict[str, float]]:
    """MiB over those of the process, by layout, of the worker that takes more. Layouts that stand `together` are
    measured in the same processes."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = "65536"  # freed memory goes back
    found = {}
    make_encoder(folder / "tiny")
    try:
        for names in together:
            run(_worker, (folder, names, tokens), 2, within=900.0, anew=True)
            (folder / "rendezvous-2").unlink()
            for name in names:
                each = [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(2)]
                found[name] = {what: max(one[what] for one in each) / MIB for what in each[0]}
    finally:
        del os.environ["MALLOC_MMAP_THRESHOLD_"], os.environ["MALLOC_TRIM_THRESHOLD_"]
    return found


def make_model(folder: Path, **sizes: Any) -> float:
    """A model with random weights; its size in MiB."""
    import transformers

    folder.mkdir()
    make_tokenizer(folder)
    transformers.BertModel(transformers.BertConfig(**sizes)).save_pretrained(folder)
    return (folder / "model.safetensors").stat().st_size / MIB


def foretold(folder: Path, name: str, tokens: int) -> float:
    """MiB, where freed memory goes back."""
    way = LAYOUTS[name]
    found = trace.of_pass(
        *(folder, TASK, recipe_of(way).model, [tokens] * ROWS),
        outputs=len(LABELS),
        tensor=way.tensor,
        more_passes=way.tensor == 1,
    )
    return memory.needed(found, 2 // way.tensor, way.strategy, process=0, kept=1.0).total / MIB


def check(found: dict[str, dict[str, float]], size: float) -> None:
    """That each takes less than the one before, and those that cut the weights build no more than their share."""
    peaks = [found[name]["peak"] for name in LAYOUTS]
    assert peaks == sorted(peaks, reverse=True)
    # A whole model has weights, gradient and two moments. In shares: half of them.
    assert found["shard 3"]["rest"] < 0.6 * found["shard 0"]["rest"]
    assert found["tensor 2"]["peak"] < 0.65 * found["shard 0"]["peak"]
    for name in CUT:
        assert found[name]["built"] < 0.75 * size


def test_a_worker_builds_its_share_and_not_the_whole(tmp_path: Path) -> None:
    make_encoder(tmp_path / "tiny")
    size = make_model(tmp_path / "model", **SMALL, intermediate_size=2048)
    run(_builder, (tmp_path,), 2)
    for name in CUT:
        for rank in range(2):
            told = json.loads((tmp_path / f"{name}-{rank}.json").read_text())
            assert 0.4 * size < told["built"] / MIB < 0.75 * size
            assert told["read"] < MIB  # nothing keeps the file mapped, of which the whole would stay in memory


def test_a_stage_of_a_pipeline_leaves_the_file_that_it_was_read_from(tmp_path: Path) -> None:
    from rtrain.network import model as networks
    from rtrain.strategies.staged import Staged

    size = make_model(tmp_path / "model", **{**SMALL, "num_hidden_layers": 2}, intermediate_size=2048)
    file = str(tmp_path / "model" / "model.safetensors")
    network: Any = networks.build(tmp_path / "model", TASK, LABELS, 0)
    assert sum(float(one.detach().sum()) for one in network.parameters()) != 0  # all of it is read
    assert of_files(file) / MIB > 0.9 * size
    stage = Staged(network, 2, [0])
    assert of_files(file) < MIB
    assert stage.network is network


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_strategy_takes_less_than_the_one_before(tmp_path: Path) -> None:
    size = make_model(tmp_path / "model", **SMALL, intermediate_size=2048)
    found = measured(tmp_path, (tuple(LAYOUTS),), FEW_TOKENS)
    check(found, size)


@pytest.mark.slow
@pytest.mark.timeout(5000)
def test_of_a_hundred_million_weights_too_and_as_foretold(tmp_path: Path) -> None:
    size = make_model(tmp_path / "model")
    found = measured(tmp_path, tuple((name,) for name in LAYOUTS), TOKENS)
    for name, told in found.items():
        told["foretold"] = foretold(tmp_path / "model", name, TOKENS)
    (tmp_path / "table.json").write_text(json.dumps({"model": size, **found}, indent=1))
    check(found, size)
    for told in found.values():
        assert told["foretold"] == pytest.approx(told["peak"], rel=0.1)
