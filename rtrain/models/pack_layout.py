"""Layout of a micro-batch's windows in its pack, built once per micro-batch and read by every attention layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from rtrain.core.ragged import Floats, Int32s, Ints, TokenBatch
from rtrain.models.device import effective_type, to_device

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from rtrain.torch_internals import SequenceBounds

GROUP_WASTE: Mapping[str, int] = {"cpu": 1 << 13, "cuda": 1 << 20}
"""Squares of padding after which attention starts a new group, by device. A group costs some twenty small calls. On a
CPU that equals about the softmax of so many scores; a GPU launches a call in microseconds and computes a million scores
in that time (estimated, not measured)."""
MAX_CHUNK_TOKENS = 128
"""Largest number of tokens in a chunk of a window, for local attention with a smaller window. Chunks of twice the
window took 1.1 times as long (measured with 2,048 tokens, windows of 128 and 256, MiniLM on one core)."""
SPAN_TOKENS = 256
"""Tokens that read a window's first token in one window of a flash-attention call. The backward pass processes the
queries of a key one block after another."""


@dataclass(frozen=True)
class WindowGroup:
    """Adjacent windows of similar length in the pack; or chunks of windows, for local attention."""

    start: int
    stop: int
    num_windows: int
    width: int
    """Length of the longest window."""
    gather: "torch.Tensor"
    """[windows * heads * width]: for each position of the padded group its index in [tokens * heads]. Padding repeats a
    token of the window; its outputs are unused, so no zeros are written."""
    scatter: "torch.Tensor"
    """[tokens * heads]: for each token's vector its position in the padded group."""
    bias: "torch.Tensor | None"
    """[windows, 1, 1 or width, keys]: minus infinity for masked keys; None if each token reads all."""
    token_mask: "torch.Tensor | None"
    """[windows, 1, width, 1]: zero for padding, one elsewhere; None if `bias` is."""
    num_keys: int
    """The largest number of keys of a window: its own tokens, and the neighbors of a chunk."""
    gather_keys: "torch.Tensor"
    """[windows * heads * keys]: indices of the keys, as in `gather`. Whole windows share the tensor."""

    @property
    def has_shared_keys(self) -> bool:
        """Whether keys come from outside of the chunk, so that several chunks share some of them."""
        return self.gather_keys is not self.gather


@dataclass(frozen=True)
class Band:
    """Windows of local attention with a global first token, for flash attention on a GPU.

    Windows with tokens out of the first token's reach come first in a pack. All fields after `window` refer to them,
    except `bounds`.
    """

    window: int
    num_tokens: int
    first_tokens: "torch.Tensor"
    """[windows]: the index of each window's first token in the pack."""
    reaches_first: "torch.Tensor"
    """[tokens]: whether the first token is in the token's band."""
    bounds: "SequenceBounds"
    """The band: each window of the whole pack."""
    first_bounds: "SequenceBounds"
    """First tokens, which read all tokens: one query a window."""
    far_bounds: "SequenceBounds"
    """Tokens that read the first token: windows cut into spans of tokens, one key a span."""
    span_keys: "torch.Tensor"
    """[spans]: the index of each span's key, the first token of its window."""
    spans_per_window: "torch.Tensor"
    """[windows]: the number of spans of each window."""


