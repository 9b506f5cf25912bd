"""The scaling model beside the clocks of this machine: `python -m benchmarks.scaling [--rounds N] [--json]`.

Fitted: alpha and the bandwidth to exchanges of six sizes between two processes; a worker's step and pass to updates of
k = 1 and k = 8 passes of 8 rows of 64 tokens of a network of MiniLM's size, of one worker that is alone and of as many
as there are cores. Held out, and foretold: k = 2 and 4, rows of another length, a network twice as deep, twice as many
workers as cores at every k, and exchanges of so many. Networks have random weights.

Several workers' updates are timed by two clocks. By the processor's clock an update is a worker's own work; by the
wall's the machine's cores are counted too, and on a machine that does other work besides that figure means little. Each
is the least of its rounds.
"""

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rtrain import env
from rtrain.doctor.forecast import calibrate, facts, links, scaling
from rtrain.doctor.forecast.scaling import Compute, Host, Work

ROWS = 8
FITTED = (1, 8)
"""Passes of the updates that a worker's step and pass are fitted to."""
WORDS = 30_522
MESSAGES = 8
"""Sums of an update's exchange: three buckets, the touched rows of the word embedding with who has which, and counts
before and after."""


class Job(NamedTuple):
    """An update: of a network of so many layers, of passes of `ROWS` rows of so many tokens."""

    layers: int
    tokens: int
    passes: int


class Taken(NamedTuple):
    """Seconds of an update."""

    seconds: float
    processor_s: float
    """Those of this worker's processor, over all of its threads."""


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
    cores, run = max(2, env.cores()), partial(updates, folder, precision, rounds)
    exchanged, crowd = calibrate.exchanges(cores), calibrate.exchanges(2 * cores)
    link = calibrate.fitted(exchanged, cores)
    busy = calibrate.fitted(calibrate.by_processor(exchanged), cores, "a worker's processor")
    [alone] = calibrate.on_workers(1, partial(run, BASE + OTHERS))
    together = {workers: calibrate.on_workers(workers, partial(run, BASE)) for workers in (cores, 2 * cores)}
    own = [[one.processor_s for one in of] for of in alone]
    seconds = dict(zip(BASE + OTHERS, map(min, own), strict=True))
    first, last = (next(job for job in BASE if job.passes == passes) for passes in FITTED)
    compute = scaling.between((first.passes, seconds[first]), (last.passes, seconds[last]))

    def sent(job: Job) -> float:
        """Seconds of a worker's processor of an exchange."""
        nothing = Compute(0.0, 0.0)
        fabric, of = links.uniform(busy), work_of(folder, job, cores)
        return scaling.update(nothing, of, fabric, cores, job.passes, hides=False).exchange_s

    few, many = (
        (job.passes, least(together[cores], BASE.index(job), "processor_s") - sent(job)) for job in (first, last)
    )
    host = Host(cores, scaling.between(few, many))
    spread = calibrate.spread(own[BASE.index(last)])
    found = [
        row(f"{workers} workers sum {one.size:,} bytes", workers == cores, ring, one.seconds)
        for workers, each in ((cores, exchanged), (2 * cores, crowd))
        for one in each
        for ring in [host.shared(workers) * links.ring(one.size, workers, link)]
    ]
    for job, taken in seconds.items():
        new = scaling.carried(compute, work_of(folder, first, 1), work_of(folder, job, 1))
        name = f"1 worker, {job.layers} layers, {job.tokens} tokens, k = {job.passes}"
        found.append(row(name, job in (first, last), new.seconds(job.passes), taken))
    for workers, place in itertools.product(together, range(len(BASE))):
        job, fabric = BASE[place], {"processor_s": links.uniform(busy), "seconds": links.uniform(link)}
        work, name = work_of(folder, job, workers), f"{workers} workers, k = {job.passes}, by the"
        foretell = partial(scaling.update, work=work, workers=workers, passes=job.passes, hides=False)
        # By the processor's clock no one waits, neither for a core nor for another worker.
        mine = foretell(compute, fabric=fabric["processor_s"], host=replace(host, cores=workers))
        whole = foretell(replace(compute, spread=spread), fabric=fabric["seconds"], host=host)
        spent, taken = (least(together[workers], place, clock) for clock in fabric)
        found.append(row(f"{name} processor", workers == cores and job in (first, last), mine.seconds, spent))
        found.append(row(f"{name} wall", False, whole.seconds, taken))
    fitted = {"link": link, "processor": busy, "alone": compute, "host": host, "spread": spread}
    return {"fitted": {name: str(value) for name, value in fitted.items()}, "rows": found}


def row(what: str, fitted: bool, foretold: float, taken: float) -> dict[str, Any]:
    return {"what": what, "fitted": fitted, "foretold_ms": 1e3 * foretold, "measured_ms": 1e3 * taken}


def least(workers: Sequence[Sequence[Sequence[Taken]]], place: int, clock: str) -> float:
    """The least of a job's rounds, for the worker that took the most."""
    found: list[float] = [min(getattr(one, clock) for one in worker[place]) for worker in workers]
    return max(found)


def work_of(folder: Path, job: Job, workers: int) -> Work:
    shape = facts.of_model(folder / str(job.layers))
    table = 4 * shape.vocabulary * shape.hidden
    # Words are drawn at random: hardly any of an update stands in it twice.
    words = min(WORDS, workers * job.passes * ROWS * job.tokens)
    gradient = shape.weights - table + 4 * shape.hidden * words
    return Work(shape.flops(np.full(ROWS, job.tokens)), gradient, shape.weights, MESSAGES)


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


def updates(folder: Path, precision: str, rounds: int, jobs: list[Job], rank: int) -> list[list[Taken]]:
    """Seconds of each job's updates; the first of each is left out."""
    import torch
    import torch.distributed as dist

    from rtrain.batch import Head, single
    from rtrain.config import Distill, Recipe
    from rtrain.exchange.replicated import Replicated
    from rtrain.network import model
    from rtrain.tasks import base
    from rtrain.training import losses, optim, step

    torch.set_num_threads(1)
    task = base.get("classification")
    loss = losses.RunLoss(task, Distill(), Head(("a", "b")))
    made: dict[int, tuple[Replicated, torch.optim.Optimizer]] = {}
    for layers in {job.layers for job in jobs}:
        network = model.build(folder / str(layers), task, ("a", "b"), 0).train()
        exchange = Replicated(network, by="stock")
        made[layers] = exchange, optim.of_run(exchange, Recipe(name="a", task="classification"))
    found: list[list[Taken]] = [[] for _ in jobs]
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
            start, begun = time.perf_counter(), time.process_time()
            step.run_update(*made[job.layers], loss, passes, pad_id=0, precision=precision, clip_norm=1.0)
            if turn:
                found[place].append(Taken(time.perf_counter() - start, time.process_time() - begun))
    return found


if __name__ == "__main__":
    main()
