"""A script: a search on a cluster of two nodes; one of them is lost meanwhile. Prints JSON.

    python -m tests.support.two_nodes FOLDER

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
from tests.support.trained import settings

SEARCH = {
    "train.epochs": 3,
    "train.workers": 1,
    "tune.trials": 5,
    "tune.space": {"optim.lr": {"low": 1e-3, "high": 1e-2, "log": True}, "train.aggregation_frequency": [1, 2]},
    "tune.final_budget_rows": 0,
}


def main(folder: Path) -> None:
    env.set_env_defaults()
    os.environ["RAY_AUTH_MODE"] = "disabled"
    from ray.cluster_utils import Cluster

    # A worker and the data tasks of one trial fit on either node.
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    try:
        other = cluster.add_node(num_cpus=3)
        config = with_overrides(settings(folder), {**SEARCH, "cluster.address": cluster.address})
        sys.stdout.write(json.dumps(_drive(cluster, other, config, folder)))
    finally:
        cluster.shutdown()


def _drive(cluster: Any, other: Any, selected: Config, folder: Path) -> dict[str, Any]:
    from rtrain.cluster.connection import session
    from tune import search, trial_pool

    vanish, flying, max_count = threading.Event(), set[int](), list[int]()

    def on_event(event: dict[str, Any]) -> None:
        if event["kind"] == "started":
            flying.add(event["trial"])
        if event["kind"] in ("paused", "finished"):
            flying.discard(event["trial"])
        max_count.append(len(flying))
        if event["kind"] == "search" and event["what"] == "stopped":
            vanish.set()

    with session(selected, folder):
        count, result = trial_pool.count_slots(selected, "cpu"), list[search.SearchResult]()
        work = threading.Thread(
            target=lambda: result.append(search.run_search(selected, folder / "search", on_event=on_event))
        )
        work.start()
        vanish.wait(400)
        cluster.remove_node(other, allow_graceful=False)
        work.join()
    ended = result[0]
    return {
        "slots": count,
        "at_once": max(max_count),
        "used": sorted({event["slot"] for event in ended.search.events("assigned")}),
        "status": [trial.status for trial in ended.history.original_trials],
        "errors": [trial.error for trial in ended.history.original_trials],
        "winner": ended.history.winner,
        "finished": [trial.number for trial in ended.history.original_trials if trial.final_result],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
