"""How fast: tokens a second and the share of the device's peak, of rtrain and of Transformers side by side.

Every side trains the same texts with equally many rows an update, in the largest passes for which its memory suffices.
Its rows are there before the clock runs, or come from other processes (the Trainer's loader). Attention weights have no
dropout, except on the side whose name says so. In each round every side trains once, with its own model.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import figures
from benchmarks.gpu import bench as common
from benchmarks.gpu.bench import LABELS, MODEL_NAME, Bench, forget, network, plain_network, texts
from benchmarks.peers import one_device
from rtrain.core.ragged import Head

if TYPE_CHECKING:
    from rtrain.core.ragged import TokenBatch

CELLS = (
    ("bert-large", "squadshifts"),
    ("bert-large", "long"),
    (MODEL_NAME, "banking77"),
    ("bert-base", "squadshifts"),
    (MODEL_NAME, "squadshifts"),
    ("bert-base", "long"),
    (MODEL_NAME, "long"),
)
"""Pairs of model and texts, most important first."""
MFU: Mapping[str, Any] = {"floor": 0.35, "goal": 0.48}
"""Bounds for the share of the peak that the largest model reaches, packed."""
AS_THEY_ARE: Mapping[str, Any] = {"floor": 1.2, "goal": 1.5}
"""Bounds for the speed over that of Transformers at its best, on texts of many lengths."""
EQUALLY_LONG: Mapping[str, Any] = {"floor": 1.3, "goal": 2.0}
"""The same on `long` texts, which the peer does not pad either."""
OUR_SIDES: Mapping[str, Mapping[str, Any]] = {
    "packed": {},
    "packed_attention_dropout": {"attention_dropout": 0.1},
    "padded": {"pack": False},
}
HF: Mapping[str, bool] = {"hf": False, "hf_grouped": True}
"""Transformers' sides, and whether each groups its rows by length."""
START_TOKENS, START_ROWS = 256, 2


@dataclass(frozen=True)
class Speed:
    tokens: float
    """Real tokens per second."""
    flops: float
    """Floating-point operations per second, counted for real tokens only."""
    padding: float
    """Tokens computed for each real token."""


class Ours:
    """rtrain's update over passes that are made beforehand, and used again and again."""

    UPDATES = 4

    def __init__(
        self,
        network: Any,
        tokens: "TokenBatch",
        rows: int,
        max_tokens_per_micro_batch: int,
        precision: str,
        task: tuple[str, Head] = ("classification", Head(LABELS)),
    ):
        from rtrain.config import DistillConfig, OptimConfig
        from rtrain.data.order import assign_micro_batches
        from rtrain.parallel.ddp import DDPStrategy
        from rtrain.tasks import base
        from rtrain.trainer import losses, optimizers

        network.train()
        self.network, self._precision = network, precision
        self.exchange, self.optimizer = DDPStrategy(network), optimizers.build_optimizer(network, OptimConfig())
        self._loss = losses.make_loss(base.get_task(task[0]), DistillConfig(), task[1])
        draw = np.random.default_rng(0)
        self.updates = []
        for _ in range(self.UPDATES):
            part = tokens.take(draw.permutation(len(tokens))[:rows])
            passes = assign_micro_batches(part.window_lengths, 1, 0, None, max_tokens_per_micro_batch)
            self.updates.append([part.take(places) for places in passes])

    def update(self, number: int) -> Any:
        from rtrain.trainer import step

        return step.StepRunner(
            self.exchange,
            self.optimizer,
            self._loss,
            pad_id=self.network.config.pad_token_id,
            precision=self._precision,
            max_grad_norm=1.0,
        ).run_step(self.updates[number % self.UPDATES])

    def measure(self, bench: Bench) -> Speed:
        done: list[Any] = []
        count, seconds = common.timed(
            bench, lambda number: done.append((number, self.update(number))), bench.size.seconds
        )
        counted = done[-count:]
        flops = [
            common.flops(self.network, np.concatenate([batch.window_lengths for batch in passes]))
            for passes in self.updates
        ]
        tokens = sum(batch.real_tokens for _, batch in counted)
        padded = sum(batch.padded_tokens for _, batch in counted)
        total_flops = sum(flops[number % self.UPDATES] for number, _ in counted)
        return Speed(tokens / seconds, total_flops / seconds, padded / tokens)


