"""Measure parts of an update alone: the time that rtrain's exchange adds to a pass, gloo's time for the same bytes, and
the best matrix product of a core. `torchrun --nproc-per-node 2 -m benchmarks.probe --model FOLDER --store STORE --out
FILE`.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers import common

if TYPE_CHECKING:
    import torch

REPEATS = 15
SHAPES = ((2048, 2048, 2048), (1024, 384, 1536), (1024, 1536, 384), (4096, 1024, 1024))
"""Sizes of matrix products in bf16; the fastest product is the peak."""


def median_seconds(work: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Median seconds of calls that all processes begin together, after a first one that is not counted."""
    import torch.distributed as dist

    found = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def exchange_seconds(folder: Path, model_folder: Path) -> tuple[float, "torch.nn.Module"]:
    """Seconds that an exchange adds to a pass.

    Passes with an exchange take turns with passes without one, on the same rows.
    """
    from rtrain.config import Distill, Model
    from rtrain.data import ingest, order
    from rtrain.data.stores import store
    from rtrain.exchange.replicated import Replicated
    from rtrain.network import model
    from rtrain.tasks import base
    from rtrain.training import losses, step

    opened, task = store.open_store(folder), base.get("classification")
    network = model.build(model_folder, task, opened.manifest.labels, 0, Model(pooling="own"))
    exchange = Replicated(network)
    loss = losses.for_run(task, Distill(), opened.manifest.head)
    rows_per_update = common.ROWS_PER_PASS * exchange.world
    rows = order.Order(opened.manifest.digest, opened.rows("train"), rows_per_update, 1, 0)
    share = ingest.Share(folder, rows, exchange.world, exchange.rank, None)
    exchange.module.train()

    def one(number: int, last: bool) -> float:
        (tokens,) = ingest.plan_update(opened, share, number).passes
        exchange.begin()
        exchange.barrier()
        start = time.perf_counter()
        with exchange.during(last=last):
            logits = step.forward(exchange.model, tokens, 0, "bf16", loss.wanted(tokens))
            loss(logits, tokens).sum().backward()
        return time.perf_counter() - start

    added: list[float] = []
    for number in range(REPEATS + 1):
        at = number % max(1, rows.updates - 1)
        seconds = one(at, last=True) - one(at, last=False)
        added += [seconds] if number else []  # the first one is not counted
    return statistics.median(added), exchange.module


def weights(network: Any) -> tuple[int, int]:
    """The numbers of linear layers' weights that each token meets, and that only a row's one vector meets."""
    import torch

    linear = {name: part.weight.numel() for name, part in network.named_modules() if isinstance(part, torch.nn.Linear)}
    by_token = sum(size for name, size in linear.items() if ".layer." in name)
    return by_token, sum(linear.values()) - by_token


def gemm_flops() -> float:
    """Operations per second of this process's fastest matrix product, while the other processes compute too."""
    import torch

    found = []
    for rows, inner, columns in SHAPES:
        left, right = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((rows, inner), (inner, columns)))
        seconds = median_seconds(lambda left=left, right=right: left @ right)  # type: ignore[misc]
        found.append(2 * rows * inner * columns / seconds)
    return max(found)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.probe", description=__doc__)
    for name in ("model", "store", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    chosen = parser.parse_args()

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    added, network = exchange_seconds(chosen.store, chosen.model)
    gradients = torch.zeros(sum(part.numel() for part in network.parameters() if part.requires_grad))
    gloo = median_seconds(lambda: dist.all_reduce(gradients))
    per_token, per_row = weights(network)
    document = {
        "exchange_ms": 1e3 * added,
        "exchange_ms_gloo": 1e3 * gloo,
        "gradient_bytes": 4 * gradients.numel(),
        "gemm_flops": gemm_flops(),
        "weights_per_token": per_token,
        "weights_per_row": per_row,
        "processes": dist.get_world_size(),
    }
    if dist.get_rank() == 0:
        chosen.out.write_text(json.dumps(document) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
