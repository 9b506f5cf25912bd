"""The agent of a node whose Ray has no dashboard, run by its path with the arguments of Ray's own.

A raylet does not start without its agent, and waits until that has said which ports its servers have. Ray's own has
none where the libraries of the dashboard are not installed. It says so, and ends with its raylet; for that it imports
Ray, which takes half a second of a core and 45 MB. Nothing but the standard library is imported here.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
NONE = "-1"
LOOK_S = 0.5
"""Between two looks whether the raylet is still there."""


def main(arguments: Sequence[str]) -> None:
    given = dict(word.split("=", 1) for word in arguments if "=" in word)
    say_none(Path(given["--session-dir"]), given["--node-id"])
    raylet = int(os.environ["RAY_RAYLET_PID"])
    while os.getppid() == raylet:
        time.sleep(LOOK_S)


def say_none(session: Path, node: str) -> None:
    """Say that there are no servers, in the files in which the raylet looks for their ports."""
    for name in PORTS:
        draft = session / f".{name}_{node}"
        draft.write_text(NONE)
        draft.rename(session / f"{name}_{node}")


if __name__ == "__main__":
    main(sys.argv[1:])
