"""What it gains to deal rows by the workers' speeds: `python -m benchmarks.uneven [--rounds N] [--json]`.

Two workers have a core each, and on the second one's core another process is always busy. Updates of a network of
MiniLM's size, whose rows have the lengths of short messages, are timed with equal shares of their tokens
(`train.balance=off`) and with shares by the speeds that three passes have told (`auto`), in turns. The ideal is what no
waiting at all would gain. Needs two cores and Linux; the machine should do nothing else.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.scaling import WORDS, make
from rtrain import env
from rtrain.batch import Head, Tokens, single
from rtrain.doctor.forecast import calibrate

KINDS = ("off", "auto")
LAYERS, ROWS, MOST_TOKENS = 6, 128, 2048
MEAN, SPREAD = 28, 0.5
"""Tokens of a row: their median, and the standard deviation of their logarithm."""


def main() -> None:
    env.prepare()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.uneven", description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder), given.rounds, given.precision)
    if given.json:
        print(json.dumps(found))
        return
    gain = found["gain"]
    print(f"speeds {found['speeds']}: ideal {found['ideal']:.2f} x")
    print(f"an update: {found['seconds']['off']:.3f} s in equal shares, {found['seconds']['auto']:.3f} by speed")
    print(f"gain {gain['median']:.2f} x ({gain['min']:.2f} to {gain['max']:.2f}); losses differ by {found['loss']:.1e}")


def measured(folder: Path, rounds: int, precision: str) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("two workers need two cores")
    make(folder, LAYERS, dropout=0.0)
    with busy(cores[1]):
        told, *_ = calibrate.on_workers(2, partial(updates, folder, precision, rounds, cores))
    ratios = [off / auto for off, auto in zip(*(told["seconds"][kind] for kind in KINDS), strict=True)]
    return {
        "speeds": told["speeds"],
        "ideal": sum(told["speeds"]) / len(cores) / min(told["speeds"]),
        "seconds": {kind: statistics.median(of) for kind, of in told["seconds"].items()},
        "gain": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "loss": told["loss"],
    }


@contextlib.contextmanager
def busy(core: int) -> Iterator[None]:
    """Inside, a process works on that core all the time."""
    process = multiprocessing.get_context("spawn").Process(target=_work, args=(core,), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _work(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        pass


def updates(folder: Path, precision: str, rounds: int, cores: Sequence[int], rank: int) -> dict[str, Any]:
    """Seconds of updates by kind, the speeds, and by what share the losses of both kinds differ at most."""
    os.sched_setaffinity(0, {cores[rank]})
    import torch
    import torch.distributed as dist

    from rtrain.config import Distill, Recipe
    from rtrain.data.order import deal
    from rtrain.exchange import ranks
    from rtrain.exchange.replicated import Replicated
    from rtrain.network import model
    from rtrain.tasks import base
    from rtrain.training import balance, losses, optim, step

    torch.set_num_threads(1)
    task = base.get("classification")
    loss = losses.RunLoss(task, Distill(), Head(("a", "b")))
    network = model.build(folder, task, ("a", "b"), 0).train()
    told = balance.relative(ranks.every(balance.seconds(network, loss, drawn(0, MOST_TOKENS // MEAN), 0, precision)))
    exchange = Replicated(network)
    optimizer = optim.of_run(exchange, Recipe(name="a", task="classification"))
    optim.set_rate(optimizer, 0.0)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    differs = 0.0
    for number in range(rounds + 1):
        rows, found = drawn(1 + number, ROWS), list[float]()
        for kind in KINDS:
            speeds = told if kind == "auto" else ()
            passes = [rows.pick(one) for one in deal(rows.lengths, 2, rank, None, MOST_TOKENS, speeds=speeds)]
            dist.barrier()
            start = time.perf_counter()
            done = step.run_update(exchange, optimizer, loss, passes, pad_id=0, precision=precision)
            dist.barrier()
            if number:
                seconds[kind].append(time.perf_counter() - start)
            found.append(done.loss)
        differs = max(differs, abs(found[1] / found[0] - 1))
    return {"seconds": seconds, "speeds": told, "loss": differs}


def drawn(seed: int, count: int) -> Tokens:
    draw = np.random.default_rng(seed)
    lengths = np.clip(np.round(MEAN * np.exp(SPREAD * draw.standard_normal(count))), 4, 128).astype(np.int32)
    ids = draw.integers(5, WORDS, int(lengths.sum())).astype(np.int32)
    return single(ids, lengths, lengths, draw.integers(0, 2, count), np.arange(count, dtype=np.uint64))


if __name__ == "__main__":
    main()
