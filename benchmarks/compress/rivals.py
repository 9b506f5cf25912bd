"""The float student in other engines, set up by their documentation. Each answers padded inputs."""

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rtrain.compress.exporters.base import disable_telemetry

if TYPE_CHECKING:
    import transformers

Inputs = Mapping[str, npt.NDArray[np.int64]]
Answer = Callable[[Inputs], npt.NDArray[np.float32]]
"""Padded inputs [rows, tokens] -> logits, of any form."""
NAMES = ("input_ids", "attention_mask", "token_type_ids")


class Absent(Exception):
    """The engine is not installed."""


def torch_float(network: "transformers.PreTrainedModel") -> Answer:
    """Transformers with default settings."""
    import torch

    torch.set_num_threads(1)

    def answer(inputs: Inputs) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            output = network(**{name: torch.from_numpy(inputs[name]) for name in NAMES})
        return _logits(output)

    return answer


def torch_dynamic(network: "transformers.PreTrainedModel") -> Answer:
    """Linear layers in int8 by `torch.ao.quantization.quantize_dynamic`: the scales are those of each batch."""
    import copy

    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.ao.quantization.quantize_dynamic(copy.deepcopy(network), {torch.nn.Linear}, dtype=torch.qint8)
    return torch_float(quantized)


def openvino_float(network: "transformers.PreTrainedModel", example: Inputs) -> Answer:
    """OpenVINO's conversion of the float model, compiled without hints."""
    return _compiled(_converted(network, example))


def openvino_int8(network: "transformers.PreTrainedModel", example: Inputs, samples: Sequence[Inputs]) -> Answer:
    """NNCF's post-training quantization with its defaults, compiled without hints."""
    disable_telemetry()
    import nncf

    with contextlib.redirect_stdout(io.StringIO()):
        rows = nncf.Dataset([dict(sample) for sample in samples])
        return _compiled(nncf.quantize(_converted(network, example), rows, subset_size=len(samples)))


def _converted(network: Any, example: Inputs) -> Any:
    disable_telemetry()
    import openvino
    import torch
    from openvino.tools.ovc import convert_model  # `openvino` lacks it where an artifact was answered before

    tensors = {name: torch.from_numpy(example[name]) for name in NAMES}
    shapes = [(name, openvino.PartialShape([-1, -1])) for name in NAMES]
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return convert_model(network, example_input=tensors, input=shapes)


def _compiled(graph: Any) -> Answer:
    import openvino

    request = openvino.Core().compile_model(graph, "CPU", {"INFERENCE_NUM_THREADS": "1"}).create_infer_request()

    def answer(inputs: Inputs) -> npt.NDArray[np.float32]:
        return _stacked([value.copy() for value in request.infer({name: inputs[name] for name in NAMES}).values()])

    return answer


# ---------------------------------------------------------------------------------------------------------------- ONNX


def onnx_graph(network: "transformers.PreTrainedModel", example: Inputs, path: Path) -> Path:
    """The float model as an ONNX file, exported by torch."""
    import torch

    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise Absent(str(error)) from None
    tensors = tuple(torch.from_numpy(example[name]) for name in NAMES)
    axes = {name: {0: "rows", 1: "tokens"} for name in NAMES}

    class NamedInputs(torch.nn.Module):
        """The exporter hands inputs over by place."""

        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            output = self.network(**dict(zip(NAMES, inputs, strict=True)))
            spans = hasattr(output, "start_logits")
            return (output.start_logits, output.end_logits) if spans else (output.logits,)

    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            NamedInputs().eval(),
            tensors,
            str(path),
            input_names=list(NAMES),
            dynamic_axes=axes,
            dynamo=False,
            opset_version=17,
        )
    return path


def onnx_dynamic(path: Path) -> Path:
    """`onnxruntime.quantization.quantize_dynamic`."""
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(str(path), str(out := path.with_suffix(".dynamic.onnx")))
    return out


def onnx_static(path: Path, samples: Sequence[Inputs]) -> Path:
    """`onnxruntime.quantization.quantize_static`, on the same rows as ours, after its own pre-processing."""
    from onnxruntime.quantization import CalibrationDataReader, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.rows: Iterator[Inputs] = iter(samples)

        def get_next(self) -> Inputs | None:
            return next(self.rows, None)

    ready, out = path.with_suffix(".ready.onnx"), path.with_suffix(".static.onnx")
    quant_pre_process(str(path), str(ready), skip_symbolic_shape=True)
    quantize_static(str(ready), str(out), Reader())
    return out


def onnx(path: Path) -> Answer:
    """ONNX Runtime on a graph."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [graph_input.name for graph_input in session.get_inputs()]

    def answer(inputs: Inputs) -> npt.NDArray[np.float32]:
        return _stacked(session.run(None, {name: inputs[name] for name in names}))

    return answer


def _logits(output: Any) -> npt.NDArray[np.float32]:
    parts = [output.start_logits, output.end_logits] if hasattr(output, "start_logits") else [output.logits]
    return _stacked([part.numpy() for part in parts])


def _stacked(parts: Sequence[Any]) -> npt.NDArray[np.float32]:
    """As `rtrain.inference.predictor.Engine.logits`: of a span model start and end are the last axis of one array."""
    logits: npt.NDArray[np.float32] = parts[0] if len(parts) == 1 else np.stack(parts, axis=-1)
    return logits
