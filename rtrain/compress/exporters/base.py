"""What quantization asks of an engine: a float graph of the model, and the int8 graph that is made of it."""

import contextlib
import io
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from rtrain.inference.predictor import Engine

if TYPE_CHECKING:
    import transformers

Sample = Mapping[str, npt.NDArray[np.int64]]
"""Inputs of one row, [1, tokens] each, by the names that the network takes."""


class Quantized(Protocol):
    """An int8 graph whose operations can go back to float, one by one."""

    @property
    def operations(self) -> Sequence[str]:
        """Names of the operations that int8 numbers go into, in the order of the graph."""
        ...

    def revert(self, operations: Collection[str]) -> None:
        """Compute these in float, by their float weights, and all others in int8. No scale changes."""
        ...

    def narrow(self, lines: int) -> None:
        """Have the table of so many lines in 4 bits. Engines whose entry says `narrows` alone."""
        ...

    def answering(self, threads: int | None) -> Engine:
        """The graph as it is now, loaded."""
        ...

    def write(self, path: Path) -> None:
        """Write the graph as it is now as `path`, and the engine's other files beside it."""
        ...


class Exported(Protocol):
    """A float graph."""

    def answering(self, threads: int | None) -> Engine: ...

    def calibrated(self, samples: Sequence[Sample], overflow_fix: bool = False) -> Quantized:
        """Int8 weights and activations; `samples` set the static scales of the activations. `overflow_fix`: weights
        have half of the range."""
        ...

    def weights_only(self) -> Quantized:
        """Int8 weights; activations stay float, so there is nothing to calibrate or to revert."""
        ...


Export = Callable[["transformers.PreTrainedModel", Sample], Exported]
"""Makes the float graph of a network by tracing what it does with a sample. `rtrain.core.engines.Entry.quantizer` names
it.
"""


def quantize(library: Any, graph: Any, samples: Sequence[Sample], overflow_fix: bool) -> Any:
    """The graph with a quantizer before each operation that int8 pays for, by NNCF's post-training quantization.

    Weights stay float, with quantizers of their own, until the graph is written: so an operation is reverted by leaving
    its quantizers out.
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


def unreported() -> None:
    """Let OpenVINO's converter and NNCF do without the library that they report each step by, to their makers, from
    where nobody was asked: some 35 processes for one conversion, and a second of waiting for them. Called before either
    is imported."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # then its import fails


@contextlib.contextmanager
def by_nncf() -> Iterator[Any]:
    """NNCF's module, while it works: it draws its progress and its log on stdout, which belongs to --json."""
    unreported()
    import nncf

    nncf.set_log_level(logging.ERROR)
    with contextlib.redirect_stdout(sys.stderr if sys.stderr.isatty() else io.StringIO()):
        yield nncf
