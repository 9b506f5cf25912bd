"""This process's own connection to Ray."""

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psutil


def session_folder() -> Path | None:
    """Where the Ray that this process is connected to keeps its files; None without a connection."""
    import ray._private.worker

    node: Any = ray._private.worker._global_node
    return Path(node.get_session_dir_path()) if ray.is_initialized() else None


def store_has_ended() -> bool:
    """Whether the store (GCS) of a Ray that this process has started has ended; Ray ends a minute later."""
    import ray._private.worker

    node: Any = ray._private.worker._global_node
    return node is not None and any(one.process.poll() is not None for one in node.all_processes.get("gcs_server", ()))


def processes() -> "list[psutil.Process]":
    """What runs of the Ray that this process has started: what it started, the descendants of that, and on Linux what
    prints into its log files. Empty without such a Ray.

    Of a worker that its raylet has forgotten, these files are all that tells whose it is: its parent is another, and
    its title has taken the place of its command and its environment.
    """
    import psutil
    import ray._private.worker

    node: Any = ray._private.worker._global_node
    if node is None:
        return []
    logs = str(Path(node.get_logs_dir_path()).resolve()) + os.sep
    found: dict[psutil.Process, None] = {}
    for started in [one.process.pid for kind in node.all_processes.values() for one in kind]:
        with suppress(psutil.NoSuchProcess):
            found.update(dict.fromkeys([psutil.Process(started), *psutil.Process(started).children(recursive=True)]))
    for other in psutil.process_iter():
        with suppress(OSError):  # it has ended, or is another user's, or this system has no such folder
            if os.readlink(f"/proc/{other.pid}/fd/1").startswith(logs):
                found[other] = None
    return list(found)


def drop_forwarded_output() -> None:
    """Print nothing of what other processes of the cluster send to this one's standard streams."""
    import ray._private.worker

    ray._private.worker.print_to_stdstream = lambda *data, **settings: None


def session_processes() -> list[int]:
    """Ids of this process, its descendants, and those of its raylet, which in a job is not a descendant itself."""
    import psutil

    roots, folder = [psutil.Process()], session_folder()
    pids: set[int] = set()
    for process in psutil.process_iter() if folder is not None else ():
        with suppress(psutil.Error):
            if any(str(folder) in argument for argument in process.cmdline()):
                roots.append(process)
    for root in roots:
        with suppress(psutil.Error):
            pids |= {root.pid, *(child.pid for child in root.children(recursive=True))}
    return sorted(pids)
