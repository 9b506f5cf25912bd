"""One HTTP endpoint on Ray Serve: its stock proxy on the head, and replicas that each hold the whole path.

A replica is engine, batcher and application in one process: a second deployment for the model would add a hop that
costs more than the model does. This is the only module of the package that imports ray.
"""

import errno
import http.client
import json
import logging
import re
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import prometheus_client
import ray
import ray.serve
from fastapi import FastAPI
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from ray.actor import ActorHandle
from ray.serve.config import BackpressureConfig, HTTPOptions, ProxyLocation
from ray.serve.schema import LoggingConfig

import rtrain.artifact
from rtrain import ray_internals
from rtrain.config import Serve
from rtrain.errors import UserError, quoted
from rtrain.predict import Predictor
from serve import access
from serve.app import Service, build_app

DEPLOYMENT = "rtrain"
REPLICA_CPUS = 0
"""Logical CPUs that a replica reserves. Ray only counts them, and a replica that finds too few, beside a training run
say, waits for ever without a word. What the engine really uses is limited by `serve.threads`."""
CONSTRUCTOR_ATTEMPTS = 1
"""What fails while an artefact is loaded fails again; Ray's default of 20 attempts takes minutes."""
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 2.0, 5.0
"""A hung replica is replaced after three misses; Ray's defaults need two minutes for that."""
READY_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 30.0
PORTS_TRIED = 20
"""How many ports above one in use are tried, to name a free one."""
ASK_S = 2.0
"""Seconds in which an endpoint of ours says which model it serves."""


@ray.serve.ingress()
class Replica:
    """Loads the artefact in its constructor, so that a bad one never takes traffic."""

    def __init__(self, artifact: Path, settings: Serve):
        self._predictor = Predictor.load(artifact, settings.threads)
        self._settings = settings

    def __serve_build_asgi_app__(self) -> FastAPI:
        several = self._settings.replicas > 1
        app = build_app(self._predictor, self._settings, self._sum_of_replicas if several else None)
        self._service: Service = app.state.service
        return app

    def check_health(self) -> None:
        if not self._service.ready:
            raise RuntimeError("an engine call has not returned within the deadline")

    def exposition(self) -> str:
        return self._service.exposition()

    async def _sum_of_replicas(self) -> str:
        context = ray.serve.get_replica_context()
        handle = ray.serve.get_deployment_handle(context.deployment, context.app_name)
        return sum_expositions(await handle.broadcast("exposition").results_async())


class Endpoint:
    """A running endpoint; leaving its `with` block ends it and all that it started."""

    def __init__(self, url: str, address: "Address"):
        self.url = url
        self._address = address
        self._closed = False

    def __enter__(self) -> "Endpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let requests in progress end, stop Ray Serve, wait until nothing of it is left. Again is harmless."""
        # Where Ray has ended, so has the endpoint; to ask for its actors would start another Ray.
        if self._closed or not ray.is_initialized():
            return
        self._closed = True
        controller: Any = _controller()
        if controller is not None:
            # ray.serve.shutdown() alone awaits a call that dies with the controller, which Ray reports on stdout.
            ray.get(controller.graceful_shutdown.remote(wait=False))
            _until(lambda: _controller() is None, CLOSE_TIMEOUT_S)
        ray.serve.shutdown()
        # The proxy is told to go before the controller goes, and may outlive it by a moment.
        _until(lambda: not _actors(), CLOSE_TIMEOUT_S)
        _until(self._address.is_free, CLOSE_TIMEOUT_S)


def start(artifact: Path, settings: Serve, name: str | None = None) -> Endpoint:
    """Serve the artefact on the Ray that this process is connected to; returns when `/v2/health/ready` answers 200.

    Refuses, before anything starts, an address that is open to others, a damaged artefact, a port in use and a Ray that
    serves already: the HTTP settings of a running Ray Serve cannot be changed, and `close` would end the other's
    endpoint with ours.
    """
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # importing ray.serve has set it to INFO, a line a step
    access.check(settings)
    checked = rtrain.artifact.read(artifact)
    access.admit(checked, artifact, settings)
    if _controller() is not None:
        raise UserError("this Ray runs Ray Serve already; close that endpoint first, or start a Ray of your own")
    address = free_address(settings.host, settings.port)
    if settings.grpc_port and not Address(settings.host, settings.grpc_port).is_free():
        place = f"port {settings.grpc_port} on {settings.host} is in use"
        raise UserError(f"serve.grpc_port: {place}; end the program that has it, or write another port")
    endpoint = Endpoint(address.url, address)
    try:
        _deploy(artifact.resolve(), settings, name or checked.name, address.port)
        _await_ready(address)
    except BaseException:  # Ctrl-C too must leave nothing behind
        endpoint.close()
        raise
    return endpoint


