"""A float model -> the graphs of OpenVINO; quantizers are put in by NNCF, and taken out here."""

import warnings
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rtrain import predict
from rtrain.compress import int4
from rtrain.compress.graphs import Sample, by_nncf, quantize, unreported
from rtrain.errors import UserError
from rtrain.network.rounding import LEVELS, SMALLEST, WEIGHT_LEVELS, Quantizers

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

    def answering(self, threads: int | None) -> predict.OpenVino:
        return predict.OpenVino(self._graph, threads)

    def calibrated(self, samples: Sequence[Sample], overflow_fix: bool = False) -> "Quantized":
        with by_nncf() as nncf:
            return Quantized(quantize(nncf, self._graph, samples, overflow_fix))

    def rounded(self, quantizers: Quantizers) -> "Quantized":
        graph = self._graph.clone()
        _put_in(graph, quantizers)
        return Quantized(graph)

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
            raise UserError(f"the graph has no table of {lines:,} lines, so quantize.table=int4 cannot be; write int8")
        for into, rows in found:
            into.replace_source_output(rows)
            for name, edges in self._edges.items():
                same = [edge._replace(quantized=rows) if _is(edge.into, into) else edge for edge in edges]
                self._edges[name] = same
        self._graph.validate_nodes_and_infer_types()

    def answering(self, threads: int | None) -> predict.OpenVino:
        return predict.OpenVino(self._graph, threads)

    def write(self, path: Path) -> None:
        import openvino

        openvino.save_model(self._graph, path, compress_to_fp16=False)


def export(network: "transformers.PreTrainedModel", sample: Sample) -> Exported:
    """The float graph: `rtrain.compress.graphs.Export`."""
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


def _put_in(graph: "openvino.Model", quantizers: Quantizers) -> None:
    """Put a quantizer wherever the network was trained to round. Raises `UserError` where the trace has changed its
    layers beyond recognition."""
    from openvino import opset13

    weights = {
        node.get_friendly_name().removeprefix("self.").removesuffix(".weight"): node
        for node in graph.get_ops()
        if node.get_type_name() == "Constant"
    }

    def reader(name: str) -> "openvino.Input":
        """Where a layer's operation takes its weights."""
        if name not in weights:
            raise UserError(f"the exported graph has no weights of {name}, which the model was trained to round")
        [into] = weights[name].output(0).get_target_inputs()
        while into.get_node().get_type_name() in CARRY:
            [into] = into.get_node().output(0).get_target_inputs()
        return into

    def fake(values: "openvino.Output", low: Any, high: Any, levels: int) -> "openvino.Output":
        bounds = [opset13.constant(np.asarray(bound, dtype=np.float32)) for bound in (low, high)]
        return opset13.fake_quantize(values, *bounds, *bounds, levels).output(0)

    def round_rows(into: "openvino.Input", by: Any = None) -> None:
        constant = into.get_source_output().get_node()
        data = np.array(constant.data)
        exact = constant if by is None else opset13.constant((data / by).astype(np.float32))
        reach = np.maximum(np.abs(exact.data).max(axis=-1, keepdims=True), SMALLEST)
        into.replace_source_output(fake(exact.output(0), -reach, reach, WEIGHT_LEVELS))

    # All of them first: once they are smoothed, a layer's weights are other ones.
    layers = {name for one in quantizers.activations for name in one.layers}
    known = {name: reader(name) for name in layers.union(quantizers.tables)}
    for name in quantizers.tables:
        round_rows(known[name])
    for one in quantizers.activations:
        places = [known[name] for name in one.layers]
        if one.side == "output":
            written = _with_bias(places[0].get_node())
            readers = list(written.get_target_inputs())
            rounded = fake(written, *one.bounds, LEVELS)
        else:
            readers = [place.get_node().input(1 - place.get_index()) for place in places]
            read = readers[0].get_source_output()
            if one.smooth is not None:
                read = opset13.multiply(read, opset13.constant(one.smooth)).output(0)
            rounded = fake(read, *one.bounds, LEVELS)
            for place in places:
                round_rows(place, one.smooth)
        for into in readers:
            into.replace_source_output(rounded)
    graph.validate_nodes_and_infer_types()


def _with_bias(node: "openvino.Node") -> "openvino.Output":
    """The answer of a linear layer whose product `node` is."""
    readers = [into.get_node() for into in node.output(0).get_target_inputs()]
    added = len(readers) == 1 and readers[0].get_type_name() == "Add"
    return (readers[0] if added else node).output(0)


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
