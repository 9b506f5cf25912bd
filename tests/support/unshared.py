"""A script: a cluster of two nodes; one mounts another file system over the run folder. Prints the error.

unshare --mount python -m tests.support.unshared FOLDER      (needs the right to mount)
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from rtrain.core import env
from rtrain.core.errors import UserError


def main(folder: Path) -> None:
    env.set_env_defaults()
    os.environ["RAY_AUTH_MODE"] = "disabled"
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    # The new node sees another, empty folder where this process and the head see theirs.
    hidden = f"mount -t tmpfs none {folder} && exec ray start --address {cluster.address} --num-cpus 2 --block"

    def join_node() -> "subprocess.Popen[bytes]":
        command, count = ["unshare", "--mount", "sh", "-c", hidden], sum(node["Alive"] for node in ray.nodes())
        other = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while sum(node["Alive"] for node in ray.nodes()) == count:
            time.sleep(0.2)
        return other

    from rtrain.cluster import preflight

    other_items = []
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        other_items.append(join_node())
        preflight.check_shared_folder(folder.parent)  # as far as all see the same, nothing is wrong
        try:
            preflight.check_shared_folder(folder)
        except UserError as error:
            sys.stdout.write(f"{error}\n")
        sys.stdout.write(f"left behind: {sorted(path.name for path in folder.iterdir())}\n")
    finally:
        for other in other_items:
            other.terminate()
            other.wait()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
