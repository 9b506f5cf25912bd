"""This process's own connection to Ray."""

from pathlib import Path
from typing import Any


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


def drop_forwarded_output() -> None:
    """Print nothing of what other processes of the cluster send to this one's standard streams."""
    import ray._private.worker

    ray._private.worker.print_to_stdstream = lambda *data, **settings: None
