"""Many nodes of one CPU on this machine, and a run of many workers upon them, which loses some: seconds, and memory.

    python -m benchmarks.many_nodes FOLDER [--nodes 64] [--workers 16] [--json]    # minutes; some 16 GB of memory

The nodes are real raylets that Ray's autoscaler starts and ends, as in `rtrain cluster rehearse`, each as small as it
can be. The run trains a tiny encoder on rows of numbers. After some updates every second node with a worker is drained,
as by a spot notice. Where the memory of the machine gets short, no more nodes are waited for, and the figures say how
many there were.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.results import machine
from rtrain import env, ray_internals
from rtrain.cluster.jobs import naming, upload
from rtrain.cluster.rehearsal import faults, plan as plans
from rtrain.cluster.rehearsal.machines.up import Up, up
from rtrain.cluster.session import package_root
from rtrain.network import model
from rtrain.run import Run

NODES, WORKERS, ROWS = 64, 16, 2000
UPDATES, DRAINED_AFTER = 400, 20
"""Updates of the run, and after how many nodes are drained: to drain eight takes the time of a few on two cores."""
SPARE_BYTES = 2 << 30
"""Memory that stays free: with less, the machine would end processes of its own choice."""
QUIET_S = 120.0
"""Seconds without another node, after which no more are waited for."""
WITHIN_S = 900.0
DRAINED_S = 120.0


def cluster(nodes: int) -> plans.Plan:
    """That of cluster.yaml, with so many nodes of one CPU, all of them up without work."""
    document = yaml.safe_load((package_root() / "cluster.yaml").read_text(encoding="utf-8"))
    worker = {"resources": {"CPU": 1}, "min_workers": nodes, "max_workers": nodes}
    document["available_node_types"]["worker"] |= worker
    return replace(plans.of(yaml.safe_dump({**document, "max_workers": nodes})), watcher=None)


def make(folder: Path) -> None:
    """An encoder of two narrow layers with the packaged one's pieces, and rows of two classes."""
    import transformers

    from rtrain.hub import PACKAGED

    source = model.resolve(PACKAGED)
    known = json.loads((source / "config.json").read_text())
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
    }
    network = transformers.BertModel(transformers.BertConfig(vocab_size=known["vocab_size"], **sizes))
    network.save_pretrained(folder / "encoder")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (source / name).is_file():
            (folder / "encoder" / name).write_bytes((source / name).read_bytes())
    draw = random.Random(0)
    lines = [f"{'up' if row % 2 else 'down'} {draw.randrange(10**6)},{row % 2}" for row in range(ROWS)]
    (folder / "rows.csv").write_text("\n".join(["text,label", *lines, ""]), encoding="utf-8")


