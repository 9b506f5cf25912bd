"""A Ray that this process starts for itself, without the processes that nobody uses in it."""

import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOOK_S, REGISTERED_S = 0.02, 30.0
"""Seconds between two looks for a raylet, and until Ray itself looks once and gives up."""
MARK = b"rtrain: private"
"""In Ray's store: that one command has started this Ray, for itself, without a dashboard and an autoscaler."""


@contextmanager
def lean(ahead: int, environment: Mapping[str, str], first: str) -> Iterator[None]:
    """A Ray that `ray.init` starts within the block has `ahead` worker processes that wait for work. All that its
    raylet starts has `environment` beside this process's own, and each worker calls `first`, a function by its dotted
    name, before it takes work.

    It lacks the dashboard's process, for whose start `ray.init` would wait though no dashboard is asked for; the log
    monitor, which reads every log file again and again to forward lines; and the monitor of an autoscaler, which it
    does not have. Its agent is ours (`agent`). Each of the three imports Ray, on the cores on which a command starts.
    `ray.init` looks every second whether the raylet is there; here it is looked for more often.
    """
    import ray._private.node
    import ray._private.services as services
    import ray._raylet

    node: Any = ray._private.node.Node
    usual: Any = services.start_ray_process
    usual_look: Any = services.get_node
    constants: Any = ray._private.ray_constants
    hook = {constants.WORKER_PROCESS_SETUP_HOOK_ENV_VAR: first}

    def without_dashboard(node: Any, **asked: Any) -> None:
        node._webui_url = ""  # as Ray has it for a dashboard that nobody asked for

    def left_out(node: Any) -> None:
        pass

    def there(address: str, node: str) -> Any:
        client: Any = ray._raylet.GcsClient(address=address)  # type: ignore[attr-defined]
        give_up = time.monotonic() + REGISTERED_S
        while time.monotonic() < give_up and node not in {one.hex() for one in client.get_all_node_info()}:
            time.sleep(LOOK_S)
        return usual_look(address, node)

    def started(command: list[str], kind: str, *given: Any, env_updates: Any = None, **named: Any) -> Any:
        if kind == constants.PROCESS_TYPE_RAYLET:
            command = [_raylets(word, ahead) for word in command]
            env_updates = {**(env_updates or {}), **environment, **hook}
        return usual(command, kind, *given, env_updates=env_updates, **named)

    with (
        _replaced(node, "start_api_server", without_dashboard),
        _replaced(node, "start_log_monitor", left_out),
        _replaced(node, "start_monitor", left_out),
        _replaced(services, "start_ray_process", started),
        _replaced(services, "get_node", there),
    ):
        yield


def mark() -> None:
    """Say to all processes of the Ray that this one is connected to that it is a private one."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(MARK, b"")


def is_private() -> bool:
    """Whether the Ray that this process is connected to is a private one; without a Ray it is not."""
    from ray.experimental import internal_kv

    return internal_kv._internal_kv_initialized() and bool(internal_kv._internal_kv_exists(MARK))


def _raylets(word: str, ahead: int) -> str:
    """A word of the raylet's command as a lean Ray has it."""
    name, _, value = word.partition("=")
    if name == "--num_prestart_python_workers":
        return f"{name}={ahead}"
    if name == "--maximum_startup_concurrency":
        return f"{name}={max(ahead, int(value))}"
    if name == "--dashboard_agent_command":
        import ray

        stock = subprocess.list2cmdline([str(Path(ray.__file__).parent / "dashboard" / "agent.py")])
        ours = subprocess.list2cmdline(["-P", str(Path(__file__).with_name("agent.py"))])
        return f"{name}={value.replace(stock, ours)}"
    return word


@contextmanager
def _replaced(owner: Any, name: str, by: Any) -> Iterator[None]:
    usual = getattr(owner, name)
    setattr(owner, name, by)
    try:
        yield
    finally:
        setattr(owner, name, usual)
