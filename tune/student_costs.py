"""Inference cost of a student, in milliseconds or megabytes, from its initial model."""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from rtrain.core import atomic_write, json_files
from rtrain.data.sources import digests

FILE_NAME = "costs.json"
TEXT_TOKENS, CALLS_PER_ROUND, ROUNDS = 32, 20, 5


def measure_megabytes(model: Path) -> float:
    """Return the megabytes of a model's weights."""
    return round(sum(path.stat().st_size for path in model.glob("model*.safetensors")) / 1e6, 3)


def measure_milliseconds(model: Path) -> float:
    """Return the milliseconds of a model's encoder for one text of 32 tokens, with PyTorch on one thread: the minimum
    of several medians, since other load only adds time."""
    import torch
    import transformers

    network = transformers.AutoModel.from_config(
        transformers.AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False),
        trust_remote_code=False,
    ).eval()
    ids, previous_threads = torch.ones(1, TEXT_TOKENS, dtype=torch.long), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            medians = [
                statistics.median(_time_call(lambda: network(ids)) for _ in range(CALLS_PER_ROUND))
                for _ in range(ROUNDS)
            ]
    finally:
        torch.set_num_threads(previous_threads)
    return round(1000 * min(medians), 3)


def _time_call(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


MEASURES: dict[str, Callable[[Path], float]] = {"latency": measure_milliseconds, "bytes": measure_megabytes}
"""Measurement by `tune.cost`."""


class StudentCosts:
    """Costs of models, measured once per architecture and stored in the search's folder, so that trials of one
    architecture have equal costs after a resume."""

    def __init__(self, search: Path, cost: str):
        self._path, self._measure = search / FILE_NAME, MEASURES[cost]
        self._costs: dict[str, float] = json_files.load_json_object(self._path) if self._path.is_file() else {}

    def get(self, model: Path) -> float:
        shape_digest = digests.hash_file(str(model / "config.json"))
        if shape_digest not in self._costs:
            self._costs[shape_digest] = self._measure(model)
            atomic_write.write_text(self._path, json.dumps(self._costs, indent=1) + "\n")
        return self._costs[shape_digest]
