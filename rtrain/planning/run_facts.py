"""What is known of a run before it starts: its rows, their tokens, its model's size. No torch.

Rows are read and counted as the run will read them; of a sample the tokens are counted by the run's own tokenizer.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from rtrain.config import Model, Recipe
from rtrain.core import json_files
from rtrain.core.errors import ConfigError, Problem
from rtrain.core.ragged import Ints
from rtrain.data import checks, packing, row_reader
from rtrain.data.splits import Splits
from rtrain.data.store import shards
from rtrain.models import local_attention
from rtrain.models.pack_layout import PIECE
from rtrain.tasks import base
from rtrain.tasks.encode import reading_of

MOST_ROWS: Final = 200_000
"""Rows that are counted; of more, their number is asked for."""
TOKENS: Final = 128
"""Those of a row that is not read, where nobody says it."""
SAMPLE: Final = 512
"""Rows whose tokens are counted."""


@dataclass(frozen=True)
class Rows:
    """The rows of a run."""

    train: int
    valid: int
    test: int
    windows: tuple[int, ...]
    """Tokens of each window of a sample of rows."""
    windows_of_row: float
    """Mean over the sample."""
    outputs: int = 2
    """Numbers that the head answers with, where it is not as wide as a vocabulary."""

    @property
    def tokens_of_row(self) -> float:
        return float(np.mean(self.windows)) * self.windows_of_row


def given(rows: int, tokens: int) -> Rows:
    """So many rows for training, of one length; an eighth as many for validation and test each, as splits are."""
    return Rows(rows, rows // 8, rows // 8, (tokens,), 1.0)


def length(recipe: Recipe, tokens: int | None) -> int:
    """Tokens of rows that are not read: so many, and of a task that packs its texts into blocks those of a block, all
    of which are full. Raises `ConfigError` where both are said."""
    longest = recipe.data.window_tokens
    if not base.get(recipe.task).packs:
        return min(tokens or TOKENS, longest)
    if tokens is not None:
        reason = f"rows of {recipe.task} are blocks of {longest} tokens, whatever the texts"
        raise ConfigError(
            [
                Problem(
                    "--tokens",
                    tokens,
                    reason,
                    f"write --set data.max_tokens={tokens}, or leave it out",
                    code="conflicting_settings",
                )
            ]
        )
    return longest


def of_rows(recipe: Recipe, model: Path) -> Rows:
    """The rows of `data.path` and its like. Raises `ConfigError` where there are too many to be counted here, and
    `UserError` where a run would refuse them: too many are bad, or a split has none."""
    source = row_reader.inspect(recipe.data)
    splits, counts = Splits.of(recipe.data, source), dict.fromkeys(("train", "valid", "test"), 0)
    task, tokenizer = base.get(recipe.task), shards.tokenizer_of(recipe, model)
    kept, labels = list[row_reader.Record](), Counter[str]()
    total, bad = 0, list[str]()
    generator = np.random.default_rng(0)
    for piece in source.pieces:
        read: Iterator[Any] = row_reader.read(piece, recipe.data)
        if task.packs:
            read = packing.packed(read, tokenizer, recipe.data.window_tokens, partial(splits.split, role=piece.role))
        for number, record in enumerate(islice(read, MOST_ROWS + 1)):
            if number == MOST_ROWS:
                reason, fix = f"more than {MOST_ROWS:,} rows", "write how many there are to train on: --rows N"
                raise ConfigError([Problem("data.path", piece.uri, reason, fix, code="too_large")])
            total += 1
            if (flaw := shards.judged(record, task).reason) is not None:
                bad.append(f"{Path(piece.uri).name}:{record.line}: {flaw}")
                continue
            split = splits.split(record, piece.role)
            if split == "train" and record.label == recipe.data.outside:
                continue  # it is not trained on
            counts[split] += 1
            if split == "train":
                labels[record.label] += 1
                # Each is in the sample with the same probability.
                place = len(kept) if len(kept) < SAMPLE else int(generator.integers(counts["train"]))
                if place < SAMPLE:
                    kept[place : place + 1] = [record]
    row_reader.refuse_if_too_bad(len(bad), total, bad, recipe.data)
    checks.empty_splits(recipe, counts)
    windows, each = _windows(recipe, task, tokenizer, kept)
    outputs = max(1, len(task.head(labels, tokenizer).labels))
    return Rows(counts["train"] * (1 + _copies(recipe)), counts["valid"], counts["test"], windows, each, outputs)


def _copies(recipe: Recipe) -> int:
    """Further rows that each training row is given, at most: a text with few words to change gets fewer."""
    augment = recipe.augment
    return augment.copies + (augment.variants if augment.paraphrase else 0)


def _windows(
    recipe: Recipe, task: base.Task, tokenizer: Any, kept: list[row_reader.Record]
) -> tuple[tuple[int, ...], float]:
    if not kept or task.packs:
        return (recipe.data.window_tokens,), 1.0
    pairs = None if kept[0].pair is None else [record.pair or "" for record in kept]
    reading = reading_of(task, recipe.data)
    encoded = task.encode(tokenizer, [record.text for record in kept], pairs, reading.max_windows)
    found = tuple(window.tokens for row in encoded for window in row.windows)
    return found, len(found) / len(encoded)


# ------------------------------------------------------------------------------------------------------------ the model


@dataclass(frozen=True)
class Shape:
    """An encoder's sizes, as its config.json has them by whatever names."""

    hidden: int
    layers: int
    inner: int
    vocabulary: int
    gated: bool = False
    """Whether the feed-forward layer multiplies two products of its input, of three matrices in all."""
    reach: int = 0
    """Tokens that a token reads on either side, in layers that do not read all of a window."""
    local_layers: int = 0
    """Layers that do not."""

    @property
    def table(self) -> int:
        """Bytes of the word embedding in fp32."""
        return 4 * self.vocabulary * self.hidden

    @property
    def layer(self) -> int:
        """Bytes of a layer's matrices in fp32."""
        return 4 * (4 * self.hidden * self.hidden + (3 if self.gated else 2) * self.hidden * self.inner)

    @property
    def weights(self) -> int:
        """Bytes of all weights in fp32, about."""
        return self.table + self.layers * self.layer

    @property
    def head(self) -> int:
        """Bytes of a head's weights in fp32, about: a square of the width."""
        return 4 * self.hidden * self.hidden

    def flops(self, windows: Ints, *, answers_words: bool = False) -> float:
        """Operations of a forward and backward pass over windows of so many tokens: two for each weight of the matrices
        and token, four for each number of a layer and two tokens of which one reads the other; three times that with
        the backward pass. `answers_words`: the head of a masked language model, which answers 15 % of them."""
        matrices = self.layers * self.layer / 4 + (0.15 * self.hidden * self.vocabulary if answers_words else 0.0)
        tokens = windows.astype(np.float64)
        # Where attention is local, pieces of windows read what is within reach of any of their tokens.
        near = np.minimum(tokens, 2 * self.reach + max(PIECE, self.reach))
        read = (self.layers - self.local_layers) * tokens @ tokens + self.local_layers * tokens @ near
        return float(3.0 * (2 * matrices * tokens.sum() + 4 * self.hidden * read))


