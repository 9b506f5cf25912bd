"""A float model -> the graphs of OpenVINO; quantizers are put in by NNCF, and taken out here."""

import warnings
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rtrain.compress.exporters import int4
from rtrain.compress.exporters.base import Sample, by_nncf, quantize, unreported
from rtrain.core.errors import UserError
from rtrain.inference import predictor

if TYPE_CHECKING:
    import openvino
    import transformers

QUANTIZER = "FakeQuantize"
CARRY = ("Convert", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
"""What may stand between a quantizer and the operation that it is for."""
NO_OPERATION = (QUANTIZER, *CARRY, "ShapeOf", "Result")


class Edge(NamedTuple):
    """Where an operation's input leaves a quantizer."""

    into: "openvino.Input"
    quantized: "openvino.Output"
    """A weight's whole numbers and their scales; an activation's quantizer."""
    exact: "openvino.Output"
    """What the quantizer rounds."""


class Exported:
    def __init__(self, graph: "openvino.Model"):
        self._graph = graph

    def answering(self, threads: int | None) -> predictor.OpenVino:
        return predictor.OpenVino(self._graph, threads)

    def calibrated(self, samples: Sequence[Sample], overflow_fix: bool = False) -> "Quantized":
        with by_nncf() as nncf:
            return Quantized(quantize(nncf, self._graph, samples, overflow_fix))

    def weights_only(self) -> "Quantized":
        with by_nncf() as nncf:
            return Quantized(nncf.compress_weights(self._graph.clone(), mode=nncf.CompressWeightsMode.INT8_SYM))


class Quantized:
    def __init__(self, graph: "openvino.Model"):
        from openvino._offline_transformations import compress_quantize_weights_transformation

        self._graph = graph
        found = [
            (_name(node), into, exact)
            for node in graph.get_ordered_ops()
            if node.get_type_name() not in NO_OPERATION
            for into, exact in _rounded(node)
        ]
        # It puts whole numbers in the place of float weights and their quantizers; NNCF ends with it too. Here, and not
        # when the graph is written: else every loading of the graph would round the float weights anew.
        compress_quantize_weights_transformation(graph)
        self._edges: dict[str, list[Edge]] = {}
        for name, into, exact in found:
            self._edges.setdefault(name, []).append(Edge(into, into.get_source_output(), exact))

    @property
    def operations(self) -> Sequence[str]:
        return tuple(self._edges)

    def revert(self, operations: Collection[str]) -> None:
        for name, edges in self._edges.items():
            for edge in edges:
                edge.into.replace_source_output(edge.exact if name in operations else edge.quantized)
        self._graph.validate_nodes_and_infer_types()

    def narrow(self, lines: int) -> None:
        found = list(int4.narrowed(self._graph, lines))
        if not found:
            raise UserError(
                f"the graph has no table of {lines:,} lines, so quantize.table=int4 cannot be; write int8",
                code="unsupported",
            )
        for into, rows in found:
            into.replace_source_output(rows)
            for name, edges in self._edges.items():
                same = [edge._replace(quantized=rows) if _is(edge.into, into) else edge for edge in edges]
                self._edges[name] = same
        self._graph.validate_nodes_and_infer_types()

    def answering(self, threads: int | None) -> predictor.OpenVino:
        return predictor.OpenVino(self._graph, threads)

    def write(self, path: Path) -> None:
        import openvino

        openvino.save_model(self._graph, path, compress_to_fp16=False)


def export(network: "transformers.PreTrainedModel", sample: Sample) -> Exported:
    """The float graph: `rtrain.compress.exporters.base.Export`."""
    unreported()
    import openvino
    import torch

    # By its own name: `openvino.convert_model` is missing where an artefact was loaded before (`predict.OpenVino`).
    from openvino.tools.ovc import convert_model

    example = {name: torch.from_numpy(value) for name, value in sample.items()}
    shapes = {name: openvino.PartialShape([-1, -1]) for name in example}
    with torch.inference_mode(), warnings.catch_warnings():
        # Tracing warns of every Python branch in transformers' mask code; `export_check` shows whether it was right.
        warnings.simplefilter("ignore")
        return Exported(convert_model(network, example_input=example, input=list(shapes.items())))


def _rounded(node: "openvino.Node") -> Iterator[tuple["openvino.Input", "openvino.Output"]]:
    """(where an operation's input leaves a quantizer, what that rounds)"""
    for into in node.inputs():
        source = into.get_source_output().get_node()
        while source.get_type_name() in CARRY:
            into = source.input(0)
            source = into.get_source_output().get_node()
        if source.get_type_name() == QUANTIZER:
            yield into, source.input_value(0)


def _is(one: "openvino.Input", other: "openvino.Input") -> bool:
    """Whether both are the same input of the same operation."""
    first, second = ((each.get_node().get_friendly_name(), each.get_index()) for each in (one, other))
    return bool(first == second)


def _name(node: "openvino.Node") -> str:
    """`bert.encoder.layer.0.attention.self.query (MatMul)`, of the name that a trace gives."""
    module, _, rest = node.get_friendly_name().removeprefix("__module.").partition("/")
    return f"{module} ({rest.rpartition('/')[2]})" if rest else module
