"""How fast a worker computes: as a finished run has shown, or by a table of assumptions. Pure, but for a run's log."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from rtrain import config as configuration
from rtrain.config import Recipe, Train
from rtrain.core import events
from rtrain.core.errors import UserError
from rtrain.core.run_folder import Run
from rtrain.planning.run_facts import Rows, Shape, of_model

STEP: Final = 7
"""Bytes that AdamW's step moves for each of the weights' own: it reads weight, gradient and two moments, and writes all
but the gradient."""


@dataclass(frozen=True)
class Compute:
    """One worker's own work, of one model, one precision and one kind of processor."""

    step_s: float
    """Seconds of an update whatever its rows: the optimizer, and what surrounds it."""
    pass_s: float
    """Seconds of a pass of `micro_batch` rows, of the rows' mean length."""

    def seconds(self, passes: float) -> float:
        """Seconds of an update of so many passes, without any exchange."""
        return self.step_s + passes * self.pass_s


def between(first: tuple[float, float], second: tuple[float, float]) -> Compute:
    """The work by which two updates, of (passes, seconds), took as long as they did."""
    (few, short), (many, long) = sorted([first, second])
    pass_s = max(0.0, (long - short) / (many - few))
    return Compute(max(0.0, short - few * pass_s), pass_s)


@dataclass(frozen=True)
class Work:
    """What is the same of a model wherever it is trained."""

    flops: float
    """Operations of a forward and backward pass of `micro_batch` rows."""
    gradient: float
    """Bytes that are exchanged in an update."""
    weights: float
    """Bytes of the weights that the optimizer steps."""


@dataclass(frozen=True)
class Pace:
    """How fast one worker is."""

    flops_per_s: float
    """Those of the products of a forward and backward pass, as they come to in training."""
    memory_per_s: float
    """Bytes that the optimizer moves in a second."""
    why: str
    """Where these numbers are from."""
    exchange_s: float | None = None
    """Seconds by which an exchange lengthens an update, for each byte of the gradient; None where nobody has measured
    it."""

    def compute(self, work: Work) -> Compute:
        return Compute(STEP * work.weights / self.memory_per_s, work.flops / self.flops_per_s)


class Gpu(NamedTuple):
    """What a GPU's data sheet says."""

    half: float
    """Operations a second in half precision, by tensor cores and without sparsity."""
    single: float
    """Operations a second in fp32: torch leaves TF32 off, and nothing here sets it."""
    memory_per_s: float
    """Bytes."""
    gigabytes: float


# NVIDIA's data sheets. V100: of 16 GB, SXM2; A100: of 40 GB, SXM4; A100-80G: PCIe, the slower of two; H100, H200: SXM5.
PEAK: Final[Mapping[str, Gpu]] = {
    "V100": Gpu(125e12, 15.7e12, 900e9, 16),
    "T4": Gpu(65e12, 8.1e12, 320e9, 16),
    "A10": Gpu(125e12, 31.2e12, 600e9, 24),
    "A10G": Gpu(70e12, 35e12, 600e9, 24),
    "L4": Gpu(121e12, 30.3e12, 300e9, 24),
    "L40S": Gpu(362e12, 91.6e12, 864e9, 48),
    "A100": Gpu(312e12, 19.5e12, 1555e9, 40),
    "A100-80G": Gpu(312e12, 19.5e12, 1935e9, 80),
    "H100": Gpu(989e12, 67e12, 3350e9, 80),
    "H200": Gpu(989e12, 67e12, 4800e9, 141),
}
"""By the names that Ray gives them. It calls one of 80 GB an A100 too, which is counted with 40."""
UNKNOWN: Final = "A10G"
"""The GPU whose figures are taken for one that is not in the table: a small one, so that a plan says too many hours
rather than too few."""
FORWARD: Final = 1 / 3
"""The forward pass's share of a pass."""
RECOMPUTED: Final = 4 / 3
"""How many times as long a pass is whose layers are computed again: one more forward pass."""
REACHED: Final = 0.3
"""Share of a GPU's peak that training reaches: an assumption; 0.2 for small encoders, 0.4 for large ones."""
MOVED: Final = 0.8
"""Share of its memory's bandwidth that the optimizer's step reaches: an assumption."""
CPU: Final = Pace(100e9, 20e9, "an assumption for a processor's core that computes bf16")
"""About half of what a core of an AMD EPYC (Zen 5) came to with MiniLM, 229e9: clouds count two threads of a core."""


