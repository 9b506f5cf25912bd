"""The agent of a node whose Ray has no dashboard, run by its path with the arguments of Ray's own.

A raylet does not start without its agent, and waits for the ports of its servers. Without the dashboard's libraries,
Ray's own agent has no servers: it reports that, and ends with its raylet; for this it imports Ray, which takes half a
second of a core and 45 MB. This module imports the standard library alone.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
NO_PORT = "-1"
POLL_INTERVAL_S = 0.5
"""Seconds between two checks that the raylet is alive."""


def main(arguments: Sequence[str]) -> None:
    options = dict(word.split("=", 1) for word in arguments if "=" in word)
    write_no_ports(Path(options["--session-dir"]), options["--node-id"])
    raylet_pid = int(os.environ["RAY_RAYLET_PID"])
    while os.getppid() == raylet_pid:
        time.sleep(POLL_INTERVAL_S)


def write_no_ports(session_folder: Path, node_id: str) -> None:
    """Write the port files that the raylet reads, with no servers."""
    for name in PORTS:
        draft = session_folder / f".{name}_{node_id}"
        draft.write_text(NO_PORT)
        draft.rename(session_folder / f"{name}_{node_id}")


if __name__ == "__main__":
    main(sys.argv[1:])
