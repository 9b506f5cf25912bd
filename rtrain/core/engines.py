"""The engines that compute an artefact's logits: one table, by the name that artifact.json holds.

Settings, artefacts, serving and quantization all ask it, so it imports almost nothing: what it names is imported where
it is used, and an int8 artefact is served without torch.
"""

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rtrain.core.errors import UserError

PACKED = ".gz"
"""Ends the names of a graph's files that are kept compressed (`quantize.compressed`)."""


class Entry(NamedTuple):
    loader: str
    """`module:function`. Called with (folder, artifact, threads); its `logits` answers
    (`rtrain.inference.predictor.Engine`)."""
    files: tuple[str, ...]
    """The model's files in the artefact's folder, beside config.json and the tokenizer."""
    golden_tolerance: float
    """Most that its logits may differ from the golden answers: another processor's kernels round otherwise, in the last
    bits of fp32, by a step of a few scales of int8."""
    quantizer: str | None = None
    """`module:function` that exports the float model, for an engine of int8 graphs:
    `rtrain.compress.exporters.base.Export`. None: it is the float model."""
    libraries: tuple[str, ...] = ()
    """Modules that `quantizer` and `loader` need and that not every installation of rtrain has."""
    plans_by_shape: bool = False
    """Whether it keeps a plan of its graph, and memory for it, for each shape of inputs. Calls are then padded to few
    shapes, since clients choose the shapes."""
    on_gpu: bool = False
    """Whether its loader takes a device too, torch's `cuda`."""

    narrows: bool = False
    """Whether its word table can have 4 bits (`rtrain.compress.exporters.int4`)."""

    def present(self, folder: Path) -> list[Path]:
        """Its files in an artefact's folder, as they are or compressed."""
        both = ((folder / name, folder / f"{name}{PACKED}") for name in self.files)
        return [found for pair in both if (found := next((one for one in pair if one.is_file()), None)) is not None]

    @property
    def gradients(self) -> bool:
        """Whether it is the float model, with gradients: it is explained, distilled and quantized."""
        return self.quantizer is None


FLOAT = "torch"

ENGINES: Mapping[str, Entry] = {
    FLOAT: Entry("rtrain.inference.predictor:Torch", ("model.safetensors",), 1e-3, on_gpu=True),
    "openvino": Entry(
        "rtrain.inference.predictor:open_openvino",
        ("model.int8.xml", "model.int8.bin"),
        0.1,
        quantizer="rtrain.compress.exporters.openvino:export",
        plans_by_shape=True,
        narrows=True,
    ),
    "onnxruntime": Entry(
        "rtrain.inference.predictor:open_onnxruntime",
        ("model.int8.onnx",),
        0.1,
        quantizer="rtrain.compress.exporters.onnx:export",
        libraries=("onnx", "onnxruntime"),
    ),
}


def quantized() -> tuple[str, ...]:
    """Names of the engines of int8 graphs: what the setting `quantize.engine` may be. The first is its default."""
    return tuple(name for name, engine in ENGINES.items() if not engine.gradients)


def get(name: str) -> Entry:
    """Raises `UserError` for an engine that this rtrain has not: its artefact is of a newer one."""
    if name not in ENGINES:
        raise UserError(f"engine {name!r} is unknown; this rtrain has {', '.join(ENGINES)}", code="unknown_name")
    return ENGINES[name]


def needed(name: str, libraries: Sequence[str]) -> None:
    """Raises `UserError` where one of an engine's libraries is not installed."""
    absent = [library for library in libraries if importlib.util.find_spec(library) is None]
    if absent:
        raise UserError(
            f"the engine {name} needs {' and '.join(absent)}: pip install 'rtrain[onnx]', or quantize with "
            f"quantize.engine={quantized()[0]}",
            code="not_installed",
        )


def named(reference: str) -> Any:
    """What `module:name` stands for."""
    module, name = reference.split(":")
    return getattr(importlib.import_module(module), name)
