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
from benchmarks.gpu.bench import CARRIED, LABELS, Bench, forget, network, plain_network, texts
from benchmarks.peers import one_device
from rtrain.core.ragged import Head

if TYPE_CHECKING:
    from rtrain.core.ragged import Tokens

CELLS = (
    ("bert-large", "squadshifts"),
    ("bert-large", "long"),
    (CARRIED, "banking77"),
    ("bert-base", "squadshifts"),
    (CARRIED, "squadshifts"),
    ("bert-base", "long"),
    (CARRIED, "long"),
)
"""Pairs of model and texts, most important first."""
MFU: Mapping[str, Any] = {"floor": 0.35, "goal": 0.48}
"""Bounds for the share of the peak that the largest model reaches, packed."""
AS_THEY_ARE: Mapping[str, Any] = {"floor": 1.2, "goal": 1.5}
"""Bounds for the speed over that of Transformers at its best, on texts of many lengths."""
EQUALLY_LONG: Mapping[str, Any] = {"floor": 1.3, "goal": 2.0}
"""The same on `long` texts, of which the peer pads none either."""
OWN: Mapping[str, Mapping[str, Any]] = {
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
        made: Any,
        of: "Tokens",
        rows: int,
        tokens_per_pass: int,
        precision: str,
        task: tuple[str, Head] = ("classification", Head(LABELS)),
    ):
        from rtrain.config import Distill, Optim
        from rtrain.data.order import deal
        from rtrain.parallel.ddp import Replicated
        from rtrain.tasks import base
        from rtrain.trainer import losses, optimizers

        made.train()
        self.network, self._precision = made, precision
        self.exchange, self.optimizer = Replicated(made), optimizers.build(made, Optim())
        self._loss = losses.for_run(base.get(task[0]), Distill(), task[1])
        draw = np.random.default_rng(0)
        self.updates = []
        for _ in range(self.UPDATES):
            part = of.pick(draw.permutation(len(of))[:rows])
            passes = deal(part.lengths, 1, 0, None, tokens_per_pass)
            self.updates.append([part.pick(chosen) for chosen in passes])

    def update(self, number: int) -> Any:
        from rtrain.trainer import step

        return step.run_update(
            self.exchange,
            self.optimizer,
            self._loss,
            self.updates[number % self.UPDATES],
            pad_id=self.network.config.pad_token_id,
            precision=self._precision,
            clip_norm=1.0,
        )

    def measure(self, bench: Bench) -> Speed:
        done: list[Any] = []
        count, seconds = common.timed(
            bench, lambda number: done.append((number, self.update(number))), bench.size.seconds
        )
        counted = done[-count:]
        flops = [common.flops(self.network, np.concatenate([one.lengths for one in passes])) for passes in self.updates]
        tokens = sum(one.real_tokens for _, one in counted)
        padded = sum(one.padded_tokens for _, one in counted)
        whole = sum(flops[number % self.UPDATES] for number, _ in counted)
        return Speed(tokens / seconds, whole / seconds, padded / tokens)


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
    of = texts(bench, kind)
    rows = common.rows_per_update(bench.size, of)
    sides: dict[str, Callable[[], Speed]] = {}
    about: dict[str, dict[str, Any]] = {}
    for name, settings in OWN.items():
        with bench.report.attempt(f"{model}.{kind}.{name}"):
            most = _tokens_per_pass(bench, model, of, rows, precision, settings)
            sides[name] = _own_side(bench, model, of, rows, most, precision, settings)
            about[name] = {"tokens_per_pass": most, **settings}
    if importlib.util.find_spec("accelerate") is None:
        bench.report.line(f"{model}.{kind}.hf", None, note="HF Trainer needs accelerate, which is not installed")
    for name, grouped in HF.items() if importlib.util.find_spec("accelerate") else ():
        with bench.report.attempt(f"{model}.{kind}.{name}"):
            plan, attention = _best(bench, model, of, rows, precision, grouped)
            sides[name] = _hf_side(bench, model, of, plan, attention)
            about[name] = {"rows_per_pass": plan.rows_per_pass, "attention": attention}
    found: list[dict[str, Speed]] = []
    for number in range(bench.size.rounds):
        one = {}
        for name in figures.turn(list(sides), number):
            one[name] = sides[name]()
            forget(bench)
        found.append(one)
    report = bench.report
    for name in sides:
        speeds = [one[name] for one in found]
        more: dict[str, Any] = {
            "rows_per_update": rows,
            "precision": precision,
            **about[name],
            "padding": speeds[0].padding,
        }
        report.line(f"{model}.{kind}.{name}.tokens_per_s", values=[one.tokens for one in speeds], **more)
        wanted = MFU if bench.gpu and (model, name) == ("bert-large", "packed") else {}
        report.line(f"{model}.{kind}.{name}.mfu", values=[one.flops / highest for one in speeds], **wanted)
    theirs = [name for name in HF if name in sides]
    if theirs and "packed" in sides:
        wanted = over_peer(kind) if bench.gpu else {}
        best = max(theirs, key=lambda name: float(np.median([one[name].tokens for one in found])))
        ratios = [one["packed"].tokens / one[best].tokens for one in found]
        report.line(f"{model}.{kind}.packed_over_hf", values=ratios, unit="x", **wanted, best=best, **about[best])
    if "padded" in sides and "packed" in sides:
        ratios = [one["packed"].tokens / one["padded"].tokens for one in found]
        report.line(f"{model}.{kind}.packed_over_padded", values=ratios, unit="x")


