"""Where the windows of a pass are in its pack: made for each pass, read by every attention layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from rtrain.core.ragged import Floats, Int32s, Ints, Tokens
from rtrain.models.device import kind, moved

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

GROUP_WASTE: Mapping[str, int] = {"cpu": 1 << 13, "cuda": 1 << 20}
"""Squares of padding after which attention goes on in a group of its own: a group costs some twenty small calls. On a
CPU that is about as much as the softmax of so many scores; a GPU starts each in microseconds and does a million scores
in as long (estimated, not measured)."""
PIECE = 128
"""Most tokens of a piece of a window, where attention is local and reaches no further. Pieces of twice the reach took
1.1 times as long (measured with 2,048 tokens, reaches of 128 and 256, MiniLM on one core)."""


@dataclass(frozen=True)
class Group:
    """Windows of about equal length, next to each other in the pack; or pieces of windows, where attention is local."""

    start: int
    stop: int
    windows: int
    width: int
    """The number of tokens of the longest window."""
    gather: "torch.Tensor"
    """[windows * heads * width]: for each place of the padded group, where its vector is among [tokens * heads]. Places
    of padding repeat one of the window's tokens; nobody reads their answers, so that no zeros need to be written."""
    scatter: "torch.Tensor"
    """[tokens * heads]: for each token's vector, its place in the padded group."""
    bias: "torch.Tensor | None"
    """[windows, 1, 1 or width, reads]: minus infinity for what is not read; None where each token reads all."""
    real: "torch.Tensor | None"
    """[windows, 1, width, 1]: zero for padding, one elsewhere; None where `bias` is."""
    reads: int
    """How many tokens are read, by the window that reads most: its own, and those beside a piece."""
    read: "torch.Tensor"
    """[windows * heads * reads]: where these are, as in `gather`; of whole windows the same tensor."""

    @property
    def pieces(self) -> bool:
        """Whether tokens are read from outside, so that some have several readers."""
        return self.read is not self.gather


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
    reach: int | None = None
    """Where a model that was made to read all is kept from it (`rtrain.models.local_attention`): how far a token reads
    in all layers. The first token of each window reads all then, and is read by all."""

    @property
    def longest(self) -> int:
        """Tokens of the longest window."""
        return int(self.sizes[0])

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups, for attention without a variable-length kernel; kernels of that kind never ask for them."""
        return tuple(self._whole(begin, end) for begin, end in groups_of(self.sizes, self._waste))

    def within(self, reach: int) -> tuple[Group, ...]:
        """The same where each token reads only those that are at most `reach` away from it. Where first tokens read
        all, those of windows that were cut do not yet: see `firsts`."""
        if self.longest <= reach + 1:
            return self.groups
        if reach not in self._near:
            most = self._most(reach)
            cut = int((self.sizes > most).sum())
            near = [self._pieces(0, cut, reach, most)] if cut else []
            for begin, end in groups_of(self.sizes[cut:], self._waste) if cut < len(self.sizes) else ():
                whole = int(self.sizes[cut + begin]) <= reach + 1
                made = self._whole if whole else partial(self._pieces, reach=reach, most=most)
                near.append(made(cut + begin, cut + end))
            self._near[reach] = tuple(near)
        return self._near[reach]

    @cached_property
    def firsts(self) -> Group | None:
        """The first tokens of windows that are cut into pieces, each of which reads all of its window; None where there
        are none. Their answers are for `gather`'s places among all tokens."""
        cut = 0 if self.reach is None else int((self.sizes > self._most(self.reach)).sum())
        if not cut:
            return None
        device, sizes = self.lengths.device, self.sizes[:cut]
        starts = (np.cumsum(sizes) - sizes)[:, None]
        columns = np.arange(self.longest)
        real = columns < sizes[:, None]
        asking = moved(self._by_head(starts), device)
        read = moved(self._by_head(starts + np.where(real, columns, 0)), device)
        bias = moved(_biased(real), device)[:, None, None, :]
        return Group(0, int(sizes.sum()), cut, 1, asking, asking, bias, None, self.longest, read)

    @staticmethod
    def _most(reach: int) -> int:
        """Tokens of the longest piece."""
        return max(PIECE, reach)

    @cached_property
    def _near(self) -> dict[int, tuple[Group, ...]]:
        return {}

    @property
    def _waste(self) -> int:
        return GROUP_WASTE["cpu" if kind(self.lengths.device) == "cpu" else "cuda"]

    def _whole(self, begin: int, end: int) -> Group:
        """The windows from one to another, each read by itself."""
        device = self.lengths.device
        ends = np.cumsum(self.sizes)
        starts = ends - self.sizes
        width, first = int(self.sizes[begin]), int(starts[begin])
        columns = np.arange(width)
        real = columns < self.sizes[begin:end, None]
        # [windows, width] -> tokens of the group, then with the heads between, as [windows, heads, width].
        tokens = (starts[begin:end] - first)[:, None]
        gather = moved(self._by_head(np.where(real, tokens + columns, tokens)), device)
        bias = flags = None
        if not real.all():
            bias = moved(_biased(real), device)[:, None, None, :]
            flags = moved(real.astype(np.float32), device)[:, None, :, None]
        scatter = moved(self._scatter(real), device)
        return Group(first, int(ends[end - 1]), end - begin, width, gather, scatter, bias, flags, width, gather)

    def _pieces(self, begin: int, end: int, reach: int, most: int) -> Group:
        """Windows cut into even pieces of at most `most` tokens, each with what its tokens read on either side.

        The products of a window grow with its length, not with its square (Beltagy et al. 2020, arXiv:2004.05150).
        """
        device, sizes = self.lengths.device, self.sizes[begin:end]
        starts = np.cumsum(sizes) - sizes
        counts = -(-sizes // most)
        window = np.repeat(np.arange(len(sizes)), counts)
        number = np.arange(len(window)) - np.repeat(np.cumsum(counts) - counts, counts)
        low, high = ((number + one) * sizes[window] // counts[window] for one in (0, 1))
        ahead = int(self.reach is not None)  # a column for the window's first token, before those of its neighbours
        least, last = np.maximum(low - reach, ahead), np.minimum(high + reach, sizes[window])
        width, reads = int((high - low).max()), int((last - least).max())
        # Within a window. Padding repeats a piece's last token: it reads something, which no answer and no gradient
        # that is not a number comes of.
        asking = np.minimum(low[:, None] + np.arange(width), high[:, None] - 1)
        asked = least[:, None] + np.arange(reads)
        real = low[:, None] + np.arange(width) < high[:, None]
        near = np.abs(asking[:, :, None] - asked[:, None, :]) <= reach
        if ahead:
            near |= (asking == 0)[:, :, None]
        near &= (asked < last[:, None])[:, None, :]
        inside = np.minimum(asked, last[:, None] - 1)
        if ahead:
            near = np.pad(near, ((0, 0), (0, 0), (1, 0)), constant_values=True)
            inside = np.pad(inside, ((0, 0), (1, 0)))
        first = int(self.sizes[:begin].sum())
        return Group(
            start=first,
            stop=first + int(sizes.sum()),
            windows=len(window),
            width=width,
            gather=moved(self._by_head(starts[window][:, None] + asking), device),
            scatter=moved(self._scatter(real), device),
            bias=moved(_biased(near), device)[:, None],
            real=moved(real.astype(np.float32), device)[:, None, :, None],
            reads=reads + ahead,
            read=moved(self._by_head(starts[window][:, None] + inside), device),
        )

    def _by_head(self, tokens: Ints) -> Ints:
        """Places [windows, width] among tokens -> those among [tokens * heads], as [windows, heads, width], flat."""
        return (tokens[:, None, :] * self.heads + np.arange(self.heads)[None, :, None]).ravel()

    def _scatter(self, real: "npt.NDArray[np.bool_]") -> Ints:
        """Where each token of a padded group [windows, width] is, for each head, in [windows, heads, width]."""
        row, column = np.nonzero(real)
        places: Ints = (row[:, None] * self.heads + np.arange(self.heads)) * real.shape[1] + column[:, None]
        return places.ravel()


def _biased(read: "npt.NDArray[np.bool_]") -> Floats:
    return np.where(read, 0.0, -np.inf).astype(np.float32)


def groups_of(lengths: Ints | Int32s, waste: int) -> list[tuple[int, int]]:
    """Cut windows, longest first, into runs [begin, end) of which none wastes more than so many squares of padding."""
    squares = lengths.astype(np.int64) ** 2
    cuts, begin, wasted = [0], 0, 0
    for place, square in enumerate(squares.tolist()):
        wasted += int(squares[begin]) - square
        if wasted > waste:
            cuts.append(place)
            begin, wasted = place, 0
    return list(pairwise([*cuts, len(lengths)]))


def layout_of(tokens: Tokens, heads: int, device: "torch.device", reach: int | None = None) -> Layout:
    """The pack of a pass for an encoder with `heads` attention heads; `reach` as `Layout` has it."""
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
        reach=reach,
    )
