"""A search over the students of one teacher: its configuration and default space, and the costs of students."""

import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rtrain import config as configuration
from rtrain.compress import distill, student
from rtrain.config import Config
from rtrain.config.tune import DEFAULT_SPACE
from rtrain.core import atomic_write, json_files
from rtrain.data import sources
from tune.space import LAYERS_SETTING

STUDENT_SPACE: Mapping[str, Any] = {
    "distill.lr": {"low": 1.0e-4, "high": 2.0e-3, "log": True},
    "distill.temperature": [1.0, 2.0, 4.0],
    "distill.alpha": [0.5, 0.7, 0.9],
}
"""Default `tune.space` of a search over students."""


def derive_search_config(config: Config, teacher: distill.Teacher, root: Path) -> Config:
    """Return the configuration of the search: that of its first student."""
    if config.deploy.tune.space == DEFAULT_SPACE:
        student_space = default_space(config, student.count_layers(teacher.folder))
        config = configuration.with_overrides(config, {"tune.space": student_space})
    first_student = distill.derive_student_config(config, teacher, root)
    # Each trial resolves the teacher's layers for its own number of layers.
    kept_settings = {"distill.teacher_layers": config.recipe.distill.teacher_layers}
    search_config = configuration.with_overrides(first_student, kept_settings)
    return replace(search_config, explicit_settings=first_student.explicit_settings)


def default_space(config: Config, depth: int | None) -> dict[str, Any]:
    """Return the default space for a teacher with `depth` layers.

    If the cost counts, the space has a third and a half of the teacher's depth, and that of the first student. For the
    score alone the deepest would win. A depth from the user stays.
    """
    settings = config.recipe.distill
    searches_depth = (
        config.deploy.tune.objective != "score"
        and settings.student is None
        and LAYERS_SETTING not in config.explicit_settings
    )
    if not searches_depth or depth is None:
        return dict(STUDENT_SPACE)
    depths = {layers for layers in (depth // 3, depth // 2, settings.layers or 0) if 0 < layers < depth}
    return {**STUDENT_SPACE, **({LAYERS_SETTING: sorted(depths)} if len(depths) > 1 else {})}


FILE_NAME = "costs.json"
TEXT_TOKENS, CALLS_PER_ROUND, ROUNDS = 32, 20, 5


def measure_megabytes(model: Path) -> float:
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
        shape_digest = sources.hash_file(str(model / "config.json"))
        if shape_digest not in self._costs:
            self._costs[shape_digest] = self._measure(model)
            atomic_write.write_text(self._path, json.dumps(self._costs, indent=1) + "\n")
        return self._costs[shape_digest]
