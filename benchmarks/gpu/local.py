"""Correctness and speed of local attention with a global first token.

Each variant reads the same texts: `banded` is the GPU's attention by three calls of flash attention, `padded` uses
padded chunks, as in fp32, and `full` is flash attention over all tokens. The variants alternate in each round.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal
from unittest import mock

import numpy as np

from benchmarks.gpu import bench as common
from benchmarks.gpu.bench import LABELS, Bench, forget
from rtrain.core.ragged import single_window_batch
from rtrain.models import attention, long_texts
from rtrain.models.pack_layout import PackLayout, make_layout

if TYPE_CHECKING:
    import torch

    from rtrain.core.ragged import TokenBatch

Variant = Literal["padded", "banded", "full"]
VARIANTS: tuple[Variant, ...] = ("padded", "banded", "full")
ROUNDS = 5
CELLS = ((512, 64), (2048, 64), (4096, 64), (512, 128), (2048, 128), (4096, 128))
"""(tokens of a text, attention window)."""
TOKENS = 1 << 15
"""Tokens of a micro-batch."""
HEADS, DIM = 12, 64
MAX_ERROR_RATIO = 1.5
"""Largest rounding error relative to padded chunks."""
GOAL = 10.0
"""Target speed of a layer's attention relative to padded chunks."""


def run(bench: Bench) -> None:
    formats = ("bfloat16", "float16") if bench.gpu else ("bfloat16",)
    for name in formats:
        for check in (check_errors, check_dropout):
            with bench.report.attempt(f"{check.__name__.removeprefix('check_')}.{name}"):
                check(bench, name)
    cells = CELLS if bench.gpu else ((64, 8),)
    for tokens, window in cells:
        with bench.report.attempt(f"layer.{tokens}.{window}"):
            layer(bench, tokens, window)
    with bench.report.attempt("layer.dropout"):
        layer(bench, *cells[-1], rate=0.1)
    with bench.report.attempt("step"):
        steps(bench, cells)


@contextlib.contextmanager
def use_variant(variant: Variant) -> Iterator[None]:
    """Use the kernel of a variant inside the block."""
    with contextlib.ExitStack() as stack:
        if variant == "padded":
            stack.enter_context(mock.patch.object(attention, "select_kernel", return_value="fused"))
        yield


def texts(lengths: list[int]) -> "TokenBatch":
    sizes = np.array(lengths, dtype=np.int32)
    ids = np.random.default_rng(0).integers(1000, 30000, int(sizes.sum()), dtype=np.int32)
    number = np.arange(len(sizes))
    return single_window_batch(ids, sizes, sizes, number % len(LABELS), number.astype(np.uint64))


# ------------------------------------------------------------------------------------------------------------- right


def bound(bench: Bench) -> float | None:
    """A CPU computes both sides by plain products, whose rounding is another."""
    return MAX_ERROR_RATIO if bench.gpu else None


def exactly(parts: "list[torch.Tensor]", sizes: list[int], window: int, dropout: Any = None) -> "torch.Tensor":
    """Attention [1, heads, tokens, dim] -> [1, tokens, heads, dim] by plain products under a mask. `dropout`:
    factors [heads, tokens, tokens] of a window's weights, for each window."""
    import torch

    answers, begin = [], 0
    for number, size in enumerate(sizes):
        query, key, value = (part[0, :, begin : begin + size] for part in parts)
        places = torch.arange(size, device=query.device)
        scores = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
        weights = scores.masked_fill(~long_texts.window_mask(places[:, None], places, window), -torch.inf).softmax(-1)
        answers.append((weights if dropout is None else weights * dropout[number]) @ value)
        begin += size
    return torch.cat(answers, dim=1).transpose(0, 1)[None]


