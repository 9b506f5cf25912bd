"""A script: jobs on rehearsed clusters, whose machines end as machines do. Prints JSON.

    python -m tests.support.machines VERB FOLDER

train: until the head is cut off in the middle of a run. again: the same job on a new cluster, with nothing but the
storage of the run. serve: an endpoint of two replicas on nodes of one CPU, which is then stopped. labels: a search and
an endpoint, each on nodes of its own, beside others. grow: a run that grows from one worker to four on nodes of one
CPU, and shrinks. broken: a run whose driver is killed, and whose storage then does not answer.

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
from rtrain.cluster import capacity, data_tasks
from rtrain.cluster.jobs import client, job_names
from rtrain.core import env
from rtrain.core.run_folder import Run
from rtrain.rehearsal import certificate, faults, plan as plans
from rtrain.rehearsal.local_cluster import RehearsalCluster, find_free_ports, launch_cluster
from tests.conftest import labelled_rows, write_rows
from tests.support.root import ROOT
from tests.support.tiny import make_artifact, make_encoder

WITHIN_S = 900.0
SAVE_EVERY = 10
WATCHED_S = 60.0
"""Seconds for which a run that has grown is watched: twice as long as a node may be idle."""
DRIVER = "-m rtrain train"
OUT_S = 20.0
"""Seconds for which a storage answers nobody."""


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%X')} {text}\n")


def until(description: str, met: Callable[[], Any]) -> Any:
    give_up = time.monotonic() + WITHIN_S
    while not (result := met()):
        if time.monotonic() > give_up:
            raise SystemExit(f"waited in vain for {description}")
        time.sleep(0.1)
    return result


def plan(cpus: int, max_count: int = 4, idle_s: float = plans.MAX_IDLE_S) -> plans.RehearsalPlan:
    """That of cluster.yaml, with at most `max_count` nodes of so many CPUs."""
    document = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
    document["available_node_types"]["worker"] |= {"resources": {"CPU": cpus}, "max_workers": max_count}
    return plans.parse_plan(yaml.safe_dump({**document, "max_workers": max_count, "idle_timeout_minutes": idle_s / 60}))


def words(folder: Path, name: str = "lost", workers: int = 2, *more: str) -> list[str]:
    settings = ["train.precision=fp32", "train.epochs=100", f"train.save_every={SAVE_EVERY}", "train.log_every=1"]
    settings += ["train.evaluate_every=1000", f"cluster.storage=file://{folder}/storage"]
    document = ["train", "intent", "--data", str(folder / "rows.csv"), "--model", str(folder / "encoder")]
    document += ["--workers", str(workers), "--out", str(folder / "runs" / name)]
    return [*document, *(word for setting in (*settings, *more) for word in ("--set", setting))]


def stored_step(folder: Path) -> int:
    """Update of the newest checkpoint that is whole in the storage: its manifest comes last."""
    paths = (folder / "storage" / "lost" / "checkpoints").glob("step-*/MANIFEST.json")
    return max((int(path.parent.name.partition("-")[2]) for path in paths), default=0)


def train(folder: Path) -> dict[str, Any]:
    write_rows(folder / "rows.csv", labelled_rows(403))
    make_encoder(folder / "encoder")
    run = Run(folder / "runs" / "lost")
    with launch_cluster(plan(8), folder / "first", say) as cluster:
        cluster.jobs.submit(words(folder), client.collect_upload(ROOT), say)
        until("three checkpoints", lambda: stored_step(folder) >= 3 * SAVE_EVERY)
        cluster.cloud.cut_power(cluster.head_name)
        until("the head's end", lambda: cluster.head_name not in cluster.registry.live_machines())
    # The workers are on another machine, and train until they detect the loss of the head.
    return {"stored": stored_step(folder), "reached": run.events("progress")[-1]["step"], "left": cluster.left_behind}


def resume(folder: Path) -> dict[str, Any]:
    shutil.rmtree(folder / "runs")  # it was on the head's own disk
    run = Run(folder / "runs" / "lost")
    with launch_cluster(plan(8), folder / "second", say) as cluster:
        begin = time.time()
        job = cluster.jobs.submit(words(folder), client.collect_upload(ROOT), say)
        until("the run", lambda: run.log.is_file())
        started = until("a start", lambda: [event for event in run.events("started") if event["time"] > begin])[0]
        until("an update", lambda: [event for event in run.events("progress") if event["time"] > started["time"]])
        seconds = round(time.time() - begin, 1)
        cluster.jobs.stop(job)
        until("its end", lambda: cluster.jobs.list_jobs()[job].status in job_names.FINAL_STATUSES)
        join_times = ray_internals.node_start_times(cluster.address, timeout_s=10.0)
    went = [(f"{machine.name} asked for", machine.requested_at) for machine in cluster.machines.values()]
    went += [(f"{name} joined", at) for name, at in join_times.items()]
    went += [(event["kind"], event["time"]) for event in run.events() if event["kind"] != "progress"]
    return {
        "resumed_from": started["step"],
        "seconds": seconds,
        "went": [
            (what, round(at - begin, 1)) for what, at in sorted(went, key=lambda item: item[1]) if at > begin - 30
        ],
        "left": cluster.left_behind,
    }


def serve(folder: Path) -> dict[str, Any]:
    make_artifact(folder / "artifact", ("lost", "found"))
    [port] = find_free_ports(1)
    with launch_cluster(plan(1), folder / "machines", say) as cluster:
        command = ["serve", str(folder / "artifact"), "--port", str(port), "--set", "serve.replicas=2"]
        begin = time.monotonic()
        job = cluster.jobs.submit(command, client.collect_upload(ROOT), say)
        line = cluster.jobs.wait_for_line(job, "serving ")
        seconds, nodes = round(time.monotonic() - begin, 1), len(cluster.registry.live_machines()) - 1
        statuses = asked_until_stopped(cluster, job, f"http://127.0.0.1:{port}/predict")
        begin = time.monotonic()
        until("nodes to end", lambda: len(cluster.registry.live_machines()) == 1)
        idle = round(time.monotonic() - begin, 1)
        log = cluster.jobs.get_logs(job)
    return {
        "line": line,
        "seconds": seconds,
        "nodes": nodes,
        "statuses": statuses,
        "traceback": "Traceback" in log,
        "idle_s": idle,
        "left": cluster.left_behind,
    }


def grow(folder: Path) -> dict[str, Any]:
    """The nodes are idle for a moment whenever the run grows onto them, and longer than they may be in all. Then the
    cloud takes back all nodes with workers but one, and has no others: the run shrinks to one worker."""
    write_rows(folder / "rows.csv", labelled_rows(403))
    make_encoder(folder / "encoder")
    run, small = Run(folder / "runs" / "grown"), plan(1, max_count=12, idle_s=30)
    with launch_cluster(small, folder / "machines", say) as cluster:
        begin = time.time()
        job = cluster.jobs.submit(
            words(folder, run.name, 4, "train.min_workers=1", "train.epochs=5000"), client.collect_upload(ROOT), say
        )
        until("the run", lambda: run.log.is_file())
        until("four workers", lambda: [event for event in run.events("started") if event["workers"] == 4])
        seconds, at = round(time.time() - begin, 1), time.time()
        until("its updates", lambda: run.events("progress")[-1]["time"] > at)
        until("a while", lambda: time.time() > at + WATCHED_S)
        count = len(cluster.registry.live_machines()) - 1
        cluster.registry.exhaust_capacity()
        at = time.time()
        for name in sorted(faults.machines_with_process(cluster, faults.WORKER_PROCESS_PREFIX))[1:]:
            cluster.metadata_by_machine[name].terminates_at = at + faults.NOTICE_PERIOD_S["aws"]
        until(
            "one worker",
            lambda: [event for event in run.events("started") if event["workers"] == 1 and event["time"] > at],
        )
        smaller = round(time.time() - at, 1)
        until("its updates", lambda: run.events("progress")[-1]["time"] > run.events("started")[-1]["time"])
        until("nodes to leave", lambda: len(cluster.registry.live_machines()) - 1 <= 3)
        left = len(cluster.registry.live_machines()) - 1
        cluster.jobs.stop(job)
        until("its end", lambda: cluster.jobs.list_jobs()[job].status in job_names.FINAL_STATUSES)
        until("nodes to end", lambda: len(cluster.registry.live_machines()) == 1)
    machines = [machine for machine in cluster.machines.values() if machine.type != small.head.name]
    return {
        "workers": [event["workers"] for event in run.events("started")],
        "seconds": seconds,
        "needed": small.required_nodes(4, capacity.ResourceRequest()),
        "smaller_s": smaller,
        "lost": [
            max(event["step"] for event in run.events("progress") if event["time"] < start["time"]) - start["step"]
            for start in run.events("started")[1:]
        ],
        "needed_by_one": small.required_nodes(
            1, capacity.ResourceRequest(data_cpus=data_tasks.resolve_data_cpus(None, 4))
        ),
        "left_of_one": left,
        "started": len(machines),
        "at_a_time": certificate.max_concurrent(
            certificate.rehearsed_nodes({machine.name: machine for machine in machines}, {}, small, [], begin)
        ),
        "in_the_end": count,
        "asked_s": [round(machine.requested_at - begin, 1) for machine in machines],
        "left": cluster.left_behind,
    }


def processes(document: RehearsalCluster, machine: str, sign: str) -> set[int]:
    """The machine's processes whose command line holds `sign`."""
    result, item = set(), document.registry.all_machines()[machine]
    with suppress(psutil.Error):
        for process in psutil.Process(item.pid).children(recursive=True):
            with suppress(psutil.Error):
                if sign in " ".join(process.cmdline()):
                    result.add(process.pid)
    return result


