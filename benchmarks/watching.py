"""What it costs to watch updates: `python -m benchmarks.watching [--updates N] [--json]`.

Two workers train a network of MiniLM's size on rows of the lengths of short messages, and exchange through shared
memory. Of each pair of updates of the same rows, one is watched as every run's are: spans of its stages, their sums,
and in one of eight updates the noise of its gradient, whose rows are dealt at random. The other one is not. Told is the
processor time of both workers, which other work of the machine hardly changes, of the first over the second.
"""

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.scaling import make
from benchmarks.uneven import LAYERS, MOST_TOKENS, ROWS, drawn
from rtrain import env
from rtrain.batch import Head
from rtrain.doctor.forecast import calibrate
from rtrain.exchange import noise
from rtrain.exchange.timeline import Timeline

WORKERS = 2
KINDS = ("watched", "alone")


class Unwatched(Timeline):
    """It takes no times."""

    def during(self, kind: str) -> Any:
        return contextlib.nullcontext()

    def add(self, kind: str, start: int, stop: int) -> None:
        pass


def main() -> None:
    env.prepare()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watching", description=__doc__)
    parser.add_argument("--updates", type=int, default=40, help="pairs of updates; one in eight measures noise")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder), given.updates, given.precision)
    if given.json:
        print(json.dumps(found))
        return
    print(f"{given.updates} updates, processor seconds of both workers: {found['seconds']}")
    print(f"watched over alone: {found['ratio']:.4f}; median of pairs that measure no noise {found['plain']:.4f}")


def measured(folder: Path, updates: int, precision: str) -> dict[str, Any]:
    make(folder, LAYERS)
    each = calibrate.on_workers(WORKERS, partial(pairs, folder, updates, precision))
    sums = {kind: [sum(of) for of in zip(*(worker[kind] for worker in each), strict=True)] for kind in KINDS}
    plain = [
        one / other
        for number, (one, other) in enumerate(zip(*(sums[kind] for kind in KINDS), strict=True))
        if not noise.due(number, noise.RULE)
    ]
    totals = {kind: sum(of) for kind, of in sums.items()}
    ratio = totals["watched"] / totals["alone"]
    seconds = {kind: round(total, 3) for kind, total in totals.items()}
    return {"seconds": seconds, "ratio": ratio, "plain": statistics.median(plain)}


def pairs(folder: Path, updates: int, precision: str, rank: int) -> dict[str, list[float]]:
    """Processor seconds of this worker's updates, by kind."""
    import torch
    import torch.distributed as dist

    from rtrain.config import Distill, Recipe
    from rtrain.data.order import deal
    from rtrain.exchange.replicated import Replicated
    from rtrain.network import model
    from rtrain.tasks import base
    from rtrain.training import losses, optim, step
    from rtrain.training.watched import Watched

    torch.set_num_threads(1)
    task = base.get("classification")
    loss = losses.RunLoss(task, Distill(), Head(("a", "b")))
    network = model.build(folder, task, ("a", "b"), 0).train()
    exchange = Replicated(network, by="shared_memory")
    optimizer = optim.of_run(exchange, Recipe(name="a", task="classification"))
    watched, seconds = Watched(exchange), dict[str, list[float]]((kind, []) for kind in KINDS)
    timelines = {"watched": exchange.timeline, "alone": Unwatched()}
    for number in range(-1, updates):
        rows = drawn(1 + number, ROWS)
        for kind in KINDS if number % 2 else reversed(KINDS):
            exchange.timeline = exchange._spent._timeline = timelines[kind]
            measures = kind == "watched" and noise.due(number, noise.RULE)
            dealt = deal(rows.lengths, WORKERS, rank, None, MOST_TOKENS, at_random=measures)
            passes = [rows.pick(one) for one in dealt]
            dist.barrier()
            begun = time.process_time()
            done = step.run_update(
                exchange, optimizer, loss, passes, pad_id=0, precision=precision, clip_norm=1.0, measures=measures
            )
            if kind == "watched":
                watched.end(number, done)
            if number >= 0:  # the first pair makes the buckets
                seconds[kind].append(time.process_time() - begun)
    return seconds


if __name__ == "__main__":
    main()
