"""Facts about a run before it starts: its rows, their tokens, the model's size. No torch.

Rows are read and counted as the run will read them; the tokens of a sample are counted with the run's tokenizer.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from rtrain.config import ModelConfig, Recipe
from rtrain.core import json_files
from rtrain.core.errors import ConfigError, Problem
from rtrain.core.ragged import Ints
from rtrain.data import checks, row_reader
from rtrain.data.splits import Splits
from rtrain.data.store import shards
from rtrain.models import long_texts
from rtrain.models.pack_layout import MAX_CHUNK_TOKENS
from rtrain.tasks import base
from rtrain.tasks.encode import resolve_window_spec

MAX_COUNTED_ROWS: Final = 200_000
"""Maximum number of rows to count; larger data needs `--rows`."""
DEFAULT_TOKENS_PER_ROW: Final = 128
"""Default tokens per row for data that is not read."""
SAMPLE_ROWS: Final = 512
"""Sample size for token counts."""


@dataclass(frozen=True)
class RowStats:
    """Row counts and lengths of a run's data."""

    train: int
    valid: int
    test: int
    window_tokens: tuple[int, ...]
    """Tokens of each window in a sample of rows."""
    windows_per_row: float
    """Mean of the sample."""
    num_outputs: int = 2
    """Outputs of the head, unless it predicts a vocabulary."""

    @property
    def tokens_per_row(self) -> float:
        return float(np.mean(self.window_tokens)) * self.windows_per_row


