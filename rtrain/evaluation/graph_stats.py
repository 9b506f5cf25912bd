"""Contents of an OpenVINO int8 graph: constants by part of the model, operators by type and precision.

Only the .xml is read.
"""

import gzip
import math
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from rtrain.core.engines import COMPRESSED_SUFFIX

NON_COMPUTE_LAYERS = ("Const", "Parameter", "Result")
"""Layers that compute nothing."""
PASS_THROUGH_OPS = ("Convert", "Multiply", "Subtract", "Reshape", "Transpose", "Unsqueeze", "Squeeze")
"""Operators between a compressed weight and its user."""
QUANTIZER_OPS = ("FakeQuantize",)
"""Operators that quantize activations."""
WEIGHTED_OPS = ("MatMul", "Gather", "Convolution")
"""Operators whose precision follows from their weights."""
INTEGER_TYPES = ("i8", "u8", "i4", "u4")
TENSOR_TYPES = (*INTEGER_TYPES, "f32", "f16", "bf16", "f64")
"""Element types of weights; other types are indices and shapes."""
PART_PATTERNS = (
    (re.compile(r"word_embeddings|embed_tokens|tok_embeddings|wte"), "word table"),
    (re.compile(r"\.layers?\.\d+(\.|$|/)"), "layers"),
    (re.compile(r"embedding"), "other embeddings"),
)
"""The first matching pattern names the part; other weights belong to the head."""
HEAD = "head"


def find_part(name: str) -> str:
    """Return the part of the model of a weight or an operator."""
    return next((part for pattern, part in PART_PATTERNS if pattern.search(name)), HEAD)


@dataclass(frozen=True)
class GraphLayer:
    name: str
    type: str
    element_type: str
    """Element type of a constant; empty for other layers."""
    byte_count: int
    """Bytes of a constant."""
    element_count: int
    """Elements of a constant."""
    has_model_name: bool
    """Whether the name is from the model, not from the exporter."""


@dataclass(frozen=True)
class ModelPart:
    element_count: int
    bytes: int
    precisions: Mapping[str, int]
    """Elements by type."""


class ModelGraph:
    def __init__(self, layers: Mapping[str, GraphLayer], edges: Iterable[tuple[str, str]]):
        """`layers` by id; `edges`: (source, target), sorted by input index."""
        self.layers = layers
        self._inputs: dict[str, list[str]] = defaultdict(list)
        self._outputs: dict[str, list[str]] = defaultdict(list)
        for source, target in edges:
            self._inputs[target].append(source)
            self._outputs[source].append(target)

    def sum_by_part(self) -> dict[str, ModelPart]:
        """Sum the constants by part of the model. A constant without a model name belongs to its user's part."""
        layers_by_part: dict[str, list[GraphLayer]] = defaultdict(list)
        for layer_id, layer in self.layers.items():
            if layer.type == "Const" and layer.element_type in TENSOR_TYPES:
                layers_by_part[find_part(self._find_name(layer_id))].append(layer)
        return {part: _sum_layers(layers) for part, layers in layers_by_part.items()}

    def count_operators(self) -> dict[str, dict[str, int]]:
        """Count operators: type -> precision -> number, the most frequent type first.

        Precisions of operators with weights: `i8 x i8` (integer weights and activations), `i8 weights` or `u4 weights`
        (integer weights only), `float`. Other operators have `-`.
        """
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for layer_id, layer in self.layers.items():
            if layer.type not in NON_COMPUTE_LAYERS:
                counts[layer.type][self._find_precision(layer_id) if layer.type in WEIGHTED_OPS else "-"] += 1
        ordered = sorted(counts, key=lambda name: (-counts[name].total(), name))
        return {name: dict(counts[name].most_common()) for name in ordered}

    def _find_precision(self, layer_id: str) -> str:
        sources = [self._find_source(input_id) for input_id in self._inputs[layer_id]]
        weight_type = next(
            (layer.element_type for layer in sources if layer.type == "Const" and layer.element_type in INTEGER_TYPES),
            None,
        )
        if weight_type is None:
            return "float"
        return (
            f"i8 x {weight_type}" if any(layer.type in QUANTIZER_OPS for layer in sources) else f"{weight_type} weights"
        )

    def _find_source(self, layer_id: str) -> GraphLayer:
        """Find the source of an input behind pass-through operators."""
        while self.layers[layer_id].type in PASS_THROUGH_OPS and self._inputs[layer_id]:
            layer_id = self._inputs[layer_id][0]
        return self.layers[layer_id]

    def _find_name(self, layer_id: str) -> str:
        """Return the model name of a layer, or of the nearest user that has one."""
        queue, visited = [layer_id], {layer_id}
        while queue:
            current = queue.pop(0)
            if self.layers[current].has_model_name:
                return self.layers[current].name
            successors = [target for target in self._outputs[current] if target not in visited]
            visited.update(successors)
            queue += successors
        return ""


def _open(path: Path) -> IO[bytes]:
    is_compressed = path.name.endswith(COMPRESSED_SUFFIX)
    return cast(IO[bytes], gzip.open(path)) if is_compressed else path.open("rb")


def read_openvino_graph(path: Path) -> ModelGraph:
    with _open(path) as file:
        root = ElementTree.parse(file).getroot()
    layers = {node.attrib["id"]: _parse_layer(node) for node in root.iterfind("layers/layer")}
    return ModelGraph(
        layers, ((edge.attrib["from-layer"], edge.attrib["to-layer"]) for edge in root.iterfind("edges/edge"))
    )


def _parse_layer(node: ElementTree.Element) -> GraphLayer:
    name, kind, data = node.attrib.get("name", ""), node.attrib["type"], node.find("data")
    has_model_name = name.startswith("__module")
    if kind != "Const" or data is None:  # only constants have static shapes
        return GraphLayer(name, kind, "", 0, 0, has_model_name)
    shape = [int(dimension) for dimension in data.attrib.get("shape", "").split(",") if dimension.strip()]
    size, element_count = int(data.attrib.get("size", 0)), math.prod(shape)
    return GraphLayer(name, kind, data.attrib.get("element_type", ""), size, element_count, has_model_name)


def _sum_layers(layers: Iterable[GraphLayer]) -> ModelPart:
    all_layers, precisions = list(layers), Counter[str]()
    for layer in all_layers:
        precisions[layer.element_type] += layer.element_count
    return ModelPart(
        sum(precisions.values()), sum(layer.byte_count for layer in all_layers), dict(precisions.most_common())
    )