def errors(
    bench: Bench,
    variant: Variant,
    parts: "list[torch.Tensor]",
    layout: PackLayout,
    rate: float = 0.0,
    dropout: Any = None,
) -> dict[str, float]:
    """The norm of the difference from float64, over that of float64's; of the answer and the three gradients."""
    import torch

    mine = [part.clone().requires_grad_() for part in parts[:3]]
    with use_variant(variant):
        torch.manual_seed(1)
        answer, _ = attention.packed_attention(
            torch.nn.Module().train(), mine[0], mine[1], mine[2], None, dropout=rate, layout=layout
        )
    gradient = parts[3].transpose(1, 2)
    actual = [answer, *torch.autograd.grad(answer, mine, gradient)]
    exact = [part.double().requires_grad_() for part in parts[:3]]
    window = layout.attention_window or 0
    plain = exactly(exact, [int(size) for size in layout.sizes], window, dropout)
    expected = [plain, *torch.autograd.grad(plain, exact, gradient.double())]
    relative_errors = [
        float((value.detach().double() - other.detach()).norm() / other.detach().norm())
        for value, other in zip(actual, expected, strict=True)
    ]
    return dict(zip(("answer", "query", "key", "value"), relative_errors, strict=True))


def check_errors(bench: Bench, name: str) -> None:
    """Check answers and gradients of texts of many lengths."""
    import torch

    window = 64 if bench.gpu else 8
    lengths = [1500, 700, 513, 321, 129, 128, 66, 65, 64, 3, 1] if bench.gpu else [70, 40, 9, 8, 1]
    layout = make_layout(texts(lengths), HEADS, bench.device, window)
    draw = torch.Generator().manual_seed(0)
    shape = (1, HEADS, sum(lengths), DIM)
    parts = [torch.randn(shape, generator=draw).to(bench.device, getattr(torch, name)) for _ in range(4)]
    padded = errors(bench, "padded", parts, layout)
    for part, error in errors(bench, "banded", parts, layout).items():
        key, unit = f"errors.{name}.banded.{part}", "x padded's error"
        bench.report.line(key, error / padded[part], unit, maximum=bound(bench), error=error, padded=padded[part])


def check_dropout(bench: Bench, name: str) -> None:
    """Check dropout of attention weights: its rate, and the gradient. If the values are the unit matrix, the answers
    are the weights, and zero weights were dropped; the same seed drops the same weights."""
    import torch

    heads, window, rate, width = 2, 16, 0.1, 256
    lengths = [200, 150, 90, 17, 9]
    layout = make_layout(texts(lengths), heads, bench.device, window)
    draw = torch.Generator().manual_seed(0)
    shape = (1, heads, sum(lengths), width)
    parts = [torch.randn(shape, generator=draw).to(bench.device, getattr(torch, name)) for _ in range(4)]
    unit = torch.cat([torch.eye(size, width) for size in lengths]).expand(shape).to(parts[0])
    torch.manual_seed(1)
    module = torch.nn.Module().train()
    query = parts[0].clone().requires_grad_()  # a CPU's kernel for training
    weights, _ = attention.packed_attention(module, query, parts[1], unit, None, dropout=rate, layout=layout)
    factors, begin, counts = [], 0, [0, 0]
    for size in lengths:
        is_kept = weights.detach()[0, begin : begin + size, :, :size].transpose(0, 1) != 0
        places = torch.arange(size, device=bench.device)
        read = long_texts.window_mask(places[:, None], places, window)
        counts = [counts[0] + int((~is_kept & read).sum()), counts[1] + heads * int(read.sum())]
        factors.append(is_kept / (1 - rate))
        begin += size
    share = counts[0] / counts[1]
    sigma = (rate * (1 - rate) / counts[1]) ** 0.5
    bench.report.line(
        f"dropout.{name}.rate", abs(share - rate) / sigma, "sigma from the rate", maximum=5.0, zeros=share
    )
    plain = errors(bench, "banded", parts, layout)
    for part, error in (errors(bench, "banded", parts, layout, rate, factors) if bench.gpu else plain).items():
        bench.report.line(
            f"dropout.{name}.{part}", error / plain[part], "x the error without", maximum=bound(bench), dropped=error
        )


