"""What `train.gradient_compression` gains over a slow network: two workers, each in a network namespace of its own,
joined by a link that `tc tbf` holds to a rate. Needs Linux, root and iproute2; changes nothing outside of the two
namespaces.

    sudo .venv/bin/python -m benchmarks.slow_network --mbit 100 --rounds 5

With the folder of a study of aggregation frequencies, the exchange of its gradients alone is measured, over sockets
(the same link without a rate) and over the link; the times over both stay in its study.json and study.html, and the
table is printed.

    sudo .venv/bin/python -m benchmarks.slow_network --mbit 1000 --study runs/aggregation-study
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rtrain import documents
from rtrain.run import Run
from tune.results import study_page, study_table

SPACES = ("rtrain-0", "rtrain-1")
LINKS = ("rtrain-v0", "rtrain-v1")
ADDRESS = "10.213.7.{}"
KINDS = ("none", "bf16")
ROWS, TOKENS, LABELS = 16, 32, 8
BUCKET_BYTES = 25 * 2**20
"""DDP's default."""


@contextlib.contextmanager
def namespaces(mbit: int | None) -> Iterator[None]:
    """Two namespaces and the link between them; without a rate it is as fast as the processor copies."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    for space in SPACES:
        ip("netns", "add", space)
    try:
        ip("link", "add", LINKS[0], "type", "veth", "peer", "name", LINKS[1])
        for rank, (space, link) in enumerate(zip(SPACES, LINKS, strict=True)):
            ip("link", "set", link, "netns", space)
            ip("-n", space, "addr", "add", f"{ADDRESS.format(rank + 1)}/24", "dev", link)
            ip("-n", space, "link", "set", link, "up")
            ip("-n", space, "link", "set", "lo", "up")
            if mbit is not None:
                rate = ("rate", f"{mbit}mbit", "burst", "256kbit", "latency", "400ms")
                subprocess.run(["tc", "-n", space, "qdisc", "add", "dev", link, "root", "tbf", *rate], check=True)
        yield
    finally:
        for space in SPACES:
            ip("netns", "delete", space)


def worker(rank: int, rounds: int, out: Path) -> None:
    """Updates of the packaged encoder, by each kind in turn; rank 0 writes seconds of each."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from rtrain.batch import single
    from rtrain.config import Distill
    from rtrain.exchange.replicated import Replicated
    from rtrain.network import model
    from rtrain.tasks import base
    from rtrain.training import losses, step

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{ADDRESS.format(1)}:29811", rank=rank, world_size=2)
    task, names = base.get("classification"), tuple(map(str, range(LABELS)))
    draw, sides = np.random.default_rng(rank), {}
    ids = draw.integers(1000, 30000, ROWS * TOKENS).astype(np.int32)
    lengths, whole = np.full(ROWS, TOKENS, dtype=np.int32), np.full(ROWS, TOKENS, dtype=np.int32)
    targets = draw.integers(0, LABELS, ROWS).astype(np.float32)
    rows = single(ids, lengths, whole, targets, np.arange(ROWS, dtype=np.uint64) + rank * ROWS)
    for kind in KINDS:
        network: Any = model.build(model.resolve("minilm"), task, names, seed=0).train()
        exchange = Replicated(network, by="stock", compressed=kind)
        sides[kind] = (exchange, torch.optim.SGD(network.parameters(), lr=0.0))
    loss: Any = losses.for_run(task, Distill())
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds + 1):
        for kind, (exchange, optimizer) in sides.items():
            dist.barrier()
            start = time.perf_counter()
            step.run_update(exchange, optimizer, loss, [rows], pad_id=0, precision="fp32")
            if number:  # the first makes the buckets, and compares what is sent with what is exact
                seconds[kind].append(time.perf_counter() - start)
    if rank == 0:
        out.write_text(json.dumps(seconds))
    dist.destroy_process_group()


def exchanges(rank: int, size: int, rounds: int, out: Path) -> None:
    """Exchanges of a gradient of `size` bytes, in buckets as DDP sends them; rank 0 writes seconds of each."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{ADDRESS.format(1)}:29811", rank=rank, world_size=2)
    buckets = torch.zeros(size // 4).split(BUCKET_BYTES // 4)
    seconds = []
    for number in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        for bucket in buckets:
            dist.all_reduce(bucket)
        if number:  # the first opens the connections
            seconds.append(time.perf_counter() - start)
    if rank == 0:
        out.write_text(json.dumps(seconds))
    dist.destroy_process_group()


def both(mbit: int | None, arguments: Sequence[str]) -> Any:
    """What rank 0 has written of two workers at the ends of a link."""
    with tempfile.TemporaryDirectory() as folder, namespaces(mbit):
        out = Path(folder) / "seconds.json"
        started = []
        for rank, (space, link) in enumerate(zip(SPACES, LINKS, strict=True)):
            own = [sys.executable, "-m", "benchmarks.slow_network", "--rank", str(rank), *arguments]
            started.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", space, *own, "--out", str(out)],
                    env={**os.environ, "GLOO_SOCKET_IFNAME": link},
                )
            )
        codes = [process.wait() for process in started]
        if any(codes):
            raise SystemExit(f"a worker failed: {codes}")
        return json.loads(out.read_text())


def of_study(study: Run, mbit: int, rounds: int) -> dict[str, Any]:
    """The table of a study with the times over sockets and over the link, which its files keep; seconds of an exchange
    beside it."""
    document = documents.read(study.study_table)
    if {one["workers"] for one in document["results"] if one["error"] is None} != {2}:
        raise SystemExit(f"{study}: the link joins two workers, and the study had another number of them")
    size = max(one["exchange_bytes"] for one in document["results"])
    given = ["--bytes", str(size), "--rounds", str(rounds)]
    measured = {
        name: statistics.median(both(rate, given)) for name, rate in (("sockets", None), (f"{mbit} Mbit/s", mbit))
    }
    found = study_table.of_document(document, measured)
    study_table.keep(study, found.document)
    study_page.write(study)
    return {"bytes": size, "exchange_s": measured, "table": found.text, "document": found.document}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=100, help="rate of the link in each direction")
    parser.add_argument("--rounds", type=int, default=5, help="updates of each kind, in turn; exchanges of a study")
    parser.add_argument("--study", type=Path, help="folder of a study of aggregation frequencies")
    parser.add_argument("--json", action="store_true", help="print a study's table as JSON")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None and given.bytes is not None:
        exchanges(given.rank, given.bytes, given.rounds, given.out)
        return
    if given.rank is not None:
        worker(given.rank, given.rounds, given.out)
        return
    if given.study is not None:
        found = of_study(Run(given.study), given.mbit, given.rounds)
        print(json.dumps(found) if given.json else found["table"])
        return
    seconds = both(given.mbit, ["--rounds", str(given.rounds)])
    ratios = [plain / sent for plain, sent in zip(*(seconds[kind] for kind in KINDS), strict=True)]
    medians = {kind: round(statistics.median(seconds[kind]), 3) for kind in KINDS}
    gain = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
    print(json.dumps({"mbit": given.mbit, "seconds": medians, "gain": gain}))


if __name__ == "__main__":
    main()
