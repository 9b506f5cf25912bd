"""Float model -> OpenVINO graphs. NNCF inserts the quantizers; this module removes them to revert operations."""

import warnings
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rtrain.compress.exporters import int4
from rtrain.compress.exporters.base import Sample, disable_telemetry, quantize, quiet_nncf
from rtrain.core.errors import UserError
from rtrain.inference import predictor

if TYPE_CHECKING:
    import openvino
    import transformers

QUANTIZER = "FakeQuantize"
PASS_THROUGH_OPS = ("Convert", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
"""Operators between a quantizer and its operation."""
NON_OPERATIONS = (QUANTIZER, *PASS_THROUGH_OPS, "ShapeOf", "Result")


class OpenVinoEdge(NamedTuple):
    """An input of an operation that comes from a quantizer."""

    input_port: "openvino.Input"
    quantized: "openvino.Output"
    """Integers and scales of a weight, or the quantizer of an activation."""
    unquantized: "openvino.Output"
    """Input of the quantizer."""


class OpenVinoExportedGraph:
    def __init__(self, graph: "openvino.Model"):
        self._graph = graph

    def load_engine(self, threads: int | None) -> predictor.OpenVinoEngine:
        return predictor.OpenVinoEngine(self._graph, threads)

    def calibrate(self, samples: Sequence[Sample], overflow_fix: bool = False) -> "OpenVinoQuantizedGraph":
        with quiet_nncf() as nncf:
            return OpenVinoQuantizedGraph(quantize(nncf, self._graph, samples, overflow_fix))

    def quantize_weights(self) -> "OpenVinoQuantizedGraph":
        with quiet_nncf() as nncf:
            return OpenVinoQuantizedGraph(
                nncf.compress_weights(self._graph.clone(), mode=nncf.CompressWeightsMode.INT8_SYM)
            )


class OpenVinoQuantizedGraph:
    def __init__(self, graph: "openvino.Model"):
        from openvino._offline_transformations import compress_quantize_weights_transformation

        self._graph = graph
        quantized_inputs = [
            (_format_operation_name(node), into, exact)
            for node in graph.get_ordered_ops()
            if node.get_type_name() not in NON_OPERATIONS
            for into, exact in _find_quantized_inputs(node)
        ]
        # Replaces float weights and their quantizers by integers; NNCF ends with it too. It runs here, since each
        # loading of an uncompressed graph would round the float weights again.
        compress_quantize_weights_transformation(graph)
        self._edges: dict[str, list[OpenVinoEdge]] = {}
        for name, input_port, unquantized in quantized_inputs:
            self._edges.setdefault(name, []).append(
                OpenVinoEdge(input_port, input_port.get_source_output(), unquantized)
            )

    @property
    def operations(self) -> Sequence[str]:
        return tuple(self._edges)

    def revert(self, operations: Collection[str]) -> None:
        for name, edges in self._edges.items():
            for edge in edges:
                edge.input_port.replace_source_output(edge.unquantized if name in operations else edge.quantized)
        self._graph.validate_nodes_and_infer_types()

    def quantize_embedding_int4(self, vocab_size: int) -> None:
        tables = list(int4.iter_int4_tables(self._graph, vocab_size))
        if not tables:
            raise UserError(
                f"the graph has no embedding table of {vocab_size:,} rows for quantize.embedding_dtype=int4; write "
                "int8",
                code="unsupported",
            )
        for input_port, rows in tables:
            input_port.replace_source_output(rows)
            for name, edges in self._edges.items():
                updated_edges = [
                    edge._replace(quantized=rows) if _is_same_input(edge.input_port, input_port) else edge
                    for edge in edges
                ]
                self._edges[name] = updated_edges
        self._graph.validate_nodes_and_infer_types()

    def load_engine(self, threads: int | None) -> predictor.OpenVinoEngine:
        return predictor.OpenVinoEngine(self._graph, threads)

    def write(self, path: Path) -> None:
        import openvino

        openvino.save_model(self._graph, path, compress_to_fp16=False)


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
    """Whether both are the same input of one operation."""
    first, second = ((port.get_node().get_friendly_name(), port.get_index()) for port in (left, right))
    return bool(first == second)


def _format_operation_name(node: "openvino.Node") -> str:
    """`bert.encoder.layer.0.attention.self.query (MatMul)`, from a node's trace name."""
    module, _, rest = node.get_friendly_name().removeprefix("__module.").partition("/")
    return f"{module} ({rest.rpartition('/')[2]})" if rest else module
