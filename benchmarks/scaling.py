"""The scaling model beside the clock of this machine: `python -m benchmarks.scaling [--rounds N] [--json]`.

Alpha and the bandwidth are fitted to exchanges of six sizes between two processes; a worker's step and pass to updates
of k = 1 and k = 8 passes of 8 rows of 64 tokens of a network of MiniLM's size. Held out, and foretold: k = 2 and 4,
rows of another length, a network twice as deep, two workers at every k, and exchanges of four workers. Networks have
random weights.

One worker's updates are timed by its processor's clock, two workers' and exchanges by the wall's; each figure is the
least of its rounds. On a machine that does other work besides, the second kind means little.
"""

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rtrain import env
from rtrain.doctor.forecast import calibrate, facts, links, scaling
from rtrain.doctor.forecast.scaling import Compute, Work

ROWS = 8
FITTED = (1, 8)
"""Passes of the updates that a worker's step and pass are fitted to."""
WORDS = 30_522


class Job(NamedTuple):
    """An update: of a network of so many layers, of passes of `ROWS` rows of so many tokens."""

    layers: int
    tokens: int
    passes: int


BASE = [Job(6, 64, passes) for passes in (1, 2, 4, 8)]
OTHERS = [Job(6, 32, 4), Job(6, 128, 4), Job(12, 64, 4)]


def main() -> None:
    env.prepare()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder), given.rounds, given.precision)
    if given.json:
        print(json.dumps(found))
        return
    print("\n".join(f"{name}: {value}" for name, value in found["fitted"].items()))
    for row in found["rows"]:
        ratio = row["foretold_ms"] / row["measured_ms"] - 1
        times = f"foretold {row['foretold_ms']:8.2f} ms  measured {row['measured_ms']:8.2f}  {ratio:+.1%}"
        print(f"{'fitted  ' if row['fitted'] else 'held out'}  {row['what']:44} {times}")


def measured(folder: Path, rounds: int, precision: str) -> dict[str, Any]:
    """Foretold and measured milliseconds, a row for each figure."""
    for layers in {job.layers for job in BASE + OTHERS}:
        make(folder / str(layers), layers)
    exchanged = calibrate.exchanges(2)
    link = calibrate.fitted(exchanged, 2)
    run = partial(updates, folder, precision, rounds)
    [alone] = calibrate.on_workers(1, partial(run, BASE + OTHERS, True))
    both = calibrate.on_workers(2, partial(run, BASE, False))
    works = {job: work(folder, job) for job in BASE + OTHERS}
    seconds = dict(zip(BASE + OTHERS, map(min, alone), strict=True))
    first, last = (next(job for job in BASE if job.passes == passes) for passes in FITTED)
    spread = calibrate.spread(alone[BASE.index(last)])
    compute = scaling.between((first.passes, seconds[first]), (last.passes, seconds[last]), spread)
    found = [
        row(f"2 workers sum {one.size:,} bytes", True, links.ring(one.size, 2, link), one.seconds) for one in exchanged
    ]
    found += [
        row(f"4 workers sum {one.size:,} bytes", False, links.ring(one.size, 4, link), one.seconds)
        for one in calibrate.exchanges(4)
    ]
    for job, taken in seconds.items():
        new = scaling.carried(compute, works[first], works[job])
        name = f"1 worker, {job.layers} layers, {job.tokens} tokens, k = {job.passes}"
        found.append(row(name, job in (first, last), new.seconds(job.passes), taken))
    for place, job in enumerate(BASE):
        foretold = together(compute, works[job], link, job)
        taken = max(min(worker[place]) for worker in both)
        found.append(row(f"2 workers, 6 layers, 64 tokens, k = {job.passes}", False, foretold.seconds, taken))
    fitted = {"link": link, "compute": compute}
    return {"fitted": {name: str(value) for name, value in fitted.items()}, "rows": found}


def row(what: str, fitted: bool, foretold: float, taken: float) -> dict[str, Any]:
    return {"what": what, "fitted": fitted, "foretold_ms": 1e3 * foretold, "measured_ms": 1e3 * taken}


def together(compute: Compute, of: Work, link: links.Link, job: Job) -> scaling.Update:
    """Two workers, whose exchange takes the processors that also compute."""
    return scaling.update(compute, of, links.uniform(link), 2, job.passes, hides=False)


def work(folder: Path, job: Job) -> Work:
    shape = facts.of_model(folder / str(job.layers))
    table = 4 * shape.vocabulary * shape.hidden
    return Work(shape.flops(np.full(ROWS, job.tokens)), shape.weights - table, shape.weights)


def make(folder: Path, layers: int) -> None:
    """An encoder of MiniLM's width."""
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_attention_heads": 12,
        "vocab_size": WORDS,
    }
    network = transformers.BertModel(transformers.BertConfig(num_hidden_layers=layers, **sizes))
    network.save_pretrained(folder)


def updates(
    folder: Path, precision: str, rounds: int, jobs: list[Job], processor: bool, rank: int
) -> list[list[float]]:
    """Seconds of each job's updates, by the processor's clock or the wall's; the first of each is left out."""
    import torch
    import torch.distributed as dist

    from rtrain.batch import Head, single
    from rtrain.config import Distill, Recipe
    from rtrain.exchange.replicated import Replicated
    from rtrain.network import model
    from rtrain.tasks import base
    from rtrain.training import losses, optim, step

    torch.set_num_threads(1)
    task, clock = base.get("classification"), time.process_time if processor else time.perf_counter
    loss = losses.RunLoss(task, Distill(), Head(("a", "b")))
    made: dict[int, tuple[Replicated, torch.optim.Optimizer]] = {}
    for layers in {job.layers for job in jobs}:
        network = model.build(folder / str(layers), task, ("a", "b"), 0).train()
        exchange = Replicated(network, by="stock")
        made[layers] = exchange, optim.of_run(exchange, Recipe(name="a", task="classification"))
    found: list[list[float]] = [[] for _ in jobs]
    for turn in range(rounds + 1):
        for place, job in enumerate(jobs):
            drawn = np.random.default_rng([turn, place, rank])
            lengths = np.full(ROWS, job.tokens, dtype=np.int32)
            passes = [
                single(
                    drawn.integers(5, WORDS, ROWS * job.tokens).astype(np.int32),
                    *(lengths, lengths, drawn.integers(0, 2, ROWS)),
                    np.arange(ROWS, dtype=np.uint64),
                )
                for _ in range(job.passes)
            ]
            if dist.get_world_size() > 1:
                dist.barrier()
            start = clock()
            step.run_update(*made[job.layers], loss, passes, pad_id=0, precision=precision, clip_norm=1.0)
            if turn:
                found[place].append(clock() - start)
    return found


if __name__ == "__main__":
    main()
