"""Where the windows of a pass are in its pack: made for each pass, read by every attention layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from rtrain.batch import Int32s, Ints, Tokens
from rtrain.network.device import moved

if TYPE_CHECKING:
    import torch

GROUP_WASTE: Mapping[str, int] = {"cpu": 1 << 13, "cuda": 1 << 20}
"""Squares of padding after which attention goes on in a group of its own: a group costs some twenty small calls. On a
CPU that is about as much as the softmax of so many scores; a GPU starts each in microseconds and does a million scores
in as long (estimated, not measured)."""


@dataclass(frozen=True)
class Group:
    """Windows of about equal length, next to each other in the pack."""

    start: int
    stop: int
    windows: int
    width: int
    """The number of tokens of the longest window."""
    gather: "torch.Tensor"
    """[windows * heads * width]: for each place of the padded group, where its vector is among [tokens * heads]. Places
    of padding repeat the window's first token, whose answer nobody reads: no zeros need to be written."""
    scatter: "torch.Tensor"
    """[tokens * heads]: for each token's vector, its place in the padded group."""
    bias: "torch.Tensor | None"
    """[windows, 1, 1, width]: minus infinity for padding; None where all windows are equally long."""
    real: "torch.Tensor | None"
    """[windows, 1, width, 1]: zero for padding, one elsewhere; None where all windows are equally long."""


@dataclass(frozen=True)
class Layout:
    """Where the windows of a pass are in its pack, longest first."""

    order: Ints
    """[tokens]: the pack's token i is the pass's token order[i]."""
    sizes: Ints
    """Lengths of the windows, in the pack's order."""
    heads: int
    lengths: "torch.Tensor"
    """`sizes`, on the device."""
    starts: "torch.Tensor"
    """[windows]: where each of the pass's windows begins in the pack, in the pass's order."""
    window: "torch.Tensor"
    """[windows]: the place of each of the pass's windows in the pack's order."""
    ends: "torch.Tensor"
    """int32 [windows + 1]: 0, and where each window of the pack ends; what variable-length kernels call cu_seqlens."""

    @property
    def longest(self) -> int:
        """Tokens of the longest window."""
        return int(self.sizes[0])

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups, for attention without a variable-length kernel; kernels of that kind never ask for them."""
        device = self.lengths.device
        waste = GROUP_WASTE["cpu" if device.type == "cpu" else "cuda"]
        ends = np.cumsum(self.sizes)
        starts = ends - self.sizes
        groups = []
        for begin, end in groups_of(self.sizes.astype(np.int32), waste):
            width, first = int(self.sizes[begin]), int(starts[begin])
            columns = np.arange(width)
            real = columns < self.sizes[begin:end, None]
            # [windows, width] -> tokens of the group, then with the heads between, as [windows, heads, width].
            tokens = (starts[begin:end] - first)[:, None]
            gather = np.where(real, tokens + columns, tokens)[:, None, :] * self.heads
            gather = gather + np.arange(self.heads)[None, :, None]
            row, column = np.nonzero(real)
            scatter = (row[:, None] * self.heads + np.arange(self.heads)) * width + column[:, None]
            bias = flags = None
            if not real.all():
                bias = moved(np.where(real, 0.0, -np.inf).astype(np.float32), device)[:, None, None, :]
                flags = moved(real.astype(np.float32), device)[:, None, :, None]
            places = moved(gather.ravel(), device), moved(scatter.ravel(), device)
            groups.append(Group(first, int(ends[end - 1]), end - begin, width, *places, bias, flags))
        return tuple(groups)


def groups_of(lengths: Int32s, waste: int) -> list[tuple[int, int]]:
    """Cut windows, longest first, into runs [begin, end) of which none wastes more than so many squares of padding."""
    squares = lengths.astype(np.int64) ** 2
    cuts, begin, wasted = [0], 0, 0
    for place, square in enumerate(squares.tolist()):
        wasted += int(squares[begin]) - square
        if wasted > waste:
            cuts.append(place)
            begin, wasted = place, 0
    return list(pairwise([*cuts, len(lengths)]))


def layout_of(tokens: Tokens, heads: int, device: "torch.device") -> Layout:
    """The pack of a pass for an encoder with `heads` attention heads."""
    lengths = tokens.lengths.astype(np.int64)
    longest_first = np.argsort(-lengths, kind="stable")
    sizes = lengths[longest_first]
    ends = np.cumsum(sizes)
    starts = ends - sizes
    shift = (np.cumsum(lengths) - lengths)[longest_first] - starts
    place = np.empty_like(longest_first)
    place[longest_first] = np.arange(len(place))
    return Layout(
        order=np.repeat(shift, sizes) + np.arange(len(tokens.ids)),
        sizes=sizes,
        heads=heads,
        lengths=moved(sizes, device),
        starts=moved(starts[place], device),
        window=moved(place, device),
        ends=moved(np.concatenate([[0], ends]).astype(np.int32), device),
    )
