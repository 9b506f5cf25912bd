"""Parts that the sections share: sizes, networks, texts, clocks, and the peak of a device."""

import importlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.gpu.report import Report

if TYPE_CHECKING:
    import torch

    from rtrain.core.ragged import TokenBatch
    from rtrain.data.store.store import Store

LABELS = tuple("abcdefgh")
"""Labels of texts that are trained on only to measure the time."""
MODEL_NAME = "minilm"
"""The model that the folder of the data holds; other models have random weights."""
PEAKS = {
    **{"B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12},
    **{"L4": 121e12, "V100": 125e12, "T4": 65e12},
}
"""Operations per second of dense matrix products in half precision (bf16, or fp16 if there is no bf16), from the
makers' data sheets. The key is a part of the device's name; longer names come first."""


@dataclass(frozen=True)
class Size:
    """The extent of the measurements."""

    models: Mapping[str, Mapping[str, int] | None]
    """BERT's shape by the model's name; None for the carried model, which has its own."""
    long: int
    """Tokens of each text where all texts are equally long."""
    tokens_per_step: int
    global_batch_size: int
    """Rows of an update at most."""
    max_micro_batch_tokens: int
    """Tokens beyond which no larger pass is tried."""
    seconds: float
    """Length of a timed stretch, which is about so many seconds."""
    rounds: int
    cells: int
    """Pairs of a model and texts whose speed is measured."""
    product: int
    """Rows and columns of the matrix product whose speed counts as the peak if no data sheet is known."""


def _shape(hidden: int, layers: int, heads: int) -> dict[str, int]:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    return dict(zip(names, (hidden, layers, heads, 4 * hidden), strict=True))


FULL = Size(
    models={MODEL_NAME: None, "bert-base": _shape(768, 12, 12), "bert-large": _shape(1024, 24, 16)},
    long=512,
    tokens_per_step=1 << 17,
    global_batch_size=1024,
    max_micro_batch_tokens=1 << 17,
    seconds=3.0,
    rounds=3,
    cells=7,
    product=8192,
)
TINY = Size(
    models={MODEL_NAME: None, "bert-base": _shape(32, 2, 2), "bert-large": _shape(48, 3, 3)},
    long=128,
    tokens_per_step=1 << 10,
    global_batch_size=32,
    max_micro_batch_tokens=1 << 9,
    seconds=0.02,
    rounds=2,
    cells=1,
    product=512,
)


@dataclass
class Bench:
    """The machine, the data and the time that a section is given."""

    data: Path
    """The folder that `prepare` made."""
    model: Path
    """The carried model, in fp32."""
    scratch: Path
    seconds: float | None = None
    """Length of a timed stretch; None for that of the size."""
    ends: float = 0.0
    """The time at which a section is killed, by time.monotonic."""
    report: Report = field(default_factory=lambda: Report(Path("/dev/null"), ""))

    @property
    def gpu(self) -> bool:
        import torch

        return torch.cuda.is_available()

    @property
    def size(self) -> Size:
        size = FULL if self.gpu else TINY
        return size if self.seconds is None else replace(size, seconds=self.seconds)

    @property
    def left(self) -> float:
        """Seconds that the sections have left."""
        return self.ends - time.monotonic()

    @property
    def device(self) -> "torch.device":
        import torch

        return torch.device("cuda" if self.gpu else "cpu")

    @cached_property
    def precision(self) -> str:
        """The precision that `auto` chooses on this device."""
        from rtrain.models import precision

        return precision.resolve_precision("auto", precision.device_formats(self.device))

    def store(self, name: str) -> "Store":
        from rtrain.data.store.store import open_store

        (folder,) = (self.data / name / ".tokens").iterdir()
        return open_store(folder)


def run_section(name: str, bench: Bench) -> None:
    """Run the module of that name in this process. It leads its own process group, so child processes
    end with it."""
    import transformers

    os.setpgid(0, 0)
    transformers.utils.logging.set_verbosity_error()
    with bench.report.attempt("section"):
        importlib.import_module(f"benchmarks.gpu.{name}").run(bench)
        return
    sys.exit(1)


def synchronize(bench: Bench) -> None:
    """Wait until the GPU has done all its work."""
    if bench.gpu:
        import torch

        torch.cuda.synchronize()


def forget(bench: Bench) -> None:
    """Free memory that nothing refers to any more."""
    import gc

    gc.collect()
    if bench.gpu:
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# ---------------------------------------------------------------------------------------------------------- networks


def network(
    bench: Bench,
    name: str,
    *,
    pack: bool = True,
    attention_dropout: float | None = 0.0,
    recompute: bool = False,
    labels: tuple[str, ...] = LABELS,
    seed: int = 0,
) -> Any:
    """A classifier as rtrain trains it, on the device. A GPU takes its fastest kernel if attention has no dropout."""
    import torch

    from rtrain.config import ModelConfig
    from rtrain.models import builder, unpadded
    from rtrain.tasks import base

    torch.manual_seed(seed)
    if bench.size.models[name] is None:
        model_config = ModelConfig(attention_dropout=attention_dropout, pooling="own")
        network: Any = builder.build_network(
            bench.model, base.get_task("classification"), labels, seed, model_config, pack
        )
    else:
        network = _random(bench, name, attention_dropout, labels)
        if pack and unpadded.supports_packing(network):
            unpadded.enable_packing(network, "first")
    if recompute:
        builder.enable_activation_checkpointing(network)
    builder.move_to_device(network, bench.device)
    return network


def plain_network(bench: Bench, name: str, attention: str, labels: tuple[str, ...] = LABELS) -> Any:
    """The same classifier as Transformers makes it; its attention weights have no dropout either."""
    import torch
    import transformers

    torch.manual_seed(0)
    if bench.size.models[name] is None:
        network: Any = transformers.AutoModelForSequenceClassification.from_pretrained(
            bench.model,
            trust_remote_code=False,
            num_labels=len(labels),
            attn_implementation=attention,
            attention_probs_dropout_prob=0.0,
            dtype=torch.float32,
            local_files_only=True,
        )
    else:
        network = _random(bench, name, 0.0, labels)
        network.set_attn_implementation(attention)
    return network.to(bench.device)


def _random(bench: Bench, name: str, attention_dropout: float | None, labels: tuple[str, ...]) -> Any:
    import torch
    import transformers

    base_config = transformers.AutoConfig.from_pretrained(bench.model, local_files_only=True, trust_remote_code=False)
    settings: dict[str, Any] = {"num_labels": len(labels), **(bench.size.models[name] or {})}
    config = transformers.BertConfig(
        **settings,
        vocab_size=base_config.vocab_size,
        max_position_embeddings=max(bench.size.long, base_config.max_position_embeddings),
        pad_token_id=base_config.pad_token_id,
        attention_probs_dropout_prob=0.1 if attention_dropout is None else attention_dropout,
    )
    with torch.device(bench.device):
        return transformers.AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)


