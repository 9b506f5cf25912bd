"""A script: jobs on rehearsed clusters, whose machines end as machines do. Prints JSON.

    python -m tests.machines train FOLDER     until the head's machine is cut off in the middle of a run
    python -m tests.machines again FOLDER     on a new cluster: the same job, with nothing but the run's storage
    python -m tests.machines serve FOLDER     an endpoint of two replicas on nodes of one CPU, which is then stopped
    python -m tests.machines labels FOLDER    a search and an endpoint, each on nodes of its own, beside others
    python -m tests.machines grow FOLDER      a run that grows from one worker to four on nodes of one CPU, and shrinks
    python -m tests.machines broken FOLDER    a run whose driver is killed, and whose storage then answers nobody

Processes of their own: Ray keeps the token of the first cluster that a process has spoken to.
"""

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from rtrain import ray_internals
from rtrain.cluster import capacity
from rtrain.cluster.jobs import job_names, upload
from rtrain.core import env
from rtrain.core.run_folder import Run
from rtrain.rehearsal import faults, measurements, plan as plans
from rtrain.rehearsal.machines.local_cluster import Up, free_ports, up
from tests.conftest import labelled_rows, write_rows
from tests.root import ROOT
from tests.tiny import make_artifact, make_encoder

WITHIN_S = 900.0
SAVE_EVERY = 10
WATCHED_S = 60.0
"""Seconds for which a run that has grown is watched: twice as long as a node may be idle."""
DRIVER = "-m rtrain train"
OUT_S = 20.0
"""Seconds for which a storage answers nobody."""


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%X')} {text}\n")


def until(what: str, met: Callable[[], Any]) -> Any:
    give_up = time.monotonic() + WITHIN_S
    while not (found := met()):
        if time.monotonic() > give_up:
            raise SystemExit(f"waited in vain for {what}")
        time.sleep(0.1)
    return found


def plan(cpus: int, most: int = 4, idle_s: float = plans.IDLE_S) -> plans.Plan:
    """That of cluster.yaml, with at most `most` nodes of so many CPUs."""
    document = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
    document["available_node_types"]["worker"] |= {"resources": {"CPU": cpus}, "max_workers": most}
    return plans.of(yaml.safe_dump({**document, "max_workers": most, "idle_timeout_minutes": idle_s / 60}))


def words(folder: Path, name: str = "lost", workers: int = 2, *more: str) -> list[str]:
    settings = ["train.precision=fp32", "train.epochs=100", f"train.save_every={SAVE_EVERY}", "train.log_every=1"]
    settings += ["train.evaluate_every=1000", f"cluster.storage=file://{folder}/storage"]
    made = ["train", "intent", "--data", str(folder / "rows.csv"), "--model", str(folder / "encoder")]
    made += ["--workers", str(workers), "--out", str(folder / "runs" / name)]
    return [*made, *(word for setting in (*settings, *more) for word in ("--set", setting))]


def stored(folder: Path) -> int:
    """Update of the newest checkpoint that is whole in the storage: its manifest comes last."""
    found = (folder / "storage" / "lost" / "checkpoints").glob("update-*/MANIFEST.json")
    return max((int(path.parent.name.partition("-")[2]) for path in found), default=0)


def train(folder: Path) -> dict[str, Any]:
    write_rows(folder / "rows.csv", labelled_rows(403))
    make_encoder(folder / "encoder")
    run = Run(folder / "runs" / "lost")
    with up(plan(8), folder / "first", say) as made:
        made.jobs.submit(words(folder), upload.of(ROOT), say)
        until("three checkpoints", lambda: stored(folder) >= 3 * SAVE_EVERY)
        made.cloud.cut(made.head)
        until("the head's end", lambda: made.head not in made.book.up())
    # The workers are on another machine, and go on until they miss the head.
    return {"stored": stored(folder), "reached": run.events("progress")[-1]["update"], "left": made.left}


def again(folder: Path) -> dict[str, Any]:
    shutil.rmtree(folder / "runs")  # it was on the head's own disk
    run = Run(folder / "runs" / "lost")
    with up(plan(8), folder / "second", say) as made:
        begin = time.time()
        job = made.jobs.submit(words(folder), upload.of(ROOT), say)
        until("the run", lambda: run.log.is_file())
        started = until("a start", lambda: [one for one in run.events("started") if one["time"] > begin])[0]
        until("an update", lambda: [one for one in run.events("progress") if one["time"] > started["time"]])
        seconds = round(time.time() - begin, 1)
        made.jobs.stop(job)
        until("its end", lambda: made.jobs.all()[job].status in job_names.ENDED)
        joined = ray_internals.joined(made.address, seconds=10.0)
    went = [(f"{one.name} asked for", one.asked) for one in made.machines.values()]
    went += [(f"{name} joined", at) for name, at in joined.items()]
    went += [(event["kind"], event["time"]) for event in run.events() if event["kind"] != "progress"]
    return {
        "resumed_from": started["update"],
        "seconds": seconds,
        "went": [(what, round(at - begin, 1)) for what, at in sorted(went, key=lambda one: one[1]) if at > begin - 30],
        "left": made.left,
    }


