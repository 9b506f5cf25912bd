"""What `train.gradient_compression` gains over a slow network: two workers, each in a network namespace of its own,
joined by a link that `tc tbf` holds to a rate. Needs Linux, root and iproute2; changes nothing outside of the two
namespaces.

    sudo .venv/bin/python -m benchmarks.slow_network --mbit 100 --rounds 5

With the folder of a study of aggregation frequencies, the exchange of its gradients alone is measured, over sockets
(the same link without a rate) and over the link; the times over both stay in its study.json and study.html, and the
table is printed.

    sudo .venv/bin/python -m benchmarks.slow_network --mbit 1000 --study runs/aggregation-study

With --foretell, two exchanges and an update are foretold for a link of 1 Gbit/s before they are measured: alpha by
exchanges over the same link without a rate, the bandwidth of the preset, a worker's own seconds by updates that
exchange nothing.

    sudo .venv/bin/python -m benchmarks.slow_network --foretell
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
from rtrain.doctor.forecast import calibrate, links, scaling
from rtrain.doctor.forecast.calibrate import Exchanged
from rtrain.doctor.forecast.scaling import Compute, Work
from rtrain.run import Run
from tune.results import study_table

SPACES = ("rtrain-0", "rtrain-1")
LINKS = ("rtrain-v0", "rtrain-v1")
ADDRESS = "10.213.7.{}"
KINDS = ("none", "bf16")
ROWS, TOKENS, LABELS = 16, 32, 8
ALONE = "alone"
"""Updates without an exchange, on both workers at a time."""
PRESET, MBIT = "1gbit", 1000
FORETOLD = (25_000_000, 90_000_000)
"""Bytes of the exchanges that are foretold."""
MESSAGES = 8
"""Sums of an update's exchange: three buckets, the touched rows of the word embedding with who has which, and counts
before and after."""


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


def worker(rank: int, rounds: int, kinds: Sequence[str], out: Path) -> None:
    """Updates of the packaged encoder, by each kind in turn; rank 0 writes seconds of each, and `bytes` of an
    exchange."""
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
    task, names = base.get("classification"), tuple(map(str, range(LABELS)))
    draw, sides = np.random.default_rng(rank), dict[str, tuple[Replicated, torch.optim.Optimizer]]()
    ids = draw.integers(1000, 30000, ROWS * TOKENS).astype(np.int32)
    lengths, whole = np.full(ROWS, TOKENS, dtype=np.int32), np.full(ROWS, TOKENS, dtype=np.int32)
    targets = draw.integers(0, LABELS, ROWS).astype(np.float32)
    rows = single(ids, lengths, whole, targets, np.arange(ROWS, dtype=np.uint64) + rank * ROWS)

    def make(kind: str, compressed: str = "none") -> None:
        network: Any = model.build(model.resolve("minilm"), task, names, seed=0).train()
        sides[kind] = (
            Replicated(network, by="stock", compressed=compressed),
            torch.optim.SGD(network.parameters(), lr=0.0),
        )

    if ALONE in kinds:  # before there is anybody else
        make(ALONE)
    dist.init_process_group("gloo", init_method=f"tcp://{ADDRESS.format(1)}:29811", rank=rank, world_size=2)
    for kind in kinds:
        if kind != ALONE:
            make(kind, kind)
    loss: Any = losses.for_run(task, Distill())
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds + 1):
        for kind, (exchange, optimizer) in sides.items():
            dist.barrier()
            start = time.perf_counter()
            step.run_update(exchange, optimizer, loss, [rows], pad_id=0, precision="fp32")
            if number:  # the first makes the buckets, and compares what is sent with what is exact
                seconds[kind].append(time.perf_counter() - start)
    sizes = [int(cost["bytes"]) for exchange, _ in sides.values() if (cost := exchange.cost())]
    if rank == 0:
        out.write_text(json.dumps({**seconds, "bytes": max(sizes)}))
    dist.destroy_process_group()


def exchanges(rank: int, sizes: Sequence[int], rounds: int, out: Path) -> None:
    """Exchanges of gradients of so many bytes, in buckets as DDP sends them; rank 0 writes seconds of each by size."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{ADDRESS.format(1)}:29811", rank=rank, world_size=2)
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for number in range(rounds + 1):
        for size, of in seconds.items():
            buckets = torch.zeros(size // 4).split(scaling.BUCKET // 4)
            dist.barrier()
            start = time.perf_counter()
            for bucket in buckets:
                dist.all_reduce(bucket)
            if number:  # the first opens the connections
                of.append(time.perf_counter() - start)
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
        name: statistics.median(both(rate, given)[str(size)])
        for name, rate in (("sockets", None), (f"{mbit} Mbit/s", mbit))
    }
    found = study_table.of_document(document, measured)
    study_table.keep(study, found.document)
    study_table.write(study)
    return {"bytes": size, "exchange_s": measured, "table": found.text, "document": found.document}


def foretell(rounds: int) -> list[dict[str, Any]]:
    """What is foretold for the preset's link, and then measured over it; medians."""
    small = ["--bytes", *map(str, calibrate.SIZES), "--rounds", str(calibrate.ROUNDS)]
    found = [Exchanged(int(size), min(of)) for size, of in both(None, small).items()]
    alpha = calibrate.fitted(found, 2).ring_s
    link = links.Link(PRESET, 0.0, alpha, alpha, links.PRESETS[PRESET].bytes_per_s)
    updates = both(None, ["--rounds", str(rounds), "--kinds", ALONE, "none"])
    own = Compute(0.0, statistics.median(updates[ALONE]))
    work = Work(0.0, updates["bytes"], 0.0, MESSAGES)
    expected = {f"a sum of {size:,} bytes": links.ring(size, 2, link) for size in FORETOLD}
    # The link is so slow that the processor has time for passes while it sends.
    expected["an update of MiniLM"] = scaling.update(own, work, links.uniform(link), 2, hides=True).seconds
    for what, seconds in expected.items():
        print(f"foretold: {what} in {1e3 * seconds:.0f} ms", file=sys.stderr, flush=True)
    sums = both(MBIT, ["--bytes", *map(str, FORETOLD), "--rounds", str(rounds)])
    taken = [statistics.median(sums[str(size)]) for size in FORETOLD]
    taken.append(statistics.median(both(MBIT, ["--rounds", str(rounds), "--kinds", "none"])["none"]))
    return [
        {"what": what, "foretold_s": told, "measured_s": seconds, "ratio": told / seconds}
        for (what, told), seconds in zip(expected.items(), taken, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=100, help="rate of the link in each direction")
    parser.add_argument("--rounds", type=int, default=5, help="updates of each kind, in turn; exchanges of a study")
    parser.add_argument("--study", type=Path, help="folder of a study of aggregation frequencies")
    parser.add_argument(
        "--foretell", action="store_true", help="foretell what a link of 1 Gbit/s takes, and measure it"
    )
    parser.add_argument("--json", action="store_true", help="print a study's table, or what was foretold, as JSON")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--kinds", nargs="+", default=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None and given.bytes is not None:
        exchanges(given.rank, given.bytes, given.rounds, given.out)
        return
    if given.rank is not None:
        worker(given.rank, given.rounds, given.kinds, given.out)
        return
    if given.foretell:
        rows = foretell(given.rounds)
        lines = [
            f"{one['what']}: foretold {1e3 * one['foretold_s']:.0f} ms, measured {1e3 * one['measured_s']:.0f}, "
            f"ratio {one['ratio']:.3f}"
            for one in rows
        ]
        print(json.dumps(rows) if given.json else "\n".join(lines))
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
