"""A private Ray: the private names by which it is started without what nobody uses, and what it then is."""

import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rtrain.ray_internals import agent, private


def test_the_raylet_is_started_with_what_was_asked_for_and_other_processes_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray
    import ray._private.node
    import ray._private.services as services

    started: list[Any] = []
    monkeypatch.setattr(
        services, "start_ray_process", lambda command, kind, *given, **named: started.append((command, named))
    )
    file = Path(ray.__file__).parent / "dashboard" / "agent.py"
    command = [
        "raylet",
        "--num_prestart_python_workers=4",
        f"--dashboard_agent_command=python -u {file} --head",
        "--maximum_startup_concurrency=2",
    ]
    usual: Any = ray._private.node.Node.start_log_monitor
    node = SimpleNamespace()
    with private.lean(3, {"A": "1"}, "some.function"):
        starts: Any = services.start_ray_process
        starts(command, "raylet", fate_share=True, env_updates={"B": "2"})
        starts(command, "gcs_server", True)
        for name in ("start_api_server", "start_log_monitor", "start_monitor"):
            getattr(ray._private.node.Node, name)(node)
    hook = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
    ours = f"--dashboard_agent_command=python -u -P {agent.__file__} --head"
    assert started == [
        (
            ["raylet", "--num_prestart_python_workers=3", ours, "--maximum_startup_concurrency=3"],
            {"fate_share": True, "env_updates": {"A": "1", "B": "2", hook: "some.function"}},
        ),
        (command, {"env_updates": None}),
    ]
    assert vars(node) == {"_webui_url": ""}
    assert ray._private.node.Node.start_log_monitor is usual


def test_the_agent_says_what_a_raylet_waits_for_and_ends_with_it(tmp_path: Path) -> None:
    """By the files in which Ray reads what its own agent says. `sh` is the raylet."""
    import ray._raylet

    raylet: Any = ray._raylet
    names = [
        getattr(raylet, f"{name}_PORT_NAME") for name in ("METRICS_AGENT", "METRICS_EXPORT", "DASHBOARD_AGENT_LISTEN")
    ]
    assert list(agent.PORTS) == names
    source = (Path(ray.__file__).parent / "dashboard" / "agent.py").read_text()
    for line in ("            persist_port(\n                self.session_dir,\n", "                -1,\n"):
        assert source.count(line) >= 2
    node = "0a" * 28
    given = [sys.executable, "-P", agent.__file__, f"--session-dir={tmp_path}", f"--node-id={node}", "--head"]
    script = f"RAY_RAYLET_PID=$$ {shlex.join(given)} & echo $!; wait"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        started = psutil.Process(int(process.stdout.readline()))
        try:
            found = [raylet.wait_for_persisted_port(str(tmp_path), node, name, timeout_ms=10_000) for name in names]
            assert found == [-1, -1, -1]
            assert started.is_running()
        finally:
            process.kill()
    _, alive = psutil.wait_procs([started], timeout=10)
    assert alive == []


def test_a_raylet_is_looked_for_until_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray._private.services as services
    import ray._raylet

    looks: list[dict[Any, Any]] = [{}, {b"\x01": None}, {b"\x01": None, b"\x02": None}]

    class Client:
        def __init__(self, address: str):
            assert address == "here:1"

        def get_all_node_info(self) -> dict[Any, Any]:
            return looks.pop(0)

    monkeypatch.setattr(ray._raylet, "GcsClient", Client)
    monkeypatch.setattr(services, "get_node", lambda address, node: (address, node, len(looks)))
    begun = time.monotonic()
    with private.lean(1, {}, "some.function"):
        assert services.get_node("here:1", "02") == ("here:1", "02", 0)
    assert time.monotonic() - begun < 0.9  # Ray's own would have slept for two seconds


def test_the_mark_is_kept_in_the_cluster_s_store(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.experimental import internal_kv

    store: dict[bytes, bytes] = {}
    monkeypatch.setattr(internal_kv, "_internal_kv_put", store.__setitem__)
    monkeypatch.setattr(internal_kv, "_internal_kv_exists", store.__contains__)
    monkeypatch.setattr(internal_kv, "_internal_kv_initialized", lambda: True)
    assert not private.is_private()
    private.mark()
    assert private.is_private()
