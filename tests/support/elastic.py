"""A script: one run on a cluster whose nodes come, are drained as before a preemption, and vanish. Prints JSON.

    python -m tests.support.elastic FOLDER [short | shards]

short: the run needs more than the head alone, and waits for a node to come back. shards: four workers have shares of
the weights, and three of them vanish.

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
from tests.support.tiny import make_encoder

UPDATES, SAVE_EVERY = 1500, 100
DRAIN_S = 20
NODES: list[Any] = []


def settings(folder: Path, address: str, minimum: int, crashes: int, shard: int = 0) -> config.Config:
    overrides = {
        "data.path": str(write_rows(folder / "rows.csv", labelled_rows(403))),
        "model.name": str(make_encoder(folder / "encoder")),
        "train.precision": "fp32",
        "train.epochs": 1000,
        "train.global_batch_size": 48,
        "train.workers": 4,
        "train.min_workers": minimum,
        "train.zero_stage": shard,
        "train.save_every": SAVE_EVERY,
        "train.evaluate_every": 1000,
        "train.log_every": 1,
        "cluster.address": address,
        "cluster.max_failures": crashes,
    }
    return config.load_config("intent", overrides)


def main(folder: Path, layout_: str) -> None:
    env.set_env_defaults()
    os.environ["RAY_AUTH_MODE"] = "disabled"
    from ray.cluster_utils import Cluster

    # One worker and the data tasks fit on the head; with a second node there are four, too many for either alone.
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    try:
        sys.stdout.write(json.dumps(_drive(cluster, folder, layout_)))
    finally:
        cluster.shutdown()


def _drive(cluster: Any, folder: Path, layout_: str) -> dict[str, Any]:
    from rtrain.cluster.connection import session
    from rtrain.runs import controller, prepare
    from rtrain.verification import verify

    changes = [("joins", _join), ("drained", _drain), ("joins again", _join_spot), ("vanishes", _vanish)]
    short = layout_ == "short"
    if layout_:
        _join(cluster)
        changes = [("vanishes", _vanish)]
    # The loss of a spot node does not count as a failure; that of another node does.
    minimum, shard = 2 if short else 1, 3 if layout_ == "shards" else 0
    selection = settings(folder, cluster.address, minimum, crashes=1 if layout_ else 0, shard=shard)
    log: list[dict[str, Any]] = []
    with session(selection, folder):
        prepared = prepare.prepare_run(selection, folder / "run")
        # Nodes may only be added from the main thread.
        fit = threading.Thread(
            target=lambda: controller.fit(prepared, end_step=UPDATES, on_event=log.append), daemon=True
        )
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
            rung_result = max(event["step"] for event in log[: log.index(started)] if event["kind"] == "progress")
            steps.append({**started, "change": name, "lost": rung_result - started["step"]})
            steps[-1]["seconds"] = round(time.monotonic() - begin, 1)
            assert after["step"] == started["step"] + 1
        fit.join()
    report = verify.check_ledger(prepared.run)
    causes = [
        event.get("reason") or event.get("cause") for event in log if event["kind"] in ("restart_requested", "crashed")
    ]
    return {
        "steps": [{key: step.get(key) for key in ("change", "workers", "step", "lost", "seconds")} for step in steps],
        "causes": causes,
        "ledger": report.to_document() | {"checked": len(report.matching_records)},
    }


def _wait(
    fit: threading.Thread,
    log: list[dict[str, Any]],
    begin: int,
    subject: str,
    expected: Callable[[dict[str, Any]], bool],
) -> dict[str, Any]:
    give_up = time.monotonic() + 150
    while True:
        for event in log[begin:]:
            if expected(event):
                return event
        if time.monotonic() > give_up or not fit.is_alive():
            raise SystemExit(f"waited in vain for the run {subject}: {[event['kind'] for event in log][-20:]}")
        time.sleep(0.05)


def _join(cluster: Any, labels: dict[str, str] | None = None) -> None:
    NODES.append(cluster.add_node(num_cpus=3, labels=labels))


def _join_spot(cluster: Any) -> None:
    _join(cluster, {"ray.io/market-type": "spot"})


def _vanish(cluster: Any) -> None:
    cluster.remove_node(NODES.pop(), allow_graceful=False)


def _drain(cluster: Any) -> None:
    """Simulate a cloud's preemption: the node drains, and is killed some seconds later."""
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
