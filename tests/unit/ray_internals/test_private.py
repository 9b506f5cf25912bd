"""A private Ray: the private names by which it is started without what nobody uses, and what it then is."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from rtrain.ray_internals import agent


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
