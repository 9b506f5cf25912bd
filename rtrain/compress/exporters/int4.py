"""The embedding table of an OpenVINO graph in 4 bits: a scale and a zero point for every 64 numbers of a row.

It takes half the bytes of an int8 table. Only the rows that are looked up are dequantized, so latency does not change.
A few answers in a thousand change (docs/compress.md), in addition to the answers changed by int8.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import openvino

GROUP_SIZE = 64
"""Numbers that share a scale. 32 doubles the scales without bringing answers nearer."""
MIN_GROUP_SIZE = 16
MAX_VALUE = 15
"""Largest 4-bit integer."""
MIN_SCALE = 2.0**-14
"""Smallest normal fp16 number."""

Floats = npt.NDArray[np.float32]


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
    """Quantize a table [rows, width]. Zero has an exact code in each group."""
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
    """Build the operators that dequantize the rows that are looked up."""
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
