"""A script: one run on a cluster whose nodes come, are drained as before a preemption, and vanish. Prints JSON.

    python -m tests.elastic FOLDER
    python -m tests.elastic FOLDER short      the run needs more than the head alone: it waits for a node to come back
    python -m tests.elastic FOLDER shards     four workers have shares of the weights, and three of them vanish

A process of its own, since the nodes are processes that a test session's Ray must not know of.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rtrain import config
from rtrain.core import env
from tests.conftest import labelled_rows, write_rows
from tests.tiny import make_encoder

UPDATES, SAVE_EVERY = 600, 100
DRAIN_S = 20
NODES: list[Any] = []


def settings(folder: Path, address: str, least: int, crashes: int, shard: int = 0) -> config.Config:
    overrides = {
        "data.path": str(write_rows(folder / "rows.csv", labelled_rows(403))),
        "model.name": str(make_encoder(folder / "encoder")),
        "train.precision": "fp32",
        "train.epochs": 1000,
        "train.rows_per_update": 48,
        "train.workers": 4,
        "train.min_workers": least,
        "train.shard": shard,
        "train.save_every": SAVE_EVERY,
        "train.evaluate_every": 1000,
        "train.log_every": 1,
        "cluster.address": address,
        "cluster.max_crashes": crashes,
    }
    return config.load("intent", overrides)


def main(folder: Path, way: str) -> None:
    env.prepare()
    os.environ["RAY_AUTH_MODE"] = "disabled"
    from ray.cluster_utils import Cluster

    # One worker and the data tasks fit on the head; with a second node there are four, too many for either alone.
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    try:
        sys.stdout.write(json.dumps(_drive(cluster, folder, way)))
    finally:
        cluster.shutdown()


def _drive(cluster: Any, folder: Path, way: str) -> dict[str, Any]:
    from rtrain.cluster.connection import session
    from rtrain.runs import controller, prepare
    from rtrain.verification import ledger

    changes = [("joins", _join), ("drained", _drain), ("joins again", _join_spot), ("vanishes", _vanish)]
    short = way == "short"
    if way:
        _join(cluster)
        changes = [("vanishes", _vanish)]
    # A spot node that vanishes is none of the crashes that a run may have; another one is.
    least, shard = 2 if short else 1, 3 if way == "shards" else 0
    chosen = settings(folder, cluster.address, least, crashes=1 if way else 0, shard=shard)
    log: list[dict[str, Any]] = []
    with session(chosen, folder):
        prepared = prepare.prepare(chosen, folder / "run")
        # Nodes may only be added from the main thread.
        fit = threading.Thread(target=lambda: controller.fit(prepared, until=UPDATES, on_event=log.append), daemon=True)
        fit.start()
        steps = [_wait(fit, log, 0, "to start", lambda event: event["kind"] == "started")]
        for name, change in changes:
            _wait(fit, log, len(log), "to train", lambda event: event["kind"] == "progress")
            seen, begin = len(log), time.monotonic()
            change(cluster)
            if short:
                waiting = _wait(fit, log, seen, "to wait", lambda event: event["kind"] == "waiting")
                time.sleep(5)
                assert not [event for event in log[seen:] if event["kind"] == "started"]
                steps.append({**waiting, "change": "waits", "seconds": round(time.monotonic() - begin, 1)})
                begin = time.monotonic()
                _join(cluster)
            started = _wait(fit, log, seen, name, lambda event: event["kind"] == "started")
            after = _wait(fit, log, log.index(started), name, lambda event: event["kind"] == "progress")
            reached = max(event["update"] for event in log[: log.index(started)] if event["kind"] == "progress")
            steps.append({**started, "change": name, "lost": reached - started["update"]})
            steps[-1]["seconds"] = round(time.monotonic() - begin, 1)
            assert after["update"] == started["update"] + 1
        fit.join()
    report = ledger.check(prepared.run)
    causes = [event.get("reason") or event.get("cause") for event in log if event["kind"] in ("yielded", "crashed")]
    return {
        "steps": [{key: step.get(key) for key in ("change", "workers", "update", "lost", "seconds")} for step in steps],
        "causes": causes,
        "ledger": report.to_document() | {"checked": len(report.checked)},
    }


def _wait(
    fit: threading.Thread, log: list[dict[str, Any]], begin: int, what: str, wanted: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    give_up = time.monotonic() + 150
    while True:
        for event in log[begin:]:
            if wanted(event):
                return event
        if time.monotonic() > give_up or not fit.is_alive():
            raise SystemExit(f"waited in vain for the run {what}: {[event['kind'] for event in log][-20:]}")
        time.sleep(0.05)


def _join(cluster: Any, labels: dict[str, str] | None = None) -> None:
    NODES.append(cluster.add_node(num_cpus=3, labels=labels))


def _join_spot(cluster: Any) -> None:
    _join(cluster, {"ray.io/market-type": "spot"})


def _vanish(cluster: Any) -> None:
    cluster.remove_node(NODES.pop(), allow_graceful=False)


def _drain(cluster: Any) -> None:
    """What a cloud's notice of a preemption comes to: the node takes no new work and is gone some seconds later."""
    import ray
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    node, preemption = NODES.pop(), 2  # autoscaler.proto: DRAIN_NODE_REASON_PREEMPTION
    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    accepted, why = client.drain_node(node.node_id, preemption, "spot", int((time.time() + DRAIN_S) * 1000))
    assert accepted, why
    # Gone at its deadline, whether the run has left it by then or not.
    threading.Timer(DRAIN_S, lambda: node.kill_raylet(check_alive=False)).start()


if __name__ == "__main__":
    main(Path(sys.argv[1]), "".join(sys.argv[2:]))
