"""Asks the jobs whose entry points run on this machine to end with a checkpoint: for a head that is about to go.

    python -m rtrain.cluster.graceful_shutdown [--seconds 60]

A job's driver lives on the head. Told in time, its run is saved after the coming update, and the job ends with 75.
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

LOOK_EVERY_S = 0.2


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Returns when the jobs have ended, with 0, or after the seconds, with 1."""
    parser = argparse.ArgumentParser(
        prog="python -m rtrain.cluster.graceful_shutdown", description="End jobs with a checkpoint."
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds that they have")
    end = time.monotonic() + parser.parse_args(arguments).seconds
    for job in supervisor.running():
        with suppress(ProcessLookupError):
            os.kill(job, signal.SIGUSR1)
    while left := supervisor.running():
        if time.monotonic() > end:
            sys.stderr.write(f"rtrain: not ended in time: {', '.join(map(str, left))}\n")
            sys.exit(1)
        time.sleep(LOOK_EVERY_S)
    sys.exit(0)


if __name__ == "__main__":
    main()