def serve(folder: Path) -> dict[str, Any]:
    make_artifact(folder / "artifact", ("lost", "found"))
    [port] = free_ports(1)
    with up(plan(1), folder / "machines", say) as made:
        command = ["serve", str(folder / "artifact"), "--port", str(port), "--set", "serve.replicas=2"]
        begin = time.monotonic()
        job = made.jobs.submit(command, upload.of(ROOT), say)
        line = made.jobs.await_line(job, "serving ")
        seconds, nodes = round(time.monotonic() - begin, 1), len(made.book.up()) - 1
        statuses = asked_until_stopped(made, job, f"http://127.0.0.1:{port}/predict")
        begin = time.monotonic()
        until("nodes to end", lambda: len(made.book.up()) == 1)
        idle = round(time.monotonic() - begin, 1)
        log = made.jobs.logs(job)
    return {
        "line": line,
        "seconds": seconds,
        "nodes": nodes,
        "statuses": statuses,
        "traceback": "Traceback" in log,
        "idle_s": idle,
        "left": made.left,
    }


def grow(folder: Path) -> dict[str, Any]:
    """The nodes are idle for a moment whenever the run grows onto them, and longer than they may be in all. Then the
    cloud takes back all nodes with workers but one, and has no others: the run goes on with one worker."""
    write_rows(folder / "rows.csv", labelled_rows(403))
    make_encoder(folder / "encoder")
    run, small = Run(folder / "runs" / "grown"), plan(1, most=12, idle_s=30)
    with up(small, folder / "machines", say) as made:
        begin = time.time()
        job = made.jobs.submit(
            words(folder, run.name, 4, "train.min_workers=1", "train.epochs=5000"), upload.of(ROOT), say
        )
        until("the run", lambda: run.log.is_file())
        until("four workers", lambda: [one for one in run.events("started") if one["workers"] == 4])
        seconds, at = round(time.time() - begin, 1), time.time()
        until("its updates", lambda: run.events("progress")[-1]["time"] > at)
        until("a while", lambda: time.time() > at + WATCHED_S)
        count = len(made.book.up()) - 1
        made.book.sell_out()
        at = time.time()
        for name in sorted(faults.machines_with(made, faults.WORKER))[1:]:
            made.told[name].ends = at + faults.NOTICE_S["aws"]
        until("one worker", lambda: [one for one in run.events("started") if one["workers"] == 1 and one["time"] > at])
        smaller = round(time.time() - at, 1)
        until("its updates", lambda: run.events("progress")[-1]["time"] > run.events("started")[-1]["time"])
        until("nodes to leave", lambda: len(made.book.up()) - 1 <= 3)
        left = len(made.book.up()) - 1
        made.jobs.stop(job)
        until("its end", lambda: made.jobs.all()[job].status in job_names.ENDED)
        until("nodes to end", lambda: len(made.book.up()) == 1)
    machines = [one for one in made.machines.values() if one.type != small.head.name]
    return {
        "workers": [one["workers"] for one in run.events("started")],
        "seconds": seconds,
        "needed": small.needed(4, capacity.Needs()),
        "smaller_s": smaller,
        "lost": [
            max(one["update"] for one in run.events("progress") if one["time"] < start["time"]) - start["update"]
            for start in run.events("started")[1:]
        ],
        "needed_by_one": small.needed(1, capacity.Needs(data_cpus=capacity.data_cpus(None, 4))),
        "left_of_one": left,
        "started": len(machines),
        "at_a_time": measurements.most_at_a_time(
            measurements.nodes_of({one.name: one for one in machines}, {}, small, [], begin)
        ),
        "in_the_end": count,
        "asked_s": [round(one.asked - begin, 1) for one in machines],
        "left": made.left,
    }


def processes(made: Up, machine: str, sign: str) -> set[int]:
    """The machine's processes whose command line holds `sign`."""
    found, one = set(), made.book.all()[machine]
    with suppress(psutil.Error):
        for process in psutil.Process(one.pid).children(recursive=True):
            with suppress(psutil.Error):
                if sign in " ".join(process.cmdline()):
                    found.add(process.pid)
    return found


def driver(made: Up) -> psutil.Process:
    """The driver of the only training: its supervisor, and the shell that began it, have the same words."""
    found = processes(made, made.head, DRIVER)
    [last] = [pid for pid in found if not found & {one.pid for one in psutil.Process(pid).children()}]
    return psutil.Process(last)


