"""A private Ray: started by this process for itself, without unneeded processes."""

import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

POLL_INTERVAL_S, REGISTRATION_TIMEOUT_S = 0.02, 30.0
"""Seconds between two checks for a raylet, and until Ray itself checks once and gives up."""
PRIVATE_MARKER = b"rtrain: private"
"""Key in Ray's store: one command has started this Ray for itself, without dashboard and autoscaler."""


@contextmanager
def slim_ray_init(prestarted_workers: int, environment: Mapping[str, str], setup_hook: str) -> Iterator[None]:
    """Patch `ray.init` within the block: the Ray it starts has `prestarted_workers` idle worker processes. Processes of
    its raylet get `environment` in addition to this process's own, and each worker calls `setup_hook`, a function by
    its dotted name, before its first task.

    This Ray lacks three processes, which would import Ray on the cores of the starting command: the dashboard, for
    which `ray.init` would wait even when disabled; the log monitor, which polls every log file to forward lines; and
    the monitor of an autoscaler. Its agent is `rtrain.ray_internals.agent`. `ray.init` polls for the raylet every
    second; here the interval is shorter.
    """
    import ray._private.node
    import ray._private.services as services
    import ray._raylet

    node: Any = ray._private.node.Node
    start_process: Any = services.start_ray_process
    get_node: Any = services.get_node
    constants: Any = ray._private.ray_constants
    hook_env = {constants.WORKER_PROCESS_SETUP_HOOK_ENV_VAR: setup_hook}

    def skip_dashboard(node: Any, **kwargs: Any) -> None:
        node._webui_url = ""  # Ray's value for a disabled dashboard

    def skip_process(node: Any) -> None:
        pass

    def wait_for_node(address: str, node: str) -> Any:
        client: Any = ray._raylet.GcsClient(address=address)  # type: ignore[attr-defined]
        deadline = time.monotonic() + REGISTRATION_TIMEOUT_S
        while time.monotonic() < deadline and node not in {node_id.hex() for node_id in client.get_all_node_info()}:
            time.sleep(POLL_INTERVAL_S)
        return get_node(address, node)

    def start_process_with_env(
        command: list[str], kind: str, *args: Any, env_updates: Any = None, **kwargs: Any
    ) -> Any:
        if kind == constants.PROCESS_TYPE_RAYLET:
            command = [_adapt_raylet_argument(word, prestarted_workers) for word in command]
            env_updates = {**(env_updates or {}), **environment, **hook_env}
        return start_process(command, kind, *args, env_updates=env_updates, **kwargs)

    with (
        _patch_attribute(node, "start_api_server", skip_dashboard),
        _patch_attribute(node, "start_log_monitor", skip_process),
        _patch_attribute(node, "start_monitor", skip_process),
        _patch_attribute(services, "start_ray_process", start_process_with_env),
        _patch_attribute(services, "get_node", wait_for_node),
    ):
        yield


def mark_private() -> None:
    """Mark the connected Ray as private for all of its processes."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(PRIVATE_MARKER, b"")


def is_private() -> bool:
    """Whether the connected Ray is private; False without a connection."""
    from ray.experimental import internal_kv

    return internal_kv._internal_kv_initialized() and bool(internal_kv._internal_kv_exists(PRIVATE_MARKER))


def _adapt_raylet_argument(argument: str, prestarted_workers: int) -> str:
    """Return an argument of the raylet's command, adapted for a private Ray."""
    name, _, value = argument.partition("=")
    if name == "--num_prestart_python_workers":
        return f"{name}={prestarted_workers}"
    if name == "--maximum_startup_concurrency":
        return f"{name}={max(prestarted_workers, int(value))}"
    if name == "--dashboard_agent_command":
        import ray

        ray_agent_command = subprocess.list2cmdline([str(Path(ray.__file__).parent / "dashboard" / "agent.py")])
        agent_command = subprocess.list2cmdline(["-P", str(Path(__file__).with_name("agent.py"))])
        return f"{name}={value.replace(ray_agent_command, agent_command)}"
    return argument


@contextmanager
def _patch_attribute(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)
