"""What the figures cannot go beyond on the machine that measures them; rates are measured here, by the engine itself.

latency_vs_hf     max(operations / rate, bytes / bandwidth) and the dispatch of each operator, over the teacher's time
served_mb         the entropy of the matrices' and the tables' whole numbers: no scale, graph, tokenizer or other file
few_rows_accuracy the score of a model of the same size that has seen the labels of all rows
cold_start_s      Python, the engine's import, and its compiled graph from a cache, in a process that does nothing else
serve_start_s     the processor seconds of all processes until the first answer, over the cores
fallback_s        each operation tried once, then the steps of a bisection, each the time that the rows' answers take
"""

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import sides
from rtrain import engines, score
from rtrain.compress import int4
from rtrain.compress.export_check import SPLIT, evenly
from rtrain.data.stores.store import Store
from rtrain.network import compiled
from rtrain.predict import Predictor

SIZE = 512
"""Rows, columns and depth of the product that is timed: it takes less than a moment of the machine's."""
CHAIN = 400
"""Operators of the graph by which dispatch is timed."""
BYTES = 1 << 27
REPEATS = 150
WHOLE = ("i8", "u8", "i4", "u4")
TRIES = 3
LOADS = """
import sys, numpy, openvino
core = openvino.Core()
core.set_property({"CACHE_DIR": sys.argv[2]})
core.compile_model(sys.argv[1], "CPU", {"INFERENCE_NUM_THREADS": "1"}).create_infer_request()
"""


@dataclass(frozen=True)
class Machine:
    int8_flops: float
    """Operations per second of the engine's product of whole numbers; a multiplication with its addition is two."""
    float_flops: float
    bandwidth: float
    """Bytes per second that one thread reads from memory."""
    dispatch_s: float
    """Seconds of an operator that has nothing to compute."""


@dataclass(frozen=True)
class Shape:
    """An encoder as it is computed."""

    layers: int
    width: int
    inner: int

    @property
    def weights(self) -> int:
        """Weights of the layers' matrices; embeddings cost bytes of their rows alone, and the head next to nothing."""
        return self.layers * (4 * self.width**2 + 2 * self.width * self.inner)

    def operations(self, tokens: int, rows: int) -> float:
        """2 P for each token, and 4 L h s of attention."""
        return rows * tokens * (2 * self.weights + 4 * self.layers * self.width * tokens)


def shape_of(folder: Path) -> Shape:
    """By the config.json of a BERT."""
    document = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return Shape(document["num_hidden_layers"], document["hidden_size"], document["intermediate_size"])


def least_ms(machine: Machine, shape: Shape, tokens: int, rows: int, operators: int) -> float:
    """The least milliseconds of a batch of an int8 model: a byte for each weight, read once a batch."""
    computed = shape.operations(tokens, rows) / machine.int8_flops
    return 1e3 * (max(computed, shape.weights / machine.bandwidth) + operators * machine.dispatch_s)


# ----------------------------------------------------------------------------------------------------------- measured


def measure() -> Machine:
    draw = np.random.default_rng(0)
    numbers = draw.standard_normal((SIZE, SIZE), dtype=np.float32)
    operations = 2.0 * SIZE**3
    memory = np.ones(BYTES // 8)
    return Machine(
        operations / _seconds(_product(numbers, whole=True)),
        operations / _seconds(_product(numbers, whole=False)),
        BYTES / _seconds(memory.sum),
        _seconds(_chain()) / CHAIN,
    )


def _seconds(work: Callable[[], object]) -> float:
    """The least of many: what others do on this machine is no limit of it."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times[1:])


def _product(numbers: Any, *, whole: bool) -> Callable[[], object]:
    """A product with constant weights, as int8 artefacts hold them: whole numbers with scales, and activations that
    are made whole before it."""
    from openvino import Model, opset13 as ops

    given = ops.parameter(list(numbers.shape), np.float32)
    if whole:
        weights = ops.constant(np.clip(numbers * 40, -127, 127).astype(np.int8))
        right = ops.multiply(ops.convert(weights, np.float32), ops.constant(np.float32(1 / 40)))
        low, high = np.float32(-4), np.float32(4 * 127 / 128)
        left = ops.fake_quantize(given, low, high, low, high, 256)
    else:
        left, right = given, ops.constant(numbers)
    request = _request(Model([ops.matmul(left, right, False, True)], [given]))
    return lambda: request.infer([numbers], share_inputs=True)


def _chain() -> Callable[[], object]:
    """Softmax of 16 numbers, again and again: nothing that could be fused, and next to nothing to compute."""
    from openvino import Model, opset13 as ops

    row = np.ones((1, 16), dtype=np.float32)
    given = last = ops.parameter(list(row.shape), np.float32)
    for _ in range(CHAIN):
        last = ops.softmax(last, 1)
    request = _request(Model([last], [given]))
    return lambda: request.infer([row], share_inputs=True)


def _request(graph: Any) -> Any:
    import openvino

    options = {"INFERENCE_NUM_THREADS": "1", "INFERENCE_PRECISION_HINT": "f32"}
    return openvino.Core().compile_model(graph, "CPU", options).create_infer_request()


def operators(graph: Path) -> int:
    """How many operators the engine runs for a graph, once it has fused what it can."""
    import openvino

    compiled = openvino.Core().compile_model(graph, "CPU")
    kinds = [str(node.get_rt_info()["layerType"].value) for node in compiled.get_runtime_model().get_ops()]
    return sum(kind not in ("Const", "Input", "Output") for kind in kinds)


# ------------------------------------------------------------------------------------------------------- of artefacts


def served_mb(artifact: Path) -> float:
    """Megabytes that the whole numbers of an OpenVINO artefact's matrices and tables take at the least, number by
    number: their entropy."""
    total = 0.0
    for node in _graph(artifact).get_ops():
        if node.get_type_name() == "Constant" and node.get_element_type().to_string() in WHOLE:
            _, counts = np.unique(int4.numbers(node), return_counts=True)
            total -= float((counts * np.log2(counts / counts.sum())).sum())
    return total / 8e6


def _graph(artifact: Path) -> Any:
    import openvino

    files = engines.get("openvino").present(artifact)
    graph, weights = (
        compiled.contents(path) if path.name.endswith(engines.PACKED) else path.read_bytes() for path in files
    )
    return openvino.Core().read_model(graph, openvino.Tensor(np.frombuffer(weights, dtype=np.uint8)))


def cold_s(artifact: Path, tries: int = TRIES) -> float:
    """Seconds of a process that imports the engine and loads the graph of an OpenVINO artefact: the least of a few."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-c", LOADS, str(artifact / engines.get("openvino").files[0]), cache]
        times = []
        for _ in range(1 + tries):  # the first one compiles it
            started = time.monotonic()
            subprocess.run(command, env=sides.own_environment(), check=True)
            times.append(time.monotonic() - started)
    return min(times[1:])


def fallback_s(artifact: Path, store: Store, rows: int, operations: int, threads: int) -> float:
    """Seconds of a search over so many operations that does nothing but have an int8 artefact answer the rows."""
    predictor, chosen = Predictor.load(artifact, threads), evenly(store.rows(SPLIT), rows)
    times = []
    for _ in range(TRIES):
        started = time.perf_counter()
        score.on_split(predictor, store, SPLIT, chosen)
        times.append(time.perf_counter() - started)
    return (operations + math.ceil(math.log2(max(2, operations)))) * min(times)
