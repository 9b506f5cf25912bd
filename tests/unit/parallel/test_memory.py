"""A worker with a part of a model builds its shard and maps no more of the file."""

import ctypes
import gc
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

from rtrain.config import Recipe, load_config
from rtrain.parallel.base import Strategy
from rtrain.parallel.layout import ParallelLayout
from rtrain.tasks import base
from tests.support.tiny import make_encoder, make_tokenizer
from tests.support.workers import joined, run

LAYOUTS: dict[str, ParallelLayout] = {"zero 3": ParallelLayout(3), "tensor 2": ParallelLayout(tensor_parallel_size=2)}
"""Those in which a worker has a share of the weights."""
SMALL: dict[str, int] = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 4000}
"""25 million weights, nearly all of them in the layers."""
MIB = 1 << 20
TASK, LABELS = base.get_task("classification"), ("a", "b", "c")


def anonymous() -> int:
    """Bytes of this process that are no file's."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def of_files(suffix: str) -> int:
    """Bytes of mapped files with such names that are in memory."""
    actual, counted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            counted = line.endswith(suffix)
        elif counted and line.startswith("Rss:"):
            actual += 1024 * int(line.split()[1])
    return actual


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


def recipe_of(parallel_layout: ParallelLayout) -> Recipe:
    return load_config("intent", parallel_layout.settings).recipe


def _builder(rank: int, folder: Path) -> None:
    joined(rank, 2, folder)
    libc = ctypes.CDLL(None)
    assert all(libc.mallopt(option, 65536) for option in (-1, -3))  # return freed memory: M_TRIM_, M_MMAP_THRESHOLD
    for name in LAYOUTS:
        _built(folder / "tiny", name)
        gc.collect()
        before = anonymous()
        _, maximum = _built(folder / "model", name)
        output = {"built": maximum - before, "read": of_files("model.safetensors")}
        (folder / f"{name}-{rank}.json").write_text(json.dumps(output))


def _built(model: Path, name: str) -> tuple[Strategy, int]:
    """And the bytes at most until it is there."""
    from rtrain.models import builder as networks
    from rtrain.parallel import layout

    building = Peak()
    exchange = layout.build_strategy(networks.build_network(model, TASK, LABELS, 0), recipe_of(LAYOUTS[name]).train)
    return exchange, building.end()


def make_model(folder: Path, **sizes: Any) -> float:
    """A model with random weights; its size in MiB."""
    import transformers

    folder.mkdir()
    make_tokenizer(folder)
    transformers.BertModel(transformers.BertConfig(**sizes)).save_pretrained(folder)
    return (folder / "model.safetensors").stat().st_size / MIB


def test_a_worker_builds_its_share_and_not_the_whole(tmp_path: Path) -> None:
    make_encoder(tmp_path / "tiny")
    size = make_model(tmp_path / "model", **SMALL, intermediate_size=2048)
    run(_builder, (tmp_path,), 2)
    for name in LAYOUTS:
        for rank in range(2):
            output = json.loads((tmp_path / f"{name}-{rank}.json").read_text())
            assert 0.4 * size < output["built"] / MIB < 0.75 * size
            assert output["read"] < MIB  # nothing keeps the file mapped: all of it would stay in memory


def test_a_stage_of_a_pipeline_leaves_the_file_that_it_was_read_from(tmp_path: Path) -> None:
    from rtrain.models import builder as networks
    from rtrain.parallel.pipeline import PipelineStages

    size = make_model(tmp_path / "model", **{**SMALL, "num_hidden_layers": 2}, intermediate_size=2048)
    file = str(tmp_path / "model" / "model.safetensors")
    network: Any = networks.build_network(tmp_path / "model", TASK, LABELS, 0)
    assert sum(float(item.detach().sum()) for item in network.parameters()) != 0  # all of it is read
    assert of_files(file) / MIB > 0.9 * size
    stage = PipelineStages(network, 2, [0])
    assert of_files(file) < MIB
    assert stage.network is network
