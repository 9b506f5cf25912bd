"""This process's own connection to Ray."""

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psutil


def session_folder() -> Path | None:
    """Return the session folder of the connected Ray; None without a connection."""
    import ray._private.worker

    node: Any = ray._private.worker._global_node
    return Path(node.get_session_dir_path()) if ray.is_initialized() else None


def is_gcs_dead() -> bool:
    """Whether the store (GCS) of a Ray started by this process has died; Ray itself ends a minute later."""
    import ray._private.worker

    node: Any = ray._private.worker._global_node
    return node is not None and any(
        info.process.poll() is not None for info in node.all_processes.get("gcs_server", ())
    )


def list_processes() -> "list[psutil.Process]":
    """Return the processes of the Ray started by this process: its children, their descendants, and on Linux all
    processes that write to its log files. Empty without such a Ray.

    Only the log files identify an orphaned worker: it has another parent, and its title has overwritten its command
    and its environment.
    """
    import psutil
    import ray._private.worker

    node: Any = ray._private.worker._global_node
    if node is None:
        return []
    logs_prefix = str(Path(node.get_logs_dir_path()).resolve()) + os.sep
    ray_processes: dict[psutil.Process, None] = {}
    for pid in [info.process.pid for infos in node.all_processes.values() for info in infos]:
        with suppress(psutil.NoSuchProcess):
            ray_processes.update(dict.fromkeys([psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]))
    for process in psutil.process_iter():
        with suppress(OSError):  # it has ended, or is another user's, or this system has no such folder
            if os.readlink(f"/proc/{process.pid}/fd/1").startswith(logs_prefix):
                ray_processes[process] = None
    return list(ray_processes)


def drop_forwarded_output() -> None:
    """Do not print the output that other processes of the cluster send to this process."""
    import ray._private.worker

    ray._private.worker.print_to_stdstream = lambda *data, **settings: None


def list_session_pids() -> list[int]:
    """Return the ids of this process, its descendants and its raylet's descendants (in a job the raylet is no
    descendant)."""
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
