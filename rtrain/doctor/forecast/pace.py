"""How fast a worker computes: as a finished run has shown, or by a table of assumptions. Pure, but for a run's log."""

import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from rtrain import config as configuration, events
from rtrain.config import Recipe
from rtrain.doctor.forecast import parted
from rtrain.doctor.forecast.facts import Rows, Shape, of_model
from rtrain.doctor.forecast.links import PRESETS, Fabric, Link, uniform
from rtrain.doctor.forecast.scaling import STEP, Compute, Work
from rtrain.errors import UserError
from rtrain.run import Run

SPREAD: Final = 0.02
"""How unequal passes are, where nobody has measured it."""


@dataclass(frozen=True)
class Pace:
    """How fast one worker is."""

    flops_per_s: float
    """Those of the products of a forward and backward pass, as they come to in training."""
    memory_per_s: float
    """Bytes that the optimizer moves in a second."""
    exchange: Link | None
    """By what workers of one node exchange; None for that of the node's GPUs."""
    why: str
    """Where these numbers are from."""
    spread: float = SPREAD
    """Standard deviation of the logarithm of a pass's seconds."""

    def compute(self, work: Work) -> Compute:
        return Compute(STEP * work.weights / self.memory_per_s, work.flops / self.flops_per_s, self.spread)


HOST: Final = Link("host", 0.5e-3, 0.2e-3, 0.2e-3, 1.0e9)
"""Gloo's sockets within a machine."""


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
NVLINK: Final = ("A100", "A100-80G", "H100", "H200")
"""Those whose neighbours of one node are joined by it."""
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
CPU: Final = Pace(100e9, 20e9, HOST, "an assumption for a processor's core that computes bf16")
"""About half of what a core of an AMD EPYC (Zen 5) came to with MiniLM, 229e9: clouds count two threads of a core."""


def assumed(gpu: str, precision: str = "auto") -> Pace:
    """The pace of a kind of GPU that nobody has measured; one that is not in the table is taken for `UNKNOWN`."""
    known = PEAK.get(gpu)
    peak = known or PEAK[UNKNOWN]
    flops = peak.single if precision == "fp32" else peak.half
    of = f"an {gpu}" if known else f"an {UNKNOWN}, for which the GPU of {gpu} is taken, as it is not known"
    return Pace(REACHED * flops, MOVED * peak.memory_per_s, None, f"an assumption: {REACHED:.0%} of the peak of {of}")


def memory_per_s(device: str) -> float:
    """Bytes that the optimizer moves in a second, by the name that a run's log has for its device: `cpu`, or that of a
    GPU, e.g. `NVIDIA H100 80GB HBM3`. A GPU that is not in the table is taken for `UNKNOWN`."""
    if device == "cpu":
        return CPU.memory_per_s
    known = (word for word in re.findall(r"\w+", device) if word in PEAK)
    return assumed(next(known, UNKNOWN)).memory_per_s


def wires(pace: Pace, gpu: str | None, gpus: int, efa: int, per_node: int) -> Fabric:
    """By what workers exchange, within a node and between nodes."""
    inside = pace.exchange or PRESETS["nvlink" if gpu in NVLINK and gpus > 1 else "pcie"]
    between = PRESETS["efa" if efa > 1 else "25gbit" if gpu else "10gbit"]
    return Fabric(inside, between, max(1, per_node))


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


@dataclass(frozen=True)
class Seen:
    """What a finished run has shown."""

    pace: Pace
    update_s: float
    workers: int


def of_run(run: Run, models: Path | None = None) -> Seen:
    """The pace of a run that has ended. Raises `UserError` where its log does not tell."""
    from rtrain.network import model

    last = events.trained(run.events())
    if last is None or last[1]["updates"] <= last[0]["update"] or not last[1]["rows_seen"]:
        raise UserError(f"--like: {run} has not come to its end: nothing tells how long an update takes")
    started, ended = last
    recipe = configuration.load(str(run.config)).recipe
    shape = of_model(model.resolve(recipe.model.name, models), recipe.model)
    length = max(1, round(ended["real_tokens"] / ended["rows_seen"]))
    done = work(recipe, shape, Rows(1, 0, 0, (length,), 1.0))
    updates = ended["updates"] - started["update"]
    update_s = ended["seconds"]["train"] / updates
    exchanged = ended.get("exchange") or {}
    waited = float(exchanged.get("seconds", 0.0))
    rows, train, gpu = ended["rows_seen"] / updates / started["workers"], recipe.train, started["device"] != "cpu"
    within, tied = uniform(PRESETS["pcie"] if gpu else HOST), recipe.task == "masked_lm"
    tokens = rows * train.tensor * train.pipeline * length
    cost = parted.of(train, shape, tokens, within, started["workers"], gpu=gpu, tied=tied)
    step = 0.0 if gpu else STEP * done.weights / CPU.memory_per_s / cost.step_shares
    computing = (update_s - waited - step - cost.still_s - (0.0 if gpu else cost.beside_s)) / (1 + cost.bubble)
    again = train.gradient_checkpointing and not frozen(recipe)
    computing = max(computing, 0.1 * update_s) / (RECOMPUTED if again else 1)
    rate = done.flops * rows / recipe.train.micro_batch / computing
    link = None
    if started["workers"] > 1 and waited:
        link = Link(
            "as the run's", 0.0, 0.0, 0.0, _bandwidth(exchanged.get("bytes", done.gradient), started["workers"], waited)
        )
    why = f"as {run.name} went on {started['workers']} workers ({started['device']}, {started['precision']})"
    memory = memory_per_s(started["device"])
    spreads = [worker["spread"] for worker in ended.get("stages") or () if "spread" in worker]
    spread = statistics.median(spreads) if spreads else SPREAD
    exchange = link or (None if gpu else HOST)
    return Seen(Pace(rate, memory, exchange, why, spread), update_s, started["workers"])


def _bandwidth(size: float, workers: int, seconds: float) -> float:
    """By which a ring of so many workers takes as long."""
    return 2 * (workers - 1) / workers * size / seconds
