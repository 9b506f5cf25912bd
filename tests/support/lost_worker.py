"""A script: a session of Ray that ends while its raylet has lost a process, which heeds no request to end.

python -m tests.support.lost_worker FOLDER

It prints the id of that process, and whether the process was known before the session's end.
"""

import os
import subprocess
import sys
from pathlib import Path

from rtrain import config, ray_internals
from rtrain.cluster.connection import session
from rtrain.core import env

LOSE = "trap '' TERM INT HUP; sleep 1000 >&2 & echo $!"
"""The shell exits at once: its child is orphaned, and writes to the worker's log file."""


def main(folder: Path) -> None:
    env.set_env_defaults()
    with session(config.load_config("intent"), folder):
        import ray

        @ray.remote
        def lose() -> int:
            return int(subprocess.run(["sh", "-c", LOSE], stdout=subprocess.PIPE, check=True).stdout)

        lost = ray.get(lose.remote())
        known_values = {process.pid for process in ray_internals.list_processes()}
        sys.stdout.write(f"{lost} {lost in known_values and os.getpid() not in known_values}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