def assumed(gpu: str, precision: str = "auto") -> Pace:
    """The pace of a kind of GPU that nobody has measured; one that is not in the table is taken for `UNKNOWN`."""
    known = PEAK.get(gpu)
    peak = known or PEAK[UNKNOWN]
    flops = peak.single if precision == "fp32" else peak.half
    of = f"an {gpu}" if known else f"an {UNKNOWN}, for which the GPU of {gpu} is taken, as it is not known"
    return Pace(REACHED * flops, MOVED * peak.memory_per_s, f"an assumption: {REACHED:.0%} of the peak of {of}")


def memory_per_s(device: str) -> float:
    """Bytes that the optimizer moves in a second, by the name that a run's log has for its device: `cpu`, or that of a
    GPU, e.g. `NVIDIA H100 80GB HBM3`. A GPU that is not in the table is taken for `UNKNOWN`."""
    if device == "cpu":
        return CPU.memory_per_s
    known = (word for word in re.findall(r"\w+", device) if word in PEAK)
    return assumed(next(known, UNKNOWN)).memory_per_s


def frozen(recipe: Recipe) -> bool:
    """Whether the head alone is trained."""
    return recipe.model.freeze == "encoder"


def work(recipe: Recipe, shape: Shape, rows: Rows) -> Work:
    """What a pass of `micro_batch` rows computes, and what an update of whole models exchanges and steps. Through a
    frozen encoder nothing goes back: what its head, alone, takes is hardly anything."""
    answers = recipe.task == "masked_lm"
    windows = np.asarray(rows.windows)
    per_row = shape.flops(windows, answers_words=answers) / len(windows) * rows.windows_of_row
    if frozen(recipe):
        return Work(FORWARD * per_row * recipe.train.micro_batch, shape.head, shape.head)
    size = shape.weights
    # The word embedding exchanges the rows that an update touched alone, which are few.
    gradient = size if answers else size - shape.table
    sent = gradient / 2 if recipe.train.gradient_compression == "bf16" else gradient
    return Work(per_row * recipe.train.micro_batch, sent, size)


def passes(recipe: Recipe, workers: int) -> float:
    """Passes of `micro_batch` rows of an update, on each of so many replicas."""
    return recipe.rows_per_update / workers / recipe.train.micro_batch


def step_shares(train: Train, workers: int) -> int:
    """Of so many workers, those that share the optimizer's step."""
    parts = train.tensor * train.pipeline
    return parts * (workers // parts if train.shard else 1)


def of_run(run: Run, models: Path | None = None) -> Pace:
    """The pace of a run that has ended. Raises `UserError` where its log does not tell."""
    from rtrain.models import builder

    last = events.trained(run.events())
    if last is None or last[1]["updates"] <= last[0]["update"] or not last[1]["rows_seen"]:
        reason = f"--like: {run} has not come to its end: nothing tells how long an update takes"
        raise UserError(reason, code="not_finished")
    started, ended = last
    recipe = configuration.load(str(run.config)).recipe
    train, workers, device = recipe.train, started["workers"], started["device"]
    shape = of_model(builder.resolve(recipe.model.name, models), recipe.model)
    length = max(1, round(ended["real_tokens"] / ended["rows_seen"]))
    done = work(recipe, shape, Rows(1, 0, 0, (length,), 1.0))
    updates = ended["updates"] - started["update"]
    update_s = ended["seconds"]["train"] / updates
    exchanged = ended["exchange"] or {"seconds": 0.0}
    step = 0.0 if device != "cpu" else STEP * done.weights / CPU.memory_per_s / step_shares(train, workers)
    again = train.gradient_checkpointing and not frozen(recipe)
    computing = max(update_s - exchanged["seconds"] - step, 0.1 * update_s) / (RECOMPUTED if again else 1)
    rows = ended["rows_seen"] / updates / workers
    rate = done.flops * rows / train.micro_batch / computing
    each = exchanged["seconds"] / exchanged["bytes"] if exchanged["seconds"] else None
    why = f"as {run.name} went on {workers} workers ({device}, {started['precision']})"
    return Pace(rate, memory_per_s(device), why, each)