# ------------------------------------------------------------------------------------------------------------- texts


def texts(bench: Bench, name: str, rows: int = 4000) -> "TokenBatch":
    """Texts with one window per row: those of a store, or `long` texts of equal length. Labels are arbitrary."""
    from rtrain.core.ragged import single_window_batch

    draw = np.random.default_rng(0)
    if name == "long":
        count = min(rows, 512)
        vocabulary = _vocabulary(bench.model)
        lengths = np.full(count, bench.size.long, dtype=np.int32)
        ids = draw.integers(vocabulary // 2, vocabulary, count * bench.size.long, dtype=np.int32)
        second = lengths
    else:
        store = bench.store(name)
        tokens = store.read_tokens("train", np.arange(min(rows, store.num_rows("train"))))
        ids, lengths, second = tokens.ids, tokens.window_lengths, tokens.pair_start
    targets = np.arange(len(lengths)) % len(LABELS)
    return single_window_batch(ids, lengths, second, targets, np.arange(len(lengths), dtype=np.uint64))


def _vocabulary(model: Path) -> int:
    import json

    return int(json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"])


def global_batch_size(size: Size, tokens: "TokenBatch") -> int:
    """Rows of an update: a power of two, so that any smaller power of two divides it into whole passes."""
    rows = min(size.global_batch_size, len(tokens), int(size.tokens_per_step / float(tokens.window_lengths.mean())))
    return 1 << max(3, rows.bit_length() - 1)


# ------------------------------------------------------------------------------------------------------------- speed


def timed(bench: Bench, work: Callable[[int], Any], seconds: float, warm: int = 2) -> tuple[int, float]:
    """(how often `work` was done, in how many seconds), after `warm` times that do not count."""
    for number in range(warm):
        work(number)
    synchronize(bench)
    started_at, count = time.perf_counter(), 0
    while count < 2 or time.perf_counter() - started_at < seconds:
        work(warm + count)
        count += 1
    synchronize(bench)
    return count, time.perf_counter() - started_at


def largest(attempt: Callable[[int], None], start: int, cap: int, free: Callable[[], None]) -> int:
    """The largest of `start`, 2 `start`, 4 `start` and so on up to `cap` that fits into memory. The largest
    is tried first: on a large GPU it often fits, and each try is a training's start."""
    import torch

    size = start << max(0, (cap // start).bit_length() - 1)
    while size >= start:
        try:
            attempt(size)
        except torch.OutOfMemoryError:
            size //= 2
        else:
            return size
        finally:
            free()
    raise MemoryError(f"not even {start} fit")


def flops(network: Any, lengths: Any) -> float:
    """Floating-point operations of training on texts of these lengths.

    Each weight that a token (or a row) meets takes six. In the attention of every layer each token meets each token of
    its text, in two products of 2 x hidden operations, three times.
    """
    import torch

    linear = {name: part.weight.numel() for name, part in network.named_modules() if isinstance(part, torch.nn.Linear)}
    per_token = sum(size for name, size in linear.items() if ".layer." in name)
    per_row = sum(linear.values()) - per_token
    config = network.config
    squares = float((lengths.astype(np.float64) ** 2).sum())
    met = per_token * float(lengths.sum()) + per_row * len(lengths)
    return 6 * met + 12 * int(config.num_hidden_layers) * int(config.hidden_size) * squares


def peak(bench: Bench, precision: str) -> tuple[float, str]:
    """The device's most operations per second, and where this number is from."""
    if bench.gpu and precision != "fp32":
        import torch

        name = torch.cuda.get_device_name()
        for part in sorted(PEAKS, key=len, reverse=True):
            if part in name:
                return PEAKS[part], f"data sheet of {part}"
    return product_flops(bench, precision), "the best matrix product here"


def product_flops(bench: Bench, precision: str) -> float:
    """Operations per second of a large matrix product."""
    import torch

    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    size = bench.size.product
    left, right = (torch.randn(size, size, dtype=torch.float32, device=bench.device).to(kind) for _ in range(2))
    best = 0.0
    for _ in range(3):
        count, seconds = timed(bench, lambda number: left @ right, bench.size.seconds / 5)
        best = max(best, 2.0 * size * size * size * count / seconds)
    return best
