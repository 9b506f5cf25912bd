"""The scaling model beside the clocks of this machine: `python -m benchmarks.scaling [--rounds N] [--json]`.

Fitted: alpha and the bandwidth to exchanges of six sizes between two processes, by sockets and through shared memory; a
worker's step and pass to updates of k = 1 and k = 8 passes of 8 rows of 64 tokens of a network of MiniLM's size, of one
worker that is alone and of as many as there are cores; what a pass takes whatever its tokens to rows of 32; and what
workers lose that evict each other's caches to one update of twice as many as there are cores.
Held out, and foretold: k = 2 and 4, rows of 128 tokens, a network twice as deep, gradients through shared memory at
every k, twice as many workers as cores at every other k, and exchanges of so many. Networks have random weights.

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
from rtrain.doctor.forecast.links import Link
from rtrain.doctor.forecast.scaling import Compute, Host, Work
from rtrain.training import stages

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
SHORT = Job(6, 32, 4)
OTHERS = [SHORT, Job(6, 128, 4), Job(12, 64, 4)]
CROWD = Job(6, 64, 2)
"""The update that tells what workers lose who share a core."""


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
    shared = calibrate.fitted(calibrate.exchanges(cores, transport="shared_memory"), cores, "shared memory")
    link = calibrate.fitted(exchanged, cores)
    busy = calibrate.fitted(calibrate.by_processor(exchanged), cores, "a worker's processor")
    [alone] = calibrate.on_workers(1, partial(run, BASE + OTHERS))
    together = {workers: calibrate.on_workers(workers, partial(run, BASE)) for workers in (cores, 2 * cores)}
    close = calibrate.on_workers(cores, partial(run, BASE, by="shared_memory"))
    own = [[one.processor_s for one in of] for of in alone]
    seconds = dict(zip(BASE + OTHERS, map(min, own), strict=True))
    first, last = (next(job for job in BASE if job.passes == passes) for passes in FITTED)
    compute = scaling.between((first.passes, seconds[first]), (last.passes, seconds[last]))
    was, other = (work_of(folder, job, 1) for job in (first, SHORT))
    compute = scaling.by_length(compute, was, other, SHORT.passes, seconds[SHORT])

    def sent(job: Job) -> float:
        """Seconds of a worker's processor of an exchange."""
        nothing = Compute(0.0, 0.0)
        fabric, of = links.uniform(busy), work_of(folder, job, cores)
        return scaling.update(nothing, of, fabric, cores, job.passes, hides=False).exchange_s

    few, many = (
        (job.passes, least(together[cores], BASE.index(job), "processor_s") - sent(job)) for job in (first, last)
    )
    spread = stages.spread(own[BASE.index(last)])

    def by_wall(job: Job, workers: int, by: Link, of: Host) -> float:
        told = partial(scaling.update, replace(compute, spread=spread), work_of(folder, job, workers))
        return told(links.uniform(by), workers, job.passes, hides=False, host=of).seconds

    host = Host(cores, scaling.between(few, many))
    crowded = least(together[2 * cores], BASE.index(CROWD), "seconds")
    host = host.evicting(2 * cores, by_wall(CROWD, 2 * cores, link, host), crowded)
    found = [
        row(f"{workers} workers sum {one.size:,} bytes", workers == cores, ring, one.seconds)
        for workers, each in ((cores, exchanged), (2 * cores, crowd))
        for one in each
        for ring in [host.shared(workers) * links.ring(one.size, workers, link)]
    ]
    for job, taken in seconds.items():
        new = scaling.carried(compute, was, work_of(folder, job, 1))
        name = f"1 worker, {job.layers} layers, {job.tokens} tokens, k = {job.passes}"
        found.append(row(name, job in (first, last, SHORT), new.seconds(job.passes), taken))
    for workers, job in itertools.product(together, BASE):
        name, place = f"{workers} workers, k = {job.passes}, by the", BASE.index(job)
        # By the processor's clock no one waits, neither for a core nor for another worker.
        mine = scaling.update(
            *(compute, work_of(folder, job, workers), links.uniform(busy), workers, job.passes),
            hides=False,
            host=replace(host, cores=workers),
        )
        spent, taken = (least(together[workers], place, clock) for clock in ("processor_s", "seconds"))
        found.append(row(f"{name} processor", workers == cores and job in (first, last), mine.seconds, spent))
        fitted = workers > cores and job == CROWD
        found.append(row(f"{name} wall", fitted, by_wall(job, workers, link, host), taken))
    for place, job in enumerate(BASE):
        name = f"{cores} workers, k = {job.passes}, through shared memory"
        found.append(row(name, False, by_wall(job, cores, shared, host), least(close, place, "seconds")))
    told = {"link": link, "shared memory": shared, "processor": busy, "alone": compute, "host": host, "spread": spread}
    return {"fitted": {name: str(value) for name, value in told.items()}, "rows": found}


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
    return Work(shape.flops(np.full(ROWS, job.tokens)), gradient, shape.weights, MESSAGES, job.layers)


def make(folder: Path, layers: int, dropout: float = 0.1) -> None:
    """An encoder of MiniLM's width."""
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_attention_heads": 12,
        "vocab_size": WORDS,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }
    network = transformers.BertModel(transformers.BertConfig(num_hidden_layers=layers, **sizes))
    network.save_pretrained(folder)


def updates(
    folder: Path, precision: str, rounds: int, jobs: list[Job], rank: int, by: str = "stock"
) -> list[list[Taken]]:
    """Seconds of each job's updates, whose gradients go `by` a transport; the first of each is left out."""
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
        exchange = Replicated(network, by=by)
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
