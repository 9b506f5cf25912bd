"""The word table of an OpenVINO graph in 4 bits: a scale and a zero point for every 64 numbers of a row.

Half of what a table costs in int8. A row is looked up and made float again where it is used, which costs no time beside
the layers; of the answers a few in a thousand change (docs/compress.md), more than int8 changes by itself.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import openvino

GROUP = 64
"""Numbers that share a scale. With 32 a row has twice as many scales, and its answers are no nearer."""
LEAST_GROUP = 16
MOST = 15
"""The largest number of 4 bits."""
SMALLEST = 2.0**-14
"""The smallest scale that a float of 16 bits holds with all of its digits."""

Floats = npt.NDArray[np.float32]


class Table(NamedTuple):
    """Rows in whole numbers: (whole - zero) x scale is the number, [rows, groups, group]."""

    whole: npt.NDArray[np.uint8]
    zero: npt.NDArray[np.uint8]
    """[rows, groups, 1]"""
    scale: npt.NDArray[Any]
    """[rows, groups, 1]; of 16 bits, or of 32 where some are too small for these."""

    @property
    def values(self) -> Floats:
        """[rows, width]"""
        rows = (self.whole.astype(np.float32) - self.zero) * self.scale.astype(np.float32)
        return rows.reshape(len(rows), -1)


def of(values: Floats) -> Table:
    """The table of numbers [rows, width]. Zero is one of the whole numbers of each group."""
    width = values.shape[1]
    group = math.gcd(width, GROUP)
    parts = values.reshape(len(values), -1, group if group >= LEAST_GROUP else width)
    low, high = (np.minimum(parts.min(-1, keepdims=True), 0), np.maximum(parts.max(-1, keepdims=True), 0))
    scale = np.maximum((high - low) / MOST, SMALLEST * 2.0**-20)
    if scale.min() >= SMALLEST:
        scale = scale.astype(np.float16)
    zero = np.clip(np.round(-low / scale.astype(np.float32)), 0, MOST)
    whole = np.clip(np.round(parts / scale.astype(np.float32) + zero), 0, MOST)
    return Table(whole.astype(np.uint8), zero.astype(np.uint8), scale)


def narrowed(graph: "openvino.Model", lines: int) -> Iterator[tuple["openvino.Input", "openvino.Output"]]:
    """(where a row of a table of so many lines is looked up, the same table in 4 bits), for each of them."""
    for node in graph.get_ops():
        if node.get_type_name() == "Gather":
            values = _values(node.input_value(0))
            if values is not None and values.ndim == 2 and len(values) == lines:
                yield node.input(0), _output(of(values))


def _output(table: Table) -> "openvino.Output":
    """Operators that make float rows of the table; the engine applies them to the rows that are looked up."""
    import openvino
    from openvino import opset13 as ops

    whole, zero = (
        ops.convert(ops.constant(part, dtype=openvino.Type.u4), table.scale.dtype) for part in (table.whole, table.zero)
    )
    rows = ops.multiply(ops.subtract(whole, zero), ops.constant(table.scale))
    shape = ops.constant(np.array([-1, math.prod(table.whole.shape[1:])]))  # as many rows as a cut vocabulary leaves
    return ops.convert(ops.reshape(rows, shape, False), np.float32).output(0)


def _values(output: "openvino.Output") -> Floats | None:
    """What is computed of constants alone; None of others, and of what a weight is never made by."""
    node = output.get_node()
    kind = node.get_type_name()
    if kind == "Constant":
        found: Floats = np.asarray(node.data).astype(np.float32)
        return found
    if kind not in ("Convert", "Multiply", "Subtract"):
        return None
    parts = [_values(node.input_value(place)) for place in range(node.get_input_size())]
    if any(part is None for part in parts):
        return None
    if kind == "Convert":
        return parts[0]
    return np.multiply(*parts) if kind == "Multiply" else np.subtract(*parts)  # type: ignore[arg-type]
