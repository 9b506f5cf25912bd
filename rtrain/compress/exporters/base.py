"""Interface of the exporters: the float graph of a model, and its int8 graph.

The docstring of `rtrain.core.engines` lists the steps for another engine.
"""

import contextlib
import io
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rtrain.inference.predictor import Engine

if TYPE_CHECKING:
    import transformers

Sample = Mapping[str, npt.NDArray[np.int64]]
"""Inputs of one row, [1, tokens] each, by argument name of the network."""


class QuantizedGraph(ABC):
    """An int8 graph whose operations can be reverted to float one by one."""

    def __init__(self, graph: Any):
        self._graph = graph
        self._edges: dict[str, list[Any]] = {}
        """Quantized inputs of each operation, in graph order."""

    @property
    def operations(self) -> Sequence[str]:
        """Names of the operations with int8 inputs, in graph order."""
        return tuple(self._edges)

    @abstractmethod
    def revert(self, operations: Collection[str]) -> None:
        """Compute these operations with float weights, all others in int8. Scales do not change."""

    def quantize_embedding_int4(self, vocab_size: int) -> None:
        """Quantize the embedding table of `vocab_size` rows to 4 bits. Only engines with `supports_int4_embedding`."""
        raise NotImplementedError

    @abstractmethod
    def load_engine(self, threads: int | None) -> Engine:
        """Load the current graph."""

    @abstractmethod
    def write(self, path: Path) -> None:
        """Write the current graph to `path`, and the engine's other files beside it."""


class ExportedGraph(ABC):
    """A float graph."""

    quantized_class: type[QuantizedGraph]

    def __init__(self, graph: Any):
        self._graph = graph

    @abstractmethod
    def load_engine(self, threads: int | None) -> Engine: ...

    @abstractmethod
    def copy(self) -> Any:
        """Copy the graph in the form of NNCF."""

    def calibrate(self, samples: Sequence[Sample], overflow_fix: bool = False) -> QuantizedGraph:
        """Quantize weights and activations to int8.

        Args:
            samples: rows that set the static activation scales.
            overflow_fix: weights use half of the int8 range.
        """
        with quiet_nncf() as nncf:
            return self.quantized_class(_quantize(nncf, self._graph, samples, overflow_fix))

    def quantize_weights(self) -> QuantizedGraph:
        """Quantize weights to int8. Activations stay float, so nothing is calibrated or reverted."""
        with quiet_nncf() as nncf:
            return self.quantized_class(nncf.compress_weights(self.copy(), mode=nncf.CompressWeightsMode.INT8_SYM))


ExportFunction = Callable[["transformers.PreTrainedModel", Sample], ExportedGraph]
"""Traces a network with a sample; returns its float graph. `rtrain.core.engines.EngineSpec.quantizer` is its import
path.
"""


def _quantize(library: Any, graph: Any, samples: Sequence[Sample], overflow_fix: bool) -> Any:
    """Insert quantizers by NNCF's post-training quantization.

    Weights stay float, behind quantizers, until the graph is written. An operation is reverted by removing its
    quantizers.
    """
    return library.quantize(
        graph,
        library.Dataset([dict(sample) for sample in samples]),
        model_type=library.ModelType.TRANSFORMER,
        subset_size=len(samples),
        advanced_parameters=library.AdvancedQuantizationParameters(
            backend_params={"compress_weights": False},
            overflow_fix=library.OverflowFix.ENABLE if overflow_fix else None,
        ),
    )


def disable_telemetry() -> None:
    """Disable the telemetry of OpenVINO's converter and NNCF; call it before importing either.

    One conversion starts some 35 telemetry processes and waits a second for them.
    """
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # makes its import fail


@contextlib.contextmanager
def quiet_nncf() -> Iterator[Any]:
    """Yield NNCF's module with its progress and log redirected: stdout is reserved for --json."""
    disable_telemetry()
    import nncf

    nncf.set_log_level(logging.ERROR)
    with contextlib.redirect_stdout(sys.stderr if sys.stderr.isatty() else io.StringIO()):
        yield nncf
