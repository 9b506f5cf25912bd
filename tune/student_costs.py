"""What a student costs to use, in milliseconds or megabytes: those of the model that it starts from."""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from rtrain.core import atomic_write, json_files
from rtrain.data.sources import digests

NAME = "costs.json"
TOKENS, CALLS, ROUNDS = 32, 20, 5


def megabytes(model: Path) -> float:
    """Size of a model folder's weights."""
    return round(sum(path.stat().st_size for path in model.glob("model*.safetensors")) / 1e6, 3)


def milliseconds(model: Path) -> float:
    """A model folder's encoder on one text of 32 tokens, by PyTorch on one thread: the least of some medians, since
    whatever else the machine does only adds to it."""
    import torch
    import transformers

    network = transformers.AutoModel.from_config(
        transformers.AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False),
        trust_remote_code=False,
    ).eval()
    ids, before = torch.ones(1, TOKENS, dtype=torch.long), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            found = [statistics.median(_timed(lambda: network(ids)) for _ in range(CALLS)) for _ in range(ROUNDS)]
    finally:
        torch.set_num_threads(before)
    return round(1000 * min(found), 3)


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


OF: dict[str, Callable[[Path], float]] = {"latency": milliseconds, "bytes": megabytes}
"""By `tune.cost`."""


class Costs:
    """What models cost, measured once for each shape and kept in the search's folder: trials of one shape cost the
    same, also after a resume."""

    def __init__(self, search: Path, cost: str):
        self._path, self._measure = search / NAME, OF[cost]
        self._known: dict[str, float] = json_files.read(self._path) if self._path.is_file() else {}

    def of(self, model: Path) -> float:
        shape = digests.file_digest(str(model / "config.json"))
        if shape not in self._known:
            self._known[shape] = self._measure(model)
            atomic_write.write_text(self._path, json.dumps(self._known, indent=1) + "\n")
        return self._known[shape]
