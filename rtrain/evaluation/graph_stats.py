"""What is in an int8 graph of OpenVINO: constants by part of the model, operators by type and precision.

The .xml alone is read, and nothing is computed.
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

from rtrain.core.engines import PACKED

SCAFFOLD = ("Const", "Parameter", "Result")
"""Layers that compute nothing."""
CARRY = ("Convert", "Multiply", "Subtract", "Reshape", "Transpose", "Unsqueeze", "Squeeze")
"""What stands between a compressed weight and the operator that uses it."""
ROUND = ("FakeQuantize",)
"""What rounds activations."""
WEIGHED = ("MatMul", "Gather", "Convolution")
"""Operators whose precision is that of their weights."""
WHOLE = ("i8", "u8", "i4", "u4")
TENSORS = (*WHOLE, "f32", "f16", "bf16", "f64")
"""Element types of a model's numbers; others are places and shapes."""
PARTS = (
    (re.compile(r"word_embeddings|embed_tokens|tok_embeddings|wte"), "word table"),
    (re.compile(r"\.layers?\.\d+(\.|$|/)"), "layers"),
    (re.compile(r"embedding"), "other embeddings"),
)
"""By the first pattern that a weight's name has; all else is the head."""
HEAD = "head"


def part_of(name: str) -> str:
    """Which part of a model a weight, or an operator, belongs to."""
    return next((part for pattern, part in PARTS if pattern.search(name)), HEAD)


@dataclass(frozen=True)
class Layer:
    name: str
    type: str
    element: str
    """Element type of a constant; else empty."""
    size: int
    """Bytes of a constant."""
    numbers: int
    """Elements of a constant."""
    is_own: bool
    """Whether the name is the model's own, and not one that an exporter has made."""


@dataclass(frozen=True)
class Part:
    numbers: int
    bytes: int
    precisions: Mapping[str, int]
    """Numbers by element type."""


class Graph:
    def __init__(self, layers: Mapping[str, Layer], edges: Iterable[tuple[str, str]]):
        """`layers` by their ids; `edges`: from one to another, those into a layer in the order of its inputs."""
        self.layers = layers
        self._into: dict[str, list[str]] = defaultdict(list)
        self._outof: dict[str, list[str]] = defaultdict(list)
        for source, target in edges:
            self._into[target].append(source)
            self._outof[source].append(target)

    def parts(self) -> dict[str, Part]:
        """The constants by part of the model. A constant without a name of its own belongs to what uses it."""
        found: dict[str, list[Layer]] = defaultdict(list)
        for number, layer in self.layers.items():
            if layer.type == "Const" and layer.element in TENSORS:
                found[part_of(self._named(number))].append(layer)
        return {part: _sum(layers) for part, layers in found.items()}

    def operators(self) -> dict[str, dict[str, int]]:
        """Type -> precision -> how many; the most frequent type first.

        The precision of an operator with weights: `i8 x i8` where weights and activations are whole numbers, `i8
        weights` where the weights alone are (`u4 weights` of 4 bits), `float`. Others have `-`, since they follow what
        they are given.
        """
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for number, layer in self.layers.items():
            if layer.type not in SCAFFOLD:
                found[layer.type][self._precision(number) if layer.type in WEIGHED else "-"] += 1
        ordered = sorted(found, key=lambda name: (-found[name].total(), name))
        return {name: dict(found[name].most_common()) for name in ordered}

    def _precision(self, number: str) -> str:
        sources = [self._source(one) for one in self._into[number]]
        whole = next((layer.element for layer in sources if layer.type == "Const" and layer.element in WHOLE), None)
        if whole is None:
            return "float"
        return f"i8 x {whole}" if any(layer.type in ROUND for layer in sources) else f"{whole} weights"

    def _source(self, number: str) -> Layer:
        """What an input comes from, past what only carries it."""
        while self.layers[number].type in CARRY and self._into[number]:
            number = self._into[number][0]
        return self.layers[number]

    def _named(self, number: str) -> str:
        """The name of a layer or, where it has none of the model's own, of the next one that uses it and has."""
        waiting, met = [number], {number}
        while waiting:
            one = waiting.pop(0)
            if self.layers[one].is_own:
                return self.layers[one].name
            ahead = [target for target in self._outof[one] if target not in met]
            met.update(ahead)
            waiting += ahead
        return ""


def _opened(path: Path) -> IO[bytes]:
    packed = path.name.endswith(PACKED)
    return cast(IO[bytes], gzip.open(path)) if packed else path.open("rb")


def of_openvino(path: Path) -> Graph:
    with _opened(path) as file:
        root = ElementTree.parse(file).getroot()
    layers = {node.attrib["id"]: _layer(node) for node in root.iterfind("layers/layer")}
    return Graph(layers, ((edge.attrib["from-layer"], edge.attrib["to-layer"]) for edge in root.iterfind("edges/edge")))


def _layer(node: ElementTree.Element) -> Layer:
    name, kind, data = node.attrib.get("name", ""), node.attrib["type"], node.find("data")
    own = name.startswith("__module")
    if kind != "Const" or data is None:  # only a constant's shape is sure to be known
        return Layer(name, kind, "", 0, 0, own)
    shape = [int(one) for one in data.attrib.get("shape", "").split(",") if one.strip()]
    size, numbers = int(data.attrib.get("size", 0)), math.prod(shape)
    return Layer(name, kind, data.attrib.get("element_type", ""), size, numbers, own)


def _sum(layers: Iterable[Layer]) -> Part:
    every, precisions = list(layers), Counter[str]()
    for layer in every:
        precisions[layer.element] += layer.numbers
    return Part(sum(precisions.values()), sum(layer.size for layer in every), dict(precisions.most_common()))
