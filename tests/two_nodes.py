"""A script: a search on a cluster of two nodes, one of which vanishes on the way. Prints JSON.

    python -m tests.two_nodes FOLDER

A process of its own, since the nodes are processes that a test session's Ray must not know of.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from rtrain.config import Config, with_overrides
from rtrain.core import env
from tests.trained import settings

SEARCH = {
    "train.epochs": 3,
    "train.workers": 1,
    "tune.trials": 5,
    "tune.space": {"optim.lr": {"low": 1e-3, "high": 1e-2, "log": True}, "train.aggregation_frequency": [1, 2]},
    "tune.final_rows": 0,
}


def main(folder: Path) -> None:
    env.prepare()
    os.environ["RAY_AUTH_MODE"] = "disabled"
    from ray.cluster_utils import Cluster

    # A worker and the data tasks of one trial fit on either node.
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    try:
        other = cluster.add_node(num_cpus=3)
        chosen = with_overrides(settings(folder), {**SEARCH, "cluster.address": cluster.address})
        sys.stdout.write(json.dumps(_drive(cluster, other, chosen, folder)))
    finally:
        cluster.shutdown()


def _drive(cluster: Any, other: Any, chosen: Config, folder: Path) -> dict[str, Any]:
    from rtrain.cluster.connection import session
    from tune import search, trial_pool

    vanish, flying, most = threading.Event(), set[int](), list[int]()

    def on_event(event: dict[str, Any]) -> None:
        if event["kind"] == "started":
            flying.add(event["trial"])
        if event["kind"] in ("paused", "finished"):
            flying.discard(event["trial"])
        most.append(len(flying))
        if event["kind"] == "search" and event["what"] == "stopped":
            vanish.set()

    with session(chosen, folder):
        count, found = trial_pool.number(chosen, "cpu"), list[search.Found]()
        work = threading.Thread(target=lambda: found.append(search.run(chosen, folder / "search", on_event=on_event)))
        work.start()
        vanish.wait(400)
        cluster.remove_node(other, allow_graceful=False)
        work.join()
    ended = found[0]
    return {
        "slots": count,
        "at_once": max(most),
        "used": sorted({event["slot"] for event in ended.search.events("ordered")}),
        "status": [trial.status for trial in ended.history.own],
        "errors": [trial.error for trial in ended.history.own],
        "best": ended.history.chosen,
        "finished": [trial.number for trial in ended.history.own if trial.finished],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
