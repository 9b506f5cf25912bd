"""Float model -> ONNX graphs. NNCF inserts the quantizers; this module removes them to revert operations."""

import tempfile
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rtrain.compress.exporters.base import ExportedGraph, QuantizedGraph, Sample
from rtrain.inference import predictor

if TYPE_CHECKING:
    import onnx
    import transformers

OPSET = 17
"""The first operator set with LayerNormalization as one operator."""
QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
PASS_THROUGH_OPS = ("Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
"""Operators between a quantizer and its operation."""
NON_OPERATIONS = (QUANTIZE, DEQUANTIZE, *PASS_THROUGH_OPS, "Shape")


class OnnxEdge(NamedTuple):
    """An input of an operation that comes from a quantizer."""

    node: "onnx.NodeProto"
    input_index: int
    quantized: str
    unquantized: str
    """Input of the quantizer."""


class OnnxQuantizedGraph(QuantizedGraph):
    def __init__(self, graph: "onnx.ModelProto"):
        super().__init__(graph)
        producers = {name: node for node in graph.graph.node for name in node.output}
        for node in graph.graph.node:
            if node.op_type not in NON_OPERATIONS and (edges := list(_find_edges(node, producers))):
                self._edges.setdefault(_format_operation_name(node), []).extend(edges)

    def revert(self, operations: Collection[str]) -> None:
        for name, edges in self._edges.items():
            for edge in edges:
                edge.node.input[edge.input_index] = edge.unquantized if name in operations else edge.quantized

    def load_engine(self, threads: int | None) -> predictor.OnnxRuntimeEngine:
        return predictor.OnnxRuntimeEngine(self._graph.SerializeToString(), threads)

    def write(self, path: Path) -> None:
        import onnx
        from nncf.onnx.graph.passes import compress_quantize_weights_transformation

        graph = _copy(self._graph)
        _drop_unused(graph.graph)
        # Replaces float weights and their quantizers by integers; NNCF ends with it too.
        compress_quantize_weights_transformation(graph)
        _drop_unused(graph.graph)
        onnx.save(graph, str(path))


class OnnxExportedGraph(ExportedGraph):
    quantized_class = OnnxQuantizedGraph

    def load_engine(self, threads: int | None) -> predictor.OnnxRuntimeEngine:
        return predictor.OnnxRuntimeEngine(self._graph.SerializeToString(), threads)

    def copy(self) -> "onnx.ModelProto":
        return _copy(self._graph)


def export(network: "transformers.PreTrainedModel", sample: Sample) -> OnnxExportedGraph:
    """Export the float graph; an `rtrain.compress.exporters.base.ExportFunction`."""
    import onnx
    import torch

    names = list(sample)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode(), warnings.catch_warnings():
        # The tracing exporter warns about itself and about every Python branch in transformers' mask code;
        # `check_export` verifies the graph. The dynamo exporter needs another package and took twenty times as long.
        warnings.simplefilter("ignore")
        file = Path(folder) / "float.onnx"
        torch.onnx.export(
            network,
            ({name: torch.from_numpy(value) for name, value in sample.items()},),
            file,
            input_names=names,
            dynamic_axes={name: {0: "rows", 1: "tokens"} for name in names},
            opset_version=OPSET,
            dynamo=False,
        )
        return OnnxExportedGraph(onnx.load_model(str(file)))


def _find_edges(node: "onnx.NodeProto", producers: "Mapping[str, onnx.NodeProto]") -> Iterator[OnnxEdge]:
    for start in range(len(node.input)):
        consumer, input_index = node, start
        source = producers.get(consumer.input[input_index])
        while source is not None and source.op_type in PASS_THROUGH_OPS:
            consumer, input_index = source, 0
            source = producers.get(consumer.input[input_index])
        if source is None or source.op_type != DEQUANTIZE:
            continue
        quantizer = producers.get(source.input[0])
        if quantizer is not None and quantizer.op_type == QUANTIZE:
            yield OnnxEdge(consumer, input_index, source.output[0], quantizer.input[0])


def _format_operation_name(node: "onnx.NodeProto") -> str:
    """`bert.encoder.layer.0.attention.self.query (MatMul)`, from a node's trace name."""
    module, _, kind = node.name.strip("/").replace("/", ".").rpartition(".")
    return f"{module} ({kind})"


def _drop_unused(graph: "onnx.GraphProto") -> None:
    used_names = {output.name for output in graph.output}
    for node in reversed(list(graph.node)):  # nodes are in topological order
        if used_names.isdisjoint(node.output):
            graph.node.remove(node)
        else:
            used_names.update(node.input)
    for weight in [weight for weight in graph.initializer if weight.name not in used_names]:
        graph.initializer.remove(weight)


def _copy(graph: "onnx.ModelProto") -> "onnx.ModelProto":
    duplicate = type(graph)()
    duplicate.CopyFrom(graph)
    return duplicate