def broken(folder: Path) -> dict[str, Any]:
    write_rows(folder / "rows.csv", labelled_rows(403))
    make_encoder(folder / "encoder")
    run, storage = Run(folder / "runs" / "lost"), folder / "storage"

    def reached() -> int:
        return max((event["update"] for event in run.events("progress")), default=0)

    with up(plan(8), folder / "machines", say) as made:
        job = made.jobs.submit(words(folder, "lost", 2, "train.epochs=4000"), upload.of(ROOT), say)
        until("three checkpoints", lambda: stored(folder) >= 3 * SAVE_EVERY)
        killed, before = time.time(), reached()
        driver(made).kill()
        started = until("a start", lambda: [one for one in run.events("started") if one["time"] > killed])[0]
        before = max(before, *(one["update"] for one in run.events("progress") if one["time"] < started["time"]))
        until("a new update", lambda: reached() > before)
        again = next(one for one in run.events("progress") if one["time"] > killed and one["update"] > before)

        starts, kept = len(run.events("started")), stored(folder)
        storage.rename(folder / "away")
        storage.write_text("no folder: whatever is written into it fails")
        out = time.time()
        until("its end", lambda: time.time() > out + OUT_S)
        during = reached()
        storage.unlink()
        (folder / "away").rename(storage)
        back = time.time()
        until("a checkpoint", lambda: stored(folder) > max(kept, during - SAVE_EVERY))
        durable = time.time()
        made.jobs.stop(job)
        until("the job's end", lambda: made.jobs.all()[job].status in job_names.ENDED)
    return {
        "driver": {
            "seconds_to_next_update": round(again["time"] - killed, 1),
            "recomputed": before - started["update"],
        },
        "storage": {
            "told": len(run.events("uncopied")),
            "updates_meanwhile": during - before,
            "restarts": len(run.events("started")) - starts,
            "seconds_to_checkpoint": round(durable - back, 1),
        },
        "left": made.left,
    }


def labels(folder: Path) -> dict[str, Any]:
    """Node types of two CPUs that differ by a label alone. Data tasks may run on any of them."""
    write_rows(folder / "rows.csv", labelled_rows(403))
    make_encoder(folder / "encoder")
    make_artifact(folder / "artifact", ("lost", "found"))
    document = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
    kinds = document["available_node_types"]
    worker = {**kinds.pop("worker"), "resources": {"CPU": 4}, "max_workers": 2}
    for name in ("training", "answers"):
        kinds[name] = {**worker, "labels": {"for": name}}
    [port] = free_ports(1)
    search = Run(folder / "runs" / "search")
    asked = words(folder, search.name, 1, "cluster.labels={for: training}", "tune.trials=2", "tune.full_runs=1")
    asked += ["--set", "train.epochs=2", "--set", "tune.final_rows=1", "--set", "tune.sampler=random"]
    where = dict[str, set[str]]()
    with up(plans.of(yaml.safe_dump(document)), folder / "machines", say) as made:
        job = made.jobs.submit(["tune", *asked[1:]], upload.of(ROOT), say)
        while (status := made.jobs.all()[job].status) not in job_names.ENDED:
            _note(made, "ray::RayTrainWorker", where)
            time.sleep(0.2)
        command = ["serve", str(folder / "artifact"), "--port", str(port), "--set", "serve.labels={for: answers}"]
        serving = made.jobs.submit(command, upload.of(ROOT), say)
        made.jobs.await_line(serving, "serving ")
        _note(made, "ray::ServeReplica", where)
        made.jobs.stop(serving)
        until("its end", lambda: made.jobs.all()[serving].status in job_names.ENDED)
    trials = len(list(search.folder.glob("trial-*")))
    return {"status": status, "trials": trials, "on": {k: sorted(v) for k, v in where.items()}, "left": made.left}


def _note(made: Up, what: str, where: dict[str, set[str]]) -> None:
    """On which types of machine processes of that name run now."""
    for one in faults.machines_with(made, what).values():
        where.setdefault(what, set()).add(one.type)


def asked_until_stopped(made: Up, job: str, url: str) -> dict[str, int]:
    """Requests one after another by four clients, of which the job is stopped in the middle: how each has ended."""
    counts: dict[str, int] = {}
    stopped, lock = threading.Event(), threading.Lock()

    def client() -> None:
        with httpx.Client(trust_env=False, timeout=30) as http:
            while True:
                try:
                    found = str(http.post(url, json={"inputs": "where is my parcel"}).status_code)
                except httpx.ConnectError:
                    found = "refused"
                except httpx.TransportError as error:
                    found = type(error).__name__
                with lock:
                    counts[found] = counts.get(found, 0) + 1
                if found == "refused" or (stopped.is_set() and found != "200"):
                    return

    clients = [threading.Thread(target=client) for _ in range(4)]
    for one in clients:
        one.start()
    until("100 answers", lambda: counts.get("200", 0) >= 100)
    stopped.set()
    made.jobs.stop(job)
    for one in clients:
        one.join()
    until("the job's end", lambda: made.jobs.all()[job].status in job_names.ENDED)
    return counts


VERBS = {"train": train, "again": again, "serve": serve, "labels": labels, "grow": grow, "broken": broken}

if __name__ == "__main__":
    env.prepare()
    sys.stdout.write(json.dumps(VERBS[sys.argv[1]](Path(sys.argv[2]))))