def run(bench: Bench) -> None:
    precision = bench.precision
    highest, source = common.peak(bench, precision)
    product = common.product_flops(bench, precision)
    bench.report.line("peak", highest / 1e12, "TFLOP/s", source=source, product=product / 1e12, precision=precision)
    longest = 0.0
    for model, kind in CELLS[: bench.size.cells]:
        if bench.left < longest:
            bench.report.line(f"{model}.{kind}", None, note="not begun: too little of the section's time is left")
            continue
        before = bench.left
        with bench.report.attempt(f"{model}.{kind}"):
            _cell(bench, model, kind, highest, precision)
        forget(bench)
        longest = max(longest, before - bench.left)


def _cell(bench: Bench, model: str, kind: str, highest: float, precision: str) -> None:
    tokens = texts(bench, kind)
    rows = common.global_batch_size(bench.size, tokens)
    sides: dict[str, Callable[[], Speed]] = {}
    about: dict[str, dict[str, Any]] = {}
    for name, settings in OUR_SIDES.items():
        with bench.report.attempt(f"{model}.{kind}.{name}"):
            max_tokens = _find_max_tokens(bench, model, tokens, rows, precision, settings)
            sides[name] = _own_side(bench, model, tokens, rows, max_tokens, precision, settings)
            about[name] = {"max_tokens_per_micro_batch": max_tokens, **settings}
    if importlib.util.find_spec("accelerate") is None:
        bench.report.line(f"{model}.{kind}.hf", None, note="HF Trainer needs accelerate, which is not installed")
    for name, grouped in HF.items() if importlib.util.find_spec("accelerate") else ():
        with bench.report.attempt(f"{model}.{kind}.{name}"):
            plan, attention = _best(bench, model, tokens, rows, precision, grouped)
            sides[name] = _hf_side(bench, model, tokens, plan, attention)
            about[name] = {"micro_batch_size": plan.micro_batch_size, "attention": attention}
    rounds: list[dict[str, Speed]] = []
    for number in range(bench.size.rounds):
        speeds_by_side = {}
        for name in figures.turn(list(sides), number):
            speeds_by_side[name] = sides[name]()
            forget(bench)
        rounds.append(speeds_by_side)
    report = bench.report
    for name in sides:
        speeds = [round_speeds[name] for round_speeds in rounds]
        more: dict[str, Any] = {
            "global_batch_size": rows,
            "precision": precision,
            **about[name],
            "padding": speeds[0].padding,
        }
        report.line(f"{model}.{kind}.{name}.tokens_per_s", values=[speed.tokens for speed in speeds], **more)
        bounds = MFU if bench.gpu and (model, name) == ("bert-large", "packed") else {}
        report.line(f"{model}.{kind}.{name}.mfu", values=[speed.flops / highest for speed in speeds], **bounds)
    theirs = [name for name in HF if name in sides]
    if theirs and "packed" in sides:
        bounds = over_peer(kind) if bench.gpu else {}
        best = max(theirs, key=lambda name: float(np.median([round_speeds[name].tokens for round_speeds in rounds])))
        ratios = [round_speeds["packed"].tokens / round_speeds[best].tokens for round_speeds in rounds]
        report.line(f"{model}.{kind}.packed_over_hf", values=ratios, unit="x", **bounds, best=best, **about[best])
    if "padded" in sides and "packed" in sides:
        ratios = [round_speeds["packed"].tokens / round_speeds["padded"].tokens for round_speeds in rounds]
        report.line(f"{model}.{kind}.packed_over_padded", values=ratios, unit="x")


def over_peer(kind: str) -> Mapping[str, Any]:
    """Bounds of rtrain's speed over its peer's by the kind of texts."""
    return EQUALLY_LONG if kind == "long" else AS_THEY_ARE


# ------------------------------------------------------------------------------------------------------------ rtrain


