"""The table of engines, which compute an artifact's logits, by the name in artifact.json.

Another engine, for `quantize.engine=NAME`:

1. Here, a line in `ENGINES`; the fields of `EngineSpec` name all that it needs. Settings, export and serving read them.
2. `rtrain/inference/predictor.py`: its loader, which returns an object with the protocol `Engine`.
3. `rtrain/compress/exporters/NAME.py`: its quantizer; `rtrain/compress/exporters/base.py` has the protocol.
4. `pyproject.toml`: its libraries, in `dependencies` or in the extra that its line names.

This module imports almost nothing: loaders are imported on use, and an int8 artifact is served without torch.
"""

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rtrain.core.errors import UserError

COMPRESSED_SUFFIX = ".gz"
"""Ends the names of a graph's files that are kept compressed (`quantize.compressed`)."""


class EngineSpec(NamedTuple):
    loader: str
    """`module:function`. Called with (folder, artifact, threads); returns a `rtrain.inference.predictor.Engine`."""
    files: tuple[str, ...]
    """The model's files in the artifact's folder, beside config.json and the tokenizer."""
    golden_tolerance: float
    """Largest difference of its logits from the golden answers: kernels of other CPUs round differently, in the last
    bits of fp32, or by a few steps of int8."""
    quantizer: str | None = None
    """`module:function` that exports the float model, for an int8 engine:
    `rtrain.compress.exporters.base.ExportFunction`. None for the float engine."""
    libraries: tuple[str, ...] = ()
    """Optional modules that `quantizer` and `loader` need."""
    extra: str = ""
    """The extra of rtrain with `libraries`."""
    packages: tuple[str, ...] = ()
    """Packages that inference needs (`rtrain export --with-wheels`); default: one with the engine's name."""
    compiles_per_shape: bool = False
    """Whether it compiles its graph, and keeps memory, for each input shape. Calls are then padded to few shapes, since
    clients choose the shapes."""
    supports_gpu: bool = False
    """Whether its loader also takes a device, torch's `cuda`."""
    supports_int4_embedding: bool = False
    """Whether its word embedding can have 4 bits (`rtrain.compress.exporters.openvino`)."""

    def find_files(self, folder: Path) -> list[Path]:
        """Return its files in an artifact's folder, plain or compressed; the plain one comes first."""
        pairs = ((folder / name, folder / f"{name}{COMPRESSED_SUFFIX}") for name in self.files)
        return [path for pair in pairs for path in [path for path in pair if path.is_file()][:1]]

    @property
    def has_gradients(self) -> bool:
        """Whether it is the float engine, with gradients, for explanations, distillation and quantization."""
        return self.quantizer is None


FLOAT_ENGINE = "torch"

ENGINES: Mapping[str, EngineSpec] = {
    FLOAT_ENGINE: EngineSpec(
        "rtrain.inference.predictor:TorchEngine",
        ("model.safetensors",),
        1e-3,
        packages=("torch", "transformers", "safetensors"),
        supports_gpu=True,
    ),
    "openvino": EngineSpec(
        "rtrain.inference.predictor:open_openvino",
        ("model.int8.xml", "model.int8.bin"),
        0.1,
        quantizer="rtrain.compress.exporters.openvino:export",
        compiles_per_shape=True,
        supports_int4_embedding=True,
    ),
    "onnxruntime": EngineSpec(
        "rtrain.inference.predictor:open_onnxruntime",
        ("model.int8.onnx",),
        0.1,
        quantizer="rtrain.compress.exporters.onnx:export",
        libraries=("onnx", "onnxruntime"),
        extra="onnx",
    ),
}


def list_quantized_engines() -> tuple[str, ...]:
    """Return the names of the int8 engines, the values of `quantize.engine`. The first is the default."""
    return tuple(name for name, engine in ENGINES.items() if not engine.has_gradients)


def get_engine(name: str) -> EngineSpec:
    """Raises `UserError` for an unknown engine, of an artifact of a newer version."""
    if name not in ENGINES:
        raise UserError(f"engine {name!r} is unknown; this rtrain has {', '.join(ENGINES)}", code="unknown_name")
    return ENGINES[name]


def require_libraries(name: str, libraries: Sequence[str]) -> None:
    """Raises `UserError` where one of an engine's libraries is not installed."""
    missing_libraries = [library for library in libraries if importlib.util.find_spec(library) is None]
    if missing_libraries:
        raise UserError(
            f"the engine {name} needs {' and '.join(missing_libraries)}: pip install 'rtrain[{ENGINES[name].extra}]', "
            f"or quantize with quantize.engine={list_quantized_engines()[0]}",
            code="not_installed",
        )


def import_object(import_path: str) -> Any:
    """Import the object `module:name`."""
    module, name = import_path.split(":")
    return getattr(importlib.import_module(module), name)
