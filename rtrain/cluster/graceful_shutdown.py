"""Request a checkpoint and the end of all jobs whose entry points run on this machine, before the head stops.

python -m rtrain.cluster.graceful_shutdown [--seconds 60]

A job's driver runs on the head. After the request, the run saves after the current step, and the job exits with 75.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from rtrain.cluster import supervisor

POLL_INTERVAL_S = 0.2


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Return 0 once the jobs have ended, or 1 after the timeout."""
    parser = argparse.ArgumentParser(
        prog="python -m rtrain.cluster.graceful_shutdown", description="End jobs with a checkpoint."
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds that they have")
    deadline = time.monotonic() + parser.parse_args(arguments).seconds
    for pid in supervisor.list_supervisors():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    while remaining := supervisor.list_supervisors():
        if time.monotonic() > deadline:
            sys.stderr.write(f"rtrain: not ended in time: {', '.join(map(str, remaining))}\n")
            sys.exit(1)
        time.sleep(POLL_INTERVAL_S)
    sys.exit(0)


if __name__ == "__main__":
    main()