def over_peer(kind: str) -> Mapping[str, Any]:
    """Bounds of rtrain's speed over its peer's by the kind of texts."""
    return EQUALLY_LONG if kind == "long" else AS_THEY_ARE


# ------------------------------------------------------------------------------------------------------------ rtrain


def _tokens_per_pass(
    bench: Bench, model: str, of: "Tokens", rows: int, precision: str, settings: Mapping[str, Any]
) -> int:
    """The largest pass, found with the longest texts; shorter rows take no more memory."""
    ours = Ours(network(bench, model, **settings), of, rows, 1 << 30, precision)
    longest = of.pick(np.argsort(-of.lengths, kind="stable"))
    ends = np.cumsum(longest.lengths)

    def attempt(tokens: int) -> None:
        chosen = longest.pick(np.arange(min(len(of), int(np.searchsorted(ends, tokens)) + 1)))
        ours.updates = [[chosen]] * Ours.UPDATES
        ours.update(0)
        ours.update(1)  # so that the optimizer's moments are there

    # No pass of an update has more tokens than this.
    cap = min(bench.size.largest_pass, int(of.lengths.mean() * rows) * 2)
    return common.largest(attempt, START_TOKENS, max(START_TOKENS, cap), lambda: forget(bench))


def _own_side(
    bench: Bench, model: str, of: "Tokens", rows: int, most: int, precision: str, settings: Mapping[str, Any]
) -> Callable[[], Speed]:
    return lambda: Ours(network(bench, model, **settings), of, rows, most, precision).measure(bench)


# ------------------------------------------------------------------------------------------------------ Transformers


def rows_of(of: "Tokens") -> list[dict[str, Any]]:
    """The texts as rows for `one_device`."""
    ends = np.cumsum(of.lengths)
    return [
        {"input_ids": of.ids[end - length : end], "labels": int(label)}
        for end, length, label in zip(ends, of.lengths, of.targets, strict=True)
    ]


def _best(
    bench: Bench, model: str, of: "Tokens", rows: int, precision: str, grouped: bool
) -> tuple[one_device.Plan, str]:
    """The largest pass by each attention implementation that is installed, and the fastest of these."""
    found = []
    for attention in ("sdpa", *(["flash_attention_2"] if bench.gpu and importlib.util.find_spec("flash_attn") else [])):
        made = plain_network(bench, model, attention)
        longest = rows_of(of.pick(np.argsort(-of.lengths, kind="stable")))
        plan = one_device.Plan(2, 1, grouped=False, precision=precision)

        def attempt(count: int, made: Any = made, longest: Any = longest, plan: Any = plan) -> None:
            one_device.train(made, longest[:count], made.config.pad_token_id, replace(plan, rows_per_pass=count))

        count = common.largest(attempt, START_ROWS, min(rows, _most_rows(bench, of)), lambda: forget(bench))
        workers = 4 if bench.gpu else 0
        whole = replace(
            plan, rows_per_pass=count, passes=rows // count, grouped=grouped, loader_workers=workers, warm=2
        )
        del made
        forget(bench)
        speed = _trained(bench, model, of, replace(whole, updates=6), attention)
        found.append((speed.tokens, replace(whole, updates=2 + _updates(bench, speed, of, rows)), attention))
    _, plan, attention = max(found, key=lambda one: one[0])
    return plan, attention


def _most_rows(bench: Bench, of: "Tokens") -> int:
    """The most rows of a pass, as a power of two: so many of the longest rows fit into the largest pass's tokens."""
    count = max(START_ROWS, int(bench.size.largest_pass / int(of.lengths.max())))
    return 1 << (count.bit_length() - 1)


def _updates(bench: Bench, speed: Speed, of: "Tokens", rows: int) -> int:
    """The number of updates of a timed stretch."""
    return max(2, int(bench.size.seconds * speed.tokens / (rows * float(of.lengths.mean()))))


def _hf_side(bench: Bench, model: str, of: "Tokens", plan: one_device.Plan, attention: str) -> Callable[[], Speed]:
    return lambda: _trained(bench, model, of, plan, attention)


def _trained(bench: Bench, model: str, of: "Tokens", plan: one_device.Plan, attention: str) -> Speed:
    made = plain_network(bench, model, attention)
    done = one_device.train(made, rows_of(of), made.config.pad_token_id, plan)
    # The squared lengths of the texts that it happened to draw are not known. Over whole epochs they are these.
    flops = common.flops(made, of.lengths) / float(of.lengths.sum()) * done.real_tokens
    return Speed(done.real_tokens / done.seconds, flops / done.seconds, done.padded_tokens / done.real_tokens)