def joined(made: Up, nodes: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Seconds until a half and all of the nodes had joined, or as many as the memory allowed."""
    begin, seen, moved, broke = time.time(), 0, time.monotonic(), None
    before = psutil.virtual_memory().available
    while seen < nodes:
        found = dict[str, float]()
        with suppress(Exception):  # a head with much to do is late
            found = ray_internals.joined(made.address, seconds=10.0)
        if len(found) - 1 > seen:
            seen, moved = len(found) - 1, time.monotonic()
            say(f"{seen} nodes, {psutil.virtual_memory().available / 2**30:.1f} GB free")
        if psutil.virtual_memory().available < SPARE_BYTES:
            broke = f"memory: {seen} nodes left less than {SPARE_BYTES >> 30} GB free"
        elif time.monotonic() - moved > QUIET_S:
            broke = f"no node has joined for {QUIET_S:.0f} s"
        if broke:
            break
        time.sleep(1)
    found = ray_internals.joined(made.address, seconds=60.0)
    times = sorted(at - begin for name, at in found.items() if name != made.head)
    used = before - psutil.virtual_memory().available
    return {
        "nodes": len(times),
        "broke": broke,
        "half_s": round(times[len(times) // 2 - 1], 1) if len(times) > 1 else None,
        "all_s": round(times[-1], 1) if times else None,
        "megabytes_of_a_node": round(used / max(1, len(times)) / 1e6, 1),
    }


def trained(made: Up, folder: Path, workers: int, say: Callable[[str], None]) -> dict[str, Any]:
    """A run that loses every second node with a worker."""
    run = Run(folder / "runs" / "many")
    settings = [f"train.epochs={UPDATES}", f"train.rows_per_update={ROWS}", "train.precision=fp32", "train.log_every=1"]
    settings += ["train.save_every=10", "train.evaluate_every=100000", "cluster.data_cpus=4"]
    words = ["train", "intent", "--data", str(folder / "rows.csv"), "--model", str(folder / "encoder")]
    words += ["--workers", str(workers), "--out", str(run.folder)]
    words += [word for setting in settings for word in ("--set", setting)]
    begin = time.time()
    job = made.jobs.submit(words, upload.of(package_root(), 20_000_000), say)
    until(made, job, "an update", lambda: progress(run))
    first = progress(run)[0]["time"] - begin
    until(made, job, f"update {DRAINED_AFTER}", lambda: progress(run)[-1]["update"] >= DRAINED_AFTER)
    on, at = sorted(faults.machines_with(made, faults.WORKER)), time.time()
    for name in on[::2]:
        ray_internals.drain(made.address, name, "benchmark", at + DRAINED_S, 10.0)
    say(f"{len(on[::2])} of {len(on)} nodes with workers are drained")
    until(made, job, "a start", lambda: [one for one in run.events("started") if one["time"] > at])
    again = run.events("started")[-1]
    went = until(made, job, "another update", lambda: progress(run, again["time"]))[0]["time"]
    reached = max(one["update"] for one in progress(run) if one["time"] < again["time"])
    until(made, job, "its end", lambda: made.jobs.all()[job].status in naming.ENDED)
    took = [one["time"] for one in progress(run) if one["time"] < at]
    return {
        "status": made.jobs.all()[job].status,
        "workers": [one["workers"] for one in run.events("started")],
        "nodes_with_workers": len(on),
        "first_update_s": round(first, 1),
        "update_s": round((took[-1] - took[0]) / max(1, len(took) - 1), 3),
        "drained": len(on[::2]),
        "next_update_after_drain_s": round(went - at, 1),
        "updates_lost": reached - again["update"],
        "seconds": round(time.time() - begin, 1),
    }


def progress(run: Run, after: float = 0.0) -> list[dict[str, Any]]:
    return [one for one in run.events("progress") if one["time"] > after] if run.log.is_file() else []


def until(made: Up, job: str, what: str, met: Callable[[], Any]) -> Any:
    """What is met, once it is."""
    give_up = time.monotonic() + WITHIN_S
    while not (found := met()):
        status = made.jobs.all()[job].status
        if (time.monotonic() > give_up or status in naming.ENDED) and not met():
            last = "\n".join(made.jobs.logs(job).splitlines()[-12:])
            raise SystemExit(f"waited in vain for {what} (the job: {status}):\n{last}")
        time.sleep(0.5)
    return found


def measure(folder: Path, nodes: int, workers: int, say: Callable[[str], None]) -> dict[str, Any]:
    folder.mkdir(parents=True)
    make(folder)
    found: dict[str, Any] = {"about": machine() | {"wanted": nodes}}
    begin = time.time()
    with up(cluster(nodes), folder / "machines", say, lean=True) as made:
        found["head_s"] = round(time.time() - begin, 1)
        found["joined"] = joined(made, nodes, say)
        say(json.dumps(found))
        found["run"] = trained(made, folder, workers, say)
        found["free_gb_at_the_end"] = round(psutil.virtual_memory().available / 1e9, 1)
        begin = time.time()
    return found | {"down_s": round(time.time() - begin, 1), "left": made.left}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="new folder for the run and the machines' logs")
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    env.prepare()

    def say(text: str) -> None:
        sys.stderr.write(f"{time.strftime('%X')} {text}\n")

    found = measure(given.folder.absolute(), given.nodes, given.workers, say)
    print(json.dumps(found, indent=None if given.json else 1))


if __name__ == "__main__":
    main()
