"""A script: a container with 64 MB of shared memory. A session of Ray, and a task's array out of its store.

unshare --mount python -m tests.support.small_shm FOLDER      (needs the right to mount)
"""

import subprocess
import sys
from pathlib import Path

from rtrain import config
from rtrain.cluster.connection import session
from rtrain.core import env


def main(folder: Path) -> None:
    env.set_env_defaults()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", "/dev/shm"], check=True)
    with session(config.load_config("intent"), folder):
        import numpy as np
        import ray

        @ray.remote
        def zeros() -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
            return np.zeros(100 << 20, dtype=np.uint8)

        sys.stdout.write(f"{ray.get(zeros.remote()).nbytes} bytes through the store\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