def _find_max_tokens(
    bench: Bench, model: str, tokens: "TokenBatch", rows: int, precision: str, settings: Mapping[str, Any]
) -> int:
    """The largest pass, found with the longest texts; shorter rows take no more memory."""
    ours = Ours(network(bench, model, **settings), tokens, rows, 1 << 30, precision)
    longest = tokens.take(np.argsort(-tokens.window_lengths, kind="stable"))
    ends = np.cumsum(longest.window_lengths)

    def attempt(max_tokens: int) -> None:
        batch = longest.take(np.arange(min(len(tokens), int(np.searchsorted(ends, max_tokens)) + 1)))
        ours.updates = [[batch]] * Ours.UPDATES
        ours.update(0)
        ours.update(1)  # so that the optimizer's moments are there

    # No pass of an update has more tokens than this.
    cap = min(bench.size.max_micro_batch_tokens, int(tokens.window_lengths.mean() * rows) * 2)
    return common.largest(attempt, START_TOKENS, max(START_TOKENS, cap), lambda: forget(bench))


def _own_side(
    bench: Bench,
    model: str,
    tokens: "TokenBatch",
    rows: int,
    max_tokens: int,
    precision: str,
    settings: Mapping[str, Any],
) -> Callable[[], Speed]:
    return lambda: Ours(network(bench, model, **settings), tokens, rows, max_tokens, precision).measure(bench)


# ------------------------------------------------------------------------------------------------------ Transformers


def rows_of(tokens: "TokenBatch") -> list[dict[str, Any]]:
    """The texts as rows for `one_device`."""
    ends = np.cumsum(tokens.window_lengths)
    return [
        {"input_ids": tokens.ids[end - length : end], "labels": int(label)}
        for end, length, label in zip(ends, tokens.window_lengths, tokens.targets, strict=True)
    ]


def _best(
    bench: Bench, model: str, tokens: "TokenBatch", rows: int, precision: str, grouped: bool
) -> tuple[one_device.Plan, str]:
    """The largest pass by each attention implementation that is installed, and the fastest of these."""
    attempts = []
    for attention in ("sdpa", *(["flash_attention_2"] if bench.gpu and importlib.util.find_spec("flash_attn") else [])):
        network = plain_network(bench, model, attention)
        longest = rows_of(tokens.take(np.argsort(-tokens.window_lengths, kind="stable")))
        plan = one_device.Plan(2, 1, grouped=False, precision=precision)

        def attempt(count: int, attempt_network: Any = network, longest: Any = longest, plan: Any = plan) -> None:
            one_device.train(
                attempt_network,
                longest[:count],
                attempt_network.config.pad_token_id,
                replace(plan, micro_batch_size=count),
            )

        count = common.largest(attempt, START_ROWS, min(rows, _most_rows(bench, tokens)), lambda: forget(bench))
        workers = 4 if bench.gpu else 0
        full_plan = replace(
            plan, micro_batch_size=count, passes=rows // count, grouped=grouped, loader_workers=workers, warm=2
        )
        del network
        forget(bench)
        speed = _trained(bench, model, tokens, replace(full_plan, updates=6), attention)
        attempts.append((speed.tokens, replace(full_plan, updates=2 + _updates(bench, speed, tokens, rows)), attention))
    _, plan, attention = max(attempts, key=lambda entry: entry[0])
    return plan, attention


def _most_rows(bench: Bench, tokens: "TokenBatch") -> int:
    """The most rows of a pass, as a power of two: so many of the longest rows fit into the largest pass's tokens."""
    count = max(START_ROWS, int(bench.size.max_micro_batch_tokens / int(tokens.window_lengths.max())))
    return 1 << (count.bit_length() - 1)


def _updates(bench: Bench, speed: Speed, tokens: "TokenBatch", rows: int) -> int:
    """The number of updates of a timed stretch."""
    return max(2, int(bench.size.seconds * speed.tokens / (rows * float(tokens.window_lengths.mean()))))


def _hf_side(
    bench: Bench, model: str, tokens: "TokenBatch", plan: one_device.Plan, attention: str
) -> Callable[[], Speed]:
    return lambda: _trained(bench, model, tokens, plan, attention)


def _trained(bench: Bench, model: str, tokens: "TokenBatch", plan: one_device.Plan, attention: str) -> Speed:
    network = plain_network(bench, model, attention)
    done = one_device.train(network, rows_of(tokens), network.config.pad_token_id, plan)
    # The squared lengths of the texts that it happened to draw are not known. Over whole epochs they are these.
    flops = common.flops(network, tokens.window_lengths) / float(tokens.window_lengths.sum()) * done.real_tokens
    return Speed(done.real_tokens / done.seconds, flops / done.seconds, done.padded_tokens / done.real_tokens)