def uniform_row_stats(rows: int, tokens: int) -> RowStats:
    """Stats for `rows` training rows of equal length; validation and test get an eighth each, like the default
    splits."""
    return RowStats(rows, rows // 8, rows // 8, (tokens,), 1.0)


def assumed_tokens_per_row(recipe: Recipe, tokens: int | None) -> int:
    """Tokens per row for data that is not read. A task that packs texts into blocks has full blocks. Raises
    `ConfigError` if `tokens` is set for such a task."""
    max_tokens = recipe.data.window_tokens
    if not base.get_task(recipe.task).packs_text:
        return min(tokens or DEFAULT_TOKENS_PER_ROW, max_tokens)
    if tokens is not None:
        reason = f"rows of {recipe.task} are blocks of {max_tokens} tokens, whatever the texts"
        fix = f"write --set data.max_tokens={tokens}, or leave it out"
        raise ConfigError([Problem("--tokens", tokens, reason, fix, code="conflicting_settings")])
    return max_tokens


def measure_rows(recipe: Recipe, model: Path) -> RowStats:
    """Count the rows of `data.path` and the other data settings. Raises `ConfigError` if there are too many to count,
    and `UserError` if a run would refuse them: too many bad rows, or an empty split."""
    source = row_reader.inspect_source(recipe.data)
    splits, counts = Splits.from_config(recipe.data, source), dict.fromkeys(("train", "valid", "test"), 0)
    task, tokenizer = base.get_task(recipe.task), shards.load_task_tokenizer(recipe, model)
    sampled_rows, labels = list[row_reader.SourceRow](), Counter[str]()
    total, bad_rows = 0, list[str]()
    generator = np.random.default_rng(0)
    for source_file in source.files:
        row_iterator: Iterator[Any] = row_reader.read_rows(source_file, recipe.data)
        if task.packs_text:
            row_iterator = shards.pack_documents(
                row_iterator, tokenizer, recipe.data.window_tokens, partial(splits.assign_split, role=source_file.role)
            )
        for row_index, record in enumerate(islice(row_iterator, MAX_COUNTED_ROWS + 1)):
            if row_index == MAX_COUNTED_ROWS:
                reason, fix = f"more than {MAX_COUNTED_ROWS:,} rows", "write the number of training rows: --rows N"
                raise ConfigError([Problem("data.path", source_file.uri, reason, fix, code="too_large")])
            total += 1
            if (rejection := shards.validate_source_row(record, task).reason) is not None:
                bad_rows.append(f"{Path(source_file.uri).name}:{record.line}: {rejection}")
                continue
            split = splits.assign_split(record, source_file.role)
            if split == "train" and record.label == recipe.data.out_of_scope_label:
                continue  # out-of-scope rows are not trained on
            counts[split] += 1
            if split == "train":
                labels[record.label] += 1
                # Reservoir sampling: each row has the same probability.
                is_full = len(sampled_rows) == SAMPLE_ROWS
                index = int(generator.integers(counts["train"])) if is_full else len(sampled_rows)
                if index < SAMPLE_ROWS:
                    sampled_rows[index : index + 1] = [record]
    row_reader.check_bad_row_share(len(bad_rows), total, bad_rows, recipe.data)
    checks.check_splits_not_empty(recipe, counts)
    windows, windows_per_row = _windows(recipe, task, tokenizer, sampled_rows)
    num_outputs = max(1, len(task.build_head(labels, tokenizer).labels))
    augment = recipe.augment  # the maximum: a text with few replaceable words gets fewer copies
    copies = augment.copies + len(augment.functions) + (augment.variants if augment.paraphrase else 0)
    train_rows = counts["train"] * (1 + copies)
    return RowStats(train_rows, counts["valid"], counts["test"], windows, windows_per_row, num_outputs)


def _windows(
    recipe: Recipe, task: base.Task, tokenizer: Any, sampled_rows: list[row_reader.SourceRow]
) -> tuple[tuple[int, ...], float]:
    if not sampled_rows or task.packs_text:
        return (recipe.data.window_tokens,), 1.0
    pairs = None if sampled_rows[0].pair is None else [record.pair or "" for record in sampled_rows]
    reading = resolve_window_spec(task, recipe.data)
    encoded = task.encode(tokenizer, [record.text for record in sampled_rows], pairs, reading.max_windows)
    window_tokens = tuple(window.num_tokens for row in encoded for window in row.windows)
    return window_tokens, len(window_tokens) / len(encoded)


# ------------------------------------------------------------------------------------------------------------ the model


@dataclass(frozen=True)
class EncoderShape:
    """Sizes of an encoder, from its config.json."""

    hidden_size: int
    num_layers: int
    intermediate_size: int
    vocab_size: int
    is_gated: bool = False
    """Whether the feed-forward layer is gated: three matrices instead of two."""
    attention_reach: int = 0
    """Attention window on either side, in layers with local attention."""
    num_local_layers: int = 0
    """Number of layers with local attention."""

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the word embedding in fp32."""
        return 4 * self.vocab_size * self.hidden_size

    @property
    def layer_bytes(self) -> int:
        """Bytes of a layer's matrices in fp32."""
        num_matrices = 3 if self.is_gated else 2
        return 4 * self.hidden_size * (4 * self.hidden_size + num_matrices * self.intermediate_size)

    @property
    def weight_bytes(self) -> int:
        """Approximate bytes of all weights in fp32."""
        return self.embedding_bytes + self.num_layers * self.layer_bytes

    @property
    def head_bytes(self) -> int:
        """Approximate bytes of a head's weights in fp32: hidden size squared."""
        return 4 * self.hidden_size * self.hidden_size

    def flops(self, window_tokens: Ints, *, predicts_tokens: bool = False) -> float:
        """FLOPs of forward and backward over windows of the given lengths: two per matrix weight and token, four per
        hidden unit and attended pair of tokens; times three for backward. `predicts_tokens`: adds the head of a masked
        language model, which predicts 15 % of the tokens."""
        head_weights = 0.15 * self.hidden_size * self.vocab_size if predicts_tokens else 0.0
        matrix_weights = self.num_layers * self.layer_bytes / 4 + head_weights
        tokens = window_tokens.astype(np.float64)
        # With local attention, a chunk of a window reads the tokens within reach of any of its tokens.
        local_tokens = np.minimum(tokens, 2 * self.attention_reach + max(MAX_CHUNK_TOKENS, self.attention_reach))
        num_global_layers = self.num_layers - self.num_local_layers
        attended_tokens = num_global_layers * tokens @ tokens + self.num_local_layers * tokens @ local_tokens
        return float(3.0 * (2 * matrix_weights * tokens.sum() + 4 * self.hidden_size * attended_tokens))


CONFIG_KEYS: Final = {
    "hidden_size": ("hidden_size", "dim", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layers"),
    "intermediate_size": ("intermediate_size", "hidden_dim"),
    "vocab_size": ("vocab_size",),
}
GATED_ARCHITECTURES: Final = ("modernbert",)
"""Architectures with gated feed-forward layers and mostly local attention."""


def read_encoder_shape(folder: Path, model_settings: ModelConfig | None = None) -> EncoderShape:
    """Read the sizes in a model's config.json, and the attention window of `model_settings`. Raises `ConfigError` for
    unknown keys."""
    model_config = json_files.load_json_object(folder / "config.json")
    values = {
        key: next((model_config[name] for name in names if name in model_config), None)
        for key, names in CONFIG_KEYS.items()
    }
    if missing := [CONFIG_KEYS[key][0] for key, value in values.items() if value is None]:
        reason = f"its config.json has no {', '.join(missing)}"
        fix = "name a model of another architecture"
        raise ConfigError([Problem("model.name", str(folder), reason, fix, code="unsupported_model")])
    sizes = {key: int(value) for key, value in values.items() if value is not None}
    window = model_settings.attention_window if model_settings else None
    reach, num_local_layers = _local_attention(model_config, sizes["num_layers"], window)
    is_gated = model_config.get("model_type") in GATED_ARCHITECTURES
    return EncoderShape(**sizes, is_gated=is_gated, attention_reach=reach, num_local_layers=num_local_layers)


def _local_attention(model_config: Mapping[str, Any], layers: int, attention_window: int | None) -> tuple[int, int]:
    """Attention window on either side, and the number of local layers: all of them if the recipe or the model's own
    config sets `attention_window`. ModernBERT's defaults follow Transformers."""
    if (window := attention_window or model_config.get(long_texts.CONFIG_KEY)) is not None:
        return window, layers
    if model_config.get("model_type") not in GATED_ARCHITECTURES:
        return 0, 0
    global_every = model_config.get("global_attn_every_n_layers", 3)
    layer_types = model_config.get("layer_types") or [
        "local" if index % global_every else "full_attention" for index in range(layers)
    ]
    num_local_layers = sum(layer_type != "full_attention" for layer_type in layer_types)
    return model_config.get("local_attention", 128) // 2, num_local_layers