NAMES: Final = {
    "hidden": ("hidden_size", "dim", "d_model"),
    "layers": ("num_hidden_layers", "n_layers"),
    "inner": ("intermediate_size", "hidden_dim"),
    "vocabulary": ("vocab_size",),
}


GATED: Final = ("modernbert",)
"""Architectures whose feed-forward layers are gated; and whose attention is local in most layers."""


def of_model(folder: Path, chosen: Model | None = None) -> Shape:
    """The sizes in a model's config.json, and of a recipe's `chosen` settings how far its tokens read. Raises
    `ConfigError` where it has other names for them."""
    known = json_files.read(folder / "config.json")
    found = {key: next((known[name] for name in names if name in known), None) for key, names in NAMES.items()}
    if lacking := [NAMES[key][0] for key, value in found.items() if value is None]:
        reason = f"its config.json has no {', '.join(lacking)}"
        raise ConfigError(
            [
                Problem(
                    "model.name", str(folder), reason, "name a model of another architecture", code="unsupported_model"
                )
            ]
        )
    sizes = {key: int(value) for key, value in found.items() if value is not None}
    reach, local_layers = _local(known, sizes["layers"], chosen.local_attention if chosen else None)
    return Shape(**sizes, gated=known.get("model_type") in GATED, reach=reach, local_layers=local_layers)


def _local(known: Mapping[str, Any], layers: int, asked: int | None) -> tuple[int, int]:
    """How far a token reads on either side, and in how many layers it reads no further: in all of them where the
    recipe or the model's own training has `asked` for it. ModernBERT's defaults are those of Transformers."""
    if (own := asked or known.get(local_attention.KEY)) is not None:
        return own, layers
    if known.get("model_type") not in GATED:
        return 0, 0
    every = known.get("global_attn_every_n_layers", 3)
    kinds = known.get("layer_types") or ["local" if place % every else "full_attention" for place in range(layers)]
    return known.get("local_attention", 128) // 2, sum(kind != "full_attention" for kind in kinds)
