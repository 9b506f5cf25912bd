"""The engines that compute an artefact's logits: one table, by the name that artifact.json holds.

Settings, artefacts, serving and quantization all ask it, so it imports almost nothing: what it names is imported where
it is used, and an int8 artefact is served without torch.
"""

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from rtrain.errors import UserError


class Entry(NamedTuple):
    loader: str
    """`module:class`. Called with (folder, artifact, threads); its `logits` answers (`rtrain.predict.Engine`)."""
    files: tuple[str, ...]
    """The model's files in the artefact's folder, beside config.json and the tokenizer."""
    golden_tolerance: float
    """Most that its logits may differ from the golden answers: another processor's kernels round otherwise, in the last
    bits of fp32, by a step of a few scales of int8."""
    quantizer: str | None = None
    """`module:function` that writes `files` from the float model, for an engine of int8 graphs. Called with (network,
    samples, path of the first of `files`), as `rtrain.compress.openvino_graph.write`. None: it is the float model."""

    @property
    def gradients(self) -> bool:
        """Whether it is the float model, with gradients: it is explained, distilled and quantized."""
        return self.quantizer is None


FLOAT = "torch"

ENGINES: Mapping[str, Entry] = {
    FLOAT: Entry("rtrain.predict:Torch", ("model.safetensors",), 1e-3),
    "openvino": Entry(
        "rtrain.predict:OpenVino",
        ("model.int8.xml", "model.int8.bin"),
        0.1,
        quantizer="rtrain.compress.openvino_graph:write",
    ),
}


def quantized() -> tuple[str, ...]:
    """Names of the engines of int8 graphs: what the setting `quantize.engine` may be. The first is its default."""
    return tuple(name for name, engine in ENGINES.items() if not engine.gradients)


def get(name: str) -> Entry:
    """Raises `UserError` for an engine that this rtrain has not: its artefact is of a newer one."""
    if name not in ENGINES:
        raise UserError(f"engine {name!r} is unknown; this rtrain has {', '.join(ENGINES)}")
    return ENGINES[name]


def named(reference: str) -> Any:
    """What `module:name` stands for."""
    module, name = reference.split(":")
    return getattr(importlib.import_module(module), name)
