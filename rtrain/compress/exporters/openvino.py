"""Float model -> OpenVINO graphs. NNCF inserts the quantizers; this module removes them to revert operations."""

import math
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rtrain.compress.exporters.base import ExportedGraph, QuantizedGraph, Sample, disable_telemetry
from rtrain.core.errors import UserError
from rtrain.inference import predictor

if TYPE_CHECKING:
    import openvino
    import transformers

QUANTIZER = "FakeQuantize"
PASS_THROUGH_OPS = ("Convert", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
"""Operators between a quantizer and its operation."""
NON_OPERATIONS = (QUANTIZER, *PASS_THROUGH_OPS, "ShapeOf", "Result")
GROUP_SIZE = 64
"""Numbers that share a scale. 32 doubles the scales without bringing answers nearer."""
MIN_GROUP_SIZE = 16
MAX_VALUE = 15
"""Largest 4-bit integer."""
MIN_SCALE = 2.0**-14
"""Smallest normal fp16 number."""
Floats = npt.NDArray[np.float32]


class OpenVinoEdge(NamedTuple):
    """An input of an operation that comes from a quantizer."""

    input_port: "openvino.Input"
    quantized: "openvino.Output"
    """Integers and scales of a weight, or the quantizer of an activation."""
    unquantized: "openvino.Output"
    """Input of the quantizer."""


class OpenVinoQuantizedGraph(QuantizedGraph):
    def __init__(self, graph: "openvino.Model"):
        from openvino._offline_transformations import compress_quantize_weights_transformation

        super().__init__(graph)
        quantized_inputs = [
            (_format_operation_name(node), into, exact)
            for node in graph.get_ordered_ops()
            if node.get_type_name() not in NON_OPERATIONS
            for into, exact in _find_quantized_inputs(node)
        ]
        # Replaces float weights and their quantizers by integers; NNCF ends with it too. It runs here, since each
        # loading of an uncompressed graph would round the float weights again.
        compress_quantize_weights_transformation(graph)
        for name, input_port, unquantized in quantized_inputs:
            self._edges.setdefault(name, []).append(
                OpenVinoEdge(input_port, input_port.get_source_output(), unquantized)
            )

    def revert(self, operations: Collection[str]) -> None:
        for name, edges in self._edges.items():
            for edge in edges:
                edge.input_port.replace_source_output(edge.unquantized if name in operations else edge.quantized)
        self._graph.validate_nodes_and_infer_types()

    def quantize_embedding_int4(self, vocab_size: int) -> None:
        tables = list(iter_int4_tables(self._graph, vocab_size))
        if not tables:
            raise UserError(
                f"the graph has no embedding table of {vocab_size:,} rows for quantize.embedding_dtype=int4; write "
                "int8",
                code="unsupported",
            )
        for input_port, rows in tables:
            input_port.replace_source_output(rows)
            for name, edges in self._edges.items():
                self._edges[name] = [
                    edge._replace(quantized=rows) if _is_same_input(edge.input_port, input_port) else edge
                    for edge in edges
                ]
        self._graph.validate_nodes_and_infer_types()

    def load_engine(self, threads: int | None) -> predictor.OpenVinoEngine:
        return predictor.OpenVinoEngine(self._graph, threads)

    def write(self, path: Path) -> None:
        import openvino

        openvino.save_model(self._graph, path, compress_to_fp16=False)


class OpenVinoExportedGraph(ExportedGraph):
    quantized_class = OpenVinoQuantizedGraph

    def load_engine(self, threads: int | None) -> predictor.OpenVinoEngine:
        return predictor.OpenVinoEngine(self._graph, threads)

    def copy(self) -> "openvino.Model":
        return self._graph.clone()


def export(network: "transformers.PreTrainedModel", sample: Sample) -> OpenVinoExportedGraph:
    """Export the float graph; an `rtrain.compress.exporters.base.ExportFunction`."""
    disable_telemetry()
    import openvino
    import torch

    # `openvino.convert_model` is missing after `predictor.OpenVinoEngine` has loaded an artifact.
    from openvino.tools.ovc import convert_model

    example = {name: torch.from_numpy(value) for name, value in sample.items()}
    shapes = {name: openvino.PartialShape([-1, -1]) for name in example}
    with torch.inference_mode(), warnings.catch_warnings():
        # Tracing warns about every Python branch in transformers' mask code; `check_export` verifies the graph.
        warnings.simplefilter("ignore")
        return OpenVinoExportedGraph(convert_model(network, example_input=example, input=list(shapes.items())))


def _find_quantized_inputs(node: "openvino.Node") -> Iterator[tuple["openvino.Input", "openvino.Output"]]:
    """Yield (input of the operation that comes from a quantizer, input of that quantizer)."""
    for input_port in node.inputs():
        source = input_port.get_source_output().get_node()
        while source.get_type_name() in PASS_THROUGH_OPS:
            input_port = source.input(0)
            source = input_port.get_source_output().get_node()
        if source.get_type_name() == QUANTIZER:
            yield input_port, source.input_value(0)


def _is_same_input(left: "openvino.Input", right: "openvino.Input") -> bool:
    first, second = ((port.get_node().get_friendly_name(), port.get_index()) for port in (left, right))
    return bool(first == second)


def _format_operation_name(node: "openvino.Node") -> str:
    """`bert.encoder.layer.0.attention.self.query (MatMul)`, from a node's trace name."""
    module, _, rest = node.get_friendly_name().removeprefix("__module.").partition("/")
    return f"{module} ({rest.rpartition('/')[2]})" if rest else module


class Int4Table(NamedTuple):
    """Quantized rows: value = (code - zero_point) x scale; codes are [rows, groups, group]."""

    codes: npt.NDArray[np.uint8]
    zero_point: npt.NDArray[np.uint8]
    """[rows, groups, 1]"""
    scale: npt.NDArray[Any]
    """[rows, groups, 1]; fp16, or fp32 if a scale is below `MIN_SCALE`."""

    @property
    def values(self) -> Floats:
        """[rows, width]"""
        rows = (self.codes.astype(np.float32) - self.zero_point) * self.scale.astype(np.float32)
        return rows.reshape(len(rows), -1)


def quantize_table(values: Floats) -> Int4Table:
    """Quantize a table [rows, width] to 4 bits: a scale and a zero point for every 64 numbers of a row, and an exact
    code for zero in each group.

    It takes half the bytes of an int8 table. Only the rows that are looked up are dequantized, so latency does not
    change. A few answers in a thousand change (docs/compress.md), in addition to the answers changed by int8.
    """
    width = values.shape[1]
    group = math.gcd(width, GROUP_SIZE)
    parts = values.reshape(len(values), -1, group if group >= MIN_GROUP_SIZE else width)
    low, high = (np.minimum(parts.min(-1, keepdims=True), 0), np.maximum(parts.max(-1, keepdims=True), 0))
    scale = np.maximum((high - low) / MAX_VALUE, MIN_SCALE * 2.0**-20)
    if scale.min() >= MIN_SCALE:
        scale = scale.astype(np.float16)
    zero_point = np.clip(np.round(-low / scale.astype(np.float32)), 0, MAX_VALUE)
    codes = np.clip(np.round(parts / scale.astype(np.float32) + zero_point), 0, MAX_VALUE)
    return Int4Table(codes.astype(np.uint8), zero_point.astype(np.uint8), scale)


def iter_int4_tables(graph: "openvino.Model", vocab_size: int) -> Iterator[tuple["openvino.Input", "openvino.Output"]]:
    """Yield (input of the lookup, 4-bit table) for each embedding table of `vocab_size` rows."""
    for node in graph.get_ops():
        if node.get_type_name() == "Gather":
            values = _constant_values(node.input_value(0))
            if values is not None and values.ndim == 2 and len(values) == vocab_size:
                yield node.input(0), _build_dequantized_output(quantize_table(values))


def _build_dequantized_output(table: Int4Table) -> "openvino.Output":
    import openvino
    from openvino import opset13 as ops

    codes, zero_point = (
        ops.convert(ops.constant(part, dtype=openvino.Type.u4), table.scale.dtype)
        for part in (table.codes, table.zero_point)
    )
    rows = ops.multiply(ops.subtract(codes, zero_point), ops.constant(table.scale))
    shape = ops.constant(np.array([-1, math.prod(table.codes.shape[1:])]))  # the number of rows is dynamic
    return ops.convert(ops.reshape(rows, shape, False), np.float32).output(0)


def _constant_values(output: "openvino.Output") -> Floats | None:
    """Evaluate a constant expression of Convert, Multiply and Subtract; None for any other node."""
    node = output.get_node()
    kind = node.get_type_name()
    if kind == "Constant":
        constant: Floats = np.asarray(node.data).astype(np.float32)
        return constant
    if kind not in ("Convert", "Multiply", "Subtract"):
        return None
    parts = [_constant_values(node.input_value(place)) for place in range(node.get_input_size())]
    if any(part is None for part in parts):
        return None
    if kind == "Convert":
        return parts[0]
    return np.multiply(*parts) if kind == "Multiply" else np.subtract(*parts)  # type: ignore[arg-type]
