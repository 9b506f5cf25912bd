"""A float model -> the int8 graph of OpenVINO, by NNCF's post-training quantization."""

import contextlib
import io
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import transformers


def write(network: "transformers.PreTrainedModel", samples: list[dict[str, npt.NDArray[np.int64]]], path: Path) -> None:
    """Write the graph as `path` (.xml) and its weights beside it (.bin).

    `samples` are inputs of one row each, [1, tokens]: they set the static scales of the activations.
    """
    import nncf
    import openvino
    import torch

    example = {name: torch.from_numpy(value) for name, value in samples[0].items()}
    shapes = {name: openvino.PartialShape([-1, -1]) for name in example}
    with torch.inference_mode(), warnings.catch_warnings():
        # Tracing warns of every Python branch in transformers' mask code; the golden answers show whether it was right.
        warnings.simplefilter("ignore")
        graph = openvino.convert_model(network, example_input=example, input=list(shapes.items()))
    # NNCF draws its progress on stdout, which belongs to --json.
    with contextlib.redirect_stdout(sys.stderr if sys.stderr.isatty() else io.StringIO()):
        int8 = nncf.quantize(
            graph, nncf.Dataset(samples), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(samples)
        )
    openvino.save_model(int8, path, compress_to_fp16=False)
