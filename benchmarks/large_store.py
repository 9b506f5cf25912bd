"""Measure a store of 10^8 rows as it is opened, put in order and resumed: seconds, and the memory of the process.

    python -m benchmarks.large_store FOLDER [--rows 100000000] [--json]      # 3 GB of disk, 4 GB of memory to make it

The store is made of numbers under FOLDER, and removed at the end. Only its index (28 bytes a row) and the shards that
the resumed update reads are made. The measured work runs in its own process, which has read nothing before.
"""

import argparse
import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rtrain.batch import Ints, Ragged
from rtrain.data.ingest import Share, plan_update
from rtrain.data.order import Order, deal, rows_digest
from rtrain.data.stores import store
from rtrain.data.stores.shards import SHARD_ROWS
from rtrain.data.stores.store import Store
from rtrain.manifest import Entry

ROWS = 100_000_000
UPDATES = 1000
"""Number of updates whose shards are counted."""
LAYOUTS = ((64, 2), (8_000, 1000), (32_000, 1000))
"""Rows of an update, and workers."""
UNWRITTEN: Entry = {"size": 0, "sha256": ""}


def named(positions: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Row ids for positions. They are distinct and in no order, since the factor is odd and products wrap."""
    return positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def make(final: Path, rows: int, shard_rows: int = SHARD_ROWS, made: Ints | None = None) -> Store:
    """Make a store as the token job would leave it, and return it.

    A row has 16 to 48 tokens, of which the first is the row's position, and one of 7 labels. `made` has the numbers of
    the shards that are written (None: all of them).
    """
    writer, random = store.Writer(final), np.random.default_rng(0)
    lengths = random.integers(16, 49, rows, dtype=np.int32)
    files = {}
    for split, count in zip(store.SPLITS, (rows, 0, 0), strict=True):
        places = np.arange(count, dtype=np.uint32)
        table = pa.table(
            {
                "row_id": pa.array(named(places)),
                "shard": pa.array(places // np.uint32(shard_rows)),
                "offset": pa.array(places % np.uint32(shard_rows)),
                "length": pa.array(lengths[:count]),
                "targets": store.lists(Ragged.even((places % np.uint32(7)).astype(np.float32))),
            }
        )
        files[f"index-{split}.arrow"] = store.write_table(writer.folder / f"index-{split}.arrow", table)
    shards = math.ceil(rows / shard_rows)
    chosen = set(range(shards) if made is None else made.tolist())
    for part in range(shards):
        name = f"shards/000000-{part:06d}.arrow"
        files[name] = UNWRITTEN
        if part in chosen:
            first = part * shard_rows
            own = lengths[first : first + shard_rows]
            ids = random.integers(0, 30_000, own.sum(), dtype=np.int32)
            ids[np.cumsum(own) - own] = np.arange(first, first + len(own))
            columns = {"ids": Ragged(ids, own), "windows": Ragged.even(np.stack([own, own], axis=1))}
            table = pa.table({key: store.lists(values) for key, values in columns.items()})
            files[name] = store.write_table(writer.folder / name, table)
    return writer.commit(
        store.Manifest(
            schema_version=store.SCHEMA_VERSION,
            digest=final.name,
            rows={"train": rows, "valid": 0, "test": 0},
            labels=tuple("abcdefg"),
            tokens={"train": int(lengths.sum(dtype=np.int64)), "valid": 0, "test": 0},
            truncated=0,
            quarantined=0,
            files=files,
            sources={},
        )
    )


def order_of(digest: str, rows: int, rows_per_update: int) -> Order:
    return Order(digest, rows, rows_per_update, epochs=3, seed=3)


def resumed(order: Order) -> int:
    """The number of the update in the middle of the run."""
    return order.updates // 2


def megabytes() -> dict[str, int]:
    """Memory of this process: its own, and pages of mapped files, which all processes of a machine share."""
    status = Path("/proc/self/status").read_text()
    kinds = (("own", "RssAnon"), ("mapped", "RssFile"))
    return {name: int(re.search(rf"{key}:\s+(\d+)", status)[1]) // 1000 for name, key in kinds}  # type: ignore[index]


def opened(shards: list[Ints], kept: int) -> int:
    """How often a reader opens a shard for these updates, if it keeps `kept` shards open."""
    known: OrderedDict[int, None] = OrderedDict()
    count = 0
    for needed in shards:
        for shard in needed.tolist():
            count += shard not in known
            known[shard] = None
            known.move_to_end(shard)
            if len(known) > kept:
                known.popitem(last=False)
    return count


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return round(time.perf_counter() - start, 4)


def measure(folder: Path) -> dict[str, Any]:
    """Do with store and order what a worker does that starts in the middle of a run; returns the figures."""
    found: dict[str, Any] = {"mb_before": megabytes()}
    start = time.perf_counter()
    read = Store(folder)
    found["open_s"] = round(time.perf_counter() - start, 4)
    found["check_index_s"] = seconds(lambda: read.column("train", "row_id"))
    rows, digest = read.rows("train"), read.manifest.digest
    first, workers = LAYOUTS[0]
    order = order_of(digest, rows, first)
    share = Share(folder, order, workers, rank=0, micro_batch=None, tokens_per_pass=2048)
    found["resumed_update_s"] = seconds(lambda: plan_update(read, share, resumed(order)))
    found["mb_resumed"] = megabytes()
    for per_update, workers in LAYOUTS:
        order, parts = order_of(digest, rows, per_update), np.zeros(3)
        numbers = range(resumed(order), resumed(order) + 20)
        for number in numbers:
            start = time.perf_counter()
            positions = order.positions(number)
            placed = time.perf_counter()
            rows_digest(number, read.column("train", "row_id")[positions])
            lengths = read.column("train", "length")[positions]
            looked_up = time.perf_counter()
            deal(lengths, workers, 0, None, 2048)
            parts += placed - start, looked_up - placed, time.perf_counter() - looked_up
        names = ("order_ms", "index_ms", "passes_ms")
        figures = (parts / len(numbers) * 1e3).round(3).tolist()
        found[f"{per_update} rows, {workers} workers"] = dict(zip(names, figures, strict=True))
    order = order_of(digest, rows, first)
    places = [order.positions(number) for number in range(UPDATES)]
    found["shards"] = len(read.manifest.shards)
    needed = [np.unique(read.column("train", "shard")[positions]) for positions in places]
    found[f"shards_opened_in_{UPDATES}_updates"] = opened(needed, store.SHARDS_OPEN)
    found["mb_after"] = megabytes()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        sys.stdout.write(json.dumps(measure(given.folder)))
        return
    final = given.folder / f"rows-{given.rows}"
    order = order_of(final.name, given.rows, LAYOUTS[0][0])
    try:
        start = time.perf_counter()
        make(final, given.rows, made=np.unique(order.positions(resumed(order)) // SHARD_ROWS))
        made = round(time.perf_counter() - start, 1)
        command = [sys.executable, "-m", "benchmarks.large_store", str(final), "--measure"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found = {"rows": given.rows, "make_s": made, **json.loads(done.stdout)}
    finally:
        shutil.rmtree(final, ignore_errors=True)
    lines = json.dumps(found) if given.json else "\n".join(f"{name:32} {value}" for name, value in found.items())
    sys.stdout.write(f"{lines}\n")


if __name__ == "__main__":
    main()