# ------------------------------------------------------------------------------------------------------------- speed


def measure(
    bench: Bench, key: str, works: dict[Variant, Callable[[int], Any]], seconds: float, goal: float | None = None
) -> None:
    """The milliseconds of each side, and the ratios of two in the same round."""
    times: list[dict[Variant, float]] = []
    for number in range(ROUNDS):
        round_ms: dict[Variant, float] = {}
        for variant in VARIANTS if number % 2 == 0 else reversed(VARIANTS):
            with use_variant(variant):
                count, passed = common.timed(bench, works[variant], seconds, warm=3 if number == 0 else 1)
            round_ms[variant] = 1e3 * passed / count
        times.append(round_ms)
    for variant in works:
        bench.report.line(f"{key}.{variant}", values=[round_ms[variant] for round_ms in times], unit="ms")
    for variant in VARIANTS:
        if variant != "banded":
            ratios = [round_ms[variant] / round_ms["banded"] for round_ms in times]
            bound = goal if variant == "padded" else None
            bench.report.line(f"{key}.{variant}_over_banded", values=ratios, unit="x", goal=bound)


def layer(bench: Bench, tokens: int, window: int, rate: float = 0.0) -> None:
    """Attention alone, forward and backward."""
    import torch

    count = TOKENS if bench.gpu else 256
    batch = texts([tokens] * (count // tokens))
    layouts = {
        variant: make_layout(batch, HEADS, bench.device, None if variant == "full" else window) for variant in VARIANTS
    }
    parts = [
        torch.randn(1, count, HEADS, DIM, device=bench.device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for _ in range(3)
    ]
    gradient = torch.randn(1, count, HEADS, DIM, device=bench.device, dtype=torch.bfloat16)
    module = torch.nn.Module().train()

    def work(variant: Variant) -> Callable[[int], Any]:
        def once(_: int) -> Any:
            answer, _weights = attention.packed_attention(
                module, parts[0], parts[1], parts[2], None, dropout=rate, layout=layouts[variant]
            )
            return torch.autograd.grad(answer, parts, gradient)

        return once

    key = f"layer.{tokens}.{window}" + (f".dropout_{rate}" if rate else "")
    measure(bench, key, {variant: work(variant) for variant in VARIANTS}, 0.05 if bench.gpu else 0.01, GOAL)
    forget(bench)


def steps(bench: Bench, cells: Any) -> None:
    """A whole update of one pass, of BERT-base's shape with places for the longest texts."""
    import torch
    import transformers

    from benchmarks.gpu.speed import Ours
    from rtrain.models import builder, unpadded

    torch.manual_seed(0)
    settings: dict[str, Any] = {"num_labels": len(LABELS), **(bench.size.models["bert-base"] or {})}
    config = transformers.BertConfig(**settings, max_position_embeddings=4096, attention_probs_dropout_prob=0.0)
    with torch.device(bench.device):
        network: Any = transformers.AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)
    unpadded.enable_packing(network, "first")
    builder.move_to_device(network, bench.device)
    count = TOKENS if bench.gpu else 256
    ours = Ours(network, texts([count]), 1, count, bench.precision)
    for tokens, window in cells:
        passes = [[texts([tokens] * (count // tokens))]] * Ours.UPDATES

        def work(variant: Variant, passes: Any = passes, window: int = window) -> Callable[[int], Any]:
            def once(number: int) -> Any:
                setattr(network.config, long_texts.CONFIG_KEY, None if variant == "full" else window)
                ours.updates = passes
                return ours.update(number)

            return once

        key = f"step.{tokens}.{window}"
        measure(bench, key, {variant: work(variant) for variant in VARIANTS}, 0.25 if bench.gpu else 0.02)
        forget(bench)