@dataclass(frozen=True)
class PackLayout:
    """Positions of a micro-batch's windows in its pack, longest first."""

    order: Ints
    """[tokens]: the pack's token i is the micro-batch's token order[i]."""
    sizes: Ints
    """Lengths of the windows, in the pack's order."""
    num_heads: int
    lengths: "torch.Tensor"
    """`sizes`, on the device."""
    starts: "torch.Tensor"
    """[windows]: the start of each window in the pack, in the micro-batch's order."""
    pack_index: "torch.Tensor"
    """[windows]: the index of each window in the pack's order."""
    cu_seqlens: "torch.Tensor"
    """int32 [windows + 1]: 0 and the end of each window, for variable-length kernels."""
    attention_window: int | None = None
    """Tokens that a token reads on either side in all layers, for models that were trained with full attention
    (`rtrain.models.long_texts`). The first token of each window then reads all tokens and is read by all."""

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest window."""
        return int(self.sizes[0])

    @property
    def bounds(self) -> "SequenceBounds":
        """Each window of the pack, for variable-length kernels."""
        return self.cu_seqlens, self.cu_seqlens, self.max_seqlen, self.max_seqlen

    @cached_property
    def groups(self) -> tuple[WindowGroup, ...]:
        """Groups for attention without a variable-length kernel; computed on first use."""
        return tuple(self._make_group(begin, end) for begin, end in group_windows(self.sizes, self._max_waste))

    def windowed_groups(self, attention_window: int) -> tuple[WindowGroup, ...]:
        """Groups in which each token reads only tokens at most `attention_window` away. First tokens of chunked windows
        are handled by `global_tokens`."""
        if self.max_seqlen <= attention_window + 1:
            return self.groups
        if attention_window not in self._groups_by_window:
            max_chunk = self._max_chunk(attention_window)
            num_long = int((self.sizes > max_chunk).sum())
            groups = [self._make_chunked_group(0, num_long, attention_window, max_chunk)] if num_long else []
            for begin, end in (
                group_windows(self.sizes[num_long:], self._max_waste) if num_long < len(self.sizes) else ()
            ):
                is_short = int(self.sizes[num_long + begin]) <= attention_window + 1
                make_group = (
                    self._make_group
                    if is_short
                    else partial(self._make_chunked_group, attention_window=attention_window, max_chunk=max_chunk)
                )
                groups.append(make_group(num_long + begin, num_long + end))
            self._groups_by_window[attention_window] = tuple(groups)
        return self._groups_by_window[attention_window]

    @cached_property
    def global_tokens(self) -> WindowGroup | None:
        """The first tokens of chunked windows, which read their whole windows; None without such windows. `gather`
        indexes their outputs among all tokens."""
        num_long = (
            0 if self.attention_window is None else int((self.sizes > self._max_chunk(self.attention_window)).sum())
        )
        if not num_long:
            return None
        device, sizes = self.lengths.device, self.sizes[:num_long]
        starts = (np.cumsum(sizes) - sizes)[:, None]
        columns = np.arange(self.max_seqlen)
        is_token = columns < sizes[:, None]
        queries = to_device(self._repeat_per_head(starts), device)
        keys = to_device(self._repeat_per_head(starts + np.where(is_token, columns, 0)), device)
        bias = to_device(_mask_to_bias(is_token), device)[:, None, None, :]
        return WindowGroup(0, int(sizes.sum()), num_long, 1, queries, queries, bias, None, self.max_seqlen, keys)

    @cached_property
    def band(self) -> Band | None:
        """Windows of local attention with a global first token for a variable-length kernel; None if each token reaches
        its first token."""
        if self.attention_window is None or self.max_seqlen <= self.attention_window + 1:
            return None
        device, max_seqlen = self.lengths.device, self.max_seqlen
        sizes = self.sizes[self.sizes > self.attention_window + 1]
        starts = np.cumsum(sizes) - sizes
        span_counts = -(-sizes // SPAN_TOKENS)
        span_window = np.repeat(np.arange(len(sizes)), span_counts)
        span_number = np.arange(len(span_window)) - np.repeat(np.cumsum(span_counts) - span_counts, span_counts)
        num_tokens, num_bounds = int(sizes.sum()), len(sizes) + 1
        span_bounds = np.append(starts[span_window] + span_number * SPAN_TOKENS, num_tokens).astype(np.int32)
        single_bounds = to_device(np.arange(len(span_window) + 1, dtype=np.int32), device)
        offsets = np.arange(num_tokens) - np.repeat(starts, sizes)
        return Band(
            window=self.attention_window,
            num_tokens=num_tokens,
            first_tokens=to_device(starts, device),
            reaches_first=to_device(offsets <= self.attention_window, device),
            bounds=self.bounds,
            first_bounds=(single_bounds[:num_bounds], self.cu_seqlens[:num_bounds], 1, max_seqlen),
            far_bounds=(to_device(span_bounds, device), single_bounds, min(SPAN_TOKENS, max_seqlen), 1),
            span_keys=to_device(starts[span_window], device),
            spans_per_window=to_device(span_counts, device),
        )

    @staticmethod
    def _max_chunk(attention_window: int) -> int:
        return max(MAX_CHUNK_TOKENS, attention_window)

    @cached_property
    def _groups_by_window(self) -> dict[int, tuple[WindowGroup, ...]]:
        return {}

    @property
    def _max_waste(self) -> int:
        return GROUP_WASTE["cpu" if effective_type(self.lengths.device) == "cpu" else "cuda"]

    def _make_group(self, begin: int, end: int) -> WindowGroup:
        device = self.lengths.device
        ends = np.cumsum(self.sizes)
        starts = ends - self.sizes
        width, first = int(self.sizes[begin]), int(starts[begin])
        columns = np.arange(width)
        is_token = columns < self.sizes[begin:end, None]
        # [windows, width] -> tokens of the group, then [windows, heads, width].
        tokens = (starts[begin:end] - first)[:, None]
        gather = to_device(self._repeat_per_head(np.where(is_token, tokens + columns, tokens)), device)
        bias = token_mask = None
        if not is_token.all():
            bias = to_device(_mask_to_bias(is_token), device)[:, None, None, :]
            token_mask = to_device(is_token.astype(np.float32), device)[:, None, :, None]
        scatter = to_device(self._scatter_index(is_token), device)
        return WindowGroup(
            first, int(ends[end - 1]), end - begin, width, gather, scatter, bias, token_mask, width, gather
        )

    def _make_chunked_group(self, begin: int, end: int, attention_window: int, max_chunk: int) -> WindowGroup:
        """Cut windows into even chunks of at most `max_chunk` tokens, each with the neighbors that its tokens read.

        The cost of a window grows with its length, not with its square (Beltagy et al. 2020, arXiv:2004.05150).
        """
        device, sizes = self.lengths.device, self.sizes[begin:end]
        starts = np.cumsum(sizes) - sizes
        counts = -(-sizes // max_chunk)
        window = np.repeat(np.arange(len(sizes)), counts)
        number = np.arange(len(window)) - np.repeat(np.cumsum(counts) - counts, counts)
        low, high = ((number + offset) * sizes[window] // counts[window] for offset in (0, 1))
        num_global = int(
            self.attention_window is not None
        )  # a column for the window's first token, before those of its neighbors
        key_start, key_stop = (
            np.maximum(low - attention_window, num_global),
            np.minimum(high + attention_window, sizes[window]),
        )
        width, num_keys = int((high - low).max()), int((key_stop - key_start).max())
        # Positions within a window. Padding repeats a chunk's last token, so that it reads some key and gives no NaN.
        queries = np.minimum(low[:, None] + np.arange(width), high[:, None] - 1)
        keys = key_start[:, None] + np.arange(num_keys)
        is_token = low[:, None] + np.arange(width) < high[:, None]
        is_visible = np.abs(queries[:, :, None] - keys[:, None, :]) <= attention_window
        if num_global:
            is_visible |= (queries == 0)[:, :, None]
        is_visible &= (keys < key_stop[:, None])[:, None, :]
        clipped_keys = np.minimum(keys, key_stop[:, None] - 1)
        if num_global:
            is_visible = np.pad(is_visible, ((0, 0), (0, 0), (1, 0)), constant_values=True)
            clipped_keys = np.pad(clipped_keys, ((0, 0), (1, 0)))
        first = int(self.sizes[:begin].sum())
        return WindowGroup(
            start=first,
            stop=first + int(sizes.sum()),
            num_windows=len(window),
            width=width,
            gather=to_device(self._repeat_per_head(starts[window][:, None] + queries), device),
            scatter=to_device(self._scatter_index(is_token), device),
            bias=to_device(_mask_to_bias(is_visible), device)[:, None],
            token_mask=to_device(is_token.astype(np.float32), device)[:, None, :, None],
            num_keys=num_keys + num_global,
            gather_keys=to_device(self._repeat_per_head(starts[window][:, None] + clipped_keys), device),
        )

    def _repeat_per_head(self, tokens: Ints) -> Ints:
        """Token indices [windows, width] -> indices in [tokens * heads], as [windows, heads, width], flat."""
        return (tokens[:, None, :] * self.num_heads + np.arange(self.num_heads)[None, :, None]).ravel()

    def _scatter_index(self, is_token: "npt.NDArray[np.bool_]") -> Ints:
        """The position of each token of a padded group [windows, width] in [windows, heads, width], for each head."""
        row, column = np.nonzero(is_token)
        positions: Ints = (row[:, None] * self.num_heads + np.arange(self.num_heads)) * is_token.shape[1] + column[
            :, None
        ]
        return positions.ravel()


def _mask_to_bias(is_visible: "npt.NDArray[np.bool_]") -> Floats:
    return np.where(is_visible, 0.0, -np.inf).astype(np.float32)


def group_windows(lengths: Ints | Int32s, max_waste: int) -> list[tuple[int, int]]:
    """Split windows, longest first, into ranges [begin, end), each with at most `max_waste` squares of padding."""
    squares = lengths.astype(np.int64) ** 2
    cuts, begin, wasted = [0], 0, 0
    for index, square in enumerate(squares.tolist()):
        wasted += int(squares[begin]) - square
        if wasted > max_waste:
            cuts.append(index)
            begin, wasted = index, 0
    return list(pairwise([*cuts, len(lengths)]))


def make_layout(
    tokens: TokenBatch, heads: int, device: "torch.device", attention_window: int | None = None
) -> PackLayout:
    """Make the layout of a micro-batch for an encoder with `heads` attention heads; `attention_window` as in
    `PackLayout`."""
    lengths = tokens.window_lengths.astype(np.int64)
    longest_first = np.argsort(-lengths, kind="stable")
    sizes = lengths[longest_first]
    ends = np.cumsum(sizes)
    starts = ends - sizes
    shift = (np.cumsum(lengths) - lengths)[longest_first] - starts
    pack_index = np.empty_like(longest_first)
    pack_index[longest_first] = np.arange(len(pack_index))
    return PackLayout(
        order=np.repeat(shift, sizes) + np.arange(len(tokens.ids)),
        sizes=sizes,
        num_heads=heads,
        lengths=to_device(sizes, device),
        starts=to_device(starts[pack_index], device),
        pack_index=to_device(pack_index, device),
        cu_seqlens=to_device(np.concatenate([[0], ends]).astype(np.int32), device),
        attention_window=attention_window,
    )