def _deploy(artifact: Path, settings: Serve, name: str, port: int) -> None:
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    # Each request holds a text at least, so that this many reach our own queue, whose 503 says when to come back.
    ongoing = settings.max_queue_rows + 2 * settings.max_batch_rows
    configured = ray.serve.deployment(
        name=DEPLOYMENT,
        num_replicas=settings.replicas,
        ray_actor_options={"num_cpus": REPLICA_CPUS},
        max_ongoing_requests=max(64, ongoing),
        max_queued_requests=max(64, ongoing),
        backpressure_config=BackpressureConfig(status_code=503, retry_after_s=1),
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        max_constructor_retry_count=CONSTRUCTOR_ATTEMPTS,
        # A request is over by its deadline; what is still running then will not be answered.
        graceful_shutdown_timeout_s=settings.deadline_s + 1,
        graceful_shutdown_wait_loop_s=0.1,
        logging_config=quiet,
    )
    application = configured(Replica).bind(artifact, settings)
    ray.serve.start(
        proxy_location=ProxyLocation.HeadOnly,
        http_options=HTTPOptions(host=settings.host, port=port),
        logging_config=quiet,
    )
    try:
        ray.serve.run(application, name=name, route_prefix="/", logging_config=quiet)
    except RuntimeError as error:
        status = ray.serve.status().applications.get(name)
        message = status.deployments[DEPLOYMENT].message if status and status.deployments else str(error)
        raise UserError(f"the model cannot be served: {cause(message)}") from None


def _await_ready(address: "Address") -> None:
    """Over HTTP, as a client would: the proxy learns of a new route some time after the replicas are up."""

    def ready() -> bool:
        connection = http.client.HTTPConnection(address.reachable, address.port, timeout=5)
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    if not _until(ready, READY_TIMEOUT_S):
        raise UserError(f"{address.url} was not ready after {READY_TIMEOUT_S:.0f} s; see the logs of Ray Serve")


def cause(message: str) -> str:
    """What was raised at the end of a traceback, without its class; the whole where there is no traceback."""
    lines = message.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  ")]
    return re.sub(r"^[\w.]+: ", "", "\n".join(lines[frames[-1] + 1 :])) if frames else message


def _controller() -> ActorHandle[Any] | None:
    try:
        name, namespace = ray_internals.serve_controller()
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None


def _actors() -> list[str]:
    """Ray Serve's own actors: controller, proxies, replicas."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["namespace"] == ray_internals.serve_controller()[1]]


def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    give_up = time.monotonic() + timeout_s
    while not (met := condition()) and time.monotonic() < give_up:
        time.sleep(0.02)
    return met


# ----------------------------------------------------------------------------------------------------------- address


@dataclass(frozen=True)
class Address:
    host: str
    port: int

    @property
    def reachable(self) -> str:
        """A host to connect to, where `host` means every interface."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)

    @property
    def url(self) -> str:
        host = f"[{self.reachable}]" if ":" in self.reachable else self.reachable
        return f"http://{host}:{self.port}"

    def is_free(self) -> bool:
        try:
            _bind(self.host, self.port)
        except OSError:
            return False
        return True


def free_address(host: str, port: int) -> Address:
    """The address to serve on; port 0 takes a free one. Ray's proxy itself would share a port with another program."""
    try:
        return Address(host, _bind(host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(_in_use(host, port)) from None
        reason = error.strerror or error
        raise UserError(f"cannot listen on {host}, port {port}: {reason}; correct serve.host or serve.port") from None


def _in_use(host: str, port: int) -> str:
    """What holds a port, where it is an endpoint of ours, and which one is free instead."""
    model = _model_at(Address(host, port))
    holder = f" by rtrain, which serves {model}" if model else ""
    after = next((one for one in range(port + 1, port + 1 + PORTS_TRIED) if Address(host, one).is_free()), 0)
    free = f"--port {after}, which is free" if after else "--port 0, which takes a free one"
    return f"port {port} on {host} is in use{holder}; end the program that has it, or write {free}"


def _model_at(address: "Address") -> str | None:
    """Name and version of the model that an endpoint of rtrain's serves there; None where anything else answers."""
    connection = http.client.HTTPConnection(address.reachable, address.port, timeout=ASK_S)
    try:
        connection.request("GET", "/v2")
        answer = connection.getresponse()
        document = json.loads(answer.read(1 << 12))
        name, version = answer.headers["x-model-name"], answer.headers["x-model-version"]
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    ours = isinstance(document, dict) and document.get("name") == "rtrain" and name
    return f"{quoted(unquote(name))} (version {quoted(version)})" if ours else None


def _bind(host: str, port: int) -> int:
    """The port that was bound, and let go again."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        # As servers do: without it, connections that ended a minute ago still hold the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        found: int = listener.getsockname()[1]
    return found


# ----------------------------------------------------------------------------------------------------------- metrics


class _Families(NamedTuple):
    families: list[Metric]

    def collect(self) -> list[Metric]:
        return self.families


def sum_expositions(texts: Iterable[str]) -> str:
    """One exposition whose samples are the sums over `texts`: right for counters, histograms and lengths of queues."""
    families: dict[str, Metric] = {}
    totals: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            if family.name.endswith("_created"):  # times of creation have no sum
                continue
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            sums = totals.setdefault(family.name, {})
            for sample in family.samples:
                key = (sample.name, tuple(sample.labels.items()))
                sums[key] = sums.get(key, 0.0) + sample.value
    for name, sums in totals.items():
        for (sample_name, labels), value in sums.items():
            families[name].add_sample(sample_name, dict(labels), value)
    return prometheus_client.generate_latest(_Families(list(families.values()))).decode()
