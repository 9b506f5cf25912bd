"""A float model -> the graphs of ONNX; quantizers are put in by NNCF, and taken out here."""

import tempfile
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rtrain.compress.exporters.base import Sample, by_nncf, quantize
from rtrain.inference import predictor

if TYPE_CHECKING:
    import onnx
    import transformers

OPSET = 17
"""The first operator set with LayerNormalization as one operator."""
QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
CARRY = ("Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
"""What may stand between a quantizer and the operation that it is for."""
NO_OPERATION = (QUANTIZE, DEQUANTIZE, *CARRY, "Shape")


class Edge(NamedTuple):
    """Where an operation's input leaves a quantizer."""

    node: "onnx.NodeProto"
    place: int
    quantized: str
    exact: str
    """What the quantizer rounds."""


class Exported:
    def __init__(self, graph: "onnx.ModelProto"):
        self._graph = graph

    def answering(self, threads: int | None) -> predictor.OnnxRuntime:
        return predictor.OnnxRuntime(self._graph.SerializeToString(), threads)

    def calibrated(self, samples: Sequence[Sample], overflow_fix: bool = False) -> "Quantized":
        with by_nncf() as nncf:
            return Quantized(quantize(nncf, self._graph, samples, overflow_fix))

    def weights_only(self) -> "Quantized":
        with by_nncf() as nncf:
            return Quantized(nncf.compress_weights(_copy(self._graph), mode=nncf.CompressWeightsMode.INT8_SYM))


class Quantized:
    def __init__(self, graph: "onnx.ModelProto"):
        self._graph = graph
        makers = {name: node for node in graph.graph.node for name in node.output}
        self._edges: dict[str, list[Edge]] = {}
        for node in graph.graph.node:
            if node.op_type not in NO_OPERATION and (edges := list(_edges(node, makers))):
                self._edges.setdefault(_name(node), []).extend(edges)

    @property
    def operations(self) -> Sequence[str]:
        return tuple(self._edges)

    def revert(self, operations: Collection[str]) -> None:
        for name, edges in self._edges.items():
            for edge in edges:
                edge.node.input[edge.place] = edge.exact if name in operations else edge.quantized

    def answering(self, threads: int | None) -> predictor.OnnxRuntime:
        return predictor.OnnxRuntime(self._graph.SerializeToString(), threads)

    def write(self, path: Path) -> None:
        import onnx
        from nncf.onnx.graph.passes import compress_quantize_weights_transformation

        graph = _copy(self._graph)
        _drop_unused(graph.graph)
        # It puts whole numbers in the place of float weights and their quantizers; NNCF ends with it too.
        compress_quantize_weights_transformation(graph)
        _drop_unused(graph.graph)
        onnx.save(graph, str(path))


def export(network: "transformers.PreTrainedModel", sample: Sample) -> Exported:
    """The float graph: `rtrain.compress.exporters.base.Export`."""
    import onnx
    import torch

    names = list(sample)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode(), warnings.catch_warnings():
        # By the tracing exporter, which warns of itself and of every Python branch in transformers' mask code;
        # `export_check` shows whether it was right. The newer one needs a package more and took twenty times as long.
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
        return Exported(onnx.load_model(str(file)))


def _edges(node: "onnx.NodeProto", makers: "Mapping[str, onnx.NodeProto]") -> Iterator[Edge]:
    for start in range(len(node.input)):
        at, place = node, start
        source = makers.get(at.input[place])
        while source is not None and source.op_type in CARRY:
            at, place = source, 0
            source = makers.get(at.input[place])
        if source is None or source.op_type != DEQUANTIZE:
            continue
        rounded = makers.get(source.input[0])
        if rounded is not None and rounded.op_type == QUANTIZE:
            yield Edge(at, place, source.output[0], rounded.input[0])


def _name(node: "onnx.NodeProto") -> str:
    """`bert.encoder.layer.0.attention.self.query (MatMul)`, of the name that a trace gives."""
    module, _, kind = node.name.strip("/").replace("/", ".").rpartition(".")
    return f"{module} ({kind})"


def _drop_unused(graph: "onnx.GraphProto") -> None:
    """Remove nodes whose outputs nothing reads, what only these read, and weights that nothing reads."""
    wanted = {output.name for output in graph.output}
    for node in reversed(list(graph.node)):  # a node comes after what it reads
        if wanted.isdisjoint(node.output):
            graph.node.remove(node)
        else:
            wanted.update(node.input)
    for weight in [weight for weight in graph.initializer if weight.name not in wanted]:
        graph.initializer.remove(weight)


def _copy(graph: "onnx.ModelProto") -> "onnx.ModelProto":
    copied = type(graph)()
    copied.CopyFrom(graph)
    return copied