def driver(document: RehearsalCluster) -> psutil.Process:
    """The driver of the only training: its supervisor, and the shell that began it, have the same words."""
    result = processes(document, document.head_name, DRIVER)
    [last] = [pid for pid in result if not result & {child.pid for child in psutil.Process(pid).children()}]
    return psutil.Process(last)


def broken(folder: Path) -> dict[str, Any]:
    write_rows(folder / "rows.csv", labelled_rows(403))
    make_encoder(folder / "encoder")
    run, storage = Run(folder / "runs" / "lost"), folder / "storage"

    def last_step() -> int:
        return max((event["step"] for event in run.events("progress")), default=0)

    with launch_cluster(plan(8), folder / "machines", say) as cluster:
        job = cluster.jobs.submit(words(folder, "lost", 2, "train.epochs=4000"), client.collect_upload(ROOT), say)
        until("three checkpoints", lambda: stored_step(folder) >= 3 * SAVE_EVERY)
        killed, before = time.time(), last_step()
        driver(cluster).kill()
        started = until("a start", lambda: [event for event in run.events("started") if event["time"] > killed])[0]
        before = max(before, *(event["step"] for event in run.events("progress") if event["time"] < started["time"]))
        until("a new update", lambda: last_step() > before)
        repeated = next(event for event in run.events("progress") if event["time"] > killed and event["step"] > before)

        starts, saved = len(run.events("started")), stored_step(folder)
        storage.rename(folder / "away")
        storage.write_text("no folder: whatever is written into it fails")
        out = time.time()
        until("its end", lambda: time.time() > out + OUT_S)
        during = last_step()
        storage.unlink()
        (folder / "away").rename(storage)
        restored_at = time.time()
        until("a checkpoint", lambda: stored_step(folder) > max(saved, during - SAVE_EVERY))
        durable = time.time()
        cluster.jobs.stop(job)
        until("the job's end", lambda: cluster.jobs.list_jobs()[job].status in job_names.FINAL_STATUSES)
    return {
        "driver": {
            "seconds_to_next_step": round(repeated["time"] - killed, 1),
            "recomputed": before - started["step"],
        },
        "storage": {
            "told": len(run.events("remote_copy_incomplete")),
            "updates_meanwhile": during - before,
            "restarts": len(run.events("started")) - starts,
            "seconds_to_checkpoint": round(durable - restored_at, 1),
        },
        "left": cluster.left_behind,
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
    [port] = find_free_ports(1)
    search = Run(folder / "runs" / "search")
    requested = words(
        folder, search.name, 1, "cluster.labels={for: training}", "tune.trials=2", "tune.budget_full_runs=1"
    )
    requested += ["--set", "train.epochs=2", "--set", "tune.final_budget_rows=1", "--set", "tune.sampler=random"]
    locations = dict[str, set[str]]()
    with launch_cluster(plans.parse_plan(yaml.safe_dump(document)), folder / "machines", say) as cluster:
        job = cluster.jobs.submit(["tune", *requested[1:]], client.collect_upload(ROOT), say)
        while (status := cluster.jobs.list_jobs()[job].status) not in job_names.FINAL_STATUSES:
            _note(cluster, "ray::RayTrainWorker", locations)
            time.sleep(0.2)
        command = ["serve", str(folder / "artifact"), "--port", str(port), "--set", "serve.labels={for: answers}"]
        serving = cluster.jobs.submit(command, client.collect_upload(ROOT), say)
        cluster.jobs.wait_for_line(serving, "serving ")
        _note(cluster, "ray::ServeReplica", locations)
        cluster.jobs.stop(serving)
        until("its end", lambda: cluster.jobs.list_jobs()[serving].status in job_names.FINAL_STATUSES)
    trials = len(list(search.folder.glob("trial-*")))
    return {
        "status": status,
        "trials": trials,
        "on": {k: sorted(v) for k, v in locations.items()},
        "left": cluster.left_behind,
    }


def _note(document: RehearsalCluster, description: str, locations: dict[str, set[str]]) -> None:
    """Record the node types that run processes with this prefix."""
    for item in faults.machines_with_process(document, description).values():
        locations.setdefault(description, set()).add(item.type)


def asked_until_stopped(document: RehearsalCluster, job: str, url: str) -> dict[str, int]:
    """Send requests from four clients while the job is stopped; returns the count of each outcome."""
    counts: dict[str, int] = {}
    stopped, lock = threading.Event(), threading.Lock()

    def client() -> None:
        with httpx.Client(trust_env=False, timeout=30) as http:
            while True:
                try:
                    result = str(http.post(url, json={"inputs": "where is my parcel"}).status_code)
                except httpx.ConnectError:
                    result = "refused"
                except httpx.TransportError as error:
                    result = type(error).__name__
                with lock:
                    counts[result] = counts.get(result, 0) + 1
                if result == "refused" or (stopped.is_set() and result != "200"):
                    return

    clients = [threading.Thread(target=client) for _ in range(4)]
    for item in clients:
        item.start()
    until("100 answers", lambda: counts.get("200", 0) >= 100)
    stopped.set()
    document.jobs.stop(job)
    for item in clients:
        item.join()
    until("the job's end", lambda: document.jobs.list_jobs()[job].status in job_names.FINAL_STATUSES)
    return counts


VERBS = {"train": train, "again": resume, "serve": serve, "labels": labels, "grow": grow, "broken": broken}

if __name__ == "__main__":
    env.set_env_defaults()
    sys.stdout.write(json.dumps(VERBS[sys.argv[1]](Path(sys.argv[2]))))
