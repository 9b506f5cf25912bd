"""A script: a session of Ray that ends while its raylet has lost a process, which heeds no request to end.

python -m tests.lost_worker FOLDER

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
"""The shell ends at once: what it leaves has another parent, and the worker's log file as its output."""


def main(folder: Path) -> None:
    env.prepare()
    with session(config.load("intent"), folder):
        import ray

        @ray.remote
        def lose() -> int:
            return int(subprocess.run(["sh", "-c", LOSE], stdout=subprocess.PIPE, check=True).stdout)

        lost = ray.get(lose.remote())
        known = {one.pid for one in ray_internals.processes()}
        sys.stdout.write(f"{lost} {lost in known and os.getpid() not in known}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
